"""Parameter counts against numbers that MindFormers' own parameters gave (full shapes of a compiled graph)."""

import pytest

from tools.model.architecture import model_of
from tools.model.weights import KINDS, active_parameters, layer_size, parameters, stage_parameters

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
