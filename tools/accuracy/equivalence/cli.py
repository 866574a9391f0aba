"""This module is the command `tc3 accuracy equivalence`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from plugins.errors import RecipeError
from tools.accuracy.pages import check_page, page_option
from tools.files.atomic import check_writable, write_atomically
from tools.files.locks import only_process_in
from tools.ranges import Number
from tools.schema.versions import require_verified, unverified_option

if TYPE_CHECKING:
    from tools.accuracy.equivalence.matrix import Matrix


@click.command("equivalence")
@click.argument("recipe", required=False)
@click.option(
    "--only",
    "names",
    multiple=True,
    metavar="NAME,...",
    help="Test only these parallel strategies, whose names are separated by commas: names that --list prints, "
    "`trained` or `executed` for all strategies of that kind, or `baseline` for the training on one worker. The option "
    "may be repeated.",
)
@click.option(
    "--steps", default=3, show_default=True, type=Number("curve_steps"), help="Train this many steps in each run."
)
@click.option(
    "--draws",
    type=Number("rows"),
    help="Draw this many parallel layouts at random, and compare the training in each layout with the training in one "
    "process.",
)
@click.option(
    "--seed", default=0, show_default=True, type=Number("seed"), help="Draw the layouts of --draws with this seed."
)
@click.option(
    "--most",
    default=4,
    show_default=True,
    type=Number("workers"),
    help="Let --draws draw only layouts that need at most this many processes.",
)
@click.option(
    "--update",
    is_flag=True,
    help="Store the losses and gradient norms of the runs as new reference numbers, instead of comparing them with the "
    "stored reference numbers.",
)
@click.option(
    "--golden",
    type=click.Path(path_type=Path, file_okay=False),
    help="Read the reference losses and gradient norms from this folder or, with --update, write them to this folder.  "
    "[default: tests/golden of the checkout]",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the folders of the training runs into this folder.  "
    "[default: output/equivalence/<the recipe's folder>-<the recipe's name>]",
)
@click.option("--dry-run", is_flag=True, help="List the training runs that the command would start, and start no run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@page_option
@click.option("--list", "list_only", is_flag=True, help="List the parallel strategies, and start no run.")
@unverified_option
def equivalence_command(
    recipe: str | None,
    names: tuple[str, ...],
    steps: int,
    draws: int | None,
    seed: int,
    most: int,
    update: bool,
    golden: Path | None,
    work: Path | None,
    dry_run: bool,
    as_json: bool,
    page: Path | None,
    list_only: bool,
) -> None:
    """Verify that RECIPE trains the same under every parallel strategy (section 3.2.2 of the TeleChat3-MoE report).

    Each strategy starts from the same weights and reads the same made-up data as the training on one worker. Strategies
    that MindFormers can train on CPU with data parallelism are trained, and compared by losses, gradient norms and
    optimizer state. Layouts that split the model are executed as MindSpore's sharded graph by CPU processes, and
    compared with one process that runs this graph. Strategies that can be neither trained nor executed are listed with
    the reason. Gradients, weights and optimizer state are judged by the report's Table 2, as are the losses of trained
    runs. Losses of executed layouts must agree to 1e-5 (absolute) and global norms to 5e-5 (relative), because both
    trainings run the same graph. The command names the module, phase and ranks of the first difference. Trained runs
    are also checked against golden numbers. A recipe for Ascend is first reduced to its mini recipe.

    Without --only, only two of the executed strategies run, tensor and pipeline parallelism; with `--only executed` all
    of them run, and each takes about a minute. The trained strategies take about ten minutes on two cores.

    --draws N draws N legal layouts at random that no table lists (degrees, schedule, uneven stages, optimizer sharding,
    recomputation, MTP, experts and their dispatch, residual streams, length, adapters, averaged weights, a growing
    batch, the auxiliary loss of an EP group), and executes each of them; the same --seed draws the same layouts.

    Each verdict is written to stderr as soon as it is known, so that an interrupted command keeps its results; with
    --only draw_SEED_NUMBER in addition to --draws, this one layout is executed again.

    Exit codes: 0 equal, 1 something differs, 2 a wrong input.
    """
    from tools.accuracy.equivalence.matrix import as_html, choose, equivalence, print_list, print_matrix, print_verdict
    from tools.accuracy.equivalence.strategies import BASELINE, one_worker

    if list_only:
        print_list(Console(highlight=False))
        return
    if recipe is None:
        raise click.UsageError(
            "the argument RECIPE is missing; give a recipe, such as recipes/mini/pretrain.yaml, or --list"
        )
    only = tuple(name.strip() for several in names for name in several.split(",") if name.strip())
    if names and not only:
        raise RecipeError(f"--only {','.join(names)!r}: this is not the name of a strategy; --list shows all names")
    drawn = (draws, seed, most) if draws else None
    chosen = choose(only, one_worker(recipe), drawn)
    check_page(page)
    if update and BASELINE not in only and not any(case.variant for case in chosen):
        raise RecipeError(
            "--update: none of the chosen strategies is trained, so there are no golden numbers to write; choose "
            "`baseline` or `trained` with --only"
        )
    if dry_run:
        for case in chosen:
            click.echo(f"{case.name}: {case.how}" + (f": {case.what}" if drawn else ""))
        return
    file, another = _golden_of(golden, recipe, update)
    require_verified()
    work = work or Path("output") / "equivalence" / file.stem
    console = Console(stderr=True, highlight=False)
    started, finished = partial(console.print, style="dim"), partial(print_verdict, console=console)
    with only_process_in(work, "tc3 accuracy equivalence", "--work"):
        matrix = equivalence(recipe, only, steps, work, lambda name: started(f"{name} ..."), drawn, finished)
    lines, unknown = _gate(matrix, None if another else file, recipe, update, console)
    if page:
        write_atomically(page, as_html(matrix, lines))
        click.echo(f"written: {page}", err=True)
    if as_json:
        rows = [row.as_json() for row in matrix.rows]
        found = {"recipe": recipe, "steps": steps, "rows": rows, "without_golden_numbers": unknown}
        found["golden_file"] = str(file) if file.exists() and not another else None
        click.echo(json.dumps({**found, "golden": lines, "passed": _passed(matrix, lines)}))
    else:
        print_matrix(matrix, lines, Console(highlight=False))
    sys.exit(0 if _passed(matrix, lines) else 1)


def _golden_of(folder: Path | None, recipe: str, update: bool) -> tuple[Path, str]:
    """Return the path of a recipe's golden file, and the recipe to which the numbers in this file belong if that is
    another recipe.

    Raises:
        RecipeError: the folder of --golden has no file for the recipe, or the file of another recipe.
        DataError: --update cannot write the file.
    """
    from tools.accuracy.equivalence import golden_gate

    file = golden_gate.golden_file(folder or golden_gate.GOLDEN, recipe)
    another = golden_gate.owner(file, recipe) if file.exists() else ""
    if another and (folder or update):
        raise RecipeError(
            f"{'--golden' if folder else '--update'}: {file} holds the golden numbers of {another}, not of {recipe}; "
            "give another folder with --golden FOLDER"
        )
    if folder and not update and not file.exists():
        raise RecipeError(f"--golden {folder}: there is no {file.name} for this recipe; --update writes it")
    if update:
        check_writable(file)
    return file, another


def _gate(
    matrix: Matrix, file: Path | None, recipe: str, update: bool, console: Console
) -> tuple[list[str], list[str]]:
    """Return the differences from the golden numbers in `file`, and the runs for which the file has no golden numbers.
    If the golden file is another recipe's, `file` is None. With `update` write the numbers instead, and return two
    empty lists.
    """
    from tools.accuracy.equivalence import golden_gate
    from tools.accuracy.equivalence.matrix import FAIL

    runs = {name: golden_gate.numbers_of(run) for name, run in matrix.runs.items()}
    if update and file and matrix.with_status(FAIL):
        console.print(f"not written: {file}; numbers of strategies that differ are not worth keeping", style="yellow")
        return [], []
    if update and file:
        golden_gate.write_golden(file, recipe, runs)
        console.print(f"written: {file}")
        return [], []
    if not runs:
        return [], []
    if file is None or not file.exists():
        how = f" ({file}); --update writes them" if file else "; --golden FOLDER --update writes some"
        console.print(f"no golden numbers for this recipe{how}", style="yellow")
        return [], list(runs)
    golden = golden_gate.read_golden(file)
    unknown = [name for name in runs if name not in golden]
    for name in unknown:
        console.print(f"{name}: no golden numbers yet in {file}; --update adds them", style="yellow")
    return golden_gate.differences(golden, runs), unknown


def _passed(matrix: Matrix, lines: list[str]) -> bool:
    return not lines and (matrix.passed or (not matrix.rows and bool(matrix.runs)))
