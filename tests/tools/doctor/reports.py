"""Probes made by hand, for tests: every worker alike, with a few percent of noise, until one is changed."""

from __future__ import annotations

import itertools
import json
import random

from tools.doctor.checks import Finding
from tools.doctor.outliers import Link, Probe, Worker
from tools.doctor.report import Report, tool_version

ROUNDS = 7


def probe(workers: int = 4, noise: float = 0.03, seed: int = 0, places: bool = False) -> Probe:
    """A host's probe; with `places`, one of as many hosts, a worker each."""
    rng = random.Random(seed)

    def rounds(value: float) -> list[float]:
        return [value * rng.uniform(1 - noise, 1 + noise) for _ in range(ROUNDS)]

    rows = [
        Worker(
            rank=0 if places else rank,
            place=f"node{rank}" if places else "",
            kind="a processor, 4 cores",
            cores=f"{4 * rank}-{4 * rank + 3}",
            matmul=rounds(80),
            memory=rounds(10),
            disk=rounds(400),
            waited=[0.0] * ROUNDS,
            throttled=[0.0] * ROUNDS,
            failed="",
        )
        for rank in range(workers)
    ]
    links = [
        Link(
            source=a,
            target=b,
            bandwidth=rounds(2.0),
            latency=rounds(20.0) if a < b else [],
            waited=[0.0] * ROUNDS,
            failed="",
        )
        for a, b in itertools.permutations(range(workers), 2)
    ]
    return Probe(device="CPU", rounds=ROUNDS, folder="/checkpoints", workers=rows, links=links, notes=[])


def scale(numbers: list[float], factor: float) -> None:
    """Multiply in place."""
    numbers[:] = [number * factor for number in numbers]


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
