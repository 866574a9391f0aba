"""A comparison of hosts, for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from tools.doctor.checks import COLOURS
from tools.doctor.nodes.answers import Answer
from tools.doctor.nodes.compare import ORDER, Comparison, Outlier
from tools.doctor.report import Report
from tools.host.names import shorten


def text(answers: Mapping[str, Answer], comparison: Comparison) -> str:
    """Outliers alone, worst first; one line each for what all hosts have in common."""
    reported = sum(isinstance(answer.told, Report) for answer in answers.values())
    lines = [f"{len(answers)} host{'s' * (len(answers) > 1)}, {reported} with a report"]
    width = max([len(item.what) for item in comparison.outliers], default=0)
    lines += [line for item in comparison.outliers for line in _lines(item, width)]
    for verdict in ORDER:
        if names := comparison.everywhere.get(verdict):
            lines.append(f"{verdict} on every host: {', '.join(names)}")
    if comparison.common:
        lines.append(
            "the same everywhere: " + ", ".join(f"{name} {value}" for name, value in comparison.common.items())
        )
    counts = [(verdict, sum(item.verdict == verdict for item in comparison.outliers)) for verdict in ORDER]
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts if count) or "no outlier"])


def _lines(item: Outlier, width: int) -> list[str]:
    verdict, indent = click.style(f"{item.verdict:8s}", fg=COLOURS[item.verdict]), " " * (8 + width + 2)
    lines = [f"{verdict}{item.what:{width}s}  {shorten(item.hosts)}: {item.seen}"]
    if len(item.hosts) > 1:
        lines[0] = f"{verdict}{item.what:{width}s}  {len(item.hosts)} hosts, {shorten(item.hosts)}: {item.seen}"
    if item.usual:
        lines.append(f"{indent}{item.usual}")
    if item.mend:
        lines.append(f"{indent}mend: {item.mend}")
    return lines


def as_json(answers: Mapping[str, Answer], comparison: Comparison) -> dict[str, Any]:
    """Everything, hosts written out, and the measured clocks in seconds."""
    return {
        "hosts": {host: isinstance(answer.told, Report) for host, answer in answers.items()},
        "clocks": {host: asdict(answer.skew) for host, answer in answers.items() if answer.skew is not None},
        **asdict(comparison),
    }
