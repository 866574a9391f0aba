"""Reading `plugins.ep_overlap`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from plugins.ep_overlap.plan import chunk_slices, issue_order
from plugins.errors import RecipeError, did_you_mean

KEY = "plugins.ep_overlap"


def read(settings: Any) -> tuple[Any, int]:
    """(chunks, stride) of `{chunks: auto | [b, s], stride: n}`; the stride is 1 where it is not written.

    Raises:
        RecipeError: an unknown key, or values that are no such thing.
    """
    if not isinstance(settings, Mapping) or "chunks" not in settings:
        raise RecipeError(f"{KEY}: write `chunks:` under it, auto or [parts of the batch, parts of the sequence]")
    for name in settings:
        if name not in ("chunks", "stride"):
            raise RecipeError(f"{KEY}.{name}: no such setting{did_you_mean(name, ['chunks', 'stride'])}")
    chunks, stride = settings["chunks"], settings.get("stride", 1)
    if chunks != "auto":
        chunks = tuple(chunks) if isinstance(chunks, (list, tuple)) else ()
        if len(chunks) != 2 or not all(type(parts) is int and parts > 0 for parts in chunks):
            raise RecipeError(f"{KEY}.chunks: {settings['chunks']!r} is neither auto nor [b, s] with b and s from 1 on")
    if type(stride) is not int or stride < 0:
        raise RecipeError(f"{KEY}.stride: {stride!r}; write a whole number of steps, 1 for a wavefront")
    return chunks, stride


def slices(batch: int, chunks: tuple[int, int], config: Any) -> list[np.ndarray]:
    """Token indices of each chunk among a rank's tokens.

    Args:
        batch: samples of a micro-batch and data-parallel rank; chunks: (b, s).
        config: TransformerConfig; its tensor and context parallel ranks split the sequence.
    """
    split = config.tensor_model_parallel_size * config.context_parallel_size
    return chunk_slices(batch, config.seq_length // split, chunks)


def order(stride: int, chunks: int) -> list[tuple[int, str]]:
    """The order of issue, see `plan.issue_order`."""
    return issue_order(chunks, stride=stride)
