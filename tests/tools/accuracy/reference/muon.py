"""This module computes a step of MindFormers' Muon in NumPy: it is the slow oracle, one whole matrix after another.

Sources: K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (momentum and the quintic Newton-Schulz
iteration); Liu et al., arXiv 2502.16982 (weight decay, and the factor that gives an update AdamW's usual size); Kimi
K2, arXiv 2507.20534, section 2.1 (QK-clip). What is taken apart in which order: gpt_model.py, make_model_muon_fns.

    m' = mu m + g                             momentum
    u  = g + mu m'                            Nesterov; else u = m'
    U  = NS(u_1), NS(u_2), ..                 each part of a fused weight by itself, in bfloat16
    w' = (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) U

MindFormers takes one factor for all parts of a weight, that of the last one. Embedding, output layer and weights of one
dimension have AdamW, whose decay is that of their group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALL = 1e-7


@dataclass(frozen=True)
class Muon:
    """A `Muon` holds the settings of the optimizer, under MindFormers' names and with its defaults."""

    weight_decay: float = 0.1
    matched_adamw_rms: float = 0.2  # the factor that gives an update AdamW's usual size
    momentum: float = 0.95
    nesterov: bool = True
    adamw_betas: tuple[float, float] = (0.95, 0.95)
    adamw_eps: float = 1e-8
    exact: bool = False  # Newton-Schulz in float64, not in bfloat16 as MindFormers computes it


