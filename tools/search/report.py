"""This module prints the answer of `tc3 search` on the terminal: the table of layouts, the reasons for their order, the
dropped candidates with the reasons, and the assumptions.

Schedules other than 1F1B and interleaved 1F1B have a separate table; `to_write` chooses the layout that `--write`
writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import error_lines
from tools.estimate.memory.room import LEFT_OUT, known_errors
from tools.estimate.time_model import PARTS, TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import LATE
from tools.search.doubt import Doubt, doubt_of
from tools.search.ranking.alternatives import BySchedule, Scheduled, swap_words, swapping_json, swapping_words
from tools.search.ranking.run import Entry, Found
from tools.search.ranking.uneven import HEADS as UNEVEN
from tools.search.ranking.uneven import TABLES, lowered
from tools.search.ranking.uneven import words as uneven_words
from tools.search.request import Request

HEADS = TABLES["layouts"]
LEFT = ("layout", "dispatch", "sharded", "recompute")


def cells(name: str, entry: Entry, request: Request) -> list[str]:
    """Return the cells of one layout's row in the table of layouts."""
    candidate = entry.candidate
    return [
        name,
        entry.layout,
        entry.config.ep_mode if candidate.ep > 1 else "-",
        candidate.shard,
        entry.recompute,
        f"{entry.seconds:.2f}",
        f"{100 * entry.mfu:.1f} %",
        f"{entry.peak / GIB:.1f}",
        # beside a run that the search would not have taken for its memory stands why
        known_errors().fits(entry.peak, request.cap)
        + (", over the limit" if entry.peak > request.cap else ", no margin" if entry.peak > request.room else ""),
        f"{100 * entry.parts['bubble'] / entry.seconds:.1f} %",
        f"{100 * entry.exposed / entry.seconds:.1f} %",
        f"{entry.tokens_per_s:,.0f}",
    ]


def table_rows(found: Found) -> list[list[str]]:
    """Return the rows of the table of layouts. The table lists the best layouts, a new placement of layers with the
    recipe's own parallel degrees, and the recipe itself.
    """
    rows = [cells(str(number), entry, found.request) for number, entry in enumerate(found.entries, 1)]
    if found.own_mesh:
        mesh = cells("mesh", found.own_mesh, found.request)
        if any(entry.config == found.own_mesh.config for entry, _ in found.failed):
            mesh[list(HEADS).index("fits")] += ", dropped by its dry run"
        rows.append(mesh)
    return [*rows, *([cells("recipe", found.own, found.request)] if found.own else [])]


STAGES = TABLES["stages"]
_SHOWN = 12  # pairs of pp and vpp


def stage_rows(found: Found) -> list[list[str]]:
    """Return table rows with the best layout for each pair (pp, vpp), the fastest first; return at most `_SHOWN`
    rows.
    """
    dropped = {id(entry.config) for entry, _ in found.failed}
    return [
        [
            f"{row.pp} x {row.vpp}",
            f"{row.strategies:,}",
            f"{row.entry.seconds:.2f}" if row.entry else "-",
            f"{row.bound:.2f}",
            (row.entry.layout + " (dropped by its dry run)" * (id(row.entry.config) in dropped)) if row.entry else "",
        ]
        for row in found.stages[:_SHOWN]
    ]


def more_stages(found: Found) -> list[str]:
    """Return a line about the pairs (pp, vpp) that are left out of the table (see `stage_rows`)."""
    rest = found.stages[_SHOWN:]
    if not rest:
        return []
    return [
        f"{len(rest)} more pairs of pp and vpp (--json has all), none of them under {min(r.bound for r in rest):.2f} s"
    ]


