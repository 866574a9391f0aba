"""What `tc3 train` says at the end: numbers, files, and the command to go on with."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from launch.picture import draw_loss_curve
from launch.readings import read_held_out, read_metrics
from launch.supervise import Outcome
from tools.checkpoint.scan import scan_checkpoints


def summarize(
    run_dir: Path, checkpoints: Path, outcome: Outcome, again: Sequence[str], wanted: int | None = None
) -> dict[str, Any]:
    """The run in plain values, fit for JSON; draws the loss curve into `run_dir`.

    Keys: exit_code, error, log, run_dir, steps, total_steps, first_loss, final_loss, first_held_out_loss,
    final_held_out_loss (nats per token), tokens_per_second, checkpoint, checkpoint_step, picture, next_command.
    `again` is the command that resumes, to which a number of steps is added: the `wanted` one (the user's --steps)
    after an interruption, twice as many as there are after the end. Absent things are None.
    """
    metrics = run_dir / "metrics" / "rank_0.jsonl"
    readings, held_out = read_metrics(metrics), read_held_out(run_dir)
    best, _ = scan_checkpoints(checkpoints)
    steps, points = sorted(readings.steps), sorted(held_out)
    target = wanted if outcome.code else 2 * (readings.total_steps or 0)
    more = [*again, "--steps", str(target)] if target else list(again)
    failure = outcome.failure
    return {
        "exit_code": outcome.code,
        "error": failure.message if failure else None,
        "log": str(failure.log) if failure else None,
        "run_dir": str(run_dir),
        "steps": steps[-1] if steps else 0,
        "total_steps": readings.total_steps,
        "first_loss": readings.steps[steps[0]]["loss"] if steps else None,
        "final_loss": readings.last.get("loss"),
        "first_held_out_loss": held_out[points[0]] if points else None,
        "final_held_out_loss": held_out[points[-1]] if points else None,
        "tokens_per_second": readings.tokens_per_second(),
        "checkpoint": str(best.path) if best else None,
        "checkpoint_step": best.step if best else None,
        "picture": str(draw_loss_curve([metrics], run_dir / "loss.png", held_out)) if steps else None,
        "next_command": shlex.join(more),
    }


def print_summary(summary: dict[str, Any]) -> None:
    """The end of a run that went well, on stdout."""
    rows = [("steps", f"{summary['steps']}")]
    if summary["first_loss"] is not None:
        rows.append(("training loss", f"{summary['first_loss']:.4f} -> {summary['final_loss']:.4f}"))
    if summary["first_held_out_loss"] is not None:
        first, final = summary["first_held_out_loss"], summary["final_held_out_loss"]
        rows.append(("held-out loss", f"{first:.4f} -> {final:.4f} (on text never trained on)"))
    if summary["tokens_per_second"]:
        rows.append(("speed", f"{summary['tokens_per_second']:,.0f} tokens/s (median step)"))
    rows.append(("checkpoint", summary["checkpoint"] or "none was saved"))
    rows.append(("loss curve", summary["picture"] or "no step was made"))
    rows.append(("go on with", summary["next_command"]))
    for name, text in rows:
        click.echo(f"{name + ':':<15}{text}")


def print_failure(run_dir: Path, outcome: Outcome, summary: dict[str, Any]) -> None:
    """Why a run ended early, on stderr: the failing worker's last lines, where its log is, how to go on."""
    failure = outcome.failure
    if failure is None:
        name = signal.Signals(outcome.code - 128).name
        click.echo(f"tc3: interrupted ({name}); all workers have ended. Logs: {run_dir / 'logs'}", err=True)
    elif failure.user_error:
        click.echo(f"tc3: {failure.message}", err=True)
    else:
        for line in failure.lines:
            click.echo(line, err=True)
        click.echo(f"tc3: {failure.message}. Log: {failure.log}", err=True)
    if outcome.left:
        click.echo(f"tc3: these processes did not end: {' '.join(map(str, outcome.left))}", err=True)
    if summary["checkpoint"]:
        click.echo(f"Checkpoint of step {summary['checkpoint_step']}: {summary['checkpoint']}", err=True)
        click.echo(f"Go on with: {summary['next_command']}", err=True)
