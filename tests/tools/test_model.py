"""Parameter counts against numbers that MindFormers' own parameters gave (full shapes of a compiled graph)."""

import copy
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipes.counted import counted
from tools.check.check import table_of
from tools.data.imbalance.recipe import setting_of
from tools.dryrun.plan import stages_of
from tools.estimate.from_recipe import from_recipe
from tools.layout.resolve import sample_cost
from tools.model import (
    KINDS,
    Latent,
    Model,
    active_parameters,
    attention_weights,
    flops_per_token,
    layer_size,
    model_of,
    multiplied,
    parameters,
    pattern_of,
    stage_parameters,
)
from tools.recipe.dump import recipe_text
from tools.recipe.load import load_recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

MLA = {
    "vocab_size": 131072, "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_layernorm": True,
    "gated_linear_unit": True, "normalization": "RMSNorm", "shared_expert_num": 1, "first_k_dense_replace": 1,
}  # fmt: skip
M105 = {
    **MLA, "num_layers": 45, "hidden_size": 2560, "ffn_hidden_size": 7680, "num_attention_heads": 32,
    "num_moe_experts": 192, "moe_ffn_hidden_size": 1536, "moe_shared_expert_intermediate_size": 1536,
    "moe_router_topk": 4, "mtp_num_layers": 0,
}  # fmt: skip
M438 = {
    **MLA, "num_layers": 54, "hidden_size": 5120, "ffn_hidden_size": 15360, "num_attention_heads": 128,
    "num_moe_experts": 256, "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8, "mtp_num_layers": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "total"),
    [
        (M105, 102_256_309_760),
        ({**M105, "mtp_num_layers": 1}, 104_576_167_936),
        (M438, 438_186_030_080),
    ],
)
def test_totals_are_exact(fields, total):
    assert parameters(model_of(fields)) == total


def test_active_parameters_give_the_model_its_name():
    assert active_parameters(model_of({**M105, "mtp_num_layers": 1})) == pytest.approx(4.7e9, rel=0.01)


def test_stages_add_up_to_the_whole():
    model = model_of({**M105, "mtp_num_layers": 1})
    size = {kind: layer_size(model, kind) for kind in KINDS}
    stages = stage_parameters(model, [[6, 6, 6, 6, 6, 5, 5, 5]])
    assert sum(stages) == parameters(model)
    assert stages[1] == 6 * size["moe"]
    assert stages[0] == size["embedding"] + size["dense"] + 5 * size["moe"]
    assert stages[-1] == 5 * size["moe"] + size["head"] + size["mtp"]


def test_interleaved_stages_add_up_too():
    model = model_of(M438)
    layers = [[4, 4, 4, 4, 4, 4, 4, 4], [3, 3, 3, 3, 3, 3, 3, 1]]
    assert sum(stage_parameters(model, layers)) == parameters(model)


def test_a_dense_model_with_grouped_queries():
    fields = {
        "num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 20, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 2, "vocab_size": 100, "gated_linear_unit": True, "normalization": "RMSNorm",
    }  # fmt: skip
    layer = 8 * (4 + 2 + 2) * 2 + 8 * 8 + 3 * 8 * 20 + 2 * 8
    assert parameters(model_of(fields)) == 2 * layer + 2 * 100 * 8 + 8
    assert active_parameters(model_of(fields)) == parameters(model_of(fields))


def test_every_second_layer_is_moe():
    pattern = model_of({**M105, "first_k_dense_replace": 0, "moe_layer_freq": 2, "num_layers": 4}).pattern
    assert pattern == ("moe", "dense", "moe", "dense")


