"""This module is the command group `tc3 runs`: `report` shows how much time runs spent on each kind of work, and
`watch` follows a run.

`follow` shows the status of a run: on a terminal as a table that is updated in place, elsewhere as a new line after
each change. `Scalars` writes a run's steps as TensorBoard scalars in RUN/tensorboard, beside its metrics. `Exporter`
writes a run's status as a text file for Prometheus, as node_exporter's textfile collector reads it (*.prom).

The exit code is 0, or 2 for a wrong input; `watch` also exits with 1 for a run that failed, and with 130 for Ctrl-C.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from plugins.errors import DataError
from tools.files.atomic import check_writable, real_path
from tools.files.figure import check_ending, check_page
from tools.ranges import Number
from tools.recipe.dump import is_of_run
from tools.runs.readings import CURVE, loss_in_words
from tools.runs.render import duration, share
from tools.runs.watch import Status

if TYPE_CHECKING:
    from tools.runs.study import Study

QUIET = 120.0  # seconds without anything new after which the status says so
FOLDER, _EVENTS_SUFFIX = "tensorboard", ".tc3"
SCALARS = ("loss", "lm_loss", "load_balancing_loss", "mtp_loss", "global_norm", "learning_rate", "seconds")
GAUGES = {
    "step": "Newest step that was trained and not trained again",
    "total_steps": "Steps that the run has to train in total",
    "loss": "Training loss of the newest step, nats per token",
    "held_out_loss": "Held-out loss of the last evaluation, nats per token",
    "tokens_per_second": "Median speed of the newest steps",
    "goodput": "Share of the time since the first attempt's plan in which steps were trained that were not lost",
    "wall_seconds": "Time since the first attempt's plan",
    "attempt": "Number of the newest attempt, from 0",
    "failures": "Attempts that failed",
    "checkpoint_step": "Step of the newest complete checkpoint",
    "checkpoint_age": "Seconds from the newest complete checkpoint to the last sign of life",
    "last_sign": "Time at which the run last wrote a file, in seconds since 1970",
    "step_samples": "Samples of the newest step, if their number grows (plugins.batch_ramp)",
    "fullest_expert": "Tokens of the busiest expert divided by the mean of its layer, in the newest step",
    "idle_experts": "Experts of all layers that got no token in the newest step",
}
Look = Callable[[], Status]
_LINE_EVERY = 60.0  # seconds between lines, at most, off a terminal


def follow(look: Look, console: Console, every: float, as_json: bool) -> int:
    """Ask the function `look` for the status of a run every `every` seconds, and show the status, until the run has
    ended; return the exit code of the command.
    """
    if as_json or not console.is_terminal:
        return _print_lines(look, console, every, as_json)
    shown = table(status := look())
    with Live(shown, console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while status.over is None:
            time.sleep(every)
            status = look()
            live.update(table(status), refresh=True)
    return status.over


def _print_lines(look: Look, console: Console, every: float, as_json: bool) -> int:
    shown, said = "", 0.0
    while True:
        status = look()
        text = json_line(status) if as_json else line(status)
        moved = (status.state, status.attempt, status.phase) if not as_json else ()
        key = text if as_json else str(moved)
        if key != shown or time.monotonic() - said >= _LINE_EVERY or status.over is not None:
            shown, said = key, time.monotonic()
            console.print(text, highlight=False, soft_wrap=True, markup=False)
        if status.over is not None:
            return status.over
        time.sleep(every)


def json_line(status: Status) -> str:
    """Return the status of a run as one JSON object."""
    return json.dumps(asdict(status))


def rows(status: Status) -> list[tuple[str, str]]:
    """Return the status of a run as pairs (name, value), with both as text. Values that the run does not have are left
    out.
    """
    total = f" of {status.total_steps:,}" if status.total_steps else ""
    known = (
        share(status.goodput)
        if status.goodput is None
        else f"{share(status.goodput)} of {duration(status.wall_seconds)}"
    )
    speed = None if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f} tokens/s of all workers"
    found = [
        ("run", f"{status.run}: {status.state}{_quiet(status)}"),
        ("attempt", _attempt(status)),
        ("phase", status.phase and f"{status.phase} for {duration(status.phase_seconds)}"),
        ("step", f"{status.step:,}{total}"),
        ("batch", _batch(status)),
        ("loss", _finite("loss", status) or (None if status.loss is None else f"{status.loss:.4f}")),
        ("global norm", _finite("global_norm", status)),
        ("held-out loss", _held_out(status)),
        ("speed", speed),
        ("goodput", known),
        ("checkpoint", _checkpoint(status)),
        ("slow ranks", "; ".join(status.slow_ranks) or None),
        ("routers", _routers(status)),
        ("failures", _failures(status)),
        ("metrics", status.left_out or None),
    ]
    return [(name, text) for name, text in found if text is not None]


def _finite(name: str, status: Status) -> str | None:
    return "not finite" if name in status.not_finite else None


def _batch(status: Status) -> str | None:
    """Return the samples of a step where they grow, and until which step they are so many."""
    if status.step_samples is None:
        return None
    return f"{status.step_samples:,} samples" + (f" until step {status.stage_end:,}" if status.stage_end else "")


def _held_out(status: Status) -> str | None:
    """Return the loss of the last evaluation, and that of each corpus of a list."""
    if status.held_out_step is None:
        return None
    corpora = "; ".join(f"{name} {loss_in_words(loss)}" for name, loss in status.held_out_corpora.items())
    mean = f"{loss_in_words(status.held_out_loss)} (step {status.held_out_step:,})"
    return f"{mean}; {corpora}" if corpora else mean


def _routers(status: Status) -> str | None:
    """Return the fullest expert, experts without tokens, and alarms."""
    if status.fullest_expert is None:
        return None
    fullest = f"the busiest expert gets {status.fullest_expert:.2f} times the mean (layer {status.fullest_layer})"
    idle = f"experts without a token, in all layers: {status.idle_experts:,}" if status.idle_experts else ""
    return "; ".join(filter(None, [fullest, idle, *(f"look at {alarm}" for alarm in status.router_alarms)]))


def _quiet(status: Status) -> str:
    tell = status.quiet >= QUIET and status.over is None
    return f", no new output for {duration(round(status.quiet))}" if tell else ""


def _attempt(status: Status) -> str | None:
    if status.attempt is None:
        return None
    hosts = "unknown hosts" if status.hosts is None else f"{status.hosts} host{'s' * (status.hosts != 1)}"
    return f"{status.attempt} on {hosts}"


def _checkpoint(status: Status) -> str:
    """Return in words the newest checkpoint and its age, which counts to the last sign of the run."""
    if status.checkpoint_step is None:
        return "none yet"
    age = "" if status.checkpoint_age is None else f", {duration(status.checkpoint_age)} old"
    return f"step {status.checkpoint_step:,}{age}"


def _failures(status: Status) -> str | None:
    if status.failures is None and not status.untold:
        return None
    which = f"attempt{'s' * (len(status.untold) > 1)} {', '.join(map(str, status.untold))}"
    known = f"unknown (no record says how {which} ended)" if status.untold else f"{status.failures}"
    return known + (f", the last: {status.last_failure}" if status.last_failure else "")


def table(status: Status) -> Table:
    """Return the status of a run as a table for a terminal."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column()
    made.add_column(overflow="fold")  # an error is never cut off
    for name, text in rows(status):
        made.add_row(name, text)
    return made