def reasons(found: Found, doubt: Doubt | None = None) -> list[str]:
    """Return lines that say why the first layout is better than the second layout and than the recipe's own layout, and
    how certain this is.
    """
    lines, entries = [], found.entries
    if len(entries) > 1:
        lines.append(f"1 before 2 by {why_faster(entries[0], entries[1])}")
    if entries:
        lines.append(placed_words(found))
    lines += doubt.lines() if doubt else []
    lines += swapping_words(found.swapping) if found.swapping else []
    # a recipe for other devices or another batch has no step to compare with
    compared = [one for one in found.uneven if one.name != "recipe" or not found.request.changed]
    lines += [*uneven_words(compared), *under_words(found)]
    if entries and found.own and not found.request.changed:
        if found.own.peak > found.request.cap:
            lines.append(f"the recipe's own layout needs {found.own.peak / GIB:.1f} GiB: over the limit")
        elif _same_run(found.own, entries[0]):
            lines.append("1 is the recipe's own layout: no faster one was found")
        elif found.own.seconds > entries[0].seconds:
            lines.append(f"1 before the recipe's own by {why_faster(entries[0], found.own)}")
        else:
            lines.append(f"the recipe's own layout is before 1 by {why_faster(found.own, entries[0])}")
        if found.request.room < found.own.peak <= found.request.cap:
            lines.append(
                f"the recipe's own layout has no margin: {found.own.peak / GIB:.1f} GiB, where the search takes "
                f"{found.request.room_words}"
            )
        if found.own_mesh is None and found.whole:
            room = f"needs more than the allowed memory: {found.request.room_words}"
            lines.append(f"the recipe's own mesh was not placed anew: it breaks a rule or a limit, or {room}")
    return lines


def _same_run(first: Entry, second: Entry) -> bool:
    one, two = first.config, second.config
    return first.candidate == second.candidate and (one.layers, one.recompute) == (two.layers, two.recompute)


def why_faster(first: Entry, second: Entry) -> str:
    """Return as text the parts of the step (such as the bubble) in which two layouts differ the most. Parts in which
    the first layout is faster come before parts in which it is slower.
    """
    saved = {name: second.parts[name] - first.parts[name] for name in PARTS}
    least = max(0.02 * abs(second.seconds - first.seconds), 0.005)  # less is printed as 0.00
    gains = [name for name in sorted(PARTS, key=lambda name: -saved[name]) if saved[name] > least][:3]
    costs = [name for name in sorted(PARTS, key=lambda name: saved[name]) if saved[name] < -least][:2]
    words = [f"{saved[name]:.2f} s less {PARTS[name]}" for name in gains]
    paid = [f"{-saved[name]:.2f} s more {PARTS[name]}" for name in costs]
    total = f"{second.seconds - first.seconds:.2f} s per step"
    if not words:
        return f"{total}: the same within a hundredth"
    return f"{total}: {', '.join(words)}" + (f"; it pays {', '.join(paid)}" if paid else "")


def placed_words(found: Found) -> str:
    """Return a sentence about the number of candidates whose layers were placed, and about what the lower bounds prove
    for all other candidates.
    """
    fastest = min([*found.entries, *(entry for entry, _ in found.failed)], key=lambda entry: entry.seconds)
    best, whose = fastest.seconds, "the best one's"
    if all(entry is not fastest for entry in found.entries):
        whose = f"the step of {fastest.layout}, which was dropped by its dry run,"
    placed = (
        f"{found.placed:,} of {len(found.ranking.seconds):,} candidates that fit were placed, {found.solved} of them "
    )
    placed += "by the solver, too"
    if not found.least:
        return f"{placed}; the others were ranked by balanced layers only, and could be faster than {best:.2f} s"
    if not found.open:
        return f"proven within the estimator's model: no strategy is under {best:.2f} s ({placed})"
    proven = (
        f"proven within the estimator's model: no strategy is under {found.least:.2f} s, which is "
        f"{100 * found.gap:.1f} % less than {whose} {best:.2f} s ({placed})"
    )
    if found.unplaced:
        return f"{proven}; {found.unplaced:,} that were not placed could be faster by their bounds"
    return f"{proven}; {found.open} of them could be faster if their layers were placed better still"


def under_words(found: Found) -> list[str]:
    """Return lines about the results of the second search, which assumes uneven expert loads (the mean max/mean in
    every layer).
    """
    less = lowered(*found.loads)
    if found.under is None:
        return less
    words = "with the mean max/mean of the loads in every layer, at each expert_parallel"
    if not found.under.entries:
        return [*less, f"{words}, a second search found no strategy that fits"]
    more = f"; {found.added} layouts of this second search stand in the tables, too" if found.added else ""
    return [*less, f"{words}: {placed_words(found.under)}{more}"]


