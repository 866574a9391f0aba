"""The recipes against the papers: Table 1, parameter totals, meshes, batches, long contexts."""

import math

import numpy as np
import pytest

from plugins.yarn.plan import read
from tests.recipes.oracles import (
    BASE,
    FAMILY,
    FAMILY_STAGES,
    RECIPES,
    ROPE_BASES,
    TELECHAT2,
    TELECHAT2_KEYS,
    TELECHAT3_MOE,
    TELECHAT3_MOE_KEYS,
    VOCABULARY,
    all_recipes,
    count_connections,
    count_parameters,
    load,
)
from tools.recipe.catalogue import load_card
from tools.recipe.load import load_recipe

CARDS = {path.parent.name: load_card(path) for path in RECIPES.glob("*/card.yaml")}
ENTRIES = {f"{folder}/{entry.file.name}": entry for folder, card in CARDS.items() for entry in card.entries}
YARN_36B = ["telechat3_36b/context_32k.yaml", "telechat3_36b/context_128k.yaml"]
YARN = [*YARN_36B, *(name for name in FAMILY if "context" in name)]


def model_of(name):
    return load(name)["model"]["model_config"]


def test_the_family_is_complete():
    assert set(FAMILY) <= set(all_recipes())


@pytest.mark.parametrize("name", FAMILY)
def test_table_1_of_the_report(name):
    model = model_of(name)
    folder, file = name.split("/")
    assert tuple(model[key] for key in TELECHAT3_MOE_KEYS) == TELECHAT3_MOE[folder]
    assert model["vocab_size"] == VOCABULARY
    assert model["seq_length"] == FAMILY_STAGES[file]


@pytest.mark.parametrize("name", [name for name in all_recipes() if name.startswith("telechat2")])
def test_tables_of_the_telechat2_report(name):
    model = model_of(name)
    folder, file = name.split("/")
    assert tuple(model[key] for key in TELECHAT2_KEYS) == TELECHAT2[folder]
    assert model["vocab_size"] == VOCABULARY
    assert model["rope_theta"] == ROPE_BASES.get(file, 10000.0)


@pytest.mark.parametrize("name", [name for name in all_recipes() if not name.startswith("mini")])
def test_parameters_are_what_the_card_says(name):
    assert count_parameters(model_of(name)) + count_connections(load(name)) == ENTRIES[name].parameters


@pytest.mark.parametrize("name", FAMILY)
def test_parameters_land_within_half_a_percent_of_the_name(name):
    named = CARDS[name.split("/")[0]].name_billion * 1e9
    assert count_parameters(model_of(name)) == pytest.approx(named, rel=0.005)


def test_pangu_is_named_without_its_mtp_layer():
    model = {**model_of("pangu_ultra_moe_718b/pretrain_4k.yaml"), "num_nextn_predict_layers": 0}
    assert count_parameters(model) == pytest.approx(718e9, rel=0.005)


def test_xing4_counts_the_published_weights():
    """The tensors of the public GGUF, 31,215,031,088 parameters, to the last one: what MindFormers lacks, added."""
    recipe = load("xing4_29b/pretrain_4k.yaml")
    model, connections = recipe["model"]["model_config"], count_connections(recipe)
    own = 2 * model["vocab_size"] * model["hidden_size"]  # embedding and head of the published MTP layer
    biases = (model["num_hidden_layers"] - model["first_k_dense_replace"] + 1) * model["n_routed_experts"]
    assert connections == 27_527_280
    assert count_parameters(model) + connections + own + biases == 31_215_031_088
    assert count_parameters({**model, "num_nextn_predict_layers": 0}) == pytest.approx(29e9, rel=0.02)


def test_xing4_stretches_its_positions_as_the_published_weights():
    model = model_of("xing4_29b/context_256k.yaml")
    assert (model["position_embedding_type"], model["rope_theta"]) == ("yarn", 10000.0)
    assert (model["rotary_scaling_factor"], model["max_position_embeddings"]) == (64, 4096)
    assert (model["beta_fast"], model["beta_slow"], model["mscale"], model["mscale_all_dim"]) == (32, 1, 1, 1)
    assert model["seq_length"] == 262144


