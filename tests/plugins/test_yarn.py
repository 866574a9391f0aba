"""These tests check what a recipe may say about YaRN, and compare the reference with the paper's properties and with
transformers' own YaRN.

MindFormers' positions as the plugin sets them, forward and backward, against the reference.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from plugins.errors import RecipeError
from plugins.yarn import adapter, reference
from plugins.yarn.plan import RATES, STANDARD, TELECHAT3, Yarn, attention_factor, read
from tests.plugins.cpu_backend.gradients import run

PUBLIC = {
    "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 8192,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 0,
}  # fmt: skip
MODEL = {"model_type": "telechat3", "rope_scaling": PUBLIC}
YARN = Yarn(4.0, 8192, 32.0, 1.0, 1.0, TELECHAT3)
yarns = st.builds(
    Yarn,
    factor=st.floats(1, 64),
    original=st.integers(16, 65536),
    beta_fast=st.floats(2, 64),
    beta_slow=st.floats(0.25, 1.5),
    mscale=st.sampled_from([0.5, 1.0]),
    kind=st.sampled_from(list(RATES)),
)


def test_the_public_36b_is_read():
    assert read({"attention_factor": "telechat3"}, MODEL) == YARN
    assert YARN.attention_factor == pytest.approx(0.07 * math.log(4) + 1)
    assert read({}, MODEL).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(STANDARD, 4, 0.7) == pytest.approx(YARN.attention_factor), "as MindFormers would write it"
    assert attention_factor(TELECHAT3, 1) == 1


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        (True, {}, r"plugins\.yarn: write \{attention_factor: standard\}"),
        ({"attention_factor": "public"}, {}, r"plugins\.yarn\.attention_factor: 'public' is none of standard, telec"),
        ({"factor": 4}, {}, r"plugins\.yarn\.factor: no such setting"),
        ({}, {"model_type": "telechat3_moe"}, r"model_config\.model_type: .* not for 'telechat3_moe'"),
        ({}, {"rope_scaling": None}, r"rope_scaling: plugins\.yarn needs a mapping with rope_type, factor"),
        ({}, {"rope_scaling": PUBLIC | {"rope_type": "rope"}}, r"rope_scaling\.rope_type: 'rope' is not YaRN"),
        ({}, {"rope_scaling": PUBLIC | {"factor": "4"}}, r"rope_scaling\.factor: '4' is not a number"),
        ({}, {"rope_scaling": PUBLIC | {"factor": 0.5}}, r"rope_scaling: factor and original_max_position"),
        (
            {},
            {"rope_scaling": {"rope_type": "yarn"}},
            r"rope_scaling\.factor: the key is missing; write that of the weights",
        ),
        (
            {},
            {"rope_scaling": PUBLIC | {"mscale_all_dim": 1}},
            r"\.mscale_all_dim: the value 1 has no effect",
        ),
        ({}, {"rope_scaling": PUBLIC | {"beta_slow": 32}}, r"rope_scaling\.beta_slow: 32 is not between 0 and beta"),
    ],
)
def test_what_is_refused(settings, change, says):
    with pytest.raises(RecipeError, match=says):
        read(settings, MODEL | change)


@given(yarns, st.sampled_from([4, 64, 128]), st.sampled_from([1e4, 1e6]))
def test_each_frequency_is_between_the_trained_one_and_the_stretched_one(yarn, head_dim, base):
    plain = base ** (-np.arange(0, head_dim, 2) / head_dim)
    found = reference.frequencies(yarn, head_dim, base)
    assert np.all(found <= plain * (1 + 1e-12)) and np.all(found >= plain / yarn.factor * (1 - 1e-12))
    turns = yarn.original * plain / (2 * math.pi)
    ends = [yarn.beta_fast * base ** (2 / head_dim), yarn.beta_slow / base ** (2 / head_dim)]  # rounded to whole pairs
    assert np.allclose(found[turns > ends[0]], plain[turns > ends[0]])
    assert np.allclose(found[turns < ends[1]], plain[turns < ends[1]] / yarn.factor)


@given(yarns)
def test_turning_back_undoes_the_turn_but_for_the_factor(yarn):
    x = np.random.default_rng(2).standard_normal((9, 2, 3, 8))
    back = reference.rotate(reference.rotate(x, yarn, 1e4), yarn, 1e4, backwards=True)
    assert np.allclose(back, yarn.attention_factor**2 * x)


def test_backwards_is_the_gradient():
    rng, yarn = np.random.default_rng(3), replace(YARN, original=4)
    x, dout, step = rng.standard_normal((12, 1, 2, 4)), rng.standard_normal((12, 1, 2, 4)), 1e-6
    found = reference.rotate(dout, yarn, 1e4, backwards=True)
    for place in [(0, 0, 0, 0), (5, 0, 1, 2), (11, 0, 0, 3)]:
        moved = x.copy()
        moved[place] += step
        change = np.sum((reference.rotate(moved, yarn, 1e4) - reference.rotate(x, yarn, 1e4)) * dout) / step
        assert change == pytest.approx(found[place], abs=1e-6)


@pytest.mark.parametrize("kind", RATES)
def test_transformers_has_the_same_cos_and_sin(kind):
    """Over three times the original length, at the head size of the public 36B."""
    torch = pytest.importorskip("torch", reason="transformers' YaRN needs torch: pip install -e '.[align]'")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    yarn = replace(YARN, kind=kind, original=64)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    scaling |= {"beta_fast": 32.0, "beta_slow": 1.0}
    if kind == TELECHAT3:
        scaling["attention_factor"] = yarn.attention_factor
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, max_position_embeddings=256, rope_scaling=scaling)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(192)[None])
    angles = np.arange(192)[:, None] * reference.frequencies(yarn, 128, 1e4)
    assert np.abs(cos[0, :, :64].numpy() - yarn.attention_factor * np.cos(angles)).max() < 2e-5
    assert np.abs(sin[0, :, 64:].numpy() - yarn.attention_factor * np.sin(angles)).max() < 2e-5


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
    """A `Positions` has the parts of a GPTModel that know positions: the angles of all positions, and the layer that
    rotates queries or keys.
    """

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
