"""This module holds the options that several commands of `tc3 search` share, the displays of a search's progress, and a
command group whose first argument may be a recipe.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from plugins.errors import did_you_mean
from tools.layout.budget import EFFORTS, LATE, Budget
from tools.layout.ilp import Incumbent
from tools.process.waiting import Progressing
from tools.ranges import Number

margin_option = click.option(
    "--memory-margin",
    type=Number("margin"),
    metavar="SHARE",
    help=(
        "Leave this share of the memory limit free, such as 0.05. The default is the relative error of the memory "
        "predictions on published runs."
    ),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
seed_option = click.option(
    "--seed",
    default=0,
    show_default=True,
    type=Number("seed"),
    help="Make the random choices of the search with this seed.",
)


def overrides_option(recipe: str = "the recipe") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--set KEY=VALUE`."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help=f"Override a key that {recipe} has."
    )


def time_limit_option(default: float, what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--time-limit`, which is a safety limit in addition to `--effort`."""
    return click.option(
        "--time-limit", default=default, show_default=True, type=Number("seconds"), metavar="SECONDS", help=what
    )


class Effort(click.ParamType):
    """An `Effort` is the type of the option `--effort`, whose value is `low`, `normal`, `high`, or a number of units of
    work.
    """

    name = "effort"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert the option's text (such as `normal`) to a number of units of work.

        Raises:
            click.BadParameter: the value is neither a known word nor a number in range.
        """
        if value in EFFORTS:
            return EFFORTS[value]
        try:
            return float(Number("effort").convert(value, param, ctx))
        except click.BadParameter as error:
            words = ", ".join(f"{word} ({units:g})" for word, units in EFFORTS.items())
            self.fail(f"{error.message}, or {words}", param, ctx)


def effort_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--effort`, whose unit is work, not seconds, so that every machine gives the same result."""
    return click.option(
        "--effort",
        type=Effort(),
        metavar="N|low|normal|high",
        help=(
            "Spend at most N units of work on each search for a placement of layers; a unit takes about a second on "
            "an idle core. More work never gives a slower layout, and the same N gives the same layout on slow and "
            f"on fast machines. The word low stands for {EFFORTS['low']:g} units, normal for {EFFORTS['normal']:g}, "
            f"and high for {EFFORTS['high']:g}. By default the effort is {default} or, if that is less, as many "
            "units as --time-limit has seconds."
        ),
    )


def effort_within(asked: float | None, default: str, seconds: float) -> float:
    """Return the requested units of work. If no units were requested, return the default, but not more units than can
    be done in about `seconds` seconds.
    """
    return asked if asked is not None else min(EFFORTS[default], seconds)


def tell_end(cut: bool, stopped: bool, best: str) -> None:
    """Print on stderr that the time limit or Ctrl-C ended a search; after Ctrl-C, exit with the code 130."""
    if cut:
        click.echo(LATE, err=True)
    if stopped:
        click.echo(f"interrupted: this is the best {best}so far", err=True)
        sys.exit(130)


class RecipeOrCommand(click.Group):
    """A `RecipeOrCommand` is a command group whose first argument may be a recipe instead of the name of a command. If
    the first argument is a recipe, the command `of_recipe` receives it.
    """

    of_recipe: click.Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names. If the first argument is not a command, return the command
        for recipes with all arguments.
        """
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        close = did_you_mean(args[0], list(self.commands))
        if close and not Path(args[0]).suffix and not Path(args[0]).exists():
            raise click.UsageError(f"{args[0]!r} is neither a command nor a RECIPE.yaml{close}", ctx)
        return "", self.of_recipe, args

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments of the command group. Options that the group does not have are passed on to the command
        for recipes.
        """
        if not args:
            raise click.UsageError(
                f"give a RECIPE.yaml, or one of the commands that `{ctx.command_path} --help` lists", ctx
            )
        ctx.ignore_unknown_options = True
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage lines of both forms of the command line into the help: with a recipe, and with a command."""
        formatter.write_usage(ctx.command_path, "RECIPE [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...", "       ")

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of the group: first the help of the command for recipes, then the list of all commands."""
        self.format_usage(ctx, formatter)
        recipe = click.Context(self.of_recipe, parent=ctx, info_name="")
        self.of_recipe.format_help_text(recipe, formatter)
        self.of_recipe.format_options(recipe, formatter)
        self.format_commands(ctx, formatter)


_WORDS = {
    "ranking": "ranking the space",
    "placing": "placing layers",
    "bounding": "bounding the others",
    "proving": "proving that others are slower",
    "closing": "placing the best ones with the solver",
    "loading": "predicting under the loads",
}


class SpaceProgress(Progressing):
    """A `SpaceProgress` shows the progress of `tc3 search RECIPE`, one phase after the other."""

    def __init__(self) -> None:
        super().__init__("looking at every mesh of the devices")

    def tell(self, phase: str, done: int, of: int, best: float) -> None:
        """Show the progress of a phase, and the step time in seconds of the best layout so far (infinite if there is
        none).
        """
        found = f", best step {best:.2f} s" if math.isfinite(best) else ""
        self.show(f"{_WORDS[phase]}, {done:,} of {of:,}{found}", done, of)


class PlanProgress(Progressing):
    """A `PlanProgress` shows the progress of the pipeline optimiser: the step time of the best plan, and the distance
    of this time from the lower bound.
    """

    def __init__(self, budget: Budget):
        super().__init__("looking for a first plan", budget.effort)
        self._budget = budget

    def tell(self, incumbent: Incumbent) -> None:
        """Show that a better plan or a better bound was found."""
        if math.isfinite(incumbent.time):
            found = f"best step {incumbent.time:.6g}, gap {100 * incumbent.gap:.2f} %"
            self.show(f"{found}; effort {self._budget.spent:.0f} of {self._budget.effort:.0f}", self._budget.spent)
