"""This module reads and writes the Megatron index format. The file `.bin` holds the token ids of all documents one
after another, and the file `.idx` holds the positions at which documents begin.

The file `.idx` holds in little endian: `HEADER` (MMIDIDX and two zero bytes), uint64 version 1, uint8 dtype code,
uint64 number of sequences, uint64 number of documents + 1, then int32[sequences] lengths in tokens, int64[sequences]
byte offsets into `.bin`, and int64[documents + 1] first sequence of each document and the end of the last. In the files
of this module each document is one sequence. Megatron's own preprocessing also lists documents without text, which have
no sequence; MindFormers reads sequences, and so leaves them out, and so does this module.

This module does not use MindFormers' `IndexedDatasetBuilder`, because the import takes seconds and the builder keeps a
Python list entry for each document. The writer needs 4 bytes of memory per document. The reader needs 12 bytes per
document, and 28 bytes while it opens a file; `map_lengths` reads only the document lengths, for corpora for which this
memory is too large.

`write_corpus` and `write_learnable` make seeded corpora of token ids without any text, for tests that need only some
corpus to train on.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from plugins.errors import DataError

HEADER = b"MMIDIDX\x00\x00"
DTYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
_COUNTS = struct.Struct("<QBQQ")  # version, dtype code, sequences, documents + 1
_CHUNK = 1 << 16  # documents, or tokens, handled at a time
_NOT_ONE_SEQUENCE = "the index does not hold one sequence for each document; prepare the corpus again"


def choose_dtype(requested: str, vocab_size: int) -> str:
    """Return the type that Megatron's `optimal_dtype` chooses for token ids: "uint16" for vocabularies below 65,500
    ids, and "int32" otherwise.

    `requested` is "auto", "uint16" or "int32". Raises `DataError` if `vocab_size` ids do not fit into the requested
    type.
    """
    if requested == "auto":
        return "uint16" if vocab_size < 65500 else "int32"
    largest = int(np.iinfo(requested).max)
    if vocab_size - 1 > largest:
        raise DataError(
            f"--dtype {requested} holds ids up to {largest:,}, but the vocabulary has {vocab_size:,} ids; choose a "
            "larger type"
        )
    return requested


class BrokenIndexError(DataError):
    """This error means that a .bin file and an .idx file exist, but contradict the Megatron format or each other."""


class IndexWriter:
    """An `IndexWriter` writes the file `.bin` while documents arrive, and the file `.idx` at the end."""

    def __init__(self, bin_path: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.tokens = 0
        self._lengths = array("i")
        self._sha256 = hashlib.sha256()
        self._bin = open(bin_path, "wb")  # noqa: SIM115 (closed by `finish` or `close`)

    @property
    def documents(self) -> int:
        """Return the number of documents added so far."""
        return len(self._lengths)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the content that `.bin` has now, in hexadecimal."""
        return self._sha256.hexdigest()

    def add(self, lengths: np.ndarray, tokens: np.ndarray) -> None:
        """Append whole documents to `.bin`. The argument `lengths` (int32 [documents]) holds the number of tokens of
        each document, and `tokens` ([sum of lengths]) holds the token ids of all documents one after another.
        """
        assert tokens.dtype == self.dtype and lengths.dtype == np.int32
        self._bin.write(tokens.data)
        self._sha256.update(tokens.data)
        self._lengths.frombytes(lengths.tobytes())
        self.tokens += len(tokens)

    def finish(self, idx_path: Path) -> None:
        """Flush `.bin` to disk, then write and flush `.idx`."""
        self._sync(self._bin)
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        with open(idx_path, "wb") as stream:
            stream.write(HEADER)
            stream.write(_COUNTS.pack(1, DTYPE_CODES[self.dtype.name], len(lengths), len(lengths) + 1))
            stream.write(lengths.data)
            for pointers in _pointers(lengths, self.dtype.itemsize):
                stream.write(pointers.data)
            for start in range(0, len(lengths) + 1, _CHUNK):
                stream.write(np.arange(start, min(start + _CHUNK, len(lengths) + 1), dtype=np.int64).data)
            self._sync(stream)

    def close(self) -> None:
        """Close `.bin` without writing `.idx`."""
        self._bin.close()

    @staticmethod
    def _sync(stream) -> None:
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()


