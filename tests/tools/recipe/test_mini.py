"""Minis of the family's recipes: small enough for CPU, and still that recipe.

Minis that keep their recipe's parallel strategy: how degrees are scaled, and that `tc3 check` takes every one.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.layout.resolve import resolve
from tools.recipe.load import load_recipe
from tools.recipe.mini import BATCH, CONVERSATIONS, Degrees, derive_mini, load_mini, scale_degrees
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
    """Recipes that derive_mini takes: TeleChat3-MoE on Megatron data."""
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


def test_accumulates_no_gradients():
    recipe = load_recipe(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml")
    recipe["runner_config"]["gradient_accumulation_steps"] = 8
    for callback in recipe["callbacks"]:
        callback["gradient_accumulation_steps"] = 8
    mini = derive_mini(recipe, "corpus")
    assert mini["runner_config"].get("gradient_accumulation_steps", 1) == 1
    assert {callback.get("gradient_accumulation_steps", 1) for callback in mini["callbacks"]} == {1}


def test_leaves_the_recipe_alone():
    recipe = load_recipe(SHIPPED)
    before = repr(recipe)
    derive_mini(recipe, "corpus")
    assert repr(recipe) == before


def test_a_model_without_cpu_classes_is_refused():
    recipe = load_recipe(SHIPPED)
    recipe["model"]["model_config"]["model_type"] = "telechat3"
    with pytest.raises(RecipeError, match=r"model_config\.model_type: --mini shrinks 'telechat3_moe'"):
        derive_mini(recipe, "corpus")


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


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("path", list(large_family()), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_of_the_family_gives_a_sound_mini(path, workers):
    own, mini = View(load_recipe(path)), resolve(load_mini(path, workers=workers))
    view = View(mini)
    assert view.sharded_on_cpu and view.devices == workers
    assert [str(error) for error in check_recipe(mini).errors if "data_path" not in str(error)] == []
    assert (view.chunks, view.scheduler) == (own.chunks, own.scheduler)
    assert mini["model"]["model_config"]["compute_dtype"] == own.get(("model", "model_config", "compute_dtype"))
    assert mini["model"]["model_config"]["num_hidden_layers"] >= view.pp * view.chunks
    for key in ("enable_parallel_optimizer", "gradients_mean"):
        assert view.flag(("parallel", key)) == own.flag(("parallel", key))
    written, made = (of.get(("recompute_config", "recompute")) for of in (own, view))
    if isinstance(written, list):  # layers of each stage, of which the mini has fewer, with fewer layers
        assert isinstance(made, list) and len(made) == view.pp and any(made)
    else:
        assert made == written


def test_a_recipe_that_splits_nothing_is_refused():
    with pytest.raises(RecipeError, match="--parallel keeps how a model is split; this recipe does not split it"):
        load_mini(ROOT / "recipes/mini/pretrain.yaml", workers=4)
    with pytest.raises(RecipeError, match="needs a degree above 1 that fits 1 workers"):
        load_mini(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml", workers=1)
