"""Draw a time line of memory: what is there all the time below, what waits above it, what a pass needs on top."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plugins.errors import DataError
from tools.estimate.memory.time_line import BUFFERS, KEPT, PARTS, WORKING, Owner, TimeLine
from tools.files.atomic import check_writable, write_atomically
from tools.files.figure import ENDINGS, new_figure, save_figure
from tools.hardware.units import GIB

FORMS = (*ENDINGS, ".json")
_NAMES = {
    "weights": "weights",
    "state": "optimizer state",
    "accumulated": "accumulated gradients",
    "gathered": "gathered weights",
    BUFFERS: "communication buffers",
}
_STATIC = ("#30506f", "#44739e", "#6f9bc4", "#a9c5df")
_MOST = 6  # bands of kept activations; the smallest share one
_KEPT = ("#8c4a1f", "#b8652b", "#d98847", "#eba96f", "#f3c79c", "#f8dfc6")
_LAST = {WORKING: "#5b8c5a", BUFFERS: "#a9c8a4"}


def check_form(path: Path) -> None:
    """Refuse a file that no line can be written to, before the long work that would end in it.

    Raises:
        DataError: the ending is none of `FORMS`, or the folder cannot be written to.
    """
    if path.suffix not in FORMS:
        raise DataError(f"--time-line {path}: want a file that ends in {', '.join(FORMS)}")
    check_writable(path)


def write_line(line: TimeLine, title: str, limit: float, path: Path) -> None:
    """Write a line as numbers (.json) or as a picture, whole or not at all; see `draw`."""
    if path.suffix == ".json":
        write_atomically(path, json.dumps(line.as_json()) + "\n")
    else:
        draw(line, title, limit, path)


def draw(line: TimeLine, title: str, limit: float, path: Path) -> Path:
    """Draw to an .svg or .png; returns `path`.

    Args:
        limit: bytes, 0 for none.

    Raises:
        DataError: as `tools.files.figure.save_figure`.
    """
    figure = new_figure(11, 4.6)
    axes = figure.subplots()
    bottom = np.zeros(len(line.labels))
    unit = 1000 if line.unit == "seconds" else 1
    for label, colour, sizes in bands(line):
        top = bottom + sizes / GIB
        axes.stairs(top, line.edges * unit, baseline=bottom, fill=True, color=colour, label=label)
        bottom = top
    axes.stairs(line.total / GIB, line.edges * unit, color="black", linewidth=0.6)
    at = line.fullest
    middle = unit * (line.edges[at] + line.edges[at + 1]) / 2
    axes.plot([middle], [line.peak / GIB], marker="v", color="black")
    axes.annotate(
        f"{line.peak / GIB:.1f} GiB in {line.labels[at]}",
        (middle, line.peak / GIB),
        textcoords="offset points",
        xytext=(0, 7),
        ha="center",
        fontsize="small",
    )
    if limit:
        axes.axhline(limit / GIB, color="black", linestyle="--", label=f"limit, {limit / GIB:.1f} GiB")
    axes.set_ylim(0, 1.12 * max(line.peak, limit) / GIB)
    axes.set_xlim(float(line.edges[0]) * unit, float(line.edges[-1]) * unit)
    axes.set_ylabel("GiB on a device")
    axes.set_xlabel("ms (modelled)" if line.unit == "seconds" else "passes of the stage in their order")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title(title, fontsize="medium", wrap=True)
    return save_figure(figure, path)


def bands(line: TimeLine) -> list[tuple[str, str, np.ndarray]]:
    """(label, colour, [moments] bytes) from the bottom: parts that stay, kept activations by module, the pass.

    Of the kept modules the largest have a band each and the rest share one, so that the bands add up to the line.
    """
    found = []
    for part, colour in zip([part for part in PARTS if part not in (KEPT, *_LAST)], _STATIC, strict=True):
        found.append((_NAMES[part], colour, _sum(line, [o for o in line.owners if o.part == part])))
    kept = sorted((o for o in line.owners if o.part == KEPT), key=lambda owner: -_sum(line, [owner]).max())
    groups = [(f"kept: {owner.module}", [owner]) for owner in kept[: _MOST - 1]]
    groups += [("kept: other modules", kept[_MOST - 1 :])] if len(kept) >= _MOST else []
    found += [(name, _KEPT[place], _sum(line, own)) for place, (name, own) in enumerate(groups)]
    for part, colour in _LAST.items():
        own = [owner for owner in line.owners if owner.part == part]
        label = _NAMES.get(part) or "in the pass" + "".join(f": {o.module}" for o in own[:1] if len(own) == 1)
        found.append((label, colour, _sum(line, own)))
    return [band for band in found if band[2].max() > 0]


def _sum(line: TimeLine, owners: Sequence[Owner]) -> np.ndarray:
    columns = [line.owners.index(owner) for owner in owners]
    return line.live[:, columns].sum(axis=1)
