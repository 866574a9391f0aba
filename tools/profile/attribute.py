"""This module divides the time of a profiled step into the estimator's terms (such as matmul, attention and
communication), and names the terms that differ from the predicted step.

Each second of the profiled step belongs to exactly one term, so that the terms add up to the step:

1. *computing*: the time of a kernel; if two kernels run at the same time, only the time after the end of the first
   kernel counts for the second.
2. *communication*: the exposed time of a communication kernel, in which no kernel computes; the hidden time is recorded
   separately.
3. *gaps*: the time in which no kernel runs, because the device waits for the host. A gap belongs to the part of the
   model whose kernel follows it: a layer, a layer's experts, the optimizer (on a CPU, where the optimizer runs many
   kernels per weight), or none of these.

The time of kernels that fit no term is reported as "not attributed", by the type of the kernel.

`modelled` returns the estimator's prediction of these terms for the stage that was profiled; `gap_lines` compares the
measured and the predicted terms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from rich.table import Table

from plugins.errors import RecipeError
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import Efficiency
from tools.estimate.layer_time import Parts
from tools.estimate.memory.activations import mtp_option
from tools.estimate.memory.model import layer_options
from tools.estimate.time_model import TimeModel
from tools.hardware import Hardware
from tools.profile.kernels import COMMUNICATION, COMPUTE, OTHER, Kernel, Profile, communicates, expanded, place, term_of

HOST = ("host of layers", "host of experts", "host of the optimizer", "host of the step")
TERMS = (*COMPUTE, *COMMUNICATION, *HOST, OTHER)
_PLACES = dict(zip(("layer", "moe", "optimizer", "step"), HOST, strict=True))


@dataclass(frozen=True)
class Measured:
    """A `Measured` holds the seconds of a profiled step, divided into the estimator's terms.

    Args:
        seconds: the seconds of the step.
        terms: the seconds of each of `TERMS`, which add up to `seconds`.
        whole: the seconds of each kind of communication, including hidden seconds; {} if the profile does not show
            them.
        scoped: whether the names of kernels show their layers; only then is the host's time divided into several terms.
        replayed: the seconds of recomputation in the terms of `COMPUTE`, as far as the scopes of kernels show
            recomputation.
        unknown: the seconds of kernels that belong to no term, by the kernel's type.
    """

    seconds: float
    terms: dict[str, float]
    whole: dict[str, float]
    scoped: bool
    replayed: float = 0.0
    unknown: dict[str, float] = field(default_factory=dict)


def attribute(profile: Profile, config: Configuration) -> Measured:
    """Return the seconds of a profiled step, divided into the estimator's terms."""
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
    """Return the term of each kernel (in the order of starts); a kernel that no cell names counts to the optimizer if
    it runs among the optimizer's kernels.
    """
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
    """Return the seconds of each kernel (in the order of starts) that count only for this kernel: computation takes
    precedence over communication, and the kernel that started first over the next.
    """
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
    """Return the seconds in which no kernel runs, by the kernel that follows; a kernel without a scope belongs to the
    same part as the kernel before it.
    """
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
    """Return the terms of a profile without a time line: all computation counts as exposed, and of communication the
    share that the step's summary states.
    """
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


_LAYER = {"matmul": ("matmul", "cut"), "attention": ("attention",), "elementwise": ("elementwise",)}


def stage_of(config: Configuration, rank: int | None) -> int | None:
    """Return the pipeline stage to which a rank belongs. Return None if the rank is not known and the run has several
    stages.
    """
    if config.pp == 1:
        return 0
    if rank is None:
        return None
    if not 0 <= rank < config.devices:
        raise RecipeError(
            f"rank {rank}: the recipe has only {config.devices} devices, so the profile is of another recipe"
        )
    return rank // (config.devices // config.pp)


