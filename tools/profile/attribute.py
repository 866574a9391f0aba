"""A profiled step by the estimator's terms: every second of it has one, and they add up to the step.

1. *computing*: a kernel's own time; where two run at once the second's is what it goes on alone.
2. *communication*: its exposed time, in which nothing is computed; what is hidden is kept beside it.
3. *gaps*: nothing runs: the host. A gap belongs to what comes after it: a layer, a layer's experts, the optimizer
   (on a CPU, where it is many kernels a weight), or none of these.

What fits no term is "not attributed", by type.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from tools.estimate.configuration import Configuration
from tools.profile.kernels import Kernel, Profile
from tools.profile.kinds import COMMUNICATION, COMPUTE, OTHER, communicates, expanded, place, term_of

HOST = ("host of layers", "host of experts", "host of the optimizer", "host of the step")
TERMS = (*COMPUTE, *COMMUNICATION, *HOST, OTHER)
_PLACES = dict(zip(("layer", "moe", "optimizer", "step"), HOST, strict=True))


@dataclass(frozen=True)
class Measured:
    """A step's seconds.

    Args:
        seconds: of the step.
        terms: `TERMS` -> seconds; they add up to `seconds`.
        whole: of communication, hidden seconds included; {} where the profile does not tell.
        scoped: names tell layers, so the host's time is told apart; else it stands in "host of the step".
        replayed: seconds of `COMPUTE` terms that are recomputation, as far as scopes say so.
        unknown: type -> seconds of what is not attributed.
    """

    seconds: float
    terms: dict[str, float]
    whole: dict[str, float]
    scoped: bool
    replayed: float = 0.0
    unknown: dict[str, float] = field(default_factory=dict)


def attribute(profile: Profile, config: Configuration) -> Measured:
    """The seconds of a profile's step by term."""
    kernels = sorted(profile.step.kernels, key=lambda kernel: kernel.start)
    terms = _terms(profile, config, kernels)
    if profile.timed:
        own = _own(kernels)
        length = max(profile.step.seconds, _end(kernels))
        gaps = _gaps(profile, kernels, length)
    else:
        own, length, gaps = _untimed(profile, kernels)
    found = dict.fromkeys(TERMS, 0.0)
    unknown: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    replayed = 0.0
    for kernel, term, seconds in zip(kernels, terms, own, strict=True):
        found[term] += float(seconds)
        if term == OTHER:
            unknown[kernel.kind or kernel.name] += float(seconds)
        elif term in COMMUNICATION:
            whole[term] += kernel.seconds
        elif "recompute_" in kernel.name:
            replayed += float(seconds)
    for name, seconds in gaps.items():
        found[name] += seconds
    scoped = profile.timed and any(place(kernel) in ("layer", "moe") for kernel in kernels)
    return Measured(
        length,
        found,
        dict(whole) if profile.timed else {},
        scoped,
        replayed,
        dict(sorted(unknown.items(), key=lambda item: -item[1])),
    )


def _terms(profile: Profile, config: Configuration, kernels: list[Kernel]) -> list[str]:
    """The term of each kernel (by start); one that no cell names counts to the optimizer where it stands in it."""
    found = [term_of(kernel, config) for kernel in kernels]
    if profile.device != "CPU":
        return found
    where = None
    for index, kernel in enumerate(kernels):
        where = place(kernel) or where
        if where == "optimizer" and found[index] == "elementwise" and expanded(kernel):
            found[index] = "optimizer"
    return found


def _end(kernels: list[Kernel]) -> float:
    return max((kernel.start + kernel.seconds for kernel in kernels), default=0.0)


def _own(kernels: list[Kernel]) -> np.ndarray:
    """Seconds of each kernel (by start) that are its own: computing before communication, the first before the next."""
    own = np.zeros(len(kernels))
    covered = [(0.0, 0.0)]  # (time, seconds computed before it), at the ends of each busy stretch
    now = 0.0
    for index, kernel in enumerate(kernels):
        if not communicates(kernel):
            begin, end = max(now, kernel.start), max(now, kernel.start + kernel.seconds)
            own[index] = end - begin
            covered += [(begin, covered[-1][1]), (end, covered[-1][1] + end - begin)]
            now = end
    times, seconds = np.array(covered).T
    now = 0.0
    for index, kernel in enumerate(kernels):
        if communicates(kernel):
            begin, end = max(now, kernel.start), max(now, kernel.start + kernel.seconds)
            hidden = np.interp(end, times, seconds) - np.interp(begin, times, seconds)
            own[index] = end - begin - hidden
            now = end
    return own


def _gaps(profile: Profile, kernels: list[Kernel], length: float) -> dict[str, float]:
    """Seconds in which nothing runs, by what comes next; a kernel without a scope belongs where the last one did."""
    found = dict.fromkeys(HOST, 0.0)
    now, where = 0.0, "step"
    for kernel in kernels:
        where = place(kernel) or where
        if where == "optimizer" and profile.device != "CPU":
            where = "step"
        found[_PLACES[where]] += max(0.0, kernel.start - now)
        now = max(now, kernel.start + kernel.seconds)
    found[_PLACES["step"]] += max(0.0, length - now)
    return found


def _untimed(profile: Profile, kernels: list[Kernel]) -> tuple[np.ndarray, float, dict[str, float]]:
    """Without a time line: all computing is exposed, and of communication the share that the step's summary says."""
    shown, _ = profile.exposed or (0.0, 0.0)
    sent = [communicates(kernel) for kernel in kernels]
    own = np.array([kernel.seconds for kernel in kernels])
    every = float(own[sent].sum())
    if every:
        own[sent] *= shown / every
    else:
        shown = 0.0
    length = max(profile.step.seconds, float(own.sum()))
    return own, length, {_PLACES["step"]: length - float(own.sum())}
