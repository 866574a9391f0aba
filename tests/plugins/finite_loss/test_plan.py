import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from plugins.errors import RecipeError
from plugins.finite_loss.plan import METRICS, Settings, Watch, not_finite, undefined_parts

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
