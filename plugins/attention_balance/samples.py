"""This module reads from MindFormers' index which documents each sample of a corpus holds, and computes how much
computation the training on each sample costs.

The module reads no tokens, and needs only NumPy. The file has four parts:

1. `GPTIndex`: MindFormers' `GPTDataset` as its four arrays, and the same arrays made without MindFormers. The
   documents of all epochs, in the order of `document_index`, form one stream of tokens; sample i is the tokens [i *
   sequence_length, (i + 1) * sequence_length) of it (and one more, for the last label); the dataset's item n is sample
   `shuffle_index[n]`. MindFormers keeps the three indices as .npy files in <prefix>/cache/GPTDataset_indices;
   memory-mapped they serve here as they are.
2. `Segments`: the documents inside each sample. With an end-of-document mask a token attends only to its own document.
   A document boundary inside a sample starts a new segment, and so does the beginning of the sample: a document that
   was cut goes on as if it began there. This holds for a corpus whose documents end with the end-of-document token and
   contain no other (`tc3 data prepare` writes such).
3. `Cost` = per_pair * (pairs of tokens that attend) + per_token * tokens. A document of n tokens under a causal mask
   has n * (n + 1) / 2 attending pairs; the cost of all other parts of the model is linear in the number of tokens. The
   devices of one tensor- or context-parallel group share a sample, so the cost is relative: it serves to compare
   samples, whatever the size of the group is.
4. Checks that a recipe keeps documents apart. MindFormers' dataset has two masks that end a document at its
   end-of-document (EOD) token: a full one, [1, S, S] (`create_attention_mask` with `reset_attention_mask`), and a
   compressed one, the ends of up to `eod_pad_length` documents (`create_compressed_eod_mask`). With the compressed mask
   the attention kernel computes nothing between documents; how much of a full mask is skipped depends on the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from plugins.errors import DataError, RecipeError

_CHUNK = 1 << 22  # documents handled at a time
# GPTDataset shuffles the last epoch by itself when less than this share of it is used
_WHOLE_EPOCH = 0.80
_SEGMENTS = 1 << 21  # segments handled at a time when a whole dataset is read
CONFIG = "train_dataset.data_loader.config"


@dataclass(frozen=True)
class GPTIndex:
    """A `GPTIndex` holds the position of every sample of one dataset in the corpus. The arrays of a `GPTIndex` may be
    memory-mapped files.

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
    """Return the index that `GPTDataset` builds over all documents of a training split, bit for bit.

    Args:
        lengths: int32 [documents], tokens of each.
        sequence_length: tokens of a sample.
        samples: the smallest number of samples of the dataset (whole epochs are added); None for one epoch. A blend
            requests 0.5 % more than its share from each of its datasets.
        seed: `train_dataset.data_loader.config.seed`.

    Memory: 4 bytes per document and epoch, 24 bytes per sample, besides one chunk of documents.

    Raises:
        DataError: the corpus holds less than one sample.
    """
    per_epoch = int(np.sum(lengths, dtype=np.int64))
    if per_epoch <= sequence_length:
        raise DataError(
            f"the corpus has only {per_epoch:,} tokens, but one sample needs {sequence_length + 1:,} (the sequence "
            "length and one more); use a longer corpus"
        )
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
    """Return one value for each item of a `BlendedDataset`, in the order of the blend; `values` holds the values of the
    samples in each blended dataset.

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
    """Return int32 [epochs * count]; the epochs are shuffled together, the last one by itself if `last_apart`."""
    order = np.tile(np.arange(count, dtype=np.int32), epochs)
    together = (epochs - 1) * count if last_apart else epochs * count
    random.shuffle(order[:together])
    if together < len(order):
        random.shuffle(order[together:])
    return order


def _sample_starts(lengths: np.ndarray, document_index: np.ndarray, sequence_length: int, count: int) -> np.ndarray:
    """Return int64 [count + 1, 2]: the document that holds token i * sequence_length, and the offset in it."""
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


@dataclass(frozen=True)
class Segments:
    """A `Segments` holds the lengths of the documents (segments) in several samples, in CSR form (compressed sparse
    rows).

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
        """Return int64 [segments of one sample], tokens of each."""
        return self.values[self.offsets[sample] : self.offsets[sample + 1]]

    def counts(self) -> np.ndarray:
        """Return the number of segments (documents) of each sample, int64 [samples].

        The compressed mask needs `counts <= eod_pad_length`. MindFormers itself raises an error only at eod_pad_length
        + 2 documents: with eod_pad_length + 1, its mask silently lacks the end of the last document.
        """
        return np.diff(self.offsets)


