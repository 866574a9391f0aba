"""This module decides how a run continues after an attempt (one start of its workers) has ended: with another start,
with a spare host, with fewer hosts, or not at all.

The module reads no file and starts no process. `initiator` finds the host that caused the end of an attempt, `verdict`
says what happens next, and `next_hosts` names the hosts of the next attempt.

The first part finds who caused the end. One failure ends the workers of all hosts: the other hosts lose their
connections, or are told to end. So the module distinguishes the host that caused it from the other hosts by the ends
and the signs of life that the hosts wrote. What a host reports about its end has this weight:

* A report has most weight if no failure of another host can cause it: a worker killed (SIGKILL), stopped or known to
  hang, a message of the worker that ended itself, a port already in use, a lost disk or network link, or a whole host
  that is gone (the time of its end is then its last sign of life);
* A report has less weight if it may be a consequence of another host's end: any other signal or exit code;
* A report does not count against its host if it reports a failure of other hosts: a lost connection, a wait that was
  too long, a collective that failed. A worker ended by SIGTERM also counts here: MindSpore's workers end themselves in
  this way when msrun's scheduler tells them that another worker is lost.

The host whose end is the earliest by the disk's clock is blamed. A host whose network link is gone, or whose worker is
stopped, has made the other hosts wait since its last step, which may be long before any agent noticed it. Agents check
for ends a few times a second, so ends within MARGIN of each other count as simultaneous: then the end with more weight
is blamed, and among equal ends no host is named. A hang is blamed on the only host that knows which of its workers is
stuck, whichever host noticed the hang first; otherwise on the only host that is behind all other hosts in its phase and
step. In all other cases the module names no host.

The second part decides what happens next. Failures are counted since the last progress. Progress means a newer
checkpoint from which the run can go on: an attempt begins from a later step than the previous attempt (by their plans,
as the later attempt counts steps), or the run holds a checkpoint of a later step than the one from which the attempt
began (`saved`). Steps that were trained but not saved are not progress, because they have to be trained again. So a run
may fail any number of times in several months, and `Rules.restarts` limits how often it may fail without progress.

After a user's error, or a loss that is not finite, there is no further attempt, because the same weights and data give
the same loss. A loss after which plugins.spike_guard goes back to a checkpoint ("spike") is different: the samples of
the spike are left out, and the plugin itself counts how often this happens. So such an attempt does not count as a
failure here, and `Rules` does not limit it.
"""

from __future__ import annotations

import math
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from launch.run.failure import OF_LOGS
from plugins.spike_guard.plan import NO_MORE
from tools.runs.attempts import Attempt, Cause, Decision, End, Plan, Verdict
from tools.runs.places import translated

MARGIN = 1.0  # seconds between two ends within which their order is not known
SILENT = 10.0  # seconds since its last beat after which a host that wrote no end is gone, and not just slow to write it
_COMPLAINTS = re.compile(
    r"timed? ?out|disconnect|heartbeat|broken pipe|connection .*(refused|reset|closed|lost|aborted)|by peer"
    r"|\bEI000[26]\b|notify wait|unreachable"
    r"|launch kernel failed\W+name:\S*(reduce|gather|all_?to_?all|send|receive|broadcast|barrier)",
    re.IGNORECASE,
)
_FULL_DISK = re.compile(r"no space left on device|disk quota exceeded|is the disk full", re.IGNORECASE)
# causes of an end that no other host brings about
_SURE_CAUSES = frozenset(("user error", "not finite", "spike", "port", "lost disk", "lost node", "never came"))
_NOBODYS_FAULT = ("user error", "not finite", "spike", "port")  # causes that say nothing against the host
_GONE_CAUSES = ("lost node", "lost disk", "never came")  # a host that cannot take part as it is
_EARLY = ("start", "compile", "first step")  # phases in their order; those of a step come in any


@dataclass(frozen=True)
class Began:
    """A `Began` names the `host` that caused a failure, with the record `end` of how its workers ended; if `host` is
    None, no host can be blamed, and `why` holds the reason.
    """

    why: str
    host: str | None = None
    end: End | None = None
    cause: Cause | None = None  # known without a host, where all that say anything say the same