@dataclass(frozen=True)
class Parts:
    """A `Parts` holds the sizes by which fused weights are taken apart.

    Args:
        nope, rope, value: the widths of a head's parts.
        kv_rank: the rank of the keys' and values' latent.
        experts: the number of experts of a layer, or of a slice.
        hidden: the hidden size of the model.
        expert_ffn: the inner size of an expert.
    """

    nope: int
    rope: int
    value: int
    kv_rank: int
    experts: int
    hidden: int
    expert_ffn: int

    @classmethod
    def of(cls, model: dict[str, Any]) -> Parts:
        """Return the sizes of a recipe's `model_config`."""
        names = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "kv_lora_rank", "n_routed_experts", "hidden_size")
        return cls(*(model.get(name) or 0 for name in (*names, "moe_intermediate_size")))

    def split(self, name: str, whole: np.ndarray) -> list[np.ndarray]:
        """Return the matrices [.., rows, columns] of a weight [rows, columns], in MindFormers' order."""
        if ".experts.weight1" in name:
            each = whole.reshape(self.experts, self.hidden, 2 * self.expert_ffn)
            return [each[..., : self.expert_ffn], each[..., self.expert_ffn :]]
        if ".experts.weight2" in name:
            return [whole.reshape(self.experts, self.expert_ffn, self.hidden)]
        first, second = self._rows(name)
        if not first:
            return [whole]
        blocks = whole.reshape(-1, first + second, whole.shape[1])
        return [part.reshape(-1, whole.shape[1]) for part in (blocks[:, :first], blocks[:, first:])]

    def merge(self, name: str, parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """Return the weight of which `split` made the parts."""
        if ".experts." in name:
            return np.concatenate(parts, axis=-1).reshape(shape)
        first, second = self._rows(name)
        if not first:
            return parts[0]
        blocks = [part.reshape(-1, size, shape[1]) for part, size in zip(parts, (first, second), strict=True)]
        return np.concatenate(blocks, axis=1).reshape(shape)

    def _rows(self, name: str) -> tuple[int, int]:
        """Return how many rows of a weight's two parts alternate; (0, 0) if it has one part."""
        found = {
            "linear_q_proj.": (self.nope, self.rope),
            "linear_q_up_proj.": (self.nope, self.rope),
            "linear_kv_down_proj.": (self.kv_rank, self.rope),
            "linear_kv_up_proj.": (self.nope, self.value),
            "mlp.linear_fc1.": (1, 1),
            "shared_experts.linear_fc1.": (1, 1),
        }
        return next((rows for part, rows in found.items() if part in name), (0, 0))


def newton_schulz(x: np.ndarray, exact: bool = False) -> np.ndarray:
    """Return nearly U V^T, where x = U S V^T [.., rows, columns]: singular values go to between 0.7 and 1.2. Unless
    `exact`, results are rounded to bfloat16 as MindFormers' are: of a matrix (c A) A, of an expert c (A A).
    """
    if x.ndim == 3:
        return np.stack([_newton_schulz(each, exact, True) for each in x])
    return _newton_schulz(x, exact, False)


def _newton_schulz(x: np.ndarray, exact: bool, expert: bool) -> np.ndarray:
    """Return `newton_schulz` of one matrix [rows, columns]."""

    def rounded(value: np.ndarray) -> np.ndarray:
        return value if exact else value.astype(ml_dtypes.bfloat16).astype(np.float32)

    a, b, c = COEFFICIENTS
    x = rounded(x.astype(np.float64 if exact else np.float32))
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = rounded(x / rounded(rounded(np.sqrt(np.square(x).sum())) + _SMALL))
    for _ in range(STEPS):
        square = rounded(x @ x.T)
        fourth = rounded(c * rounded(square @ square)) if expert else rounded(rounded(c * square) @ square)
        mixed = rounded(rounded(b * square) + fourth)
        x = rounded(rounded(a * x) + rounded(mixed @ x))
    return x.T if tall else x


def update(
    name: str, weight: np.ndarray, moment: np.ndarray, gradient: np.ndarray, lr: float, parts: Parts, muon: Muon
) -> tuple[np.ndarray, np.ndarray]:
    """Return (the weight, the moment) after a step, float32 [rows, columns], of a matrix that is `orthogonal`."""
    moment = np.float32(muon.momentum) * moment + gradient
    looked = gradient + np.float32(muon.momentum) * moment if muon.nesterov else moment
    pieces = parts.split(name, looked)
    done = parts.merge(name, [newton_schulz(piece, muon.exact) for piece in pieces], weight.shape)
    factor = muon.matched_adamw_rms * max(pieces[-1].shape[-2:]) ** 0.5
    return (weight * (1 - lr * muon.weight_decay) - lr * factor * done).astype(np.float32), moment


def adamw(
    weight: np.ndarray,
    moments: tuple[np.ndarray, np.ndarray],
    gradient: np.ndarray,
    lr: float,
    step: int,
    muon: Muon,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return (the weight, its two moments) after a step of the other weights; `step` counts from 1."""
    (beta1, beta2), decay = muon.adamw_betas, muon.weight_decay if weight.ndim > 1 else 0.0
    first = beta1 * moments[0] + (1 - beta1) * gradient
    second = beta2 * moments[1] + (1 - beta2) * np.square(gradient)
    size = np.sqrt(second / (1 - beta2**step)) + muon.adamw_eps
    return weight * (1 - lr * decay) - lr / (1 - beta1**step) * first / size, (first, second)


def clip_logits(
    name: str, weight: np.ndarray, largest: np.ndarray, parts: Parts, threshold: float = 100.0
) -> np.ndarray:
    """Return a query's or a key's and value's up-projection after QK-clip: where the `largest` logit of a head in the
    step [heads] has reached the threshold, it is scaled by threshold / largest: by its root in the parts without
    positions, and by all of it in the query's part with positions, whose key all heads share.
    """
    query = "linear_q_proj." in name or "linear_q_up_proj." in name
    if not query and "linear_kv_up_proj." not in name:
        return weight
    scale = np.where(largest >= threshold, threshold / np.maximum(largest, _SMALL), 1.0)
    first, second = parts.split(name, weight)
    first = first * np.repeat(np.sqrt(scale), parts.nope)[:, None]
    second = second * np.repeat(scale, parts.rope)[:, None] if query else second
    return parts.merge(name, [first, second], weight.shape)
