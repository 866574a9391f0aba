import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.estimator_fit import START
from tools.check.check import table_of
from tools.estimate.configuration import Configuration, Recompute, even_layers, spread
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.layer_model import Matmul, cast_bytes, score_passes, work
from tools.estimate.layer_time import LayerTimes
from tools.estimate.memory.activations import saved
from tools.estimate.published.publishers import _model, _models, as_recipes_have_it, release
from tools.estimate.time_model import TimeModel
from tools.model import Latent, Model, flops_per_token, parameters, pattern_of, weights
from tools.recipe.load import load_recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

RECIPES = (
    "telechat3_36b/pretrain_8k",
    "telechat3_105b/pretrain_4k",
    "telechat3_438b/pretrain_4k",
    "telechat3_1119b/pretrain_4k",
    "telechat2_115b/pretrain_8k",
    "pangu_ultra_moe_718b/pretrain_4k",
)
GPT = Model(pattern_of(4), hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=512, gated=False, dropout=True)


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_and_flops_equal_those_of_check(name):
    recipe = load_recipe(f"recipes/{name}.yaml")
    config = from_recipe(recipe)
    built = convert(View(recipe), load_schema())
    table = table_of(View(recipe), built)
    assert parameters(config.model) == table["parameters_total"]
    assert flops_per_token(config.model, config.sequence) == table["flops_per_token"]


@pytest.mark.parametrize("entry", _models()["models"], ids=lambda entry: entry["match"])
def test_public_models_have_their_published_size(entry):
    if "unsupported" not in entry:
        assert parameters(_model(entry)) / 1e9 == pytest.approx(entry["parameters"], rel=0.02)


def slow_flops(config):
    """Forward matmul FLOPs of one dense layer on a device: every weight's part of every token, one by one."""
    total = 0
    for weight in weights(config.model, "dense"):
        if weight.multiplies:
            total += 2 * config.batch * config.sequence / config.cp * weight.size / config.tp
    return total


@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    batch=st.integers(1, 4),
    kv_heads=st.sampled_from([1, 2, 4]),
    gated=st.booleans(),
)
@settings(max_examples=40)
def test_a_dense_layer_multiplies_every_weight_with_every_token(tp, cp, batch, kv_heads, gated):
    model = replace(GPT, kv_heads=kv_heads, gated=gated)
    config = Configuration(model, tp=tp, cp=cp, layers=((4,),), batch=batch, sequence=128)
    done = work(config, "dense")
    assert sum(matmul.flops for matmul in done.matmuls) == pytest.approx(slow_flops(config))
    # causal attention: scores and values, half of all pairs
    assert done.attention == pytest.approx(2 * batch * 128 * 128 / cp * 4 / tp * 32 / 2)


def test_experts_compute_top_k_of_each_token_wherever_they_are():
    moe = replace(GPT, pattern=pattern_of(4, 16), experts=16, top_k=4, expert_ffn=32, gated=True)
    one = Configuration(moe, layers=((4,),), sequence=128)
    spread_out = replace(one, dp=8, ep=8)
    experts = 2 * 128 * 4 * 3 * 64 * 32
    for config in (one, spread_out):
        own = [m for m in work(config, "moe").matmuls if m.times > 1]
        assert sum(matmul.flops for matmul in own) == pytest.approx(experts)


@pytest.mark.parametrize(("mode", "moves"), [("global", 4), ("deepep", 2), ("hybridep", 0)])
def test_rows_are_sorted_once_each_way(mode, moves):
    moe = replace(GPT, pattern=pattern_of(4, 16), experts=16, top_k=4, expert_ffn=32, gated=True)
    config = Configuration(moe, dp=8, ep=8, layers=((4,),), sequence=128, ep_mode=mode)
    done = work(config, "moe")
    # each move reads and writes every copy of a token in bf16
    assert done.sorting == moves * 2 * 2 * 128 * 4 * 64 <= done.elementwise
    assert work(config, "dense").sorting == 0
    model = LayerTimes(cluster("h100"))
    layer = model.layer(config, "moe")
    summed = sum(model._accumulating(config, matmul) for matmul in done.matmuls)
    want = 2 * layer.forward.elementwise - model._moved(config, done.sorting) + summed
    assert layer.backward.elementwise == pytest.approx(want)
    # MindFormers' runs are predicted with sets that were fitted to two moves
    kept = model.layer(replace(config, keep_gathered=True), "moe")
    assert kept.backward.elementwise == pytest.approx(2 * kept.forward.elementwise)