ROOT = Path(__file__).resolve().parents[2]
MOE, GROUPED = (
    ROOT / "recipes" / name for name in ("telechat3_105b/pretrain_4k.yaml", "telechat3_36b/pretrain_8k.yaml")
)
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 192,
    "num_hidden_layers": 4, "seq_length": 4096, "offset": 0, "pp_interleave_num": 1,
}  # fmt: skip
SMALL_MOE = {
    **SMALL, "n_routed_experts": 8, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "q_lora_rank": 32,
    "moe_shared_expert_intermediate_size": 48, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_head_dim": 16,
    "qk_rope_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
VARIANTS = {
    "plain": (MOE, {}),
    "tied": (MOE, {"tie_word_embeddings": True}),
    "every second layer": (MOE, {"first_k_dense_replace": 0, "moe_layer_freq": 2}),
    "a list, MTP of a dense layer": (MOE, {"first_k_dense_replace": 0, "moe_layer_freq": [1, 0, 1, 0]}),
    "no MTP": (MOE, {"num_nextn_predict_layers": 0}),
    "queries not compressed": (MOE, {"q_lora_rank": None}),
    "joint matrix with biases": (MOE, {"attention_bias": True, "mla_qkv_concat": True}),
    "biases that no matrix takes": (MOE, {"attention_bias": True}),
    "LayerNorm": (MOE, {"normalization": "LayerNorm"}),
    "gate of the shared expert": (MOE, {"use_shared_expert_gating": True}),
    "no shared expert, but its width": (MOE, {"n_shared_experts": 0}),
    "two shared experts": (MOE, {"n_shared_experts": 2, "moe_shared_expert_intermediate_size": None}),
    "grouped queries": (GROUPED, {"num_key_value_heads": 2}),
    "grouped, tied": (GROUPED, {"tie_word_embeddings": True}),
    "grouped, biases": (GROUPED, {"add_bias_linear": True}),
    "grouped, bias of the second matrix": (GROUPED, {"add_mlp_fc2_bias_linear": True}),
    "grouped, normed queries": (GROUPED, {"qk_layernorm": True, "attention_bias": True}),
    "grouped, no gate": (GROUPED, {"gated_linear_unit": False, "hidden_act": "gelu"}),
}


def variant(base, changes):
    recipe = copy.deepcopy(load_recipe(base))
    recipe["model"]["model_config"].update({**(SMALL_MOE if base == MOE else {**SMALL, "head_dim": 16}), **changes})
    return recipe


@pytest.mark.slow
def test_mindformers_builds_as_many_weights_as_we_count(tmp_path):
    paths = {name: tmp_path / f"{index}.yaml" for index, name in enumerate(VARIANTS)}
    for name, path in paths.items():
        path.write_text(recipe_text(variant(*VARIANTS[name])))
    built = counted(paths.values())
    ours = {name: parameters(model_of(fields_of(variant(*VARIANTS[name])))) for name in VARIANTS}
    assert ours == {name: built[str(path)] for name, path in paths.items()}


@pytest.mark.parametrize(("fused", "split"), [(False, "rows"), (True, "")])
def test_queries_of_a_fused_matrix_are_whole_on_tensor_parallel_ranks(fused, split):
    """As MindFormers' SequenceParallelLinear: memory and time were those of a matrix that tensor parallelism cuts."""
    recipe = variant(MOE, {"q_lora_rank": None, "attention_bias": True, "mla_qkv_concat": fused})
    found = {weight.name: weight.split for weight in attention_weights(model_of(fields_of(recipe)))}
    assert {found[name] for name in ("q", "q_bias") if name in found} == {split} and found["kv_up"] == "rows"


def fields_of(recipe):
    return convert(View(recipe), load_schema()).fields


@st.composite
def recipes(draw):
    """Legal recipes of small models: MLA or grouped queries, patterns, ties, MTP, shared experts, pipelines."""
    mla = draw(st.booleans())
    stages, chunks = draw(st.sampled_from([(2, 1), (4, 1), (2, 2)]))
    layers = draw(st.integers(1, 3)) * stages * chunks
    changes = {"num_hidden_layers": layers, "pp_interleave_num": chunks, "tie_word_embeddings": draw(st.booleans())}
    if mla:
        pattern = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers).filter(any))
        dense = draw(st.integers(1, layers - 1)) if layers > 1 else 0
        patterns = [(dense, 1), (0, 1), (0, 2), (0, pattern)]
        first, frequency = draw(st.sampled_from(patterns))
        changes |= {"first_k_dense_replace": first, "moe_layer_freq": frequency}
        shared = draw(st.integers(0, 2))
        changes |= {"n_shared_experts": shared, "moe_shared_expert_intermediate_size": 48 * shared or None}
        changes |= {
            "num_nextn_predict_layers": draw(st.integers(0, 1)),
            "q_lora_rank": draw(st.sampled_from([32, None])),
        }
    else:
        changes |= {"num_key_value_heads": draw(st.sampled_from([1, 2, 4])), "qk_layernorm": draw(st.booleans())}
    recipe = variant(MOE if mla else GROUPED, changes)
    recipe["parallel_config"].update(
        {"data_parallel": 4, "model_parallel": 2, "pipeline_stage": stages, "context_parallel": 1, "micro_batch_num": 8}
    )
    recipe["parallel_config"]["expert_parallel"] = 4 if mla else 1
    recipe["recompute_config"] = {"recompute": False}
    return recipe