def initiator(attempt: Attempt, now: float = math.inf) -> Began:
    """Return which host caused the end of a failed attempt; `attempt.plan` must exist. `now` is the present time by the
    shared disk's clock, in seconds since 1970.
    """
    known = _of_all_hosts(attempt, now)
    failed = {host: end for host, end in known.items() if end.outcome == "failed"}
    deaths = {host: end for host, end in failed.items() if not _complains(end)}
    if deaths:
        return _first_death(attempt, deaths)
    if any(end.cause == "hang" for end in failed.values()):
        return _holding_up(known)
    if failed:
        told = "; ".join(words(failed[host]) for host in sorted(failed))
        return Began(
            f"{told}: these ends follow from another host's end, and nothing shows which host or link caused it"
        )
    return Began("no host has recorded what ended the attempt")


def silent(attempt: Attempt, now: float) -> list[str]:
    """Return the hosts of the plan that no longer give a sign of life and have not written how their workers ended."""
    assert attempt.plan
    hosts = [host for host in attempt.plan.hosts if host not in attempt.ends]
    return [host for host in hosts if host not in attempt.beats or now - attempt.beats[host].time > SILENT]


def _of_all_hosts(attempt: Attempt, now: float) -> dict[str, End]:
    """Return how the workers of each host of the plan ended. A host that has not written this counts as lost if it
    gives no sign of life, and otherwise as a host that was asked to end its workers.
    """
    assert attempt.plan
    ends = {host: end for host, end in attempt.ends.items() if host in attempt.plan.hosts}
    latest = max((end.time for end in ends.values() if math.isfinite(end.time)), default=attempt.plan.time)
    gone = silent(attempt, now)
    for host in attempt.plan.hosts:
        beat = attempt.beats.get(host)
        phase, step = (beat.phase, beat.step) if beat else ("start", attempt.plan.before)
        if host in gone:
            cause: Cause = "lost node" if beat else "never came"
            ends[host] = End(
                host, latest, "failed", phase, step, cause, message="the host did not record how its part ended"
            )
        elif host not in ends:
            ends[host] = End(host, latest, "told to end", phase, step)
        elif not math.isfinite(ends[host].time):  # it could not ask the disk
            ends[host] = replace(ends[host], time=latest)
    return ends


def _complains(end: End) -> bool:
    """Return whether an end only reports a failure on other hosts."""
    if end.cause == "hang":
        return end.rank is None
    told = end.code == -signal.SIGTERM or bool(_COMPLAINTS.search(end.message))
    return end.cause in (None, "exit", "signal") and not _killed(end) and told


def _killed(end: End) -> bool:
    return end.code in (-signal.SIGKILL, -signal.SIGSTOP)


def is_sure(end: End) -> bool:
    """Return whether the workers of a host surely failed because of that host: no failure of another host can end
    workers in this way.
    """
    return end.cause in _SURE_CAUSES or end.cause == "hang" or _killed(end)


def _time_of(attempt: Attempt, end: End) -> float:
    """Return the time at which the failure of a host began: of a lost host, the time of its last sign of life; of a
    host whose workers hang, the time of their last step.
    """
    beat = attempt.beats.get(end.host)
    if beat is None or end.cause not in ("lost node", "hang"):
        return end.time
    gone = bool(end.by) or end.host not in attempt.ends
    return min(beat.time if gone else beat.since, end.time)


def _first_death(attempt: Attempt, deaths: dict[str, End]) -> Began:
    times = {host: _time_of(attempt, end) for host, end in deaths.items()}
    first = min(times, key=lambda host: times[host])
    near = [host for host in deaths if times[host] - times[first] <= MARGIN]
    best = [host for host in near if is_sure(deaths[host])] or near
    if len(best) == 1:
        end = deaths[best[0]]
        shared = end.phase == "save" or OF_LOGS in end.message
        if shared and _FULL_DISK.search(end.message) and attempt.plan and len(attempt.plan.hosts) > 1:
            return Began(f"{words(end)}: the disk that all hosts share is full", cause=end.cause)
        return Began(words(end), best[0], end, end.cause)
    causes = {deaths[host].cause for host in best}
    told = "; ".join(words(deaths[host]) for host in sorted(best))
    return Began(
        f"{told}: these ends are too close in time to tell which came first",
        cause=causes.pop() if len(causes) == 1 else None,
    )


