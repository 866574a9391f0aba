"""The watch in MindFormers' own monitors, driven without a training; with one, see tests/training."""

import json
import math

import numpy as np
import pytest
from mindformers.core.callback.callback import MFLossMonitor
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn
from safetensors.numpy import save_file

from plugins import enable_plugins
from plugins.errors import RecipeError, StoppedError
from plugins.finite_loss import adapter
from plugins.finite_loss.plan import METRICS, Settings, Watch, not_finite, undefined_parts
from plugins.sealed_checkpoint.adapter import SealingCheckpointMonitor
from tests.plugins.sealed_checkpoint.test_deaths import Run
from tests.plugins.sinking import fetching

NAN, INF = math.nan, math.inf


def losses(**wrong):
    """A step's losses by name, all fine but the ones named (with _ for what is no letter)."""
    words = {name: name.replace("_", " ").replace("load balancing", "load-balancing") for name in wrong}
    return dict.fromkeys(METRICS, 1.0) | {words[name]: value for name, value in wrong.items()}


def see(watch, step=1, norm=0.5, overflow=False, scale=1.0, **wrong):
    return watch.see(step, losses(**wrong), norm, overflow, scale)


def test_the_first_step_that_is_not_finite_ends_the_run_by_default():
    watch = Watch(Settings.read({}).stop_after)
    assert see(watch, 1) is None
    assert see(watch, 2, mtp_loss=NAN, loss=NAN, norm=NAN) == "step 2: mtp loss is NaN"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lm_loss": NAN, "loss": NAN}, "lm loss is NaN"),
        ({"loss": -INF}, "loss is infinite"),
        ({"norm": INF}, "global norm is infinite"),
        ({"norm": None, "overflow": True}, "gradients overflow"),
    ],
)
def test_what_is_computed_first_is_named(wrong, words):
    assert see(Watch(1), 7, **wrong) == f"step 7: {words}"


def test_what_is_not_known_is_not_wrong():
    assert Watch(1).see(3, dict.fromkeys(METRICS), None, False, 1.0) is None


def test_an_auxiliary_loss_that_mindformers_divides_by_zero_is_not_judged():
    watch = Watch(1, undefined=undefined_parts(2, 1, 0.0))
    assert see(watch, load_balancing_loss=NAN) is see(watch, lm_loss=1.0) is None
    assert see(watch, 2, loss=NAN) == "step 2: loss is NaN"
    assert undefined_parts(1, 1, 0.0) == undefined_parts(2, 1, 1e-3) == undefined_parts(1, 2, 1e-3) == ()
    assert undefined_parts(1, 2, 0.0) == watch.undefined, "accumulated gradients take the pipeline's wrapper"


def test_gradients_that_overflow_under_a_scale_that_can_fall_are_no_fault():
    watch = Watch(1, scale_falls=True)
    assert see(watch, 1, norm=INF, overflow=True, scale=65536.0) is None
    assert see(watch, 2, norm=None, overflow=True, scale=2.0) is None
    assert see(watch, 3, norm=INF, overflow=True, scale=1.0) is None, "it has fallen to 1.0 by this very step"
    watch = Watch(1, scale_falls=True)
    assert "loss is NaN" in see(watch, 3, loss=NAN, norm=INF, overflow=True, scale=65536.0), "no scale mends a loss"
    assert "global norm" in see(Watch(1, True), 4, norm=INF, overflow=True, scale=1.0), "it can fall no further"
    assert "global norm" in see(Watch(1, True), 5, norm=INF, scale=65536.0), "the optimizer took that step"
    assert "global norm" in see(Watch(1), 6, norm=INF, overflow=True, scale=65536.0), "a fixed scale stays"


