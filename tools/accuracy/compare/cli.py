"""`tc3 accuracy compare`: exit code 0 without a finding, 1 with findings, 2 for a wrong input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from tools.accuracy.pages import check_out
from tools.process.waiting import Progressing


@click.command()
@click.argument("golden", type=click.Path(path_type=Path))
@click.argument("bench", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for compare.json and rows.csv.")
@click.option("--html", "page", is_flag=True, help="Write OUT/compare.html too: one self-contained page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--promoted", is_flag=True, help="GOLDEN computed in a wider data type: that alone is no finding.")
def compare(golden: Path, bench: Path, out: Path | None, page: bool, as_json: bool, promoted: bool) -> None:
    """Compare the dump BENCH with the dump GOLDEN, tensor by tensor, and name the first that diverges.

    Every tensor is judged by the report's Table 2, by data type and accumulation count. A difference of values, shape
    or data type, a factor that scales a whole tensor, a weight's update that is not the same, a call that only one side
    has, a NaN, and an infinity that only one side has are findings. The first one of the forward pass, of the backward
    pass, among the weights and in state that no gradient trains (counters, biases, caches) is named, and the headline
    says what the earliest of them usually means. A rerun on the same device must have none. Dumps of statistics are
    judged by these; what they cannot tell is said.

    Exit codes: 0 no finding, 1 findings, 2 a wrong input (no dump, not a whole one, another level or task).
    """
    if page and not out:
        raise click.UsageError("--html writes OUT/compare.html: give --out")
    from tools.accuracy.compare.render import print_report, write_files
    from tools.accuracy.compare.run import compare_dumps
    from tools.accuracy.dumps.read import open_dump

    sides = open_dump(golden), open_dump(bench)
    check_out(out, golden, bench)
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
