"""This module computes from `offset` the number of layers that each pipeline stage holds. The module also checks the
recompute settings, which have the same shape as `offset`.

In MindFormers, the number of layers of chunk v on stage p is num_layers // (stages * chunks) + offset[v][p].
"""

from __future__ import annotations

import re
from typing import Any

from plugins.all_ranks import stage_of_loss
from tools.recipe.findings import Findings
from tools.recipe.load import KeyPath
from tools.recipe.view import MODEL, OFFSET, View, require_resolved
from tools.schema.converter import Built

RECOMPUTE = ("recompute", "select_recompute", "select_comm_recompute")
EXCLUDE = ("select_recompute_exclude", "select_comm_recompute_exclude")
Layers = list[list[int]]


def layers_of(view: View, built: Built) -> Layers | None:
    """Return the number of layers of each [chunk][stage], as MindFormers computes it; return None if the offset is not
    valid for the recipe's layers and stages. Without a pipeline the result is ``[[all layers]]``. In some schedules a
    chunk's stages are counted from the last stage (see `stage_layers_of`).
    """
    require_resolved(view.recipe, OFFSET)
    total = built.number("num_layers")
    if not view.parallel or view.pp * view.chunks <= 1:
        return [[total]]
    offset = _broadcast(view.get(OFFSET, 0), view.chunks, view.pp)
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
    """Return the number of layers that each [chunk][stage] runs; return None if `layers_of` returns None. The result
    differs from `layers_of` only for the second chunk in zero_bubble_v, which runs from the last stage to the first.
    """
    layers = layers_of(view, built)
    if layers is None or not runs_back(view):
        return layers
    return [layers[0], layers[1][::-1], *layers[2:]]


def runs_back(view: View) -> bool:
    """Return whether the second model chunk runs from the last stage to the first, as in zero_bubble_v."""
    return view.scheduler == "zero_bubble_v" and view.parallel and view.chunks > 1


def loss_rank(view: View) -> int:
    """Return a rank that computes the loss: the last rank of the last stage, or rank 0 if the schedule ends on the
    first stage.
    """
    return view.devices - 1 if view.parallel and stage_of_loss(view.pp, view.scheduler) else 0


def _broadcast(offset: Any, chunks: int, stages: int) -> Layers | None:
    """Return `offset` as [chunk][stage], as numpy would broadcast it; None when it cannot."""
    if type(offset) is int:
        return [[offset] * stages for _ in range(chunks)]
    nested = isinstance(offset, list) and bool(offset) and all(isinstance(row, list) for row in offset)
    rows = offset if nested else [offset] * chunks
    if len(rows) != chunks or not all(isinstance(row, list) and len(row) == stages for row in rows):
        return None
    return [list(row) for row in rows] if all(type(count) is int for row in rows for count in row) else None


def check_stages(view: View, built: Built, found: Findings) -> None:
    """Check `offset` and the recompute lists by MindFormers' own conditions."""
    total = built.number("num_layers")
    if view.get(("swap_config", "swap"), False) is True:
        wrong = "MindFormers 1.9.0 drops swap_config before the model is built, and nothing is swapped"
        found.error(("swap_config", "swap"), wrong, "write swap and layer_swap under model.model_config")
    if view.parallel and view.pp * view.chunks > 1 and total > 0:
        _offset(view, total, found)
    check_recompute(view, total, found)


def check_recompute(view: View, total: int, found: Findings) -> None:
    """Check the recompute settings of a model with `total` layers by MindFormers' own conditions."""
    for key in (*RECOMPUTE, *EXCLUDE):
        path = ("recompute_config", key)
        _expressions(view.get(path), path, found)
        if swaps(view) and key in RECOMPUTE:
            _layer_numbers(view.get(path), total, path, found)
        elif key in EXCLUDE and not _has_patterns(value := view.get(path)):
            if value:
                right = "write a list of operator patterns, or a mapping from patterns to layers"
                found.warning(path, "excludes nothing, because the value names no operators", right, rule="exclude")
        else:
            _recompute(view, view.get(path), path, found)
            if key in EXCLUDE:
                _dropped(view, path, found)


