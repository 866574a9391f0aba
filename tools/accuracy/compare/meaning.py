"""What the first findings usually mean (report section 3.2.1): the headline of a comparison.

It names what differs first in time; all that is later may follow from it. Within a step the order is

    weights       which msprobe shows behind their cell's forward pass, but only the optimizer moves them
    the batch     what arrives at the outermost cell
    forward       call by call, and with it state: counters and caches, which a call may just have filled
    backward

What differs in the first step was there before any update. In a later one, the step before it agreed: then weights
are the optimizer's, and state is that of whatever moves it between two steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from tools.accuracy.compare.rows import DTYPE, EXTRA, MISSING, SHAPE, UPDATE, Row
from tools.accuracy.dumps.names import BACKWARD, FORWARD, PHASES, STATE, WEIGHTS

STRUCTURE = (MISSING, EXTRA, SHAPE)
ROLES = ("input", "parameters", "output")  # of one call, in order of time


def first_findings(findings: Iterable[Row]) -> dict[str, Row | None]:
    """phase -> its first finding; of several ranks the one that is earliest in its own order."""
    found: dict[str, Row | None] = dict.fromkeys(PHASES)
    for row in sorted(findings, key=lambda row: (row.step, row.order, row.rank)):
        found[row.phase] = found[row.phase] or row
    return found


def meaning(rows: list[Row], trained_known: bool) -> str:
    """Where to look.

    Args:
        rows: of a comparison, in the order of execution.
        trained_known: whether the dumps tell weights from state; otherwise all parameters are `weights`.
    """
    findings = [row for row in rows if row.kind]
    if not findings:
        return "No tensor diverges."
    start, step = (min(row.step for row in some) for some in (rows, findings))
    rows, findings = [row for row in rows if row.step == step], [row for row in findings if row.step == step]
    first = first_findings(findings)
    weights, state, forward, backward = (first[phase] for phase in (WEIGHTS, STATE, FORWARD, BACKWARD))
    arrived = _arrived(rows)
    if weights and weights.role == "parameters" and (trained_known or not _follows(weights, forward, backward)):
        return _initial(weights, rows, arrived) if step == start else _moved(weights, rows)
    if arrived:
        return _data(arrived, step == start)
    if state and not _follows(state, forward, backward):
        return _state(state, step == start)
    if forward:
        return _forward(forward, step == start)
    if backward:
        when = "the first step" if step == start else f"step {step}"
        return (
            f"The forward pass of {when} agrees, its backward pass does not: {origin(backward)}. Look at how that "
            "gradient is computed, scaled or reduced."
        )
    assert weights is not None, "state without a forward finding follows nothing"
    return _moved(weights, rows)  # a kernel of the optimizer


def origin(row: Row) -> str:
    """Who made a row's tensor, as far as the dump tells."""
    if row.kind == UPDATE:
        return f"the update of {row.place}"
    if row.role == "input":
        around = _path(row).rpartition(".")[0]
        inside = f" in {around}" if around else ""
        return f"what arrives at {row.place} is wrong already, made{inside} between the calls that were dumped"
    return f"{row.place} is the first whose result differs"


def _path(row: Row) -> str:
    return row.place.split(" ")[0]


def _follows(parameter: Row, forward: Row | None, backward: Row | None) -> bool:
    """Whether something that was computed, or taken in, differs before this parameter is seen.

    What goes into a call inside the parameter's own cell does not count: the cell may have passed the parameter on.
    """
    if backward and backward.order < parameter.order:
        return True  # an optimizer's state
    if forward is None or forward.role not in ROLES:
        return False
    if (forward.order, ROLES.index(forward.role)) > (parameter.order, ROLES.index(parameter.role)):
        return False
    return not (forward.role == "input" and _path(forward).startswith(f"{_path(parameter)}."))


