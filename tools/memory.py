"""This module is the command `tc3 memory`, which predicts a device's memory without compiling. The exit code is 0 if
the recipe fits, 1 if it may not fit, and 2 for a wrong input.

With `--explain-oom` it also finds which keys of a recipe free how much memory at what cost in step time. Such a
proposal is a child of the recipe: it is written as keys, read again, predicted from these keys and given to `tc3
check`. Changes that the model does not predict (swapping to the host, `optimizer_level: level3`) are not proposed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from plugins.errors import DataError, RecipeError
from plugins.expert_balance import settings as expert_balance
from tools.check.check import new_errors, require_sound
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import cluster as find_cluster
from tools.estimate.efficiency import error_lines, known_error
from tools.estimate.from_recipe import from_recipe
from tools.estimate.loads import HELP, Loads, loads_of
from tools.estimate.memory.changes import Change, pairs_of_changes, single_changes
from tools.estimate.memory.loaded import Even, Judged, judge
from tools.estimate.memory.model import STATIC, StageMemory, all_stages, exchanged, peak_memory
from tools.estimate.memory.room import (
    DOES_NOT_FIT,
    FITS,
    UNKNOWN,
    Room,
    fit_between,
    known_errors,
    require_on_device,
    room_of,
)
from tools.estimate.memory.time_line import UPDATE, TimeLine, check_form, simulated, time_line, write_line
from tools.estimate.time_model import TimeModel
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.units import GIB, MIB
from tools.layout.resolve import resolve
from tools.measured import AS_MODELLED, MemoryTerms, applied, require_memory
from tools.process.waiting import saying
from tools.ranges import Number, overrides_option
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides, dotted
from tools.recipe.view import View
from tools.search.overlay import changed, overlay

PAIRS = 10  # pairs that are written, read again and checked


@dataclass(frozen=True)
class Proposal:
    """A `Proposal` is a proposed change of a recipe, with its predicted memory and step time.

    Args:
        name: the change in words.
        keys: the new values by dotted key.
        peak: the bytes of the fullest stage, predicted from these keys.
        freed: the bytes that the change saves.
        step_s: the seconds of a step; None if the estimator cannot predict them, as with adapters.
        slower: `step_s` divided by the recipe's own seconds of a step, minus 1.
        fit: one of `FITS`, `UNKNOWN` (within the model's known error) and `DOES_NOT_FIT`.
        refused: the fault that `tc3 check` finds with the change but not without it; "" if there is none.
    """

    name: str
    keys: Mapping[str, Any]
    peak: float
    freed: float
    step_s: float | None
    slower: float | None
    fit: str
    refused: str = ""


def verdict(peak: float, room: Room) -> str:
    """Return whether a predicted peak fits into the memory that the job may use. The answer is unknown if the peak is
    closer to this memory than the error of the memory model.
    """
    return fit_between(peak, peak, room.cap, room.bytes)


def explain(
    recipe: Recipe,
    times: TimeModel,
    room: Room,
    pairs: bool = True,
    terms: MemoryTerms = AS_MODELLED,
    loads: str | None = None,
) -> list[Proposal]:
    """Return changes to the recipe that free memory, the best changes first. First come changes after which the recipe
    fits (sorted by step time), then changes after which it might fit, and then all other changes (sorted by freed
    memory). Pairs of changes are tried only if no single change makes the recipe fit.

    Args:
        terms: the measured factors of the predicted memory.
        loads: the text of `--loads`, under which a change must fit, too; None for even loads only. Sizes and step times
            are those of even loads.

    Raises:
        RecipeError: the recipe cannot be predicted.
    """
    config = from_recipe(resolve(recipe))
    peak = _peak(config, terms)
    judged = _judged(config, room, loads_of(loads, config), terms) if loads is not None else None
    most = max(peak, float(judged.total.max())) if judged else peak
    # changes are made for a modelled limit: the one at which the measured peak, with what loads add, is at the room's
    limit = (room.bytes - (most - peak)) * peak_memory(config) / peak
    proposed = partial(_proposal, recipe, config, times=times, room=room, terms=terms, loads=loads)
    found = [proposal for change in single_changes(config, limit) if (proposal := proposed(change))]
    if pairs and not any(one.fit == FITS and not one.refused for one in found):
        both = sorted(pairs_of_changes(config, limit), key=lambda change: _order_of(change, times, room, terms))
        found += [one for change in both[:PAIRS] if (one := proposed(change))]
    return sorted(found, key=_order)


def _order_of(change: Change, times: TimeModel, room: Room, terms: MemoryTerms) -> tuple[int, float]:
    peak = _peak(change.config, terms)
    fit = verdict(peak, room)
    return _RANK[fit], _seconds(change.config, times) or peak if fit == FITS else peak


_RANK = {FITS: 0, UNKNOWN: 1, DOES_NOT_FIT: 2}


def _order(proposal: Proposal) -> tuple[bool, int, float]:
    by = proposal.step_s if proposal.fit == FITS else None
    return bool(proposal.refused), _RANK[proposal.fit], proposal.peak if by is None else by


def _seconds(config: Configuration, times: TimeModel) -> float | None:
    """Return the predicted seconds of a step, as `tc3 search` predicts them; None if they cannot be predicted."""
    try:
        return times.step(config, simulated=True).total
    except RecipeError:
        return None


def _peak(config: Configuration, terms: MemoryTerms) -> float:
    return max(applied(memory, terms).peak for memory in all_stages(config))


def _judged(config: Configuration, room: Room, loads: Loads | None, terms: MemoryTerms) -> Judged | None:
    """Return how a run fits under loads; None without experts. Measured factors are of the memory at even loads."""
    peaks = [applied(memory, terms).peak for memory in all_stages(config)] if terms != AS_MODELLED else []
    evens = [Even(place, peak, peak, peak) for place, peak in enumerate(peaks)]
    return judge(config, room, loads, evens) if config.model.experts else None


def _fit(config: Configuration, peak: float, room: Room, terms: MemoryTerms, loads: str | None) -> str:
    """Return whether a changed run fits, also under the loads; unknown if its loads do not follow from the text."""
    try:
        judged = _judged(config, room, loads_of(loads, config, of_many=True), terms) if loads is not None else None
    except (DataError, RecipeError):
        return _worst([verdict(peak, room), UNKNOWN])
    return _worst([verdict(peak, room), *([judged.verdict] if judged else [])])


def _proposal(
    recipe: Recipe,
    before: Configuration,
    change: Change,
    times: TimeModel,
    room: Room,
    terms: MemoryTerms,
    loads: str | None,
) -> Proposal | None:
    """Return a change as keys of a recipe, with predictions for the changed recipe; None if MindFormers has no keys for
    the change.

    A user changes these keys in the recipe's file. If the file says `offset: auto`, the keys contain the layout, too,
    because the layout file beside the recipe was made for the run without the change.
    """
    try:
        child = changed(recipe, change.config)
        config = from_recipe(resolve(child))
        peak = _peak(config, terms)
        seconds, own = _seconds(config, times), _seconds(before, times)
        keys = _flat(overlay(recipe, change.config), recipe.get("callbacks") or [])
    except RecipeError:
        return None
    now = _peak(before, terms)
    if not keys or peak >= now:
        return None
    refused = new_errors(recipe, child)
    return Proposal(
        name=change.name,
        keys=keys,
        peak=peak,
        freed=now - peak,
        step_s=seconds,
        slower=seconds / own - 1 if seconds and own else None,
        fit=_fit(config, peak, room, terms, loads),
        refused=refused[0] if refused else "",
    )


def _flat(nested: Mapping[str, Any], callbacks: Sequence[Any], path: tuple[str | int, ...] = ()) -> dict[str, Any]:
    """Return dotted key -> value of an overlay. Of the list of callbacks only the values are named that differ from
    the recipe's `callbacks`; operator patterns, which have dots of their own, stay in their mapping.
    """
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if (*path, key) == ("callbacks",):
            pairs = enumerate(zip(callbacks, value, strict=True))
            found |= {
                dotted((key, index, name)): number
                for index, (old, new) in pairs
                for name, number in new.items()
                if old.get(name) != number
            }
        elif isinstance(value, Mapping) and value and path != ("recompute_config",):
            found |= _flat(value, callbacks, (*path, key))
        else:
            found[dotted((*path, key))] = value
    return found


_PARTS = (*STATIC, "activations", "working", "buffers", "peak")
_LEGEND = (
    "weights and Adam's state in fp32; accumulated: gradients; gathered: weights in the compute type; activations:"
    " kept for the backward pass; working: further memory of one pass; buffers: for communication; peak: the fullest"
    " moment, in a pass or in the optimizer's update, which needs divided gradients instead of gathered, activations"
    " and working (docs/memory.md)"
)
_OWNERS = 8  # lines of a peak's owners
_WIDTH = 130  # of tables in a file or pipe
_PASSES = {"F": "forward", "B": "backward", "W": "gradients of weights"}


def unit_of(size: float) -> tuple[int, str]:
    """Return the unit in which to print a size, as (bytes of the unit, name): GiB, or MiB for sizes below one GiB."""
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def pass_in_words(label: str) -> str:
    """Return the label of a pass, such as ``B 3.0``, in words: ``the backward of micro-batch 3, chunk 0``."""
    if not label:
        return "no pass"
    if label == UPDATE:
        return "the update (clipping and the optimizer)"
    kind, place = label.split(" ")
    micro_batch, chunk = place.split(".")
    return f"the {_PASSES[kind]} of micro-batch {micro_batch}, chunk {chunk}"


def print_stages(report: Mapping[str, Any], console: Console) -> None:
    """Print a table row for each stage. For the stage that needs the most memory, also print the bytes of each part and
    module at the peak.
    """
    unit, name = unit_of(max(stage["peak"] for stage in report["stages"]))
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", justify="right")
    for column in (*_PARTS, "fit"):
        table.add_column(column, justify="right")
    for stage in report["stages"]:
        table.add_row(str(stage["stage"]), *(f"{stage[part] / unit:.1f}" for part in _PARTS), stage["fit"])
    console.print(table)
    low, high = report["known_error"]
    console.print(f"{name} on one device, modelled. {_LEGEND}", style="dim")
    console.print(
        f"Predictions of published runs are {low:+.1%} to {high:+.1%} off; none of these runs used MindFormers or "
        "Ascend.",
        style="dim",
    )
    console.print(f"room: {report['room']['words']}, by {report['room']['source']}")
    for line in report["loads"]["words"] if report["loads"] else ():
        console.print(line, soft_wrap=True)
    if moving := report["exchange"]:
        console.print(
            "between two steps, when no activations are held, plugins.expert_balance takes "
            f"{moving['bytes'] / unit:.2f} {name} to move experts of stage {moving['stage']}: {moving['fit']}",
            soft_wrap=True,
        )
    peak = report["peak"]
    if report["measured"]:
        console.print("memory over time, and what loads add, is as modelled; all else here has the measured factors")
    console.print(
        f"stage {peak['stage']} holds most in {pass_in_words(peak['pass'])}: {peak['bytes'] / unit:.1f} {name}"
    )
    for owner in peak["owners"][:_OWNERS]:
        console.print(f"  {owner['bytes'] / unit:7.2f}  {owner['part']}: {owner['module']}")
    if rest := peak["owners"][_OWNERS:]:
        words = f"{len(rest)} more module{'s' * (len(rest) > 1)}, see --json"
        console.print(f"  {sum(owner['bytes'] for owner in rest) / unit:7.2f}  {words}", style="dim")


def _as_yaml(value: Any) -> str:
    """Return a value as a recipe or `--set` takes it; a backslash of a pattern is escaped in JSON as in YAML."""
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def print_proposals(proposals: Sequence[Mapping[str, Any]], console: Console, fits: bool = False) -> None:
    """Print a table row for each proposed change to the recipe, the best change first, followed by the keys to
    change.
    """
    if fits:
        console.print("It fits unchanged; these changes would free memory all the same:")
    if not proposals:
        console.print("no change that this command knows frees memory here")
    if not fits and not any(row["fit"] == FITS and not row["refused"] for row in proposals):
        console.print("none of the tried changes surely makes the recipe fit; tc3 search tries every layout")
    if not proposals:
        return
    unit, size = unit_of(max(row["peak"] for row in proposals))
    table = Table(box=None, pad_edge=False)
    for name in (size, "frees", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("change")
    for row in proposals:
        fit = "refused by tc3 check" if row["refused"] else row["fit"]
        slower = "unknown" if row["slower"] is None else f"{row['slower']:+.1%}"
        sizes = (f"{row['peak'] / unit:.1f}", f"{row['freed'] / unit:.1f}", slower)
        keys = "\n".join(f"  {key}: {_as_yaml(value)}" for key, value in row["keys"].items())
        table.add_row(*sizes, fit, f"{row['name']}\n{keys}" + (f"\n  {row['refused']}" if row["refused"] else ""))
    console.print(table)
    console.print(
        "Each row was predicted from its keys and checked by tc3 check. Sizes and step times are of even loads, also"
        " where --loads decides whether a row fits; the step time is modelled, relative to the recipe's own."
        " Swapping to the host and optimizer_level: level3 are not predicted, and so not proposed.",
        style="dim",
    )


@click.command("memory", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--explain-oom",
    is_flag=True,
    help="List changes of the recipe's keys that would free memory, and how much step time each change would cost.",
)
@click.option(
    "--limit",
    type=Number("memory_gib"),
    metavar="GIB",
    help="Assume that the job may use this many GiB on a device.  [default: the recipe's context.max_device_memory]",
)
@click.option(
    "--time-line",
    "picture",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the memory in use on one pipeline stage during one step (.svg, .png), or write the values (.json).",
)
@click.option(
    "--stage",
    type=Number("stage"),
    help="Show memory over time, and the largest tensors at the peak, for this pipeline stage.  [default: the stage "
    "with the highest peak]",
)
@click.option(
    "--cluster",
    default=DEFAULT_HARDWARE,
    show_default=True,
    metavar="NAME|FILE",
    help="Compare the predicted memory with that of this cluster's devices, and predict times on this cluster.",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    metavar="BUNDLE.zip",
    help="Use the memory values that `tc3 firsthour` measured with RECIPE and stored in this bundle, instead of "
    "assumed values.",
)
@click.option("--loads", metavar="LOADS", help=HELP)
@overrides_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def memory(
    recipe: Path,
    explain_oom: bool,
    limit: float | None,
    picture: Path | None,
    stage: int | None,
    cluster: str,
    measured: Path | None,
    loads: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Predict how much memory a device of each pipeline stage of RECIPE needs, within seconds and without compiling the
    recipe.

    \b
    tc3 memory recipes/telechat3_438b/pretrain_4k.yaml
    tc3 memory my.yaml --explain-oom --limit 50
    tc3 memory my.yaml --time-line stage.svg --stage 7
    tc3 memory recipes/mini/pretrain_ep4.yaml --loads output/RUN

    tc3 dryrun gives the exact bytes of MindSpore's compiled graph, in minutes.

    The table assumes even loads. The text below the table says up to which load of the fullest device the recipe fits,
    and how many steps of the given loads need more memory.

    Exit codes: 0 the recipe fits; 1 it does not fit (also if only at some steps of --loads), or the model's known error
    is too large to say whether it fits; 2 a wrong input.
    """
    if picture:
        check_form(picture)
    terms = require_memory(measured, recipe, partial(click.echo, err=True)) if measured else AS_MODELLED
    written = apply_overrides(load_recipe(recipe), overrides)
    loaded = resolve(written, partial(click.echo, err=True), layout="file")
    require_sound(loaded)
    config, hardware = from_recipe(loaded), find_cluster(cluster)
    require_on_device("--limit", limit, hardware)
    if stage is not None and stage >= config.pp:
        raise RecipeError(f"--stage {stage}: there is no such stage; the recipe has stages 0 to {config.pp - 1}")
    room, times = room_of(loaded, hardware, limit), TimeModel(hardware)
    if limit is not None:
        room = dataclasses.replace(room, source="--limit")
    room = room.less(terms.reserve_bytes)
    every = [applied(one, terms) for one in all_stages(config)]
    asked = loads_of(loads, config) if loads is not None else None
    report, line = _report(config, times, room, stage, asked, every, terms)
    moves = expert_balance.moves(View(loaded).get(("plugins", "expert_balance")))
    report |= {
        "recipe": loaded.source,
        "measured": dataclasses.asdict(terms) if measured else None,
        "exchange": _exchange(config, room, every) if moves else None,
    }
    report["fit"] = _worst([report["fit"], *([report["exchange"]["fit"]] if report["exchange"] else [])])
    if explain_oom:
        with saying("changing the recipe"):
            report["proposals"] = [dataclasses.asdict(row) for row in explain(written, times, room, True, terms, loads)]
        report["known_step_errors"] = known.as_json() if (known := known_error(hardware)) else None
    if picture:
        few, step = report["micro_batches"]["drawn"], report["micro_batches"]["step"]
        which = f"all {step} micro-batches" if few == step else f"{few} micro-batches, as full as the step's {step}"
        write_line(line, f"{loaded.source}, stage {report['peak']['stage']}: {which}", room.cap, picture)
        click.echo(f"written: {picture}", err=True)
    if as_json:
        click.echo(json.dumps(report))
    else:
        console = Console(highlight=False, markup=False)
        console = console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDTH)
        print_stages(report, console)
        if explain_oom:
            print_proposals(report["proposals"], console, report["fit"] == FITS)
            for words in error_lines(hardware) if report["proposals"] else ():
                console.print(words, style="dim", soft_wrap=True)
    sys.exit(0 if report["fit"] == FITS else 1)


