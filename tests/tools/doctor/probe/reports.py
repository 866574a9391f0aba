"""Probes made by hand, for tests: every worker alike, with a few percent of noise, until one is changed."""

from __future__ import annotations

import itertools
import random

from tools.doctor.probe.form import Link, Probe, Worker

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
