"""This module shifts samples document by document in NumPy, which is the reference for `plugins.mtp_documents`."""

from __future__ import annotations

import numpy as np


def rolled(values: np.ndarray, tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """Shift each document to the left by one token, and put 0 at the document's end, as MindFormers does with a whole
    sample.

    Args:
        values: [B, S], one value for each token.
        tokens: ids [B, S]; `end_of_document` ends a document.

    Returns:
        [B, S], in the type of `values`.
    """
    out = np.zeros_like(values)
    for row, ids in enumerate(tokens):
        start = 0
        for place, token in enumerate(ids):
            if token == end_of_document or place == len(ids) - 1:
                out[row, start:place] = values[row, start + 1 : place + 1]
                start = place + 1
    return out
