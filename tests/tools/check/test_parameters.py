"""Parameter counts against numbers that MindFormers' own parameters gave (full shapes of a compiled graph)."""

import pytest

from tools.check.parameters import parts_of

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
    assert parts_of(fields).total == total


def test_active_parameters_give_the_model_its_name():
    assert parts_of({**M105, "mtp_num_layers": 1}).active == pytest.approx(4.7e9, rel=0.01)


def test_stages_add_up_to_the_whole():
    parts = parts_of({**M105, "mtp_num_layers": 1})
    stages = parts.per_stage([[6, 6, 6, 6, 6, 5, 5, 5]])
    assert sum(stages) == parts.total
    assert stages[1] == 6 * parts.moe_layer
    assert stages[0] == parts.embedding + parts.dense_layer + 5 * parts.moe_layer
    assert stages[-1] == 5 * parts.moe_layer + parts.head + parts.mtp


def test_interleaved_stages_add_up_too():
    parts = parts_of(M438)
    layers = [[4, 4, 4, 4, 4, 4, 4, 4], [3, 3, 3, 3, 3, 3, 3, 1]]
    assert sum(parts.per_stage(layers)) == parts.total


def test_a_dense_model_with_grouped_queries():
    fields = {
        "num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 20, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 2, "vocab_size": 100, "gated_linear_unit": True, "normalization": "RMSNorm",
    }  # fmt: skip
    layer = 8 * (4 + 2 + 2) * 2 + 8 * 8 + 3 * 8 * 20 + 2 * 8
    assert parts_of(fields).total == 2 * layer + 2 * 100 * 8 + 8
    assert parts_of(fields).active == parts_of(fields).total


def test_every_second_layer_is_moe():
    pattern = parts_of({**M105, "first_k_dense_replace": 0, "moe_layer_freq": 2, "num_layers": 4}).pattern
    assert pattern == (True, False, True, False)
