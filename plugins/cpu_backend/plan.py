"""This module lays out tokens, sorted by expert, in blocks, so that the cost of a grouped matmul grows with the number
of tokens. The module also says which data types the CPU backend refuses, and which data loaders mask documents from
each other. The module needs only NumPy.

A grouped matmul multiplies each expert's rows by that expert's weight. CPU has no kernel for a grouped matmul. Two
forms have static shapes: one matmul over all experts with zeros elsewhere (E times the work), or the layout that this
module plans: the rows of each expert are padded up to a multiple of `block`, so that each block of rows belongs to one
expert, and one batched matmul with gathered weights computes all blocks. The number of computed rows is at most rows +
E * (block - 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def refused_dtype(compute_dtype: object) -> str:
    """Return why the CPU backend does not compute in a data type (`compute_dtype`); return "" for float32, in which it
    computes.

    Of MindSpore 2.9.0's kernels on CPU, those of float16 train a mini recipe; those of bfloat16 lack the matmul.
    """
    if compute_dtype in ("float32", "fp32"):
        return ""
    if compute_dtype in ("float16", "fp16"):
        return "MindSpore has float16 kernels, but they round more, and CPU runs are verified only in float32"
    return "there are no bfloat16 kernels"


def documents_apart(loader: Mapping[str, Any]) -> bool:
    """Return whether the attention masks that this `train_dataset.data_loader` section makes prevent tokens from
    attending to other documents (or packed conversations) of their sample.
    """
    if any(handler.get("type") == "PackingHandler" for handler in loader.get("handler") or []):
        return not loader.get("create_compressed_eod_mask")
    data = loader.get("config") or {}
    return bool(data.get("reset_attention_mask") and data.get("create_attention_mask", True))


def block_count(rows: int, experts: int, block: int) -> int:
    """Return a number of blocks that is sufficient for any distribution of `rows` over `experts`, so that shapes are
    static.

    Each expert wastes less than one block, so the bound is floor(rows / block) + experts.
    """
    return rows // block + experts


def default_block(rows: int, experts: int) -> int:
    """Return a block size near half of the mean number of rows of an expert: a power of two in [8, 128].

    Smaller blocks need less padding, and larger blocks read each weight matrix less often. The function is written for
    MindSpore's graph parser, which also calls it.
    """
    block = 8
    while block < 128 and 4 * experts * block <= rows:
        block = 2 * block
    return block


def grouped_matmul(rows: np.ndarray, weight: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Multiply rows [C, h], sorted by expert, by their expert's weight of [E, h, H]; rows from ends[-1] on give zeros.

    ends: [E] cumulative counts of rows per expert.
    """
    out = np.zeros((len(rows), weight.shape[2]), rows.dtype)
    for expert, (first, end) in enumerate(_spans(ends)):
        np.matmul(rows[first:end], weight[expert], out=out[first:end])
    return out


def grouped_matmul_dx(dout: np.ndarray, weight: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the gradient [C, h] of `grouped_matmul` with respect to its rows, from the gradient [C, H] of its result
    and the weights [E, h, H].
    """
    return grouped_matmul(dout, weight.transpose(0, 2, 1), ends)


def grouped_matmul_dw(dout: np.ndarray, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the gradient [E, h, H] of `grouped_matmul` with respect to the weights, from the gradient [C, H] of its
    result and the rows [C, h].
    """
    out = np.zeros((len(ends), rows.shape[1], dout.shape[1]), rows.dtype)
    for expert, (first, end) in enumerate(_spans(ends)):
        np.matmul(rows[first:end].T, dout[first:end], out=out[expert])
    return out


def _spans(ends: np.ndarray):
    return zip(np.concatenate([[0], ends[:-1]]).tolist(), ends.tolist(), strict=True)
