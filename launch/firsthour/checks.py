"""This module lists the checks by which `tc3 firsthour` judges a new cluster: the order of the checks, the earlier
checks that each check needs, and the verdict that follows from their outcomes.

A check relies only on the earlier checks that it needs. If a check that it needs failed, or judged nothing, the check
is not run and its outcome is unknown; the outcome names the first checks that failed or judged nothing, because these
are the checks to look at. Checks that do not depend on a failed check are still run. Each
check's outcome is saved when the check ends, so an interrupted command resumes where it stopped: checks that failed or
judged nothing are run again, and the outcomes of all other checks are kept.

`verdict` returns "go", "go with", or "no go". An item that could not be judged is unknown, never ok. The functions of
this module start nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from plugins.errors import DataError, TC3Error, not_json
from tools.files.atomic import becomes, write_atomically
from tools.files.locks import LOCK

Verdict = Literal["ok", "warn", "fail", "unknown"]
WORST: Sequence[Verdict] = ("fail", "unknown", "warn", "ok")
GO, GO_WITH, NO_GO = "go", "go with", "no go"
NO_SUBJECT = "no_subject"  # in the evidence of a check: the recipe has nothing that the check could judge


@dataclass(frozen=True)
class HourCheck:
    """An `HourCheck` is one check of a new cluster by `tc3 firsthour`.

    Args:
        share: the check's share of the budget.
        needs: the earlier checks whose results this check uses.
        essential: whether no run may start while this check's result is unknown.
        asks: the question that the check answers.
        gate: the condition under which the result is ok.
        remedy: how to mend a failure.
    """

    name: str
    share: float
    needs: tuple[str, ...]
    essential: bool
    asks: str
    gate: str
    remedy: str


HOUR_CHECKS: tuple[HourCheck, ...] = (
    HourCheck(
        "hosts", 0.04, (), True, "Is every node fit to train?",
        "no check of tc3 doctor fails on any node", "do what tc3 doctor says for the check",
    ),
    HourCheck(
        "versions", 0.01, (), True, "Do software, drivers, clocks, disks and ports agree on all nodes?",
        "every fact is the same on all nodes, no clock is more than 0.1 s from the median",
        "install what most nodes have",
    ),
    HourCheck(
        "devices", 0.10, (), True, "Is a device, a link, a disk or a memory slower or smaller than others?",
        "no device, link or disk is an outlier; every device has the same memory", "start without the named device",
    ),
    HourCheck(
        "collectives", 0.05, ("devices",), False, "Are the collectives of the recipe's groups as fast as predicted?",
        "no group is slower than others of its kind, none takes twice the predicted seconds",
        "start without the named node; look at its links",
    ),
    HourCheck(
        "operators", 0.10, (), True, "Does every device compute correct results, and the same ones twice?",
        "every result is within the report's Table 2, repeated to the same bits, and equal on all devices",
        "take the named device out; compare CANN and firmware with the others",
    ),
    HourCheck(
        "mini", 0.10, ("operators",), True, "Does a mini of the recipe train on one device as on a CPU?",
        "losses agree with golden ones, or with a CPU beside an NPU, by the report's Table 2",
        "tc3 accuracy diagnose A B names the module",
    ),
    HourCheck(
        "parallel", 0.15, ("versions", "mini"), True, "Do the recipe's kinds of parallelism train as one device does?",
        "on CPU losses agree to 1e-5, gradients and weights by Table 2; on NPUs losses agree by Table 2",
        "tc3 accuracy diagnose A B names the ranks",
    ),
    HourCheck(
        "stage", 0.25, ("devices", "mini"), False, "How far is a real stage from its prediction?",
        "the measured step is within a factor of two of the prediction", "tc3 search explain names the term",
    ),
    HourCheck(
        "resume", 0.10, ("mini",), True, "Does a killed run go on to the same losses?",
        "every loss after the resume has the same bits as without a kill", "tc3 accuracy diagnose RUN names the step",
    ),
    HourCheck(
        "calibrate", 0.05, ("stage",), False, "Which efficiencies and memory terms does this cluster have?",
        "the fitted model gives the measured step to 1 %", "measure a quieter machine, or more steps",
    ),
)  # fmt: skip
BY_NAME = {check.name: check for check in HOUR_CHECKS}
_JUDGED_AGAIN = {"hosts": "versions"}  # check -> the check that judges its evidence, also where it has failed


@dataclass(frozen=True)
class Finding:
    """A `Finding` is one result of a check of a new cluster, such as a slow disk on one host.

    Args:
        where: the host; "" if the finding is not about a single host.
        device: the device's number on the host, or None.
        what: the name of the checked item.
        seen: the result in words.
        remedy: how to mend the fault; "" if nothing is wrong.
    """

    verdict: Verdict
    what: str
    seen: str
    where: str = ""
    device: int | None = None
    remedy: str = ""


@dataclass(frozen=True)
class Outcome:
    """An `Outcome` is the result of a check: the verdict, the findings, the evidence (JSON), and the seconds that the
    check took.
    """

    check: str
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def told(self) -> bool:
        """Return whether the check has judged at least one item."""
        return any(item.verdict != "unknown" for item in self.findings)

    @property
    def bears(self) -> bool:
        """Return whether later checks that need this check may rely on its outcome: nothing failed, and at least one
        item was judged.
        """
        return self.verdict != "fail" and self.told

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as plain values for JSON; the values of the evidence are not copied."""
        return {**vars(self), "findings": [asdict(item) for item in self.findings]}


