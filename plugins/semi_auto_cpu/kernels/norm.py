"""Root mean square norm over the last dimensions, and its gradient."""

from __future__ import annotations

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import Attrs, kernel


@kernel()
def RmsNorm(attrs: Attrs, x: np.ndarray, gamma: np.ndarray, epsilon: float = 1e-6) -> tuple[np.ndarray, np.ndarray]:
    """X / sqrt(mean(x^2) + epsilon) * gamma, and the reciprocal of that root.

    Args:
        x: [..., *gamma.shape].
        gamma: weights.
    """
    axes = tuple(range(x.ndim - gamma.ndim, x.ndim))
    rstd = 1 / np.sqrt(np.mean(x * x, axes, keepdims=True) + np.float32(epsilon))
    return x * rstd * gamma, rstd


@kernel()
def RmsNormGrad(
    attrs: Attrs, dy: np.ndarray, x: np.ndarray, rstd: np.ndarray, gamma: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of x and gamma."""
    leading = x.ndim - gamma.ndim
    axes = tuple(range(leading, x.ndim))
    normed = x * rstd
    scaled = dy * gamma
    dx = rstd * (scaled - normed * np.mean(scaled * normed, axes, keepdims=True))
    return dx, np.sum(dy * normed, tuple(range(leading)))
