"""Which layers a pipeline stage holds: `offset`, and the recompute settings of the same shape.

MindFormers: layers of chunk v on stage p = num_layers // (stages * chunks) + offset[v][p].
"""

from __future__ import annotations

from typing import Any

from tools.check.converter import Built
from tools.check.report import Findings
from tools.check.view import MODEL, View
from tools.recipe.load import KeyPath

_OFFSET = (*MODEL, "offset")
_RECOMPUTE = ("recompute", "select_recompute", "select_comm_recompute")
Layers = list[list[int]]


def layers_of(view: View, built: Built) -> Layers | None:
    """MindFormers' layer_list [chunk][stage]; None when the offset does not fit. Without a pipeline ``[[all layers]]``.

    Not always where layers run: see `stage_layers_of`.
    """
    total = built.number("num_layers")
    if not view.parallel or view.pp * view.chunks <= 1:
        return [[total]]
    offset = _broadcast(view.get(_OFFSET, 0), view.chunks, view.pp)
    if offset is None:
        return None
    base = total // (view.pp * view.chunks)
    layers = [[base + extra for extra in row] for row in offset]
    if sum(map(sum, layers)) != total or any(count < 0 for row in layers for count in row):
        return None
    if runs_back(view):
        layers[1] = layers[1][::-1]
    return layers


def stage_layers_of(view: View, built: Built) -> Layers | None:
    """Layers [chunk][stage] where they run; None as `layers_of`.

    In zero_bubble_v the second chunk runs back up the pipeline: `layers_of` counts it from the last stage on.
    """
    layers = layers_of(view, built)
    if layers is None or not runs_back(view):
        return layers
    return [layers[0], layers[1][::-1], *layers[2:]]


def runs_back(view: View) -> bool:
    """Whether the second chunk goes from the last stage to the first."""
    return view.scheduler == "zero_bubble_v" and view.parallel and view.chunks > 1


def _broadcast(offset: Any, chunks: int, stages: int) -> Layers | None:
    """`offset` as [chunk][stage], as numpy would broadcast it; None when it cannot."""
    if type(offset) is int:
        return [[offset] * stages for _ in range(chunks)]
    nested = isinstance(offset, list) and bool(offset) and all(isinstance(row, list) for row in offset)
    rows = offset if nested else [offset] * chunks
    if len(rows) != chunks or not all(isinstance(row, list) and len(row) == stages for row in rows):
        return None
    return [list(row) for row in rows] if all(type(count) is int for row in rows for count in row) else None


def check_stages(view: View, built: Built, found: Findings) -> None:
    """`offset` and the recompute lists, with MindFormers' own conditions."""
    total = built.number("num_layers")
    if view.parallel and view.pp * view.chunks > 1 and total > 0:
        _offset(view, total, found)
    for key in _RECOMPUTE:
        _recompute(view, view.get(("recompute_config", key)), ("recompute_config", key), found)


def _offset(view: View, total: int, found: Findings) -> None:
    stages, chunks = view.pp, view.chunks
    offset = view.get(_OFFSET, 0)
    shape = f"[{chunks}][{stages}]" if chunks > 1 else f"[{stages}]"
    base, rest = divmod(total, stages * chunks)
    place = f"{total} layers on {stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
    if total < stages * chunks:
        found.error(_OFFSET, f"{place}: fewer layers than chunks of stages", "fewer stages", rule="offset_middle")
        return
    rows = _broadcast(offset, chunks, stages)
    right = f"for instance offset: {_spread(rest, stages, chunks)}"
    if rows is None:
        rule = "offset_chunks" if _is_nested(offset, stages) else "offset_stages"
        found.error(_OFFSET, f"{offset!r} is not of shape {shape} (chunks x stages)", right, rule=rule)
        return
    written = sum(map(sum, rows))
    if written != rest:
        wrong = f"{place} leave {rest} over, but the offsets add up to {written}"
        found.error(_OFFSET, wrong, right, rule="offset_sum")
        return
    counts = [base + extra for row in rows for extra in row]
    if min(counts[0], counts[-1]) < 0:
        found.error(
            _OFFSET, f"the first or last stage would hold {min(counts[0], counts[-1])} layers", rule="offset_head"
        )
    elif len(counts) > 2 and min(counts[1:-1]) < 1:
        found.error(_OFFSET, "a stage in the middle would hold no layer", "at least one", rule="offset_middle")


def _is_nested(offset: Any, stages: int) -> bool:
    return isinstance(offset, list) and bool(offset) and isinstance(offset[0], list) and len(offset[0]) == stages


def _spread(rest: int, stages: int, chunks: int) -> list[Any]:
    """Offsets that place `rest` layers one to a chunk, from the first stage on."""
    flat = [1 if index < rest else 0 for index in range(stages * chunks)]
    rows = [flat[start : start + stages] for start in range(0, len(flat), stages)]
    return rows if chunks > 1 else rows[0]


def _recompute(view: View, value: Any, path: KeyPath, found: Findings) -> None:
    """A flag, a list per stage, a list of such lists per chunk, or one of these for each operator pattern."""
    if isinstance(value, dict):
        for pattern, inner in value.items():
            _recompute(view, inner, (*path, pattern), found)
        return
    if not isinstance(value, list) or (value and all(isinstance(item, str) for item in value)):
        return
    stages, chunks = (view.pp, view.chunks) if view.parallel else (1, 1)
    flat = all(isinstance(item, (int, bool)) for item in value)
    if flat and len(value) == stages and not (view.scheduler == "zero_bubble_v" and path[1] == "recompute"):
        _counts(value, path, found)
        return
    nested = len(value) == chunks and all(_row(row, stages) for row in value)
    if flat and len(value) == stages:
        wrong, rule = "zero_bubble_v wants a list for each of the two chunks", "zbv_recompute"
    elif nested:
        for row in value:
            if isinstance(row, list):
                _counts(row, path, found)
        return
    else:
        wrong, rule = f"{value!r} does not fit {stages} stages" + (f" x {chunks} chunks" if chunks > 1 else ""), ""
    right = f"a list of {chunks} lists of {stages} numbers of layers" if chunks > 1 else f"{stages} numbers of layers"
    found.error(path, wrong, right, rule=rule or "recompute_lookup")


def _row(row: Any, stages: int) -> bool:
    return isinstance(row, bool) or (
        isinstance(row, list) and len(row) == stages and all(isinstance(item, int) for item in row)
    )


def _counts(row: list[Any], path: KeyPath, found: Findings) -> None:
    if any(item < 0 for item in row):
        found.error(path, f"{row!r} holds a negative number of layers", rule="recompute_shape")
