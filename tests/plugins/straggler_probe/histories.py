"""Probes of runs that never were."""

from __future__ import annotations

import numpy as np

from plugins.straggler_probe.record import Record


def history(
    rng, ranks=8, probes=40, every=5, jitter=0.01, lasting=0.005, device="Ascend", seconds=10.0, slow=None, data=0.0
) -> list[Record]:
    """Records of healthy ranks, but `slow`: {rank: (kind, by what, from which probe)}.

    Args:
        jitter: the jitter of a probe's time.
        lasting: the lasting differences of chips.
        data: the waits for data; None if the host cannot see them.
    """
    times = 0.01 * rng.normal(1, lasting, ranks) * rng.lognormal(0, jitter, (probes, ranks))
    times = np.where(rng.random(times.shape) < 0.002, times * 1.5, times)
    waits = {kind: rng.uniform(0, 0.01, times.shape) for kind in ("data", "host", "limit")}
    for rank, (kind, by, begin) in (slow or {}).items():
        if kind == "device":
            times[begin:, rank] *= 1 + by
        else:
            waits[kind][begin:, rank] += by
    return [
        Record(
            step=(k + 1) * every,
            rank=rank,
            host=f"node{rank // 8}",
            device=device,
            work=1,
            probe=float(times[k, rank]),
            seconds=seconds,
            steps=every,
            data=None if data is None else float(waits["data"][k, rank]) * seconds,
            cpu=seconds / 2,
            waited=float(waits["host"][k, rank] + waits["limit"][k, rank]) * seconds,
            stopped=float(waits["limit"][k, rank]) * seconds,
        )
        for k in range(probes)
        for rank in range(ranks)
    ]
