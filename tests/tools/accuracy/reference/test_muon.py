"""Tests of the NumPy reference of Muon. tests/training/test_muon.py compares MindFormers' own steps with it."""

import ml_dtypes
import numpy as np
import pytest

from plugins.sealed_checkpoint.router_state import orthogonal
from tests.tools.accuracy.reference.muon import Muon, Parts, adamw, clip_logits, newton_schulz, update

PARTS = Parts(nope=4, rope=2, value=3, kv_rank=6, experts=3, hidden=8, expert_ffn=5)
SHAPES = {
    "decoder.layers.1.mlp.experts.weight1": (24, 10),
    "decoder.layers.1.mlp.experts.weight2": (15, 8),
    "decoder.layers.0.self_attention.linear_q_up_proj.weight": (12, 7),
    "decoder.layers.0.self_attention.linear_kv_down_proj.weight": (8, 8),
    "decoder.layers.0.self_attention.linear_kv_up_proj.weight": (14, 6),
    "decoder.layers.0.self_attention.linear_proj.weight": (8, 6),
    "decoder.layers.0.mlp.linear_fc1.weight": (20, 8),
    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": (10, 8),
    "decoder.layers.1.mlp.router.weight": (3, 8),
}


def drawn(name):
    return np.random.default_rng(len(name)).standard_normal(SHAPES[name]).astype(np.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_parts_make_up_the_weight_and_differ(name):
    whole = drawn(name)
    parts = PARTS.split(name, whole)
    assert np.array_equal(PARTS.merge(name, parts, whole.shape), whole)
    assert sum(part.size for part in parts) == whole.size
    fused = not any(word in name for word in ("linear_proj", "router", "weight2"))
    assert len(parts) == 1 + fused


def test_heads_rows_and_experts_are_apart():
    name = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
    rows = np.arange(12, dtype=np.float32)[:, None] * np.ones(7, np.float32)
    assert [part[:, 0].tolist() for part in PARTS.split(name, rows)] == [[0, 1, 2, 3, 6, 7, 8, 9], [4, 5, 10, 11]]
    gate, up = PARTS.split("decoder.layers.0.mlp.linear_fc1.weight", rows)
    assert gate[:, 0].tolist() == [0, 2, 4, 6, 8, 10] and up[:, 0].tolist() == [1, 3, 5, 7, 9, 11]
    (experts,) = PARTS.split("decoder.layers.1.mlp.experts.weight2", drawn("decoder.layers.1.mlp.experts.weight2"))
    assert experts.shape == (3, 5, 8)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (3, 5, 9)])
@pytest.mark.parametrize("exact", [True, False])
def test_all_singular_values_come_near_one_and_directions_stay(shape, exact):
    x = np.random.default_rng(1).standard_normal(shape)
    found = newton_schulz(x, exact)
    left, _, right = np.linalg.svd(x, full_matrices=False)
    turned = np.swapaxes(left, -1, -2) @ found @ np.swapaxes(right, -1, -2)
    size = turned.shape[-1]
    assert np.all(np.diagonal(turned, axis1=-2, axis2=-1) > 0.5)
    assert np.all(np.linalg.svd(found)[1] < 1.3)
    if exact:
        assert np.allclose(turned * (1 - np.eye(size)), 0, atol=1e-9)


def test_a_shards_matrix_is_not_the_matrix_shard():
    """Matrices must be gathered before Newton-Schulz: with a part of the matrix or with a wrong group, results differ
    by far more than every tolerance.
    """
    x = np.random.default_rng(2).standard_normal((16, 12))
    whole = newton_schulz(x, exact=True)
    for wrong in (newton_schulz(x[:8], True), newton_schulz(np.concatenate([x[:8], x[:8]]), True)[:8]):
        assert np.linalg.norm(wrong - whole[:8]) > 0.2 * np.linalg.norm(whole[:8])


