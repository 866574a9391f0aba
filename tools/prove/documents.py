"""This module finds the operators of a graph that compute the ends of the documents (the cumulative sequence lengths
that attention takes in the layout TND). If the queries are cut over ranks along the sequence, the module checks that
these ends are right for the rank's own piece of the queries.

In this case a rank has a piece of the queries and all keys. From the ends of all documents MindSpore computes, element
by element and with constants that differ by rank, the ends of the documents among the rank's queries and among its
keys. `with_formula` records this computation, and `check_ends` evaluates it for every token at which a document can
end, on every rank:

* Among the queries of a piece that starts at token `first`, a document that ends at token e ends at e - first, but not
  before 0 and not after the end of the piece.
* Among the keys this document ends at e, but not after the last query of the piece: attention (sparse mode 3)
  determines the keys to which a query attends by counting back from the last query and key of a document, so that keys
  after the piece would shift these keys.

The list of ends is padded with the last token. MindSpore sets its last entry to the last key, as the operator requires.
This module does not check that the last entry is padding, which means that an earlier entry also ends at the last
token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from tools.dryrun.graph_text import arguments_of
from tools.prove.call import Call, Value, rule
from tools.prove.spread import Certain, Dim, NotKnown, Spread, by_element, extent

Formula = tuple[Any, ...]  # operator and its arguments: formulas, numbers, `_OF` and `_START`

_OF, _START = "ends of documents", "a number of the rank's own"
_ENTRY, _REPLACED = "Gather", "ScatterNdUpdate"  # one entry of a list, and a list with another value of one entry
_PLACE = re.compile(r"^Tensor\(shape=\[1(?:, 1)?\], dtype=Int\d+, value=\s*\[+(\d+)\]+\)$")
_NUMBER = re.compile(r"^(?:[IU]\d+\(|Tensor\(shape=\[1?\], dtype=U?Int\d+, value=\s*\[?\s*)(-?\d+)\s*\]?\)$")
_SAME = ("Depend", "Load", "TensorMove", "TupleGetItem", "Send")
_PASSED = ("Cast", "TensorToTuple")  # the same numbers
_COMPUTED: Mapping[str, Callable[..., np.ndarray]] = {
    "Add": lambda x, y, *_: x + y,
    "AddExt": lambda x, y, by=1: x + by * y,
    "ClipByValue": lambda x, low, high: np.clip(x, low, high),
    "Equal": lambda x, y: x == y,
    "Maximum": lambda x, y: np.maximum(x, y),
    "Minimum": lambda x, y: np.minimum(x, y),
    "ReLU": lambda x: np.maximum(x, 0),
    "Select": lambda which, x, y: np.where(which, x, y),
    "Sub": lambda x, y, *_: x - y,
    "SubExt": lambda x, y, by=1: x - by * y,
}


def with_formula(call: Call, found: Value) -> Value:
    """Return the result of an operator on a vector of integers, together with the formula by which each element was
    computed.
    """
    if not isinstance(found, Spread) or call.node.op in _SAME:
        return found
    if call.node.op not in (*_COMPUTED, *_PASSED, _ENTRY, _REPLACED) or len(found.dims) != 1:
        return replace(found, formula=())
    if call.node.op in (_ENTRY, _REPLACED) and _place(call) is None:
        return replace(found, formula=())
    parts: list[Any] = []
    for place, text in enumerate(arguments_of(call.node.head)):
        value, number = call.values[place], _NUMBER.match(text)
        if place == 1 and call.node.op in (_ENTRY, _REPLACED):
            parts.append(_place(call))
        elif (place, 0) in call.offsets:
            first, steps = call.offsets[place, 0]
            parts.append((_START, first, tuple(sorted(steps.items()))))
        elif number:
            parts.append(int(number[1]))
        elif isinstance(value, Spread) and text.startswith("%"):
            parts.append(value.formula or (_OF, call.names[place]))
    return replace(found, formula=parts[0] if call.node.op in _PASSED else (call.node.op, *parts))


def _place(call: Call) -> int | None:
    """Return the place of the one entry that an operator takes or replaces; return None if the text does not write it
    out.
    """
    texts = arguments_of(call.node.head)
    found = _PLACE.match(texts[1]) if len(texts) > 1 else None
    return int(found[1]) if found else None


def _own_entry(x: Spread) -> Dim:
    """Return the dimension of one entry that each rank takes from its own list."""
    return tuple(atom for atom in x.dims[0] if isinstance(atom, str))


def entry(call: Call) -> Spread | None:
    """Return how a single entry of a list of integers is distributed over the ranks (its spread) after each rank has
    taken the entry from its own list. Return None if the operator does not take an entry from a list.
    """
    x, place = call.spread(0), _place(call)
    if len(x.dims) != 1 or place is None or not call.counts or call.values[2] != 0 or call.outputs[0].shape != (1,):
        return None
    return replace(by_element(x), dims=(_own_entry(x),), loose=frozenset())


@rule("ScatterNdUpdate", says="It replaces one entry of a list of integers, on each rank in its own list.")
def _replaced(call: Call) -> Value:
    x, value = by_element(call.spread(0)), by_element(call.spread(2))
    if len(x.dims) != 1 or _place(call) is None or not call.counts or value.dims != (_own_entry(x),):
        raise NotKnown("there is a rule only for one entry of a list of whole numbers")
    return replace(x, shifted=x.shifted | value.shifted)


def _sources(formula: Any) -> frozenset[int]:
    """Return the identifiers of the values from which a formula computes."""
    if not isinstance(formula, tuple) or formula[0] == _START:
        return frozenset()
    return frozenset(formula[1:]) if formula[0] == _OF else frozenset().union(*map(_sources, formula[1:]))


def _parts(keys: Formula, length: int) -> tuple[Formula, Formula]:
    """Return how the ends of the keys' documents are computed, and how the last of these ends is computed."""
    found = keys
    if keys[0] == _REPLACED:
        keys, place, found = keys[1:]
        if place != length - 1 or not _of_entry(found, place):
            raise NotKnown("an entry of the ends of documents is replaced that is not the last one")
    if _has_entry(keys):
        raise NotKnown("the ends of documents are computed from only one entry")
    return keys, found