@pytest.mark.parametrize("tp", [1, 4])
def test_activations_of_a_gpt_layer_are_korthikantis(tp):
    s, b, h, a = 128, 2, 64, 4
    config = Configuration(GPT, tp=tp, layers=((4,),), batch=b, sequence=s, flash=False)
    assert saved(config, "dense") == s * b * h * (34 + 5 * a * s / h) / tp
    plain = replace(config, sequence_parallel=False)
    assert saved(plain, "dense") == s * b * h * (10 + (24 + 5 * a * s / h) / tp)
    some = replace(config, recompute=Recompute(select=((4,),), selective="attention"))
    assert saved(some, "dense", "select") == s * b * h * 34 / tp
    assert saved(config, "dense", "full") == s * b * 2 * h / tp


@given(kind=st.sampled_from(["dense", "moe"]), tp=st.sampled_from([1, 2, 4]), keep=st.booleans())
@settings(max_examples=30)
def test_more_recomputation_keeps_less(kind, tp, keep):
    model = replace(GPT, pattern=pattern_of(4, 16), experts=16, top_k=2, expert_ffn=32, gated=True)
    config = Configuration(model, tp=tp, layers=((4,),), keep_gathered=keep)
    none, again, select, full = (saved(config, kind, name) for name in ("none", "communication", "select", "full"))
    assert full < select < none
    assert full < again <= none


@given(total=st.integers(1, 200), stages=st.integers(1, 16), chunks=st.integers(1, 6), mtp=st.integers(0, 1))
def test_even_layers_places_each_layer_once(total, stages, chunks, mtp):
    if total < stages * chunks:
        return
    table = even_layers(total, stages, chunks, mtp)
    assert (len(table), len(table[0])) == (chunks, stages)
    assert sum(map(sum, table)) == total
    assert min(map(min, table)) >= 0


def test_known_layouts():
    assert even_layers(126, 16, 1) == ((7, *[8] * 14, 7),)  # Llama 3 405B
    deepseek = even_layers(61, 8, 4, mtp=1)  # Megatron-Bridge: the head by itself, MTP before it
    assert deepseek[-1] == (2, 2, 2, 2, 2, 2, 1, 0)
    config = Configuration(
        replace(GPT, pattern=pattern_of(61), mtp=1), pp=8, layers=deepseek, micro_batches=8, schedule="interleaved_1f1b"
    )
    assert config.stage_kinds(7)[-1] == ["head"]
    assert config.stage_kinds(6)[-1] == ["dense", "mtp"]
    assert config.stage_kinds(0)[0] == ["embedding", "dense", "dense"]


def test_recompute_settings_by_layer():
    layers = ((4, 4), (3, 2))
    assert spread(True, layers) == layers
    assert spread(False, layers) is None
    assert spread([5, 1], layers) == ((3, 1), (2, 0)), "in turns"
    assert spread([6, 9], layers) == ((3, 4), (3, 2)) and spread([9, 0], layers) == ((4, 0), (3, 0))
    assert spread([True, False], layers) == ((4, 0), (3, 0)), "flags by stage"
    assert spread([True, [1, False]], layers) == ((4, 4), (1, 0)), "flags by chunk, and by stage within one"
    assert spread([[1, 9], [0, 1]], layers) == ((1, 4), (0, 1))
    assert spread({"mul": True}, layers) == layers


@given(st.data())
@settings(max_examples=60)
def test_recompute_lists_are_dealt_as_mindformers_deals_them(data):
    from mindformers.parallel_core.training_graph.transformer.utils import LayerSetting

    stages, chunks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    number = st.integers(0, 5)
    layers = data.draw(st.lists(st.tuples(*[number] * stages), min_size=chunks, max_size=chunks))
    setting = LayerSetting.__new__(LayerSetting)  # its constructor asks the global context
    setting.layer_list, setting.pp_interleave_num, setting.is_zbv = np.array(layers), chunks, False
    entry = st.integers(0, 12) | st.booleans()
    flat = data.draw(st.lists(entry, min_size=stages, max_size=stages))
    rows = data.draw(st.lists(st.lists(entry, min_size=stages, max_size=stages), min_size=chunks, max_size=chunks))
    for value in (flat, rows):
        theirs = setting._format_recompute_list(copy.deepcopy(value))
        assert np.array_equal(spread(value, tuple(layers)), np.array(theirs)), value


