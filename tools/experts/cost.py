"""This module is the command `tc3 ep-report`: it predicts the cost of expert-parallel communication for a recipe.

The module `tools.layout.advise` computes the costs and the advice; all costs are modelled. `content` returns the advice
as JSON for programs, and `print_text` prints it as text for people. `draw` draws a layer's streams before and after it
is cut into chunks (report figure 5). The exit code is 0, or 2 for a wrong input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from rich.table import Table

from plugins.ep_overlap.plan import WHOLE, Passes
from plugins.ep_overlap.timeline import STREAMS, Timeline
from plugins.errors import RecipeError
from tools.check.check import new_errors
from tools.estimate.efficiency import cluster as find_cluster
from tools.estimate.efficiency import error_lines, known_error
from tools.estimate.from_recipe import from_recipe
from tools.estimate.loads import HELP
from tools.estimate.time_model import require_step_time
from tools.experts.what_if import lines, what_if, with_degree
from tools.files.figure import check_ending, new_figure, save_figure
from tools.hardware import DEFAULT_HARDWARE
from tools.layout.advise import Advice, ModeReport, advise, choices
from tools.layout.resolve import resolve
from tools.ranges import Number, overrides_option
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import AUTO, OFFSET, View, look

WIDTH = 110  # of the tables, also where nobody looks at a terminal: a cut number would be another number
NOTE = "modelled, not measured, by the estimator of tc3 search (tools/estimate)"
_STREAM_NAMES = {"compute": "compute", "inter": "between nodes", "intra": "inside a node"}
_SHARED_COLOUR = "0.75"  # grey: of the shared expert


def content(advices: Sequence[Advice], source: str, asked: str = "even") -> dict[str, Any]:
    """Return the costs of expert-parallel communication (bytes, seconds, shares) as values for JSON, in which each pair
    is [without overlap, with overlap].

    Args:
        asked: the text of `--loads`.
    """
    first = advices[0]
    return {
        "recipe": source,
        "modelled": True,
        "hardware": {name: getattr(first.hardware, name) for name in ("name", "device", "assumed")},
        "skew": first.skew,
        "loads": first.loads.as_json(),
        "known_step_errors": known.as_json() if (known := known_error(first.hardware)) else None,
        "reports": [
            {
                **_advice_content(advice),
                "what_if": [one.as_json() for one in what_if(advice, asked)] if _uneven(advice) else None,
            }
            for advice in advices
        ],
    }


def _uneven(advice: Advice) -> bool:
    return bool(advice.loads.ratios.max() > 1)


def _advice_content(advice: Advice) -> dict[str, Any]:
    parts = advice.best.cut.by_part
    written = advice.written
    return {
        "expert_parallel": advice.topology.ep,
        "nodes": advice.topology.nodes,
        "devices_per_node": advice.topology.devices_per_node,
        "devices": advice.config.devices,
        "rank_tokens": advice.config.batch * advice.config.rank_sequence,
        "plugins": advice.settings,
        "overlay": advice.overlay,
        "issue_stride": advice.stride,
        "as_1f1b": advice.as_1f1b or None,
        "why": advice.why,
        "break_even": asdict(advice.break_even),
        "recipe": {"mode": written.mode, "chunks": written.chunks, "step_seconds": written.step.total},
        "other_seconds": {part: seconds for part, seconds in parts.items() if part != "ep"},
        "modes": {mode: _mode_content(report) for mode, report in advice.modes.items()},
    }


def _mode_content(report: ModeReport) -> dict[str, Any]:
    same = ("inter_bytes", "intra_bytes", "ep_seconds", "share_of_step", "share_of_communication")
    return {
        **{name: getattr(report, name) for name in same},
        "exposed_seconds": report.exposed,
        # a slowest stage without experts exposes nothing
        "exposed_fraction": [seconds / (report.ep_seconds or 1.0) for seconds in report.exposed],
        "step_seconds": report.step,
        "chunks": report.choice.chunks,
        "issue_stride": report.choice.stride,
    }


def print_text(advices: Sequence[Advice], source: str, console: Console, asked: str = "even") -> None:
    """Print a table for each EP degree, the recommended setting with its reason, and the predicted effects of changes
    under uneven loads.
    """
    first, console.width = advices[0], max(console.width, WIDTH)
    console.print(f"{source} on {first.hardware.name} ({first.hardware.device}), {first.loads.words}")
    for advice in advices:
        console.print()
        console.print(_table(advice))
        console.print(f"the recipe as written: {advice.written.words}")
        if advice.as_1f1b:
            console.print(f"times are of 1F1B, not of the recipe's schedule: {advice.as_1f1b}")
        use = yaml.safe_dump(advice.overlay, default_flow_style=True, width=1000).strip()
        console.print(f"use: {use if advice.overlay else 'the recipe as written'}")
        console.print(f"why: {advice.why}")
        if _uneven(advice):
            console.print("\nwhat would change a step under these loads (the recipe as written, modelled):")
            for line in lines(what_if(advice, asked)):
                console.print(line)
    console.print()
    console.print(f"{NOTE}; {assumptions(first)}")
    for line in error_lines(first.hardware):
        console.print(line)
    console.print(
        "arrows: without -> with overlap; bytes of the busiest rank, one layer and micro-batch, both directions"
    )


def _table(advice: Advice) -> Table:
    place = f"{advice.topology.nodes} x {advice.topology.devices_per_node}"
    title = f"EP {advice.topology.ep} on {place} of {advice.config.devices:,} devices (modelled)"
    table = Table(title=title, title_justify="left", title_style="", show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for mode in advice.modes:
        table.add_column(mode, justify="right", no_wrap=True)
    rows = [_mode_rows(report) for report in advice.modes.values()]
    for index, (label, _) in enumerate(rows[0]):
        table.add_row(label, *(row[index][1] for row in rows))
    return table


def _mode_rows(report: ModeReport) -> list[tuple[str, str]]:
    before, after = report.step
    return [
        ("between nodes", f"{report.inter_bytes / 1e6:,.1f} MB"),
        ("inside a node", f"{report.intra_bytes / 1e6:,.1f} MB"),
        ("EP, per step", f"{report.ep_seconds:.2f} s"),
        ("step", f"{before:.2f} -> {after:.2f} s"),
        ("EP exposed, of step", arrow(report.share_of_step)),
        ("EP exposed, of comm.", arrow(report.share_of_communication)),
        ("chunks [b, s]", str(list(report.choice.chunks))),
    ]


def arrow(shares: tuple[float, float]) -> str:
    """Return two shares such as (0.3, 0.05) as the text ``30 % -> 5 %``."""
    return f"{100 * shares[0]:.0f} % -> {100 * shares[1]:.0f} %"


def assumptions(advice: Advice) -> str:
    """Return one line that names the assumed values (neither measured nor published) in the cluster's file."""
    hardware, peak = advice.hardware, f"peak_flops.{advice.config.dtype}"
    used = [key for key in hardware.assumed if key == peak or not key.startswith("peak_flops")]
    return f"assumed in {hardware.name}: {', '.join(used) or 'nothing'}; efficiencies are fitted to published runs"


