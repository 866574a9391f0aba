"""Reading `plugins.ep_overlap`. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from plugins.ep_overlap.plan import chunk_slices, issue_order
from plugins.errors import RecipeError
from plugins.settings import section_of, whole_number

KEY = "plugins.ep_overlap"
SETTINGS = ("chunks", "stride")


def read(settings: Any) -> tuple[Any, int]:
    """(chunks, stride) of `{chunks: auto | [b, s], stride: n}`; the stride is 1 where it is not written.

    Raises:
        RecipeError: an unknown key, or values that are no such thing.
    """
    right = "write `chunks:` under it, auto or [parts of the batch, parts of the sequence]"
    section = section_of(KEY, settings, SETTINGS, right, needs=["chunks"])
    chunks = section["chunks"]
    if chunks != "auto":
        chunks = tuple(chunks) if isinstance(chunks, (list, tuple)) else ()
        if len(chunks) != 2 or not all(type(parts) is int and parts > 0 for parts in chunks):
            raise RecipeError(f"{KEY}.chunks: {section['chunks']!r} is neither auto nor [b, s] with b and s from 1 on")
    stride = whole_number(KEY, section, "stride", "write a whole number of steps, 1 for a wavefront", least=0)
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
