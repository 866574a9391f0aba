"""Draw a study: loads of experts over time, of devices, and max/mean by policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tools.experts.study import NONE, RECORDED, Study
from tools.files.figure import new_figure, save_figure, svg_text

_HOTTEST = 3.0  # times the mean, at the end of the colour scale
_FEW = 4  # layers that get a panel of their own, expert by step
_WINDOWS = 4  # of time, where layers are too many for that: layer by expert
_COLOURS = ("0.55", "black", "tab:orange", "tab:blue", "tab:cyan", "tab:green")


def draw(found: Study, path: Path) -> Path:
    """Draw to an .svg or .png; returns `path`.

    Raises:
        DataError: as `save_figure`.
    """
    return save_figure(_figure(found), path)


def svg(found: Study) -> str:
    """The same as an element of a page."""
    return svg_text(_figure(found))


def _figure(found: Study) -> Any:
    figure = new_figure(14, 8.5)
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    _heat(above, found)
    left, right = below.subplots(1, 2, width_ratios=(1.5, 1))
    _policies(left, found)
    _devices(right, found)
    return figure


def _heat(figure: Any, found: Study) -> None:
    """Tokens of each expert over the mean of its layer."""
    records = found.source.records
    layers = len(records[0].layers)
    shares = found.tokens / np.maximum(found.tokens.mean(2, keepdims=True), 1e-30)
    if layers <= _FEW:
        axes = figure.subplots(1, layers, squeeze=False, sharey=True)[0]
        edges = [records[0].step - 0.5, records[-1].step + 0.5]
        for at, panel in enumerate(axes):
            image = _image(panel, shares[:, at].T, (*edges, shares.shape[2] - 0.5, -0.5))
            panel.set_title(f"layer {records[0].layers[at]}", loc="left", fontsize="medium")
            panel.set_xlabel("step")
        axes[0].set_ylabel("expert")
    else:
        windows = np.array_split(np.arange(len(records)), min(_WINDOWS, len(records)))
        axes = figure.subplots(1, len(windows), squeeze=False, sharey=True)[0]
        for window, panel in zip(windows, axes, strict=True):
            image = _image(panel, shares[window].mean(0), (-0.5, shares.shape[2] - 0.5, layers - 0.5, -0.5))
            first, last = records[window[0]].step, records[window[-1]].step
            panel.set_title(f"steps {first:,} to {last:,}", loc="left", fontsize="medium")
            panel.set_xlabel("expert")
        _layer_ticks(axes[0], found)
    figure.colorbar(image, ax=list(axes), label="tokens of the expert over the mean", extend="max", pad=0.01)


def _image(axes: Any, values: np.ndarray, extent: tuple[float, ...]) -> Any:
    return axes.imshow(
        values, aspect="auto", vmin=0, vmax=_HOTTEST, cmap="magma", extent=extent, interpolation="nearest"
    )


def _layer_ticks(axes: Any, found: Study) -> None:
    numbers = found.source.records[0].layers
    at = np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), 9)).round().astype(int))
    axes.set_yticks(at, [str(numbers[one]) for one in at])
    axes.set_ylabel("layer")


def _policies(axes: Any, found: Study) -> None:
    """max/mean of each step, the mean over layers; smoothed lightly where steps are many."""
    steps = np.array([record.step for record in found.source.records])
    width = max(1, len(steps) // 150)
    for policy, colour in zip(found.policies, _COLOURS, strict=False):
        ratios = policy.ratios.mean(1)
        if width > 1:
            ratios = np.convolve(ratios, np.full(width, 1 / width), "valid")
        name = policy.name + (f", every {policy.every:,}" if policy.every and policy.name != NONE else "")
        axes.plot(
            steps[len(steps) - len(ratios) :],
            ratios,
            color=colour,
            label=name,
            linewidth=3 if policy.name == RECORDED else 1.4,
        )
    axes.set_xlabel("step" + (f" (mean of {width})" if width > 1 else ""))
    axes.set_ylabel("fullest device / mean")
    axes.set_title("what all devices wait for, by policy (replayed)", loc="left", fontsize="medium")
    axes.set_ylim(bottom=1)
    axes.legend(fontsize="small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _devices(axes: Any, found: Study) -> None:
    """Load of each device over the mean, all steps as recorded."""
    layers, devices = found.devices.shape
    far = max(0.02, float(np.abs(found.devices - 1).max()))
    image = axes.imshow(
        found.devices,
        aspect="auto",
        cmap="RdBu_r",
        vmin=1 - far,
        vmax=1 + far,
        extent=(-0.5, devices - 0.5, layers - 0.5, -0.5),
        interpolation="nearest",
    )
    _layer_ticks(axes, found)
    axes.set_xlabel("device of the EP group")
    axes.set_title("load of each device over the mean, as recorded", loc="left", fontsize="medium")
    if devices <= 16:
        axes.set_xticks(range(devices))
    axes.figure.colorbar(image, ax=axes, pad=0.02)
