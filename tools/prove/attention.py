"""This module says how the result of an attention operator is distributed over the ranks, for each layout of the
operator's arguments (queries, keys and values).

The batch, the heads, and the sequence of the queries may be cut over ranks; keys and values have the whole sequence. A
rank that has a part of the queries needs the position at which this part begins. MindSpore passes this position in two
ways: the number of visible tokens before and after a query differs along the axes that cut the sequence, and each rank
has its own rows of the mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from tools.prove.call import Call, Value, rule
from tools.prove.documents import check_ends
from tools.prove.spread import (
    Certain,
    Dim,
    NotKnown,
    Spread,
    by_element,
    extent,
    placements,
    plain,
    refusal,
    require_home,
    tidy,
)


class _Layout(NamedTuple):
    """A `_Layout` names the dimensions of batch, sequence and heads; without a batch, the sequence holds the tokens of
    all samples.
    """

    batch: int | None
    sequence: int
    heads: int


_LAYOUTS = {"0": _Layout(0, 1, 2), "1": _Layout(0, 2, 1), "2": _Layout(1, 0, 2), "3": _Layout(0, 1, 2),
            "4": _Layout(None, 0, 1)}  # fmt: skip
_WRITTEN = re.compile(r"(?:, I64\(-?\d+\)){3}, I64\((\d)\), I64\((\d+)\)\)$")  # the layout, the sparse mode
_FROM_THE_LAST = "3"  # the sparse mode that counts from the last query and key of a document
_TOKENS_SEEN = {"FlashAttentionScore": (13, 14), "FlashAttentionScoreGrad": (18, 19)}
_LENGTHS = {"FlashAttentionScore": (8, 9), "FlashAttentionScoreGrad": (13, 14)}
_MASK = {"FlashAttentionScore": 6, "FlashAttentionScoreGrad": 7}


@rule("FlashAttentionScore", says="It is not linear. Queries, keys and values must be cut alike over batch and heads. "
      "The queries' sequence may also be cut, if the range of visible tokens differs along the same axes.",
      takes_differing=True)  # fmt: skip
def _attention(call: Call) -> Value:
    query, _, value = _attended(call, *(by_element(call.spread(place)) for place in range(3)))
    at = _layout(call)
    heads = tidy((*_cuts(query.dims[at.heads]), call.outputs[0].shape[1]))
    front = (query.dims[0], heads) if at.batch is None else (query.dims[at.batch], heads, query.dims[at.sequence])
    small = Spread((*front, (8,)))
    wide = value.dims[-1]
    if at.heads == len(query.dims) - 1:  # of as many heads as the queries have, and as wide as the values
        wide = tidy((*_cuts(query.dims[-1]), call.outputs[3].shape[-1]))
    return [small, small, plain((1,)), Spread((*query.dims[:-1], wide), loose=query.loose)]


@rule("FlashAttentionScoreGrad", says="It is linear in the gradient, with the conditions of the forward pass. If the "
      "queries' sequence is cut, the gradients of keys and values are partial.", takes_differing=True)  # fmt: skip
def _attention_gradient(call: Call) -> Value:
    given = (by_element(call.spread(place)) for place in range(3))
    query, key, value, gradient = _attended(call, *given, call.spread(3))
    if mixed := gradient.partial & query.holes:
        raise refusal((gradient, query), f"the gradient is partial over {', '.join(sorted(mixed))}")
    over = query.holes - key.holes
    found = [
        Spread(x.dims, gradient.partial | more, gradient.powers, loose=x.loose)
        for x, more in ((query, frozenset[str]()), (key, over), (value, over))
    ]
    return [*found, plain((0,))]


def _check_tokens_seen(call: Call, rows: Dim, over: frozenset[str]) -> None:
    """Refuse a range of visible tokens that does not move with the rank's own piece of the queries."""
    before, behind = ((place, 0) for place in _TOKENS_SEEN[call.node.op])
    if not {before, behind} <= call.offsets.keys():
        raise NotKnown("the number of tokens that a query sees is not given as a whole number")
    steps = call.offsets[behind][1]
    order = replace(call, offsets={behind: (0, steps)}).own_pieces(behind, extent(rows))
    if call.offsets[before][1] != {axis: -step for axis, step in steps.items()}:
        raise Certain("the limits of visible tokens before and after a query do not shift equally")
    if order != tuple(atom for atom in rows if atom in over):
        raise Certain(f"the visible tokens shift along {', '.join(order)}, which is not the order of the pieces")


def _layout(call: Call) -> _Layout:
    written = _WRITTEN.search(call.node.head)
    if not written or written[1] not in _LAYOUTS:
        raise NotKnown("this layout of attention has no rule")
    return _LAYOUTS[written[1]]


