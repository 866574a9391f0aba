"""This module is the command group `tc3 accuracy` with its commands ops, dump, compare and collectives."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console

from plugins.errors import DataError, did_you_mean
from tools.accuracy.align.cli import align
from tools.accuracy.diagnose.cli import diagnose_command
from tools.accuracy.dumps.read import LEVELS, TASKS
from tools.accuracy.dumps.write import Job
from tools.accuracy.equivalence.cli import equivalence_command
from tools.accuracy.fusion import fusion_command
from tools.accuracy.judge import DEFAULT, NAMES
from tools.accuracy.pages import check_out, check_page, keeping, page_option
from tools.files.atomic import real_path, write_atomically
from tools.process.children import terminate_as_interrupt
from tools.process.waiting import Progressing
from tools.ranges import Number, jobs_option, overrides_option
from tools.schema.versions import require_verified, unverified_option

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "run" / "accuracy_dump.py"
_SHOWN = 10  # differences of a rank


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Write the dump into this new folder.")
@click.option("--mini", is_flag=True, help="Train RECIPE's architecture at toy size on CPU, and dump its tensors.")
@click.option("--steps", default=2, show_default=True, type=Number("steps"), help="Train and dump this many steps.")
@click.option(
    "--level",
    default="L0",
    show_default=True,
    type=click.Choice(LEVELS),
    help="Choose where msprobe dumps tensors: at cells, which are MindSpore's modules (L0), at functions (L1), at both "
    "(mix), or at kernels of the compiled graph (L2).",
)
@click.option(
    "--task",
    type=click.Choice(TASKS),
    help="Choose what is dumped of each tensor: only its max, min, mean and norm (statistics), or also all its values "
    "(tensor).  [default: tensor with --level L2, otherwise statistics]",
)
@overrides_option
@unverified_option
def dump(
    recipe: Path, out: Path, mini: bool, steps: int, level: str, task: str | None, overrides: tuple[str, ...]
) -> None:
    """Train RECIPE for a few steps and dump every tensor with msprobe, as input of `tc3 accuracy compare`.

    Statistics are small (2 MB for recipes/mini/pretrain.yaml, where values take 1.2 GB), and are enough to find where
    two runs begin to differ. Statistics do not show values that change places or differences that cancel: dump values
    (--task tensor) to prove that runs are equal, or to look at the tensors themselves. If the disk is nearly full, the
    command ends the dump before no space is left.

    Neither model nor recipe is edited. L0 hooks cells, L1 hooks functions, and mix hooks both: these three run in
    PyNative mode, which is 20 to 40 times slower than a graph; L2 dumps the kernels of the compiled graph. The weights
    after the last step are dumped, too; L1 and L2 do not show weights, so with them the weights before the first step
    are dumped as well, and `compare` can judge the optimizer's updates, even that of a single step (from statistics
    only as far as these allow).

    Exit codes: 0 dumped, 1 a worker failed or the disk is full, 2 the user has to correct something first, 130/143
    interrupted (no file is left then).
    """
    if level == "L2" and task == "statistics":
        raise click.UsageError("--task statistics: level L2 always dumps all values; leave --task out")
    task = task or ("tensor" if level == "L2" else "statistics")
    require_verified()
    job = Job(str(recipe), str(out), mini, steps, level, task, list(overrides))
    os.execv(sys.executable, [sys.executable, str(SCRIPT), json.dumps(asdict(job))])


@click.command()
@click.argument("golden", type=click.Path(path_type=Path))
@click.argument("bench", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Write compare.json and rows.csv into this folder."
)
@click.option(
    "--html",
    "page",
    is_flag=True,
    help="Also write the comparison as one HTML page, compare.html, into the folder of --out. Without --html, the "
    "compare.html of an earlier comparison is removed from this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option(
    "--promoted",
    is_flag=True,
    help="Accept tensors whose data type is wider in GOLDEN than in BENCH, instead of reporting them as differences.",
)
def compare(golden: Path, bench: Path, out: Path | None, page: bool, as_json: bool, promoted: bool) -> None:
    """Compare the dump BENCH with the dump GOLDEN, tensor by tensor, and name the first tensor that diverges.

    Every tensor is judged by the report's Table 2, by data type and accumulation count. The following are findings: a
    difference of values, shape or data type; a factor that scales a whole tensor; a different update of a weight; a
    call that only one dump has; a NaN; and an infinity that only one dump has. The command names the first finding of
    the forward pass, of the backward pass, among the weights, and in state that no gradient trains (counters, biases,
    caches), and the headline says what the earliest of them usually means. A rerun on the same device must have no
    findings. Dumps of statistics are judged by their statistics; the result says what cannot be judged from statistics.

    Exit codes: 0 no finding, 1 findings, 2 a wrong input (an incomplete dump, or dumps of different levels or tasks).
    """
    if page and not out:
        raise click.UsageError("--html writes compare.html into the folder of --out; give --out, too")
    from tools.accuracy.dumps.compare import compare_dumps
    from tools.accuracy.dumps.read import open_dump
    from tools.accuracy.dumps.render import print_report, write_files

    sides = open_dump(golden), open_dump(bench)
    check_out(out, golden, bench)
    if real_path(golden) == real_path(bench):
        raise DataError(f"{bench}: GOLDEN and BENCH are the same dump, which equals itself; give the dumps of two runs")
    with Progressing("comparing tensors") as progress:

        def tell(done: int, total: int) -> None:
            progress.show(f"{done:,} of {total:,} tensors compared", done, total)

        report = compare_dumps(*sides, promoted, tell)
    if out:
        for file in write_files(report, out, page):
            click.echo(f"written: {file}", err=True)
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        print_report(report, Console(highlight=False))
    sys.exit(0 if report.passed else 1)


if TYPE_CHECKING:
    from tools.accuracy.collectives import Verdict
    from tools.accuracy.operators.spec import Spec


@click.command("collectives")
@click.argument("recipe", metavar="RECIPE|RUN", type=click.Path(path_type=Path))
@overrides_option
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Keep the run's files in this folder.")
@jobs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@unverified_option
def collectives_command(
    recipe: Path, overrides: tuple[str, ...], keep: Path | None, jobs: int | None, as_json: bool
) -> None:
    """Compare the collectives that CPU processes execute with those that `tc3 dryrun` reports.

    RECIPE is trained for two steps as MindSpore's sharded graph, on made-up data; a recipe for Ascend is trained as the
    mini recipe that keeps its parallel strategy (`tc3 train --mini --parallel`). Every rank of the same recipe is
    compiled, too. Name, ranks, type and shape of each collective, tags of Sends and Receives, and the order must agree
    for every rank. Instead of a recipe, the folder of a finished sharded run may be given; the command then trains
    nothing.

    Exit codes: 0 equal; 1 different (the differences are listed); 2 something did not run, or a wrong input.
    """
    from tools.accuracy import collectives
    from tools.accuracy.equivalence.runs import RunFailedError

    require_verified()
    if recipe.is_dir():
        if overrides or keep:
            raise click.UsageError(
                "--set and --keep work only with a recipe, not with the folder of a run; leave out --set and --keep"
            )
        _tell(recipe, collectives.compare_run(recipe, jobs), as_json)
    flat = collectives.sharded_recipe(recipe, overrides)
    made = tempfile.TemporaryDirectory(prefix="tc3-collectives-") if keep is None else nullcontext(keep.absolute())
    with keeping(keep, "tc3 accuracy collectives"), terminate_as_interrupt(), made as folder:
        click.echo(f"{flat.source}: training {collectives.STEPS} steps", err=True)
        try:
            verdict = collectives.compare_run(collectives.train(flat, Path(folder)), jobs)
        except RunFailedError as error:
            verdict = collectives.Verdict(collectives.UNKNOWN, f"the training failed: {error}")
    _tell(recipe, verdict, as_json)


def _tell(what: Path, verdict: Verdict, as_json: bool) -> NoReturn:
    from tools.accuracy.collectives import DIFFERS, EQUAL

    if as_json:
        click.echo(json.dumps({"recipe": str(what), **verdict.as_json()}))
    else:
        for rank in verdict.ranks:
            names = ", ".join(f"{count} {name}" for name, count in rank["by_name"].items())
            click.echo(f"rank {rank['rank']}: {rank['calls']} collectives, {rank['bytes'] / 2**20:.2f} MiB: {names}")
            for line in rank["differences"][:_SHOWN]:
                click.echo(f"  {line}")
            if len(rank["differences"]) > _SHOWN:
                click.echo(f"  and {len(rank['differences']) - _SHOWN} more (--json has all)")
        click.echo(f"{verdict.word}: {verdict.why}" if verdict.why else verdict.word)
    sys.exit({EQUAL: 0, DIFFERS: 1}.get(verdict.word, 2))


class DtypeName(click.ParamType):
    """A `DtypeName` is a click type for a data type: ``bf16`` and ``bfloat16`` both give ``bfloat16``."""

    name = "dtype"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the full name of the data type that the user named, such as ``bfloat16`` for ``bf16``."""
        if value not in [*NAMES, *NAMES.values()]:
            hint = did_you_mean(value, [*NAMES, *NAMES.values()])
            self.fail(f"unknown data type {value!r}, expected one of {', '.join(NAMES)}{hint}", param, ctx)
        return NAMES.get(value, value)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def accuracy() -> None:
    """Verify that operators and trainings compute right results, by the methods of section 3 of the TeleChat3-MoE
    report.
    """