@pytest.mark.parametrize("folder", [*TELECHAT2, "telechat3_36b"])
def test_dense_siblings_are_near_their_names(folder):
    """TeleChat2's own table gives 113.3 B for its "115B" and 35.4 B for its "35B"."""
    assert CARDS[folder].parameters == pytest.approx(CARDS[folder].name_billion * 1e9, rel=0.02)


@pytest.mark.parametrize("name", all_recipes())
def test_mesh_and_batch_are_what_the_card_says(name):
    recipe, entry = load(name), ENTRIES[name]
    mesh = recipe["parallel_config"]
    dp, tp, pp = mesh["data_parallel"], mesh["model_parallel"], mesh["pipeline_stage"]
    cp, ep = mesh.get("context_parallel", 1), mesh.get("expert_parallel", 1)
    vpp = recipe["model"]["model_config"]["pp_interleave_num"]
    assert entry.layout == f"dp{dp} tp{tp} cp{cp} pp{pp} vpp{vpp} ep{ep}"
    assert entry.devices == dp * tp * cp * pp
    micro_batches = mesh["micro_batch_num"] if pp > 1 else 1
    assert entry.global_batch_size == recipe["runner_config"]["batch_size"] * dp * micro_batches


def test_the_438b_run_is_the_reports():
    recipe, entry = load("telechat3_438b/pretrain_4k.yaml"), ENTRIES["telechat3_438b/pretrain_4k.yaml"]
    mesh = recipe["parallel_config"]
    assert (entry.devices, entry.global_batch_size) == (4096, 16384)
    assert (mesh["pipeline_stage"], mesh["micro_batch_num"], mesh["expert_parallel"]) == (8, 64, 16)
    assert recipe["model"]["model_config"]["pp_interleave_num"] == 2
    assert recipe["context"]["max_device_memory"] == "45GB"
    assert ENTRIES["telechat3_1119b/pretrain_4k.yaml"].devices == 8192
    assert ENTRIES["telechat3_105b/pretrain_4k.yaml"].devices == 256
    assert ENTRIES["pangu_ultra_moe_718b/pretrain_4k.yaml"].devices == 48 * 8 * 16


@pytest.mark.parametrize("name", all_recipes())
def test_sizes_divide(name):
    """Every size is divisible by the numbers by which MindFormers or the mesh divides it."""
    recipe = load(name)
    model, mesh = recipe["model"]["model_config"], recipe["parallel_config"]
    tp, cp, ep = mesh["model_parallel"], mesh.get("context_parallel", 1), mesh.get("expert_parallel", 1)
    assert model["num_attention_heads"] % tp == 0
    assert model["vocab_size"] % tp == 0
    assert model["seq_length"] % (tp * cp) == 0
    assert tp <= 8, "tensor parallelism stays in a node"
    if "n_routed_experts" in model:
        assert model["n_routed_experts"] % ep == 0
        assert mesh["data_parallel"] * tp % ep == 0
    if model.get("moe_token_dispatcher_type") == "alltoall_deredundency":
        assert ep % model["npu_nums_per_device"] == 0
    if mesh["pipeline_stage"] > 1:
        assert mesh["micro_batch_num"] >= mesh["pipeline_stage"]


@pytest.mark.parametrize("name", [name for name in all_recipes() if not name.startswith("mini")])
def test_a_run_has_whole_steps_and_its_schedule_covers_it(name):
    recipe, entry = load(name), ENTRIES[name]
    loader = recipe["train_dataset"]["data_loader"]
    if loader["type"] != "BlendedMegatronDatasetDataLoader":
        return
    steps, rest = divmod(loader["sizes"][0], entry.global_batch_size)
    assert rest == 0
    assert 0 < steps <= recipe["lr_schedule"]["total_steps"]


@pytest.mark.parametrize("name", [name for name in FAMILY if "finetune" not in name])
def test_a_stage_takes_as_many_tokens_a_step_as_the_one_before(name):
    first = f"{name.split('/')[0]}/pretrain_4k.yaml"
    assert ENTRIES[name].global_batch_size * model_of(name)["seq_length"] == ENTRIES[first].global_batch_size * 4096


