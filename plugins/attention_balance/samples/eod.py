"""Whether documents are kept apart, and whether the compressed mask holds them all. Pure.

MindFormers' dataset has two masks that end a document at its end-of-document (EOD) token: a full one, [1, S, S]
(`create_attention_mask` with `reset_attention_mask`), and a compressed one, the ends of up to `eod_pad_length`
documents (`create_compressed_eod_mask`). With the compressed one the attention kernel computes nothing between
documents; how much of a full mask a kernel skips is its own affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from plugins.attention_balance.samples.gpt_index import GPTIndex
from plugins.attention_balance.samples.segments import segments_in_stream_order
from plugins.errors import DataError, RecipeError

CONFIG = "train_dataset.data_loader.config"


def check_apart(config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse a recipe whose documents see each other.

    Args:
        config: `train_dataset.data_loader.config`. model: `model.model_config`.

    Raises:
        RecipeError: every sample then costs the same, and there is nothing to balance.
    """
    if config.get("create_compressed_eod_mask"):
        return
    if not config.get("reset_attention_mask"):
        raise RecipeError(
            "plugins.attention_balance: without a mask at the end of documents every sample costs the same, so no "
            f"order is faster than another; write {CONFIG}.create_compressed_eod_mask: True (or "
            "create_attention_mask and reset_attention_mask: True for a full mask), or leave the plugin out"
        )
    if not config.get("create_attention_mask", True):
        raise RecipeError(
            f"{CONFIG}.reset_attention_mask: without create_attention_mask MindFormers makes no mask that it could "
            "reset, and documents see each other; write create_attention_mask: True or create_compressed_eod_mask: True"
        )
    if model.get("use_attn_mask_compression"):
        raise RecipeError(
            "model.model_config.use_attn_mask_compression: attention then makes its own causal mask, and the one of "
            f"{CONFIG}.reset_attention_mask is not read; write False"
        )


def documents_of_items(index: GPTIndex) -> np.ndarray:
    """int32 [items]: documents (or parts of one) in each sample, in the dataset's order.

    Memory: 8 bytes per sample and one chunk of the index.
    """
    in_stream = np.empty(len(index), np.int32)
    for start, segments in segments_in_stream_order(index):
        in_stream[start : start + len(segments)] = segments.counts()
    return in_stream[index.shuffle_index]


def check_fits(documents: np.ndarray, eod_pad_length: int, batch: int) -> None:
    """Refuse a compressed mask that is too short for a sample that will be trained.

    With `eod_pad_length` + 1 documents MindFormers 1.9.0 drops the end of the last one in silence (attention runs over
    an unfinished mask); from + 2 on it raises in the step that meets the sample.

    Args:
        documents: [samples], of each sample in the order of training. batch: samples of a step.

    Raises:
        RecipeError: names the first such sample, the largest one, and the length that would do.
    """
    over = np.flatnonzero(documents > eod_pad_length)
    if len(over):
        first, largest = int(over[0]), int(documents.argmax())
        raise RecipeError(
            f"{CONFIG}.eod_pad_length: {eod_pad_length} is less than the {documents[first]:.0f} documents of sample "
            f"{first} (step {first // batch + 1}); {len(over)} of {len(documents)} samples have too many, "
            f"sample {largest} the most: write {documents[largest]:.0f} or more"
        )


def check_last_tokens(tokens: np.ndarray, eod: int, corpus: str) -> None:
    """Refuse an `eod` that is not the token with which this corpus' documents end.

    tokens: [documents looked at], the last one of each.

    Raises:
        DataError: masks would then not end where the documents do.
    """
    other = tokens[tokens != eod]
    if len(other):
        raise DataError(
            f"{CONFIG}.eod: {eod} is not how documents of {corpus} end: {len(other)} of the {len(tokens)} looked at "
            f"end with token {other[0]}; masks and costs need the corpus' own end-of-document token"
        )
