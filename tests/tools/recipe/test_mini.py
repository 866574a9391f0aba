"""Minis of the family's recipes: small enough for CPU, and still that recipe.

Minis that keep their recipe's parallel strategy: how degrees are scaled, and that `tc3 check` takes every one.

Small recipes for Ascend: one family has the same weights and batch, and each member is sound and compiles.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from launch.cli import tc3
from plugins.errors import RecipeError
from tests.forks import forked_compiles
from tools.check.check import check_recipe
from tools.layout.resolve import resolve
from tools.recipe import mini as shrinking
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import BATCH, CONVERSATIONS, derive_mini, load_mini, shrink_model
from tools.recipe.mini_ascend import ON_CPU, ascend_minis
from tools.recipe.mini_strategy import Degrees, scale_degrees
from tools.recipe.view import View

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = Path(find_spec("mindformers").origin).parents[1] / "configs/telechat3_moe/pretrain_telechat3_105b_a4b_4k.yaml"
# what defines the model and its training and must survive the shrinking as it is
KEPT = (
    "model_type",
    "multi_latent_attention",
    "qk_layernorm",
    "num_nextn_predict_layers",
    "mtp_loss_factor",
    "position_embedding_type",
    "rotary_scaling_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "rope_theta",
    "routed_scaling_factor",
    "n_shared_experts",
    "norm_topk_prob",
    "scoring_func",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "fp32_residual_connection",
    "initializer_range",
)


def minis():
    return [
        SHIPPED,
        *sorted(ROOT.glob("recipes/telechat3_*b/*_4k.yaml")),
        *sorted(ROOT.glob("recipes/*/context_*.yaml")),
    ]


def family():
    """Recipes of TeleChat3-MoE on Megatron data."""
    for path in minis():
        recipe = load_recipe(path)
        loader = recipe["train_dataset"]["data_loader"].get("type")
        if recipe["model"]["model_config"].get("model_type") == "telechat3_moe" and "Megatron" in loader:
            yield pytest.param(recipe, id=f"{path.parent.name}/{path.stem}")


@pytest.mark.parametrize("recipe", list(family()))
def test_keeps_what_makes_it_that_recipe(recipe):
    model = recipe["model"]["model_config"]
    mini = derive_mini(recipe, "corpus")
    small = mini["model"]["model_config"]
    assert {key: small.get(key) for key in KEPT} == {key: model.get(key) for key in KEPT}
    assert mini["optimizer"] == recipe["optimizer"]
    plugins, small_plugins = (dict(each.get("plugins") or {}) for each in (recipe, mini))
    evaluation, held_out = plugins.pop("held_out_loss", None), small_plugins.pop("held_out_loss", None)
    assert small_plugins == plugins and bool(held_out) == bool(evaluation), (
        "held-out text lies beside the mini's corpus"
    )
    assert not held_out or held_out["data_path"] == "corpus_heldout"
    assert mini["runner_wrapper"] == recipe["runner_wrapper"]
    assert small["num_hidden_layers"] > small["first_k_dense_replace"] >= min(1, model["first_k_dense_replace"])
    stretched = model["seq_length"] / model["max_position_embeddings"]
    assert small["seq_length"] / small["max_position_embeddings"] == stretched, "YaRN must extend by the same factor"
    documents = recipe["train_dataset"]["data_loader"]["config"]
    ends = documents["reset_attention_mask"] or documents["create_compressed_eod_mask"]
    assert mini["train_dataset"]["data_loader"]["config"]["reset_attention_mask"] == ends


@pytest.mark.parametrize("recipe", list(family()))
def test_is_small_and_for_one_cpu_worker(recipe):
    mini = derive_mini(recipe, "some/corpus", steps=7)
    small = mini["model"]["model_config"]
    assert small["hidden_size"] <= 128 and small["n_routed_experts"] <= 16 and small["seq_length"] <= 128
    assert small["num_experts_per_tok"] < small["n_routed_experts"]
    workers = mini["parallel_config"]["data_parallel"] if mini["use_parallel"] else 1
    assert mini["context"]["device_target"] == "CPU"
    assert workers == (4 if (recipe.get("plugins") or {}).get("hierarchical_ep") else 1), "a dispatch needs ranks"
    loader = mini["train_dataset"]["data_loader"]
    assert loader["sizes"][0] == 7 * mini["runner_config"]["batch_size"] * workers
    assert loader["config"]["data_path"] == ["1", "some/corpus"]


@pytest.mark.parametrize("workers", [None, 2, 4])
@pytest.mark.parametrize("counts", [[1] * 8, [0] + [True] * 6 + [False], [True] * 8])
@pytest.mark.parametrize(
    ("key", "pattern"), [("recompute", ""), ("select_comm_recompute", ""), ("select_recompute_exclude", "norm")]
)
def test_recomputed_layers_are_counted_for_the_stages_of_the_mini(key, pattern, counts, workers):
    recipe = load_recipe(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml")
    recipe["recompute_config"] = {"recompute": False, key: {pattern: counts} if pattern else counts}
    assert not check_recipe(recipe).errors
    mini = Recipe(derive_mini(recipe, "corpus", workers=workers))
    assert not check_recipe(mini).errors
    stages = mini["parallel_config"]["pipeline_stage"]
    kept = mini["recompute_config"][key]
    assert kept is False if workers is None else (kept[pattern] if pattern else kept) == [1] * stages


def test_accumulates_no_gradients():
    recipe = load_recipe(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml")
    recipe["runner_config"]["gradient_accumulation_steps"] = 8
    for callback in recipe["callbacks"]:
        callback["gradient_accumulation_steps"] = 8
    mini = derive_mini(recipe, "corpus")
    assert mini["runner_config"].get("gradient_accumulation_steps", 1) == 1
    assert {callback.get("gradient_accumulation_steps", 1) for callback in mini["callbacks"]} == {1}


def test_reads_its_corpus_whatever_the_recipe_says_of_another_one(tmp_path):
    """A part of `split` has no document of a small corpus, and `pad` may be the end of its documents."""
    recipe = load_recipe("recipes/telechat3_105b/context_32k.yaml")
    config = recipe["train_dataset"]["data_loader"]["config"]
    config.update(data_path=None, split=None, train_data_path=["1", "elsewhere"], eod=151643, pad=151643)
    for mini in (derive_mini(recipe, str(tmp_path)), *ascend_minis(recipe, str(tmp_path), 2, [2]).values()):
        small = mini["train_dataset"]["data_loader"]["config"]
        assert [small[key] for key in ("data_path", "split", "eod", "pad")] == [["1", str(tmp_path)], "1, 0, 0", 0, -1]
        assert "train_data_path" not in small
        assert not [each for each in check_recipe(mini).errors if "data_loader" in each.key]


def test_leaves_the_recipe_alone():
    recipe = load_recipe(SHIPPED)
    before = repr(recipe)
    derive_mini(recipe, "corpus")
    assert repr(recipe) == before


def test_a_model_without_cpu_classes_is_refused():
    recipe = load_recipe(SHIPPED)
    recipe["model"]["model_config"]["model_type"] = "deepseek_v3"
    with pytest.raises(RecipeError, match=r"model_type: --mini shrinks 'telechat3' and 'telechat3_moe' recipes, not"):
        derive_mini(recipe, "corpus")


DENSE = sorted(path for name in ("telechat3_36b", "telechat2_*") for path in ROOT.glob(f"recipes/{name}/[!c]*.yaml"))
DENSE_CONTEXT = sorted(ROOT.glob("recipes/telechat2_*/context_*.yaml"))


@pytest.mark.parametrize("path", DENSE + DENSE_CONTEXT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_dense_model_keeps_its_groups_of_query_heads_and_gets_no_experts(path):
    own = load_recipe(path)["model"]["model_config"]
    mini = load_mini(path)
    small = mini["model"]["model_config"]
    assert {key: small.get(key) for key in KEPT} == {key: own.get(key) for key in KEPT}
    sizes = [
        (
            model["num_attention_heads"] / model["num_key_value_heads"],
            model["head_dim"] * model["num_attention_heads"] / model["hidden_size"],
        )
        for model in (own, small)
    ]
    assert sizes[0] == sizes[1]
    assert small["num_hidden_layers"] == 2 and small["hidden_size"] <= 128
    assert not [key for key in small if "expert" in key or "moe" in key or key == "first_k_dense_replace"]
    assert check_recipe(mini).clean
    assert "warmup_ratio" not in mini["lr_schedule"], "a share of ten steps would be none"
    warms_up = load_recipe(path)["lr_schedule"]
    assert ("warmup_steps" in mini["lr_schedule"]) == any(warms_up.get(f"warmup_{key}") for key in ("steps", "ratio"))


@pytest.mark.parametrize("path", [each for each in DENSE if "finetune" not in each.name], ids=lambda path: path.stem)
@pytest.mark.parametrize("workers", [4, 8])
def test_a_dense_model_keeps_its_parallel_strategy(path, workers):
    own, mini = View(load_recipe(path)), resolve(load_mini(path, workers=workers))
    view = View(mini)
    assert check_recipe(mini).errors == []
    assert view.sharded_on_cpu and (view.tp, view.pp, view.chunks) == (2, 2, own.chunks)
    # on eight workers data parallelism is doubled, too; the 36B has none, and its key-value heads bound tp
    assert view.devices == (4 if own.dp == 1 else workers)
    assert view.get(("model", "model_config", "compute_dtype")) == "bfloat16"
    # whole heads are dealt; those of keys and values bound the degree where query heads share them
    assert mini["model"]["model_config"]["num_key_value_heads"] % view.tp == 0


@given(
    groups=st.sampled_from([1, 2, 4, 8, 64]), shared=st.integers(1, 16), head_dim=st.sampled_from([64, 96, 128, 256])
)
def test_any_grouped_query_attention_shrinks_to_one_that_mindformers_builds(groups, shared, head_dim):
    model = {
        **{"model_type": "telechat3", "hidden_size": 4096, "intermediate_size": 11008, "seq_length": 4096},
        **{"num_attention_heads": groups * shared, "num_key_value_heads": groups, "head_dim": head_dim},
        **{"vocab_size": 131072, "max_position_embeddings": 4096},
    }
    shrink_model(model)
    heads, few = model["num_attention_heads"], model["num_key_value_heads"]
    assert heads == few * shared and min(groups, 2) <= few <= groups
    assert model["hidden_size"] % heads == 0 and model["hidden_size"] <= 128 and model["head_dim"] % 2 == 0


@pytest.mark.parametrize("workers", [None, 4, 8])
@pytest.mark.parametrize("groups", [(8, 3), (8, 4), (5, 2), (20, 6), (3, 2)])
def test_a_router_of_groups_shrinks_to_one_that_mindformers_builds(groups, workers, tmp_path):
    """`tc3 check` refused the mini of a model like DeepSeek-V2: three groups of a token among four experts."""
    sizes = {"n_routed_experts": 240, "num_experts_per_tok": 6, "n_group": groups[0], "topk_group": groups[1]}
    child = {"base_config": str(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml"), "model": {"model_config": sizes}}
    dump_recipe(Recipe(child), tmp_path / "recipe.yaml")
    mini = load_mini(tmp_path / "recipe.yaml", workers=workers)
    assert check_recipe(mini).errors == []
    small = mini["model"]["model_config"]
    assert 1 <= small["topk_group"] < small["n_group"] <= groups[0], "a token is still limited to some groups"


@pytest.mark.parametrize("names", [("n_group", "moe_router_group_topk"), ("moe_router_num_groups", "topk_group")])
def test_the_numbers_of_groups_shrink_under_either_name(names):
    model = {"n_routed_experts": 8, "num_experts_per_tok": 4, names[0]: 8, names[1]: 3}
    shrinking._shrink_router(model)
    assert (
        1 <= model[names[1]] < model[names[0]]
        and 4 % model[names[1]] == 0
        and 8 // model[names[0]] >= 4 // model[names[1]]
    )


def test_groups_that_no_router_can_have_are_left_to_check(tmp_path):
    """A traceback ended `--mini`."""
    sizes = {"n_routed_experts": 2, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1}
    child = {"base_config": str(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml"), "model": {"model_config": sizes}}
    dump_recipe(Recipe(child), tmp_path / "recipe.yaml")
    assert check_recipe(load_mini(tmp_path / "recipe.yaml")).errors


def test_shared_experts_stay_as_wide_as_so_many_routed_ones():
    """The mini of two shared experts of 1,536 at a hidden size of 2,560 had 160 for 2 x 64; no command converted it."""
    recipe = load_recipe(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml")
    model = recipe["model"]["model_config"]
    model.update(n_shared_experts=2, moe_shared_expert_intermediate_size=2 * model["moe_intermediate_size"])
    shrink_model(model)
    assert model["moe_shared_expert_intermediate_size"] == 2 * model["moe_intermediate_size"]


def test_a_size_that_the_recipe_leaves_to_a_default_is_asked_for():
    recipe = load_recipe(DENSE[0])
    del recipe["model"]["model_config"]["head_dim"]
    with pytest.raises(RecipeError, match=r"model_config\.head_dim: --mini scales this size, but .* write the size"):
        derive_mini(recipe, "corpus")


def test_no_more_tensor_parallel_ranks_than_heads():
    mini = load_mini(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml", workers=64)
    assert mini["parallel_config"]["model_parallel"] == mini["model"]["model_config"]["num_attention_heads"] == 4


def test_a_dense_mini_with_a_plugin_for_experts_is_refused_as_the_recipe_is():
    recipe = load_recipe(DENSE[0])
    recipe["plugins"] = {"hierarchical_ep": {"mode": "global"}}
    mini = derive_mini(recipe, "corpus")
    assert not mini["use_parallel"]
    (error,) = check_recipe(Recipe(mini)).errors
    assert "plugins.hierarchical_ep: the model has no experts; leave the plugin out" in str(error)


@pytest.mark.parametrize(
    "section, wanted",
    [
        ({"every": 7, "spare": 1}, {"every": 0, "spare": 0}),
        ({"every": 7, "routers": False}, {"every": 0, "routers": False}),
        ({"every": 7, "record": False, "routers": False}, False),
    ],
)
def test_a_mini_on_one_worker_leaves_off_what_moves_and_copies_experts(section, wanted):
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    recipe["plugins"] = {"expert_balance": section}
    mini = derive_mini(recipe, "corpus")
    assert mini["plugins"]["expert_balance"] == wanted
    assert not check_recipe(Recipe(mini)).errors


def test_a_dense_mini_has_no_more_dense_layers_than_layers():
    recipe = load_recipe(DENSE[0])
    recipe["model"]["model_config"]["first_k_dense_replace"] = 3
    assert not check_recipe(recipe).errors
    assert not check_recipe(Recipe(derive_mini(recipe, "corpus"))).errors


def test_a_mini_has_no_more_spare_slots_than_other_experts():
    recipe = load_recipe(ROOT / "recipes/mini/pretrain_ep4_balanced.yaml")
    recipe["model"]["model_config"]["n_routed_experts"] = recipe["callbacks"][1]["expert_num"] = 64
    recipe["plugins"]["expert_balance"] = {"every": 7, "spare": 20}
    assert not check_recipe(recipe).errors
    mini = derive_mini(recipe, "corpus")
    assert mini["plugins"]["expert_balance"]["spare"] == 12 and not check_recipe(Recipe(mini)).errors


@pytest.mark.parametrize("size", ["105b", "438b", "1119b"])
def test_packed_conversations_stay_so(size):
    recipe = load_recipe(ROOT / f"recipes/telechat3_{size}/finetune_4k.yaml")
    mini = derive_mini(recipe, "some/corpus", steps=7)
    view, small = View(mini), mini["model"]["model_config"]
    assert view.packs and view.samples == 7 * BATCH and small["seq_length"] == CONVERSATIONS
    loader = mini["train_dataset"]["data_loader"]
    assert view.instruction_files == ["some/corpus_instructions.jsonl"]
    alpaca, packing, _ = loader["handler"]
    assert alpaca["seq_length"] == packing["seq_length"] == CONVERSATIONS
    assert alpaca["tokenizer"]["pretrained_model_dir"] == "some/corpus_tokenizer"
    assert not loader["create_compressed_eod_mask"] and loader["create_attention_mask"]
    assert mini["plugins"]["packed_labels"] == {}
    assert mini["run_mode"] == "finetune" and mini["optimizer"] == recipe["optimizer"]
    with pytest.raises(RecipeError, match="--parallel cannot read packed conversations"):
        derive_mini(recipe, "some/corpus", workers=4)


POWERS = st.sampled_from([1, 2, 4, 8, 64])


@given(pp=POWERS, tp=POWERS, dp=POWERS, cp=POWERS, ep=POWERS, workers=st.integers(1, 16))
def test_no_degree_grows_and_no_worker_is_left_that_could_be_used(pp, tp, dp, cp, ep, workers):
    own = Degrees(pp, tp, dp, cp, ep)
    scaled = scale_degrees(own, workers)
    names = ("pp", "tp", "dp", "cp")
    assert scaled.workers <= workers
    assert all(1 <= getattr(scaled, name) <= getattr(own, name) for name in (*names, "ep"))
    more = [name for name in names if getattr(scaled, name) * 2 <= getattr(own, name)]
    assert not more or scaled.workers * 2 > workers
    ranks = scaled.tp * scaled.dp
    assert ranks % scaled.ep == 0 and (scaled.ep * 2 > min(own.ep, ranks))


def test_the_degrees_of_a_large_recipe():
    assert scale_degrees(Degrees(8, 2, 256, 1, 16), 4) == Degrees(2, 2, 1, 1, 2)
    assert scale_degrees(Degrees(8, 2, 256, 1, 16), 8) == Degrees(2, 2, 2, 1, 4)
    assert scale_degrees(Degrees(16, 8, 8, 8, 32), 16) == Degrees(2, 2, 2, 2, 4)
    assert scale_degrees(Degrees(1, 1, 64, 1, 8), 4) == Degrees(1, 1, 4, 1, 4)


def large_family():
    for path in sorted(ROOT.glob("recipes/telechat3_*b/[!c]*.yaml")) + sorted(
        ROOT.glob("recipes/telechat3_*b/con*.yaml")
    ):
        recipe = load_recipe(path)
        megatron = "Megatron" in recipe["train_dataset"]["data_loader"]["type"]
        if recipe["model"]["model_config"]["model_type"] == "telechat3_moe" and megatron:
            yield path


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("path", list(large_family()), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_of_the_family_gives_a_sound_mini(path, workers):
    own, mini = View(load_recipe(path)), resolve(load_mini(path, workers=workers))
    view = View(mini)
    assert view.sharded_on_cpu and view.devices == workers
    assert [str(error) for error in check_recipe(mini).errors if "data_path" not in str(error)] == []
    assert (view.chunks, view.scheduler) == (own.chunks, own.scheduler)
    assert mini["model"]["model_config"]["compute_dtype"] == own.get(("model", "model_config", "compute_dtype"))
    assert mini["model"]["model_config"]["num_hidden_layers"] >= view.pp * view.chunks
    assert view.flag(("parallel", "gradients_mean")) == own.flag(("parallel", "gradients_mean"))
    cut = own.flag(("parallel", "enable_parallel_optimizer"))
    muon = own.get(("optimizer", "type")) == "Muon"  # refuses shards of one rank
    assert view.flag(("parallel", "enable_parallel_optimizer")) == (cut and not (muon and view.dp == 1))
    written, made = (of.get(("recompute_config", "recompute")) for of in (own, view))
    if isinstance(written, list):  # layers of each stage, of which the mini has fewer, with fewer layers
        assert np.shape(made) == ((view.pp,) if view.chunks == 1 else (view.chunks, view.pp)) and np.any(made)
    else:
        assert made == written


@pytest.mark.parametrize("workers", [None, 2, 4, 8, 16])
def test_a_mini_of_muon_has_shards_that_muon_takes(workers):
    mini = resolve(load_mini(ROOT / "recipes/telechat3_105b/pretrain_4k_muon.yaml", workers=workers))
    view = View(mini)
    assert [str(error) for error in check_recipe(mini).errors if "data_path" not in str(error)] == []
    assert view.sharded_on_cpu and view.devices == (workers or 1)
    shards = view.get(("parallel", "parallel_optimizer_config", "optimizer_weight_shard_size"))
    assert shards == (min(4, view.dp) if view.dp > 1 else None)


def test_a_recipe_that_splits_nothing_is_refused():
    with pytest.raises(
        RecipeError, match="--parallel keeps the parallel strategy of a recipe, but this recipe does not"
    ):
        load_mini(ROOT / "recipes/mini/pretrain.yaml", workers=4)
    with pytest.raises(RecipeError, match="needs a parallel degree above 1 that fits 1 workers"):
        load_mini(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml", workers=1)


RECIPES = [
    "telechat3_105b/pretrain_4k_report", "telechat3_438b/pretrain_4k", "telechat3_1119b/pretrain_4k_ep_overlap",
    "telechat3_1119b/context_128k", "telechat3_36b/context_32k", "telechat2_115b/pretrain_8k",
    "telechat3_105b/pretrain_4k_muon", "xing4_29b/pretrain_4k",
]  # fmt: skip
SIZES = ("num_hidden_layers", "hidden_size", "n_routed_experts", "vocab_size", "seq_length", "num_attention_heads")


def on_ascend(name, counts=(2, 8, 64)):
    return ascend_minis(load_recipe(ROOT / "recipes" / f"{name}.yaml"), "corpus", 12, counts)


@pytest.mark.parametrize("name", RECIPES)
def test_a_family_has_one_model_and_one_batch_and_each_member_is_sound(tmp_path, name):
    own, found = View(load_recipe(ROOT / "recipes" / f"{name}.yaml")), on_ascend(name)
    models, batches = set(), set()
    for count, flat in found.items():
        dump_recipe(flat, tmp_path / "small.yaml")
        recipe = load_recipe(tmp_path / "small.yaml")
        assert [str(one) for one in check_recipe(recipe).errors] == []
        view = View(recipe)
        model = recipe["model"]["model_config"]
        models.add(tuple(model.get(key) for key in SIZES))
        batches.add((view.global_batch, view.samples))
        assert view.devices == max(1, count)
        if count == ON_CPU:
            assert view.on_cpu and model["compute_dtype"] == "float32"
        else:
            assert not view.on_cpu
            assert model["compute_dtype"] == own.get(("model", "model_config", "compute_dtype"))
            assert view.ep <= (model.get("n_routed_experts") or 1)
    assert (len(models), len(batches)) == (1, 1)


def test_degrees_that_do_not_fill_a_number_of_devices_leave_it_out():
    assert set(on_ascend("telechat3_36b/context_32k", (2, 8, 1024))) == {ON_CPU, 1, 2, 8}


def test_a_recipe_for_a_cpu_has_no_small_recipe_for_ascend():
    with pytest.raises(RecipeError, match=r"context\.device_target: this recipe is for a CPU"):
        on_ascend("mini/pretrain")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_small_recipes_compile_for_virtual_ascend_devices(forks, tmp_path, count):
    file = tmp_path / "small.yaml"
    dump_recipe(on_ascend("telechat3_105b/pretrain_4k", (2,))[count], file)
    with forked_compiles(forks, tmp_path / "cache"):
        done = CliRunner(catch_exceptions=False).invoke(tc3, ["dryrun", str(file), "--json", "--ranks", "0"])
    report = json.loads(done.stdout)
    assert report["stages"][0]["memory"]["limit"] > 0, done.stderr
    assert "error" not in report and report["problems"] == report["left_out"]
