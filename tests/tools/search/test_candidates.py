import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tests.tools.search.reference import every_candidate, legal
from tools.check.check import check_recipe
from tools.estimate.configuration import Configuration, Cut
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe, require_ulysses
from tools.estimate.memory.activations import saved
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.advise import advise
from tools.model import Latent, Model, pattern_of
from tools.recipe.load import load_recipe
from tools.search.candidates import (
    Funnel,
    balanced_layers,
    blocks,
    candidate_of,
    configuration,
    divisors,
    end_weight,
    meshes,
)
from tools.search.overlay import changed
from tools.search.ranking.rank import rank
from tools.search.request import Request, read_limit, request_of

MODEL = Model(
    pattern=pattern_of(7, 48, 1),
    hidden=768,
    heads=12,
    kv_heads=12,
    head_dim=64,
    ffn=3072,
    vocab=9600,
    experts=48,
    top_k=4,
    expert_ffn=384,
    shared_ffn=384,
)
BASE = Configuration(MODEL, layers=((7,),), sequence=1536, shared_whole=True, keep_gathered=True, overlap_dp=True)


def request(devices=24, batch=48, limits=(), model=MODEL, cap=50 * GIB):
    base = replace(BASE, model=model, layers=((model.layers,),))
    return Request(base, cluster("atlas_800t_a2"), devices, batch, cap, "test", limits=tuple(map(read_limit, limits)))


def enumerated(asked):
    funnel = Funnel()
    found = [
        block.candidate(row, recompute)
        for block in blocks(asked, funnel)
        for row in range(len(block))
        for recompute in block.recompute
    ]
    return found, funnel


@pytest.mark.slow
@given(devices=st.sampled_from([1, 6, 8, 24]), batch=st.sampled_from([12, 18]), dense=st.booleans())
@settings(max_examples=4)
def test_space_is_what_plain_loops_find(devices, batch, dense):
    model = replace(MODEL, pattern=pattern_of(7), experts=0, top_k=0, shared_ffn=0) if dense else MODEL
    asked = request(devices, batch, model=model)
    found, funnel = enumerated(asked)
    every = list(every_candidate(asked))
    assert Counter(found) == Counter(candidate for candidate, legal in every if legal)
    assert (funnel.total, funnel.left) == (len(every), len(found))
    assert funnel.left == funnel.total + sum(count for _, count in funnel.lines()[1:-1])


def test_every_candidate_makes_a_run_of_the_asked_size():
    asked = request()
    found, _ = enumerated(asked)
    assert {candidate.dp for candidate in found} >= {3, 6, 12}  # not only powers of two
    for candidate in found[:: max(1, len(found) // 300)]:
        config = configuration(asked, candidate)
        assert (config.devices, config.global_batch) == (24, 48)
        if candidate.recompute != "planned":
            assert candidate_of(config) == candidate


@pytest.mark.parametrize(
    ("limit", "keeps"),
    [
        ("tp<=2", lambda c: c.tp <= 2),
        ("pp=2,3", lambda c: c.pp in (2, 3)),
        ("ep%8=0", lambda c: c.ep % 8 == 0),
        ("m>4", lambda c: c.m > 4),
        ("mode!=global", lambda c: c.mode != "global"),
        ("recompute=full,planned", lambda c: c.recompute in ("full", "planned")),
        ("shard = optimizer", lambda c: c.shard == "optimizer"),
    ],
)
def test_limits_keep_what_they_say(limit, keeps):
    free, _ = enumerated(request())
    limited, funnel = enumerated(request(limits=[limit]))
    assert Counter(limited) == Counter(filter(keeps, free))
    assert 0 < len(limited) < len(free)
    assert funnel.dropped[f"--limit {limit}"] == len(free) - len(limited)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("tp", "a limit must have a name, a sign and a value"),
        ("shards=none", r"the name 'shards' is unknown \(did you mean 'shard'"),
        ("mode<global", "mode can be compared only with = or !="),
        ("mode=globl", r"not 'globl' \(did you mean 'global'"),
        ("tp<=4,8", "write one number, because only = and != take a list"),
        ("tp=four", "the value of tp must be a number"),
        ("ep%8=9", "the remainder of a division by 8 must be from 0 to 7"),
        ("ep%0=0", "0 is not a valid divisor"),
    ],
)
def test_limits_that_are_none(limit, message):
    with pytest.raises(RecipeError, match=message):
        read_limit(limit)


