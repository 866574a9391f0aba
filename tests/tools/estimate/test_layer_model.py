import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.check.table import table_of
from tools.estimate.configuration import Configuration, Recompute, even_layers, spread
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.layer_model import work
from tools.estimate.layer_time import LayerTimes
from tools.estimate.memory.activations import saved
from tools.estimate.published.stacks import _model, _models
from tools.model.architecture import Model, pattern_of
from tools.model.flops import flops_per_token
from tools.model.weights import parameters, weights
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
    deepseek = even_layers(61, 8, 4, mtp=1)  # Megatron-Bridge: the head alone, MTP before it
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
