"""The distribution of document lengths, exact, in one pass and in memory that does not grow with the corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from plugins.errors import DataError
from tools.data.reporter import Reporter

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_CHUNK = 1 << 20  # documents at a time
_COUNTED = 1 << 20  # shorter documents are counted by length; of longer ones a corpus has few, so they are kept


@dataclass(frozen=True)
class Distribution:
    """Values that occur and how often: int64 [n] each, values rising. Tokens of documents, or documents of samples."""

    values: np.ndarray
    counts: np.ndarray

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.counts.sum())

    @property
    def total(self) -> int:
        """Their sum."""
        return int(self.values @ self.counts)

    def quantile(self, share: float) -> int:
        """The smallest value that at least `share` of them do not exceed."""
        return _first(self.values, self.counts, share)

    def weighted_quantile(self, share: float) -> int:
        """The smallest value such that those up to it hold at least `share` of the total."""
        return _first(self.values, self.counts * self.values, share)

    def octaves(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (from, below, how many, their sum) for powers of two, from the smallest value's to the largest's."""
        octave = np.frexp(self.values)[1] - 1  # exact below 2**53
        for power in range(int(octave[0]), int(octave[-1]) + 1):
            mine = octave == power
            yield 1 << power, 2 << power, int(self.counts[mine].sum()), int(self.values[mine] @ self.counts[mine])


def _first(values: np.ndarray, weights: np.ndarray, share: float) -> int:
    total = np.cumsum(weights)
    return int(values[np.searchsorted(total, share * total[-1] * (1 - 1e-12))])


class Counter:
    """Collects a `Distribution` chunk by chunk."""

    def __init__(self) -> None:
        self._short = np.zeros(_COUNTED, np.int64)
        self._long: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> None:
        """values: int [n], at least 0."""
        long = values >= _COUNTED
        if long.any():
            self._long.append(np.asarray(values[long], np.int64))
            values = values[~long]
        counts = np.bincount(values)
        self._short[: len(counts)] += counts

    def result(self) -> Distribution:
        """Of everything added."""
        values = np.flatnonzero(self._short)
        long, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *self._long]), return_counts=True)
        return Distribution(np.concatenate((values, long)), np.concatenate((self._short[values], counts)))


def count_lengths(lengths: np.ndarray, name: str, reporter: Reporter) -> Distribution:
    """Count document lengths, int32 [documents], perhaps memory-mapped; `name` is the file that errors name.

    Raises:
        DataError: a document without tokens.
    """
    counter = Counter()
    reporter.start("reading document lengths", len(lengths))
    for start in range(0, len(lengths), _CHUNK):
        some = np.asarray(lengths[start : start + _CHUNK])
        if some.min() < 1:
            raise DataError(f"{name}: document {start + int(some.argmin()):,} has {int(some.min())} tokens")
        counter.add(some)
        reporter.advance(len(some))
    return counter.result()
