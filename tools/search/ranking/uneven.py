"""This module ranks the layouts of a search under uneven expert loads. The module computes the expected seconds of a
step and the probability of running out of memory.

The space is searched twice (`tools.search.ranking.run.search_under`): at even loads, and with the mean max/mean of the
loads in every layer, at each `expert_parallel`, because 51 million candidates are too many to predict each of them
layer by layer and step by step. The best layouts of both searches and the recipe's own are then predicted under the
loads themselves (`tools.estimate.loads`), each layout with the loads at its own `expert_parallel`. A layout that
exceeds the memory limit in some step is ranked after all others, because one such step ends a run. The list includes
the fastest layout of each schedule of `--schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tools.estimate.configuration import Configuration
from tools.estimate.loads import Loads, loads_of
from tools.estimate.memory.loaded import Judged, judge
from tools.estimate.memory.room import Room
from tools.estimate.time_model import TimeModel
from tools.ranges import is_number

# table or picture -> column -> what it says
TABLES: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).parents[1].joinpath("tables.yaml").read_text(encoding="utf-8")
)
HEADS = TABLES["loads"]


@dataclass(frozen=True)
class Uneven:
    """An `Uneven` is a layout with its predicted step times at even loads and under uneven loads. The field `name` is
    the number of the layout in the ranking at even loads, the name of a pipeline schedule, or "recipe".
    """

    name: str
    layout: str
    config: Configuration
    even_s: float
    seconds: float
    loads: Loads
    judged: Judged

    @property
    def numbered(self) -> bool:
        """Return whether the layout has a number in the ranking at even loads, which only layouts with (interleaved)
        1F1B have.
        """
        return self.name.isdecimal()

    @property
    def runs_out(self) -> int:
        """Return the number of steps of the given loads in which the layout needs more memory than the limit."""
        return int(self.judged.over.sum())

    @property
    def chance(self) -> float:
        """Return the share of the steps of the given loads in which the layout needs more memory than the limit."""
        return float(self.judged.over.mean())

    @property
    def cells(self) -> list[str]:
        """Return this layout as a row of the table of layouts under uneven loads."""
        steps, up_to = len(self.judged.over), self.judged.up_to
        return [
            self.name,
            self.layout,
            f"{self.even_s:.2f}",
            f"{self.seconds:.2f}",
            f"{self.loads.typical:.2f}",
            f"{self.runs_out} of {steps}",
            str(int(self.judged.open.sum())),
            "every load" if up_to >= self.judged.most else f"{up_to:.2f}" if self.judged.fits else "not surely",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the predictions for this layout under uneven loads as a dictionary for `--json`."""
        return {
            "name": self.name,
            "layout": self.layout,
            "even_step_s": self.even_s,
            "expected_step_s": self.seconds,
            "chance_to_run_out": self.chance,
            **self.judged.as_json(),
        }


def under(
    text: str, name: str, layout: str, config: Configuration, even_s: float, room: Room, times: TimeModel
) -> Uneven:
    """Return the predictions for a layout under the expert loads that the option `--loads` describes.

    Raises:
        RecipeError, DataError: as for `tools.estimate.loads.loads_of`.
    """
    loads = loads_of(text, config, of_many=True)
    seconds = times.under(config, loads, simulated=True).total
    return Uneven(name, layout, config, even_s, seconds, loads, judge(config, room, loads))


def lowered(text: str, skews: Sequence[tuple[int, float]]) -> list[str]:
    """Return a line that lists the EP degrees for which a smaller max/mean than requested was assumed, because EP
    groups of so few devices cannot be so uneven. Return no line if the requested max/mean was assumed for all EP
    degrees.

    Args:
        text: the value of `--loads`.
        skews: the max/mean that was taken at each EP degree.
    """
    if not is_number(text) or Path(text).exists():
        return []
    taken = [f"{ratio:g} for EP {ep}" for ep, ratio in skews if ratio < float(text)]
    why = f"--loads {text}: the largest load of a device, divided by the mean load, can be at most the number of "
    why += "devices that share the experts"
    return [f"{why}: taken is {', '.join(taken)}"] if taken else []


def in_order(every: Sequence[Uneven]) -> list[Uneven]:
    """Sort layouts by expected step time, and return them. Layouts that run out of memory in some steps come last,
    sorted by the share of these steps.
    """
    return sorted(every, key=lambda one: (one.chance, one.seconds))


def renumbered(every: Sequence[Uneven], configs: Sequence[Configuration]) -> list[Uneven]:
    """Return the ranking with each placed layout numbered by its place in `configs`. Placed layouts that are not in
    `configs`, because a dry run rejected them, are left out.
    """
    names = {id(config): str(number) for number, config in enumerate(configs, 1)}
    kept = [one for one in every if not one.numbered or id(one.config) in names]
    return [replace(one, name=names[id(one.config)]) if one.numbered else one for one in kept]


def words(ranked: Sequence[Uneven]) -> list[str]:
    """Return lines that say whether the fastest layout under uneven loads differs from the fastest layout at even
    loads, and how much longer a step takes.
    """
    placed = [one for one in ranked if one.numbered]
    if not placed:
        return []
    best, even = placed[0], next(one for one in placed if one.name == "1")
    cost = f"{best.loads.words}; a step takes {best.seconds / best.even_s:.2f} times as long as at even loads"
    if best is even:
        lines = [f"under the loads 1 stays the first of the placed layouts: {cost}"]
    elif even.runs_out:
        lines = [f"under the loads the winner changes: {best.name} before 1, which runs out of memory: {cost}"]
    else:
        saved = f"{best.seconds:.2f} instead of {even.seconds:.2f} s per step"
        lines = [f"under the loads the winner changes: {best.name} before 1, {saved}: {cost}"]
    other = next((one for one in ranked if one.name != "recipe"), best)
    if not other.numbered:
        better = "is faster still" if other.seconds < best.seconds else "runs out of memory at fewer steps"
        lines.append(f"under the loads schedule {other.name} {better}: {other.seconds:.2f} s per step")
    if ranked[0].name == "recipe":
        lines.append(
            f"under the loads the recipe's own layout is better than all of them, at {ranked[0].seconds:.2f} s per step"
        )
    if best.runs_out:
        lines.append(f"every placed layout runs out of memory; {best.name} at {best.chance:.1%} of the steps")
    return lines