def lost(found: Found) -> list[str]:
    """Return lines about the best strategies that were dropped later, and about the results of dry runs."""
    lines = [f"dropped: {one.candidate.words}: {why}" for one, why in found.dropped]
    lines += [f"dropped by its dry run: {entry.layout}: {'; '.join(problems)}" for entry, problems in found.failed]
    for entry, doubts in found.doubtful:
        lines.append(f"its dry run does not prove that it fits: {entry.layout}: {'; '.join(doubts)}")
    lines += [f"memory by the dry run of {words}" for words in found.wrong]
    if found.verified:
        lines.append(f"dry runs: {len(found.passed)} of {found.verified} compile and fit")
    if found.unverified:
        lines.append(f"1 is not verified: {found.unverified}")
    if found.cut:
        lines.append(LATE)
    if not found.whole:
        best = found.ranking.short_list(1)[0]
        lines.append(f"interrupted; the best as ranked: {best.candidate.words}, about {best.seconds:.2f} s")
    return lines


def memory_words(request: Request) -> list[str]:
    """Return how much memory the run may use on a device, and how reliable predictions of it are."""
    known = known_errors()
    runs = len(known.errors)
    room = f"predictions may reach {request.room / GIB:.1f} of them"
    kept = f"a margin of {100 * request.margin:.1f} % stays free: {room}" if request.margin else room
    why = (
        f"; of {runs} published runs the prediction missed at most {100 * known.missed:.1f} % of the memory, and "
        f"{100 * LEFT_OUT:.1f} % without what was learnt from runs like them"
    )
    return [
        f"memory: a device may hold {request.cap / GIB:.1f} GiB ({request.cap_source}), {kept} (--memory-margin){why}",
        f"fits: how many of those {runs} runs would have fit if their predicted memory had been as near to the limit. "
        "They are runs of Megatron-LM and torchtitan on GPUs (tools/estimate/memory/rows.yaml), because no run of "
        "MindFormers or on Ascend was published with its memory; --verify checks a layout by a dry run",
    ]


def assumptions(found: Found, times: TimeModel) -> list[str]:
    """Return lines that list the data and the assumptions behind the results of a search."""
    request, hardware = found.request, times.hardware
    assumed = [key for key, origin in hardware.origins.items() if origin.certainty == "assumed"]
    lines = [
        *memory_words(request),
        "all numbers are predictions; MFU counts model FLOPs without recomputation, causal attention once; "
        "exposed is communication that nothing hides; data stalls are taken as zero",
        *error_lines(hardware),
    ]
    if assumed:
        lines.append(f"assumed in {hardware.name}: {', '.join(assumed)}")
    if any(entry.config.shard_gradients for entry in found.entries):
        lines.append(
            "sharded gradients are reduced with every micro-batch, half of it beside its computation (not measured)"
        )
    if request.pluggable and any(entry.config.ep > 1 for entry in found.entries):
        cut = request.base.ep_cut
        if cut is None or cut.chunks:  # with `auto` each strategy has its own best chunks
            as_written = f"in the chunks {list(cut.chunks or ())} of the recipe" if cut else "whole, as in the recipe"
            lines.append(
                f"tokens are dispatched {as_written}: no other chunks of plugins.ep_overlap were compared; tc3 "
                "ep-report says for a written strategy what they would bring"
            )
    if request.ulysses > 1:
        lines.append(
            "ulysses_degree_in_cp: MindFormers 1.9.0 exchanges heads and gathers keys and values over the whole of cp "
            "all the same; 1 needs no more memory and less communication"
        )
    if request.swaps:
        lines.append(
            "model_config.swap: activations are predicted as if they stayed on the device and moved at no cost"
        )
    if request.changed and found.own:
        own = request.base
        lines.append(f"the recipe's own row: as written, {own.devices:,} devices and batch {own.global_batch:,}")
    return lines + ([f"the recipe's own layout is not predicted: {found.own_why}"] if found.own_why else [])


