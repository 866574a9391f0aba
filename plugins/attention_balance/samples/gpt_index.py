"""MindFormers' `GPTDataset` as its four arrays, and the same arrays made without MindFormers. NumPy only.

The documents of all epochs, in the order of `document_index`, form one stream of tokens; sample i is the tokens
[i * sequence_length, (i + 1) * sequence_length) of it (and one more, for the last label); the dataset's item n is
sample `shuffle_index[n]`. MindFormers keeps the three indices as .npy files in <prefix>/cache/GPTDataset_indices;
memory-mapped they serve here as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.errors import DataError

_CHUNK = 1 << 22  # documents handled at a time
# GPTDataset shuffles the last epoch by itself when less than this share of it is used
_WHOLE_EPOCH = 0.80


@dataclass(frozen=True)
class GPTIndex:
    """Where every sample of one dataset lies. Arrays may be memory-mapped.

    lengths: int32 [documents], tokens of each, the end-of-document token included;
    document_index: int32 [epochs * documents], the order in which they are read;
    sample_index: int64 [samples + 1, 2], position in `document_index` and token offset at which each sample begins;
    shuffle_index: [samples], the sample behind each item of the dataset;
    sequence_length: tokens of a sample.
    """

    lengths: np.ndarray
    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray
    sequence_length: int

    def __len__(self) -> int:
        return len(self.shuffle_index)


def build_gpt_index(lengths: np.ndarray, sequence_length: int, samples: int | None, seed: int) -> GPTIndex:
    """The index that `GPTDataset` builds over all documents of a training split, bit for bit.

    Args:
        lengths: int32 [documents], tokens of each.
        sequence_length: tokens of a sample.
        samples: how many the dataset must have at least (whole epochs are added); None for one epoch.
            A blend of datasets asks each for 0.5 % more than its share.
        seed: `train_dataset.data_loader.config.seed`.

    Memory: 4 bytes per document and epoch, 24 bytes per sample, besides one chunk of documents.

    Raises:
        DataError: the corpus holds less than one sample.
    """
    per_epoch = int(np.sum(lengths, dtype=np.int64))
    if per_epoch <= sequence_length:
        raise DataError(f"a corpus of {per_epoch:,} tokens holds no sample of {sequence_length:,} and one more token")
    wanted = 0 if samples is None else samples * sequence_length + 1
    epochs = max(1, -(-wanted // per_epoch))
    without_last = ((epochs - 1) * per_epoch - 1) // sequence_length
    last_apart = False
    if epochs > 1:
        assert samples is not None
        last_apart = samples - without_last < int(_WHOLE_EPOCH * ((per_epoch - 1) // sequence_length))

    random = np.random.RandomState(seed)
    document_index = _shuffled_documents(len(lengths), epochs, last_apart, random)
    count = (epochs * per_epoch - 1) // sequence_length
    sample_index = _sample_starts(lengths, document_index, sequence_length, count)
    shuffle_index = np.arange(count, dtype=np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64)
    split = without_last if last_apart else count
    random.shuffle(shuffle_index[:split])
    if split < count:
        random.shuffle(shuffle_index[split:])
    return GPTIndex(lengths, document_index, sample_index, shuffle_index, sequence_length)


def blended(values: list[np.ndarray], dataset_index: np.ndarray, dataset_sample_index: np.ndarray) -> np.ndarray:
    """One value for each item of a `BlendedDataset`.

    Args:
        values: for each dataset, float64 [its samples], in that dataset's order.
        dataset_index, dataset_sample_index: [items], as in `BlendedDataset`.

    Returns:
        float64 [items].
    """
    out = np.empty(len(dataset_index))
    for number, of_dataset in enumerate(values):
        mine = dataset_index == number
        out[mine] = of_dataset[dataset_sample_index[mine]]
    return out


def _shuffled_documents(count: int, epochs: int, last_apart: bool, random: np.random.RandomState) -> np.ndarray:
    """int32 [epochs * count]; the epochs are shuffled together, the last one by itself if `last_apart`."""
    order = np.tile(np.arange(count, dtype=np.int32), epochs)
    together = (epochs - 1) * count if last_apart else epochs * count
    random.shuffle(order[:together])
    if together < len(order):
        random.shuffle(order[together:])
    return order


def _sample_starts(lengths: np.ndarray, document_index: np.ndarray, sequence_length: int, count: int) -> np.ndarray:
    """int64 [count + 1, 2]: the document that holds token i * sequence_length, and the offset in it."""
    starts = np.empty((count + 1, 2), np.int64)
    tokens = done = 0
    for begin in range(0, len(document_index), _CHUNK):
        sizes = lengths[document_index[begin : begin + _CHUNK]]
        ends = tokens + np.cumsum(sizes, dtype=np.int64)
        tokens = int(ends[-1])
        stop = min(-(-tokens // sequence_length), count + 1)
        targets = np.arange(done, stop, dtype=np.int64) * sequence_length
        position = np.searchsorted(ends, targets, side="right")
        starts[done:stop, 0] = begin + position
        starts[done:stop, 1] = targets - (ends[position] - sizes[position])
        done = stop
    return starts
