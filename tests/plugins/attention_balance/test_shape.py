import pytest

from plugins.attention_balance.shape import model_cost, recomputed_share
from plugins.errors import RecipeError

DENSE = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "intermediate_size": 96, "gated_linear_unit": True,
}  # fmt: skip
MLA = {
    **DENSE, "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 8,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
MOE = {
    **MLA, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
ATTENTION = 64 * 24 + 24 * 4 * 24 + 64 * (8 + 8) + 8 * 4 * (16 + 12) + 4 * 12 * 64


def test_grouped_query_attention():
    cost = model_cost(DENSE)
    weights = 4 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96) + 100 * 64
    assert cost.per_token == 6 * weights
    assert cost.per_pair == 6 * (16 + 16) * 4 * 4
    assert model_cost({**DENSE, "head_dim": 32}).per_pair == 2 * cost.per_pair


def test_latent_attention_and_experts():
    moe = 3 * 64 * (2 * 32 + 32) + 64 * 8
    weights = 5 * ATTENTION + 3 * 64 * 96 + 3 * moe + (moe + 2 * 64 * 64) + 2 * 100 * 64
    cost = model_cost(MOE)
    assert cost.per_token == 6 * weights
    assert cost.per_pair == 6 * (16 + 8 + 12) * 4 * 5


def test_the_spelling_that_mindformers_reads_wins():
    """It does not map qk_nope_head_dim for TeleChat3-MoE."""
    assert model_cost({**MLA, "qk_head_dim": 32}).per_pair == model_cost({**MLA, "qk_nope_head_dim": 32}).per_pair
    both = {**MLA, "qk_head_dim": 32, "qk_nope_head_dim": 16}
    assert model_cost(both).per_pair == model_cost({**MLA, "qk_head_dim": 32}).per_pair


@pytest.mark.parametrize(
    ("recompute", "share"),
    [(None, 0), (False, 0), (True, 1), ([1, 1], 0.5), ([[1, 0], [1, 1]], 0.75), ([True, 1], 0.75), ([9, 9], 1)],
)
def test_recompute_adds_its_share_of_a_forward_pass(recompute, share):
    assert recomputed_share(DENSE, recompute) == share
    assert model_cost(DENSE, recompute).per_pair == pytest.approx((3 + share) / 3 * model_cost(DENSE).per_pair)


@pytest.mark.parametrize("name", ["num_hidden_layers", "v_head_dim", "moe_intermediate_size"])
def test_a_missing_size_is_named(name):
    with pytest.raises(RecipeError, match=rf"model_config\.{name}.*measured per_pair and per_token"):
        model_cost({key: value for key, value in MOE.items() if key != name})
