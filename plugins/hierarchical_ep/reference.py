"""This module computes the MoE layer in the most direct way: each expert processes the tokens that chose it. The
computation is in NumPy, with any float type.
"""

from __future__ import annotations

import numpy as np


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """Return silu(gate) * up, [..., H], for a tensor [..., 2H] that holds gate, then up."""
    gate, up = np.split(gate_up, 2, -1)
    return gate / (1 + np.exp(-gate)) * up


def swiglu_backward(gate_up: np.ndarray, d_out: np.ndarray) -> np.ndarray:
    """Return the gradient [..., 2H] of `swiglu` with respect to its argument, for the gradient d_out [..., H] of its
    result.
    """
    gate, up = np.split(gate_up, 2, -1)
    sigmoid = 1 / (1 + np.exp(-gate))
    return np.concatenate([d_out * up * sigmoid * (1 + gate * (1 - sigmoid)), d_out * gate * sigmoid], -1)


def expert(rows: np.ndarray, w1: np.ndarray, w2: np.ndarray) -> np.ndarray:
    """Return the output [M, h] of one SwiGLU expert for rows [M, h], w1 [h, 2H] (gate, then up) and w2 [H, h]."""
    return swiglu(rows @ w1) @ w2


def expert_backward(
    rows: np.ndarray, w1: np.ndarray, w2: np.ndarray, d_out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of `expert` with respect to rows, w1 and w2, for the gradient d_out [M, h] of its result."""
    gate_up = rows @ w1
    d_gate_up = swiglu_backward(gate_up, d_out @ w2.T)
    return d_gate_up @ w1.T, rows.T @ d_gate_up, swiglu(gate_up).T @ d_out


def moe(tokens: np.ndarray, probs: np.ndarray, ids: np.ndarray, w1: np.ndarray, w2: np.ndarray) -> np.ndarray:
    """Return out[n] = sum over j of probs[n, j] * expert_{ids[n, j]}(tokens[n]).

    Args:
        tokens: [N, h].
        probs, ids: [N, k].
        w1: [E, h, 2H].
        w2: [E, H, h].

    Returns:
        [N, h].
    """
    out = np.zeros_like(tokens)
    for e in range(len(w1)):
        for j in range(ids.shape[1]):
            chose = ids[:, j] == e
            out[chose] += probs[chose, j, None] * expert(tokens[chose], w1[e], w2[e])
    return out


def moe_backward(
    tokens: np.ndarray, probs: np.ndarray, ids: np.ndarray, w1: np.ndarray, w2: np.ndarray, d_out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of `moe` with respect to tokens, probs, w1 and w2, for the gradient d_out [N, h] of its
    result.
    """
    d_tokens, d_probs, d_w1, d_w2 = (np.zeros_like(value) for value in (tokens, probs, w1, w2))
    for e in range(len(w1)):
        for j in range(ids.shape[1]):
            chose = ids[:, j] == e
            d_probs[chose, j] = (d_out[chose] * expert(tokens[chose], w1[e], w2[e])).sum(-1)
            d_expert = probs[chose, j, None] * d_out[chose]
            d_rows, d_w1_part, d_w2_part = expert_backward(tokens[chose], w1[e], w2[e], d_expert)
            d_tokens[chose] += d_rows
            d_w1[e] += d_w1_part
            d_w2[e] += d_w2_part
    return d_tokens, d_probs, d_w1, d_w2
