"""This module computes the auxiliary loss and its gradient in NumPy, from the tokens of all ranks of a group
together.
"""

from __future__ import annotations

import numpy as np


def loss(scores: np.ndarray, chosen: np.ndarray, coefficient: float) -> float:
    """Return the loss of one process that holds all tokens: coefficient x E x sum over experts of (share of choices x
    mean score).

    Args:
        scores: [N, E], the router's normalised scores.
        chosen: int [N, k], the experts of each token.
    """
    return float(coefficient * scores.shape[1] * np.sum(shares(chosen, scores.shape[1]) * scores.mean(0)))


def gradient(scores: np.ndarray, chosen: np.ndarray, coefficient: float) -> np.ndarray:
    """Return the gradient [N, E] of the auxiliary loss with respect to the scores; a small change of the scores does
    not change which experts are chosen.
    """
    tokens, experts = scores.shape
    return np.broadcast_to(coefficient * experts * shares(chosen, experts) / tokens, scores.shape).copy()


def shares(chosen: np.ndarray, experts: int) -> np.ndarray:
    """Return for each expert the share of the tokens' choices that fall on this expert, [E]."""
    return np.bincount(chosen.reshape(-1), minlength=experts) / chosen.size