def notes(found: Found) -> list[str]:
    """Return the comment at the head of the child recipe that a search writes. The comment states the layout with its
    predictions, and the recipe for which the search ran.
    """
    request, best = found.request, found.best
    dispatch = f"dispatch {best.config.ep_mode}, " if best.candidate.ep > 1 else ""
    lines = [
        f"Found by tc3 search: {best.layout}, {dispatch}recomputation {best.recompute}.",
        f"Predicted on {request.devices:,} devices of {request.hardware.name}: {best.seconds:.2f} s per step, MFU "
        f"{100 * best.mfu:.1f} %, {best.peak / GIB:.1f} GiB on the heaviest stage of {request.cap / GIB:.1f}.",
        f"So near to the limit {known_errors().fits(best.peak, request.cap)} published runs would have fit (on GPUs, "
        f"other software); margin {100 * request.margin:.1f} %.",
    ]
    words = f"Effort {found.effort:g} for each placement"
    if found.cut or not found.whole:
        lines.append(
            f"{words}; {LATE if found.cut else 'the search was interrupted and has not placed all candidates'}."
        )
    else:
        lines.append(f"{words}: the same on every machine.")
    for one in found.uneven:
        if one.config is best.config and one.name != "recipe":
            lines.append(
                f"Under {one.loads.words}: {one.seconds:.2f} s per step, out of memory at {one.cells[5]} steps."
            )
    if best.bound:
        lines.append(f"No placement of this strategy's layers is under {best.bound:.2f} s.")
    if found.unverified:
        lines.append(f"NOT VERIFIED: {found.unverified}.")
    elif found.passed:
        lines.append("Its dry run compiles and fits.")
    return lines


def as_json(found: Found, times: TimeModel) -> dict[str, Any]:
    """Return the results of a search for parallel strategies as values for JSON."""
    request, doubt = found.request, doubt_of(found, times)
    return {
        "devices": request.devices,
        "cluster": request.hardware.name,
        "global_batch": request.global_batch,
        "cap_gib": request.cap / GIB,
        "memory_margin": request.margin,
        "known_memory_errors": dict(known_errors().errors),
        "ranking_s": found.seconds,
        "ranked": len(found.ranking.seconds),
        "whole": found.whole,
        "effort": found.effort,
        "placed": found.placed,
        "solved": found.solved,
        "bound_s": found.least or None,
        "gap": found.gap if found.entries and found.least else None,
        "open": found.open,
        "never_placed": found.unplaced,
        "ended_by_time_limit": found.cut,
        "verified": found.verified,
        "best_is_verified": bool(found.passed),
        "wrong_memory": found.wrong,
        "strategies": [_entry(entry, request) for entry in found.entries],
        "recipe": _entry(found.own, request) if found.own else None,
        "own_mesh": _entry(found.own_mesh, request) if found.own_mesh else None,
        "by_stages": [row.as_json() for row in found.stages],
        "reasons": reasons(found, doubt),
        "sensitivity": doubt.as_json() if doubt else None,
        "dropped": [{**one.candidate._asdict(), "why": why} for one, why in found.dropped],
        "failed": [{**_entry(entry, request), "problems": problems} for entry, problems in found.failed],
        "not_proven": [{**_entry(entry, request), "doubts": doubts} for entry, doubts in found.doubtful],
        "funnel": [list(line) for line in found.ranking.funnel.lines()],
        "notes": assumptions(found, times),
        **({"loads": [one.as_json() for one in found.uneven]} if found.uneven else {}),
        **({"swapping": swapping_json(found.swapping)} if found.swapping else {}),
    }


def _entry(entry: Entry, request: Request) -> dict[str, Any]:
    """Return a run, and how likely it fits: how many published runs would have fitted, of how many."""
    known = known_errors()
    fits = {"runs": len(known.errors), "fit": known.fitting(entry.peak, request.cap)}
    return {**entry.as_json(), "fits": fits, "has_margin": entry.peak <= request.room}


