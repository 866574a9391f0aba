from types import SimpleNamespace
from typing import NamedTuple

import pytest

from plugins.errors import RecipeError
from tools.dryrun.compile.rank import parameters_of
from tools.dryrun.graph.passes import Pass, most_saved, waiting
from tools.dryrun.layout import ACCUMULATED, STATE, WEIGHT, Held, kind_of, total
from tools.dryrun.memory import (
    DOES_NOT_FIT,
    FITS,
    NO_LIMIT,
    UNKNOWN,
    fit_of,
    memory_of,
    over_limit,
    unsure,
)
from tools.hardware.units import GIB
from tools.recipe.view import limit_of


def held(name="decoder.layers.0.w", kind=WEIGHT, dtype="Float32", shape=(8, 4), part=(4, 4), shards=2):
    return Held(name, kind, dtype, shape, part, shards)


def test_a_rank_keeps_its_slice_over_the_shards():
    one = held()
    assert (one.elements, one.bytes) == (8, 32)
    assert one.copies(ranks=16) == 4  # 16 ranks x 8 of 32 numbers
    assert held(dtype="BFloat16").bytes == 16


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((f"{prefix}.a.b", STATE) for prefix in ("adam_m", "adam_v", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        *((f"{prefix}.a", STATE) for prefix in ("muon_m", "pma_weight_wma", "pma_weight_sma")),
        ("accu_grads.a", ACCUMULATED),
        ("decoder.adam", WEIGHT),
        ("decoder.pma_weight_x", WEIGHT),
    ],
)
def test_kind_of_a_name(name, kind):
    assert kind_of(name) == kind


def test_memory_adds_up():
    graph = {
        "kept": {"a": 100, "b": 20},
        "activations": [{"saved": 10, "forward": 50, "backward": 70}, {"saved": 1, "forward": 90, "backward": 5}],
    }
    passes = [Pass("F", 0, 0), Pass("F", 1, 0), Pass("F", 0, 1), Pass("B", 0, 1), Pass("B", 0, 0), Pass("B", 1, 0)]
    parts = [held(), held(kind=STATE), held(kind=STATE), held(kind=ACCUMULATED, shards=1)]
    memory = memory_of(parts, graph, passes, limit=1000)
    assert (memory.weights, memory.state, memory.accumulated, memory.gathered) == (32, 64, 64, 120)
    # fullest in the pass that needs 90 while 20 wait: of the 90, 1 is what it leaves, which counts once
    assert (memory.saved, memory.working) == (2 * 10 + 1, 89)
    assert memory.exact == 280 and memory.total == 280 + 20 + 90
    assert memory.as_json()["total"] == 390
    assert total(parts, STATE) == 64


def test_a_backward_that_is_cut_in_two_frees_at_the_end_of_its_second_part():
    """zero_bubble_v: the gradients of weights are taken later and need what was kept."""
    cut = [Pass("F", 0, 0), Pass("F", 1, 0), Pass("B", 0, 0), Pass("F", 2, 0), Pass("W", 0, 0), Pass("B", 1, 0)]
    assert waiting(cut, [10]) == [0, 10, 20, 20, 30, 20]
    assert most_saved(cut, [10]) == 30
    assert most_saved([], []) == 0


@pytest.mark.parametrize(
    ("total", "exact", "error", "fit"),
    [
        (53, 30, 0.03, FITS),
        (55, 30, 0.03, UNKNOWN),
        (56, 30, 0.03, UNKNOWN),
        (56, 30, 0.0, DOES_NOT_FIT),
        (56, 55.6, 0.03, DOES_NOT_FIT),
        (58, 30, 0.03, DOES_NOT_FIT),
    ],
)
def test_within_its_error_of_the_limit_it_is_not_known_whether_a_stage_fits(total, exact, error, fit):
    memory = {"total": total * GIB, "exact": exact * GIB}
    assert fit_of(memory, 55.5 * GIB, error) == fit
    lines = unsure([{"stage": 4, "memory": memory}], 55.5 * GIB, error)
    assert len(lines) == (fit == UNKNOWN) and all("stage 4: unknown whether it fits" in line for line in lines)
    assert fit_of(memory, 0, error) == NO_LIMIT


def test_limit_of_a_recipe():
    assert limit_of({"context": {"max_device_memory": "55.5GB"}}) == int(55.5 * GIB)
    assert limit_of({"context": {}}) == 0
    with pytest.raises(RecipeError, match=r"context.max_device_memory: '55' is not of the form 55.5GB"):
        limit_of({"context": {"max_device_memory": "55"}})


def test_a_stage_that_does_not_fit_is_named_with_the_keys_that_mend_it():
    sizes = {"weights": 1, "state": 2, "accumulated": 51, "gathered": 25, "saved": 3, "working": 1}
    memory = {name: size * GIB for name, size in sizes.items()}
    memory |= {"exact": 79 * GIB, "total": 83 * GIB}
    small = dict.fromkeys(memory, GIB)
    stages = [{"stage": number, "memory": small if number == 0 else memory} for number in range(3)]
    (line,) = over_limit(stages, 55 * GIB)
    assert line.startswith(
        "context.max_device_memory: stages 1, 2: 79.0 GiB per device without activations, the limit is 55"
    )
    assert "accumulated gradients (51.0 GiB) and gathered weights (25.0 GiB)" in line
    assert "gradient_accumulation_shard" in line and "expert_parallel" in line
    memory["exact"] = 50 * GIB
    assert (
        "stage 3: 83.0 GiB per device with activations (an estimate)"
        in over_limit([{"stage": 3, "memory": memory}], 55 * GIB)[0]
    )
    assert over_limit([{"stage": 3, "memory": memory}], 0) == []


class Parameter(NamedTuple):
    name: str
    dtype: str = "Float32"


def test_what_an_optimizer_has_beside_the_weights_is_its_state():
    """Whatever it calls it."""
    weights = [Parameter("decoder.w"), Parameter("head.w")]
    own = [Parameter("second_moments.decoder.w"), Parameter("global_step", "Int32")]
    rest = [Parameter("accu_grads.decoder.w"), Parameter("decoder.bias", "BFloat16")]
    optimizer = SimpleNamespace(parameters=weights, get_parameters=lambda: [*weights, *own])
    step = SimpleNamespace(optimizer=optimizer, get_parameters=lambda: [*weights, *own, *rest])
    assert parameters_of(step) == {
        "decoder.w": (WEIGHT, "Float32", True),
        "head.w": (WEIGHT, "Float32", True),
        "second_moments.decoder.w": (STATE, "Float32", False),
        "global_step": (STATE, "Int32", False),
        "accu_grads.decoder.w": (ACCUMULATED, "Float32", False),
        "decoder.bias": (WEIGHT, "BFloat16", False),
    }
