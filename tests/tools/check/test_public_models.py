"""Walks from the config.json of public models that MindFormers has no class of: the sizes of those that its training
graph computes, and what is said of keys that it does not compute, or does not get.
"""

import json

import pytest
import yaml

from plugins.errors import RecipeError
from tests.tools.check.mutations import MODEL
from tests.tools.check.test_mutations import ROOT, plain
from tests.tools.check.test_rules import findings
from tools.check.check import check_recipe, require_sound
from tools.estimate.from_recipe import from_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides, dotted

DENSE, MOE = ("telechat3", "TeleChat3ForCausalLM"), ("telechat3_moe", "TeleChat3MoeForCausalLM")
NO_LATENT = {"multi_latent_attention": False, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1}

# the sizes in the public config.json, under MindFormers' keys
MIXTRAL_8X7B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 14336, "n_shared_experts": 0, "first_k_dense_replace": 0, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6,
}  # fmt: skip
DOTS1 = {
    "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 152064, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "qk_layernorm": True, "rms_norm_eps": 1e-5, "rope_theta": 1e7,
}  # fmt: skip
ERNIE_21B = {
    "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 103424, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip
SEED_OSS_36B = {
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136, "attention_bias": True, "mlp_bias": False,
    "rms_norm_eps": 1e-6, "rope_theta": 1e7,
}  # fmt: skip


def recipe_of(kind, sizes, **more):
    """A recipe with the sizes of a model and MindFormers' own defaults, in the layout of the 36B."""
    recipe = plain(ROOT / "recipes" / "telechat3_36b" / "pretrain_8k.yaml")
    recipe["parallel_config"].update(data_parallel=1, model_parallel=1, pipeline_stage=1, use_seq_parallel=False)
    kept = ("seq_length", "compute_dtype", "position_embedding_type", "use_flash_attention")
    own = {key: value for key, value in recipe["model"]["model_config"].items() if key in kept}
    named = {"model_type": kind[0], "architectures": [kind[1]], "offset": 0}
    recipe["model"]["model_config"] = {**own, **named, **sizes, **more}
    return recipe


def counted(sizes):
    """Every number of the weights of a model of grouped-query attention, as its modules in transformers have them."""
    h, heads, groups, width = (
        sizes[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    total = 2 * sizes["vocab_size"] * h + h
    for layer in range(sizes["num_hidden_layers"]):
        total += heads * width * h + 2 * groups * width * h + h * heads * width + 2 * h
        total += (heads + 2 * groups) * width if sizes.get("attention_bias") else 0
        total += 2 * width if sizes.get("qk_layernorm") else 0
        if layer < sizes.get("first_k_dense_replace", sizes["num_hidden_layers"]):
            total += 3 * h * sizes["intermediate_size"]
            continue
        experts = sizes["n_routed_experts"]
        total += experts * h + (experts + sizes["n_shared_experts"]) * 3 * h * sizes["moe_intermediate_size"]
    return total


@pytest.mark.parametrize(
    ("kind", "sizes", "more", "published"),
    [
        (MOE, MIXTRAL_8X7B, NO_LATENT, 46_702_792_704),
        (MOE, DOTS1, NO_LATENT, 142_774_381_696 - 61 * 128),  # less the routers' biases
        (MOE, ERNIE_21B, NO_LATENT, 21_825_436_160 + 103424 * 2560),  # which ties its output layer
        (DENSE, SEED_OSS_36B, {}, 36_151_104_512),
    ],
    ids=["mixtral", "dots1", "ernie", "seed_oss"],
)
def test_the_weights_of_public_models_are_counted(kind, sizes, more, published):
    report = check_recipe(recipe_of(kind, sizes, **more))
    assert report.table["parameters_total"] == counted(sizes) == published
    assert not [finding for finding in report.findings if finding.key == dotted(MODEL)]


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"model_type": "gpt_oss"}, "model_type", "'gpt_oss' is not one of the possible values; the possible values"),
        ({"model_type": "glm4_moe"}, "model_type", "refuses to train it; write .* such as telechat3_moe"),
        ({"model_type": "qwen2"}, "model_type", "refuses to train it; write .* such as telechat3,"),
        ({"model_type": None}, "model_type", "model_type is missing, by which MindFormers finds"),
        ({"architectures": None}, "architectures", "architectures is missing, by which MindFormers finds"),
        ({"architectures": ["Glm4ForCausalLM"]}, "architectures", "training graph has no class Glm4ForCausalLM"),
        (
            {"model_type": "qwen3_moe"},
            "architectures",
            r"not the class of .*\[Qwen3MoeForCausalLM\]",
        ),
        ({"model_type": "qwen3", "architectures": ["TrainingQwen3MoeForCausalLM"]}, "architectures", "not the class"),
    ],
)
def test_every_planner_refuses_a_model_that_is_not_trained(changes, key, said):
    recipe = Recipe(recipe_of(DENSE, SEED_OSS_36B, **changes))
    assert dotted((*MODEL, key)) in findings(recipe)
    with pytest.raises(RecipeError, match=f"{key}: .*{said}"):
        from_recipe(recipe)


def test_sizes_of_a_model_that_is_not_trained_are_not_shown():
    assert check_recipe(recipe_of(DENSE, SEED_OSS_36B, model_type="gpt_oss")).table is None


