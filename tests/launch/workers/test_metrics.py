import json

import numpy as np

from launch.workers.metrics import FirstStep
from tests.plugins.semi_auto_cpu.collecting import attributes, collectives


def test_the_first_step_is_noted_and_nothing_before_or_behind_it(tmp_path):
    with collectives(1) as (one,):
        one.groups.ranks.rank_in("hccl_world_group")
        first = FirstStep(one, tmp_path / "metrics" / "collectives_rank_0.json")

        def call(count):
            for _ in range(count):
                one.run("AllReduce", attributes([0]), [np.ones(3, np.float32)], [np.ones(3, np.float32)])

        call(1)
        for step in (5, 6):
            first.begin()
            call(2)
            first.end(step)
            call(1)
    assert json.loads(first.file.read_text()) == {
        "step": 5,
        "calls": [["AllReduce", [0], 12, [3], "float32", None, None]] * 2,
        "places": {"hccl_world_group": 0},
    }
    assert [path.name for path in first.file.parent.iterdir()] == [first.file.name]
