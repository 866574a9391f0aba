"""The next token from the logits of all: the likeliest, or drawn by chance. Pure NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: logits are divided by it, above 0; below 1 the likely get likelier.
        top_k: of so many likeliest tokens; 0 of all.
        top_p: of the fewest likeliest tokens that have this share of the probability together, above 0; 1.0: of all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def likeliest(logits: np.ndarray) -> int:
    """The id of the largest of `logits` [V]; of equal ones the first."""
    return int(np.argmax(logits))


def probabilities(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """How likely each token is drawn: float64 [V], adding up to 1.

    First temperature, then top-k, then top-p of what is left, as Hugging Face's `generate` has them. Of equally likely
    tokens the one with the smaller id counts as likelier, so that k tokens are k.
    """
    scaled = (logits.astype(np.float64) - logits.max()) / how.temperature  # the largest is 0: no overflow
    chances = np.exp(scaled)
    order = np.argsort(-logits, kind="stable")
    if how.top_k:
        chances[order[how.top_k :]] = 0
    if how.top_p < 1:
        sums = np.cumsum(chances[order])
        enough = int(np.searchsorted(sums, how.top_p * sums[-1])) + 1
        chances[order[enough:]] = 0
    return chances / chances.sum()


def draw(logits: np.ndarray, how: Sampling, random: np.random.Generator) -> int:
    """One token's id, with the chance that `probabilities` gives it; takes one number from `random`."""
    sums = np.cumsum(probabilities(logits, how))
    return int(np.searchsorted(sums, random.random() * sums[-1], side="right"))
