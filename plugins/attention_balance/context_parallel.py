"""This module divides the tokens of one sample that holds several documents over context-parallel ranks, so that each
rank gets equally many tokens and equal attention work. The module needs only NumPy.

A rank computes the queries of its tokens; a query at offset i of its document attends to i + 1 keys. A contiguous split
gives the last rank of a long document most of the work. The head-tail split of ring attention (cut the sample into 2 *
cp pieces; rank r takes pieces r and 2 cp - 1 - r) divides attention equally only if the sample is one document. This
module cuts each long document head-tail as if it were a sample, so that the attention of the document is divided
equally. The remaining tokens are distributed so that every rank has the same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROUNDS = 16  # strips that a rank gets of what is not cut head-tail


@dataclass(frozen=True)
class ContextPlan:
    """A `ContextPlan` is the division of a sample over context-parallel ranks. `ranges` holds for each rank int64 [n,
    2]: the first token and the end (exclusive) of each of the n token ranges of the rank, which are in rising order and
    not adjacent. `pairs` is int64 [cp]: the number of token pairs whose attention each rank computes.
    """

    ranges: list[np.ndarray]
    pairs: np.ndarray

    @property
    def imbalance(self) -> float:
        """Return the number of attending pairs of tokens on the rank with the most pairs, divided by the mean over the
        ranks; 1 is perfect balance.
        """
        return float(self.pairs.max() / self.pairs.mean())


def contiguous(segments: np.ndarray, ranks: int) -> ContextPlan:
    """Cut the sample into `ranks` equal consecutive parts and give rank r the r-th part. The argument `segments` is
    int64 [documents], the number of tokens of each document; the sum of these numbers is a multiple of `ranks`.
    """
    return _strided(segments, ranks, np.arange(ranks))


def head_tail(segments: np.ndarray, ranks: int) -> ContextPlan:
    """Cut the sample into 2 * ranks equal consecutive parts and give rank r the r-th part and the r-th part from the
    end. The argument `segments` is int64 [documents], the number of tokens of each document; their sum is a multiple of
    2 * ranks.
    """
    return _strided(segments, ranks, np.concatenate((np.arange(ranks), np.arange(ranks)[::-1])))


def balanced(segments: np.ndarray, ranks: int, smallest_piece: int = 128) -> ContextPlan:
    """Give each rank a piece from the head and a piece from the tail of each long document, and distribute the
    remaining tokens by the attention work that they cause.

    1. A document of at least 2 * ranks * smallest_piece tokens is cut into its first `ranks` and its last `ranks`
       pieces of floor(n / (2 * ranks)) tokens; rank r takes the r-th of the first and the r-th from the end of the
       last. The two pieces of a rank mirror each other in the document, so every rank gets exactly the same number of
       pairs. Fewer than 2 * ranks tokens remain in the middle of the document.
    2. The middles of long documents and the short documents, sorted by the mean work of a token, form a line that is
       cut into strips, `ranks` strips in a round; all strips of a round are equally long, so every rank gets the same
       number of tokens. In each round the heaviest strip goes to the rank with the fewest pairs so far.

    Args:
        segments: int64 [documents], the tokens of each document, in the sample's order; their sum is a multiple of
            `ranks`.
        ranks: context-parallel ranks.
        smallest_piece: the smallest number of tokens of a piece. Attention kernels work in blocks, so a piece below one
            block costs as much as a whole one. 1 balances the pairs best; with larger values documents are cut less
            often.
    """
    segments = np.asarray(segments, np.int64)
    starts = np.cumsum(segments) - segments
    piece = segments // (2 * ranks)
    long = piece >= smallest_piece
    piece = np.where(long, piece, 0)

    number = np.arange(2 * ranks)
    owner = np.concatenate((number[:ranks], number[:ranks][::-1]))
    shift = np.where(number < ranks, 0, (segments - 2 * ranks * piece)[:, None])
    begin = (starts[:, None] + shift + number * piece[:, None])[long].ravel()
    pieces = np.stack((begin, begin + np.repeat(piece[long], 2 * ranks)), 1)

    rest = np.stack((starts + ranks * piece, starts + segments - ranks * piece), 1)
    rest = rest[rest[:, 1] > rest[:, 0]]
    rest_ranges, rest_owner = _dealt(rest, segments, ranks)
    owners = np.concatenate((np.tile(owner, int(long.sum())), rest_owner))
    return _plan(segments, ranks, np.concatenate((pieces, rest_ranges)), owners)


def _dealt(runs: np.ndarray, segments: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Do step 2 of `balanced`: return the ranges int64 [m, 2], and the rank of each, for runs int64 [n, 2] of
    tokens.
    """
    if not len(runs):
        return runs, np.zeros(0, np.int64)
    size = runs[:, 1] - runs[:, 0]
    work = _pairs(runs, segments)
    runs = runs[np.argsort(-work / size, kind="stable")]
    ends = np.cumsum(runs[:, 1] - runs[:, 0])
    own = int(ends[-1]) // ranks
    rounds = max(min(_ROUNDS, own), 1)
    # strip borders on the line: `ranks` strips a round, sizes of rounds differ by at most one token
    sizes = np.repeat(np.diff(np.arange(rounds + 1) * own // rounds), ranks)
    strip_ends = np.cumsum(sizes)

    cuts = np.union1d(ends, strip_ends)
    first = np.concatenate(([0], cuts[:-1]))
    run = np.searchsorted(ends, first, side="right")
    shift = runs[run, 1] - ends[run]
    ranges = np.stack((first + shift, cuts + shift), 1)
    strip = np.searchsorted(strip_ends, first, side="right")
    strip_work = np.zeros(rounds * ranks, np.int64)
    np.add.at(strip_work, strip, _pairs(ranges, segments))
    return ranges, _rank_of_strip(strip_work.reshape(rounds, ranks)).ravel()[strip]


def _rank_of_strip(work: np.ndarray) -> np.ndarray:
    """Return the rank of each strip: in each round [rounds, ranks] of strips, the strip with the most work goes to the
    rank with the least work so far, the next strip to the rank with the next least work, and so on.
    """
    loads = np.zeros(work.shape[1], np.int64)
    owner = np.empty_like(work)
    for row, own in zip(work, owner, strict=True):
        own[np.argsort(-row, kind="stable")] = np.argsort(loads, kind="stable")
        loads[own] += row
    return owner


def _strided(segments: np.ndarray, ranks: int, owner: np.ndarray) -> ContextPlan:
    """Return the plan for a sample that is cut into as many equal parts as `owner` [parts] has entries, which are the
    ranks of the parts.
    """
    segments = np.asarray(segments, np.int64)
    tokens = int(segments.sum())
    assert tokens % len(owner) == 0
    borders = np.arange(len(owner) + 1) * (tokens // len(owner))
    return _plan(segments, ranks, np.stack((borders[:-1], borders[1:]), 1), owner)


def _plan(segments: np.ndarray, ranks: int, ranges: np.ndarray, owner: np.ndarray) -> ContextPlan:
    """Sort and join the ranges [n, 2] of each rank and count its pairs."""
    order = np.argsort(ranges[:, 0], kind="stable")
    ranges, owner = ranges[order], owner[order]
    joined = []
    for rank in range(ranks):
        own = ranges[owner == rank]
        begins = np.concatenate(([True], own[1:, 0] != own[:-1, 1]))
        ends = np.concatenate((begins[1:], [True]))
        joined.append(np.stack((own[begins, 0], own[ends, 1]), 1))
    pairs = np.array([int(_pairs(own, segments).sum()) for own in joined])
    return ContextPlan(joined, pairs)


def _pairs(ranges: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Return the number of attending pairs of tokens of each range, int64 [n]; a range may hold several documents."""
    ends = np.cumsum(segments)
    total = np.concatenate(([0], np.cumsum(segments * (segments + 1) // 2)))

    def up_to(token: np.ndarray) -> np.ndarray:
        document = np.searchsorted(ends, token, side="right")
        offset = token - np.concatenate(([0], ends))[document]
        return total[document] + offset * (offset + 1) // 2

    return up_to(ranges[:, 1]) - up_to(ranges[:, 0])
