"""Draw a dry run: memory of each stage by what holds it, and what a device of it sends over each kind of link."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.dryrun.traffic import BETWEEN, INSIDE
from tools.files.figure import new_figure, save_figure
from tools.hardware.units import GIB

_PARTS = {
    "weights": "weights",
    "state": "optimizer state",
    "accumulated": "accumulated gradients",
    "gathered": "gathered weights",
    "saved": "kept activations (estimate)",
    "working": "alive in a pass (estimate)",
}


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Draw to an .svg or .png, traffic below where the report has any; returns `path`."""
    sent = any(stage["traffic"] for stage in report["stages"])  # --quick gives none
    figure = new_figure(11, 6 if sent else 4)
    axes = figure.subplots(1 + sent, 1, sharex=True, squeeze=False)[:, 0]
    above = axes[0]
    stages = [stage["stage"] for stage in report["stages"]]
    bottom = [0.0] * len(stages)
    for part, label in _PARTS.items():
        sizes = [stage["memory"][part] / GIB for stage in report["stages"]]
        above.bar(stages, sizes, bottom=bottom, label=label)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    limit = report["stages"][0]["memory"]["limit"] / GIB
    if limit:
        above.axhline(limit, color="black", linestyle="--", label="limit")
    above.set_ylabel("GiB on a device")
    above.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    if sent:
        _draw_traffic(report, axes[1])
    axes[-1].set_xlabel("pipeline stage")
    axes[-1].set_xticks(stages)
    how = " (quick: put together from a layer of each kind)" if report["quick"] else ""
    figure.suptitle(f"{report['recipe']}: {report['devices']:,} virtual devices{how}", wrap=True)
    return save_figure(figure, path)


def _draw_traffic(report: Mapping[str, Any], axes: Any) -> None:
    """Two bars for each stage that was compiled."""
    stages = [stage["stage"] for stage in report["stages"]]
    for place, link in enumerate((INSIDE, BETWEEN)):
        sizes = [_sent(stage, link) / GIB for stage in report["stages"]]
        axes.bar([stage + 0.4 * place - 0.2 for stage in stages], sizes, width=0.4, label=link)
    axes.set_ylabel("GiB sent by a device\nin a step")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _sent(stage: Mapping[str, Any], link: str) -> int:
    return sum(line["bytes"] for line in stage["traffic"] if line["link"] == link)
