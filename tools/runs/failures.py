"""This module lists the failures of a run, one for each failed attempt: the worker that caused it, the cause, and the
workers that failed only as a consequence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from tools.files.atomic import last_lines
from tools.files.locks import is_left
from tools.runs.attempts import FOLDER, STOPPED, TOLD, Attempt, End
from tools.runs.readings import Run

# What a log says of a failure, in words: the rows of signatures.yaml, which name their sources. Pure.

UNKNOWN = "unknown"
STOPPED_WORDS, OTHER_WORDS = "{stopped}", "{stopped or told}"  # in a pattern: last words of workers (`attempts.py`)
_TABLE = Path(__file__).with_name("signatures.yaml")
_SHOWN, _WIDTH = 3, 300  # lines that are quoted, and characters of one
_TELLING = re.compile(r"error|exception|critical|failed|killed", re.IGNORECASE)
_NOISE = re.compile(  # MindSpore's and MindFormers' levels below an error, Python's warnings, rules and marks
    r"^\[(DEBUG|INFO|WARNING)\]| - (DEBUG|INFO|WARNING) - |^\S*:\d+: \w*Warning: |^\s*(warnings\.warn\(|[-=~^*_.\s]*$)"
)


@dataclass(frozen=True)
class Signature:
    """A `Signature` is an entry of signatures.yaml. A `Signature` describes one cause of failures: its name, a pattern
    of log lines that show it, and a remedy.
    """

    name: str
    pattern: re.Pattern[str]
    words: str
    source: str
    mend: str = ""
    victim: bool = False


@dataclass(frozen=True)
class Found:
    """A `Found` is the cause of a failure according to a log: the matching entry of signatures.yaml and the matching
    line, or `UNKNOWN` and the most informative lines of the log.

    `victim`: whether the failure of another worker can cause such a line, too, so that the line does not show which
    worker failed first.
    """

    name: str
    words: str
    lines: tuple[str, ...]
    mend: str = ""
    victim: bool = False
    telling: bool = True  # the lines say something of a failure; else they are only the last ones


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the entries of signatures.yaml, the most informative first."""
    rows = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    words = {STOPPED_WORDS: re.escape(STOPPED), OTHER_WORDS: "|".join(map(re.escape, (STOPPED, *TOLD)))}
    for row in rows:
        for name, pattern in words.items():
            row["pattern"] = row["pattern"].replace(name, pattern)
    return tuple(Signature(**row | {"pattern": re.compile(row["pattern"])}) for row in rows)


def without_noise(lines: Sequence[str]) -> list[str]:
    """Return the lines of a log that may describe a failure, without warnings, progress and separators."""
    return [line for line in lines if not _NOISE.search(line)]


def diagnose(lines: Sequence[str]) -> Found:
    """Return the cause of a failure that the lines of one worker's log show. A cause within the worker itself takes
    precedence over a consequence of another worker's failure.
    """
    loud = without_noise(lines)
    for victim in (False, True):
        for row in signatures():
            said = lines if victim else loud
            if row.victim == victim and (telling := [line for line in said if row.pattern.search(line)]):
                return Found(row.name, row.words, _quoted(telling[-1:]), row.mend, victim)
    telling = [line for line in loud if _TELLING.search(line)]
    shown = telling or loud
    words = "no known signature" if any(map(str.strip, lines)) else "the log is empty or missing"
    return Found(UNKNOWN, words, _quoted(shown[-_SHOWN:]), telling=bool(telling))


def _quoted(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line.strip()[:_WIDTH] for line in lines)


_WENT_ON = ("restart", "spare", "smaller", "give up")
_OF_THE_USER = "user error"
_NO_MACHINE = (_OF_THE_USER, "spike")  # causes that say nothing of the machines


