"""This module makes the HTML page of a bundle (the file of results of `tc3 firsthour`): the verdict, the checks with
their conditions, every finding, and measured values beside predicted values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from launch.firsthour.checks import BY_NAME, WORST, Finding, Outcome, verdict
from tools.files import page as markup
from tools.files.page import Cell
from tools.hardware.units import GIB
from tools.measured import Bundle, measured_memory

_CLASSES = {"ok": "pass", "fail": "fail", "unknown": "note", "warn": "group"}
_STYLE = "td:nth-child(-n+3) { white-space: nowrap }"
_SHOWN = 200  # findings of a check
_LEGEND = {
    "ok": "judged, and as it should be",
    "warn": "costs speed, or may end some runs",
    "fail": "do not start a run before it is mended",
    "unknown": "could not be judged; never taken for ok",
}


def as_html(bundle: Bundle, outcomes: Sequence[Outcome]) -> str:
    """Return the HTML page that shows the results in a bundle of `tc3 firsthour`."""
    manifest = bundle.manifest
    word, _ = verdict(outcomes)
    simulated = " A simulated cluster made these numbers: nothing on this page was measured." * manifest.simulated
    rehearsal = " The device was a CPU: this was a rehearsal." * (manifest.device == "CPU")
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    body = [
        markup.text(f"First hour: {word}", "h1", "fail" if word == "no go" else "pass"),
        markup.text(
            f"{manifest.recipe} on {manifest.devices:,} x {manifest.device}, {manifest.made}.{simulated}{rehearsal}"
        ),
        markup.text(
            f"Versions: {versions}. Recipe {manifest.digest}. Names of hosts are {manifest.names}.", kind="note"
        ),
        _checks(outcomes),
        markup.text("Findings", "h2"),
        _findings(outcomes),
        *_groups(outcomes),
        *_step(outcomes),
        *_memory(bundle),
        markup.legend("What the verdicts mean", _LEGEND),
        markup.text("Files of the bundle", "h2"),
        markup.table(
            ("file", "bytes", "SHA-256"),
            [(name, f"{known['bytes']:,}", known["sha256"]) for name, known in manifest.files.items()],
        ),
    ]
    return markup.page(f"First hour of {manifest.device}: {word}", body, _STYLE)


def _checks(outcomes: Sequence[Outcome]) -> str:
    rows = [
        (one.check, Cell(one.verdict, _CLASSES[one.verdict]), f"{one.seconds:.1f}", BY_NAME[one.check].asks,
         BY_NAME[one.check].gate, ", ".join(BY_NAME[one.check].needs) or "nothing")
        for one in outcomes
    ]  # fmt: skip
    return markup.table(("check", "verdict", "seconds", "question", "gate", "needs"), rows)


def _findings(outcomes: Sequence[Outcome]) -> str:
    every = [(one.check, item) for one in outcomes for item in one.findings]
    every.sort(key=lambda pair: WORST.index(pair[1].verdict))
    rows = [_row(check, item) for check, item in every[:_SHOWN]]
    if len(every) > _SHOWN:
        rows.append((f"{len(every) - _SHOWN} more in outcomes.json", "", "", "", "", ""))
    return markup.table(("verdict", "check", "host", "device", "seen", "remedy"), rows)


def _row(check: str, item: Finding) -> tuple[str | Cell, ...]:
    seen = item.seen if item.seen.startswith(item.what) or item.what == check else f"{item.what}: {item.seen}"
    device = "" if item.device is None else str(item.device)
    return Cell(item.verdict, _CLASSES[item.verdict]), check, item.where or "all", device, seen, item.remedy


def _step(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of the measured and the predicted seconds of each term, before and after the calibration."""
    seen: Mapping[str, Mapping[str, float]] = next((one.evidence for one in outcomes if one.check == "stage"), {})
    if not seen:
        return []
    fitted = next((one.evidence for one in outcomes if one.check == "calibrate"), {})
    after = fitted.get("after", {})
    rows = [
        (
            name,
            *(f"{1e3 * table[name]:,.2f}" if name in table else "" for table in (seen["predicted"], measured, after)),
        )
        for measured in [seen["terms"]]
        for name in measured
        if measured[name] or seen["predicted"].get(name)
    ]
    heads = ("term of the step, ms", "predicted", "measured", "calibrated")
    return [markup.text("A step, by its terms", "h2"), markup.table(heads, rows, kind="numbers")]


def _groups(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of the collectives of the recipe's groups: the usual seconds of the fastest group, and the
    predicted seconds.
    """
    seen = next((one.evidence for one in outcomes if one.check == "collectives"), {})
    rows = [
        (
            f"{row['group']}: {row['operator']}, {row['ranks']} ranks that are {row['stride']} apart",
            f"{row['bytes'] / 1e6:,.1f}", str(len(row["groups"])),
            f"{1e3 * min(map(median, row['seconds'])):,.3g}" if row["seconds"] else "not measured",
            "" if row["predicted"] is None else f"{1e3 * row['predicted']:,.3g}",
        )
        for row in seen.get("rows", ())
    ]  # fmt: skip
    heads = ("collective", "MB", "groups", "ms, measured", "ms, predicted")
    title = markup.text("Collectives of the recipe's groups", "h2")
    return [title, markup.table(heads, rows, kind="numbers")] if rows else []


def _memory(bundle: Bundle) -> list[str]:
    terms = measured_memory(bundle)
    if terms is None:
        return []
    words = (
        f"Activations are {terms.activations:.3f} times and buffers {terms.buffers:.3f} times what is modelled; "
        f"{terms.reserve_bytes / GIB:.2f} GiB of a device are in use beside the model."
    )
    return [markup.text("Memory", "h2"), markup.text(words)]
