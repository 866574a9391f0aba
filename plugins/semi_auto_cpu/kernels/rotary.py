"""RotaryPositionEmbedding and its gradient.

Source: `rotary_position_embedding` in `mindspore/ops/auto_generate/gen_ops_def.py`: mode 0 rotates halves (GPT-NeoX),
mode 1 neighbours (GPT-J). In the gradient the input that `gen_ops_prim.py` calls `dx` is the forward's x.
"""

from __future__ import annotations

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import Attrs, kernel


@kernel()
def RotaryPositionEmbedding(attrs: Attrs, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, mode: int = 0) -> np.ndarray:
    """X cos + rotated(x) sin; cos and sin broadcast to x."""
    return x * cos + _rotated("RotaryPositionEmbedding", x, mode) * sin


@kernel()
def RotaryPositionEmbeddingGrad(
    attrs: Attrs, dy: np.ndarray, cos: np.ndarray, sin: np.ndarray, x: np.ndarray | None = None, mode: int = 0
) -> tuple[np.ndarray | None, ...]:
    """Gradients of x, cos and sin; of cos and sin only where x is given."""
    name = "RotaryPositionEmbeddingGrad"
    dx = dy * cos - _rotated(name, dy * sin, mode)  # a quarter turn back is the negative of one forward
    if x is None:
        return dx, None, None
    return dx, _summed(dy * x, cos), _summed(dy * _rotated(name, x, mode), sin)


def _rotated(name: str, x: np.ndarray, mode: int) -> np.ndarray:
    """A quarter turn in each plane: (a, b) becomes (-b, a)."""
    if mode == 0:
        a, b = np.split(x, 2, -1)
        return np.concatenate([-b, a], -1)
    if mode == 1:
        return np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    raise NotImplementedError(f"{name}: mode {mode}")


def _summed(gradient: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Over the dimensions that were broadcast."""
    axes = tuple(axis for axis in range(gradient.ndim) if owner.shape[axis] == 1 != gradient.shape[axis])
    return gradient.sum(axes, keepdims=True)
