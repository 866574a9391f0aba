"""What `tc3 doctor --json` prints of one host, and how it is read again, possibly on another one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

from tools.doctor.checks import Finding, Verdict
from tools.doctor.facts import Facts, tool_version
from tools.doctor.probe.form import Probe

_FIELDS = {field.name for field in fields(Finding)}
_MEASURES = ("matmul", "memory", "disk", "bandwidth", "latency")
_VERDICTS = get_args(Verdict)


class ReportError(ValueError):
    """A text is no report, or not one of this tool's version; the message goes after the host's name."""


@dataclass(frozen=True)
class Report:
    """One host: its findings, its facts, and what its probe measured, if it was asked to."""

    findings: Sequence[Finding]
    facts: Facts
    probe: Probe | None = None

    def text(self) -> str:
        """As JSON, in one line."""
        return json.dumps(
            {"findings": [asdict(item) for item in self.findings], "facts": self.facts, "probe": self.probe}
        )


def read_report(text: str) -> Report:
    """The report in a text.

    Raises:
        ReportError: it is not JSON to its end, or not what `Report.text` of this version writes.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        start = " ".join(text.split())[:60]
        raise ReportError(f"no whole JSON: {start!r}..." if start else "no report at all") from None
    if isinstance(data, list):
        raise ReportError("a report of an earlier tc3: update the checkout there")
    facts = data.get("facts") if isinstance(data, dict) else None
    if not isinstance(facts, dict) or not all(isinstance(value, str | None) for value in facts.values()):
        raise ReportError("JSON, but no report of tc3 doctor")
    if facts.get("tc3") != tool_version():
        raise ReportError(f"a report of tc3 {facts.get('tc3')}, here is {tool_version()}: not compared")
    findings, probe = data.get("findings"), data.get("probe")
    if not isinstance(findings, list) or not all(map(_is_finding, findings)) or not _is_probe(probe):
        raise ReportError("a report that lacks a part: its findings or its probe cannot be read")
    return Report([Finding(**item) for item in findings], facts, probe)


def _is_finding(item: object) -> bool:
    return (
        isinstance(item, dict)
        and item.keys() == _FIELDS
        and all(isinstance(value, str) for value in item.values())
        and item["verdict"] in _VERDICTS
    )


def _is_probe(value: Any) -> bool:
    """None, or a probe whose links are between its workers, and whose rates and times are no zeros."""
    if value is None or not _is(value, Probe):
        return value is None
    ends = {link[end] for link in value["links"] for end in ("source", "target")}
    numbers = [row[key] for row in value["workers"] + value["links"] for key in _MEASURES if key in row]
    return ends <= set(range(len(value["workers"]))) and all(number > 0 for rounds in numbers for number in rounds)


def _is(value: Any, form: Any) -> bool:
    """Whether a value out of JSON has a form: a TypedDict, a list, an optional one, or a plain type."""
    if is_typeddict(form):
        kinds = get_type_hints(form)
        return isinstance(value, dict) and value.keys() == kinds.keys() and all(_is(value[k], kinds[k]) for k in kinds)
    if get_origin(form) is list:
        return isinstance(value, list) and all(_is(item, get_args(form)[0]) for item in value)
    if get_args(form):
        return any(_is(value, one) for one in get_args(form))
    if form is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return isinstance(value, form)