def print_text(found: Found, times: TimeModel, console: Console) -> None:
    """Print all results of a search for parallel strategies."""
    request, funnel = found.request, found.ranking.funnel
    console.print(
        f"{request.devices:,} devices of {request.hardware.name}, global batch {request.global_batch:,}, sequence "
        f"{request.base.sequence:,}: {funnel.total:,} candidates, {len(found.ranking.seconds):,} legal and fitting, "
        f"ranked in {found.seconds:.0f} s"
    )
    console.print(_table(tuple(HEADS), table_rows(found), LEFT))
    if found.stages:
        console.print("\nthe best of each number of stages and chunks:")
        console.print(_table(tuple(STAGES), stage_rows(found), ("pp x vpp", "fastest")))
    for line in more_stages(found):
        console.print(f"* {line}")
    if found.uneven:
        console.print("\nunder the loads, by expected seconds; layouts that run out of memory come last:")
        console.print(_table(tuple(UNEVEN), [one.cells for one in found.uneven], LEFT))
    for line in reasons(found, doubt_of(found, times)):
        console.print(f"* {line}")
    for line in lost(found):
        console.print(f"* {line}")
    console.print("\ndropped from the space, by the first rule that a candidate breaks:")
    console.print(_table(("", "candidates"), [[reason, f"{count:,}"] for reason, count in funnel.lines()], ("",)))
    for line in assumptions(found, times):
        console.print(f"- {line}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=head not in left)
    for row in rows:
        table.add_row(*row)
    return table


SCHEDULE_HEADS = (
    "schedule",
    "layout",
    "recompute",
    "step s",
    "to 1",
    "not under",
    "GiB",
    "bubble",
    "MindFormers 1.9.0",
)
_LEFT = ("schedule", "layout", "recompute", "MindFormers 1.9.0")


def print_schedules(found: BySchedule, of_1f1b: Found, times: TimeModel, console: Console) -> None:
    """Print the table of pipeline schedules, and the cost of swapping activations for the best layout of 1F1B."""
    console.print("\nschedules, each with its fastest layout (predicted; all simulated with the same times of passes):")
    console.print(_table(SCHEDULE_HEADS, rows_of(found, of_1f1b.entries[0], of_1f1b.least), _LEFT))
    console.print(
        "not under: by the estimator no layout of the schedule takes fewer seconds; -: no such bound is known",
        style="dim",
    )
    for line in swap_words(of_1f1b.entries[0].config, times):
        console.print(f"- {line}")


def to_write(found: Found, others: BySchedule, path: Path) -> tuple[Configuration, Path, list[str]]:
    """Return the arguments of `write_overlay` for the fastest layout whose pipeline schedule a recipe can use."""
    one = others.writable(found.uneven)
    if one is None or one.entry is None:
        return found.best.config, path, notes(found)
    words = f"Schedule {one.schedule}; the fastest layout of 1F1B, interleaved or not, was predicted at "
    own = replace(found, entries=[one.entry])
    return one.entry.config, path, [*notes(own), f"{words}{found.entries[0].seconds:.2f} s."]


def rows_of(found: BySchedule, first: Entry, least: float) -> list[list[str]]:
    """Return a table row for the best layout of each pipeline schedule, the fastest first; `first` is the best layout
    of (interleaved) 1F1B, and `least` the lower bound in seconds on all its layouts.
    """
    own = Scheduled(first.config.schedule, first, "", least=least)
    timed = [(one.entry, one) for one in (own, *found.every) if one.entry]
    rows = [
        [
            one.schedule,
            entry.layout,
            entry.recompute,
            f"{entry.seconds:.2f}",
            f"{100 * (entry.seconds / first.seconds - 1):+.1f} %",
            f"{one.least:.2f}" if one.least else "-",
            f"{entry.peak / GIB:.1f}",
            f"{100 * entry.parts['bubble'] / entry.seconds:.1f} %",
            one.runs,
        ]
        for entry, one in sorted(timed, key=lambda pair: pair[0].seconds)
    ]
    return rows + [[one.schedule, one.why, "", "", "", "", "", "", one.runs] for one in found.every if not one.entry]