def _has_entry(formula: Any) -> bool:
    """Return whether a formula takes one entry or replaces one."""
    return isinstance(formula, tuple) and (formula[0] in (_ENTRY, _REPLACED) or any(map(_has_entry, formula[1:])))


def _of_entry(formula: Any, place: int) -> bool:
    """Return whether a formula computes from only one entry."""
    if not isinstance(formula, tuple) or formula[0] == _START:
        return True
    if formula[0] == _ENTRY:
        return bool(formula[2] == place) and not _has_entry(formula[1])
    return formula[0] != _OF and all(_of_entry(each, place) for each in formula[1:])


def _computed(formula: Any, ends: np.ndarray, place: Mapping[str, int]) -> Any:
    """Return the result of a formula for the ends of documents on the rank at `place`."""
    if not isinstance(formula, tuple):
        return formula
    if formula[0] == _OF:
        return ends
    if formula[0] == _START:
        return formula[1] + sum(place.get(axis, 0) * step for axis, step in formula[2])
    if formula[0] == _ENTRY:
        return _computed(formula[1], ends, place)
    return _COMPUTED[formula[0]](*(_computed(each, ends, place) for each in formula[1:]))


def check_ends(
    queries: Spread, keys: Spread, over: Sequence[str], piece: int, whole: int, sizes: Mapping[str, int]
) -> None:
    """Raise an error unless the document ends that attention receives are the ends within the rank's own piece of the
    queries.

    Args:
        queries, keys: the ends of documents among the queries and among the keys.
        over: the axes that cut the sequence of the queries, outermost first.
        piece, whole: the number of queries and the number of keys of a rank.
        sizes: the number of ranks along each axis.

    Raises:
        Certain: on some rank a document ends at a wrong position.
        NotKnown: the graph does not show how the ends were computed.
    """
    if not queries.formula or not keys.formula or len(_sources(queries.formula) | _sources(keys.formula)) != 1:
        raise NotKnown("it is unknown how the ends of documents are computed from a cut sequence")
    if _has_entry(queries.formula):
        raise NotKnown("the ends of documents among the queries are computed from only one entry")
    body, last = _parts(keys.formula, extent(keys.dims[0]))
    wrong = _first_wrong(queries.formula, body, last, tuple((axis, sizes[axis]) for axis in over), piece, whole)
    if wrong:
        raise Certain(wrong)


@lru_cache(1024)
def _first_wrong(
    queries: Formula, keys: Formula, last: Formula, over: tuple[tuple[str, int], ...], piece: int, whole: int
) -> str:
    """Return a sentence about the first document that ends at another token than it should; return "" if there is
    none.

    Args:
        last: how the last entry of the keys' ends is computed.
    """
    ends = np.arange(whole + 1)
    for number, at in enumerate(product(*(range(size) for _, size in over))):
        place, first = dict(zip((axis for axis, _ in over), at, strict=True)), number * piece
        shown, within = np.clip(ends - first, 0, piece), np.minimum(ends, first + piece)
        for which, formula, wanted in (("queries", queries, shown), ("keys", keys, within), ("keys", last, within)):
            found = np.broadcast_to(_computed(formula, ends, place), ends.shape)
            differs = found != wanted
            if formula is last and last is not keys:  # padding ends at the last token, and may end at the last key
                differs[:-1], differs[-1] = False, not wanted[-1] <= found[-1] <= whole
            if differs.any():
                end = int(np.flatnonzero(differs)[0])
                return (
                    f"among the {which} of piece {number}, a document that ends at token {end} ends at "
                    f"{int(found[end])} and not at {int(wanted[end])}"
                )
    return ""
