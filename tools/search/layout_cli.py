"""`tc3 search layout`: make the file that `offset: auto` of a recipe is read from; exit code 1 where nothing fits."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from tools.auto.layout_file import LayoutFile, is_layout_file, path_of, write_layout
from tools.auto.make_layout import EFFORT, TIME_LIMIT, NothingFits, layout_text, make_layout
from tools.files.atomic import keep_existing
from tools.hardware import DEFAULT_HARDWARE
from tools.placement.budget import LATE, Budget, interruptible
from tools.process.waiting import Progressing
from tools.ranges import Number
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.unresolved import AUTO, OFFSET
from tools.recipe.view import look
from tools.schema.stages import RECOMPUTE
from tools.search.options import effort_option, effort_within, margin_option
from tools.search.overlay.files import keep_files_of


@click.command("layout")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--cluster", default=DEFAULT_HARDWARE, show_default=True, metavar="NAME|FILE", help="Its devices.")
@effort_option(EFFORT)
@click.option(
    "--time-limit",
    default=TIME_LIMIT,
    show_default=True,
    type=Number("seconds"),
    metavar="SECONDS",
    help="Of the search, should the effort take longer.",
)
@margin_option
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that the recipe has.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Default: RECIPE's name, .layout.yaml.")
@click.option("--force", is_flag=True, help="Replace the file of --out, whatever it is.")
@click.option("--seed", default=0, show_default=True, type=Number("seed"), help="Of the random part of the search.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def layout(
    recipe: Path,
    cluster: str,
    effort: float | None,
    time_limit: float,
    memory_margin: float | None,
    overrides: tuple[str, ...],
    out: Path | None,
    force: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Find where RECIPE's layers run and what they recompute, and keep it in a file beside RECIPE.

    A recipe whose model.model_config.offset is `auto` reads that file at every launch. The recipe's own offset and
    recompute tables play no part; its degrees, batch, schedule and memory limit do: when they change, the file must
    be made anew, which replaces it. What is predicted stays under the memory limit by a margin, the estimator's known
    error by default. With the same effort the layout is the same on every machine, unless the time limit ends the
    search, which is said.

    Exit codes: 0 a layout; 1 none fits; 2 a wrong input; 130 interrupted, with the best layout so far.
    """
    loaded = apply_overrides(load_recipe(recipe), overrides)
    keep_files_of(recipe, "--out", out)
    path = out or path_of(loaded.source)
    if not is_layout_file(path):
        keep_existing("--out" if out else "the layout file", path, force)
    budget = Budget(effort_within(effort, EFFORT, time_limit), time_limit)
    with interruptible(budget), Progressing(f"searching for a layout, effort {budget.effort:g}"):
        try:
            found = make_layout(loaded, cluster, budget, seed, memory_margin)
        except NothingFits as error:
            click.echo(f"tc3: {recipe}: {error}", err=True)
            sys.exit(1)
    words = ["tc3", "search", "layout", str(recipe), "--cluster", cluster]
    words += ["--effort", f"{budget.effort:g}"]
    words += [] if memory_margin is None else ["--memory-margin", f"{memory_margin:g}"]
    write_layout(found, path, " ".join([*words, *(word for item in overrides for word in ("--set", item))]))
    text = layout_text(loaded, found)
    if as_json:
        click.echo(json.dumps({**asdict(found), "layout": text, "path": str(path)}))
    else:
        _print(found, text)
    click.echo(f"written: {path}", err=True)
    if look(loaded, OFFSET) != AUTO:
        click.echo("the recipe reads it once its model.model_config.offset is `auto`", err=True)
    if found.predicted["ended_by_time_limit"]:
        click.echo(LATE, err=True)
    if budget.stopped:
        click.echo("interrupted: this is the best layout so far", err=True)
        sys.exit(130)


def _print(found: LayoutFile, text: str | None) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    predicted = found.predicted
    gap = 1 - predicted["bound_s"] / predicted["step_s"]
    lines = {"layout (Megatron)": text} if text else {}
    lines |= {name: getattr(found, name) for name in ("offset", *RECOMPUTE)}
    lines["step"] = f"{predicted['step_s']:.3f} s; no layout is more than {gap:.1%} faster"
    lines["memory by stage, GiB"] = " ".join(f"{stage:.1f}" for stage in predicted["stage_gib"])
    margin = predicted["memory_margin"]
    lines["memory limit, GiB"] = f"{predicted['cap_gib']:.1f}, of which a margin of {100 * margin:.1f} % stays free"
    lines["fits"] = f"so near to the limit {predicted['fits']} published runs would have"
    for name, value in lines.items():
        console.print(f"{name:<22} {value}")