@given(stages=st.integers(1, 9), chunks=st.integers(1, 4), layers=st.integers(1, 60), mtp=st.integers(0, 1))
def test_balanced_layers(stages, chunks, layers, mtp):
    if layers < stages * chunks:
        return
    model = replace(MODEL, pattern=pattern_of(layers, 48, 1), mtp=mtp, vocab=96000)
    table = balanced_layers(model, 1536, stages, chunks)
    assert sum(map(sum, table)) == layers
    flat = [count for row in table for count in row]
    assert min(flat[:-1], default=1) >= 1 and flat[-1] >= 0
    loads = [sum(row[stage] for row in table) for stage in range(stages)]
    loads[-1] += end_weight(model, 1536)
    # no stage but the last, which cannot give away its end, is a layer longer than another
    assert max(loads[:-1], default=0) - min(loads) <= 1 + 1e-6


def test_the_last_chunk_of_a_v_is_inside_the_offset_and_holds_a_layer():
    model = replace(MODEL, pattern=pattern_of(9, 48, 1), mtp=0, vocab=1 << 20)
    assert balanced_layers(model, 1536, 4, 2)[1][3] == 0
    assert balanced_layers(model, 1536, 4, 2, turned=True)[1][0] == 1


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ulysses_cuts_context_parallelism_and_heads(degree):
    free, _ = enumerated(request())
    asked = replace(request(), ulysses=degree)
    kept = [one for one in free if one.cp % degree == 0 and MODEL.heads % (one.tp * degree) == 0]
    assert Counter(enumerated(asked)[0]) == Counter(kept) and kept
    assert all(legal(asked, one) for one in kept[::50])


@pytest.mark.parametrize("size", [2, 3])
def test_shards_of_an_own_size_divide_the_copies(size):
    asked = request()
    asked = replace(asked, base=replace(asked.base, shard_size=size))
    free, _ = enumerated(request())
    kept = [one for one in free if one.dp * one.cp % size == 0]
    assert Counter(enumerated(asked)[0]) == Counter(kept) and len(kept) < len(free)
    assert all(legal(asked, one) for one in kept[::50])


def test_overlapped_groups_do_not_straddle_nodes():
    asked = request()
    asked = replace(asked, hardware=replace(asked.hardware, devices_per_node=16))
    free, _ = enumerated(asked)
    kept = [one for one in free if one.ep % 16 == 0 or 16 % one.ep == 0]
    asked = replace(asked, base=replace(asked.base, ep_cut=Cut()))
    assert Counter(enumerated(asked)[0]) == Counter(kept) and len(kept) < len(free)


def test_no_tokens_are_deduplicated_for_a_model_that_the_plugin_cannot_change():
    free, _ = enumerated(request())
    kept, _ = enumerated(replace(request(), pluggable=False))
    assert Counter(kept) == Counter(one for one in free if one.mode != "deduplicated") and len(kept) < len(free)


def test_ulysses_is_read_from_the_degree_alone():
    recipe = load_recipe("recipes/telechat3_438b/pretrain_4k.yaml")
    recipe["parallel_config"]["context_parallel_algo"] = "ulysses_cp"
    assert request_of(recipe, "atlas_800t_a2").ulysses == 1
    recipe["parallel_config"]["ulysses_degree_in_cp"] = 4
    assert request_of(recipe, "atlas_800t_a2").ulysses == 4


def test_divisors_and_meshes():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert len(set(meshes(4096))) == len(list(meshes(4096))) == 455  # 12 twos into 4 degrees


