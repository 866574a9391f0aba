"""The documents inside each sample, from the index alone: no token is read. NumPy only.

With an end-of-document mask a token attends only to its own document. A document boundary inside a sample starts a
new segment, and so does the beginning of the sample: a document that was cut goes on as if it began there. This holds
for a corpus whose documents end with the end-of-document token and contain no other (`tc3 data prepare` writes such).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.attention_balance.samples.gpt_index import GPTIndex
from plugins.errors import DataError

_SEGMENTS = 1 << 21  # segments handled at a time when a whole dataset is read


@dataclass(frozen=True)
class Segments:
    """Segment lengths of several samples in CSR form.

    values: int64 [segments], tokens of each, sample after sample; all at least 1;
    offsets: int64 [samples + 1]: sample i has values[offsets[i] : offsets[i + 1]].

    MindFormers' compressed mask (`actual_seq_len`) is the cumulative sum of a sample's values, padded with the
    sequence length up to `eod_pad_length`.
    """

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, sample: int) -> np.ndarray:
        """int64 [segments of one sample], tokens of each."""
        return self.values[self.offsets[sample] : self.offsets[sample + 1]]

    def counts(self) -> np.ndarray:
        """int64 [samples], segments of each.

        The compressed mask needs `counts <= eod_pad_length`. MindFormers itself raises only at eod_pad_length + 2:
        with exactly one too many its mask lacks the end of the last document.
        """
        return np.diff(self.offsets)


def segments_of(index: GPTIndex, start: int, stop: int) -> Segments:
    """Segments of the items [start, stop) of the dataset, in the dataset's order.

    Memory: some 50 bytes a segment of that range.

    Raises:
        DataError: the indices do not belong to these documents or to this sequence length.
    """
    return _segments(index, np.asarray(index.shuffle_index[start:stop], np.int64))


def segments_in_stream_order(index: GPTIndex):
    """Yield (first sample, `Segments`) over all samples before shuffling, a bounded number of segments at a time.

    Sequential in the indices, so a memory-mapped corpus of 10^8 documents is read once.
    """
    per_sample = -(-len(index.document_index) // max(len(index), 1)) + 1
    step = max(_SEGMENTS // per_sample, 1)
    for start in range(0, len(index), step):
        yield start, _segments(index, np.arange(start, min(start + step, len(index)), dtype=np.int64))


def _segments(index: GPTIndex, samples: np.ndarray) -> Segments:
    """`samples`: int64 [n], numbers before shuffling."""
    first, offset = np.asarray(index.sample_index[samples]).T
    last, end = np.asarray(index.sample_index[samples + 1]).T
    counts = last - first + 1
    offsets = np.concatenate(([0], np.cumsum(counts)))
    position = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)
    values = np.asarray(index.lengths[index.document_index[position]], np.int64)
    # the last document is cut at `end`, the first begins at `offset`; they may be the same one
    values[offsets[1:] - 1] = end
    values[offsets[:-1]] -= offset
    _check(values, offsets, index.sequence_length)

    kept = values > 0
    if not kept.all():
        offsets = np.concatenate(([0], np.cumsum(kept)))[offsets]
        values = values[kept]
    return Segments(values, offsets)


def _check(values: np.ndarray, offsets: np.ndarray, sequence_length: int) -> None:
    if not len(values):
        return
    tokens = np.add.reduceat(values, offsets[:-1])
    if values.min() < 0 or (tokens != sequence_length).any():
        wrong = int(tokens[tokens != sequence_length][0]) if (tokens != sequence_length).any() else int(values.min())
        raise DataError(
            f"a sample of this index has {wrong:,} tokens where the sequence length is {sequence_length:,}: the cached "
            "indices belong to another corpus, sequence length or seed; remove the cache folder beside the corpus"
        )