def test_steps_are_counted_in_a_row():
    watch = Watch(Settings.read({"stop_after": 3}).stop_after)
    assert [see(watch, step, norm=NAN) for step in (1, 2)] == [None, None]
    assert see(watch, 3) is None and not watch.run
    assert see(watch, 4, norm=NAN) is None
    assert see(watch, 5, norm=NAN) is None
    assert see(watch, 6, lm_loss=NAN) == (
        "step 6: lm loss is NaN, the step number 3 in a row that is not finite; the first was step 4, "
        "whose global norm is NaN"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"stop_after": 0},
            r"stop_after: 0 is not allowed; write a number of steps from 1 on, or plugins.finite_loss: False",
        ),
        ({"stop_after": 1.5}, "stop_after: 1.5"),
        ({"stop_after": True}, "stop_after: True"),
        ({"stop_afer": 1}, "did you mean 'stop_after'"),
        (3, "write `stop_after: 1` under it"),
        (None, "write `stop_after: 1` under it"),
    ],
)
def test_settings_that_are_none_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Settings.read(settings)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_one_number_in_a_file_is_found_and_its_tensor_named(tmp_path, bad, kind):
    largest = np.finfo(kind).max
    good = np.array([0.0, -0.0, largest, -largest, np.finfo(kind).tiny], kind)
    tensors = {"a": good, "count": np.array([2**31 - 1, -1], "int32"), "none": np.zeros(0, kind), "z": good.copy()}
    save_file(tensors, tmp_path / "x.safetensors")
    assert not_finite(tmp_path / "x.safetensors") is None
    tensors["z"][-1] = bad
    save_file(tensors, tmp_path / "x.safetensors")
    assert not_finite(tmp_path / "x.safetensors") == "z"


@pytest.mark.parametrize(
    ("bits", "found"), [(0x7F7F, None), (0xFF7F, None), (0x7F80, "w"), (0xFF80, "w"), (0x7FC0, "w")]
)
def test_bfloat16_too_which_numpy_does_not_know(tmp_path, bits, found):
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    numbers = np.array([0x3F80, bits], "<u2").tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + numbers)
    assert not_finite(tmp_path / "x.safetensors") == found


@pytest.fixture
def watch():
    return Watch(stop_after=3)


@pytest.fixture
def saving(tmp_path, watch):
    return Run(tmp_path, adapter._withholding(watch, adapter.end))


def test_a_step_that_is_not_finite_is_not_saved_and_the_next_is(saving, watch, tmp_path):
    saving.step(1)
    watch.run.append((2, "loss is NaN"))
    saving.step(2)
    watch.run.clear()
    saving.step(3)
    watch.run.append((4, "loss is NaN"))
    saving.params.cur_step_num = 4
    saving.end()
    assert [path.name[-1] for path in sorted(tmp_path.glob("iteration_*"))] == ["1", "3"]


def test_weights_that_an_update_spoils_are_not_sealed(saving, tmp_path):
    saving.step(1)
    weight = saving.params.network.network.weight
    weight.set_data(Tensor(np.full(weight.shape, np.inf, np.float32)))
    words = (
        r"step 2: weight is not finite after the update; resume from iteration 1 \(.*iteration_00000001\) with a lower"
    )
    with pytest.raises(StoppedError, match=words):
        saving.step(2)
    assert saving.fault(1) is None
    assert saving.fault(2) == "mini-model-0000000-0000001.safetensors: weight is not finite after the update"


class Logging(MFLossMonitor):
    """MFLossMonitor's part in a step, without its arithmetic: prints every other step, the parts of the loss last."""

    def __init__(self):
        self.initial_step = 4

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        if params.cur_step_num % 2:
            self.print_output_info(params, 1, 1, None, params.cur_step_num + 4, 10, *params.printed)

    def print_output_info(self, *args):
        self.printed = args

    def on_train_end(self, run_context):
        pass


class Training:
    """Steps with a given output, under a train step of a given loss-scale manager."""

    def __init__(self, watch, folder, manager=None):
        self.saving = Run(folder)
        self.monitor = adapter._watching(Logging, watch, adapter.end)()
        self.params = self.saving.params
        self.params.train_network.loss_scaling_manager = manager
        self.params.train_network = fetching(self.params.train_network)  # as on Ascend; on a CPU it is the step itself

    def original_args(self):
        return self.params

    def step(self, number, loss=1.0, norm=1.0, overflow=False, scale=1.0, parts=(1.0, 1.0, 1.0, 0.0)):
        logged = np.array([loss], np.float32)
        tensors = (Tensor([value], dtype) for value, dtype in [(loss, None), (norm, None)])
        loss, norm = tensors
        self.params.cur_step_num = number
        self.params.net_outputs = (loss, Tensor(overflow), Tensor(scale), Tensor(0.1), norm)
        self.params.printed = (logged, "...", *(np.array([part], np.float32) for part in parts))
        self.monitor.on_train_step_end(self)