def modelled(
    config: Configuration, hardware: Hardware, efficiency: Efficiency, stage: int | None, simulated: bool = True
) -> dict[str, float]:
    """Return the predicted seconds of each of the estimator's terms (such as matmul), which add up to the predicted
    step. The seconds of recomputation are part of the term to which the recomputed operators belong.

    Args:
        stage: the pipeline stage whose step is predicted; None for the slowest stage.
        simulated: whether the schedule is replayed, as in all predictions of `tc3 search`. Without a replay the term
            `pipeline` is less exact, and all other terms are the same.
    """
    times = TimeModel(hardware, efficiency)
    step = times.step(config, simulated)
    if stage is None:
        forward, backward, _ = times.chunks(config)
        stage = int((forward + backward).sum(axis=0).argmax())
    parts = stage_parts(times, config, stage)
    lean = TimeModel(hardware, replace(efficiency, moe_s=0.0, weight_s=0.0))
    layers = stage_parts(lean, config, stage).fixed
    found = dict.fromkeys(TERMS, 0.0)
    for term, names in _LAYER.items():
        found[term] = sum(getattr(parts, name) for name in names)
    found.update({term: getattr(parts, term) for term in ("tp", "cp", "ep")})
    update = 0.0 if config.layer_only else times.optimizer(config, stage)
    found["optimizer"] = 0.0 if config.layer_only else lean.optimizer(config, stage)
    found["data"] = step.data_parallel
    found.update(zip(HOST, (layers, parts.fixed - layers, update - found["optimizer"], step.fixed), strict=True))
    found["pipeline"] = step.total - sum(found.values())
    return found


def stage_parts(times: TimeModel, config: Configuration, stage: int) -> Parts:
    """Return the predicted seconds that all micro-batches of a step spend in one pipeline stage, by part (matmul,
    attention, communication, ...). The predicted seconds include recomputation.
    """
    total = dict.fromkeys(Parts.__dataclass_fields__, 0.0)
    layers = {kind: times.layer(config, kind) for kinds in config.stage_kinds(stage) for kind in set(kinds)}
    for chunk, every in enumerate(config.stage_kinds(stage)):
        options = iter(layer_options(config, chunk, stage, len(every)))
        for kind in every:
            layer = layers[kind]
            option = next(options) if kind in ("dense", "moe") else mtp_option(config)
            for name in total:
                runs = (layer.forward, layer.backward, layer.again(option))
                total[name] += config.micro_batches * sum(getattr(part, name) for part in runs)
    return Parts(**total)


def whole(config: Configuration, hardware: Hardware, efficiency: Efficiency, stage: int | None) -> dict[str, float]:
    """Return the predicted seconds of each kind of communication inside layers (such as tensor-parallel), including the
    part that computation hides.

    The result does not include the communication of gradients and weights: the model also hides this communication
    under waiting time, where a profile shows no hidden communication.
    """
    parts = stage_parts(TimeModel(hardware, replace(efficiency, hidden=0.0)), config, stage or 0)
    found = {"tp": parts.tp, "cp": parts.cp}
    if not (config.ep_cut or config.shared_beside or config.overlap_ep):
        found["ep"] = parts.ep
    return found


WORDS = {  # term -> in words, and what to look at where it takes longer than predicted, or less long
    "matmul": ("matmuls, recomputation included", "their shapes and dtypes: small dimensions, padding, casts"),
    "attention": ("attention", "is it the fused kernel, with the mask compressed; the sequence of the profiled rank"),
    "elementwise": ("other operators", "what is not fused (tc3 fusion), casts, transposes, copies"),
    "optimizer": ("optimizer", "the sharding of its state, fused AdamW, the norm of gradients"),
    "tp": ("tensor-parallel communication", "whether the group lies inside a node; a slow link"),
    "cp": ("context-parallel communication", "its algorithm, and what hides it"),
    "ep": ("expert-parallel communication", "uneven experts (tc3 experts), the dispatch mode (tc3 ep-report)"),
    "data": ("gradients and weights", "overlap with the backward pass; the groups of the optimizer's shards"),
    "pipeline": ("pipeline: bubble, sends, waiting", "the schedule, uneven stages, a rank that is late (stragglers)"),
    "host of layers": ("host: gaps in layers", "cores of the worker (tc3 affinity), jit_level, launches"),
    "host of experts": ("host: gaps in experts", "host synchronisation on routed sizes"),
    "host of the optimizer": ("host: gaps in the optimizer", "the number of weights, fused AdamW, jit_level"),
    "host of the step": ("host: gaps beside layers", "data loading, callbacks, logging"),
    OTHER: ("not attributed", "the kernels named below"),
}


