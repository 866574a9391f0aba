"""A profiled run as MindSpore's profiler recorded it, whichever device it ran on: kernels of steps, nothing judged yet.

All times in seconds. Shapes are the profiler's, one tuple for each tensor; () where it did not record them.
"""

from __future__ import annotations

from dataclasses import dataclass

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Kernel:
    """One execution of an operator, or, in a profile without a time line, all executions of its kind.

    Args:
        name: with the framework's scope where the profiler knows it ("Default/.../layers-CellList/3-.../MatMul-op0").
        kind: the operator's type, such as MatMulV3 or hcom_allGather_.
        core: what ran it, such as AI_CORE, AI_VECTOR_CORE, AI_CPU, HCCL; "Host" on a CPU.
        ranks: global ranks of a collective's group; () where unknown.
        count: executions.
    """

    name: str
    kind: str
    core: str
    start: float
    seconds: float
    inputs: Shapes = ()
    outputs: Shapes = ()
    ranks: tuple[int, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Step:
    """One step: its kernels by start, and its length; time in which none of them runs belongs to it.

    Where a profile does not tell its steps apart, these are the kernels of `repeats` steps, with that share of their
    seconds.
    """

    kernels: tuple[Kernel, ...]
    seconds: float
    repeats: int = 1


@dataclass(frozen=True)
class Profile:
    """What a folder holds.

    Args:
        source: the folder, in messages.
        device: "Ascend" or "CPU".
        step: the step that is looked at: the one of median length; on a CPU one made of quiet executions.
        steps: how many were recorded.
        timed: kernels have starts, so what runs beside what is known.
        rank: of the profiled device, where the folder says it.
        exposed: (seconds of all communication that nothing hides, hidden seconds) of a profile without a time line.
        notes: what was read leniently, or is missing.
    """

    source: str
    device: str
    step: Step
    steps: int
    timed: bool = True
    rank: int | None = None
    exposed: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
