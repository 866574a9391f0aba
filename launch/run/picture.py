"""Draw a run's loss curve (PNG or SVG, by the file's ending)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.files.figure import new_figure, save_figure
from tools.runs.readings import read_metrics


def draw_loss_curve(
    metrics_files: Sequence[Path], out_path: Path, evaluations: Mapping[int, float] | None = None
) -> Path:
    """Draw loss over step, one line per metrics file, and `evaluations` (step -> held-out loss) as points.

    Matplotlib is imported only here; its Agg backend needs no display. Returns `out_path`.

    Raises:
        ValueError: no file holds a step.
    """
    curves = {file: read_metrics(file).steps for file in metrics_files}
    if not any(curves.values()):
        raise ValueError(f"no steps to draw in {', '.join(map(str, metrics_files)) or 'no files'}")
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    for file, steps in curves.items():
        name = "training" if len(curves) == 1 else f"{file.parent.parent.name}/{file.stem}"
        _draw(axes, steps, "loss", f"{name} loss", linewidth=1.2)
        if evaluations:  # they are language-model losses: show what compares with them
            _draw(axes, steps, "lm_loss", f"{name}, language model only", linewidth=0.8)
    if evaluations:
        points = sorted(evaluations)
        axes.plot(
            points,
            [evaluations[step] for step in points],
            "o--",
            color="black",
            markersize=4,
            label="held out, language model",
        )
    _dress(axes)
    return save_figure(figure, out_path)


def _dress(axes: Any) -> None:
    """Names, grid and legend."""
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw(axes: Any, steps: Mapping[int, Mapping[str, Any]], key: str, label: str, linewidth: float) -> None:
    """One curve over the steps that have `key`; none when no step has."""
    numbers = [step for step in sorted(steps) if steps[step].get(key) is not None]
    if numbers:
        axes.plot(numbers, [steps[step][key] for step in numbers], linewidth=linewidth, label=label)
