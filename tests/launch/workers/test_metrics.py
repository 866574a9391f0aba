import json
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from launch.workers.metrics import FirstStep, RecordingLossMonitor, metrics_file
from tests.plugins.semi_auto_cpu.collecting import attributes, collectives
from tests.plugins.sinking import fetching


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


@pytest.mark.parametrize("sink", [False, True])
def test_the_first_line_tells_what_the_train_step_holds_in_sink_mode_too(tmp_path, monkeypatch, sink):
    monkeypatch.setattr(RecordingLossMonitor.__base__, "print_output_info", lambda *_: None)
    monkeypatch.setattr(RecordingLossMonitor, "run_dir", str(tmp_path))
    step = nn.TrainOneStepCell(nn.Dense(2, 3), nn.Momentum(nn.Dense(2, 3).trainable_params(), 0.1, 0.9))
    monitor = object.__new__(RecordingLossMonitor)
    monitor.learning_rate, monitor.global_batch_size, monitor.began = ms.Tensor(0.1), 4, 1.0
    params = SimpleNamespace(train_network=fetching(step) if sink else step)
    parts = (None, None, None, None)
    monitor.print_output_info(params, 1, 1, 0.0, 1, 10, 2.5, 30.0, False, 1.0, "", 0.1, 0.7, *parts)
    header, line = map(json.loads, metrics_file(tmp_path, 0).read_text().splitlines())
    assert header["held_bytes"]["weight"] >= 36 and line["loss"] == 2.5
    assert header["software"]["mindspore"] == ms.__version__ and header["software"]["python"]