def outcome_of(content: Mapping[str, Any]) -> Outcome:
    """Return the outcome that the plain values describe; `Outcome.as_json` makes such values."""
    findings = tuple(Finding(**one) for one in content["findings"])
    return Outcome(**{**content, "findings": findings})


def judged(check: str, findings: Sequence[Finding], evidence: dict[str, Any], seconds: float = 0.0) -> Outcome:
    """Return the outcome of a check, whose verdict is that of its worst finding; an outcome without findings is
    unknown.
    """
    verdict: Verdict = next((one for one in WORST if any(item.verdict == one for item in findings)), "unknown")
    return Outcome(check, verdict, tuple(findings), evidence, seconds)


def run_checks(
    work: Mapping[str, Callable[[float, Mapping[str, Outcome]], tuple[Sequence[Finding], dict[str, Any]]]],
    state: Path,
    budget: float,
    tell: Callable[[Outcome, bool], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run the checks in order, and return their outcomes.

    Args:
        work: check -> a function of (seconds that it may take, earlier outcomes) to findings and evidence. A check
            without a function is unknown.
        state: folder in which each outcome is kept as soon as it is known.
        tell: called with each outcome, and whether it was kept from an earlier start.
    """
    done: dict[str, Outcome] = {}
    for check in HOUR_CHECKS:
        kept = _kept(state, check)
        blocked = _missing(check, done)
        if kept and not blocked:
            found = kept
        elif blocked:
            found = judged(check.name, [_not_run(check, done)], {})
        else:
            found = _run(check, work.get(check.name), check.share * budget, done, clock)
            if check.name in _JUDGED_AGAIN:  # before the new evidence is kept, or a kill in between would keep both
                (state / f"{_JUDGED_AGAIN[check.name]}.json").unlink(missing_ok=True)
        done[check.name] = found
        write_atomically(state / f"{check.name}.json", json.dumps(found.as_json()) + "\n")
        tell(found, found is kept)
    return list(done.values())


def _missing(check: HourCheck, done: Mapping[str, Outcome]) -> list[str]:
    """Return the checks that `check` needs and on whose outcomes it cannot rely, in order."""
    return [name for name in check.needs if not done[name].bears]


def _roots(check: HourCheck, done: Mapping[str, Outcome]) -> list[str]:
    """Return the checks that were run and without which `check` cannot be run, in order: those that it needs, or those
    that kept these from being run.
    """
    missing = _missing(check, done)
    return list(dict.fromkeys(root for name in missing for root in _roots(BY_NAME[name], done) or [name]))


def _not_run(check: HourCheck, done: Mapping[str, Outcome]) -> Finding:
    """Return the finding of a check that was not run, because checks that it needs failed or judged nothing."""
    reasons = []
    for name in _missing(check, done):
        failed = done[name].verdict == "fail"
        how = "failed" if failed else "was not run" if _missing(BY_NAME[name], done) else "could judge nothing"
        reasons.append(f"{name} {how}")
    todo = [
        f"mend what the check {name} found"
        if done[name].verdict == "fail"
        else f"see in the lines of the check {name} why it could judge nothing"
        for name in _roots(check, done)
    ]
    words = f"this check was not run, because {' and '.join(reasons)}"
    return Finding("unknown", check.name, words, remedy=f"first {', and '.join(todo)}; then run tc3 firsthour again")


def _run(
    check: HourCheck,
    function: Callable[[float, Mapping[str, Outcome]], tuple[Sequence[Finding], dict[str, Any]]] | None,
    seconds: float,
    done: Mapping[str, Outcome],
    clock: Callable[[], float],
) -> Outcome:
    """Return the outcome of a check; an error that the user can correct makes the outcome unknown, with the error's
    message.
    """
    began = clock()
    if function is None:
        return judged(check.name, [Finding("unknown", check.name, "nothing here can run this check")], {})
    try:
        findings, evidence = function(seconds, done)
    except (TC3Error, OSError) as error:
        words = " ".join(str(error).split())
        remedy = "" if isinstance(error, TC3Error) else check.remedy  # ours say themselves what to do
        findings, evidence = [Finding("unknown", check.name, words, remedy=remedy)], {}
    return judged(check.name, findings, evidence, clock() - began)


def _kept(state: Path, check: HourCheck) -> Outcome | None:
    """Return the outcome that an earlier call of the command has stored for a check; None if the check must run
    again.
    """
    path = state / f"{check.name}.json"
    if not path.is_file():
        return None
    try:
        found = outcome_of(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError):
        return None  # an outcome that cannot be read is found anew
    return found if found.bears else None


_BEFORE = "ladder.json"  # in place of state.json, in a folder of an older version


def own_state(state: Path, key: Mapping[str, str], again: bool) -> None:
    """Make the folder for the outcomes of all checks, or make sure that an existing folder belongs to the same recipe
    and software.

    Args:
        key: the values on which outcomes depend.
        again: whether earlier outcomes are deleted.

    Raises:
        DataError: the folder holds the outcomes of another recipe, or of other software, or files of something else.
    """
    path = state / "state.json"
    names = sorted(each.name for each in state.iterdir()) if state.is_dir() else []
    foreign = [name for name in names if becomes(name) not in (LOCK, path.name)]
    if foreign and path.name not in names and _BEFORE not in names:
        raise DataError(
            f"--work {state}: this folder holds other files ({foreign[0]}), but no results of tc3 firsthour, so "
            "tc3 firsthour does not write into it; choose another --work"
        )
    if path.is_file() and not again:
        try:
            known = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: the file {not_json(error)}; start over with --force") from None
        for name in [*key, *(name for name in known if name not in key)]:
            if known.get(name) != key.get(name):
                raise DataError(
                    f"{state}: the results in this folder are of {name} {known.get(name)}, but this command was "
                    f"started with {name} {key.get(name)}; choose another --work, or start over with --force"
                )
        return
    for check in HOUR_CHECKS:
        (state / f"{check.name}.json").unlink(missing_ok=True)
    write_atomically(path, json.dumps(key) + "\n")


def verdict(outcomes: Sequence[Outcome]) -> tuple[str, list[str]]:
    """Return "go", "go with", or "no go", and a line for each finding that is not ok, the worst finding first.

    The verdict is "no go" if a check failed, or if an essential check could not be judged or is not among the outcomes.
    An essential check of which the recipe has no subject, such as parallelism on one device, prevents no run.
    """
    wanting = [(item, one.check) for one in outcomes for item in one.findings if item.verdict != "ok"]
    absent = [check for check in HOUR_CHECKS if check.name not in {one.check for one in outcomes}]
    wanting += [(Finding("unknown", check.name, "the results do not hold this check"), check.name) for check in absent]
    wanting.sort(key=lambda pair: WORST.index(pair[0].verdict))
    lines = [line_of(check, item) for item, check in wanting]
    told = {one.check for one in outcomes if one.told or one.evidence.get(NO_SUBJECT)}
    if any(one.verdict == "fail" for one in outcomes) or any(
        check.essential and check.name not in told for check in HOUR_CHECKS
    ):
        return NO_GO, lines
    return (GO_WITH, lines) if lines else (GO, [])


def line_of(check: str, item: Finding) -> str:
    """Return one finding as a line of text."""
    place = f"{item.where or 'all nodes'}{'' if item.device is None else f', device {item.device}'}"
    remedy = f"; remedy: {item.remedy}" if item.remedy else ""
    return f"{item.verdict:8s}{check}: {item.what} ({place}): {item.seen}{remedy}"