def _pointers(lengths: np.ndarray, itemsize: int) -> Iterator[np.ndarray]:
    """Yield the byte offset of each document in `.bin`, int64, `_CHUNK` documents at a time."""
    offset = 0
    for start in range(0, len(lengths), _CHUNK):
        ends = offset + np.cumsum(lengths[start : start + _CHUNK], dtype=np.int64) * itemsize
        yield np.concatenate(([offset], ends[:-1])).astype(np.int64)
        offset = int(ends[-1])


def map_lengths(prefix: str | Path) -> np.ndarray:
    """Return the document lengths of PREFIX.idx, int32 [documents], mapped read-only. The file PREFIX.bin need not
    exist.

    The function serves callers that need no offsets: it uses no memory of this process except for mapped pages of the
    file, 4 bytes per document. The values of the lengths are not checked. Raises the same errors as `IndexReader`.
    """
    path = Path(f"{prefix}.idx")
    _require(path)
    with open(path, "rb") as stream:
        _, documents = _read_header(stream, path)
        start = stream.tell()
    if not documents:
        raise BrokenIndexError(f"{path}: the index holds no documents; prepare the corpus again")
    return np.memmap(path, dtype=np.int32, mode="r", offset=start, shape=(documents,))


def _require(path: Path) -> None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(
                f"{path}: this is not an ordinary file; give PREFIX, which is the path without .bin or .idx"
            )
        with open(path, "rb"):
            pass
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path}: there is no such file; give PREFIX, which is the path without .bin or .idx") from None
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror})") from None


def _read_header(stream: BinaryIO, path: Path) -> tuple[np.dtype, int]:
    """Return dtype of the ids and number of documents; leaves `stream` at the lengths. Raises `BrokenIndexError`."""
    if stream.read(len(HEADER)) != HEADER:
        raise BrokenIndexError(
            f"{path}: this is not a Megatron index, because its first bytes are wrong; give PREFIX of a corpus"
        )
    try:
        version, code, sequences, documents = _COUNTS.unpack(stream.read(_COUNTS.size))
    except struct.error:
        raise BrokenIndexError(f"{path}: the file is truncated inside its header; copy it again") from None
    names = {number: name for name, number in DTYPE_CODES.items()}
    if version != 1 or code not in names:
        raise BrokenIndexError(
            f"{path}: the index has version {version} and dtype code {code}, which are not supported; write it again "
            "with tc3 data prepare"
        )
    expected = len(HEADER) + _COUNTS.size + 12 * sequences + 8 * documents
    if path.stat().st_size != expected:
        raise BrokenIndexError(
            f"{path}: the file has {path.stat().st_size:,} bytes, but by the counts in its header it must have "
            f"{expected:,}; copy the file again"
        )
    if documents < sequences + 1:
        raise BrokenIndexError(f"{path}: {_NOT_ONE_SEQUENCE}")
    return np.dtype(names[code]), sequences


