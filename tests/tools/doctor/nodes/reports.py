"""Reports of hosts for tests, as `tc3 doctor --json` writes them."""

from __future__ import annotations

import json

from tools.doctor.checks import Finding
from tools.doctor.facts import tool_version
from tools.doctor.report import Report

FACTS = {
    "tc3": tool_version(),
    "code": "c0de",
    "driver": "25.5.2",
    "CANN": "8.5.0",
    "packet size of eth0": "9000",
    "recipe": "5eed",
    "data /data/web": ".idx 42 bytes, .bin 1,000 bytes, da7a",
}
CHECKS = {"governor": "ok", "clock": "ok", "swap": "ok"}


def finding(name, verdict="ok", seen="fine"):
    return Finding(name, verdict, seen, "why", "source", "mend it" * (verdict != "ok"))


def report(facts=None, probe=None, **verdicts):
    """A sound host, but for some facts and verdicts of checks."""
    findings = [finding(name, verdict) for name, verdict in {**CHECKS, **verdicts}.items()]
    return Report(findings, {**FACTS, **(facts or {})}, probe)


def folder(path, reports):
    """A folder with HOST.json of each host; a text stands as it is."""
    path.mkdir(exist_ok=True)
    for host, told in reports.items():
        (path / f"{host}.json").write_text(told if isinstance(told, str) else told.text())
    return path


def without(told, part):
    """A report's text that lacks a part."""
    return json.dumps({key: value for key, value in json.loads(told.text()).items() if key != part})
