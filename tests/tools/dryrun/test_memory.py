"""Memory of a stage by what holds it; the compiled stage's line, whose peak is the reported total."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tools.dryrun.activations import activations_of, curve_of, curves_of, moments_of, peak_bytes, put_together
from tools.dryrun.graph_text import Pass, most_saved, passes_of, read_graph, waiting
from tools.dryrun.memory import (
    ACCUMULATED,
    STATE,
    WEIGHT,
    Held,
    at_fullest,
    exchange,
    fit_of,
    hccl_buffers,
    is_update,
    kind_of,
    line_of,
    memory_of,
    on_host,
    over_limit,
    total,
    unsure,
    update_of,
)
from tools.dryrun.rank import parameters_of
from tools.estimate.memory.room import DOES_NOT_FIT, FITS, NO_LIMIT, UNKNOWN
from tools.estimate.memory.time_line import KEPT, Owner
from tools.hardware.units import GIB
from tools.pipeline.schedules import operations
from tools.recipe.view import limit_of


def held(name="decoder.layers.0.w", kind=WEIGHT, dtype="Float32", shape=(8, 4), part=(4, 4), shards=2):
    return Held(name, kind, dtype, shape, part, shards)


def test_a_rank_keeps_its_slice_over_the_shards():
    one = held()
    assert (one.elements, one.bytes) == (8, 32)
    assert one.copies(ranks=16) == 4  # 16 ranks x 8 of 32 numbers
    assert held(dtype="BFloat16").bytes == 16
    away = replace(one, on_host=True)
    assert (one.host_bytes, away.bytes, away.host_bytes) == (0, 0, 32)


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


def test_moving_experts_takes_twice_the_largest_slice_beside_what_is_kept():
    experts = held("decoder.layers.1.mlp.experts.weight1", dtype="BFloat16", shape=(8, 8), part=(8, 4), shards=2)
    other = held("decoder.layers.1.mlp.shared_experts.w", shape=(64, 64), part=(64, 64), shards=1)
    found = exchange([(0, [other]), (3, [experts, other])], limit=10**6)
    assert found == {"stage": 3, "bytes": 2 * 16 * 4, "held": 2 * 16 * 4 + 32 + 64 * 64 * 4, "fit": FITS}
    assert exchange([(3, [experts])], limit=100)["fit"] == DOES_NOT_FIT
    assert exchange([(3, [experts])], limit=0)["fit"] == NO_LIMIT and exchange([(0, [other])], limit=1) is None


def test_hccl_keeps_two_buffers_for_each_communicator_of_a_rank():
    calls = [{"group": 0}, {"group": 1}, {"group": 2}, {"group": 3, "me": 0, "peer": 16}]  # a Send has no part in it
    ranks = [{"graph": {"groups": [[0, 1], [0, 8], [0, 1], [0, 16]], "collectives": calls}}]
    ranks += [{"graph": {"groups": [[2, 3]], "collectives": calls[:1]}}, {}]
    assert hccl_buffers(ranks) == {"communicators": 2, "bytes": 2 * 2 * 200 * 1024**2}
    assert hccl_buffers([{}]) == {"communicators": 0, "bytes": 0}


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


def test_the_update_divides_each_gradient_and_clears_each_sum():
    """The largest sum takes two more tensors of its size; frozen weights and moments have no gradient."""
    sums = [replace(held(name=f"accu_grads.{name}", kind=ACCUMULATED, dtype="BFloat16"), shards=1) for name in "ab"]
    weights = [held(name="a", dtype="BFloat16"), held(name="b", dtype="BFloat16"), held(name="frozen")]
    every = [*weights, *sums, held(name="adam_m.a", kind=STATE)]
    assert update_of(every, sharded=True) == 2 * (8 * 2) + 2 * 16 * 2
    assert update_of(every, sharded=False) == 2 * (8 * 4) + 2 * 16 * 2
    assert update_of(weights, sharded=True) == 0
    graph = {"kept": {"w": 50}, "activations": [{"forward": 9, "saved": 5, "backward": 7}]}
    passes = [Pass("F", 0, 0), Pass("B", 0, 0)]
    for update, name in ((20, "B 0.0"), (200, "update")):
        memory, line = memory_of(every, graph, passes, 0, update), line_of(every, graph, passes, update)
        assert line.peak == memory.total and line.labels[line.fullest] == name
        assert is_update(memory.as_json()) == (name == "update")
        parts = ("weights", "state", "accumulated", "gathered", "saved", "working", "update")
        assert sum(at_fullest(memory.as_json(), part) for part in parts) == memory.total


def test_limit_of_a_recipe():
    assert limit_of({"context": {"max_device_memory": "55.5GB"}}) == int(55.5 * GIB)
    assert limit_of({"context": {}}) == 0
    with pytest.raises(RecipeError, match=r"context.max_device_memory: '55' is not of the form 55.5GB"):
        limit_of({"context": {"max_device_memory": "55"}})


def test_a_stage_that_does_not_fit_is_named_with_the_keys_that_mend_it():
    sizes = {"weights": 1, "state": 2, "accumulated": 51, "gathered": 25, "saved": 3, "working": 1, "update": 0}
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
    (line,) = over_limit(
        [{"stage": 3, "memory": memory | {"update": 52 * GIB, "total": 106 * GIB, "exact": 50 * GIB}}], 55 * GIB
    )
    assert "stage 3: 106.0 GiB per device in the update (an estimate)" in line
    assert "divided gradients (52.0 GiB) and accumulated gradients (51.0 GiB)" in line


class Parameter(NamedTuple):
    name: str
    dtype: str = "Float32"


def test_what_an_optimizer_has_beside_the_weights_is_its_state():
    """All that an optimizer holds in addition to the weights counts as its state, whatever its name."""
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


@pytest.mark.parametrize("swap", [False, True])
def test_a_swapped_optimizers_moments_are_on_the_host(swap):
    """As MindFormers' own optimizer marks them."""
    from mindformers.core.optim.adamw import AdamW
    from mindspore import Parameter, Tensor

    optimizer = AdamW([Parameter(Tensor(np.ones((2, 2), np.float32)), name="decoder.w")], swap=swap)
    moments = {"adam_m.decoder.w", "adam_v.decoder.w"}
    assert moments < {item.name for item in optimizer.get_parameters()}
    assert on_host(optimizer) == (moments if swap else set())