MODEL = Model(pattern_of(8), hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000)
MOE = replace(MODEL, pattern=pattern_of(8, 64), experts=64, top_k=8, expert_ffn=1024)
LATENT = replace(MOE, latent=Latent(512, 512, 128, 64, 128))
BIASED = replace(MOE, biased=True)
TIMES = TimeModel(cluster("gb200"), START)


def run(model=MODEL, **changed):
    return Configuration(**{"model": model, "dp": 8, "layers": ((8,),), "micro_batches": 4, **changed})


def seconds(**changed):
    return TIMES.step(run(**changed)).total


@given(st.sampled_from([2, 4, 8, 16]))
def test_the_last_of_contiguous_parts_attends_to_all(cp):
    balanced = run(dp=1, cp=cp, sequence=65536)
    apart = replace(balanced, contiguous=True)
    share = work(apart, "dense").attention / work(balanced, "dense").attention
    # by counting: the last rank's queries see all keys before them
    part = 64 // cp
    seen = [sum(range(first, first + part)) + part / 2 for first in range(0, 64, part)]
    assert share == pytest.approx(max(seen) / (sum(seen) / cp))
    assert TIMES.step(apart).total > TIMES.step(balanced).total


def test_without_context_parallelism_parts_are_the_whole():
    assert work(run(contiguous=True), "dense") == work(run(), "dense")


def test_precision_is_faster_by_fewer_bits_and_slower_by_blocks():
    bf16, fp8, mxfp8, nvfp4 = (seconds(dtype=dtype, batch=4) for dtype in ("bf16", "fp8", "mxfp8", "nvfp4"))
    blocks = TimeModel(cluster("gb200"), replace(START, blocks=0.5)).step(run(dtype="mxfp8", batch=4)).total
    assert bf16 > fp8 and bf16 > mxfp8 > nvfp4 and blocks > mxfp8


def test_hardware_without_a_precision_computes_in_bf16():
    old = TimeModel(cluster("a100_80g"), START)
    assert old._share("nvfp4") == old._share("bf16") == START.matmul
    assert old._peak("mxfp8") == old._peak("bf16")


def test_casts_move_what_matmuls_take_in():
    matmul = Matmul(100, 30, 20, times=2)
    forward = cast_bytes(run(dtype="mxfp8"), [matmul])
    assert 3 * forward == pytest.approx(4 * 2 * 100 * (20 + 30))
    assert cast_bytes(run(), [matmul]) == 0 == cast_bytes(run(dtype="fp8"), [replace(matmul, high=True)])


def test_graphs_launch_less():
    kinds = [seconds(model=MOE, ep=8, graphs=graphs) for graphs in ("", "layers", "step")]
    assert kinds[0] > kinds[1] > kinds[2]


def test_sorting_on_the_way_saves_traffic():
    modes = [seconds(model=MOE, ep=8, ep_mode=mode) for mode in ("global", "deepep", "hybridep")]
    assert modes[0] > modes[1] > modes[2]