def draw(advice: Advice, path: Path) -> Path:
    """Draw the time line of one layer's forward and backward pass in the recommended mode, and return `path`. The upper
    half of the picture shows the layer with all tokens in one chunk, and the lower half shows the layer with several
    chunks.

    Raises:
        DataError: as in `save_figure`.
    """
    choice = advice.best.choice
    figure = new_figure(11, 5)
    above, below = figure.subplots(2, 1, sharex=True)
    b, s = choice.chunks
    again = bool(advice.config.recompute.full)
    _draw_streams(above, _shown_passes(choice.before, again), "uncut")
    _draw_streams(below, _shown_passes(choice.after, again), f"{b * s} chunks (batch {b} x sequence {s})")
    label = "ms of one MoE layer and micro-batch, forward then backward (modelled)"
    below.set_xlabel(f"{label}; a colour for each chunk, grey: shared expert")
    shared = ", recomputed" if again else ""
    figure.suptitle(f"{advice.mode} dispatch, EP {advice.topology.ep} on {advice.hardware.name}{shared}")
    return save_figure(figure, path)


def _shown_passes(timelines: Passes[Timeline], again: bool) -> tuple[Timeline, Timeline]:
    """Return the time line of the forward pass, and that of the backward pass with or without recomputation, as a layer
    of this recipe has it.
    """
    return timelines.forward, timelines.replayed if again else timelines.backward


