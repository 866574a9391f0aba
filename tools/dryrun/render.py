"""This module prints the results of a dry run as tables with a row for each stage, and draws the memory and the
communication of each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.dryrun.memory import at_fullest, is_update
from tools.dryrun.report import BETWEEN, INSIDE
from tools.estimate.memory.model import IN_WORDS, STATIC
from tools.estimate.memory.room import known_errors
from tools.files.figure import new_figure, save_figure
from tools.hardware.units import GIB

_COLUMNS = (*STATIC, "saved", "working")
_OWNERS = 4  # of a peak
_SHOWN = 3  # lines of traffic a stage


def render(report: Mapping[str, Any], console: Console) -> None:
    """Print the report of a dry run as tables with a row for each stage."""
    layout = " ".join(f"{name}{size}" for name, size in report["layout"].items() if size > 1) or "one device"
    console.print(f"{report['recipe']}: {report['devices']:,} virtual devices, {layout}", highlight=False, markup=False)
    console.print(_memory(report))
    console.print(
        "The table shows GiB on one device. Weights, optimizer state, accumulated gradients and weights gathered for"
        " the step are exact, from MindSpore's layouts and graph. Activations that are kept for the backward pass, or"
        " alive in one pass, are estimates. PFLOP counts matrix products and attention of one device in a step,"
        " including recomputation.",
        style="dim",
    )
    if report["compiled"] and not report["quick"]:
        console.print(_traffic(report))
    counted = report["parameters"]
    if counted["compiled"] is not None:
        same = counted["compiled"] == counted["check"]
        verdict = "as tc3 check counts" if same else f"tc3 check: {counted['check']:,}"
        console.print(f"trained weights, each once: {counted['compiled']:,} ({verdict})", highlight=False)
    console.print(_peak(report), highlight=False)
    for line in _beside(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for note in notes(report):
        console.print(note, style="dim", highlight=False)
    for problem in report["problems"]:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    if not report["compiled"]:
        console.print("this recipe is for CPU workers, which communicate by plugins/cpu_backend: built, not compiled")
    else:
        for line in _gradients(report["gradients"]):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if report["compiled"] and report["problems"] == report["left_out"]:
        console.print(_together(report), highlight=False)
        if report["fit"] != "unknown":
            console.print(_fit(report), highlight=False)


def _fit(report: Mapping[str, Any]) -> str:
    """Return the verdict on the memory of all stages, if every stage has one."""
    if report["fit"] == "no limit":
        return "the recipe sets no context.max_device_memory, so it is unknown whether it fits"
    fullest = max(report["stages"], key=lambda stage: stage["memory"]["total"])
    memory = fullest["memory"]
    room = f"the fullest stage, {fullest['stage']}, takes {memory['total'] / memory['limit']:.0%} of the limit"
    error = f" (--quick may be off by {report['quick_error']:.0%})" if report["quick"] else ""
    return f"{report['fit']}: {room}{error}"


def _beside(report: Mapping[str, Any]) -> list[str]:
    """Return the memory that uneven loads and moving experts need; if it does not fit, it is also listed among the
    problems.
    """
    words = report["loads"]["words"] if report["loads"] else []
    found = [line for line in words if not any(line in problem for problem in report["problems"])]
    if moving := report["exchange"]:
        found.append(
            "between two steps, when no activations are held, plugins.expert_balance takes "
            f"{moving['bytes'] / GIB:.2f} GiB to move experts of stage {moving['stage']}: {moving['fit']}"
        )
    if updates := [stage for stage in report["stages"] if is_update(stage["memory"])]:
        most, names = max(stage["memory"]["update"] for stage in updates), [str(stage["stage"]) for stage in updates]
        found.append(
            f"the total of stage{'s' * (len(updates) > 1)} {', '.join(names)} is the memory of the optimizer's update "
            f"after all passes, which needs up to {most / GIB:.2f} GiB of divided gradients instead of gathered "
            "weights and activations"
        )
    if away := max((stage["host"] for stage in report["stages"]), default=0):
        found.append(
            f"optimizer.swap keeps {away / GIB:.1f} GiB of optimizer state for each device in the host's memory; "
            "MindSpore's documentation says that it is loaded for the update, and those bytes are not counted here"
        )
    if (hccl := report["hccl"]) and hccl["communicators"]:
        found.append(
            f"HCCL needs at least {hccl['bytes'] / GIB:.1f} GiB outside the limit, for any loads: "
            f"{hccl['communicators']} communicators with 2 x HCCL_BUFFSIZE each (200 MB unless it is set)"
        )
    if not report["loads"]:
        return found
    error = known_errors().margin
    return [*found, f"the memory that uneven loads add is modelled, with an assumed error of at most {error:.1%}"]


def _gradients(found: Mapping[str, Any]) -> list[str]:
    """Return which gradients are summed over the right ranks and scaled to the mean, and what is unknown."""
    scale, norm = found["scale"], found["norm"]
    said = (
        f"gradients: those of {found['right']} of {found['weights']} weights of the compiled ranks are summed once "
        "over exactly the ranks that hold a copy"
    )
    means = (
        f"gradients: those of {scale['right']} of {scale['weights']} weights are divided once by the loss scale, the "
        "micro-batches and the devices of a stage"
    )
    counts = f"global norm: the elements of {norm['once']} of {norm['weights']} weights are counted once"
    return [
        said,
        *_unknown(found["unknown"]),
        *([means] if scale["weights"] else []),
        *_unknown(scale["unknown"]),
        *([counts] if norm["weights"] else []),
        *[f"global norm: {line}" for line in norm["otherwise"][:_SHOWN]],
    ]


def _unknown(told: Sequence[str]) -> list[str]:
    """Return the first lines of what is not known, and how many more there are."""
    more = [f"unknown: {len(told) - _SHOWN} more lines, which --json prints"] if len(told) > _SHOWN else []
    return [*[f"unknown: {line}" for line in told[:_SHOWN]], *more]


def _peak(report: Mapping[str, Any]) -> str:
    """Return the owners of the most bytes at the peak of the fullest stage."""
    stage = max(report["stages"], key=lambda stage: stage["peak"]["bytes"])
    owners = [f"{own['part']}: {own['module']} {own['bytes'] / GIB:.1f}" for own in stage["peak"]["owners"][:_OWNERS]]
    when = f" in {stage['peak']['pass']}" if stage["peak"]["pass"] else ""
    return (
        f"stage {stage['stage']} is fullest{when}: {stage['peak']['bytes'] / GIB:.1f} GiB, of them {', '.join(owners)}"
    )


def _together(report: Mapping[str, Any]) -> str:
    """Return which of the pipeline's links, and which ranks, were found to fit."""
    links, groups = report["links"], report["groups"]
    shared = f"the {groups['compared']} of {groups['all']} groups that they share"
    same, every = f"the compiled ranks call in the same order {shared}", sum(links.values())
    if not every:
        return same
    if report["quick"]:
        return f"{same}; of the pipeline's {every} links none was compared: leave out --quick"
    seen = links["exact"] + links["alike"]
    left = f"; {links['unknown']} links were not compared" if links["unknown"] else ""
    return (
        f"{seen} of {every} links between stages compared: their Sends and Receives fit ({links['exact']} with both "
        f"ends compiled, {links['alike']} by stages like theirs){left}; {same}"
    )


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return sentences that say which results of a dry run were derived from other results instead of being
    compiled.
    """
    if report["quick"]:
        return [
            "quick: each kind of layer (dense or MoE, with equal recomputation and swapping) was compiled once, and "
            "the stages are composed from the results. A stage's total is within "
            f"{report['quick_error']:.0%} of that of a full compile, and traffic is not given: leave out --quick"
        ]
    found = []
    micro = report["micro_batches"]
    if micro["compiled"] != micro["step"]:
        found.append(
            f"compiled with {micro['compiled']} of {micro['step']} micro-batches; because every micro-batch calls the "
            "same subgraph, traffic and FLOPs are scaled to a whole step"
        )
    copies = [stage for stage in report["stages"] if not stage["compiled"]]
    if copies:
        names = ", ".join(f"{stage['stage']} as rank {stage['compiled_rank']}" for stage in copies)
        found.append(
            f"stages with the same layers and recomputation as a compiled one were not compiled again: {names}"
        )
    if report["layout"]["pp"] > 1:
        known = "equals" if report["schedule_model_equals_graph"] else "is not known, or differs from,"
        found.append(f"the order of passes in the graphs {known} the model of schedule {report['schedule']}")
    return found


def _memory(report: Mapping[str, Any]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("stage", "layers", "weights", "state", "acc. grads", "gathered", "kept act.", "in a pass", "total"):
        table.add_column(name, justify="right")
    table.add_column("limit", justify="right")
    if flops := any(stage["flops"] for stage in report["stages"]):
        table.add_column("PFLOP", justify="right")
    for stage in report["stages"]:
        memory, limit = stage["memory"], stage["memory"]["limit"]
        over = bool(limit) and memory["total"] > limit
        name = f"{stage['stage']}" + ("" if stage["compiled"] or report["quick"] else "=")
        row = [name, str(stage["layers"]), *(f"{memory[key] / GIB:.2f}" for key in _COLUMNS)]
        total = f"{memory['total'] / GIB:.2f}"
        row += [f"[red]{total}[/red]" if over else total, f"{limit / GIB:.2f}" if limit else "none"]
        table.add_row(*row, *([f"{sum(stage['flops'].values()) / 1e15:.2f}"] if flops else []))
    return table


def _traffic(report: Mapping[str, Any]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("stage", "sent by a device and step", "ranks", "link", "role"):
        table.add_column(name)
    table.add_column("calls", justify="right")
    table.add_column("GiB", justify="right")
    for stage in report["stages"]:
        for line in stage["traffic"][:_SHOWN] if stage["compiled"] else ():
            words = (stage["stage"], line["op"], line["ranks"], line["link"], line["role"], f"{line['calls']:,}")
            table.add_row(*map(str, words), f"{line['bytes'] / GIB:.2f}{'*' * bool(line.get('routed'))}")
    table.caption = "* with an even routing"
    return table


_PARTS = {
    **{part: IN_WORDS[part] for part in STATIC},
    "saved": "kept activations (estimate)",
    "working": "alive in a pass (estimate)",
    "update": f"{IN_WORDS['update']} (estimate)",
}


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Draw the memory of each stage, and below it the bytes that each stage communicates, to an .svg or .png file;
    return `path`.
    """
    sent = any(stage["traffic"] for stage in report["stages"])  # --quick gives none
    figure = new_figure(11, 6 if sent else 4)
    axes = figure.subplots(1 + sent, 1, sharex=True, squeeze=False)[:, 0]
    above = axes[0]
    stages = [stage["stage"] for stage in report["stages"]]
    bottom = [0.0] * len(stages)
    for part, label in _PARTS.items():
        sizes = [at_fullest(stage["memory"], part) / GIB for stage in report["stages"]]
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
    """Draw two bars for each stage that was compiled."""
    stages = [stage["stage"] for stage in report["stages"]]
    for place, link in enumerate((INSIDE, BETWEEN)):
        sent = ((line["bytes"] for line in stage["traffic"] if line["link"] == link) for stage in report["stages"])
        sizes = [sum(each) / GIB for each in sent]
        axes.bar([stage + 0.4 * place - 0.2 for stage in stages], sizes, width=0.4, label=link)
    axes.set_ylabel("GiB sent by a device\nin a step")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