def segments_of(index: GPTIndex, start: int, stop: int) -> Segments:
    """Return the segments (documents) of the items [start, stop) of the dataset, in the dataset's order.

    Memory: some 50 bytes a segment of that range.

    Raises:
        DataError: the indices do not belong to these documents or to this sequence length.
    """
    return _segments(index, np.asarray(index.shuffle_index[start:stop], np.int64))


def segments_in_stream_order(index: GPTIndex):
    """Go through the samples in the order before shuffling, and yield for each group of consecutive samples the number
    of its first sample and its `Segments`. The groups are so small that the number of segments in a group is limited.

    The function reads the indices sequentially, so a memory-mapped corpus of 10^8 documents is read only once.
    """
    per_sample = -(-len(index.document_index) // max(len(index), 1)) + 1
    step = max(_SEGMENTS // per_sample, 1)
    for start in range(0, len(index), step):
        yield start, _segments(index, np.arange(start, min(start + step, len(index)), dtype=np.int64))


def _of_items(index: GPTIndex, of: Callable[[Segments], np.ndarray], dtype: type) -> np.ndarray:
    """Return [items]: one number for each sample, in the dataset's own order."""
    in_stream: np.ndarray = np.empty(len(index), dtype)
    for start, segments in segments_in_stream_order(index):
        in_stream[start : start + len(segments)] = of(segments)
    return in_stream[index.shuffle_index]


def _segments(index: GPTIndex, samples: np.ndarray) -> Segments:
    """Return the segments of `samples`, int64 [n], which are the numbers of samples before shuffling."""
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
            f"a sample of the cached index has {wrong:,} tokens, but the sequence length is {sequence_length:,}: the "
            "cached indices belong to another corpus, sequence length or seed; remove the cache folder beside the "
            "corpus"
        )


UNITS = MEASURED, COMPUTED = "s", "FLOP"


def causal_pairs(segments: Segments) -> np.ndarray:
    """Return the number of pairs of tokens that attend to each other in each sample, int64 [samples]: the sum of n * (n
    + 1) / 2 over the sample's segments.
    """
    return np.add.reduceat(segments.values * (segments.values + 1) // 2, segments.offsets[:-1])


@dataclass(frozen=True)
class Cost:
    """A `Cost` is the cost of training on a sample, computed from the model's sizes (`unit` is "FLOP") or measured
    (`unit` is "s").

    Args:
        per_pair: the cost of each attending pair of tokens.
        per_token: the cost of each token.
    """

    per_pair: float
    per_token: float
    unit: str = COMPUTED

    def of(self, segments: Segments) -> np.ndarray:
        """Return the training cost of each sample, float64 [samples], in `unit`."""
        tokens = np.add.reduceat(segments.values, segments.offsets[:-1])
        return self.per_pair * causal_pairs(segments) + self.per_token * tokens

    def of_dataset(self, index: GPTIndex) -> np.ndarray:
        """Return the training cost of each item of a dataset, float64 [items], in `unit`, in the order of the dataset.
        The computation needs 16 bytes of memory for each sample, and the memory of one chunk of segments.
        """
        return _of_items(index, self.of, np.float64)


def documents_apart(config: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Return whether the recipe's attention masks prevent tokens from attending to other documents of the same sample.

    Args:
        config: `train_dataset.data_loader.config` of a Megatron loader.
        model: `model.model_config`.
    """
    full = config.get("reset_attention_mask") and config.get("create_attention_mask", True)
    return bool(config.get("create_compressed_eod_mask") or (full and not model.get("use_attn_mask_compression")))


def check_apart(config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse a recipe in which documents of one sample attend to each other; the arguments are those of
    `documents_apart`.

    Raises:
        RecipeError: documents attend to each other, so every sample costs the same and there is nothing to balance.
    """
    if documents_apart(config, model):
        return
    if not config.get("reset_attention_mask"):
        raise RecipeError(
            "without a mask at the end of documents every sample costs the same, so no order is faster than another; "
            f"write {CONFIG}.create_compressed_eod_mask: True (or create_attention_mask and reset_attention_mask: True "
            "for a full mask), or leave the plugin out",
            "plugins.attention_balance",
        )
    if not config.get("create_attention_mask", True):
        raise RecipeError(
            f"{CONFIG}.reset_attention_mask: without create_attention_mask MindFormers makes no mask that could keep "
            "documents apart; write create_attention_mask: True or create_compressed_eod_mask: True"
        )
    raise RecipeError(
        "model.model_config.use_attn_mask_compression: if it is True, attention makes its own causal mask and "
        f"ignores the mask of {CONFIG}.reset_attention_mask, which keeps documents apart; write False"
    )


def documents_of_items(index: GPTIndex) -> np.ndarray:
    """Return int32 [items]: the number of documents (or parts of one) in each sample, in the dataset's order.

    Memory: 8 bytes per sample and one chunk of the index.
    """
    return _of_items(index, Segments.counts, np.int32)


def padding_under(context_parallel: int, algorithm: str) -> int:
    """Return the number of entries of a compressed attention mask that must remain padding after the last document of a
    sample.

    If ranks share the sequence of queries, MindSpore lets the last entry of the mask end at the last key on every rank.
    If a document ended at this entry, its queries would attend to later keys (docs/prove.md, the layout TND).
    """
    return int(context_parallel > 1 and algorithm != "ulysses_cp")


def check_fits(
    documents: np.ndarray, eod_pad_length: int, batch: int, padding: int = 0, items: np.ndarray | None = None
) -> None:
    """Refuse a compressed attention mask that has too few entries for the documents of one of the trained samples.

    With `eod_pad_length` + 1 documents MindFormers 1.9.0 silently drops the end of the last document (attention runs
    over an unfinished mask); with more documents it raises an error in the step that reads the sample.

    Args:
        documents: [samples], the number of documents of each sample, in the order of training.
        batch: the number of samples in a step.
        padding: the number of entries that must stay padding (`padding_under`).
        items: [samples], the numbers of the samples in the data; None: they are trained in this order.

    Raises:
        RecipeError: a sample has too many documents; the message names the first such sample, the largest one, and a
            sufficient length.
    """
    over = np.flatnonzero(documents + padding > eod_pad_length)
    if len(over):
        first, largest = int(over[0]), int(documents.argmax())
        named = np.arange(len(documents)) if items is None else items
        least = f"{documents[largest] + padding:.0f} or more"
        if padding:
            least += ", which is one more than its documents, because context parallelism needs the last entry"
        raise RecipeError(
            f"{CONFIG}.eod_pad_length: {eod_pad_length} is not enough for the {documents[first]:.0f} documents of "
            f"sample {named[first]} (step {first // batch + 1}); {len(over)} of {len(documents)} samples have too many "
            f"documents, and sample {named[largest]} has the most: write {least}"
        )


def check_last_tokens(tokens: np.ndarray, eod: int, corpus: str) -> None:
    """Refuse an `eod` that is not the token with which this corpus' documents end.

    tokens: [documents looked at], the last one of each.

    Raises:
        DataError: the last token is not the EOD token, so masks would not end where the documents end.
    """
    other = tokens[tokens != eod]
    if len(other):
        raise DataError(
            f"{CONFIG}.eod: documents of {corpus} do not end with token {eod}: {len(other)} of {len(tokens)} documents "
            f"end with token {other[0]}; write the token with which the documents of the corpus end, because "
            "attention masks and costs depend on it"
        )