def _draw_streams(axes: Any, timelines: tuple[Timeline, Timeline], name: str) -> None:
    """Draw one row for each stream; backward starts where forward ends."""
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    chunks = 1 + max(span.op.chunk for timeline in timelines for span in timeline.spans)
    offset = 0.0
    for timeline, way in zip(timelines, ("forward", "backward"), strict=True):
        for row, stream in enumerate(reversed(STREAMS)):
            for span in timeline.on(stream):
                colour = _SHARED_COLOUR if span.op.chunk == WHOLE else colours(span.op.chunk / chunks)
                place = (1e3 * (offset + span.start), 1e3 * span.op.seconds)
                axes.broken_barh([place], (row - 0.4, 0.8), facecolor=colour)
        offset += timeline.makespan
        axes.axvline(1e3 * offset, color="black", linewidth=0.8)
        axes.text(1e3 * offset, -0.85, f"{way} ends ", ha="right", va="bottom", fontsize="x-small")
    axes.set_xlim(left=0)
    axes.set_ylim(-0.9, len(STREAMS) - 0.4)
    axes.set_yticks(range(len(STREAMS)), [_STREAM_NAMES[stream] for stream in reversed(STREAMS)])
    axes.set_title(f"{name}: {1e3 * offset:.2f} ms", loc="left", fontsize="medium")


class Degrees(click.ParamType):
    """A `Degrees` is an option type of the library `click` that converts a text such as ``16,32`` to a tuple of
    integers.
    """

    name = "N,N"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Convert the option's text to a tuple of integers without duplicates; an invalid integer is an error."""
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() for word in words):
            self.fail(f"{value!r}: write EP degrees such as 16,32,64", param, ctx)
        return tuple(dict.fromkeys(int(Number("devices").convert(word, param, ctx)) for word in words))


@click.command("ep-report", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--cluster",
    default=DEFAULT_HARDWARE,
    show_default=True,
    metavar="NAME|FILE",
    help="Predict compute and communication times for this cluster.",
)
@click.option(
    "--hardware", hidden=True, help="This option is the old name of --cluster, and is kept for existing scripts."
)
@click.option("--loads", metavar="LOADS", help=HELP)
@click.option(
    "--skew",
    type=Number("skew"),
    help="Assume that the busiest device has this many times the mean load in every layer and micro-batch; --loads "
    "with a number does the same.",
)
@click.option(
    "--ep",
    type=Degrees(),
    help=("Compare these expert-parallel degrees; by default only the recipe's own degree (expert_parallel) is shown."),
)
@overrides_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw a timeline of the computation and communication of one layer to this file (.svg or .png).",
)
def ep_report(
    recipe: Path,
    cluster: str,
    hardware: str | None,
    loads: str | None,
    skew: float | None,
    ep: tuple[int, ...] | None,
    overrides: tuple[str, ...],
    as_json: bool,
    picture: Path | None,
) -> None:
    """Report the cost of expert parallelism in RECIPE, and which dispatch mode and overlap to set.

    The command prints for each dispatch mode the bytes on each class of links, the time, and the share of EP
    communication that is exposed, without and with overlap. For uneven loads it also prints the effects of moving
    experts, of a capacity factor, of another EP degree, and of routing to few nodes. All results are modelled.
    """
    if picture and ep and len(ep) > 1:
        raise click.UsageError("--picture draws only one EP degree: give --ep a single number")
    if loads is not None and skew is not None:
        raise click.UsageError("--loads and --skew both set the loads: give only one of them")
    asked = loads or ("even" if skew is None else str(skew))
    if picture:
        check_ending(picture)
    if hardware:
        click.echo("--hardware is called --cluster now", err=True)
    loaded, devices = load_recipe(recipe), find_cluster(hardware or cluster)
    asked_for = apply_overrides(loaded, overrides)
    # the layout of the file beside the recipe, as other commands read it, if there is one for this run
    changed = resolve(asked_for, partial(click.echo, err=True), layout="found", dispatch=False)
    planned = look(asked_for, OFFSET) == AUTO
    advices = []
    for degree in ep or [None]:
        try:
            of_degree = with_degree(changed, degree) if degree else changed
            if refused := new_errors(changed, of_degree):
                raise RecipeError(f"tc3 check refuses this degree in the recipe: {refused[0]}")
            modes, cuts = choices(of_degree, devices)
            other = degree if degree != View(loaded).ep else None
            found = advise(of_degree, devices, asked, modes, cuts, planned=planned)
            advices.append(replace(found, other_ep=other))
        except RecipeError as error:
            raise RecipeError(f"--ep {degree}: {error}" if degree else str(error)) from None
    require_step_time(from_recipe(changed, ep_mode="global"))  # the report has seconds of steps, where `auto` has none
    if picture:
        click.echo(f"drawn: {draw(advices[0], picture)}", err=True)

    if as_json:
        click.echo(json.dumps(content(advices, str(recipe), asked)))
    else:
        print_text(advices, str(recipe), Console(soft_wrap=True, highlight=False, markup=False), asked)
