"""This module shows the report on a run's expert loads as a picture, as JSON for programs, as text for people, and as
an HTML page.

`draw` draws loads of experts over time, loads of devices, and max/mean by policy. `content` returns the JSON object,
`print_text` prints the tables in a terminal, and `page` returns an HTML file that needs no other files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from plugins.expert_balance.plan import imbalance
from tools.experts.study import NONE, RECORDED, Policy, Study
from tools.files import page as markup
from tools.files.figure import new_figure, save_figure, svg_text

WIDTH = 110  # of the tables, also where nobody looks at a terminal
SHOWN = 12  # layers in the table; --json has all
LAYER_HEADS = ("layer", "busiest expert", "", "max/mean", "95 % up to", "worst step", "micro-batch", "bound")
POLICY_HEADS = ("policy", "every", "max/mean", "worst", "moves", "copies", "plan", "waits a step", "saves")
NOTES = (
    "max/mean: the tokens of an EP group's fullest device, for which all others wait, divided by the devices' mean",
    "policies plan with the loads up to the present step and are judged by the steps after the first plan",
    "moves: the experts of a layer that change device at a plan; plan: the time to plan all layers on this machine",
    "copies: the mean number of copies of a layer's experts, whose traffic in each micro-batch the seconds leave out",
)
_HOTTEST = 3.0  # times the mean, at the end of the colour scale
_FEW_LAYERS = 4  # layers that get a panel of their own, expert by step
_WINDOWS = 4  # of time, where layers are too many for that: layer by expert
_POLICY_COLOURS = ("0.55", "black", "tab:orange", "tab:blue", "tab:cyan", "tab:green", "tab:red", "tab:purple")


def draw(found: Study, path: Path) -> Path:
    """Draw the report on a run's expert loads to the .svg or .png file `path`; return `path`.

    Raises:
        DataError: as in `save_figure`.
    """
    return save_figure(_figure(found), path)


def _figure(found: Study) -> Any:
    figure = new_figure(14, 8.5)
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    _draw_heat(above, found)
    left, right = below.subplots(1, 2, width_ratios=(1.5, 1))
    _draw_policies(left, found)
    _draw_devices(right, found)
    return figure


def _draw_heat(figure: Any, found: Study) -> None:
    """Draw the tokens of each expert divided by the mean of its layer."""
    records = found.source.records
    layers = len(records[0].layers)
    shares = found.tokens / np.maximum(found.tokens.mean(2, keepdims=True), 1e-30)
    if layers <= _FEW_LAYERS:
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


def _image(axes: Any, values: np.ndarray, extent: tuple[float, ...], **colours: Any) -> Any:
    scale = {"vmin": 0, "vmax": _HOTTEST, "cmap": "magma", **colours}
    return axes.imshow(values, aspect="auto", extent=extent, interpolation="nearest", **scale)


def _layer_ticks(axes: Any, found: Study) -> None:
    numbers = found.source.records[0].layers
    at = np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), 9)).round().astype(int))
    axes.set_yticks(at, [str(numbers[one]) for one in at])
    axes.set_ylabel("layer")


def _draw_policies(axes: Any, found: Study) -> None:
    """Draw the max/mean of each step as the mean over the layers, slightly smoothed if there are many steps."""
    steps = np.array([record.step for record in found.source.records])
    width = max(1, len(steps) // 150)
    for policy, colour in zip(found.policies, _POLICY_COLOURS, strict=False):
        ratios = policy.ratios.mean(1)
        if width > 1:
            ratios = np.convolve(ratios, np.full(width, 1 / width), "valid")
        name = policy.name + (f", every {policy.every:,}" if policy.every and policy.name != NONE else "")
        wide = 3 if policy.name == RECORDED else 1.4
        axes.plot(steps[len(steps) - len(ratios) :], ratios, color=colour, label=name, linewidth=wide)
    axes.set_xlabel("step" + (f" (mean of {width})" if width > 1 else ""))
    axes.set_ylabel("fullest device / mean")
    axes.set_title("what all devices wait for, by policy (replayed)", loc="left", fontsize="medium")
    axes.set_ylim(bottom=1)
    axes.legend(fontsize="small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _draw_devices(axes: Any, found: Study) -> None:
    """Draw the load of each device divided by the mean, for all steps as they were recorded."""
    layers, devices = found.devices.shape
    far = max(0.02, float(np.abs(found.devices - 1).max()))
    extent = (-0.5, devices - 0.5, layers - 0.5, -0.5)
    image = _image(axes, found.devices, extent, cmap="RdBu_r", vmin=1 - far, vmax=1 + far)
    _layer_ticks(axes, found)
    axes.set_xlabel("device of the EP group")
    axes.set_title("load of each device over the mean, as recorded", loc="left", fontsize="medium")
    if devices <= 16:
        axes.set_xticks(range(devices))
    axes.figure.colorbar(image, ax=axes, pad=0.02)


def content(found: Study) -> dict[str, Any]:
    """Return the report on a run's expert loads as a dictionary for JSON; every ratio is the maximum load divided by
    the mean load (max/mean).
    """
    records, seconds = found.source.records, found.seconds
    known = None if isinstance(seconds, str) else seconds
    return {
        "log": str(found.source.file),
        "steps": [records[0].step, records[-1].step],
        "recorded_steps": len(records),
        "experts": int(found.tokens.shape[2]),
        "devices": records[0].devices,
        "every": found.every,
        "judged_from_step": records[found.first].step,
        "layers": [_layer_content(found, at) for at in range(len(records[0].layers))],
        "seconds": {
            "modelled": True,
            "cluster": known and known.cluster,
            "even_step": known and known.even,
            "unknown": None if known else seconds,
            "error": known and known.error,
        },
        "policies": [_policy_content(one, found) for one in found.policies],
        "replay_differs_at": found.differs,
    }


def _layer_content(found: Study, at: int) -> dict[str, Any]:
    ratios, worst = found.ratios[:, at], [record.micro_batch[at] for record in found.source.records]
    known = [ratio for ratio in worst if ratio is not None]
    return {
        "layer": found.source.records[0].layers[at],
        "busiest_expert": {"expert": int(found.experts[at].argmax()), "over_mean": float(found.experts[at].max())},
        "busiest_device": int(found.devices[at].argmax()),
        "max_over_mean": float(ratios.mean()),
        "p95": float(np.quantile(ratios, 0.95)),
        "worst": float(ratios.max()),
        "worst_step": found.source.records[int(ratios.argmax())].step,
        "worst_micro_batch": max(known) if known else None,
        "bound": float(found.bounds[at]),
        "devices": found.devices[at].tolist(),
    }


def _policy_content(policy: Policy, found: Study) -> dict[str, Any]:
    after, stay = policy.ratios[found.first :], found.policies[0]
    return {
        "policy": policy.name,
        "every": policy.every,
        "max_over_mean": float(after.mean()),
        "worst": float(after.max()),
        "by_step": policy.ratios.mean(1).tolist(),
        "plans": policy.plans,
        "moves": int(policy.moves.sum()),
        "moves_of_a_plan_and_layer": policy.moves_of_a_plan(),
        "copies_of_a_layer": policy.copies,
        "plan_seconds": policy.plan_s if policy.plans else None,
        "measured_move_seconds": policy.move_s,
        "waits_seconds": policy.waits,
        "saves_seconds": None if policy.waits is None or stay.waits is None else stay.waits - policy.waits,
    }


def layer_rows(found: Study) -> list[list[str]]:
    """Return a table row for each layer with the columns of `LAYER_HEADS`; the layers with the most uneven loads come
    first.
    """
    rows = sorted(content(found)["layers"], key=lambda row: -row["max_over_mean"])
    return [
        [
            str(row["layer"]),
            f"{row['busiest_expert']['over_mean']:.2f} x mean",
            f"(expert {row['busiest_expert']['expert']})",
            f"{row['max_over_mean']:.3f}",
            f"{row['p95']:.3f}",
            f"{row['worst']:.3f} (step {row['worst_step']})",
            "-" if row["worst_micro_batch"] is None else f"{row['worst_micro_batch']:.3f}",
            f"{row['bound']:.3f}",
        ]
        for row in rows
    ]


def policy_rows(found: Study) -> list[list[str]]:
    """Return a table row for each policy of moving experts, with the columns of `POLICY_HEADS`."""
    rows = []
    for row in (_policy_content(one, found) for one in found.policies):
        waits, saves = row["waits_seconds"], row["saves_seconds"]
        rows.append([
            row["policy"],
            f"{row['every']:,}" if row["every"] else "-",
            f"{row['max_over_mean']:.3f}",
            f"{row['worst']:.3f}",
            f"{row['moves_of_a_plan_and_layer']:.1f}" if row["plans"] else "-",
            f"{row['copies_of_a_layer']:.1f}" if row["copies_of_a_layer"] else "-",
            f"{1e3 * row['plan_seconds']:.1f} ms" if row["plans"] else "-",
            "unknown" if waits is None else f"{waits:.2f} s",
            "-" if saves is None or row["policy"] == NONE else f"{saves:.2f} s",
        ])  # fmt: skip
    return rows


def head(found: Study) -> str:
    """Return one line that says which steps, layers and experts the log of expert loads covers."""
    records = found.source.records
    _, layers, experts = found.tokens.shape
    return (
        f"{len(records):,} steps ({records[0].step:,} to {records[-1].step:,}), {layers} MoE layers, {experts} experts "
        f"on {records[0].devices} devices, {found.tokens.sum(2).mean():,.0f} tokens of a layer and step"
    )


def notes(found: Study) -> list[str]:
    """Return lines that list the data and the assumptions behind the report on a run's expert loads."""
    lines, seconds = list(NOTES), found.seconds
    lines.append("bound: the best possible placement for the sum of all steps; micro-batch: the worst, if recorded")
    if isinstance(seconds, str):
        lines.append(f"seconds: unknown: {seconds}")
    else:
        lines.append(
            f"seconds: modelled, not measured, on {seconds.cluster} by the estimator of tc3 search: each layer takes "
            f"the time of its fullest device; a step with equal loads takes {seconds.even:.2f} s, and the moves of "
            f"experts are not counted. Efficiencies are fitted to published runs whose skew is not known; step times "
            f"are {seconds.error}"
        )
    moved = next((one for one in found.policies if one.move_s is not None), None)
    if moved and moved.move_s is not None:
        lines.append(f"the run's own exchanges took {moved.move_s:.2f} s each, measured")
    if not found.first:
        lines.append(f"the log has no step after a plan: a log longer than {found.every} steps shows the gain of plans")
    if found.differs is not None:
        how = f"first differs at step {found.differs[0]}" if found.differs else "gives the recorded placements exactly"
        lines.append(f"a replay of the recipe's settings {how}")
    noise = counting_noise(found)
    lines.append(f"even a router that chooses experts at random would have a max/mean of {noise:.3f} in a step")
    return lines