def line(status: Status) -> str:
    """Return the status of a run as one line for a log."""
    (_, name), *rest = rows(status)
    return f"{name}: " + ", ".join(f"{what} {text}" for what, text in rest)


class Scalars:
    """A `Scalars` writes the metrics of each step as TensorBoard scalars, and replaces the scalars that an earlier
    process wrote for the same step.

    Raises:
        DataError: tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, run_dir: Path):
        self.folder = run_dir / FOLDER
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise DataError("--tensorboard: tensorboard is not installed (pip install tensorboard)") from None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob(f"events.out.tfevents.*{_EVENTS_SUFFIX}"):
                old.unlink()
            self.writer: Any = EventFileWriter(str(self.folder), filename_suffix=_EVENTS_SUFFIX)
        except OSError as error:
            raise DataError(f"{self.folder}: this path cannot be written ({error.strerror or error})") from None
        self.event, self.summary = Event, Summary

    def add(self, record: dict[str, Any]) -> None:
        """Write the metrics of one step, given as a line of a file in RUN/metrics, as scalars for TensorBoard."""
        values = [(name, record.get(name)) for name in SCALARS]
        tokens, seconds = record.get("tokens"), record.get("seconds")
        values.append(("tokens_per_second", tokens / seconds if tokens and seconds else None))
        self._write(record, values)

    def add_routers(self, record: dict[str, Any]) -> None:
        """Write the measurements of the routers in one step (from metrics/routers.jsonl) as scalars for TensorBoard.
        Each scalar shows one measure, with the value of the layer whose router is least balanced by this measure.
        """
        worst = {"fullest": max, "entropy": min, "similarity": min, "idle": max, "streak": max}
        known = {name: [value for value in record.get(name) or () if value is not None] for name in worst}
        if type(record.get("step")) is int:
            self._write(record, [(f"routers/{name}", worst[name](some)) for name, some in known.items() if some])

    def _write(self, record: dict[str, Any], values: list[tuple[str, float | None]]) -> None:
        known = [self.summary.Value(tag=name, simple_value=value) for name, value in values if value is not None]
        at = record.get("time") or 0.0
        self.writer.add_event(self.event(wall_time=at, step=record["step"], summary=self.summary(value=known)))


class Exporter:
    """An `Exporter` writes the status of a run to the file `path` as Prometheus metrics, and replaces the file for each
    new status.

    Raises:
        DataError: prometheus-client is not installed, or `path` cannot be written or ends in something else than .prom.
    """

    def __init__(self, path: Path):
        if path.suffix != ".prom":
            raise DataError(
                f"--prometheus {path}: the file must end in .prom, because node_exporter reads only such files"
            )
        try:
            import prometheus_client
        except ImportError:
            remedy = "pip install prometheus-client, or pip install -e '.[metrics]' in the checkout"
            raise DataError(f"--prometheus {path}: prometheus-client is not installed ({remedy})") from None
        check_writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.client = path, prometheus_client

    def write(self, status: Status) -> None:
        """Replace the file of Prometheus metrics by the values of a new status; unknown values are left out."""
        registry: Any = self.client.CollectorRegistry()

        def gauge(name: str, words: str, value: float, **labels: str) -> None:
            made = self.client.Gauge(f"tc3_run_{name}", words, ["run", *labels], registry=registry)
            made.labels(status.run, *labels.values()).set(value)

        for name, words in GAUGES.items():
            if (value := getattr(status, name)) is not None:
                gauge(name, words, value)
        gauge("state", "1 for the current state of the run", 1, state=status.state)
        if status.phase:
            gauge("phase", "1 for the current phase of the workers", 1, phase=status.phase)
        if status.probed_ranks:
            gauge("slow_ranks", "Ranks that are slower than their peers", len(status.slow_ranks))
        if status.fullest_expert is not None:
            gauge("router_alarms", "Alarms about routers that are still active", len(status.router_alarms))
        try:
            # again, because it may be in the folder of the run, which was removed and begun anew
            self.path.parent.mkdir(exist_ok=True)
            self.client.write_to_textfile(str(self.path), registry)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"--prometheus {self.path}: this path cannot be written ({reason})") from None


@click.group("runs", context_settings={"help_option_names": ["-h", "--help"]})
def runs() -> None:
    """Report how runs spent their time and why they failed, or follow a run that is in progress."""


@runs.command(
    "report", short_help="Report goodput, lost time, failures and their causes, checkpoint saves and loss spikes."
)
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="Write the report as an HTML page with tables and pictures to this file.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw a timeline of the runs, including every restart after a failure, to this file (.svg or .png).",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    metavar="BUNDLE.zip",
    help="Also compare the run's median step time with the step time that is predicted for the cluster that tc3 "
    "firsthour measured.",
)
def report_command(
    folders: tuple[Path, ...], as_json: bool, html: Path | None, picture: Path | None, measured: Path | None
) -> None:
    """Report how much time runs spent on each kind of work, from the records in the runs' folders.

    RUN is the folder of a run of tc3 train or tc3 agent, whether the run has ended or not; several runs are shown side
    by side. The report says "unknown" for values that a run's records do not contain.
    """
    from rich.console import Console

    from tools.runs.render import print_text
    from tools.runs.study import content, studies

    if picture:
        check_ending(picture)
        if picture.name == CURVE and is_of_run(picture.parent / "recipe.yaml"):
            raise DataError(
                f"--picture {picture}: this file is the loss curve of a run and would be overwritten; choose another "
                "name"
            )
    if html:
        check_page(html)
    found = _beside(folders, measured) if measured else studies(folders)
    if picture:
        from tools.runs.render import draw

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


def _beside(folders: tuple[Path, ...], measured: Path) -> list[Study]:
    """Return the studies of runs with the steps predicted for a measured cluster."""
    from tools.measured import origin, read_bundle
    from tools.runs.measured import beside, hardware_of
    from tools.runs.study import studies

    bundle = read_bundle(measured)
    hardware = hardware_of(bundle)
    click.echo(origin(bundle), err=True)
    return [beside(one, hardware) for one in studies(folders)]


@runs.command("watch", short_help="Show a run's phase, step, loss, speed, goodput and failures while it trains.")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print the status once and exit.")
@click.option(
    "--every",
    type=Number("pause"),
    default=2.0,
    show_default=True,
    help="Wait this many seconds between two refreshes.",
)
@click.option(
    "--prometheus", type=click.Path(path_type=Path), help="Also write the status to this file (*.prom) for Prometheus."
)
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard scalars to RUN/tensorboard.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each refresh on stdout.")
def watch_command(
    folder: Path, once: bool, every: float, prometheus: Path | None, tensorboard: bool, as_json: bool
) -> None:
    """Show the progress of a run, on any machine that can read the run's folder.

    Exit codes: 0 if the run is done (with --once also if the run goes on), 1 if the run failed, was given up or was
    left (with --once also if it is unfinished), 2 for a wrong input, 130 after Ctrl-C.
    """
    import sys

    from rich.console import Console

    from tools.runs.readings import check_folder
    from tools.runs.study import GONE
    from tools.runs.watch import BAD, Watch

    check_folder(folder)
    exporter = Exporter(prometheus) if prometheus else None
    scalars = Scalars(folder) if tensorboard else None
    watch = Watch(folder, scalars.add, scalars.add_routers) if scalars else Watch(folder)

    inside = prometheus is not None and real_path(prometheus).is_relative_to(real_path(folder))
    seen = time.monotonic()  # when the folder was last there

    def look() -> Status:
        nonlocal seen
        try:
            check_folder(folder)
            seen = time.monotonic()
        except DataError:
            if time.monotonic() - seen > QUIET:
                raise DataError(
                    f"{folder}: the run was removed, or its disk is gone: for {duration(QUIET)} this folder has held "
                    "no file of a run"
                ) from None
        status = watch.look()
        if exporter and not (inside and status.state == GONE):  # a new run would find a folder that is not a run's
            exporter.write(status)
        if scalars:
            scalars.writer.flush()
        return status

    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        if once:
            status = look()
            console.print(json_line(status) if as_json else table(status))
            code = int(status.state in BAD)
        else:
            code = follow(look, console, every, as_json)
    except KeyboardInterrupt:  # how one leaves: no words
        code = 130
    finally:
        if scalars:
            scalars.writer.close()
    sys.exit(code)
