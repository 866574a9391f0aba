"""The recipes in stock MindFormers: every file loads, and models have the settings and parameters that recipes say."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.recipes.counted import counted
from tests.recipes.oracles import RECIPES, all_recipes, count_connections, load
from tests.recipes.test_numbers import ENTRIES
from tools.recipe.load import load_recipe

# recipe key -> field of the TransformerConfig that MindFormers builds (both spellings of the MLA head dims)
ARRIVES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "seq_length": "seq_length",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_act": "hidden_act",
    "rms_norm_eps": "layernorm_epsilon",
    "initializer_range": "init_method_std",
    "head_dim": "kv_channels",
    "offset": "offset",
    "pp_interleave_num": "virtual_pipeline_model_parallel_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "qk_pos_emb_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "qk_layernorm": "qk_layernorm",
    "multi_latent_attention": "multi_latent_attention",
    "position_embedding_type": "position_embedding_type",
    "rope_theta": "rotary_base",
    "rotary_scaling_factor": "rotary_scaling_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "use_flash_attention": "use_flash_attention",
    "use_attn_mask_compression": "use_attn_mask_compression",
    "use_eod_attn_mask_compression": "use_eod_attn_mask_compression",
    "num_nextn_predict_layers": "mtp_num_layers",
    "mtp_loss_factor": "mtp_loss_scaling_factor",
    "first_k_dense_replace": "first_k_dense_replace",
    "n_routed_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "n_shared_experts": "shared_expert_num",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "moe_token_dispatcher_type": "moe_token_dispatcher_type",
    "moe_router_load_balancing_type": "moe_router_load_balancing_type",
    "moe_aux_loss_coeff": "moe_aux_loss_coeff",
    "moe_router_enable_expert_bias": "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate": "moe_router_bias_update_rate",
    "scoring_func": "moe_router_score_function",
}
MESH_ARRIVES = {
    "data_parallel": "data_parallel_size",
    "model_parallel": "tensor_model_parallel_size",
    "pipeline_stage": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "micro_batch_num": "micro_batch_num",
    "use_seq_parallel": "sequence_parallel",
}


def stock_config(name):
    from mindformers import MindFormerConfig

    return MindFormerConfig(str(RECIPES / name))


def built_config(name):
    """The TransformerConfig that MindFormers makes of a recipe, from the classes that its trainer uses."""
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models.telechat3.configuration_telechat3 import TeleChat3Config
    from mindformers.models.telechat3_moe.configuration_telechat3_moe import TeleChat3MoeConfig

    config = stock_config(name)
    build_parallel_config(config)
    settings = config.model.model_config
    model_config = {"telechat3": TeleChat3Config, "telechat3_moe": TeleChat3MoeConfig}[settings.model_type](**settings)
    model_config.parallel_config = config.parallel_config
    return model_config.convert_to_transformer_config(is_mla_model=bool(settings.multi_latent_attention))


def plain(value):
    """Tuples as lists, all the way down."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def missing(recipe, config, path=()):
    """Key paths of `recipe` that `config` does not hold with the same value."""
    for key, value in recipe.items():
        if isinstance(value, dict):
            yield from missing(value, config.get(key) or {}, (*path, key))
        elif plain(config.get(key)) != plain(value) and not (key == "callbacks" and not path):
            yield (*path, key)


@pytest.mark.parametrize("name", all_recipes())
def test_every_recipe_loads_in_stock_mindformers_to_the_same_values(name):
    recipe, config = load(name), stock_config(name)
    assert list(missing(recipe, config)) == []
    wanted = [callback["type"] for callback in recipe["callbacks"]]
    assert [callback["type"] for callback in config.callbacks] == wanted


@pytest.mark.parametrize("name", all_recipes())
def test_the_built_transformer_config_agrees_with_the_recipe(name):
    recipe, built = load(name), built_config(name)
    model = recipe["model"]["model_config"]
    arrived = {key: plain(getattr(built, field)) for key, field in ARRIVES.items() if key in model}
    assert arrived == {key: plain(model[key]) for key in arrived}
    mesh = recipe["parallel_config"]
    assert {key: getattr(built, MESH_ARRIVES[key]) for key in MESH_ARRIVES if key in mesh} == {
        key: mesh[key] for key in MESH_ARRIVES if key in mesh
    }