@settings(max_examples=20)
@given(st.floats(0.3, 0.9), st.floats(1.01, 1.5), st.sampled_from(["link", "network", "attention", "matmul", "memory"]))
def test_more_of_anything_reached_takes_no_longer(value, factor, name):
    config = run(model=MOE, dp=144, ep=144 // 9, tp=2, sequence=8192)
    slow, fast = (
        TimeModel(cluster("h100"), replace(START, **{name: share})).step(config).total
        for share in (value, min(1.0, value * factor))
    )
    assert fast <= slow


def test_links_inside_and_between_nodes_have_factors_of_their_own():
    inside, between = run(dp=1, tp=8), run(dp=64, tp=1)
    h100 = cluster("h100")
    for config, name, other in ((inside, "link", "network"), (between, "network", "link")):
        slower = TimeModel(h100, replace(START, **{name: 0.3})).step(config).total
        same = TimeModel(h100, replace(START, **{other: 0.9})).step(config).total
        assert slower > TimeModel(h100, START).step(config).total
        assert name == "network" or same == pytest.approx(TimeModel(h100, START).step(config).total)


def test_backward_of_unfused_scores_moves_less_than_twice_as_much():
    assert 1 < score_passes(run()) < 2 and 1 < score_passes(run(model=replace(MODEL, dropout=True))) < 2


def test_sums_of_gradients_cost_where_an_expert_has_few_rows():
    few, many = run(model=MOE, ep=1, dp=1, batch=1, sequence=512), run(model=MOE, ep=1, dp=1, batch=16, sequence=4096)

    def share(config):
        with_sums = TIMES.layer(config, "moe").backward.total
        return with_sums / TIMES.layer(replace(config, shard_weights=True), "moe").backward.total

    assert share(few) > 1.1 > 1.02 > share(many)


def test_a_release_is_read_from_the_id():
    assert release("new_26.04.01_DGX-B200_DeepSeekV3") == "26.04.01" and release("torchtitan_4") == ""


@pytest.mark.parametrize(
    ("row", "name", "model", "expected"),
    [
        ("new_26.06_x", "gb300", MOE, ("step", "hybridep", True)),
        ("new_26.04_x", "gb300", MOE, ("layers", "hybridep", False)),
        ("new_26.04_x", "h800", MOE, ("", "deepep", False)),
        ("mbridge_25.11_x", "h100", MOE, ("", "global", True)),
        ("mbridge_25.09_(tokendrop)", "h100", MOE, ("", "global", False)),
        ("mbridge_25.09_x", "h100", LATENT, ("", "deepep", False)),
        ("new_26.04_x", "b300", LATENT, ("", "hybridep", False)),
        ("new_26.04.01_x", "b300", LATENT, ("layers", "hybridep", False)),
        ("new_26.02.01_x", "b300", BIASED, ("layers", "global", False)),
        ("new_26.04_x", "b300", BIASED, ("layers", "hybridep", False)),
        ("mbridge_26.04_x", "b200", BIASED, ("", "hybridep", False)),
        ("mbridge_26.04.01_x", "b200", BIASED, ("", "global", False)),
        ("mbridge_26.04.01_x", "gb200", BIASED, ("", "global", True)),
    ],
)
def test_recipes_of_a_release_say_what_its_table_does_not(row, name, model, expected):
    assumed, written = [], run(model=model, ep=8, dtype="bf16" if model.biased else "mxfp8", ep_mode="deepep")
    found = as_recipes_have_it(row, name, written, assumed)
    assert (found.graphs, found.ep_mode, found.overlap_ep) == expected
    assert bool(assumed) == (found != written)


@pytest.mark.parametrize(("row", "name", "ep"), [("25.11", "b200", 64), ("26.04", "b200", 8), ("25.11", "gb200", 8)])
def test_where_a_table_contradicts_its_recipe_the_recipe_is_taken_and_said(row, name, ep):
    assumed = []
    found = as_recipes_have_it(f"mbridge_{row}_x", name, run(model=BIASED, dp=64, ep=8), assumed)
    assert found.ep == ep and ("the table says 8" in assumed[0]) == (ep == 64)


def test_experts_exchanges_leave_through_one_port_and_gradients_through_all():
    b300 = cluster("b300")
    joined = replace(b300, inter_node=replace(b300.inter_node, ports=1))
    slow, fast = TimeModel(b300, START), TimeModel(joined, START)
    config, gradients = run(model=MOE, dp=64, ep=64), run(dp=64)
    assert slow.exposed(config).waited.forward == pytest.approx(2 * fast.exposed(config).waited.forward, rel=0.05)
    assert slow.step(gradients).total == fast.step(gradients).total


@given(st.sampled_from([8, 64, 128, 256]))
def test_unfused_products_are_narrow_matmuls_that_move_their_scores(width):
    hardware, config = cluster("gb200"), run(model=replace(MODEL, head_dim=width), flash=False)
    found = TIMES.layer(config, "dense").forward.attention
    scores = MODEL.heads * config.batch * config.sequence**2
    product = Matmul(config.sequence, config.sequence, width, times=2 * MODEL.heads * config.batch)
    computing = product.flops / (hardware.peak_flops["bf16"] * START.matmul * width / (width + START.half_size))
    assert found == pytest.approx(max(computing, 2 * 2 * scores / hardware.hbm_bytes_per_s))
    # what the softmax reads and writes is counted apart
    assert TIMES._scores(config) * hardware.hbm_bytes_per_s * START.memory == pytest.approx(2 * 2 * scores)
