"""Draw who runs what when: a row for each stage, as in the papers' figures of pipeline schedules."""

from __future__ import annotations

from typing import Any

import numpy as np

from tools.pipeline.simulate import Simulation

NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
_PALETTES = {"F": "Blues", "B": "Greens", "W": "Oranges"}
_HEIGHT = 0.84


def draw_timeline(axes: Any, simulation: Simulation, numbers: bool = False) -> None:
    """Draw on matplotlib's `axes`: later chunks darker, the two operations of a pair above each other in a frame.

    `numbers` writes each operation's micro-batch in it.
    """
    from matplotlib.patches import Patch

    chunks = simulation.table.chunks
    colours = _colours(chunks)
    for stage, order in enumerate(simulation.orders):
        joined = simulation.table.tables[stage][:, -1]
        second = joined > 0
        paired = second | np.append(second[1:], False)
        starts, ends = simulation.starts[stage], simulation.ends[stage]
        for row, mask, bottom, height in (
            (stage, ~paired, -_HEIGHT / 2, _HEIGHT),
            (stage, paired & ~second, -_HEIGHT / 2, _HEIGHT / 2),
            (stage, second, 0.0, _HEIGHT / 2),
        ):
            at = np.flatnonzero(mask)
            spans = np.column_stack([starts, ends - starts])[at]
            shades = [colours[order[index].kind][order[index].chunk] for index in at]
            axes.broken_barh(spans, (row + bottom, height), facecolors=shades, edgecolor="white", linewidth=0.2)
            for index in at if numbers else ():
                _number(axes, simulation, stage, index, row + bottom + height / 2, height < _HEIGHT)
        frames = np.column_stack([starts, ends - starts])[second]
        axes.broken_barh(frames, (stage - _HEIGHT / 2, _HEIGHT), facecolors="none", edgecolor="black", linewidth=0.7)
    axes.set_yticks(range(len(simulation.orders)), [f"stage {stage}" for stage in range(len(simulation.orders))])
    axes.invert_yaxis()
    kinds = [kind for kind in NAMES if any(op.kind == kind for order in simulation.orders for op in order)]
    handles = [
        Patch(color=colours[kind][chunk], label=NAMES[kind] + (f", chunk {chunk}" if chunks > 1 else ""))
        for kind in kinds
        for chunk in range(chunks)
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=len(handles), fontsize="small")


def _colours(chunks: int) -> dict[str, np.ndarray]:
    """[chunks, 4] of each kind."""
    from matplotlib import colormaps

    shades = 0.35 + 0.5 * np.arange(chunks) / max(1, chunks - 1)
    return {kind: colormaps[palette](shades) for kind, palette in _PALETTES.items()}


def _number(axes: Any, simulation: Simulation, stage: int, index: int, height: float, small: bool) -> None:
    """The micro-batch of an operation, with its part where sequences are split, in the middle of its bar."""
    op = simulation.orders[stage][index]
    middle = (simulation.starts[stage][index] + simulation.ends[stage][index]) / 2
    text = f"{op.micro_batch}" + (f"{'abcdefgh'[op.part % 8]}" if simulation.table.parts > 1 else "")
    dark = op.chunk and op.kind != "W"
    axes.text(
        middle, height, text, ha="center", va="center", fontsize=5 if small else 6, color="white" if dark else "black"
    )