def test_request_of_a_recipe():
    recipe = load_recipe("recipes/telechat3_438b/pretrain_4k.yaml")
    asked = request_of(recipe, "atlas_800t_a2")
    assert (asked.devices, asked.global_batch, asked.cap) == (4096, 16384, 45 * GIB)
    own = candidate_of(from_recipe(recipe))
    found, _ = enumerated(replace(asked, limits=tuple(map(read_limit, ["pp=8", "vpp=2", "m=64", "ep=16", "tp=2"]))))
    assert own in found  # the report's own layout is inside the space
    del recipe["context"]["max_device_memory"]
    assert request_of(recipe, "atlas_800t_a2").cap == pytest.approx(0.9 * 64e9)
    assert request_of(recipe, "atlas_800t_a2", memory_gib=30).cap == 30 * GIB
    asked = request_of(recipe, "atlas_800t_a2", memory_gib=30, reserve=2 * GIB)
    assert asked.cap == 28 * GIB and asked.site.memory == 30 * GIB  # MindSpore's limit is that of the whole job
    with pytest.raises(
        RecipeError, match=r"--memory: this limit of 1.0 GiB is not more than the 2.00 GiB .* give a larger --memory"
    ):
        request_of(recipe, "atlas_800t_a2", memory_gib=1, reserve=2 * GIB)


# heads of 64 + 64 numbers for queries and keys, 128 for values
LATENT = Model(
    ("dense",),
    hidden=2048,
    heads=32,
    kv_heads=32,
    head_dim=0,
    ffn=8192,
    vocab=32000,
    latent=Latent(0, 512, 64, 64, 128),
)
RUN = Configuration(LATENT, dp=1, tp=2, cp=4, layers=((1,),), sequence=32768, training_graph=True, keep_gathered=True)
TOKENS, HEADS = 32768 // 4, 32 // 2  # of a device
KEYS = TOKENS * HEADS * (128 + 128) * 2  # bytes of its keys and values; as many of queries and results
TIMES = TimeModel(cluster("atlas_800t_a2"))


def seconds(size, ranks, stride):
    """Of a collective, what is hidden beside computation left out."""
    return TIMES._collective(size, ranks, stride) * (1 - TIMES.reached.hidden)


def test_time_by_hand():
    def cp(degree):
        layer = TIMES.layer(replace(RUN, ulysses=degree), "dense")
        assert layer.backward.cp == layer.forward.cp  # what was gathered is kept
        return layer.forward.cp

    gathered = seconds(4 * KEYS, 4, 2)  # keys and values of the whole sequence
    assert cp(1) == pytest.approx(gathered)
    assert cp(4) == pytest.approx(gathered + seconds(2 * KEYS, 4, 2))  # queries, keys, values and results of a device
    assert cp(2) == pytest.approx(gathered + seconds(2 * KEYS, 2, 2))