def _attended(call: Call, *given: Spread) -> list[Spread]:
    """Return queries, keys, values and the gradient, with their loose pieces where they are cut alike."""
    at = _layout(call)
    require_home(*given)
    found = next(_cut_alike(call, at, given), None)
    if found is None:
        raise refusal(given, "batch or heads are not cut equally, or another dimension is cut")
    query, key = found[:2]
    over = query.holes - key.holes
    counts = over and at.batch is not None  # otherwise the ends of documents tell what is seen
    wanted = dict.fromkeys(((place, 0) for place in _TOKENS_SEEN[call.node.op]), over) if counts else {}
    if dict(call.differs) != wanted:
        told = f"{', '.join(sorted(over))} cuts the queries' sequence" if over else "no axis cuts the queries' sequence"
        differs = ", ".join(sorted(call.shifts())) or "no axis"
        both = " with ".join(map(str, found[:2]))
        raise Certain(f"{both}: {told}, but the number of visible tokens differs along {differs}")
    if counts:
        _check_tokens_seen(call, query.dims[at.sequence], over)
    mask = call.values[_MASK[call.node.op]]
    if isinstance(mask, Spread):
        _check_mask(by_element(mask), query, at, over)
    _check_lengths(call, query.dims[at.sequence], key.dims[at.sequence], over)
    return found


def _check_lengths(call: Call, rows: Dim, columns: Dim, over: frozenset[str]) -> None:
    """Refuse ends of documents that are not those of the rank's queries and keys."""
    given = [value for value in (call.values[place] for place in _LENGTHS[call.node.op]) if isinstance(value, Spread)]
    of_tokens = _layout(call).batch is None
    if given and over and not of_tokens:
        raise NotKnown("ends of documents under a cut sequence have a rule only in the layout TND")
    for lengths in given:
        if _cuts(by_element(lengths).dims[0]) != _cuts(columns):
            raise refusal(given, "the lengths of the sequences do not fit the tokens of the rank")
        if lengths.shifted != over:
            told = f"{', '.join(sorted(over))} cuts" if over else "no axis cuts"
            raise Certain(f"{told} the queries' sequence, and the ends of documents move along "
                          f"{', '.join(sorted(lengths.shifted)) or 'no axis'}")  # fmt: skip
    if not over or not of_tokens:
        return
    written = _WRITTEN.search(call.node.head)
    if len(given) != 2 or not written or written[2] != _FROM_THE_LAST:
        raise NotKnown("there is a rule only for ends of documents whose keys are counted from the last key")
    axes = [atom for atom in _cuts(rows) if atom in over]
    if _cuts(rows) != (*_cuts(columns), *axes):
        raise NotKnown("the pieces of the queries are not inside the pieces of the tokens")
    check_ends(given[0], given[1], axes, extent(rows), extent(columns), call.sizes)


def _cut_alike(call: Call, at: _Layout, given: Sequence[Spread]) -> Iterator[list[Spread]]:
    """Yield the places of loose pieces for which queries, keys, values and the gradient of the result fit."""
    for query, key, value, *rest in product(*map(placements, given)):
        over = query.holes - key.holes
        whole = tidy(call.sizes[atom] if atom in over else atom for atom in query.dims[at.sequence])
        fits = all(
            _cuts(x.dims[number]) == _cuts(query.dims[number])
            for x in (key, value, *rest)
            for number in range(len(query.dims))
            if number != at.sequence
        )
        inner = all(not _cuts(dim) for n, dim in enumerate(query.dims) if n not in (at.batch, at.sequence, at.heads))
        if at.batch is not None:
            inner = inner and not _cuts(key.dims[at.sequence])
        keys = all(x.dims[at.sequence] == whole for x in (key, value))
        gradient = all(x.dims[at.sequence] == query.dims[at.sequence] for x in rest)
        if fits and inner and keys and gradient:
            yield [query, key, value, *rest]


def _check_mask(mask: Spread, query: Spread, at: _Layout, over: frozenset[str]) -> None:
    """Refuse a mask whose batch or rows are not those of the queries.

    Raises:
        Contradiction: the mask belongs to other samples or rows.
    """
    if len(mask.dims) != 4 or at.batch is None:
        if mask.holes:
            raise refusal((query, mask), "the mask, which must be the same on all ranks, is cut")
        return
    batch, rows = _cuts(query.dims[at.batch]), tuple(axis for axis in _cuts(query.dims[at.sequence]) if axis in over)
    if _cuts(mask.dims[3]):
        raise refusal((query, mask), "the columns of the mask are cut")
    # a rank may slice its rows after a Reshape that moved the pieces of the rows to the dimension of the samples
    for own in placements(replace(mask, loose=mask.holes)):
        alike = not own.dims[0] or _cuts(own.dims[0]) == batch
        whole = not own.dims[2] or (_cuts(own.dims[2]) == rows and isinstance(own.dims[2][0], str) == bool(rows))
        if alike and whole and not _cuts(own.dims[3]):
            return
    raise refusal((query, mask), "the batch or the rows of the mask are not cut like the queries")


def _cuts(dim: Dim) -> tuple[str, ...]:
    return tuple(atom for atom in dim if isinstance(atom, str))
