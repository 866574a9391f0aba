"""Which host began the end of an attempt, apart from its victims. Pure: from the ends and beats that hosts wrote.

One failure ends all hosts: the others lose their connections, or are told to end. What a host says of its end is worth

* most, where nothing elsewhere brings it about: a worker killed (SIGKILL), stopped or known to hang, a message of the
  worker that ended itself, a port taken, a disk or link gone, the whole host gone (then it was alive at its last beat);
* less, where it may be an answer to another host's end: any other signal or exit code;
* nothing about itself, where it complains of others: a connection lost, a wait that was too long, a collective that
  failed. A worker ended by SIGTERM complains, too: MindSpore's workers end themselves so when msrun's scheduler tells
  them that another one is lost.

The earliest by the disk's clock began it; a host whose link is gone, or whose worker is stopped, has held the others
up since its last step, which may be long before anybody noticed. Agents look a few times a second, so that ends within
MARGIN of each other have no order: then what is worth more goes first, and of equals nobody is named. A hang is of the
one host that knows which of its workers is stuck, whoever saw the hang first; else of the one that is behind all
others, by its phase and step. Nothing else is guessed from.
"""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass, replace

from tools.runs.attempts import Attempt, Cause, End

MARGIN = 1.0  # seconds
SILENT = 10.0  # seconds since its last beat after which a host that wrote no end is gone, and not just slow to write it
_COMPLAINTS = re.compile(
    r"timed? ?out|disconnect|heartbeat|broken pipe|connection .*(refused|reset|closed|lost|aborted)|by peer"
    r"|\bEI000[26]\b|notify wait|unreachable"
    r"|launch kernel failed\W+name:\S*(reduce|gather|all_?to_?all|send|receive|broadcast|barrier)",
    re.IGNORECASE,
)
_OWN = frozenset(("user error", "not finite", "spike", "port", "lost disk", "lost node", "never came"))
_EARLY = ("start", "compile", "first step")  # phases in their order; those of a step come in any


@dataclass(frozen=True)
class Began:
    """`host` began it with `end`; without a host nobody can be named, and `why` says what there was instead."""

    why: str
    host: str | None = None
    end: End | None = None
    cause: Cause | None = None  # known without a host, where all that say anything say the same


def initiator(attempt: Attempt, now: float = math.inf) -> Began:
    """Who began the end of an attempt that failed; `attempt.plan` is there. `now` by the disk's clock."""
    known = _of_all_hosts(attempt, now)
    failed = {host: end for host, end in known.items() if end.outcome == "failed"}
    deaths = {host: end for host, end in failed.items() if not _complains(end)}
    if deaths:
        return _first(attempt, deaths)
    if any(end.cause == "hang" for end in failed.values()):
        return _behind(known)
    if failed:
        told = "; ".join(words(failed[host]) for host in sorted(failed))
        return Began(f"{told}: answers to another host's end, and nothing tells whose fault or which link's it was")
    return Began("no host has said what ended it")


def silent(attempt: Attempt, now: float) -> list[str]:
    """Hosts of the plan that wrote no end and are gone."""
    assert attempt.plan
    hosts = [host for host in attempt.plan.hosts if host not in attempt.ends]
    return [host for host in hosts if host not in attempt.beats or now - attempt.beats[host].time > SILENT]


def _of_all_hosts(attempt: Attempt, now: float) -> dict[str, End]:
    """An end for each of the plan's hosts: lost, for those that are gone and nobody wrote so; told to end, if slow."""
    assert attempt.plan
    ends = {host: end for host, end in attempt.ends.items() if host in attempt.plan.hosts}
    latest = max((end.time for end in ends.values() if math.isfinite(end.time)), default=attempt.plan.time)
    gone = silent(attempt, now)
    for host in attempt.plan.hosts:
        beat = attempt.beats.get(host)
        phase, step = (beat.phase, beat.step) if beat else ("start", attempt.plan.step)
        if host in gone:
            cause: Cause = "lost node" if beat else "never came"
            ends[host] = End(host, latest, "failed", phase, step, cause, message="it has said nothing of its end")
        elif host not in ends:
            ends[host] = End(host, latest, "told to end", phase, step)
        elif not math.isfinite(ends[host].time):  # it could not ask the disk
            ends[host] = replace(ends[host], time=latest)
    return ends


def _complains(end: End) -> bool:
    """Whether an end only speaks of other hosts."""
    if end.cause == "hang":
        return end.rank is None
    told = end.code == -signal.SIGTERM or bool(_COMPLAINTS.search(end.message))
    return end.cause in (None, "exit", "signal") and not _killed(end) and told


def _killed(end: End) -> bool:
    return end.code in (-signal.SIGKILL, -signal.SIGSTOP)


def is_sure(end: End) -> bool:
    """Whether no other host's end brings about one like this."""
    return end.cause in _OWN or end.cause == "hang" or _killed(end)


def _time(attempt: Attempt, end: End) -> float:
    """When it happened: for a lost host, as far back as its last beat; where it only stands still, as its last step."""
    beat = attempt.beats.get(end.host)
    if beat is None or end.cause not in ("lost node", "hang"):
        return end.time
    gone = bool(end.by) or end.host not in attempt.ends
    return min(beat.time if gone else beat.since, end.time)


def _first(attempt: Attempt, deaths: dict[str, End]) -> Began:
    times = {host: _time(attempt, end) for host, end in deaths.items()}
    first = min(times, key=lambda host: times[host])
    near = [host for host in deaths if times[host] - times[first] <= MARGIN]
    best = [host for host in near if is_sure(deaths[host])] or near
    if len(best) == 1:
        end = deaths[best[0]]
        return Began(words(end), best[0], end, end.cause)
    causes = {deaths[host].cause for host in best}
    told = "; ".join(words(deaths[host]) for host in sorted(best))
    return Began(f"{told}: too close together to tell", cause=causes.pop() if len(causes) == 1 else None)


def _behind(known: dict[str, End]) -> Began:
    """Of hosts that all wait the one with a worker that is stuck, or that is behind all others."""
    stuck = [end for end in known.values() if end.rank is not None and end.outcome == "told to end"]
    if len(stuck) == 1:
        return Began(f"{stuck[0].host}: worker {stuck[0].rank} is stuck", stuck[0].host, stuck[0], "hang")
    places = {host: _place(end) for host, end in known.items()}
    lowest = min(places.values())
    last = [host for host, place in places.items() if place == lowest]
    if len(last) == 1 < len(places):
        end = known[last[0]]
        return Began(f"{end.host} was behind all others: {_where(end)}", end.host, end, "hang")
    why = f"nothing moved: {_where(known[last[0]])}"
    if len(known) > 1:
        why += ", and no host is behind all others, so nobody can tell which one held them up"
    return Began(why, cause="hang")


def _place(end: End) -> tuple[int, int]:
    """How far a host had come."""
    return _EARLY.index(end.phase) if end.phase in _EARLY else len(_EARLY), end.step


def words(end: End) -> str:
    """An end in a clause: who, what, where."""
    what = end.message or {"lost node": "no sign of life"}.get(end.cause or "", end.cause or "failed")
    return f"{end.host}: {what} ({_where(end)})"


def _where(end: End) -> str:
    return f"in {end.phase} {end.step + 1}" if end.phase == "step" else f"in phase {end.phase}, after step {end.step}"