def test_what_is_kept_is_the_whole_sequences_keys_whatever_the_degree():
    one, two, four = (saved(replace(RUN, ulysses=degree), "dense") for degree in (1, 2, 4))
    assert one == two == four
    assert one - saved(replace(RUN, cp=1, dp=4, sequence=32768 // 4), "dense") == 3 * KEYS


def test_without_ranks_for_the_heads_nothing_is_cut():
    assert replace(RUN, cp=1, dp=4, ulysses=4).head_parts == 1
    assert replace(RUN, cp=8, ulysses=4).head_parts == 4


def test_the_ranking_knows_it():
    asked = request(limits=["cp=4"], cap=1e15)
    plain, cut = (rank(replace(asked, ulysses=degree)) for degree in (1, 4))
    known = {tuple(cut.at(index).candidate): index for index in range(len(cut.seconds))}
    shared = [
        (index, known[key]) for index in range(len(plain.seconds)) if (key := tuple(plain.at(index).candidate)) in known
    ]
    assert shared and all(cut.seconds[there] != plain.seconds[here] for here, there in shared)


@pytest.mark.parametrize(
    ("file", "words"),
    [("telechat3_438b/context_32k", "values of width 128 as if"), ("telechat3_36b/pretrain_8k", "without MLA")],
)
def test_what_mindformers_does_not_compile_is_refused_before_the_search(file, words):
    recipe = load_recipe(f"recipes/{file}.yaml")
    asked = request_of(recipe, "atlas_800t_a2")
    require_ulysses(recipe, asked.base.model, asked.ulysses)
    recipe["parallel_config"]["ulysses_degree_in_cp"] = 2
    asked = request_of(recipe, "atlas_800t_a2")
    assert asked.base.ulysses == 2
    with pytest.raises(RecipeError, match=rf"ulysses_degree_in_cp: .*{words}.*write 1"):
        require_ulysses(recipe, asked.base.model, asked.ulysses)


def test_ep_report_knows_the_parts_of_heads():
    recipe = load_recipe("recipes/telechat3_438b/context_32k.yaml")
    whole = advise(recipe).modes["global"]
    recipe["parallel_config"]["ulysses_degree_in_cp"] = 2
    parts = advise(recipe).modes["global"]
    assert parts.whole.by_part["cp"] > whole.whole.by_part["cp"] and parts.exposed == whole.exposed


def test_muon_is_told_of_shards_that_dp_has_and_that_hold_whole_experts():
    """24 devices, 48 experts, pairs: what AdamW may shard over pairs, without dp 1 and without halves of experts."""
    asked = request()
    pairs, muon = (replace(asked, base=replace(asked.base, shard_size=2, matrix_state_item=item)) for item in (None, 4))
    (every, _), (found, funnel) = enumerated(pairs), enumerated(muon)

    def fits(each):
        shards = min(2, each.dp * each.tp * each.cp // each.ep)
        return each.shard == "none" or (each.dp >= 2 and 48 % (each.ep * shards) == 0)

    assert set(found) == {each for each in every if fits(each)} < set(every)
    assert any(each.shard != "none" for each in found) and any("Muon" in reason for reason in funnel.dropped)
    untold = replace(muon, base=replace(muon.base, shard_size=0))
    assert {each.shard for each in enumerated(untold)[0]} == {"none"}


@pytest.mark.parametrize(("experts", "shards"), [(8, {"none"}), (192, {"none", "optimizer"})])
def test_muon_shards_no_small_matrix(experts, shards):
    """A router of 8 x 1,536 float32 is below the 64 KiB from which MindSpore shards a matrix."""
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k_muon.yaml")
    sizes = {"n_routed_experts": experts, "hidden_size": 1536}
    recipe["model"]["model_config"].update(sizes)
    recipe["parallel"]["enable_parallel_optimizer"] = False
    limits = tuple(map(read_limit, ("tp=2", "cp=1", "vpp=1", "mbs=1", "ep=2,8", "recompute=full")))
    asked = request_of(recipe, "atlas_800t_a2", devices=32, limits=limits)
    found, _ = enumerated(asked)
    assert {each.shard for each in found} == shards
    for each in found:
        assert not check_recipe(changed(recipe, configuration(asked, each))).errors
    if len(shards) == 1:
        sharded = configuration(asked, found[0]._replace(shard="optimizer"))
        assert "router" in str(check_recipe(changed(recipe, sharded)).errors[0])


def test_plugins_that_ask_something_of_a_layout_are_asked(tmp_path):
    """A strategy is in the space if, and only if, `tc3 check` accepts the ramp and the groups of its loss."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"base_config: {os.path.abspath('recipes/mini/pretrain_3d.yaml')}\n"
        "runner_config: {sink_mode: False}\ncontext: {dataset_broadcast_opt_level: 0}\n"
        "plugins: {group_aux_loss: True, held_out_loss: False, batch_ramp: {stages: [[10, 4], [20, 12]]}}\n"
    )
    recipe = load_recipe(path)
    asked = request_of(recipe, "atlas_800t_a2", devices=8, global_batch=24, limits=(read_limit("recompute=none"),))
    assert asked.ramp == (4, 12) and asked.whole_sequences
    without = replace(asked, ramp=(), whole_sequences=False, limits=(*asked.limits, read_limit("shard=none")))
    kept, every = set(enumerated(asked)[0]), enumerated(without)[0]
    keys = {"plugins.batch_ramp.stages", "parallel_config.expert_parallel"}
    for candidate in every[:: max(1, len(every) // 60)]:
        child = changed(recipe, configuration(asked, candidate), asked.site)
        refused = {finding.key for finding in check_recipe(child).errors} & keys
        assert (candidate in kept) == (not refused), (candidate, refused)
    assert 0 < len(kept & set(every)) < len(every)


def test_one_process_accumulates_no_gradients():
    """MindFormers sets gradient_accumulation_steps to 1 where the model is not split."""
    recipe = load_recipe("recipes/mini/finetune.yaml")
    found, _ = enumerated(request_of(recipe, "atlas_800t_a2"))
    assert {candidate.m for candidate in found} == {1}
    for candidate in found:
        assert not check_recipe(changed(recipe, configuration(request_of(recipe, "atlas_800t_a2"), candidate))).errors