@pytest.mark.parametrize("name", [name for name in all_recipes() if "q_lora_rank" in model_of(name)])
def test_both_spellings_of_the_head_sizes(name):
    """MindFormers 1.9.0 reads qk_head_dim and qk_pos_emb_head_dim; Hugging Face and the papers write the others."""
    model = model_of(name)
    assert model["qk_head_dim"] == model["qk_nope_head_dim"]
    assert model["qk_pos_emb_head_dim"] == model["qk_rope_head_dim"]


@pytest.mark.parametrize("name", YARN)
def test_yarn_stretches_the_trained_length_to_the_sequence(name):
    model = model_of(name)
    yarn = model.get("rope_scaling", model)  # MLA models have the keys themselves
    factor = yarn.get("factor", yarn.get("rotary_scaling_factor"))
    assert model["position_embedding_type"] == "yarn"
    assert model["max_position_embeddings"] * factor == model["seq_length"]
    assert yarn.get("original_max_position_embeddings", 4096) == model["max_position_embeddings"]
    assert (yarn["beta_fast"], yarn["beta_slow"]) == (32, 1)
    assert (yarn["mscale"], yarn["mscale_all_dim"]) == (1, 0 if name in YARN_36B else 1)


@pytest.mark.parametrize("name", YARN_36B)
def test_the_36b_scales_attention_as_its_public_weights(name):
    """telechat3-yarn multiplies cos and sin by 0.07 ln(factor) + 1."""
    recipe = load(name)
    yarn = read(recipe["plugins"]["yarn"], recipe["model"]["model_config"])
    assert yarn.attention_factor == pytest.approx(0.07 * math.log(yarn.factor) + 1)
    assert (yarn.original, yarn.beta_fast, yarn.beta_slow) == (8192, 32, 1)


@pytest.mark.parametrize("name", ["telechat3_36b/finetune_8k.yaml", "telechat3_36b/finetune_8k_one_server.yaml"])
def test_fine_tuning_has_the_positions_of_the_public_weights(name):
    ours, theirs = load(name), load(YARN_36B[0])
    assert ours["model"]["model_config"]["rope_scaling"] == theirs["model"]["model_config"]["rope_scaling"]
    assert ours["plugins"]["yarn"] == theirs["plugins"]["yarn"]


@pytest.mark.parametrize("folder", TELECHAT3_MOE)
def test_expert_memory_of_a_stage_fits(folder):
    """The cards' arithmetic for the experts: fp32 gradients, a bf16 copy, sharded fp32 weights and two moments."""
    for file in FAMILY_STAGES:
        recipe = load(f"{folder}/{file}")
        model, mesh = recipe["model"]["model_config"], recipe["parallel_config"]
        stages = mesh["pipeline_stage"] * model["pp_interleave_num"]
        layers = (model["num_hidden_layers"] // stages + np.atleast_2d(model["offset"])).sum(axis=0).max()
        experts = layers * model["n_routed_experts"] * 3 * model["hidden_size"] * model["moe_intermediate_size"]
        local = experts / mesh["expert_parallel"]
        shards = mesh["data_parallel"] * mesh["model_parallel"] // mesh["expert_parallel"] * mesh["context_parallel"]
        assert local * (4 + 2 + 12 / shards) < 0.75 * float(recipe["context"]["max_device_memory"][:-2]) * 1e9


@pytest.mark.parametrize("name", all_recipes())
def test_files_stay_short(name):
    limit = 80 if not name.startswith("mini") else math.inf
    assert len((RECIPES / name).read_text().splitlines()) < limit


def test_fragments_share_no_section_within_a_recipe():
    """MindFormers merges bases shallowly: a section in two of them would silently lose one.

    Of a base that is a whole recipe, as a mini's, sections are meant to be replaced.
    """
    import yaml

    for name in all_recipes():
        bases = yaml.safe_load((RECIPES / name).read_text()).get("base_config") or []
        bases = bases if isinstance(bases, list) else [bases]
        fragments = [base for base in bases if "base" in base.split("/")]
        sections = [key for base in fragments for key in load_recipe((RECIPES / name).parent / base)]
        assert len(sections) == len(set(sections)), name
    assert not {"card.yaml", "README.md"} & {path.name for path in BASE.iterdir()}
