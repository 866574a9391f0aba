"""Draw what fusing saves: HBM traffic of a micro-batch by part and pass, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.files.figure import new_figure, save_figure
from tools.hardware.units import GIB

_PASSES = ("forward", "recompute", "gradient")
_COLOURS = ("#4c78a8", "#f2a541", "#72b7b2")


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Draw to an .svg or .png; returns `path`."""
    rows = [row for row in report["parts"] if set(row["passes"]) & set(_PASSES)]
    figure = new_figure(9, 1.6 + 0.8 * max(len(rows), 1))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        for offset, key, hatch in ((-0.2, "bytes_before", ""), (0.2, "bytes_after", "//")):
            left = 0.0
            for name, colour in zip(_PASSES, _COLOURS, strict=True):
                size = row["passes"].get(name, {}).get(key, 0) / GIB
                axes.barh(place + offset, size, height=0.36, left=left, color=colour, hatch=hatch, edgecolor="white")
                left += size
            axes.text(left, place + offset, f" {left:.1f}", va="center", fontsize="small")
    axes.set_yticks(range(len(rows)), [row["part"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("GiB of HBM traffic of the operators that DVM takes, a micro-batch (modelled)")
    patches = [axes.barh(0, 0, color=colour, label=name) for name, colour in zip(_PASSES, _COLOURS, strict=True)]
    patches.append(axes.barh(0, 0, color="#bbbbbb", hatch="//", edgecolor="white", label="as kernels"))
    figure.legend(handles=patches, fontsize="small", loc="outside lower center", ncols=len(patches))
    axes.set_title(
        f"{report['recipe']}: level {report['level']}, each operator alone and as kernels", fontsize="medium"
    )
    return save_figure(figure, path)