@pytest.mark.parametrize("name", all_recipes())
def test_mindformers_accepts_the_offset_and_gives_every_layer_a_place(name):
    from mindformers.parallel_core.training_graph.transformer.utils import LayerSetting

    recipe = load(name)
    setting = LayerSetting.__new__(LayerSetting)  # its constructor asks the global context whether stages interleave
    model = recipe["model"]["model_config"]
    setting.num_layers = model["num_hidden_layers"]
    setting.pp = recipe["parallel_config"]["pipeline_stage"]
    setting.pp_interleave_num = model["pp_interleave_num"]
    setting.offset = np.array(model["offset"], np.int32)
    setting._check_inputs()
    chunks = setting.pp * setting.pp_interleave_num
    layers = model["num_hidden_layers"] // chunks + setting.offset
    assert layers.sum() == model["num_hidden_layers"]
    assert layers.min() >= 1


@pytest.mark.parametrize("name", all_recipes())
def test_interleaving_is_switched_on_where_chunks_need_it(name):
    """MindFormers takes `pp_interleave_num` for 1 unless the schedule interleaves."""
    recipe = load(name)
    pipeline = recipe["parallel"].get("pipeline_config", {})
    assert bool(pipeline.get("pipeline_interleave")) == (recipe["model"]["model_config"]["pp_interleave_num"] > 1)


def test_the_public_105b_offset_is_refused():
    """The oracle bites: MindFormers' own recipe fails the check that ours pass."""
    from mindformers.parallel_core.training_graph.transformer.utils import LayerSetting

    setting = LayerSetting.__new__(LayerSetting)
    setting.num_layers, setting.pp, setting.pp_interleave_num = 45, 8, 1
    setting.offset = np.array(0, np.int32)
    with pytest.raises(ValueError, match="sum of `offset`"):
        setting._check_inputs()


# MindFormers cannot build those of the 36B that have YaRN: see below
MODELS = [
    name for name in all_recipes() if ENTRIES[name].kind != "mini" and "yarn" not in load(name).get("plugins", {})
]

IMPOSSIBLE = "telechat3_36b/context_32k.yaml"
# keys of a model that no parameter's shape depends on: of recipes that differ only in these one is built
SHAPELESS = {
    *("seq_length", "max_position_embeddings", "rope_theta", "rotary_scaling_factor", "offset"),
    *("use_attn_mask_compression", "use_eod_attn_mask_compression", "moe_token_dispatcher_type"),
    "moe_router_bias_update_rate",
}


def shape_of(name):
    model = load_recipe(RECIPES / name)["model"]["model_config"]
    return json.dumps({key: value for key, value in model.items() if key not in SHAPELESS}, sort_keys=True)


@pytest.fixture(scope="module")
def built():
    """recipe -> number of parameters or an error's text."""
    shapes = {name: shape_of(name) for name in [*MODELS, IMPOSSIBLE]}
    one_each = {shape: str(RECIPES / name) for name, shape in shapes.items()}
    counts = counted(one_each.values())
    return {name: counts[one_each[shape]] for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_mindformers_builds_a_model_of_the_named_size(name, built):
    assert built[name] + count_connections(load(name)) == ENTRIES[name].parameters  # MindFormers has one stream


@pytest.mark.slow
def test_stock_mindformers_cannot_build_the_36b_with_yarn(built):
    """If this test fails, MindFormers supports YaRN for grouped-query models; then see which parts of plugins/yarn can
    be removed.
    """
    assert "qk_pos_emb_head_dim" in built[IMPOSSIBLE]


def test_no_layer_of_the_training_graph_reads_pangus_sandwich_norm():
    """If this test fails, a layer of MindFormers' training graph reads the sandwich norm, and Pangu's card may claim
    more.
    """
    (package,) = find_spec("mindformers").submodule_search_locations  # importing it takes longer
    folder = Path(package) / "parallel_core" / "training_graph"
    assert list(folder.rglob("*.py"))
    done = subprocess.run(["grep", "-rlE", "--include=*.py", "sandwich", folder], capture_output=True, check=False)
    assert done.stdout == b""
