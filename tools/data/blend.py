"""This module computes how many samples MindFormers has and takes of each corpus of a recipe's `data_path`.

MindFormers 1.9.0 asks a corpus with a weight for its share of the samples and 0.5 % more, and a single corpus without a
weight for all samples; the corpus is repeated in whole epochs until it has the requested number of samples. MindFormers
reads several corpora without weights only once. `BlendedMegatronDatasetBuilder` adds up the rounded requests, deals out
this number of samples, and refuses a blend that takes more of a corpus than the corpus has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_MARGIN = 1.005  # `_get_size_per_split_per_dataset`
_DEALT = 100_000  # samples that are dealt one by one


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return the share of each corpus, rounded as MindFormers rounds it (`normalize`)."""
    found = np.array(weights, np.float64)
    return (found / np.sum(found)).tolist()


def asked_of(samples: int, share: float) -> int:
    """Return the number of samples for which MindFormers asks a corpus that provides the given share of a blend."""
    return math.ceil(samples * share * _MARGIN)


@dataclass(frozen=True)
class Corpora:
    """A `Corpora` describes the corpora of a `data_path`.

    Attributes:
        tokens: the number of tokens in the documents of each corpus that are trained on.
        shares: the share of the samples that each corpus provides; None without weights.
        length: the number of tokens of a sample.
        more: the number of further tokens that the last sample needs for its labels.
    """

    tokens: tuple[int, ...]
    shares: tuple[float, ...] | None
    length: int
    more: int

    def held(self, samples: int) -> list[int]:
        """Return the number of samples that each corpus has if `samples` samples are asked for."""
        if self.shares is not None:
            asked = [asked_of(samples, share) for share in self.shares]
        else:
            asked = [samples if len(self.tokens) == 1 else 0] * len(self.tokens)
        epochs = [
            max(1, -(-(count * self.length + self.more) // tokens))
            for count, tokens in zip(asked, self.tokens, strict=True)
        ]
        return [max(n * tokens - self.more, 0) // self.length for n, tokens in zip(epochs, self.tokens, strict=True)]

    def size(self, samples: int) -> int:
        """Return the number of samples of MindFormers' data set if `samples` samples are asked for."""
        if self.shares is not None:
            return sum(asked_of(samples, share) for share in self.shares)
        return sum(self.held(samples)) if len(self.tokens) == 1 else min(samples, sum(self.held(samples)))

    def too_small(self, samples: int) -> tuple[int, int, int] | None:
        """Return (place of the corpus, samples it has, samples taken) for the first corpus that MindFormers refuses as
        too small for a blend; return None if MindFormers accepts the blend. `exact` says whether the last number is
        exact.
        """
        if self.shares is None or len(self.tokens) == 1:
            return None
        size = self.size(samples)
        exact = self.exact(samples)
        shares = shares_of(self.shares)  # `BlendedDataset` divides by the sum once more, which may move a sample
        taken = self._dealt(shares, size) if exact else [math.floor(each * (size - 1)) + 1 for each in shares]
        counts = [count for count in taken if count]  # MindFormers does not count a corpus without a sample
        found = zip(range(len(taken)), self.held(samples), counts, strict=False)
        return next((each for each in found if each[1] < each[2]), None)

    def exact(self, samples: int) -> bool:
        """Return whether the number of samples taken is exact; otherwise it is an upper bound."""
        return self.size(samples) <= _DEALT

    def spare(self, samples: int, wanted: int) -> int:
        """Return the number of samples, at most `wanted`, that the data have beyond the first `samples`.
        `plugins.spike_guard` uses these samples in place of samples that it leaves out; it reads a blend until the
        corpus whose turn it is has no sample left. Above 100,000 samples the returned number may be slightly too large.
        """
        held, size = self.held(samples), self.size(samples)
        if len(held) == 1 and self.shares is None:
            return min(size - samples, wanted)
        shares = shares_of(self.shares or held)
        last = samples + wanted
        if last <= _DEALT:
            there = sum(self._dealt(shares, last, held))
        else:
            there = min(math.floor(count / share) for count, share in zip(held, shares, strict=True)) + len(shares)
        return min(max(there, size) - samples, wanted)

    @staticmethod
    def _dealt(shares: Sequence[float], samples: int, held: list[int] | None = None) -> list[int]:
        """Return the number of samples that MindFormers takes from each corpus. With `held`, the number of samples that
        each corpus has, the count ends when the corpus whose turn it is has no sample left.
        """
        chosen, before = (each[:samples] for each in _turns(tuple(shares), min(1 << samples.bit_length(), _DEALT)))
        if held and (over := before >= np.array(held)[chosen]).any():
            chosen = chosen[: int(np.argmax(over))]
        return np.bincount(chosen, minlength=len(shares)).tolist()


@lru_cache(maxsize=4)  # advice asks for many numbers of samples of one blend
def _turns(shares: tuple[float, ...], samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each of the first `samples` samples of a blend the corpus from which MindFormers takes the sample, and
    the number of samples that MindFormers took from this corpus before. MindFormers takes each sample from the corpus
    that lags most behind its share (`build_blending_indices`).
    """
    wanted, taken = np.array(shares), np.zeros(len(shares))
    chosen, before = np.zeros(samples, np.int64), np.zeros(samples, np.int64)
    for number in range(samples):
        corpus = chosen[number] = np.argmax(wanted * max(number, 1) - taken)
        before[number] = taken[corpus]
        taken[corpus] += 1
    return chosen, before