def test_only_rounding_to_bfloat16_makes_a_gradients_last_bits_a_part_of_a_step():
    """Rounding to bfloat16 is why two layouts differ with Muon (docs/muon.md): eight numbers of 3,072 are rounded the
    other way.
    """
    rng = np.random.default_rng(4)
    left, right = (np.linalg.qr(rng.standard_normal((rows, 48)))[0] for rows in (64, 48))
    one = ((left * np.logspace(0, -3, 48)) @ right.T).astype(np.float32)
    low = one.astype(ml_dtypes.bfloat16)
    half = (low.astype(np.float64) + (low.view(np.uint16) + 1).view(low.dtype)) / 2  # between neighbours in bfloat16
    one[3, :8] = half[3, :8] * (1 - 2**-23)
    two, three = one.copy(), one.copy()  # gradients of other layouts, which err in the last bits
    two[3, :8] = half[3, :8] * (1 + 2**-23)
    three[3, :8] = half[3, :8] * (1 - 2**-22)

    def apart(side, exact):
        found, right = newton_schulz(side, exact), newton_schulz(one, exact)
        return np.linalg.norm(found - right) / np.linalg.norm(right)

    assert 0 < apart(two, exact=True) < 1e-6 and 0 < apart(three, exact=True) < 1e-6
    assert 5e-3 < apart(two, exact=False) < 0.1
    assert apart(three, exact=False) == 0, "it is rounded to the same numbers"


def test_a_step_by_hand():
    name, muon = "decoder.layers.0.self_attention.linear_proj.weight", Muon(exact=True)
    weight, gradient = drawn(name), drawn(name)[::-1].copy()
    first, moment = update(name, weight, np.zeros_like(weight), gradient, 0.1, PARTS, muon)
    assert np.array_equal(moment, gradient)
    direction = newton_schulz(gradient, exact=True)  # of (1 + momentum) times the gradient
    assert np.allclose(first, weight * 0.99 - 0.1 * 0.2 * 8**0.5 * direction, atol=1e-6)
    plain = Muon(exact=True, nesterov=False)
    second, moment = update(name, first, moment, 3 * gradient, 0.1, PARTS, plain)
    assert np.allclose(moment, 3.95 * gradient) and np.allclose(second - first * 0.99, first - weight * 0.99, atol=1e-6)


def test_embedding_output_layer_and_vectors_have_adamw():
    assert orthogonal("decoder.layers.0.mlp.router.weight", 2)
    for name, axes in (("embedding.word_embeddings.weight", 2), ("output_layer.weight", 2), ("norm", 1)):
        assert not orthogonal(name, axes)
    weight, gradient = np.ones((2, 2), np.float32), np.full((2, 2), 0.5, np.float32)
    got, _ = adamw(weight, (np.zeros_like(weight), np.zeros_like(weight)), gradient, 0.1, 1, Muon())
    assert np.allclose(got, 0.99 - 0.1)
    vector = np.ones(2, np.float32)
    assert np.allclose(adamw(vector, (0 * vector, 0 * vector), vector, 0.1, 1, Muon())[0], 0.9), "it does not decay"


def test_clipping_scales_a_heads_logits_to_the_threshold():
    """Two heads; the keys' part with positions, which heads share, is in another weight and stays."""
    rng = np.random.default_rng(3)
    query, value = (f"decoder.layers.0.self_attention.linear_{kind}_up_proj.weight" for kind in ("q", "kv"))
    before = {query: rng.standard_normal((12, 7)), value: rng.standard_normal((14, 6))}
    largest = np.array([400.0, 99.0])
    after = {name: clip_logits(name, weight, largest, PARTS) for name, weight in before.items()}
    x, latent, shared = rng.standard_normal(7), rng.standard_normal(6), rng.standard_normal(2)

    def logits(weights):
        queries = (weights[query] @ x).reshape(2, 6)
        keys = (weights[value] @ latent).reshape(2, 7)[:, :4]
        return (queries[:, :4] * keys).sum(1) + queries[:, 4:] @ shared

    assert np.allclose(logits(after), logits(before) * [0.25, 1.0])
    values = [(weights[value].reshape(2, 7, 6))[:, 4:] for weights in (before, after)]
    assert np.array_equal(*values)
    other = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    assert clip_logits(other, drawn(other), largest, PARTS) is not None
    assert np.array_equal(clip_logits(other, drawn(other), largest, PARTS), drawn(other))