def excludes(value: Any) -> bool:
    """Return whether the value of a key such as `select_recompute_exclude` excludes operators of at least one layer
    from recomputation.
    """
    if isinstance(value, dict):
        return any(map(_of_layers, value.values()))
    return bool(value) and _has_patterns(value)


def _of_layers(value: Any) -> bool:
    return any(map(_of_layers, value)) if isinstance(value, list) else bool(value)


def _dropped(view: View, path: KeyPath, found: Findings) -> None:
    """Warn of the patterns that MindFormers takes out of a recompute key because an exclusion matches them: it takes
    them out for all layers, whatever layers the exclusion names (`LayerSetting._check_repeat_recompute`).
    """
    key = str(path[1]).removesuffix("_exclude")
    chosen = view.get(("recompute_config", key))
    for pattern in view.get(path):
        for other in chosen if _has_patterns(chosen) else ():
            if _same_operators(str(pattern), str(other)):
                wrong = f"{pattern} makes MindFormers drop {other} from {key} in all layers"
                found.warning(path, wrong, "let the two name different operators", rule="exclude_drops")


def _same_operators(pattern: str, other: str) -> bool:
    parts, others = pattern.split(r"\."), other.split(r"\.")
    if len(parts) != len(others):
        return False
    try:
        pairs = list(zip(parts, others, strict=True))
        return all(re.fullmatch(one, two) or re.fullmatch(two, one) for one, two in pairs)
    except re.error:  # `_expressions` refuses it
        return False


def swaps(view: View) -> bool:
    """Return whether activations are swapped to the host. If activations are swapped, the values of the recompute keys
    are lists of layer numbers instead of numbers of layers.

    The key `swap` of model_config turns swapping on. MindFormers 1.9.0 reads and checks the section `swap_config`, but
    does not pass it to any model: `TransformerOpParallelConfig.to_diff_dict` leaves it out, and compiled graphs show
    that layers are still counted.
    """
    return view.get((*MODEL, "swap"), False) is True


def _place(layers: int, stages: int, chunks: int) -> str:
    return f"{layers} layers on {stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "")


def fewer_than_chunks(layers: int, stages: int, chunks: int) -> tuple[str, str]:
    """Return the error message for a recipe with fewer layers than pipeline chunks, and the advice how to correct
    it.
    """
    return f"{_place(layers, stages, chunks)} are fewer layers than chunks", "use fewer stages or chunks"


def _offset(view: View, total: int, found: Findings) -> None:
    stages, chunks = view.pp, view.chunks
    offset = view.get(OFFSET, 0)
    shape = f"[{chunks}][{stages}]" if chunks > 1 else f"[{stages}]"
    base, rest = divmod(total, stages * chunks)
    if total < stages * chunks:
        found.error(OFFSET, *fewer_than_chunks(total, stages, chunks), rule="offset_middle")
        return
    rows = _broadcast(offset, chunks, stages)
    right = f"write for example offset: {_spread(rest, stages, chunks)}"
    if rows is None:
        nested = isinstance(offset, list) and offset and isinstance(offset[0], list) and len(offset[0]) == stages
        rule = "offset_chunks" if nested else "offset_stages"
        found.error(OFFSET, f"{offset!r} does not have the shape {shape} (chunks x stages)", right, rule=rule)
        return
    written = sum(map(sum, rows))
    if written != rest:
        wrong = f"{_place(total, stages, chunks)} leave {rest} over, but the offsets add up to {written}"
        found.error(OFFSET, wrong, right, rule="offset_sum")
        return
    counts = [base + extra for row in rows for extra in row]
    if min(counts[0], counts[-1]) < 0:
        found.error(
            OFFSET, f"the first or last stage would hold {min(counts[0], counts[-1])} layers", rule="offset_head"
        )
    elif len(counts) > 2 and min(counts[1:-1]) < 1:
        found.error(
            OFFSET,
            "a stage in the middle would hold no layer",
            "give every stage at least one layer",
            rule="offset_middle",
        )


def _spread(rest: int, stages: int, chunks: int) -> list[Any]:
    """Return offsets that place `rest` layers one to a chunk, from the first stage on."""
    flat = [1 if index < rest else 0 for index in range(stages * chunks)]
    rows = [flat[start : start + stages] for start in range(0, len(flat), stages)]
    return rows if chunks > 1 else rows[0]


