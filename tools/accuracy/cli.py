"""`tc3 accuracy`: exit code 0 when everything passes, 1 when something fails, 2 for a wrong input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from plugins.errors import did_you_mean
from tools.accuracy.align.cli import align
from tools.accuracy.collectives.cli import collectives_command
from tools.accuracy.compare.cli import compare
from tools.accuracy.dumps.cli import dump
from tools.accuracy.equivalence.cli import equivalence_command
from tools.accuracy.fusion.cli import fusion_command
from tools.accuracy.pages import check_page
from tools.accuracy.promotion import DEFAULT, NAMES
from tools.files.atomic import write_atomically
from tools.process.waiting import Progressing
from tools.ranges import Number
from tools.schema.versions import require_verified, unverified_option


class DtypeName(click.ParamType):
    """``bf16`` or ``bfloat16``, as the latter."""

    name = "dtype"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The full name."""
        if value not in [*NAMES, *NAMES.values()]:
            hint = did_you_mean(value, [*NAMES, *NAMES.values()])
            self.fail(f"unknown data type {value!r}, expected one of {', '.join(NAMES)}{hint}", param, ctx)
        return NAMES.get(value, value)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def accuracy() -> None:
    """Prove that the arithmetic is right, as the training report does (section 3)."""


accuracy.add_command(align)
accuracy.add_command(dump)
accuracy.add_command(compare)
accuracy.add_command(equivalence_command)
accuracy.add_command(collectives_command)
accuracy.add_command(fusion_command)


@accuracy.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--dtype", "dtypes", multiple=True, type=DtypeName(), help="fp32, fp16, bf16 (all by default), or hf32 alone."
)
@click.option("--reruns", default=3, show_default=True, type=Number("reruns"), help="Runs that must be identical.")
@click.option("--seed", default=0, show_default=True, type=Number("seed"), help="Of the inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a self-contained page.")
@click.option("--list", "list_only", is_flag=True, help="List the operators, and stop.")
@unverified_option
def ops(
    names: tuple[str, ...],
    dtypes: tuple[str, ...],
    reruns: int,
    seed: int,
    as_json: bool,
    page: Path | None,
    list_only: bool,
) -> None:
    """Compare operators on this device with a golden baseline on CPU.

    Forward and backward by the report's Table 2 (tolerance by data type and accumulation count), infinities, NaN,
    denormals and zeros, and whether reruns are bit-identical. NAME is an operator with all its variants (rms_norm) or
    one variant (rms_norm.fused); all operators without any. What has no kernel on this device is listed.

    Exit codes: 0 nothing failed, 1 failures found, 2 a wrong input.
    """
    if list_only:
        from tools.accuracy.operators.render import list_lines

        click.echo("\n".join(list_lines()))
        return
    if "hfloat32" in dtypes and set(dtypes) != {"hfloat32"}:
        raise click.UsageError("hf32 cannot be switched off again in a process: give --dtype hf32 alone")
    pairs = _pairs(names, dtypes or DEFAULT)
    check_page(page)
    require_verified()
    from tools.accuracy.operators.device import MindSporeDevice
    from tools.accuracy.operators.report import Report
    from tools.accuracy.operators.run import verify

    rows = []
    with MindSporeDevice() as device, Progressing("comparing operators", len(pairs)) as progress:
        for done, (spec, dtype) in enumerate(pairs):
            progress.show(f"{done} of {len(pairs)} done: {spec.name} {dtype}", done)
            rows += verify(spec, dtype, device, reruns, seed)
    report = Report(device.name, seed, reruns, rows)
    if page:
        from tools.accuracy.operators.html import html

        write_atomically(page, html(report))
        click.echo(f"written: {page}", err=True)
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        from tools.accuracy.operators.render import print_report

        print_report(report, Console(highlight=False))
    sys.exit(0 if report.passed else 1)


def _pairs(names: tuple[str, ...], dtypes: tuple[str, ...]):
    """(spec, data type) to run: those of `names` or all, in the order of the table."""
    from tools.accuracy.operators.specs.table import SPECS

    known = list(dict.fromkeys([*SPECS, *(name.split(".")[0] for name in SPECS)]))
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise click.BadParameter(f"{name!r} is no operator{hint}; `--list` shows all", param_hint="NAME")
    chosen = [spec for spec in SPECS.values() if not names or {spec.name, spec.name.split(".")[0]} & set(names)]
    pairs = [(spec, dtype) for spec in chosen for dtype in dtypes if dtype in spec.dtypes]
    if not pairs:
        raise click.UsageError(f"{', '.join(names) or 'no operator'}: not tested in {', '.join(dtypes)}; see --list")
    return pairs
