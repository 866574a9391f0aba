"""A stage's activations and working memory against a schedule that is played pass by pass, tensor by tensor, for drawn
layouts and recompute tables of which no table of a recipe has the like.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.estimate.configuration import ATTENTION, EXPERTS, MLP, Configuration, Recompute, even_layers
from tools.estimate.memory.activations import mtp_option, saved
from tools.estimate.memory.model import stage_memory
from tools.estimate.memory.training_graph import embedding_pass, layer_pass, loss_pass
from tools.model import Latent, Model, pattern_of
from tools.pipeline.schedules import operations

MOE = Model(
    pattern_of(7, 12, 2), hidden=96, heads=12, kv_heads=12, head_dim=0, ffn=240, vocab=480,
    latent=Latent(query_rank=48, kv_rank=24, nope=16, rope=8, value=16), experts=12, top_k=3, expert_ffn=60,
    shared_ffn=120,
)  # fmt: skip
GRAPH = {"training_graph": True, "keep_gathered": True, "shared_whole": True}
CHUNKS = {"1f1b": 1, "gpipe": 1, "zb_h1": 1, "interleaved_1f1b": 2, "zero_bubble_v": 2}


@st.composite
def runs(draw):
    """A run of 7 layers with any degrees; each chunk of each stage recomputes as it likes."""
    schedule = draw(st.sampled_from(sorted(CHUNKS)))
    pp, chunks, mtp = draw(st.sampled_from([1, 2, 3])), CHUNKS[schedule], draw(st.integers(0, 1))
    schedule, chunks = (schedule, chunks) if pp > 1 else ("1f1b", 1)
    layers = even_layers(7, pp, chunks)
    count = draw(st.integers(1, 3)) * pp * chunks

    def table():
        rows = [[draw(st.integers(0, held)) * draw(st.booleans()) for held in row] for row in layers]
        return tuple(map(tuple, rows)) if any(map(any, rows)) else None

    groups = [(name, found) for name in (ATTENTION, MLP, EXPERTS) if (found := table())] if draw(st.booleans()) else []
    recompute = Recompute(full=table(), select=table(), communication=table(), operators=tuple(groups))
    tp, cp, dp = (draw(st.sampled_from(some)) for some in ([1, 2, 6], [1, 3], [1, 3, 6]))
    ep = draw(st.sampled_from([one for one in (1, 2, 3, 6) if dp * tp % one == 0]))
    return Configuration(
        replace(MOE, mtp=mtp, shared_ffn=draw(st.sampled_from([0, 120]))), dp=dp, tp=tp, pp=pp, cp=cp, ep=ep,
        layers=layers, schedule=schedule, sequence=72, batch=draw(st.integers(1, 2)), micro_batches=count,
        recompute=recompute, sequence_parallel=tp > 1 and draw(st.booleans()),
        shard_optimizer=draw(st.booleans()), dtype=draw(st.sampled_from(["bf16", "fp32"])), **GRAPH,
    )  # fmt: skip


def option_of(config, chunk, stage, place):
    """What the layer `place` of a chunk recomputes, one question after the other."""
    table = config.recompute
    if place < table.layers("full", chunk, stage):
        return "full"
    names = ["select"] if place < table.layers("select", chunk, stage) else []
    if not names and place < table.layers("communication", chunk, stage):
        names = ["communication"]
    return "+".join(names + [name for name, rows in table.operators if place < rows[chunk][stage]]) or "none"


def played(config, stage):
    """(most bytes kept; most kept and needed in a backward; most needed) by the passes of a stage, tensor by tensor."""
    kept, needed = {}, {}
    for chunk, kinds in enumerate(config.stage_kinds(stage)):
        tensors, passes, place = [], [0.0], 0
        for kind in kinds:
            option = mtp_option(config)
            if kind in ("dense", "moe"):
                option, place = option_of(config, chunk, stage, place), place + 1
            tensors.append(saved(config, kind, option))
            if kind in ("embedding", "mtp"):
                passes.append(embedding_pass(config))
            if kind == "head":
                passes.append(loss_pass(config, "mtp" in kinds))
            elif kind != "embedding":
                passes.append(layer_pass(config, kind, option))
        kept[chunk], needed[chunk] = tensors, max(passes)
    order = list(operations(config.schedule, stage, config.pp, config.chunks, config.micro_batches))
    if config.pp == 1:
        order = order[:2]
    ends = {op[1:]: place for place, op in enumerate(order) if op.kind in "BW"}
    there, most, moments = [], 0.0, []
    for place, op in enumerate(order):
        there += [(op[1:], size) for size in kept[op.chunk]] if op.kind == "F" else []
        held = sum(size for _, size in there)
        most = max(most, held)
        moments += [held + needed[op.chunk]] if op.kind == "B" else []
        there = [one for one in there if one[0] != op[1:]] if ends.get(op[1:]) == place else there
    return most, max(moments), max(needed.values())


@settings(max_examples=120)
@given(runs())
def test_a_stage_holds_what_its_own_passes_keep_and_need(config):
    for stage in range(config.pp):
        memory, (most, moment, needed) = stage_memory(config, stage), played(config, stage)
        assert memory.activations == pytest.approx(most, rel=1e-12)
        assert memory.working == pytest.approx(needed, rel=1e-12)
        assert memory.activations + memory.working >= moment * (1 - 1e-12)
        if config.chunks == 1:  # the fullest moment is then a backward's beginning
            assert memory.activations + memory.working == pytest.approx(moment, rel=1e-12)


@settings(max_examples=60)
@given(runs())
def test_what_other_stages_recompute_changes_nothing_on_a_stage(config):
    def only(table, stage):
        return table and tuple(tuple(n * (place == stage) for place, n in enumerate(row)) for row in table)

    table = config.recompute
    for stage in range(config.pp):
        full, select, again = (only(rows, stage) for rows in (table.full, table.select, table.communication))
        groups = tuple((name, only(rows, stage)) for name, rows in table.operators)
        own = replace(table, full=full, select=select, communication=again, operators=groups)
        alone = replace(config, recompute=own)
        if config.model.mtp and mtp_option(alone) != mtp_option(config):
            continue  # MTP recomputes as the last decoder layer does, which may be on another stage
        assert stage_memory(alone, stage) == stage_memory(config, stage)
