"""This module is the command `tc3 accuracy align`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from tools.accuracy.pages import keeping
from tools.process.children import terminate_as_interrupt
from tools.ranges import Number
from tools.schema.versions import require_verified, unverified_option

LARGE = (".npz", ".safetensors", ".bin")  # what a run leaves beside its logs


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--against", default="hf", show_default=True, metavar="hf|RECIPE",
              help="Compare RECIPE with Hugging Face's DeepseekV3 (needs torch) or with this recipe.")  # fmt: skip
@click.option(
    "--steps", default=20, show_default=True, type=Number("curve_steps"), help="Train and compare this many steps."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key in both recipes.")
@click.option(
    "--data",
    metavar="PREFIX",
    help="Train both recipes on the Megatron corpus PREFIX.bin and PREFIX.idx instead of the recipe's corpus.",
)
@click.option(
    "--reference-python",
    "python",
    default=sys.executable,
    metavar="PATH",
    help="Run Hugging Face's model with this Python, which needs torch.  [default: the Python of tc3]",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=Number("seed"),
    help="Draw the initial weights at random with this seed.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), help="Keep the files of both runs in this folder."
)
@unverified_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def align(
    recipe: Path,
    against: str,
    steps: int,
    overrides: tuple[str, ...],
    data: str | None,
    python: str,
    seed: int,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Find the first difference between RECIPE and a reference, stage by stage as in Figure 1 of the TeleChat3-MoE
    report.

    There are six stages, all on CPU: configuration; forward of the first batch; every gradient; the first update of
    every weight; the losses of all steps; the recipe's own workers. The comparison stops at the first stage that fails
    and names the first module, gradient or parameter group that differs. A recipe for Ascend is run as its mini recipe
    (a small version for CPU).

    Two recipes are first compared setting by setting at their own size; then their mini recipes run on CPU. On the last
    stage, a layout that splits the model is executed as MindSpore's sharded graph; a recipe for Ascend uses at most
    four processes.

    Exit codes: 0 aligned; 1 a stage failed, or nothing ran though the recipes differ; 2 a wrong input.
    """
    from tools.accuracy.align.comparison import Wanted, compare_stages, print_comparison

    require_verified()
    broken = False
    with keeping(keep, "tc3 accuracy align"), terminate_as_interrupt():
        folder = Path(tempfile.mkdtemp(prefix="tc3-align-")) if keep is None else keep.absolute()
        try:
            wanted = Wanted(recipe, against, steps, overrides, data, folder, python, seed)
            comparison = compare_stages(wanted, lambda text: click.echo(text, err=True))
            broken = comparison.broken
        finally:
            if keep is None:
                _remove(folder, keep_logs=broken)
    if as_json:
        click.echo(json.dumps(comparison.as_json()))
    else:
        print_comparison(comparison, Console(highlight=False))
    sys.exit(0 if comparison.passed else 1)


def _remove(folder: Path, keep_logs: bool) -> None:
    """Remove the folder of the runs, or only its large files."""
    if not keep_logs:
        shutil.rmtree(folder, ignore_errors=True)
    for file in [file for file in folder.rglob("*") if file.suffix in LARGE]:
        file.unlink()