def _arrived(rows: list[Row]) -> Row | None:
    """The first part of a step's batch that differs: an input of the outermost cell, or else of the first call."""
    turn = min(
        (row.order for row in rows if row.phase == BACKWARD), default=math.inf
    )  # behind it: an optimizer's cells
    forward = [row for row in rows if row.phase == FORWARD and row.order < turn]
    if not forward:
        return None
    root = min((_path(row) for row in forward), key=len)
    if all(f"{_path(row)}.".startswith(f"{root}.") for row in forward):
        inputs = [row for row in forward if _path(row) == root]
    else:
        inputs = [row for row in forward if row.order == forward[0].order]
    return next((row for row in inputs if row.kind and row.role == "input"), None)


def _initial(row: Row, rows: list[Row], arrived: Row | None) -> str:
    if row.kind in STRUCTURE:
        return f"The sides have not the same weights: {row.name} ({row.detail}). Look at the model's structure first."
    if row.kind == DTYPE:
        return f"The weights have other data types, first {row.place} ({row.detail}): look at params_dtype first."
    weights = [each for each in rows if each.phase == WEIGHTS and each.role == "parameters"]
    wrong = sum(bool(each.kind) for each in weights)
    both = " The batch differs too: another seed, or another recipe, explains both." if arrived else ""
    return (
        f"The weights differ before any update ({wrong} of {len(weights)}), first {row.place}: look at initialisation, "
        f"seed or the loaded checkpoint before any arithmetic.{both}"
    )


def _moved(row: Row, rows: list[Row]) -> str:
    """The weights of a later step: what the optimizer did to them, by what most of the wrong updates look like."""
    wrong = [each for each in rows if each.phase == WEIGHTS and each.kind]
    weights = sum(each.phase == WEIGHTS and each.role == row.role for each in rows)
    cause, times = Counter(each.cause for each in wrong).most_common(1)[0]
    where = (
        f"Forward and backward agree until the weights of step {row.step} differ ({len(wrong)} of {weights}), first "
        f"{row.place}: the optimizer: "
    )
    if cause and 2 * times > len(wrong):
        example = next(each for each in wrong if each.cause == cause)
        return (
            f"{where}{cause}: {example.detail}. The same in {times} of the {len(wrong)}; look at its value and groups."
        )
    return (
        f"{where}weight decay and its groups, learning rate, betas, epsilon, clipping, or the reduction of gradients "
        "between backward and optimizer."
    )


def _data(row: Row, initial: bool) -> str:
    look = "look at the dataset's order, tokens and masks, not at arithmetic"
    if initial:
        return f"The inputs of the first step differ ({row.name}): {look}."
    return f"Everything agrees until step {row.step}, whose inputs differ ({row.name}): {look}, and at its seed."


def _state(row: Row, initial: bool) -> str:
    kept = f"{row.name.rpartition('.parameters.')[2]} of {row.place}"
    if row.kind in STRUCTURE:
        return f"The sides do not keep the same state: {kept} ({row.detail}). Look at the model's structure first."
    what = f"{kept}, which no gradient trains (a counter, a bias, a cache)"
    if initial:
        return (
            f"The first that differs is {what}; nothing before it does. It started differently (the loaded checkpoint, "
            "its initial value), or this call fills it differently."
        )
    return (
        f"Everything agrees until {what}, differs in step {row.step}. Look at what moves it between two steps (a "
        "callback, such as the one that moves a router's bias, and its rate), and at how this call fills it."
    )


def _forward(row: Row, initial: bool) -> str:
    if row.kind in (MISSING, EXTRA):
        return f"The sides do not call the same: {row.name} ({row.detail}). Look at the model's structure first."
    if "dropout" in row.place.lower() and row.role == "output":
        return f"{row.place} gets the same and gives another result: look at the seed and at the share that it drops."
    if initial:
        return (
            f"The initial loss is affected: {origin(row)}. Look at the forward computation there: the operator's "
            "precision, or a structure that is not the same."
        )
    return (
        f"Everything agrees until the forward pass of step {row.step}, its weights and inputs too: {origin(row)}. Look "
        "at what is drawn at random there, and at state that is not a weight and was not dumped."
    )
