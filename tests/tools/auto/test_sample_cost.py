"""The two numbers by which attention balance weighs samples: from the model, into the effective recipe, and kept."""

import copy
from pathlib import Path

import pytest

from plugins.attention_balance.plan import Cost
from plugins.attention_balance.settings import recomputed_share
from plugins.errors import RecipeError
from tools.auto.sample_cost import keep_sample_cost, sample_cost, sample_cost_values, write_sample_cost
from tools.model.architecture import model_of
from tools.model.flops import flops_per_token
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
BALANCED = RECIPES / "mini/pretrain_eod_balanced.yaml"
# FLOPs a token and a pair of tokens, as every run of these recipes has weighed its samples so far
SHIPPED = {
    "telechat3_105b/context_32k.yaml": (38_220_857_344, 3_768_320),
    "telechat3_105b/context_128k.yaml": (38_220_857_344, 3_768_320),
    "telechat3_438b/context_32k.yaml": (192_318_275_584, 17_694_720),
    "telechat3_438b/context_128k.yaml": (192_318_275_584, 17_694_720),
    "telechat3_1119b/context_32k.yaml": (295_260_127_232, 20_316_160),
    "telechat3_1119b/context_128k.yaml": (295_260_127_232, 20_316_160),
    "mini/pretrain_eod_balanced.yaml": (7_704_576, 7_680),
}
MINIS = {"telechat3_105b/context_128k.yaml": (6_832_128, 5_760)}


def section(recipe):
    return recipe["plugins"]["attention_balance"]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_order_of_samples_stays_what_it_was(name):
    recipe = load_recipe(RECIPES / name)
    assert (section(recipe)["window"], len(section(recipe))) == (1, 1), "sizes stand once, in the model"
    write_sample_cost(recipe)
    assert section(recipe) == {"window": 1, "per_token": SHIPPED[name][0], "per_pair": SHIPPED[name][1], "unit": "FLOP"}
    assert all(type(section(recipe)[key]) is int for key in ("per_pair", "per_token"))


@pytest.mark.parametrize("name", MINIS)
def test_that_of_minis_too(name):
    cost = sample_cost(load_mini(RECIPES / name))
    assert (cost.per_token, cost.per_pair) == MINIS[name]


def test_by_hand():
    """One dense and one MoE layer, latent attention, an MTP layer; heads and head widths as in the mini."""
    recipe = load_recipe(BALANCED)
    recipe["recompute_config"] = {"recompute": False}
    recipe["model"]["model_config"].update({
        "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "vocab_size": 512,
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 8,
        "qk_nope_head_dim": 16, "qk_head_dim": 16, "qk_rope_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
        "intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32,
    })  # fmt: skip
    attention = 64 * 24 + 24 * 4 * (16 + 8) + 64 * (8 + 8) + 8 * 4 * (16 + 12) + 4 * 12 * 64
    moe = 3 * 64 * (2 * 32 + 32) + 64 * 8
    weights = 3 * attention + 3 * 64 * 96 + moe + (moe + 2 * 64 * 64) + 2 * 512 * 64
    # a pair in one head: 2 * 24 FLOPs for a score, 2 * 12 for its value; forward, and twice that backward
    assert sample_cost(recipe) == Cost(3 * (2 * 24 + 2 * 12) * 4 * 3, 6 * weights, "FLOP")
    recipe["recompute_config"] = {"recompute": [1, 1]}
    assert sample_cost(recipe) == Cost(4 * (2 * 24 + 2 * 12) * 4 * 3, 8 * weights, "FLOP")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*k.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_sample_without_documents_costs_what_tc3_check_says(path):
    recipe = load_recipe(path)
    model = model_of(convert(View(recipe), load_schema()).fields)
    cost, passes = sample_cost(recipe), 3 + recomputed_share(recipe)
    assert 3 * cost.per_token == passes * flops_per_token(model, 0)
    # a token of a sequence of n attends to n / 2 tokens on average
    assert 3 * cost.per_pair == passes * (flops_per_token(model, 2) - flops_per_token(model, 0))


def test_what_is_written_stays_and_what_is_off_stays_off():
    recipe = load_recipe(BALANCED)
    shared = section(recipe)
    write_sample_cost(recipe)
    assert shared == {"window": 1}, "an anchor may share it"
    before = copy.deepcopy(recipe)
    write_sample_cost(recipe)
    assert recipe == before
    for other in ({"window": 2, "per_pair": 1e-9, "per_token": 1e-6}, {"per_pair": 1e-9}, False, None, True, 3):
        recipe["plugins"]["attention_balance"] = other
        assert sample_cost_values(recipe) == {}
    for plugins in (None, {}):
        recipe["plugins"] = plugins
        assert sample_cost_values(recipe) == {}


def test_a_model_that_lacks_a_size():
    recipe = load_recipe(BALANCED)
    recipe["model"]["model_config"]["hidden_size"] = None
    with pytest.raises(RecipeError, match=r"model_config: its sizes make no model .* measured per_pair and per_token"):
        write_sample_cost(recipe)


def costing(**cost):
    recipe = load_recipe(BALANCED)
    recipe["plugins"]["attention_balance"] = {"window": 3, **cost}
    return recipe


FLOPS, SECONDS = {"per_pair": 8, "per_token": 9, "unit": "FLOP"}, {"per_pair": 1e-9, "per_token": 1e-6}


@pytest.mark.parametrize("first", [{"per_pair": 7, "per_token": 9, "unit": "FLOP"}, SECONDS])
def test_a_run_that_goes_on_weighs_samples_as_it_began(first):
    recipe = costing(**FLOPS)
    (line,) = keep_sample_cost(recipe, costing(**first))
    assert section(recipe) == {"window": 3, **first}
    assert "keep the order in which this run began" in line and str(first["per_pair"]) in line


@pytest.mark.parametrize(("now", "first"), [(FLOPS, FLOPS), (FLOPS, {}), (SECONDS, FLOPS)])
def test_nothing_is_said_where_nothing_changes(now, first):
    recipe = costing(**now)
    assert keep_sample_cost(recipe, costing(**first)) == [] and section(recipe) == {"window": 3, **now}


def test_a_run_without_the_plugin_has_nothing_to_keep():
    recipe, off = costing(**FLOPS), costing()
    off["plugins"]["attention_balance"] = False
    assert keep_sample_cost(recipe, off) == [] == keep_sample_cost(off, costing(**FLOPS))
    assert section(recipe) == {"window": 3, **FLOPS}
