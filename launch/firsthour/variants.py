"""This module measures a recipe's dispatch modes and fused operators against each other, and writes the winners into
an overlay, which is a small recipe with the measured recipe as its base.

A variant is the recipe with another value of one key. Each variant is trained for a few steps; its time is the time of
a usual step, without the first step, which compiles. A variant wins if its step is shorter than the recipe's own by
more than `SURE`. Fused operators have no CPU kernels, so only dispatch modes are measured on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from launch.firsthour.checks import Finding
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.settings import DEFAULT_DISPATCHER, DISPATCHER_OF
from tools.check.check import new_errors
from tools.files.atomic import write_atomically
from tools.recipe.override import apply_overrides
from tools.recipe.view import MODE, MODEL, View

STEPS = 6
SURE = 0.05  # of a step: what two equal trainings may differ by (assumed; modes on two busy cores were 3 % apart)
DISPATCHER = (*MODEL, "moe_token_dispatcher_type")
FUSED = ("apply_rope_fusion", "bias_swiglu_fusion", "moe_permute_fusion")  # switches of MindFormers' fused operators


@dataclass(frozen=True)
class Variant:
    """A `Variant` is one value of a key of a recipe; `own` says whether this is the recipe's own value."""

    path: tuple[str, ...]
    value: Any
    own: bool

    @property
    def key(self) -> str:
        """Return the recipe key of this variant as a path with dots."""
        return ".".join(self.path)

    @property
    def name(self) -> str:
        """Return the name of the variant's training run; variants with the recipe's own value share the run "own"."""
        return "own" if self.own else f"{self.path[-1]}_{self.value}".lower()

    @property
    def words(self) -> tuple[str, ...]:
        """Return the options with which `tc3 train` trains with the value of this variant."""
        return () if self.own else ("--set", f"{self.key}={self.value}")


def variants_of(view: View, on_cpu: bool) -> list[Variant]:
    """Return the variants of a recipe, ordered by key; for each key the variant with the recipe's own value comes
    first.

    A recipe that sends no tokens between devices has no dispatch modes; on a CPU there are no fused operators. Values
    that `tc3 check` refuses are left out, such as fused RoPE with multi-latent attention.
    """
    found: list[Variant] = []
    if view.ep > 1 and view.has(MODE):
        found += _of(MODE, view.get(MODE), MODES)
    elif view.ep > 1 and view.has(DISPATCHER) and not on_cpu:
        found += _of(DISPATCHER, view.get(DISPATCHER), (DEFAULT_DISPATCHER, *DISPATCHER_OF.values()))
    if not on_cpu:
        for name in FUSED:
            if isinstance(own := view.get((*MODEL, name)), bool):
                found += _of((*MODEL, name), own, (True, False))
    accepts = [one.own or not new_errors(view.recipe, apply_overrides(view.recipe, one.words[1:])) for one in found]
    found = list(compress(found, accepts))
    several = {one.key for one in found if not one.own}
    return [one for one in found if one.key in several]


def _of(path: tuple[str, ...], own: Any, values: Sequence[Any]) -> list[Variant]:
    others = dict.fromkeys(value for value in values if value != own)
    return [Variant(path, own, own=True), *(Variant(path, value, own=False) for value in others)]


def judge_variants(variants: Sequence[Variant], seconds: Mapping[str, float | None], file: Path) -> list[Finding]:
    """Return a finding for each key whose values were measured.

    Args:
        seconds: name of the run -> seconds of a step, or None if the variant did not train.
        file: the file of the overlay.
    """
    found = []
    for key in dict.fromkeys(one.key for one in variants):
        times = {str(one.value): seconds.get(one.name) for one in variants if one.key == key}
        known = {value: time for value, time in times.items() if time is not None}
        shown = ", ".join(
            f"{value} {'did not train' if time is None else f'{time:.4g} s'}" for value, time in times.items()
        )
        own = next(str(one.value) for one in variants if one.key == key and one.own)
        if len(known) < 2 or own not in known:
            few = "fewer than two values were measured" if own in known else "the recipe's own value was not measured"
            found.append(Finding("unknown", key, f"{few}: {shown}"))
            continue
        best = winner_of([one for one in variants if one.key == key], seconds)
        words = f"a step takes {shown}; " + (
            f"{best.value} is written to {file.name}" if best else "the own value stays"
        )
        found.append(Finding("ok", key, words))
    return found


def winner_of(variants: Sequence[Variant], seconds: Mapping[str, float | None]) -> Variant | None:
    """Return the fastest value of a key if this value is faster than the recipe's own value by more than 5 % (`SURE`);
    else return None.
    """
    known = {one: time for one in variants if (time := seconds.get(one.name)) is not None}
    own = next((one for one in known if one.own), None)
    if own is None:
        return None
    best = min(known, key=lambda one: known[one])
    return best if known[best] < (1 - SURE) * known[own] else None


def write_overlay(recipe: Path, variants: Sequence[Variant], seconds: Mapping[str, float | None], file: Path) -> bool:
    """Write an overlay, which is a recipe that has `recipe` as its base, with the fastest values. If the values of
    `recipe` itself are the fastest, remove the overlay that an earlier run of this command wrote, and return False.
    """
    content: dict[str, Any] = {}
    for key in dict.fromkeys(one.key for one in variants):
        best = winner_of([one for one in variants if one.key == key], seconds)
        if best is not None:
            section = content
            for name in best.path[:-1]:
                section = section.setdefault(name, {})
            section[best.path[-1]] = best.value
    if not content:
        file.unlink(missing_ok=True)
    else:
        write_atomically(file, json.dumps({"base_config": [str(recipe)], **content}, indent=1) + "\n")
    return bool(content)