@given(recipe=recipes())
@settings(max_examples=60)
def test_every_reader_counts_the_same(recipe):
    view, fields = View(recipe), fields_of(recipe)
    table = table_of(view, convert(view, load_schema()))
    config = from_recipe(recipe)
    assert config.model == model_of(fields)
    assert table["parameters_total"] == parameters(config.model) == sum(table["stage_parameters"])
    assert table["flops_per_token"] == flops_per_token(config.model, config.sequence)

    stages = stages_of(view)
    held = [[*stage.kinds, *["mtp"] * (config.model.mtp * ("head" in stage.ends)), *stage.ends] for stage in stages]
    assert [sum(layer_size(config.model, kind) for kind in kinds) for kinds in held] == table["stage_parameters"]
    assert [sorted(kinds) for kinds in held] == [
        sorted(chain(*config.stage_kinds(stage))) for stage in range(config.pp)
    ]


@given(recipe=recipes(), recompute=st.sampled_from([False, True]))
@settings(max_examples=40)
def test_imbalance_weighs_samples_by_the_flops_of_tc3_check(recipe, recompute):
    """`tc3 data imbalance` predicts with the FLOPs of `tc3 check`, and a launch writes the same
    costs for the plugin.
    """
    recipe["recompute_config"] = {"recompute": recompute}
    recipe["train_dataset"]["data_loader"]["config"]["seq_length"] = recipe["model"]["model_config"]["seq_length"]
    cost = setting_of(recipe, "nowhere", None).cost
    view = View(recipe)
    table = table_of(view, convert(view, load_schema()))
    # a token of a sequence of n attends to n / 2 tokens on average; of four passes one is forward again
    flops = cost.per_token + cost.per_pair * recipe["model"]["model_config"]["seq_length"] / 2
    assert 3 * flops == (4 if recompute else 3) * table["flops_per_token"]
    assert cost == sample_cost(recipe)


