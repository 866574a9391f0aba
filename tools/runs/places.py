"""This module says which step of one part of a run corresponds to which step of another part. (A part consists of the
steps that the workers trained between one start and the next.)

MindFormers counts steps of the present global batch. A run that is resumed with another global batch therefore numbers
its steps anew: after a checkpoint of step 100 with 8 samples in a step, steps of 16 samples go on with step 51. So the
numbers of two parts say nothing about which of two steps comes later in the data. Every tool that compares steps of
different parts compares their places instead: the place of a step is its number multiplied by the `unit` of its part,
which is the number of tokens of a step, and `translated` returns the number of the same place in another part.

While the batch grows by `plugins.batch_ramp`, steps keep their numbers, although they have other numbers of tokens.
`Numbering` tells the two cases apart by the records of the steps alone: within a ramp a step that is trained again has
as many tokens as before, and a new step has at least as many as the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tools.recipe.load import Recipe
from tools.recipe.view import MODEL, View
from tools.runs.attempts import Plan

END = math.inf  # a place behind all steps


def translated(step: float, of: float | None, into: float | None) -> float:
    """Return after how many steps of the unit `into` a run has read as much data as after `step` steps of the unit
    `of`. The result is an int if it is a whole number of steps. A unit of None or 0 is unknown; the result is then
    `step` itself.
    """
    if not of or not into or of == into:
        return step
    whole, rest = divmod(step * of, into)
    return step * of / into if rest else int(whole)


class Numbering:
    """A `Numbering` takes in the steps of a run in the order in which they were recorded, and finds each step at which
    the numbering begins anew, because the run was resumed with another global batch.

    Args:
        alike: whether it is known that all steps of the run keep their numbers, because its recipe has
            `plugins.batch_ramp`.

    Attributes:
        unit: what a step counts in places: the tokens of the first step that is numbered so; None before a record has
            stated its tokens.
        unsure: whether a part began whose first step does not state its tokens.
    """

    def __init__(self, alike: bool = False):
        self.alike = alike
        self.unit: float | None = None
        self.unsure = False
        self._stages: list[tuple[int, float]] = []  # (first step, tokens of a step from there on), rising
        self._last = 0

    def see(self, step: int, tokens: float | None, begins: bool) -> bool:
        """Take in one step, and return whether it is the first of steps that are numbered anew.

        Args:
            tokens: the tokens of the step; None if its record does not state them.
            begins: whether a part begins with the step.
        """
        anew = False
        tokens = tokens if isinstance(tokens, int | float) and 0 < tokens < math.inf else None
        if tokens:
            anew = begins and not self.alike and not self._goes_on(step, tokens)
            if anew:
                self._stages, self._last = [], 0
            if not self._stages:
                self.unit = tokens
            if not self._stages or (step > self._last and tokens != self._stages[-1][1]):
                self._stages.append((step, tokens))
        self.unsure = self.unsure or (begins and not tokens)
        self._last = max(self._last, step)
        return anew

    def _goes_on(self, step: int, tokens: float) -> bool:
        """Return whether a part that begins with this step numbers its steps as the parts before it."""
        if not self._stages:
            return True
        if step > self._last:
            return tokens >= self._stages[-1][1]
        known = [size for first, size in self._stages if first <= step]
        return tokens == (known[-1] if known else self._stages[0][1])


def begins_anew(record: dict[str, Any], last: float, tokens: float | None) -> bool:
    """Return whether the record of a step begins a part although no header precedes it, because a kill broke the
    header's line: the step falls back, or has another number of tokens.

    Args:
        last, tokens: the number of the step before, and its tokens (None if they are not known).
    """
    own = record.get("tokens")
    return bool(record["step"] <= last or (own and tokens and own != tokens))


def tokens_of(recipe: Recipe | None) -> float | None:
    """Return the number of tokens of a step of a recipe, as the metrics of its run state it; return None if the recipe
    does not determine this number. If the batch grows, this is the number for the largest batch.
    """
    length = View(recipe).get((*MODEL, "seq_length")) if recipe else None
    return View(recipe).global_batch * length if recipe and type(length) is int and length > 0 else None


def begin_of(plan: Plan, tokens: float | None, units: Iterable[float], alike: bool = False) -> float | None:
    """Return the place after which a planned attempt trains, if the attempt has made no step yet; return None if the
    attempt's records do not determine the place.

    Args:
        tokens: the tokens of a step of the attempt's recipe; None if they are not known.
        units: the units of the parts of the run before the attempt.
        alike: as in `Numbering`.
    """
    if plan.resume is None:
        return 0
    known = set(units)
    same = not tokens or known <= {tokens, 1}  # 1: nothing states tokens
    if alike or (len(known) == 1 and plan.start in (None, plan.step) and same):
        return plan.step * next(iter(known), 1)  # the checkpoint is one of steps that are numbered so
    return None if plan.start is None or not tokens else plan.start * tokens