GRAPH = Path(__file__).with_name("pipeline.ir")
HELD = [
    Held("decoder.layers.0.mlp.experts.weight1", WEIGHT, "Float32", (8, 4), (4, 4), 2),
    Held("adam_m.decoder.layers.0.self_attention.linear_q.weight", STATE, "Float32", (8, 4), (4, 4), 2),
    Held("accu_grads.output_layer.weight", ACCUMULATED, "Float32", (8, 4), (8, 4), 1),
]
SIZES = st.integers(0, 50)


@st.composite
def chunks(draw, count):
    found = []
    for _ in range(count):
        curves = {kind: draw(st.lists(SIZES, min_size=1, max_size=4)) for kind in "FB"}
        modules = draw(st.dictionaries(st.sampled_from(["experts", "norms", "dispatch"]), SIZES, min_size=1))
        most = {"forward": max(curves["F"]), "backward": max(curves["B"])}
        found.append({"saved": sum(modules.values()), **most, "modules": modules, "curves": curves})
    return found


@given(data=st.data(), stages=st.integers(2, 4), rounds=st.integers(2, 3), cut=st.booleans())
@settings(max_examples=100)
def test_the_peak_is_the_total_of_the_report(data, stages, rounds, cut):
    count = 2 if cut else 1
    graph = {"kept": {"decoder.layers.0.mlp.experts.weight1": 100}, "activations": data.draw(chunks(count))}
    stage, name = data.draw(st.integers(0, stages - 1)), "zero_bubble_v" if cut else "1f1b"
    passes = [Pass(op.kind, op.micro_batch, op.chunk) for op in operations(name, stage, stages, count, stages * rounds)]
    line, memory = line_of(HELD, graph, passes), memory_of(HELD, graph, passes, limit=0)
    assert line.peak == memory.total
    assert line.total[0] == line.total[-1] == memory.exact
    assert (line.live >= 0).all() and line.unit == "passes" and line.edges[-1] == len(passes)


def test_owners_are_modules_of_the_model():
    graph = {"kept": {"embedding.word_embeddings.weight": 7}, "activations": []}
    line = line_of(HELD, graph, [])
    found = dict(line.at_peak())
    assert found == {
        Owner("weights", "experts"): 32,
        Owner("state", "attention"): 32,
        Owner("accumulated", "head and logits"): 128,
        Owner("gathered", "embedding"): 7,
    }


def test_a_compiled_graphs_line_has_its_totals_and_its_modules():
    graph = read_graph(GRAPH)
    found = activations_of(graph, rows=64)
    passes = passes_of(graph)
    line = line_of([], {"kept": {}, "activations": found}, passes)
    assert line.peak == memory_of([], {"kept": {}, "activations": found}, passes, 0).total > 0
    for chunk in found:
        assert sum(chunk["modules"].values()) == chunk["saved"]
        assert max(chunk["curves"]["F"]) == chunk["forward"] and max(chunk["curves"]["B"]) == chunk["backward"]
        for part in chunk["parts"].values():
            assert sum(part["modules"].values()) == part["saved"]
    assert any(owner.part == KEPT for owner in line.owners)


def test_a_curve_has_the_peak_however_short_the_pass():
    for nodes in read_graph(GRAPH).graphs.values():
        for moments in (moments_of(nodes[:3], 8), moments_of(nodes, 8)):
            assert max(curve_of(moments), default=0) == peak_bytes(moments)


def test_curves_put_together_have_the_peaks_put_together():
    parts = [{"saved": 10, "forward": 18, "backward": 7}, {"saved": 1, "forward": 30, "backward": 9}]
    curves, whole = curves_of(parts), put_together(parts)
    assert curves == {"F": [18, 40], "B": [9, 7]}
    assert (max(curves["F"]), max(curves["B"])) == (whole["forward"], whole["backward"])
