"""This module shows the progress of a run of `tc3 train`, and prints at its end the results and how to continue."""

from __future__ import annotations

import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from launch.resume.checkpoints import say_reading
from launch.resume.data import all_steps, most_steps
from launch.run.effective import beside_steps
from launch.run.failure import Failure
from launch.run.supervise import Outcome
from plugins.errors import CheckpointError, DataError
from tools.checkpoint.scan import CheckpointInfo, iterations, newest_saved, scan_checkpoints
from tools.files.figure import new_figure, save_figure
from tools.recipe.load import Recipe
from tools.recipe.override import apart
from tools.recipe.view import View
from tools.runs.attempts import STOPPED
from tools.runs.readings import (
    CURVE,
    Evaluation,
    Follower,
    Readings,
    loss_in_words,
    perplexity,
    read_evaluations,
    read_metrics,
)
from tools.schema.stages import loss_rank
from tools.schema.versions import unverified_words

COMPILING = "compiling…"  # until the first step is done
LOAD_PATH = "checkpoint.load_path"  # the key of the weights that a run begins with
SAVE_PATH = "checkpoint.save_path"
QUIET = 60.0  # seconds without a line, at most
ResumeCommand = Callable[[Path | None, str, int | None], list[str]]


class TrainingProgress:
    """A `TrainingProgress` shows the user the steps that a run appends to its file `RUN/metrics/rank_N.jsonl`. Use the
    object as a context manager, and call its method `tick` a few times a second.
    """

    def __init__(self, run_dir: Path, console: Console, rank: int = 0):
        """Show what rank `rank` of the run writes from now on (not the steps before a resume) on `console`."""
        self.console = console
        self.readings = Readings()
        self.follower = Follower(run_dir / "metrics" / f"rank_{rank}.jsonl", newest=0)
        self.started = time.monotonic()
        self.shown = -1  # tenths of the run printed so far
        self.said = self.started  # when the last line was printed
        first = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        last = (TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn())
        self.bar = Progress(*first, *last, console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> TrainingProgress:
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(COMPILING, total=None, note="")
        else:
            self.console.print(COMPILING)
        return self

    def __exit__(self, *error: object) -> None:
        self.tick()
        if self.bar:
            self.bar.stop()

    def tick(self) -> None:
        """Read the steps that were recorded since the last call, and show them to the user."""
        for record in self.follower.new_records():
            self.readings.add(record)
            if not self.bar and "step" in record:
                self._print_tenth(record)
        if not self.bar and time.monotonic() - self.said >= QUIET:
            self._say_something()
        if self.bar and self.readings.steps:
            last, total = self.readings.last, self.readings.total_steps
            self.bar.update(
                self.task, description="training", completed=last["step"], total=total, note=self._note(last)
            )

    def _say_something(self) -> None:
        """Print a line that says that the run goes on, or for how long it has trained no step."""
        if self.readings.steps:
            self._print_step(self.readings.last)
        else:
            self._print(f"{COMPILING} {time.monotonic() - self.started:.0f} s")

    def _print_tenth(self, record: dict[str, Any]) -> None:
        """Print one line for the first step, for each tenth of the run, and for the last step."""
        total = self.readings.total_steps
        tenth = 10 * record["step"] // total if total else record["step"] // 10
        if tenth > self.shown:
            first = f"  (first step after {time.monotonic() - self.started:.0f} s)" if self.shown < 0 else ""
            self.shown = tenth
            self._print_step(record, first)

    def _print_step(self, record: dict[str, Any], more: str = "") -> None:
        of = f"/{self.readings.total_steps}" if self.readings.total_steps else ""
        self._print(f"step {record['step']}{of}  {self._note(record)}{more}")

    def _print(self, line: str) -> None:
        self.said = time.monotonic()
        self.console.print(line, highlight=False)

    def _note(self, record: dict[str, Any]) -> str:
        speed = self.readings.tokens_per_second()
        return f"loss {record['loss']:.4f}" + (f"  {speed:,.0f} tokens/s (median)" if speed else "")


def draw_loss_curve(
    steps: Mapping[int, Mapping[str, Any]], out_path: Path, evaluations: Mapping[float, Evaluation]
) -> Path:
    """Draw the training loss in `steps` (step -> record of the step) as a curve, and the held-out losses in
    `evaluations` (step -> losses) as points; several held-out corpora have separate lines.

    Matplotlib is imported only here; its Agg backend needs no display. The function returns `out_path`.
    """
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    _draw_curve(axes, steps, "loss", "training loss", linewidth=1.2)
    if evaluations:  # they are language-model losses: show what compares with them
        _draw_curve(axes, steps, "lm_loss", "training, language model only", linewidth=0.8)
        corpora = dict.fromkeys(name for step in sorted(evaluations) for name in evaluations[step].corpora)
        if len(corpora) < 2:
            points, losses = sorted(evaluations), [evaluations[step].loss for step in sorted(evaluations)]
            axes.plot(points, losses, "o--", color="black", markersize=4, label="held out, language model")
        for name in corpora if len(corpora) > 1 else []:
            points = [step for step in sorted(evaluations) if name in evaluations[step].corpora]
            losses = [evaluations[step].corpora[name] for step in points]
            axes.plot(points, losses, "o--", markersize=4, label=f"held out, {name}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, out_path)


def _draw_curve(axes: Any, steps: Mapping[int, Mapping[str, Any]], key: str, label: str, linewidth: float) -> None:
    """Draw one curve over the steps that have `key`; draw nothing if no step has it."""
    numbers = [step for step in sorted(steps) if steps[step].get(key) is not None]
    if numbers:
        axes.plot(numbers, [steps[step][key] for step in numbers], linewidth=linewidth, label=label)


def summarize(
    run_dir: Path,
    recipe: Recipe,
    outcome: Outcome,
    resume_command: ResumeCommand,
    wanted: int | None = None,
    checksums: bool = True,
) -> dict[str, Any]:
    """Return the results of an effective recipe's run as plain values, fit for JSON, and draw the loss curve into
    `run_dir`.

    Keys: exit_code, error, log, run_dir, steps, total_steps, first_loss, final_loss, first_held_out_loss,
    final_held_out_loss (nats per token), final_perplexity, final_held_out_step (the step of the last evaluation, which
    is not the last step where an evaluation was interrupted), held_out_corpora (name -> the same losses of each corpus
    of a list), tokens_per_second, checkpoint, checkpoint_step, checkpoint_error (why the newest checkpoint is unknown,
    if a file cannot be read), picture, next_command. Values that do not exist are None, and so are losses that are not
    finite. `resume_command` gives the command that resumes, or that starts a new run from a checkpoint's weights; it
    takes one more override and a number of steps. See also `_next_command`. `checksums` says whether the newest
    checkpoint is read completely, to verify that it is complete.
    """
    readings = _steps(run_dir, recipe)
    held_out = read_evaluations(run_dir)
    best, unread = _newest(Path(recipe["checkpoint"]["save_path"]), checksums)
    steps, points = sorted(readings.steps), [held_out[step] for step in sorted(held_out)]
    failure = outcome.failure
    if outcome.code:
        more = resume_command(None, gentler(recipe) if failure and failure.stopped else "", wanted)
    elif best:
        more = _next_command(recipe, readings.total_steps or all_steps(recipe), best.path, resume_command)
    else:
        more = []  # nothing was saved to go on from
    return {
        "exit_code": outcome.code,
        "error": failure.message if failure else None,
        "log": str(failure.log) if failure else None,
        "run_dir": str(run_dir),
        "steps": steps[-1] if steps else 0,
        "total_steps": readings.total_steps,
        "first_loss": _finite(readings.steps[steps[0]]["loss"]) if steps else None,
        "final_loss": _finite(readings.last.get("loss")),
        **_evaluated([one.loss for one in points]),
        "final_held_out_step": points[-1].step if points else None,
        "held_out_corpora": {
            name: _evaluated([one.corpora[name] for one in points if name in one.corpora])
            for name in (points[-1].corpora if points else {})
        },
        "tokens_per_second": readings.tokens_per_second(),
        "checkpoint": str(best.path) if best else None,
        "checkpoint_step": best.step if best else None,
        "checkpoint_error": unread,
        "picture": _drawn(readings.steps, run_dir / CURVE, held_out) if steps else None,
        "next_command": shlex.join(more) or None,
    }


def _steps(run_dir: Path, recipe: Recipe) -> Readings:
    return read_metrics(run_dir / "metrics" / f"rank_{loss_rank(View(recipe))}.jsonl")


def _newest(saves: Path, checksums: bool) -> tuple[CheckpointInfo | None, str | None]:
    """Return the newest complete checkpoint, and why it is unknown if a file of a checkpoint cannot be read; this is
    printed, because how the run ended is still to be told.
    """
    try:
        with suppress(FileNotFoundError):
            os.listdir(saves)  # a search of a folder that cannot be read finds nothing, and raises no error
        if checksums:
            say_reading(next(iter(iterations(saves)), None))
        return scan_checkpoints(saves)[0] if checksums else newest_saved(saves), None
    except CheckpointError as error:
        unread = str(error)
    except OSError as error:
        unread = f"{error.filename or saves}: this path cannot be read ({error.strerror})"
    click.echo(f"tc3: {unread}", err=True)
    return None, unread


def _drawn(steps: Mapping[int, Mapping[str, Any]], path: Path, evaluations: Mapping[float, Evaluation]) -> str | None:
    """Draw the loss curve and return its path. If it cannot be written, as on the full disk that ended the run, print
    why and return None, because how the run ended is still to be told.
    """
    try:
        return str(draw_loss_curve(steps, path, evaluations))
    except DataError as error:
        click.echo(f"tc3: {error}", err=True)
        return None


def _evaluated(losses: Sequence[float]) -> dict[str, float | None]:
    """Return the summary's values about the held-out losses of all evaluations."""
    return {
        "first_held_out_loss": _finite(losses[0]) if losses else None,
        "final_held_out_loss": _finite(losses[-1]) if losses else None,
        "final_perplexity": _finite(perplexity(losses[-1])) if losses else None,
    }


def _finite(value: float | None) -> float | None:
    """Return the number; None for NaN and infinity, which JSON does not have."""
    return value if value is None or math.isfinite(value) else None


def words_to_go_on(
    begin: Sequence[str],
    overrides: tuple[str, ...],
    run_dir: Path,
    named: bool,
    recipe: Recipe,
    weights: Path | None,
    change: str,
    steps: int | None = None,
) -> list[str]:
    """Return the command that continues a run, or that starts a new run from `weights`. If `steps` is not None, the
    command has the option `--steps` and no override that contradicts this option.

    Args:
        begin: the command's first words.
        named: whether the command must name `run_dir`, because it is not the default folder.
        recipe: the run's effective recipe.
        change: an override that replaces the override of the same key in `overrides`; may be empty.
    """
    overrides = tuple(apart(beside_steps(recipe, steps, overrides), change.partition("=")[0], LOAD_PATH, SAVE_PATH))
    if change:
        key = change.partition("=")[0]
        overrides = (*(each for each in overrides if each.partition("=")[0].strip() != key), change)
    place = ["--resume", "auto", *["--run-dir", str(run_dir)] * named]
    if weights:
        own = (_saving_elsewhere(each) for each in overrides if each.partition("=")[0].strip() != LOAD_PATH)
        place, overrides = ["--run-dir", f"{run_dir}-next"], (*own, f"{LOAD_PATH}={weights}")
    sets = (word for override in overrides for word in ("--set", override))
    return [*begin, *place, *sets, *unverified_words(), *(["--steps", str(steps)] if steps else [])]


def _saving_elsewhere(override: str) -> str:
    """Return an override for a new run that gives it another folder for checkpoints, because a run that would save
    among the checkpoints of this run is refused.
    """
    key, _, folder = override.partition("=")
    name = folder.strip().strip("'\"")
    if key.strip() != SAVE_PATH or name in ("", "null", "~"):
        return override
    return f"{SAVE_PATH}={Path(name)}-next"


def _next_command(recipe: Recipe, total: int, weights: Path, resume_command: ResumeCommand) -> list[str]:
    """Return the command that continues a finished run: to twice its steps, or to as many steps as keep its data's
    order.

    After the last such step the command starts a new run from the weights, because GPTDataset would shuffle trained
    samples anew.
    """
    most = most_steps(recipe, 2 * total)
    if most is not None and most <= total:
        return resume_command(weights, "", total or None)
    return resume_command(None, "", (2 * total if most is None else most) or None)


def gentler(recipe: Recipe) -> str:
    """Return an override that lowers the learning rate, for example to half of it; the override is empty if the recipe
    has no learning rate.
    """
    rate = View(recipe).get(("lr_schedule", "learning_rate"))
    return f"lr_schedule.learning_rate={rate / 2:g}" if isinstance(rate, float | int) else ""


def print_summary(summary: dict[str, Any]) -> None:
    """Print on stdout how a successful run has ended."""
    rows = [("steps", f"{summary['steps']}")]
    first, final = summary["first_loss"], summary["final_loss"]
    if summary["steps"]:
        rows.append(("training loss", f"{_loss(first)} -> {_loss(final)}"))
    first, final = summary["first_held_out_loss"], summary["final_held_out_loss"]
    if first is not None or final is not None:
        step, steps = summary["final_held_out_step"], summary["steps"]
        until = f"; last evaluated after step {step:,} of {steps:,}" if step < steps else ""
        rows.append(("held-out loss", f"{_fall(summary)} (on text never trained on{until})"))
    rows += [("", f"{_fall(corpus)} ({name})") for name, corpus in summary["held_out_corpora"].items()]
    if summary["tokens_per_second"]:
        rows.append(("speed", f"{summary['tokens_per_second']:,.0f} tokens/s of all workers (median step)"))
    unread = "unknown, because a checkpoint cannot be read" if summary["checkpoint_error"] else "none was saved"
    rows.append(("checkpoint", summary["checkpoint"] or unread))
    rows.append(
        ("loss curve", summary["picture"] or ("it could not be written" if summary["steps"] else "no step was made"))
    )
    if summary["next_command"]:
        rows.append(("go on with", summary["next_command"]))
    for name, text in rows:
        click.echo(f"{name + ':' * bool(name):<15}{text}")


def _fall(evaluated: Mapping[str, Any]) -> str:
    """Return in words the first and the last loss of the run, and the perplexity at its end."""
    return f"{_loss(evaluated['first_held_out_loss'])} -> {loss_in_words(evaluated['final_held_out_loss'])}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def complain(failure: Failure, where: str = "") -> None:
    """Print on stderr in one line what failed and `where`, then what to do, the log file, and its most informative
    lines.
    """
    if failure.user_error:
        click.echo(f"tc3: {failure.message}", err=True)
        return
    begin = STOPPED if failure.stopped else "tc3: "
    error = f": {failure.error}" if failure.error else ""
    click.echo(f"{begin}{failure.message}{where}{error}", err=True)
    if failure.mend:
        click.echo(f"What to do: {failure.mend}", err=True)
    click.echo(f"Log: {failure.log}", err=True)
    for line in failure.lines if not failure.stopped and failure.lines != (failure.error,) else ():
        click.echo(f"    {line}", err=True)


def print_failure(run_dir: Path, recipe: Recipe, outcome: Outcome) -> None:
    """Print on stderr why an effective recipe's run ended early: what failed, where, and what the user can do.

    Call this function before `summarize`, which may read a checkpoint of terabytes.
    """
    failure = outcome.failure
    if failure is None:
        name = signal.Signals(outcome.code - 128).name
        click.echo(f"tc3: interrupted ({name}); all workers have ended. Logs: {run_dir / 'logs'}", err=True)
    else:
        last = max(_steps(run_dir, recipe).steps, default=0)
        after = f" after step {last}" if last else " before the first step"
        complain(failure, "" if failure.stopped or failure.rank is None else after)
    if outcome.left:
        click.echo(f"tc3: these processes did not end: {' '.join(map(str, outcome.left))}", err=True)


def print_next_command(summary: dict[str, Any], stopped: bool) -> None:
    """Print on stderr the newest checkpoint of a run that ended early, and the command that goes on from it; if there
    is no checkpoint, and a loss that was not finite `stopped` the run, print the command that starts over.
    """
    if summary["checkpoint"]:
        click.echo(f"Checkpoint of step {summary['checkpoint_step']}: {summary['checkpoint']}", err=True)
        click.echo(f"Go on with: {summary['next_command']}", err=True)
    elif summary["checkpoint_error"]:
        click.echo(f"Go on, as soon as the checkpoints can be read, with: {summary['next_command']}", err=True)
    elif stopped:
        click.echo(f"Start over with: {summary['next_command']}", err=True)
