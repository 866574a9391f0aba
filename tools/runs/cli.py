"""`tc3 runs`: the group. Exit code 0, or 2 for a wrong input; `watch` also 1 for a run that failed, 130 for Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tools.files.figure import check_ending, check_page
from tools.ranges import Number


@click.group("runs", context_settings={"help_option_names": ["-h", "--help"]})
def runs() -> None:
    """What runs made of their time: where it went, why they failed, how they go on."""


@runs.command("report", short_help="Goodput and where the rest went, failures and their causes, saves, spikes.")
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with tables and pictures.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw all attempts on a time line (.svg or .png).")
def report_command(folders: tuple[Path, ...], as_json: bool, html: Path | None, picture: Path | None) -> None:
    """Say where the time of runs went, from what they wrote.

    RUN is the folder of a run of tc3 train or tc3 agent, whether it has ended or not; several stand side by side.
    What the records of a run do not tell is said to be unknown.
    """
    from rich.console import Console

    from tools.runs.render import print_text
    from tools.runs.study import content, studies

    if picture:
        check_ending(picture)
    if html:
        check_page(html)
    found = studies(folders)
    if picture:
        from tools.runs.picture import draw

        click.echo(f"drawn: {draw(found, picture)}", err=True)
    if html:
        from tools.files.atomic import write_atomically
        from tools.runs.render import page

        write_atomically(html, page(found))
        click.echo(f"written: {html}", err=True)
    if as_json:
        click.echo(json.dumps({"runs": [content(one) for one in found]}))
    else:
        print_text(found, Console(soft_wrap=True, highlight=False, markup=False))


@runs.command("watch", short_help="Follow a run: phase, step, loss, speed, goodput, checkpoint, failures.")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Say how it stands now, and leave.")
@click.option("--every", type=Number("pause"), default=2.0, show_default=True, help="Seconds between looks.")
@click.option("--prometheus", type=click.Path(path_type=Path), help="Write a text file for Prometheus too (*.prom).")
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard scalars to RUN/tensorboard too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a look on stdout.")
def watch_command(
    folder: Path, once: bool, every: float, prometheus: Path | None, tensorboard: bool, as_json: bool
) -> None:
    """Follow a run from any machine that sees its folder.

    Exit code: 0 for a run that is done (with --once also for one that goes on), 1 for one that failed, was given up or
    left, 2 for something to mend, 130 for Ctrl-C.
    """
    import sys

    from rich.console import Console

    from tools.runs import live
    from tools.runs.live import Exporter, Scalars
    from tools.runs.source import check_folder
    from tools.runs.watch import BAD, Status, Watch

    check_folder(folder)
    exporter = Exporter(prometheus) if prometheus else None
    scalars = Scalars(folder) if tensorboard else None
    watch = Watch(folder, scalars.add) if scalars else Watch(folder)

    def look() -> Status:
        status = watch.look()
        if exporter:
            exporter.write(status)
        if scalars:
            scalars.flush()
        return status

    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        if once:
            status = look()
            console.print(live.json_line(status) if as_json else live.table(status))
            code = int(status.state in BAD)
        else:
            code = live.follow(look, console, every, as_json)
    except KeyboardInterrupt:  # how one leaves: no words
        code = 130
    finally:
        if scalars:
            scalars.close()
    sys.exit(code)