def _holding_up(known: dict[str, End]) -> Began:
    """Return, of several hosts that all wait, the host that has a stuck worker or whose progress is behind that of all
    other hosts.
    """
    stuck = [end for end in known.values() if end.rank is not None and end.outcome == "told to end"]
    if len(stuck) == 1:
        return Began(f"{stuck[0].host}: worker {stuck[0].rank} is stuck", stuck[0].host, stuck[0], "hang")
    places = {host: _progress(end) for host, end in known.items()}
    lowest = min(places.values())
    last = [host for host, place in places.items() if place == lowest]
    if len(last) == 1 < len(places):
        end = known[last[0]]
        return Began(f"{end.host} was behind all others: {_where(end)}", end.host, end, "hang")
    why = f"no worker made progress: {_where(known[last[0]])}"
    if len(known) > 1:
        why += ", and no host is behind all others, so it is unknown which host blocked them"
    return Began(why, cause="hang")


def _progress(end: End) -> tuple[int, int]:
    """Return the progress of a host as numbers (phase, step), so that the progress of hosts can be compared."""
    return _EARLY.index(end.phase) if end.phase in _EARLY else len(_EARLY), end.step


def words(end: End) -> str:
    """Return a clause that says how the workers of a host ended: the host, the worker, the failure, and the phase."""
    what = end.message or {"lost node": "no sign of life"}.get(end.cause or "", end.cause or "failed")
    return f"{end.host}: {what} ({_where(end)})"


def _where(end: End) -> str:
    return f"in {end.phase} {end.step + 1}" if end.phase == "step" else f"in phase {end.phase}, after step {end.step}"


@dataclass(frozen=True)
class Smaller:
    """A `Smaller` describes how a run continues on fewer hosts: it uses the first `hosts` of the available hosts, and
    changes its recipe by `overrides`.
    """

    hosts: int
    overrides: list[str]
    why: str


Can = Callable[[list[str]], Smaller | str | None]  # hosts -> how the recipe runs only on them; or why it does not


@dataclass(frozen=True)
class Rules:
    """A `Rules` says after how many failures a run is given up, and how long agents wait before the next attempt.
    `hosts` are all hosts that the run may use, in the order of use.
    """

    restarts: int = 3  # failures without progress between them that are followed by another attempt
    same_step: int = 3  # failures in a row at one step of the training: the step's fault, whoever takes it
    same_host: int = 3  # failures that a host has begun: it is left out where another one can take its place
    first: float = 2.0  # seconds before the attempt that follows the first failure; doubled for each further one
    most: float = 300.0  # seconds, of such a wait
    hosts: list[str] = field(default_factory=list)

    def wait(self, failures: int) -> float:
        """Return the seconds to wait after this number of failures without progress (at least 1)."""
        return float(min(self.most, self.first * 2.0 ** min(failures - 1, 60)))


def verdict(
    attempt: Attempt,
    earlier: Sequence[Attempt],
    rules: Rules,
    can: Can,
    *,
    now: float = math.inf,
    saved: int | None = None,
) -> Verdict:
    """Return which host caused the end of `attempt`, and how the run continues.

    Args:
        attempt: the attempt, with its plan and the ends of its hosts as far as they were written.
        earlier: the attempts before it, the oldest first, with their verdicts.
        can: a function that returns how the recipe runs on only these hosts (`launch.agent.smaller`), or why it cannot.
        now: the disk's clock; without it hosts that have written no end count as gone.
        saved: the step of the newest complete checkpoint, counted as the checkpoint of the attempt's plan counts; None
            if it is not known.
    """
    hosts = _plan(attempt).hosts
    ends = [end for host, end in attempt.ends.items() if host in hosts]
    outcomes = {end.outcome for end in ends}
    time = now if math.isfinite(now) else 0.0
    if outcomes == {"done"} and len(ends) == len(hosts):
        return Verdict(time, "done", "every host has finished")
    if "interrupted" in outcomes:
        return Verdict(time, "leave", f"{_names(ends, 'interrupted')}: the user stopped the run")
    if "preempted" in outcomes and "failed" not in outcomes:
        return Verdict(time, *_after_notice(_plan(attempt), ends, can))
    began = initiator(attempt, now)
    decision, why, wait = _Failed(attempt, began, list(earlier), rules, can, now, saved).follows()
    victims = sorted(end.host for end in ends if end.outcome == "failed" and end.host != began.host)
    rank = began.end.rank if began.end else None
    return Verdict(time, decision, f"{began.why}. {why}", began.host, rank, began.cause, victims, wait)


