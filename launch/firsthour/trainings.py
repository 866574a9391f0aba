"""This module judges the trainings of `tc3 firsthour`: it compares losses with golden losses, each kind of parallelism
with one device, and a resumed run with a run that was not killed. The functions of this module are pure: they judge the
trainings of a simulated cluster (`launch.firsthour.played`) by the same rules as real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.firsthour.checks import Finding
from tools.accuracy.equivalence.matrix import FAIL, KNOWN, PASS
from tools.accuracy.judge import tolerance

STEPS = 3  # of the trainings that are compared with golden losses or with one device
ALL_STEPS, SAVE = 12, 4  # of the trainings that are killed and resumed: all, and between saves
CURVE = tolerance("bfloat16", 1)
MENDS = "tc3 accuracy diagnose A B on the two runs"
RESUME = "tc3 accuracy diagnose on the run's folder"
_VERDICTS: Mapping[str, Any] = {PASS: "ok", FAIL: "fail", KNOWN: "warn"}


def rank_counts(node: int, nodes: int, most: int) -> list[int]:
    """Return the numbers of devices on which a small model trains: 2, the devices of one node, and the devices of all
    nodes.

    A recipe for one device has none. Each number is a power of two and at most `most`, so that the samples or tokens of
    a step can be divided into that many equal parts. The number of devices of each node is a power of two as well,
    because msrun starts equally many workers on all nodes.
    """
    each, times = (1 << count.bit_length() - 1 for count in (node, nodes))
    found = {1 << min(count, most).bit_length() - 1 for count in (2, each, each * times) if 1 < count <= node * nodes}
    return sorted(found - {1})


def judge_golden(content: Mapping[str, Any], known: str) -> list[Finding]:
    """Return the findings of the comparison of a training with golden losses.

    Args:
        content: "golden": a line for each number that differs, "without_golden_numbers": runs that have none, "steps",
            "rows" and "passed", as tc3 accuracy equivalence --json prints them.
        known: name of the golden file, or "".
    """
    if content["golden"]:
        first, *rest = content["golden"]
        more = f" (further golden numbers that differ: {len(rest)})" if rest else ""
        return [Finding("fail", "golden losses", f"{first}{more}", remedy=MENDS)]
    if not content["passed"]:  # nothing was trained that could differ from golden losses
        why = next((row["reason"] for row in content["rows"] if row["reason"]), "it did not end")
        return [Finding("fail", "training", f"the training failed: {why}", remedy=MENDS)]
    if content["without_golden_numbers"] or not known:
        words = "this recipe has no golden numbers"
        mend = "tc3 accuracy equivalence RECIPE --golden FOLDER --update on a trusted CPU"
        trained = Finding("ok", "training", f"{content['steps']} steps in one process")
        return [trained, Finding("unknown", "golden losses", words, remedy=mend)]
    return [Finding("ok", "golden losses", f"{content['steps']} steps as in {known}")]


def judge_parallel(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return a finding for each kind of parallelism that was compared with one device.

    Args:
        rows: "name", "status", "reason", "tensors", "used" and "findings" of each, as tc3 accuracy equivalence --json
            prints them.
    """
    found = []
    for row in rows:
        first = next((str(one["meaning"]) for one in row["findings"]), "")
        words = (
            f"{row['tensors']} tensors compared, at most {float(row['used']):.0%} of a tolerance used"
            if row["tensors"]
            else ""
        )
        seen = "; ".join(filter(None, [first, row["reason"], words])) or row["status"]
        mend = MENDS if row["status"] == FAIL else ""
        found.append(Finding(_VERDICTS.get(row["status"], "unknown"), row["name"], seen, remedy=mend))
    return found or [Finding("unknown", "parallel", "no strategy could be run for this recipe")]


def judge_resume(wanted: Mapping[str, float], got: Mapping[str, float], killed: int, save: int) -> list[Finding]:
    """Return the finding about a run that was killed and resumed.

    Args:
        wanted, got: step -> loss, without and with the kill.
        killed: the last step before the kill.
        save: the step of the checkpoint from which the run went on; 0 if it began anew.
    """
    if not save:
        return [Finding("fail", "resume", "the run began anew, instead of going on from a checkpoint", remedy=RESUME)]
    if wanted.keys() != got.keys():
        return [Finding("fail", "resume", f"{len(got)} of {len(wanted)} steps were trained")]
    if not wanted:
        return [Finding("unknown", "resume", "there are no losses to compare")]
    wrong = [step for step in wanted if wanted[step] != got[step]]
    if wrong:
        step = wrong[0]
        seen = f"step {step}: loss {got[step]!r} after the resume, {wanted[step]!r} without a kill"
        return [Finding("fail", "resume", seen, remedy=RESUME)]
    words = f"killed after step {killed}, gone on from step {save}; {len(wanted)} losses have the same bits"
    return [Finding("ok", "resume", words)]


def judge_curves(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return a finding for each run whose losses were compared with those of another run. The tolerance `CURVE` is that
    of Table 2 of the TeleChat3-MoE report for single 16-bit values, because the error of a mean over tokens is no
    larger than the error of one token.

    Args:
        rows: "name"; "wanted": step -> loss; "got": step -> loss, or None where the step was not trained.
    """
    found = []
    for row in rows:
        missing = [step for step in row["wanted"] if row["got"].get(step) is None]
        if missing or not row["wanted"]:
            words = f"step {missing[0]} has no loss" if missing else "there are no losses to compare with"
            found.append(Finding("unknown", row["name"], words))
            continue
        off = {step: abs(row["got"][step] - loss) / abs(loss) for step, loss in row["wanted"].items()}
        wrong = [step for step in off if not off[step] <= CURVE]  # true of NaN too
        step = wrong[0] if wrong else max(off, key=lambda one: off[one])
        got, wanted = row["got"][step], row["wanted"][step]
        seen = f"step {step}: the loss {got:.6g} must be {wanted:.6g} with a relative error of at most {CURVE:g}"
        found.append(Finding("fail" if wrong else "ok", row["name"], seen, remedy=MENDS if wrong else ""))
    return found or [Finding("unknown", "losses", "no run could be compared")]
