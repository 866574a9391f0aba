import json
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindformers import MindFormerConfig
from mindformers.tools.register import MindFormerRegister
from mindspore import nn

from launch.workers.metrics import FirstStep, RecordingLossMonitor, enable, metrics_file
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


@pytest.mark.parametrize(
    ("stages", "micro_steps", "coefficient", "value", "known"),
    [
        (2, 1, 0.0, float("nan"), None),
        (1, 2, 0.0, float("nan"), None),
        (1, 2, 0.0, 0.5, 0.5),
        (1, 1, 0.0, float("nan"), float("nan")),
        (2, 1, 0.1, float("nan"), float("nan")),
    ],
)
def test_a_loss_that_mindformers_divides_by_0_is_not_known(monkeypatch, stages, micro_steps, coefficient, value, known):
    model = {"num_hidden_layers": 2, "moe_aux_loss_coeff": coefficient, "seq_length": 8}
    config = MindFormerConfig(
        output_dir="x",
        model={"model_config": model},
        parallel_config={"pipeline_stage": stages},
        runner_config={"gradient_accumulation_steps": micro_steps},
    )
    for name in ("run_dir", "seq_length", "columns", "undefined"):
        monkeypatch.setattr(RecordingLossMonitor, name, getattr(RecordingLossMonitor, name))
    monkeypatch.setattr(MindFormerRegister, "register_cls", lambda *_, **__: None)
    enable(config)
    monitor = object.__new__(RecordingLossMonitor)
    assert monitor._balancing(ms.Tensor(value)) == pytest.approx(known, nan_ok=True)
