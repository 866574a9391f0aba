"""MindFormers' positions as the plugin sets them, forward and backward, against the reference."""

import numpy as np
import pytest
from mindformers.parallel_core.training_graph.base_models.common.embeddings.rope_utils import ApplyRotaryPosEmb
from mindformers.parallel_core.training_graph.base_models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
)
from mindformers.parallel_core.training_graph.transformer import utils
from mindformers.parallel_core.training_graph.transformer.attention import SelfAttention
from mindformers.parallel_core.transformer_config import TransformerConfig
from mindspore import nn

from plugins import telechat3_moe
from plugins.cpu_backend.layers import Outer
from plugins.cpu_backend.model import on_cpu
from plugins.yarn import adapter, reference
from plugins.yarn.plan import RATES, TELECHAT3, Yarn
from tests.plugins.cpu_backend.gradients import run

ORIGINAL, LENGTH, BATCH, HEADS, GROUPS, DIM, BASE = 16, 48, 2, 6, 2, 8, 10000.0
SCALING = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
}  # fmt: skip


def yarn(kind):
    return Yarn(4.0, ORIGINAL, 32.0, 1.0, 1.0, kind)


def config():
    """As MindFormers makes it of a recipe for a dense TeleChat3."""
    return TransformerConfig(
        num_layers=2, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=DIM, hidden_size=HEADS * DIM,
        ffn_hidden_size=16, seq_length=LENGTH, compute_dtype="float32", params_dtype="float32", attention_dropout=0.0,
        add_bias_linear=False, fused_norm=False, hidden_act="swiglu", gated_linear_unit=True, moe_layer_freq=[0, 0],
        position_embedding_type="yarn", rotary_base=BASE, rope_scaling=dict(SCALING), vocab_size=32,
    )  # fmt: skip


class Positions(nn.Cell):
    """What a GPTModel has of positions: the angles of all of them, and the layer that turns queries or keys."""

    def __init__(self):
        super().__init__()
        self.rotary_pos_emb = YarnRotaryEmbedding(
            DIM, rotary_base=BASE, scaling_factor=4.0, original_max_position_embeddings=ORIGINAL,
            beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.0,
        )  # fmt: skip
        self.rotary_pos_emb.outer = Outer()
        self.turn = ApplyRotaryPosEmb(config())

    def construct(self, x):
        return self.turn(x, self.rotary_pos_emb(LENGTH))


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("kind", [*RATES, None])
def test_turns_as_the_reference_over_three_times_the_original_length(kind):
    """Without the plugin, MindFormers turns by other angles: the comparison can fail."""
    rng = np.random.default_rng(5)
    x, dout = (rng.standard_normal((LENGTH, BATCH, HEADS, DIM)).astype(np.float32) for _ in range(2))
    cell, expected = Positions(), yarn(kind or TELECHAT3)
    if kind:
        adapter.scale(cell, expected.attention_factor)
    out, (gradient,) = run(cell, [x], dout)
    apart = np.abs(out - reference.rotate(x, expected, BASE)).max()
    behind = np.abs(gradient - reference.rotate(dout, expected, BASE, backwards=True)).max()
    assert (max(apart, behind) < 3e-5) if kind else min(apart, behind) > 0.1


def test_a_model_with_grouped_queries_is_built_with_yarn(monkeypatch):
    monkeypatch.setattr(utils, "is_legacy_model", lambda: False)
    built = config()
    with pytest.raises(AttributeError, match="qk_pos_emb_head_dim"):
        telechat3_moe.gpt_model(built, on_cpu)
    monkeypatch.setattr(telechat3_moe, "_positions", [])
    telechat3_moe.use_positions(lambda made: adapter.positions(made, yarn(TELECHAT3)))
    model = telechat3_moe.gpt_model(built, on_cpu)
    expected = reference.frequencies(yarn(TELECHAT3), DIM, BASE)
    np.testing.assert_allclose(model.rotary_pos_emb.freqs.asnumpy(), expected, rtol=1e-6)
    layers = [cell for _, cell in model.cells_and_names() if isinstance(cell, SelfAttention)]
    turns = [layer.apply_rotary_pos_emb for layer in layers]
    assert [part.factor for turn in turns for part in (turn.cos, turn.sin)] == [pytest.approx(1.0970406)] * 4
    assert model.rotary_pos_emb.mscale == 1 and not hasattr(built, "qk_pos_emb_head_dim")
