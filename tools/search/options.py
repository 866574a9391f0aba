"""Options that several commands of `tc3 search` have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tools.placement.budget import EFFORTS
from tools.ranges import Number

margin_option = click.option(
    "--memory-margin",
    type=Number("margin"),
    metavar="SHARE",
    help="Of the memory limit, to leave free, such as 0.05; the estimator's known error by default, 0 for none.",
)


schedule_option = click.option(
    "--schedule",
    "schedules",
    multiple=True,
    metavar="NAME|all",
    help="Rank layouts of another pipeline schedule beside 1F1B's, such as zero_bubble_v; the table says which can be "
    "run and which are simulated only. --write then writes the fastest of those named that can.",
)


_groups = click.option(
    "--recompute-operators",
    "groups",
    is_flag=True,
    help="Let layers recompute groups of operators (MLA's up-projections, MLPs' first product, experts) beside norms, "
    "communication and whole layers; takes twice as long.",
)


_swap = click.option(
    "--swap",
    "swapping",
    is_flag=True,
    help="Place the first layout once more with a third choice beside keeping and recomputing activations: swapping "
    "them to the host, at the price of its link. Simulated only, not written.",
)


def choice_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--recompute-operators` and `--swap`: what layers may do beside what every search asks."""
    return _groups(_swap(command))


class Effort(click.ParamType):
    """A click type: `low`, `normal`, `high`, or units of `tools.placement.budget`."""

    name = "effort"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Units.

        Raises:
            click.BadParameter: neither a word nor a number in range.
        """
        if value in EFFORTS:
            return EFFORTS[value]
        try:
            return float(Number("effort").convert(value, param, ctx))
        except click.BadParameter as error:
            words = ", ".join(f"{word} ({units:g})" for word, units in EFFORTS.items())
            self.fail(f"{error.message}, or {words}", param, ctx)


def effort_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--effort`, which counts work, so that the answer does not hang on the machine's speed."""
    return click.option(
        "--effort",
        type=Effort(),
        metavar="N|low|normal|high",
        help=f"Of a placement, counted in work: the same answer on a slow and a fast machine. 1 is about a second of "
        f"a quiet core; low {EFFORTS['low']:g}, normal {EFFORTS['normal']:g}, high {EFFORTS['high']:g}. "
        f"Default {default}, less where --time-limit is shorter.",
    )


def effort_within(asked: float | None, default: str, seconds: float) -> float:
    """Units that were asked for, else the default, or what would take about `seconds` if that is less."""
    return asked if asked is not None else min(EFFORTS[default], seconds)
