"""What a probe found, as it stands in JSON: lists hold one number for each round."""

from __future__ import annotations

from typing import TypedDict


class Worker(TypedDict):
    """One worker.

    Attributes:
        place: where it runs; "" for this host.
        kind: workers of one kind should be equally fast: the device, and how many cores.
        cores: that it was bound to, in Linux's form; "" if it was not bound.
        matmul: GFLOP/s while it was let run.
        memory: GB/s (10^9 bytes, read and written) of a copy in the host's memory while it was let run.
        disk: MB/s (10^6 bytes) of a write with fsync where checkpoints go, all workers of the host at once.
        waited: the share of its time in which it was ready, but other processes had its cores.
        throttled: the share of its time in which its control group was stopped by a limit (cpu.max).
        failed: what ended it; "" for a worker that answered to the end.
    """

    rank: int
    place: str
    kind: str
    cores: str
    matmul: list[float]
    memory: list[float]
    disk: list[float]
    waited: list[float]
    throttled: list[float]
    failed: str


class Link(TypedDict):
    """From one worker to another, as indices into the workers.

    Attributes:
        bandwidth: GB/s of the fastest message of 1 MiB, with its acknowledgement.
        latency: microseconds, half of the fastest round trip; empty in the other direction, of which it is, too.
        failed: why it could not be measured, "" if it could.
        waited: the share of the time in which not both ends had a core: 1 - (1 - w) (1 - w') of their own shares.
    """

    source: int
    target: int
    bandwidth: list[float]
    latency: list[float]
    waited: list[float]
    failed: str


class Probe(TypedDict):
    """The probe of one host, or of several places driven from one."""

    device: str
    rounds: int
    folder: str
    workers: list[Worker]
    links: list[Link]
    notes: list[str]