def _has_patterns(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _expressions(value: Any, path: KeyPath, found: Findings) -> None:
    """Check that the parts of operator patterns, which MindFormers matches with names, are regular expressions."""
    for pattern in value if _has_patterns(value) else ():
        if not isinstance(pattern, str):
            wrong = f"the operator pattern {pattern!r} is not a text"
            found.error(path, wrong, r"write names of cells with \. between them", rule="recompute_pattern")
        for part in str(pattern).split(r"\."):
            try:
                re.compile(part)
            except re.error as error:
                wrong = f"{part!r} in the operator pattern {pattern!r} is not a regular expression ({error})"
                found.error(path, wrong, r"write names of cells with \. between them", rule="recompute_pattern")


def _layer_numbers(value: Any, total: int, path: KeyPath, found: Findings) -> None:
    """Check a recompute setting of a recipe that swaps: a flag, layer numbers, or these for each pattern."""
    if isinstance(value, dict):
        for pattern, inner in value.items():
            if inner is False and path[1] == RECOMPUTE[1]:
                found.error(
                    (*path, pattern),
                    "with swapping, False is not allowed here, but only a list of layer numbers",
                    "write []",
                    rule="swap_conflict",
                )
            _layer_numbers(inner, total, (*path, pattern), found)
    elif isinstance(value, list):
        wrong = [item for item in value if type(item) is not int or not 0 <= item < total]
        if wrong:
            said = f"{wrong[0]!r} is not a layer of this model, whose layers are numbered 0 to {total - 1}"
            said += ", and with model_config.swap this list holds layer numbers"
            found.error(path, said, f"write numbers from 0 to {total - 1}, or True", rule="recompute_by_number")


def _recompute(view: View, value: Any, path: KeyPath, found: Findings) -> None:
    """Check a flag, a list per stage, a list of such lists per chunk, or one of these for each operator pattern."""
    of_pattern = len(path) > 2
    if isinstance(value, dict) and not of_pattern:
        for pattern, inner in value.items():
            _recompute(view, inner, (*path, pattern), found)
        return
    stages, chunks = (view.pp, view.chunks) if view.parallel else (1, 1)
    right = f"write a list of {stages} counts of layers, one for each stage"
    if chunks > 1:
        right = f"write a list of {chunks} lists (chunks) of {stages} counts of layers (stages)"
    if not isinstance(value, list):
        if of_pattern and not isinstance(value, bool):
            found.error(
                path,
                f"{value!r} is neither True or False nor a list",
                f"{right}, or True or False",
                rule="recompute_shape",
            )
        return
    backward = runs_back(view) and not (len(value) > 1 and isinstance(value[1], (list, str)))
    patterns_alone = path[1] != RECOMPUTE[0] and not of_pattern
    if value == [] and (patterns_alone or not backward):
        return
    if value and _has_patterns(value):
        if backward:
            found.error(
                path,
                "with zero_bubble_v this list must hold two operator patterns or none",
                "write True for all layers",
                rule="zbv_reversed",
            )
        return
    flat = all(isinstance(item, (int, bool)) for item in value)
    if backward:
        rule = "zbv_recompute" if flat and path[1] == RECOMPUTE[0] else "zbv_reversed"
        found.error(path, "zero_bubble_v needs one list for each of the two chunks", right, rule=rule)
    elif flat and len(value) == stages:
        _counts(value, path, found)
    elif not flat and len(value) == chunks and all(_row(row, stages) for row in value):
        for row in value:
            if isinstance(row, list):
                _counts(row, path, found)
    else:
        wrong = f"{value!r} does not fit {stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
        found.error(path, wrong, right, rule="recompute_lookup")


def _row(row: Any, stages: int) -> bool:
    return isinstance(row, bool) or (
        isinstance(row, list) and len(row) == stages and all(isinstance(item, int) for item in row)
    )


def _counts(row: list[Any], path: KeyPath, found: Findings) -> None:
    if any(item < 0 for item in row):
        found.error(path, f"{row!r} holds a negative number of layers", rule="recompute_shape")