@dataclass(frozen=True)
class Line:
    """A `Line` compares the predicted with the measured seconds of one term of a step. `measured` is None if only the
    total seconds of the step are known.

    Args:
        factor: the factor by which the prediction of this term would have to be wrong to explain the whole difference
            of the step; None if this term cannot explain the difference.
    """

    term: str
    predicted: float
    measured: float | None
    factor: float | None = None

    @property
    def gap(self) -> float | None:
        """Return the measured minus the predicted seconds of the term; return None if the measured seconds are not
        known.
        """
        return None if self.measured is None else self.measured - self.predicted


def gap_lines(predicted: Mapping[str, float], measured: Measured) -> list[Line]:
    """Return a comparison of predicted and measured seconds for each term of a step, the largest difference first. If
    the profile does not separate the parts of the host's time, these parts are one term.
    """
    terms = dict(measured.terms)
    expected = {term: predicted.get(term, 0.0) for term in TERMS}
    if not measured.scoped:
        last = HOST[-1]
        for side in (terms, expected):
            side[last] = sum(side.pop(name) for name in HOST)
    found = [Line(term, expected[term], terms[term]) for term in terms if terms[term] or abs(expected[term]) > 1e-9]
    return sorted(found, key=lambda line: -abs(line.gap or 0.0))


def gap_lines_of_total(predicted: Mapping[str, float], seconds: float) -> list[Line]:
    """Return the predicted seconds of each term (such as matmul), the largest first. This function is used for measured
    steps of which only the total time is known.
    """
    gap = seconds - sum(predicted.values())
    found = []
    for term, part in predicted.items():
        factor = (part + gap) / part if part > 1e-9 and part + gap > 0 else None
        if part > 1e-9:
            found.append(Line(term, part, None, factor))
    return sorted(found, key=lambda line: -line.predicted)


def gap_table(rows: Sequence[Line], head: str = "predicted s") -> Table:
    """Return a table with the predicted and measured seconds of each term of a step (such as matmul), with the sums in
    the last row.
    """
    shown = Table(box=None, pad_edge=False)
    shown.add_column("term", no_wrap=True)
    known = all(line.measured is not None for line in rows)
    for name in (head, "measured s", "gap s", "of the gap" if known else "factor"):
        shown.add_column(name, justify="right", no_wrap=True)
    every = sum(line.gap or 0.0 for line in rows)
    for line in rows:
        shown.add_row(WORDS[line.term][0], *_cells(line, every))
    if known:
        total = Line("", sum(line.predicted for line in rows), sum(line.measured or 0.0 for line in rows))
        shown.add_row("step", *_cells(total, every))
    return shown


def _cells(line: Line, every: float) -> list[str]:
    if line.measured is None or line.gap is None:
        alone = f"x {line.factor:.2f}" if line.factor else "cannot be it"
        return [f"{line.predicted:.4g}", "unknown", "unknown", alone]
    share = f"{line.gap / every:+.0%}" if abs(every) > 1e-9 else "-"
    return [f"{line.predicted:.4g}", f"{line.measured:.4g}", f"{line.gap:+.4g}", share]


def gap_advice(rows: Sequence[Line], total: float) -> list[str]:
    """Return a sentence with advice for each term (such as matmul) whose measured and predicted seconds differ by more
    than 1 % of the step time, the largest difference first.
    """
    found = []
    for line in rows:
        if line.gap is not None and abs(line.gap) > 0.01 * total:
            way = "longer" if line.gap > 0 else "shorter"
            words, look = WORDS[line.term]
            found.append(f"{words}: {abs(line.gap):.4g} s {way} than predicted; look at {look}")
    return found
