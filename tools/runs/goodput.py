"""This module divides the wall time of a run into consecutive spans, each with one kind of work (such as training,
saving or waiting).

    1. Each attempt is a frame, from the writing of its plan to its end; a run without recorded attempts has a frame for
       each start.
    2. Within a frame, steps, saves and evaluations follow each other in the order of their records. The time before the
       first step counts as the start, the time between two steps as data and callbacks, and the time after the last
       step as the stop.
    3. The first step after each start of the workers includes compiling: its time beyond that of a usual step is
       `compile`.
    4. A step is `lost` if a later attempt started from an earlier place in the data, so that the step's samples had to
       be trained again. All other steps are `kept`. Places are compared, not numbers of steps, because a resume with
       another global batch numbers the steps anew (`tools.runs.places`).
    5. The time between two attempts counts as waiting.

Goodput is the time of the `kept` steps divided by the wall time: the effective training time ratio of Meta's study of
large clusters (Kokolis et al. 2024, arXiv 2410.21680). All times are whole microseconds, so that the kinds of work add
up exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from plugins.lines import Span
from tools.runs.attempts import Attempt
from tools.runs.places import END
from tools.runs.readings import Part, Run

Kind = Literal["kept", "lost", "compile", "start", "save", "evaluation", "between", "stop", "waiting", "unknown"]
WORDS: dict[Kind, str] = {
    "kept": "steps that were kept",
    "lost": "steps that were trained again",
    "compile": "compiling (without the time of a usual step)",
    "start": "starting",
    "save": "saving checkpoints",
    "evaluation": "evaluations",
    "between": "between steps (data etc.)",
    "stop": "after an attempt's last step",
    "waiting": "waiting for the next attempt",
    "unknown": "not known",
}
NEVER = 1 << 62
_APART = 1_000_000  # microseconds by which two clocks may differ without a note


@dataclass(frozen=True)
class Piece:
    """A `Piece` is a span of a run's time with one kind of work, from `begin` to `end` in microseconds since 1970. If
    the span is a series of training steps, the field `between` holds the microseconds between the steps.
    """

    begin: int
    end: int
    kind: Kind
    attempt: int
    between: int = 0


@dataclass
class Frame:
    """A `Frame` holds the start time (the time of the plan) and the end time of one attempt of a run, in microseconds
    since 1970.
    """

    number: int
    begin: int
    end: int
    parts: list[Part] = field(default_factory=list)
    attempt: Attempt | None = None
    cut: float = END  # the place behind which steps were made again later


@dataclass(frozen=True)
class Ledger:
    """A `Ledger` is the whole time of a run, divided into consecutive spans (`pieces`) with one kind of work each."""

    frames: list[Frame]
    pieces: list[Piece]
    kept_steps: int
    lost_steps: int
    notes: list[str]

    @property
    def wall(self) -> int:
        """Return the number of microseconds from the start of the run's first attempt to the end of its last
        attempt.
        """
        return self.frames[-1].end - self.frames[0].begin

    def totals(self, attempt: int | None = None) -> dict[Kind, int]:
        """Return for each kind of work the number of microseconds that one attempt, or all attempts together, spent on
        it.
        """
        found: Counter[Kind] = Counter()
        for piece in self.pieces:
            if attempt is None or piece.attempt == attempt:
                found[piece.kind] += piece.end - piece.begin - piece.between
                found["between"] += piece.between
        return {kind: found[kind] for kind in WORDS}

    @property
    def goodput(self) -> float | None:
        """Return the share of the run's time that was spent on steps which no later attempt repeated; return None for a
        run of no duration.
        """
        return self.totals()["kept"] / self.wall if self.wall else None


def micro(seconds: float) -> int:
    """Return a number of seconds as whole microseconds."""
    return round(seconds * 1_000_000)


def missing(metrics: Path) -> str:
    """Return a sentence if the file with the losses of a run is missing although other ranks have written theirs, or if
    the run's folder is gone, so that nothing is known of its steps. Return "" if nothing is missing.
    """
    if not (folder := metrics.parents[1]).is_dir():
        return f"{folder} is no longer there, so that nothing is known of the run"
    others = not metrics.exists() and any(metrics.parent.glob("rank_*.jsonl"))
    return f"{metrics}, which holds the losses of the run, is missing, so that its steps are unknown" * others


def ledger(run: Run) -> Ledger | str:
    """Return the time of a run divided by kind of work, or a sentence that says why the run's records do not determine
    this.
    """
    timed = [part for part in run.parts if part.timed]
    notes = []
    if old := sum(len(part) for part in run.parts if not part.timed):
        notes.append(
            f"{old:,} records of steps come from an older version without times, so that these steps and their "
            "time are left out"
        )
    if old and not timed:
        return "the steps of this run have no times, because an older version of tc3 trained it"
    frames = _frames(run, timed)
    if not frames:
        return "no step"
    notes += _cut(run, frames)
    told = next((frame.begin for frame in frames if frame.parts), 0) if old else 0  # before, steps may lack their times
    pieces: list[Piece] = []
    for before, frame in zip([None, *frames], frames, strict=False):
        if before and before.end < frame.begin:
            known = frame.attempt and before.attempt
            pieces.append(Piece(before.end, frame.begin, "waiting" if known else "unknown", frame.number))
        untold = not frame.parts and frame.begin < min(frame.end, told)
        pieces += [Piece(frame.begin, frame.end, "unknown", frame.number)] if untold else _pieces(run, frame)
    steps = (pair for part in timed for pair in pairwise(zip(part["step"], part["time"], strict=True)))
    back = [step for (_, before), (step, time) in steps if time < before]
    if back:
        notes.append(
            f"the recorded times go back at step {int(back[0]):,}"
            f"{f' and at {len(back) - 1:,} more' if back[1:] else ''}, because a clock was set or the lines are of "
            "two runs; the time of the steps before that step is not known, and goodput is wrong"
        )
    if apart := [str(frame.number) for frame in frames if _is_apart(frame)]:
        notes.append(
            f"steps of attempt{'s' * (len(apart) > 1)} {', '.join(apart)} have times before its plan or after its end, "
            "because the clocks of a host and of the disk differ; goodput and these times are wrong"
        )
    if any(frame.attempt is None for frame in frames):
        notes.append(
            "the folder has no attempts/, so that starts, stops and waiting are unknown, and the time counts from "
            "the first step"
        )
    if timed and run.usual() is None:
        notes.append("no attempt has a second step, so that the whole first step counts as compiling")
    kept = sum(part.place(step) <= frame.cut for frame in frames for part in frame.parts for step in part["step"])
    return Ledger(frames, pieces, kept, sum(len(p) for f in frames for p in f.parts) - kept, notes)


def _frames(run: Run, timed: list[Part]) -> list[Frame]:
    """Return the attempts that have a plan, in the order of time, each with its parts: those whose lines name it, or
    that name no attempt and began during it. Each other part that began before the first plan makes a frame of its own.
    """
    planned = sorted((one for one in run.attempts if one.plan), key=lambda one: one.plan.time if one.plan else 0.0)
    begins = [micro(one.plan.time) for one in planned if one.plan]
    places = {one.plan.name: at for at, one in enumerate(planned, 1) if one.plan and one.plan.name}
    own: list[list[Part]] = [[] for _ in planned]
    alone: list[Part] = []
    for part in timed:
        at = places.get(part.attempt or "") or sum(begin <= micro(part.moment or 0.0) for begin in begins)
        (own[at - 1] if at else alone).append(part)
    alone.sort(key=lambda part: part.moment or 0.0)
    first = planned[0].number - len(alone) if planned else 0
    frames = [Frame(first + at, micro(part.moment or 0.0), 0, [part]) for at, part in enumerate(alone)]
    frames += [Frame(a.number, b, 0, parts, a) for a, b, parts in zip(planned, begins, own, strict=True)]
    for frame, limit in zip(frames, [*(later.begin for later in frames[1:]), NEVER], strict=False):
        frame.end = max(frame.begin, min(_end(run, frame, limit), limit))
    return frames


def _is_apart(frame: Frame) -> bool:
    """Return whether the steps of an attempt have times that are not between its plan and its end. An end that another
    host has written may be earlier than the last step.
    """
    ends = [end for end in frame.attempt.ends.values() if not end.by] if frame.attempt else []
    latest = max((micro(end.time) for end in ends), default=NEVER) + _APART
    if frame.attempt is None or not frame.attempt.plan or len(ends) < len(frame.attempt.plan.hosts):
        latest = NEVER
    times = [(micro(part.moment or 0.0), micro(part["time"][-1])) for part in frame.parts]
    return any(begin < frame.begin - _APART or end > latest for begin, end in times)


def _end(run: Run, frame: Frame, limit: int) -> int:
    """Return when an attempt ended: by its nodes, its verdict, or else its last sign before `limit`."""
    attempt = frame.attempt
    if attempt and attempt.ends:
        return micro(max(end.time for end in attempt.ends.values()))
    if attempt and attempt.verdict:
        return micro(attempt.verdict.time)
    signs = [part["time"][-1] for part in frame.parts]
    signs += [beat.time for beat in attempt.beats.values()] if attempt else []
    signs += [span.end for span in run.spans if frame.begin <= micro(span.begin) < limit]
    return max([frame.begin, *map(micro, signs)])


def _cut(run: Run, frames: list[Frame]) -> list[str]:
    """Set for each attempt the place behind which later attempts trained again: the earliest place from which one of
    them started, also where it has made no step yet. Return sentences about attempts of which this place is unknown.
    """
    unknown: list[int] = []
    earliest = END
    trained = next((frame.begin for frame in frames if frame.parts), NEVER)  # earlier attempts repeat no step
    for frame in reversed(frames):
        frame.cut = min([earliest, *(part.left for part in frame.parts[-1:] if part.left is not None)])
        begins = [part.begin for part in frame.parts]
        if not begins and frame.attempt:
            begin = run.begin_of(frame.attempt)
            begins = [] if begin is None else [begin]
            unknown += [frame.number] if begin is None and frame.begin > trained else []
        earliest = min([earliest, *begins])
    return [
        f"the global batch was changed, and it is unknown after which step attempt {number} began, which made no step; "
        "steps before it are counted as kept"
        for number in reversed(unknown)
    ]


def _pieces(run: Run, frame: Frame) -> list[Piece]:
    """Return one frame, from its begin to its end."""
    pieces: list[Piece] = []
    now, seen = frame.begin, False

    def until(end: int, kind: Kind) -> None:
        """Add a span of time from the end of the last span to `end`, spent on the work `kind`. A span of training steps
        is joined with a preceding span of training steps.
        """
        nonlocal now
        end = min(max(end, now), frame.end)
        last = pieces[-1] if pieces else None
        if last and kind == last.kind:
            pieces[-1] = Piece(last.begin, end, kind, frame.number, last.between)
        elif end > now:
            pieces.append(Piece(now, end, kind, frame.number))
        now = end

    def gap(end: int) -> None:
        """Extend the list of spans up to the end of the next event. An event is a series of training steps, or a single
        event such as a save.
        """
        nonlocal now
        end = min(end, frame.end)
        if end <= now:
            return
        last = pieces[-1] if pieces else None
        if seen and last and last.kind in ("kept", "lost"):
            pieces[-1] = Piece(last.begin, end, last.kind, frame.number, last.between + end - now)
            now = end
        else:
            until(end, "between" if seen else "start")

    for begin, end, kind in _events(run, frame):
        gap(begin)
        until(end, kind)
        seen = seen or kind in ("kept", "lost", "compile")
    if frame.end > now:
        until(frame.end, "stop" if seen else "start")
    return pieces


def _events(run: Run, frame: Frame) -> Iterator[tuple[int, int, Kind]]:
    """Yield (begin, end, kind) of steps, saves and evaluations of one frame, by their begin."""
    spans: list[Span] = [span for span in run.spans if frame.begin <= micro(span.begin) < frame.end]
    waiting = sorted(spans, key=lambda span: span.begin, reverse=True)
    for part in frame.parts:
        usual = run.usual(part)
        for at, (step, time, seconds) in enumerate(zip(part["step"], part["time"], part["seconds"], strict=True)):
            end = micro(time)
            begin = end - micro(seconds if seconds > 0 else 0.0)
            while waiting and micro(waiting[-1].begin) < begin:
                span = waiting.pop()
                yield micro(span.begin), micro(span.end), span.kind
            if at == 0:
                compiled = max(begin, end - micro(usual or 0.0))
                yield begin, compiled, "compile"
                begin = compiled
            yield begin, end, "kept" if part.place(step) <= frame.cut else "lost"
    while waiting:
        span = waiting.pop()
        yield micro(span.begin), micro(span.end), span.kind
