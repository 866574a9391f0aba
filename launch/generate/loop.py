"""Token after token: what a prompt goes on with, whoever computes the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Logits = Callable[[Sequence[int]], np.ndarray]


def continuation(
    logits: Logits, choose: Callable[[np.ndarray], int], prompt: Sequence[int], window: int, most: int, end: int | None
) -> Iterator[int]:
    """The ids that follow `prompt`, up to `most` of them, up to and with `end`.

    Args:
        logits: of the token behind ids [n], 1 <= n <= `window`: float [V].
        choose: a token's id from its logits. window: how many tokens the model sees: those further back are forgotten.
        end: the id that ends a document; None where nothing does.
    """
    ids = list(prompt)
    for _ in range(most):
        ids.append(choose(logits(ids[-window:])))
        yield ids[-1]
        if ids[-1] == end:
            return