def test_the_step_counts_from_the_beginning_of_the_run_and_the_part_is_named(tmp_path):
    training = Training(Watch(1), tmp_path)
    training.step(1)
    training.step(2)
    with pytest.raises(StoppedError, match=r"step 7: mtp loss is NaN; nothing was saved before, so start over"):
        training.step(3, loss=NAN, norm=NAN, parts=(1.0, 1.0, NAN, 0.0))
    assert training.monitor.printed[0] is training.params, "MindFormers' log is written as ever"


def test_a_step_that_is_not_printed_is_judged_too(tmp_path):
    training = Training(Watch(1), tmp_path)
    training.step(1)
    with pytest.raises(StoppedError, match=r"step 6: loss is NaN"):
        training.step(2, loss=NAN, parts=(NAN, 1.0, 1.0, 0.0))


def test_a_checkpoint_written_in_the_background_is_sealed_before_the_run_ends(tmp_path):
    training = Training(Watch(1), tmp_path)
    training.saving = saving = Run(tmp_path, async_save=True)
    training.params.list_callback = saving.params.list_callback
    saving.step(1)
    with pytest.raises(StoppedError, match="resume from iteration 1 "):
        training.step(2, loss=NAN)
    assert saving.fault(1) is None


def test_a_scale_that_falls_is_let_fall(tmp_path):
    class Fixed(nn.FixedLossScaleUpdateCell):
        pass

    falling = nn.DynamicLossScaleUpdateCell(loss_scale_value=1024, scale_factor=2, scale_window=10)
    Training(Watch(1), tmp_path, falling).step(1, norm=NAN, overflow=True, scale=1024.0)
    with pytest.raises(StoppedError, match="global norm is NaN"):
        Training(Watch(1), tmp_path, Fixed(1024.0)).step(1, norm=NAN, overflow=True, scale=1024.0)


def test_a_run_does_not_end_well_with_a_last_step_that_is_not_finite(tmp_path, watch):
    training = Training(watch, tmp_path)
    training.step(1, loss=NAN)
    with pytest.raises(StoppedError, match="step 5: loss is NaN"):
        training.monitor.on_train_end(training)


@pytest.mark.parametrize("plugins", [{}, {"finite_loss": False}, {"finite_loss": False, "step_record": {}}])
@pytest.mark.parametrize("named", [[], [{"type": "CheckpointMonitor"}], [{"type": "MFLossMonitor", "a": 1}]])
def test_a_recipe_without_a_loss_monitor_gets_one(plugins, named, monkeypatch, tmp_path):
    """Without finite_loss, too: metrics and the record of steps are written in it."""
    kind, model = MindFormerModuleType.CALLBACK, {"model_config": {}}
    monkeypatch.setitem(MindFormerRegister.registry, kind, dict(MindFormerRegister.registry[kind]))
    for name in ("run_dir", "skipped"):
        monkeypatch.setattr(SealingCheckpointMonitor, name, getattr(SealingCheckpointMonitor, name))
    config = MindFormerConfig(callbacks=named or None, model=model, plugins=plugins, output_dir=str(tmp_path))
    enable_plugins(config)
    kinds = [each["type"] for each in config.callbacks]
    assert kinds.count("MFLossMonitor") == 1 and config.callbacks[: len(named)] == named


@pytest.mark.parametrize(
    ("stages", "micro_steps", "model", "judged"),
    [
        (1, 1, {"moe_aux_loss_coeff": 0.0}, True),
        (2, 1, {"moe_aux_loss_coeff": 0.0}, False),
        (1, 2, {"moe_aux_loss_coeff": 0.0}, False),
        (1, 2, {"moe_aux_loss_coeff": 0.001}, True),
        (1, 2, {}, False),
        (2, 1, {"moe_aux_loss_coeff": 0.001, "num_hidden_layers": 2, "first_k_dense_replace": 1}, True),
        (2, 1, {"moe_aux_loss_coeff": 0.001, "num_hidden_layers": 2, "first_k_dense_replace": 2}, False),
    ],
)
def test_an_auxiliary_loss_of_0_by_0_is_not_judged(stages, micro_steps, model, judged):
    config = MindFormerConfig(
        parallel_config={"pipeline_stage": stages},
        runner_config={"gradient_accumulation_steps": micro_steps},
        model={"model_config": model},
    )
    assert adapter.undefined_of(config) == (() if judged else ("load-balancing loss",))