def next_hosts(
    attempt: Attempt, verdict: Verdict, there: list[str], earlier: Sequence[Attempt] = (), rules: Rules | None = None
) -> list[str]:
    """Return the hosts of the next attempt by node rank: as many hosts as `attempt` had, chosen from the hosts that are
    present (`there`).

    Hosts that took part in the last attempt and are not left out come first, in the same order; then the plan's spare
    hosts, then other hosts. Hosts that are left out because of the failures that they caused come last, if there are no
    others. After a smaller attempt the list holds all hosts that are present, because some may be back;
    `launch.agent.smaller` says how many of them the recipe takes.
    """
    plan, rules = _plan(attempt), rules or Rules()
    bad = _repeated([*earlier, replace(attempt, verdict=verdict)], rules)
    order = list(dict.fromkeys([*plan.hosts, *plan.spares, *rules.hosts, *sorted(there)]))
    chosen = [host for host in order if host in there and host not in bad]
    without = verdict.initiator if verdict.decision == "smaller" else None
    chosen += [host for host in order if host in there and host in bad and host != without]
    return chosen if plan.overrides else chosen[: len(plan.hosts)]


@dataclass(frozen=True)
class _Failed:
    """A `_Failed` holds a failed attempt and everything on which its consequence depends; the fields are the arguments
    of `verdict`.
    """

    attempt: Attempt
    began: Began
    earlier: list[Attempt]
    rules: Rules
    can: Can
    now: float
    saved: int | None

    def follows(self) -> tuple[Decision, str, float]:
        """Return the consequence of the failure: (decision, reason, seconds to wait before the next attempt)."""
        if self.began.cause == "user error":
            return "give up", "The user must correct this first, because another attempt would end in the same way", 0.0
        if self.began.cause == "not finite":
            alike = "There is no further attempt, because the same weights and data give the same loss"
            return "give up", f"{alike}; plugins.spike_guard would roll back and leave the data out", 0.0
        if self.began.cause == "spike":
            return self._after_spike()
        count = len(self.fruitless)
        if count > self.rules.restarts:
            return "give up", f"The run is given up after {_times(count)} in a row without a newer checkpoint", 0.0
        same = _at_same_step([*self.earlier, self.attempt])
        if same >= self.rules.same_step:
            return (
                "give up",
                f"The run is given up after {_times(same)} in a row after step {_newest_step(self.attempt)}",
                0.0,
            )
        decision, why = self._who_goes_on()
        if decision == "give up":
            return decision, why, 0.0
        most = self.rules.restarts + 1
        why = f"{why} ({_times(count)} without a newer checkpoint; after {most} in a row the run is given up)"
        return decision, why, self.rules.wait(count)

    def _after_spike(self) -> tuple[Decision, str, float]:
        """Return what happens after a spike, which the run's spike guard has already decided."""
        if self.began.end and NO_MORE in self.began.end.message:
            return "give up", "The run is given up, as the spike guard has decided", 0.0
        decision, why = self._who_goes_on()
        return decision, "The run starts again without the samples of the spike" if decision == "restart" else why, 0.0

    @cached_property
    def fruitless(self) -> list[Attempt]:
        """Return the failed attempts since training last made progress: the oldest comes first, the present attempt
        last.
        """
        found, plan = [self.attempt], _plan(self.attempt)
        if self.saved is not None and self.saved > plan.step:
            return found
        for before in reversed(self.earlier):
            if before.plan is None or _counted(before.plan, before.plan.before, plan) < plan.before:
                break
            if _failed(before) and not _spiked(before):  # else its hosts were preempted, or it went back
                found.insert(0, before)
        return found

    def _who_goes_on(self) -> tuple[Decision, str]:
        """Return (decision, why) from the hosts that cannot or should not take part: restart, use a spare, or go on
        with fewer hosts.
        """
        plan = _plan(self.attempt)
        bad, gone = self._bad(), self._gone()
        spares = [host for host in plan.spares if host not in gone | bad]
        for out in (gone | bad, gone):
            names = [host for host in plan.hosts if host in out]
            if names and len(spares) >= len(names):
                return (
                    "spare",
                    f"The run starts again with {', '.join(spares[: len(names)])} in place of {', '.join(names)}",
                )
        worn = self.began.host if self.began.host in bad - gone and self._keeps_failing() else None
        names = [host for host in plan.hosts if host in gone or host == worn]
        if not names:
            return "restart", "The run starts again"
        left = [host for host in [*plan.hosts, *spares] if host not in names]
        how = self.can(left) if left else None
        if isinstance(how, Smaller):
            return "smaller", f"The run goes on without {', '.join(names)}, {how.why}"
        reason = f"; it cannot run on fewer hosts: {how}" if how else ""
        if worn:
            times = _times(self.rules.same_host)
            why = f"The run is given up, because {worn} caused {times} or more and no host can replace it{reason}"
            return "give up", why
        why = f"The run starts again when {', '.join(names)} is back, because there is no spare host{reason}"
        return "restart", why

    def _bad(self) -> set[str]:
        own = Verdict(0.0, "restart", "", self.began.host, cause=self.began.cause)
        return _repeated([*self.earlier, replace(self.attempt, verdict=own)], self.rules)

    def _gone(self) -> set[str]:
        ends = self.attempt.ends.values()
        gone = {end.host for end in ends if end.cause in _GONE_CAUSES or end.outcome == "preempted"}
        gone -= {end.host for end in ends if end.by == end.host}  # its agent was started anew, and says so: it is there
        return gone | set(silent(self.attempt, self.now))

    def _keeps_failing(self) -> bool:
        """Return whether one host of several caused as many failures without progress between them as a host
        may cause.
        """
        own = [each for each in self.fruitless if each is self.attempt or _initiator(each) == self.began.host]
        return len(_plan(self.attempt).hosts) > 1 and len(own) >= self.rules.same_host