@dataclass(frozen=True)
class Failure:
    """A `Failure` describes how one attempt of a run failed.

    Args:
        time: the time of the failure in seconds since 1970; None if no record has it.
        host, rank: the host and the rank of the worker that caused the failure; None if they are not known.
        cause: the cause that the launching process saw (a form of `attempts.Cause`).
        found: the cause that the log of this worker shows.
        victims: for each host or worker that failed as a consequence, the cause that its log shows.
    """

    attempt: int
    time: float | None
    host: str | None = None
    rank: int | None = None
    phase: str | None = None
    step: int | None = None
    cause: str | None = None
    message: str = ""
    found: Found = field(default_factory=lambda: diagnose([]))
    log: Path | None = None
    victims: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Return whether the failure counts as a failure of the machines; a faulty recipe and a loss spike do not
        count.
        """
        return self.name not in _NO_MACHINE

    @property
    def name(self) -> str:
        """Return the cause of the failure in one or two words: the cause that the log shows or, if the log shows none,
        the cause that the launching process saw.
        """
        own = not self.found.victim and self.found.name not in (UNKNOWN, _OF_THE_USER)
        return self.found.name if own else self.cause or self.found.name


def failures(run: Run) -> list[Failure]:
    """Return the failures of all attempts of a run, the oldest first; for a run without attempts, return the failure
    that its last logs show.
    """
    if run.attempts:
        return [failure_of(one) for one in run.attempts if has_failed(one)]
    logs = sorted((run.folder / "logs").glob("worker_*.log"))
    msrun = diagnose(last_lines(run.folder / "logs" / "msrun.log"))
    if msrun.name != "worker failed" or not logs:
        return []
    return [_by_logs(0, logs, None)]


def has_failed(attempt: Attempt) -> bool:
    """Return whether an attempt of a run failed: a node recorded the outcome `failed`, or the attempt's verdict decides
    about a restart (`restart`, `spare`, `smaller` or `give up`) and no node was preempted.
    """
    outcomes = {end.outcome for end in attempt.ends.values()}
    went_on = attempt.verdict is not None and attempt.verdict.decision in _WENT_ON
    return "failed" in outcomes or (went_on and "preempted" not in outcomes)


def untold(run: Run) -> list[int]:
    """Return the numbers of the attempts for which no file records how they ended, for example because of a power cut.
    The newest attempt is one of them only if the process that started it on this host is gone.
    """
    newest = run.attempts[-1:] if is_left(run.folder) else []  # else it may still go on
    return [one.number for one in [*run.attempts[:-1], *newest] if is_untold(one)]


def is_untold(attempt: Attempt) -> bool:
    """Return whether an attempt was planned, but no file records how it ended, or that it ended at all."""
    return attempt.plan is not None and not attempt.ends and attempt.verdict is None


def failure_of(attempt: Attempt) -> Failure:
    """Return the failure of an attempt that its verdict names. If the attempt has no verdict, return the failure of the
    first node that ended with an error. If no node ended with an error, return the failure that the logs show.
    """
    bad = sorted((end for end in attempt.ends.values() if end.outcome == "failed"), key=lambda end: end.time)
    verdict = attempt.verdict
    host = verdict.initiator if verdict else bad[0].host if bad else None
    end = attempt.ends.get(host) if host else None
    if end is None:
        time = min((one.time for one in attempt.ends.values()), default=verdict.time if verdict else None)
        logs = sorted((attempt.folder / "logs").glob("**/worker_*.log"))
        guess = _by_logs(attempt.number, logs, time)
        if host is None:
            return guess
        rank, cause, why = (verdict.rank, verdict.cause, verdict.why) if verdict else (None, None, "")
        return Failure(attempt.number, time, host, rank, cause=cause, message=why)
    rank = verdict.rank if verdict and verdict.rank is not None else end.rank
    log = _log_of(attempt, end, rank)
    found = diagnose(last_lines(log) if log else [])
    if found.name == UNKNOWN and (told := diagnose([end.message])).name != UNKNOWN and not told.victim:
        found = told  # a full disk has no room for the end of a log
    others = [one for one in attempt.ends.values() if one.host != host and one.outcome == "failed"]
    fell = {one.host: _victim(attempt, one) for one in others}
    fell |= {name: "told to end" for name in (verdict.victims if verdict else []) if name not in fell}
    cause = (verdict.cause if verdict else None) or end.cause
    return Failure(attempt.number, end.time, host, rank, end.phase, end.step, cause, end.message, found, log, fell)


def _victim(attempt: Attempt, end: End) -> str:
    log = _log_of(attempt, end, end.rank)
    found = diagnose(last_lines(log)) if log else None
    return found.name if found and found.name != UNKNOWN else end.cause or UNKNOWN


def _log_of(attempt: Attempt, end: End, rank: int | None) -> Path | None:
    """Return the log that an end names, also after the run's folder was moved, when another run may have taken its old
    path; else the worker's.
    """
    logs = attempt.folder / "logs"
    _, inside, name = end.log.rpartition(f"/{FOLDER}/{attempt.folder.name}/logs/")
    named = [logs / name if inside else Path(end.log), *logs.glob(f"**/{Path(end.log).name}")] if end.log else []
    workers = list(logs.glob(f"**/worker_{rank}.log")) if rank is not None else []
    return next((path for path in [*named, *workers] if path.is_file()), None)


def _by_logs(number: int, logs: list[Path], time: float | None) -> Failure:
    """Return the failure of an attempt whose records do not say who began; if the log of exactly one worker shows a
    cause of its own, that worker did.
    """
    said = {log: diagnose(last_lines(log)) for log in logs}
    own = [log for log, found in said.items() if not found.victim and found.name != UNKNOWN]
    log = own[0] if len(own) == 1 else None
    victims = {path.stem: found.name for path, found in said.items() if path != log and found.name != UNKNOWN}
    if log is None:
        logs_of = "several logs" if own else "no log"
        why = f"it is unknown which worker failed first, because {logs_of} of a worker with a cause of its own"
        return Failure(number, time, message=why, victims=victims)
    name = log.stem.split("_")[-1]
    rank = int(name) if name.isdecimal() else None
    return Failure(number, time, None, rank, message="by its log alone", found=said[log], log=log, victims=victims)


def in_words(failure: Failure | None) -> str | None:
    """Return in words who failed, what and where; then what was wrong, in the words of the log or of the process that
    noticed the failure.
    """
    if failure is None:
        return None
    rank = "" if failure.rank is None else f"worker {failure.rank}"
    who = ", ".join(part for part in (failure.host or "", rank) if part) or "nobody knows who"
    what = f"attempt {failure.attempt}: {who}, {failure.name}" + (f", step {failure.step}" if failure.step else "")
    said = failure.message or "; ".join(failure.found.lines)
    return f"{what}: {said}" if said else what