def counting_noise(found: Study) -> float:
    """Return the max/mean of the devices' loads that chance causes under a uniform router, as the mean over 20 random
    (multinomial) draws of a step's tokens.
    """
    experts, devices = found.tokens.shape[2], found.source.records[0].devices
    tokens = int(found.tokens.sum(2).mean())
    draws = np.random.default_rng(0).multinomial(tokens, np.full(experts, 1 / experts), 20)
    return float(np.mean(imbalance(draws, np.tile(np.arange(experts), (20, 1)), devices)))


def print_text(found: Study, console: Console) -> None:
    """Print the report on a run's expert loads: a table of loads by layer, a table of results by policy of moving
    experts, and the assumptions.
    """
    console.width = max(console.width, WIDTH)
    console.print(f"{found.source.file}: {head(found)}")
    console.print()
    rows = layer_rows(found)
    console.print(_text_table(LAYER_HEADS, rows[:SHOWN]))
    if len(rows) > SHOWN:
        console.print(f"the {SHOWN} most uneven of {len(rows)} layers; --json has all")
    console.print()
    console.print(_text_table(POLICY_HEADS, policy_rows(found)))
    console.print()
    for note in notes(found):
        console.print(f"note: {note}")


def _text_table(heads: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for at, name in enumerate(heads):
        table.add_column(name, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def page(found: Study) -> str:
    """Return the text of the HTML file that shows the report on a run's expert loads."""
    body = [
        markup.text("Expert loads", "h1"),
        markup.text(f"{found.source.file}: {head(found)}"),
        svg_text(_figure(found)),
        markup.text("Policies, replayed", "h2"),
        markup.table(POLICY_HEADS, policy_rows(found), "numbers"),
        markup.text("Layers, the most uneven first", "h2"),
        markup.table(LAYER_HEADS, layer_rows(found), "numbers"),
        markup.text("What the numbers are", "h2"),
        markup.bullets(notes(found)),
    ]
    return markup.page(f"Expert loads of {found.source.file}", body)