def _after_notice(plan: Plan, ends: list[End], can: Can) -> tuple[Decision, str]:
    """Return what happens after some hosts were preempted: the remaining hosts continue if they can."""
    out = [end.host for end in ends if end.outcome == "preempted"]
    left = [host for host in [*plan.hosts, *plan.spares] if host not in out]
    why = f"{_names(ends, 'preempted')} had to leave the run"
    if not left:
        return "leave", f"{why}, and no host is left"
    if len(left) >= len(plan.hosts):
        return "spare", f"{why}; a spare host takes over"
    how = can(left)
    if isinstance(how, Smaller):
        return "smaller", f"{why}; the run goes on {how.why}"
    return "leave", f"{why}, and there is no spare host" + (f"; it cannot run on fewer hosts: {how}" if how else "")


def _repeated(attempts: Sequence[Attempt], rules: Rules) -> set[str]:
    """Return the hosts that have caused `same_host` failures of the run, whatever progress was made between the
    failures.
    """
    began = Counter(_initiator(each) for each in attempts if each.verdict and each.verdict.cause not in _NOBODYS_FAULT)
    return {host for host, times in began.items() if host and times >= rules.same_host}


def _at_same_step(attempts: Sequence[Attempt]) -> int:
    """Return how many attempts in a row, the last one included, failed after the same step; 0 before training has
    begun.
    """
    step, count, plan = _newest_step(attempts[-1]), 0, _plan(attempts[-1])
    for each in reversed(attempts):
        if _spiked(each):
            continue
        trained = any(end.phase not in ("start", "compile") for end in each.ends.values())
        if not (each.plan and trained and _failed(each)) or _counted(each.plan, _newest_step(each), plan) != step:
            break
        count += 1
    return count


def _failed(attempt: Attempt) -> bool:
    return any(end.outcome == "failed" for end in attempt.ends.values())


def _spiked(attempt: Attempt) -> bool:
    return attempt.verdict is not None and attempt.verdict.cause == "spike"


def _newest_step(attempt: Attempt) -> int:
    """Return the newest step that any host has trained, as the attempt counts steps."""
    said = [*(end.step for end in attempt.ends.values()), *(beat.step for beat in attempt.beats.values())]
    return max(_plan(attempt).before, *said, 0)


def _counted(of: Plan, step: int, into: Plan) -> float:
    """Return the number that a step of one attempt has in another attempt, whose global batch may be another one: also
    the first attempt of a launch goes on from a checkpoint, and the attempts before it may not have ended.
    """
    return translated(step, of.batch, into.batch)


def _initiator(attempt: Attempt) -> str | None:
    return attempt.verdict.initiator if attempt.verdict else None


def _plan(attempt: Attempt) -> Plan:
    assert attempt.plan, "an attempt is judged by its plan"
    return attempt.plan


def _names(ends: list[End], outcome: str) -> str:
    return ", ".join(sorted(end.host for end in ends if end.outcome == outcome))


def _times(count: int) -> str:
    return f"{count} failure{'s' * (count > 1)}"