def test_half_of_the_438b_in_experts_is_one_number_everywhere():
    """`tc3 check --build` said 234 B and `tc3 search` 446 B."""
    recipe = load_recipe(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml")
    recipe["model"]["model_config"].update({"first_k_dense_replace": 0, "moe_layer_freq": 2})
    assert parameters(from_recipe(recipe).model) == 234_088_576_000
    assert table_of(View(recipe), convert(View(recipe), load_schema()))["parameters_total"] == 234_088_576_000


@pytest.mark.parametrize(
    ("groups", "chosen", "nodes", "most"),
    [(8, 4, 8, 4), (8, 4, 4, 4), (8, 2, 4, 2), (8, 2, 16, 4), (8, 2, 3, 3), (4, 1, 6, 3), (8, 8, 8, 8), (1, 1, 8, 8)],
)
def test_a_router_of_groups_keeps_a_token_on_few_nodes(groups, chosen, nodes, most):
    model = model_of(fields_of(variant(MOE, {"n_group": groups, "topk_group": chosen})))
    assert model.nodes_of_token(nodes) == most


def test_flops_by_module_add_up():
    """Six for each weight that multiplies; by hand for one MoE layer, one dense layer and a head."""
    model = model_of(fields_of(variant(MOE, {"num_hidden_layers": 2, "num_nextn_predict_layers": 0})))
    attention = 64 * 32 + 32 * 4 * 24 + 64 * 24 + 16 * 4 * 28 + 4 * 12 * 64
    assert multiplied(model) == {
        "attention": 2 * attention, "mlp": 3 * 64 * 192 + 3 * 64 * 48, "experts": 2 * 3 * 64 * 48, "router": 64 * 8,
        "mtp": 0, "head": 512 * 64,
    }  # fmt: skip
    assert flops_per_token(model, 100) == 6 * sum(multiplied(model).values()) + 3 * 100 * 4 * (24 + 12) * 2


@st.composite
def models(draw):
    """A model of any shape: MoE or dense, MLA or grouped queries, MTP, a gate on the shared expert, biased norms."""
    layers, heads, moe = draw(st.integers(1, 9)), draw(st.sampled_from([4, 8])), draw(st.booleans())
    ranks = (draw(st.sampled_from([0, 24])), *draw(st.tuples(*[st.integers(1, 40)] * 4)))
    latent = Latent(*ranks) if draw(st.booleans()) else None
    experts = draw(st.sampled_from([8, 12])) if moe else 0
    shared = draw(st.sampled_from([0, 20])) if moe else 0
    return Model(
        pattern_of(layers, experts, draw(st.integers(0, layers)), draw(st.integers(1, 3))),
        hidden=draw(st.integers(1, 99)),
        heads=heads,
        kv_heads=heads if latent else draw(st.sampled_from([1, 2, 4])),
        head_dim=0 if latent else draw(st.integers(1, 32)),
        ffn=draw(st.integers(1, 99)),
        vocab=draw(st.integers(1, 999)),
        **{name: draw(st.booleans()) for name in ("gated", "tied", "qk_norm", "norm_bias")},
        **{"latent": latent, "experts": experts, "top_k": draw(st.integers(1, 8)) if moe else 0},
        **{"expert_ffn": draw(st.integers(1, 50)) if moe else 0, "shared_ffn": shared},
        **{"shared_gate": bool(shared) and draw(st.booleans()), "mtp": draw(st.integers(0, 2))},
    )


def by_the_papers(model):
    """All weights, those of a token and those that multiply it: the matrices of attention (GQA, arXiv 2305.13245; MLA,
    2405.04434), of MLPs and experts, and of MTP (2412.19437), with scales of norms.
    """
    h, n, norm = model.hidden, model.heads, 2 if model.norm_bias else 1
    if model.latent:
        r, mla = model.latent.query_rank, model.latent
        keys = h * (mla.kv_rank + mla.rope) + mla.kv_rank * n * (mla.nope + mla.value)
        queries = (h * r if r else 0) + (r or h) * n * (mla.nope + mla.rope)
        attention, inner = keys + queries + n * mla.value * h, r + mla.kv_rank
    else:
        attention, inner = 2 * h * model.head_dim * (n + model.kv_heads), 2 * model.head_dim
    scales = norm * (2 * h + (inner if model.qk_norm else 0))
    each = (3 if model.gated else 2) * h

    def sizes(kind):
        if kind == "dense":
            return each * model.ffn, each * model.ffn
        rest = each * model.shared_ffn + h * model.experts + h * model.shared_gate
        return each * model.expert_ffn * model.experts + rest, each * model.expert_ffn * model.top_k + rest

    every = [(attention + size, attention + used) for size, used in map(sizes, model.pattern)]
    size, used = every[-1]
    ends = model.vocab * h * (1 if model.tied else 2) + norm * h
    total = sum(one for one, _ in every) + model.layers * scales + ends
    active = sum(one for _, one in every) + model.layers * scales + ends
    total += model.mtp * (size + scales + 2 * h * h + 3 * norm * h)
    multiplying = sum(one for _, one in every) + model.mtp * (used + 2 * h * h) + (1 + model.mtp) * model.vocab * h
    return total, active, multiplying


@given(model=models(), sequence=st.sampled_from([1, 128, 131072]))
@settings(max_examples=100)
def test_weights_and_flops_are_those_of_the_papers(model, sequence):
    total, active, multiplying = by_the_papers(model)
    assert (parameters(model), active_parameters(model)) == (total, active)
    widths = (model.latent.nope + model.latent.rope + model.latent.value) if model.latent else 2 * model.head_dim
    # a pair costs two products forward and four backward, and half of all pairs attend
    pairs = 6 * model.heads * widths * (model.layers + model.mtp) * sequence // 2
    assert flops_per_token(model, sequence) == 6 * multiplying + pairs