class IndexReader:
    """An `IndexReader` reads a .bin file and its .idx file without mapping them into memory, and checks that both files
    are complete.

    Raises `DataError` if a file is missing, and `BrokenIndexError` if a file has another format or contradicts the
    counts in its header.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin_path, self.idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        for path in (self.bin_path, self.idx_path):
            _require(path)
        self._read_idx()
        self._check_sizes()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the ids of one document, its end-of-document id included."""
        count, offset = int(self.lengths[index]), int(self.offsets[index])
        return np.fromfile(self.bin_path, dtype=self.dtype, count=count, offset=offset)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in `.bin`, including the end-of-document tokens."""
        return int(self.lengths.sum(dtype=np.int64))

    def blocks(self, size: int = 1 << 20) -> Iterator[np.ndarray]:
        """Yield all token ids of `.bin` in order, in blocks of `size` ids."""
        with open(self.bin_path, "rb") as stream:
            while len(block := np.fromfile(stream, dtype=self.dtype, count=size)):
                yield block

    def some(self) -> np.ndarray:
        """Return tokens from evenly spread places of `.bin`, about a million of a large corpus."""
        starts = np.linspace(0, max(self.tokens - _CHUNK // 16, 0), 256, dtype=np.int64)
        return self._at(np.unique(starts), _CHUNK // 16)

    def last(self) -> np.ndarray:
        """Return the last tokens of some documents, which are evenly spread over the corpus."""
        documents = np.unique(np.linspace(0, max(len(self) - 1, 0), 16, dtype=np.int64))[: len(self)]
        ends = self.offsets[documents] // self.dtype.itemsize + self.lengths[documents]
        return self._at(ends - 1, 1)

    def _at(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return up to `count` tokens of `.bin` from each of the tokens `starts` on, int64."""
        size = self.dtype.itemsize
        parts = [np.fromfile(self.bin_path, self.dtype, count, offset=start * size) for start in starts.tolist()]
        return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)

    def _read_idx(self) -> None:
        with open(self.idx_path, "rb") as stream:
            self.dtype, documents = _read_header(stream, self.idx_path)
            self.lengths = np.fromfile(stream, dtype=np.int32, count=documents)
            self.offsets = np.fromfile(stream, dtype=np.int64, count=documents)
            first_sequences = np.fromfile(stream, dtype=np.int64)
        sequences = np.diff(first_sequences)  # of each document
        ends = first_sequences[0], first_sequences[-1]
        if ends != (0, documents) or sequences.min(initial=0) < 0 or sequences.max(initial=0) > 1:
            raise BrokenIndexError(f"{self.idx_path}: {_NOT_ONE_SEQUENCE}")

    def _check_sizes(self) -> None:
        if len(self.lengths) and int(self.lengths.min()) < 1:
            raise BrokenIndexError(
                f"{self.idx_path}: a document of the index has {int(self.lengths.min())} tokens, but each needs at "
                "least 1; prepare the corpus again"
            )
        start = 0
        for pointers in _pointers(self.lengths, self.dtype.itemsize):
            if not np.array_equal(pointers, self.offsets[start : start + len(pointers)]):
                raise BrokenIndexError(
                    f"{self.idx_path}: the offsets of the documents do not agree with their lengths, so the file is "
                    "damaged; prepare the corpus again"
                )
            start += len(pointers)
        size, expected = self.bin_path.stat().st_size, self.tokens * self.dtype.itemsize
        if size != expected:
            raise BrokenIndexError(
                f"{self.bin_path}: the file has {size:,} bytes, but according to its index {self.idx_path} it must "
                f"have {expected:,}; copy both files again"
            )


# The corpora of a recipe's `data_path`, told apart as MindFormers does: prefixes, or weights and prefixes by turns.
#
# MindFormers 1.9.0, `get_blend_from_list` (dataset/blended_datasets/utils.py): an odd number of entries are prefixes;
# of an even number every other one is a weight if all of these are numbers. Where some are and some are not, it stops
# or takes a weight for a prefix, by the order of the entries; that is refused here.


class Blend(NamedTuple):
    """A `Blend` holds the prefixes of several corpora and their sampling weights; the weights are None if each corpus
    is sampled in proportion to its size.
    """

    prefixes: list[str]
    weights: list[float] | None


def read_blend(data_path: Any) -> Blend:
    """Return the corpus prefixes and weights that the value of a `data_path` key holds.

    Raises:
        DataError: the value is not a list of texts and numbers, or MindFormers could not read it. The message does not
            name the key that holds the value.
    """
    entries = data_path if isinstance(data_path, list) else []
    if not entries or not all(type(entry) in (str, int, float) for entry in entries):
        raise DataError(
            f"the value must be a list such as ['1', PREFIX], of a weight and a path for each corpus, not {data_path!r}"
        )
    words = [str(entry).strip() for entry in data_path]
    weights = [_weight(word) for word in words[::2]]
    known = [weight for weight in weights if weight is not None]
    if len(words) % 2 or not known:
        return Blend(words, None)
    if len(known) < len(weights):
        raise DataError(f"{data_path!r} gives weights to some prefixes only; give each prefix a weight, or none")
    if not all(math.isfinite(weight) and weight > 0 for weight in known):  # as MindFormers' BlendedDataset asserts
        raise DataError(
            f"{', '.join(words[::2])}: these weights cannot be shares of the data; write finite numbers above zero, "
            "and leave out a corpus that is not to be trained on"
        )
    return Blend(words[1::2], known)


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


