"""A stage's live bytes over a step: the peak is the model's one formula, nothing stays, nothing is negative."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tools.estimate.configuration import Configuration, Recompute, even_layers
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import stage_memory, static_memory, static_modules
from tools.estimate.memory.time_line import KEPT, WORKING, Owner, Timed, bands, draw, simulated, stitch, time_line
from tools.model import Model, pattern_of
from tools.pipeline.schedules import Op
from tools.recipe.load import load_recipe

MODEL = Model(pattern_of(12), hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=192, vocab=512)
MOE = replace(MODEL, pattern=pattern_of(12, 8, 1), experts=8, top_k=2, expert_ffn=32, shared_ffn=32, mtp=1)


@st.composite
def runs(draw):
    pp = draw(st.integers(1, 4))
    schedule = (
        draw(st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "seqvpp", "zero_bubble_v"])) if pp > 1 else "1f1b"
    )
    chunks = {"interleaved_1f1b": draw(st.integers(2, 3)), "seqvpp": 2, "zero_bubble_v": 2}.get(schedule, 1)
    model = draw(st.sampled_from([MODEL, MOE]))
    layers = even_layers(12, pp, chunks, model.mtp)
    if schedule == "zero_bubble_v":
        layers = (layers[0], layers[1][::-1])
    full = tuple(tuple(draw(st.integers(0, count)) for count in row) for row in layers)
    recompute = draw(
        st.sampled_from([Recompute(), Recompute(full=layers), Recompute(full=full), Recompute(select=full)])
    )
    ranks = {"dp": draw(st.sampled_from([1, 2])), "tp": draw(st.sampled_from([1, 2]))}
    graph = draw(st.booleans())
    return Configuration(
        model,
        pp=pp,
        ep=ranks["dp"] if model.experts else 1,
        layers=layers,
        schedule=schedule,
        sequence=128,
        micro_batches=pp * draw(st.integers(2, 4)),
        recompute=recompute,
        training_graph=graph,
        keep_gathered=graph,
        shard_weights=not graph and draw(st.booleans()),
        **ranks,
    )


def line_of(config, stage, rng):
    shape = (config.chunks, config.pp)
    return time_line(config, stage, simulated(config, rng.uniform(1, 2, shape), rng.uniform(2, 4, shape), 0.1))


@given(config=runs(), data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=150)
def test_the_line_has_the_models_peak_and_ends_as_it_began(config, data, seed):
    stage = data.draw(st.integers(0, config.pp - 1))
    line, memory = line_of(config, stage, np.random.default_rng(seed)), stage_memory(config, stage)
    assert line.peak == pytest.approx(memory.peak, rel=1e-9)
    last = -2 if memory.update else -1  # of the passes
    assert line.total[0] == line.total[last] == pytest.approx(memory.static, rel=1e-9)
    assert line.labels[0] == line.labels[last] == ""
    if memory.update:
        assert line.labels[-1] == "update" and line.total[-1] == pytest.approx(memory.in_update, rel=1e-9)
    assert (line.live >= 0).all() and (np.diff(line.edges) >= 0).all()
    assert len(line.edges) == len(line.labels) + 1 == len(line.live) + 1
    assert sum(size for _, size in line.at_peak()) == pytest.approx(line.peak, rel=1e-9)


@given(config=runs(), data=st.data())
@settings(max_examples=100)
def test_modules_add_up_to_the_parts(config, data):
    stage = data.draw(st.integers(0, config.pp - 1))
    found = static_modules(config, stage)
    for part, size in zip(("weights", "state", "accumulated", "gathered"), static_memory(config, stage), strict=True):
        assert sum(own for (name, _), own in found.items() if name == part) == pytest.approx(size, rel=1e-9)


def slow_waiting(order, sizes):
    """Bytes that wait while each pass runs: a set of micro-batches, walked pass by pass."""
    held, found = set(), []
    split = {op[1:] for op in order if op.kind == "W"}  # of some micro-batches only
    for op in order:
        held |= {(op.micro_batch, op.chunk)} if op.kind == "F" else set()
        found.append(sum(sizes[chunk] for _, chunk in held))
        held -= {(op.micro_batch, op.chunk)} if op.kind == ("W" if op[1:] in split else "B") else set()
    assert not held
    return found


@given(config=runs(), data=st.data())
@settings(max_examples=100)
def test_what_is_kept_is_freed_by_its_own_backward(config, data):
    from tools.estimate.memory.model import chunk_activations

    stage = data.draw(st.integers(0, config.pp - 1))
    one = np.ones((config.chunks, config.pp))
    simulation = simulated(config, one, 2 * one)
    line = time_line(config, stage, simulation)
    columns = [place for place, owner in enumerate(line.owners) if owner.part == KEPT]
    kept = [
        row[columns].sum() for row, label in zip(line.live, line.labels, strict=True) if label[:2] in ("F ", "B ", "W ")
    ]
    assert kept == pytest.approx(slow_waiting(simulation.orders[stage], chunk_activations(config, stage)), rel=1e-9)


def test_moments_inside_a_pass_share_its_time():
    own, kept = Owner("weights", "norms"), Owner(KEPT, "experts")
    passes = [Timed(Op("F", 0, 0), 1.0, 3.0), Timed(Op("B", 0, 0), 3.0, 4.0)]
    inside = {"F": [{}, {kept: 1.0}], "B": [{kept: 5.0}]}
    line = stitch(passes, {own: 10.0}, [{kept: 2.0}], lambda op: inside[op.kind], 5.0)
    assert line.edges.tolist() == [0, 1, 2, 3, 4, 5]
    assert line.total.tolist() == [10, 12, 13, 17, 10]
    assert line.labels == ("", "F 0.0", "F 0.0", "B 0.0", "")
    assert line.at_peak() == [(own, 10.0), (kept, 7.0)]
    assert line.as_json()["peak"] == {"bytes": 17, "moment": 3, "pass": "B 0.0"}


def test_the_fullest_moment_is_one_of_a_backward_where_a_forward_is_as_full():
    passes = [Timed(Op("F", 0, 0), 0.0, 1.0), Timed(Op("B", 0, 0), 1.0, 3.0)]
    owner, inside = Owner(KEPT, "attention"), Owner(WORKING, "a layer")
    line = stitch(passes, {}, [{owner: 5.0}], lambda op: [{inside: 2.0}], 3.0)
    assert line.labels[line.fullest] == "B 0.0" and line.peak == 7.0
    forward = stitch(passes, {}, [{owner: 5.0}], lambda op: [{inside: 2.0 + (op.kind == "F")}], 3.0)
    assert forward.labels[forward.fullest] == "F 0.0"


def test_bands_of_the_picture_add_up_to_the_line(tmp_path):
    config = from_recipe(load_recipe("recipes/telechat3_105b/pretrain_4k.yaml"))
    config = replace(config, recompute=Recompute(), micro_batches=16)
    one = np.ones((config.chunks, config.pp))
    line = time_line(config, 0, simulated(config, one, 2 * one))
    found = bands(line)
    assert np.allclose(sum(sizes for _, _, sizes in found), line.total)
    assert len({name for name, _, _ in found}) == len(found)
    text = draw(line, "stage 0", 2.0**36, tmp_path / "a.svg").read_text("utf-8")
    assert "kept: dispatch" in text and "limit, 64.0 GiB" in text


@pytest.mark.parametrize(("schedule", "layers"), [("gpipe", ((12,),)), ("interleaved_1f1b", ((6,), (6,)))])
def test_one_stage_accumulates_one_micro_batch_after_the_other(schedule, layers):
    config = Configuration(MODEL, layers=layers, schedule=schedule, micro_batches=4, recompute=Recompute())
    one = np.ones((len(layers), 1))
    assert time_line(config, 0, simulated(config, one, 2 * one)).peak == pytest.approx(stage_memory(config, 0).peak)


def test_a_schedule_that_cannot_run_is_refused():
    config = Configuration(MODEL, pp=2, layers=((6, 6),), schedule="zero_bubble_v", micro_batches=4)
    with pytest.raises(RecipeError):
        simulated(config, np.ones((1, 2)), np.ones((1, 2)))