def _report(
    config: Configuration,
    times: TimeModel,
    room: Room,
    stage: int | None,
    loads: Loads | None,
    every: Sequence[StageMemory],
    terms: MemoryTerms,
) -> tuple[dict[str, Any], TimeLine]:
    """Return bytes by stage, the time line of a stage with its peak's owners, and what uneven loads need; the bytes of
    `every` stage have the measured factors `terms`.
    """
    peaks = [memory.peak for memory in every]
    number = peaks.index(max(peaks)) if stage is None else stage
    forward, backward, _ = times.chunks(config)
    sending = 0.0 if config.overlap_pp else times.transfer(config)
    simulation = simulated(config, forward, backward, sending)
    line = time_line(config, number, simulation)
    drawn = len({op.micro_batch for op in simulation.orders[number]})
    fits = [verdict(peak, room) for peak in peaks]
    judged = _judged(config, room, loads, terms)
    errors = known_errors().errors.values()
    report = {
        "stages": [one.as_json() | {"stage": place, "fit": fits[place]} for place, one in enumerate(every)],
        "fit": _worst([*fits, *([judged.verdict] if judged else [])]),
        "room": {"bytes": room.bytes, "cap": room.cap, "words": room.words, "source": room.source},
        "known_error": [min(errors), max(errors)],
        "peak": {"stage": number, **line.peak_as_json()},
        "loads": judged and {**judged.as_json(), "words": judged.lines},
        "micro_batches": {"drawn": drawn, "step": config.micro_batches},
    }
    return report, line


def _worst(found: Sequence[str]) -> str:
    return next(word for word in (DOES_NOT_FIT, UNKNOWN, FITS) if word in found)


def _exchange(config: Configuration, room: Room, every: Sequence[StageMemory]) -> dict[str, Any]:
    """Return the stage that needs the most memory for moving experts, in addition to the memory that is in use between
    two steps.
    """
    held = [one.static + one.buffers + exchanged(config, stage) for stage, one in enumerate(every)]
    stage = held.index(max(held))
    return {"stage": stage, "bytes": exchanged(config, stage), "held": held[stage], "fit": verdict(held[stage], room)}