def test_a_planner_needs_the_model_in_the_recipe_itself():
    recipe = Recipe(recipe_of(DENSE, SEED_OSS_36B) | {"pretrained_model_dir": "folder"})
    del recipe["model"]["model_config"]["model_type"]
    assert dotted((*MODEL, "model_type")) not in findings(recipe)
    with pytest.raises(RecipeError, match=r"does not read in the config\.json of pretrained_model_dir; write it"):
        from_recipe(recipe)


def test_a_command_that_cannot_go_on_names_the_models_type_before_its_keys():
    """The keys stand in another file, above the type, and are no keys of a model of that type."""
    recipe = load_recipe(ROOT / "recipes" / "telechat3_105b" / "pretrain_4k.yaml")
    recipe = apply_overrides(recipe, [f"{dotted(MODEL)}.model_type=qwen2"])
    with pytest.raises(RecipeError, match=r"model_config\.model_type: MindFormers only runs inference with qwen2"):
        require_sound(recipe)


def test_the_training_class_of_qwen3_moe_may_be_named():
    recipe = recipe_of(("qwen3_moe", "TrainingQwen3MoeForCausalLM"), {**SEED_OSS_36B, "num_experts": 8})
    assert dotted((*MODEL, "architectures")) not in findings(recipe)


def left_out(recipe):
    return findings(recipe, "warning")[dotted(MODEL)]


def test_sizes_that_come_from_another_model_are_named():
    sizes = {key: value for key, value in SEED_OSS_36B.items() if key not in ("head_dim", "vocab_size")}
    told = left_out(recipe_of(DENSE, sizes))
    assert (
        told.wrong.endswith("keys that are missing: vocab_size 131072, head_dim 128")
        and told.right == "write these keys"
    )
    folder = {"pretrained_model_dir": "folder"}
    assert (
        "config.json of pretrained_model_dir, and takes vocab_size" in left_out(recipe_of(DENSE, sizes) | folder).wrong
    )


def test_latent_attention_that_nobody_wrote_is_named():
    told = left_out(recipe_of(MOE, MIXTRAL_8X7B))
    for words in ("q_lora_rank 1536", "kv_lora_rank 512", "qk_pos_emb_head_dim 64", "v_head_dim 128", "n_group 8"):
        assert words in told.wrong
    assert told.right.endswith("multi_latent_attention: False for a model without latent attention")


def test_groups_of_heads_that_latent_attention_does_not_have_are_refused():
    path = dotted((*MODEL, "num_key_value_heads"))
    found = findings(recipe_of(MOE, MIXTRAL_8X7B))[path]
    assert found.wrong.startswith("8 has no effect") and "write 32, or multi_latent_attention: False" in found.right
    assert path not in findings(recipe_of(MOE, {**MIXTRAL_8X7B, "num_key_value_heads": 32}))
    assert path not in findings(recipe_of(MOE, MIXTRAL_8X7B, **NO_LATENT))
    latent = recipe_of(MOE, MIXTRAL_8X7B, multi_latent_attention=True)
    assert path not in findings(latent) and path in findings(latent, "warning")


@pytest.mark.parametrize(
    ("key", "value", "off"),
    [
        ("mlp_bias", True, False),
        ("logn", True, False),
        ("share_ffn", True, False),
        ("quantization_config", {"quant_method": "mxfp4"}, None),
        ("sliding_window", 128, None),
    ],
)
def test_keys_that_mindformers_drops_are_refused_unless_they_are_off(key, value, off):
    path = dotted((*MODEL, key))
    assert path in findings(recipe_of(DENSE, SEED_OSS_36B, **{key: value}))
    assert path not in findings(recipe_of(DENSE, SEED_OSS_36B, **{key: off}))


def test_no_score_function_is_told_that_the_router_does_not_have():
    path = dotted((*MODEL, "scoring_func"))
    told = [each for each in check_recipe(recipe_of(MOE, DOTS1, scoring_func="noaux_tc")).errors if each.key == path]
    assert told and not any("noaux_tc" in each.right for each in told)


def test_the_bias_that_attentions_output_does_not_get_is_noted():
    path = dotted((*MODEL, "attention_bias"))
    assert "the output of attention also gets a bias" in findings(recipe_of(DENSE, SEED_OSS_36B), "note")[path].wrong
    assert path not in findings(recipe_of(DENSE, SEED_OSS_36B, attention_bias=False), "note")


def test_plain_positions_need_no_scaling():
    path = dotted((*MODEL, "rope_scaling", "rope_type"))
    found = findings(recipe_of(DENSE, SEED_OSS_36B, rope_scaling={"rope_type": "default"}))[path]
    assert found.right == "leave rope_scaling out, because this is plain RoPE"


def test_each_unknown_key_of_a_model_on_one_line_is_told(tmp_path):
    """A config.json may be pasted as one line."""
    recipe = recipe_of(MOE, MIXTRAL_8X7B, num_local_experts=8, output_router_logits=False)
    config, recipe["model"]["model_config"] = recipe["model"]["model_config"], "HERE"
    config["rms_norm_eps"] = 0.001  # JSON's 1e-05 is text to YAML 1.1
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe).replace("HERE", json.dumps(config)))
    told = {error.key.rpartition(".")[2] for error in check_recipe(load_recipe(file)).errors}
    assert {"num_local_experts", "output_router_logits"} <= told