for each in (align, dump, compare, equivalence_command, collectives_command, fusion_command, diagnose_command):
    accuracy.add_command(each)


@accuracy.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=DtypeName(),
    help="Test this data type: fp32, fp16, bf16 or hf32; by default fp32, fp16 and bf16 are tested. hf32 cannot be "
    "tested together with other data types.",
)
@click.option(
    "--reruns",
    default=3,
    show_default=True,
    type=Number("reruns"),
    help="Run each operator this many times; the results must be bit-identical.",
)
@click.option(
    "--seed", default=0, show_default=True, type=Number("seed"), help="Draw the random inputs with this seed."
)
@click.option(
    "--shipped",
    is_flag=True,
    help="Also compare the reference results that this host's CPU computes with the stored reference results of "
    "another CPU.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@page_option
@click.option("--list", "list_only", is_flag=True, help="List the operators and run none.")
@unverified_option
def ops(
    names: tuple[str, ...],
    dtypes: tuple[str, ...],
    reruns: int,
    seed: int,
    shipped: bool,
    as_json: bool,
    page: Path | None,
    list_only: bool,
) -> None:
    """Compare operators on this device with a golden baseline on CPU.

    The command compares forward and backward by the report's Table 2 (tolerance by type and accumulation count), checks
    infinities, NaN, denormals and zeros, and checks whether reruns are bit-identical. NAME is an operator with all its
    variants (rms_norm) or one variant (rms_norm.fused); without NAME all operators are compared. Operators without a
    kernel on this device are listed.

    Exit codes: 0 nothing failed, 1 failures found, 2 unknown, because no operator could run here, or a wrong input.
    """
    if list_only:
        from tools.accuracy.operators.report import list_lines

        click.echo("\n".join(list_lines()))
        return
    if "hfloat32" in dtypes and set(dtypes) != {"hfloat32"}:
        raise click.UsageError(
            "--dtype hf32: a process cannot switch hf32 off again, so no other type can be tested with it; give "
            "--dtype hf32 only"
        )
    pairs = _pairs(names, tuple(dict.fromkeys(dtypes or DEFAULT)))
    check_page(page)
    require_verified()
    from tools.accuracy.operators.device import MindSporeDevice
    from tools.accuracy.operators.report import Report, html, print_report
    from tools.accuracy.operators.run import verify

    rows = []
    with MindSporeDevice() as device, Progressing("comparing operators", len(pairs)) as progress:
        for done, (spec, dtype) in enumerate(pairs):
            progress.show(f"{done} of {len(pairs)} done: {spec.name} {dtype}", done)
            rows += verify(spec, dtype, device, reruns, seed)
    report = Report(device.name, seed, reruns, rows)
    if page:
        write_atomically(page, html(report))
        click.echo(f"written: {page}", err=True)
    found = _shipped(pairs) if shipped else {}
    if as_json:
        click.echo(json.dumps({**report.as_json(), **found}))
    else:
        print_report(report, Console(highlight=False))
        for one in found.values():
            click.echo("\n".join([one["says"], *one["differences"]]))
    wrong = any(one["differences"] for one in found.values())
    sys.exit(1 if wrong else {True: 0, False: 1, None: 2}[report.passed])


def _shipped(pairs: Sequence[tuple[Spec, str]]) -> dict[str, Any]:
    """Return {"shipped": the comparison with the stored golden results}."""
    from tools.accuracy.operators.shipped import differences, read_shipped

    content = read_shipped()
    compared, lines = differences(pairs, content)
    says = f"golden results of this host: {compared - len(lines)} of {compared} as shipped on {content['made']}"
    return {"shipped": {"made": content["made"], "compared": compared, "differences": lines, "says": says}}


def _pairs(names: tuple[str, ...], dtypes: tuple[str, ...]) -> list[tuple[Spec, str]]:
    """Return (spec, data type) to run: those of `names` or all, in the order of the table."""
    from tools.accuracy.operators.report import SPECS

    known = list(dict.fromkeys([*SPECS, *(name.split(".")[0] for name in SPECS)]))
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise click.BadParameter(
                f"{name!r} is not an operator{hint}; `--list` shows all operators", param_hint="NAME"
            )
    chosen = [spec for spec in SPECS.values() if not names or {spec.name, spec.name.split(".")[0]} & set(names)]
    pairs = [(spec, dtype) for spec in chosen for dtype in dtypes if dtype in spec.dtypes]
    if not pairs:
        raise click.UsageError(
            f"{', '.join(names) or 'no operator'}: there is no test in the data types {', '.join(dtypes)}; --list "
            "shows the types of each operator"
        )
    return pairs