PARTS = ("training", "validation", "test")  # of a corpus


def training_share(split: str) -> float:
    """Return the fraction of a corpus's documents that the recipe's key `split` assigns to training. The numbers of
    `split` are normalised as in MindFormers, which trains on the first documents of the corpus.

    Raises:
        DataError: `split` does not begin with a number above 0, or has more numbers than MindFormers takes. The message
            does not say where it stands.
    """
    return _shares(split)[0]


def parts_of(split: str, documents: int) -> list[tuple[str, int, int]]:
    """Return (name, first document, end) for each part of a corpus that gets a share of its `documents` by `split`.

    Raises:
        DataError: see `training_share`.
    """
    found, begin = [], 0.0
    for name, share in zip(PARTS, _shares(split), strict=False):
        end = begin + share
        if end > begin:
            found.append((name, round(begin * documents), round(end * documents)))
        begin = end
    return found


def _shares(split: str) -> list[float]:
    """Return the fraction of a corpus's documents that each number of `split` assigns to a part."""
    try:
        shares = [float(text) for text in re.findall(r"[.0-9]+", split)]
    except ValueError:  # such as 1.2.3
        shares = []
    if not shares or not shares[0]:
        raise DataError("this value leaves no document for training; write '1, 0, 0'")
    if len(shares) > len(PARTS):
        raise DataError(f"this value has {len(shares)} numbers, but a corpus has {len(PARTS)} parts; write '1, 0, 0'")
    return [share / sum(shares) for share in shares]


def read_whole(config: dict[str, Any], prefix: str) -> None:
    """Change the settings of a Megatron loader in place, so that it reads all documents of a corpus that the recipe
    does not name. (The padding id, the split and the corpora of the parts in these settings are those of the recipe's
    own corpus.)
    """
    config.update(data_path=["1", prefix], split="1, 0, 0", pad=-1)
    for part in ("train", "valid", "test"):
        config.pop(f"{part}_data_path", None)


def write_corpus(prefix: Path, lengths: np.ndarray, vocab_size: int, end_of_document: int, seed: int) -> None:
    """Write PREFIX.bin and PREFIX.idx with documents of the given lengths. The token ids are random, and each document
    ends with the id `end_of_document`.

    lengths: int32 [documents]; ids are drawn from [0, vocab_size) without `end_of_document`.
    """
    random = np.random.default_rng(seed)
    writer = IndexWriter(Path(f"{prefix}.bin"), "int32")
    for start in range(0, len(lengths), 1024):
        some = lengths[start : start + 1024]
        ids = random.integers(0, vocab_size - 1, int(some.sum(dtype=np.int64)), dtype=np.int32)
        ids += ids >= end_of_document
        ids[np.cumsum(some, dtype=np.int64) - 1] = end_of_document
        writer.add(some, ids)
    writer.finish(Path(f"{prefix}.idx"))


def write_learnable(prefix: Path, vocabulary: int) -> None:
    """Write a corpus as a Megatron .bin/.idx: 400 documents of a seeded random walk, which a model can learn."""
    random = np.random.default_rng(7)
    lengths = random.integers(20, 120, 400).astype(np.int32)
    steps = random.choice([1, 2, 3, 17], size=int(lengths.sum()))
    dtype = choose_dtype("auto", vocabulary)
    tokens = (np.cumsum(steps) % (vocabulary - 1) + 1).astype(dtype)
    writer = IndexWriter(Path(f"{prefix}.bin"), dtype)
    writer.add(lengths, tokens)
    writer.finish(Path(f"{prefix}.idx"))
    writer.close()
