"""This module finds where two runs first differ, or the first law that a single run breaks, from the records that
`evidence.read_side` has read. `diagnose` sorts all findings by step and by the order in which differences arise
(`STAGES`): the first stage with a difference above rounding is the verdict, and later ones are usually its
consequences.

Two runs of one layout, configuration and software must agree to the last bit: this holds on CPU, and on a device with
deterministic operators. Other runs add up in another order, within `LOSS`, `NORM` and `GROUP` (norms of weights and
gradients).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from plugins.step_record.plan import IDS, apart
from tools.accuracy.diagnose.evidence import COUNTERS, Side, State
from tools.accuracy.diagnose.gaps import beside, tell_steps
from tools.accuracy.diagnose.laws import (
    CLIPPING,
    CONFIGURATION,
    FORWARD,
    GRADIENTS,
    GROUP,
    NOISE,
    OF_PART,
    PARTS,
    RATE,
    RESUME,
    ROUNDING,
    ROUTERS,
    SAMPLES,
    STAGES,
    START,
    UPDATE,
    VERSIONS,
    Finding,
    clipping_of,
    far,
    is_trained,
    laws,
    limit_of,
    loads_of,
    module_of,
    norm_law,
    output_of,
    ratio_of,
    undefined_of,
)
from tools.accuracy.equivalence.executed import LOSS, NORM
from tools.recipe.diff import Change, compare
from tools.recipe.view import MODEL, View

FACTOR = 1e-3  # relative; gradients of all weights that differ by one factor to this have another scale
MOVED = 0.1  # relative; norms of a step of Muon in other layouts, whose Newton-Schulz rounds in another order
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_routed_experts",
         "moe_intermediate_size", "intermediate_size", "model_type")  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """A `Verdict` holds the differences between two runs, or the laws that a single run breaks."""

    findings: tuple[Finding, ...]  # the differences, in the order of steps and stages
    changes: tuple[Change, ...]  # the changed keys of the recipes that affect results
    layout: tuple[Change, ...]  # the changed keys of the recipes that affect the parallel layout
    software: tuple[tuple[str, str, str], ...]  # the packages whose versions differ, with both versions
    compared: tuple[str, ...]  # the stages that could be compared
    unknown: tuple[str, ...]  # the stages that could not be compared, with the records that they would need
    bits: bool  # whether the runs had to agree to the last bit
    gaps: tuple[str, ...] = ()  # sentences about what the records of the runs lack; runs with gaps are not called equal
    unshared: bool = False  # whether a run has recorded steps that the other one has not
    apart: bool = False  # whether the runs have no step in common, so that nothing that they computed was compared

    @property
    def first(self) -> tuple[Finding, ...]:
        """Return the findings at the first step and stage with a difference that rounding does not explain. If rounding
        explains all differences, return the findings at the first step and stage with any difference.
        """
        grave = [each for each in self.findings if not each.rounding] or list(self.findings)
        return tuple(each for each in grave if (each.step, each.stage) == (grave[0].step, grave[0].stage))

    @property
    def before(self) -> int:
        """Return how many differences come before the first difference that rounding does not explain; rounding
        explains all of them. Return 0 if rounding explains every difference.
        """
        return self.findings.index(self.first[0]) if self.findings else 0

    @property
    def word(self) -> str:
        """Return the verdict in a few words, such as "equal" or "differs: loss, step 3"."""
        if self.findings:
            word = f"differs: {self.first[0].stage}, step {self.first[0].step}"
            return f"{word}; the configuration was changed" if self.changes else word
        if self.changes:
            return "the configuration was changed"
        if self.apart:
            return "unknown: no step is in both runs"
        if self.unknown or self.gaps:
            return "nothing differs in what was recorded"
        return "equal in the steps that both runs recorded" if self.unshared else "equal"


class OtherModelError(ValueError):
    """This error means that the two runs train models of different sizes."""


def diagnose(a: Side, b: Side | None = None) -> Verdict:
    """Return the verdict on one run, or on two; raise OtherModelError if the models have different sizes."""
    changes = compare(a.recipe, b.recipe).changes if b else []
    if any(start.step for side in (a, b) if side for start in side.starts):
        changes = [each for each in changes if not _resuming(each)]
    layout = tuple(each for each in changes if each.meaning.group == "layout")
    if b and layout and View(a.recipe).global_batch == View(b.recipe).global_batch:
        layout += tuple(each for each in changes if each.words[-1] == "batch_size")  # a rank's share of the same batch
    numbers = tuple(each for each in changes if each.meaning.group == "numbers" and each not in layout)
    if others := [each for each in numbers if each.words[-1] in SIZES and each.words[: len(MODEL)] == MODEL]:
        raise OtherModelError(", ".join(f"{each.words[-1]} is {each.after}, not {each.before}" for each in others))
    software = _software(a, b) if b else ()
    pair = _Pair(a, b, not layout and not software, not numbers and not layout) if b else None
    findings = list(pair.findings()) if pair else []
    if pair:
        pair.tell_gaps()
    for side in (a, b) if b else (a,):
        findings += laws(side)
    seen, unknown = _looked_at(a, b, pair)
    unshared = b is not None and tell_steps(a, b)
    apart = b is not None and a.steps.keys().isdisjoint(b.steps) and not {START, RESUME} & {*seen}
    ordered = tuple(_placed(sorted(_dated(findings), key=lambda each: each.order)))
    gaps = tuple(f"{side.name}: {gap}" for side in (a, b) if side for gap in side.gaps)
    return Verdict(ordered, numbers, layout, software, seen, unknown, bool(pair and pair.bits), gaps, unshared, apart)


def _dated(findings: list[Finding]) -> Iterator[Finding]:
    """Yield findings with the step at which they arose: that of the first wrong number for those made at the end."""
    steps = [
        each.step
        for each in findings
        if not each.late and not each.rounding and STAGES.index(each.stage) >= STAGES.index(FORWARD)
    ]
    for found in findings:
        yield replace(found, step=min([*steps, found.step])) if found.late else found


def _placed(findings: list[Finding]) -> Iterator[Finding]:
    """Yield findings in order; where no module of a wrong loss is known, gradients tell where it may be."""
    for found in findings:
        of_step = [each for each in findings if each.step == found.step]
        gradients = [each for each in of_step if each.stage == GRADIENTS and each.module != "all weights"]
        known = any(each.stage == FORWARD and each.module not in OF_PART.values() for each in of_step)
        if found.stage == FORWARD and found.module == "model" and gradients and not known:
            found = replace(found, detail=f"{found.detail}; near it, {gradients[0].detail}")
        yield found


def _software(a: Side, b: Side) -> tuple[tuple[str, str, str], ...]:
    if not a.software or not b.software:
        return ()
    pairs = [
        (name, a.software.get(name, "none"), b.software.get(name, "none")) for name in {**a.software, **b.software}
    ]
    return tuple(each for each in pairs if each[1] != each[2])


def _resuming(change: Change) -> bool:
    """Return whether a key only says that a run goes on; the stage `resume` looks at what came of it."""
    if change.path == "checkpoint.no_load_optim":
        return change.before is not True and change.after is not True
    return change.path == "checkpoint.load_path"


def _looked_at(a: Side, b: Side | None, pair: _Pair | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the stages that had values to compare, and the stages whose values were not recorded."""
    sides = (a, b) if b else (a,)
    # a single run is compared with what its recipe says
    seen = [CONFIGURATION] if b else [CONFIGURATION] * bool(a.effective) + [FORWARD] * a.held
    unknown: list[str] = []
    if b:
        common = any(
            all(side.steps[step].get(name) is not None for side in sides)
            for step in a.steps.keys() & b.steps.keys()
            for name in PARTS
        )
        sampled, versions = a.samples.keys() & b.samples.keys(), a.software and b.software
        for stage, known in ((FORWARD, common), (SAMPLES, sampled), (VERSIONS, versions)):
            (seen if known else unknown).append(stage)
    recorded = set.intersection(*[set(side.states) for side in sides])
    for stage in (GRADIENTS, CLIPPING, UPDATE, ROUTERS):
        if any(all(_recorded(side, step, stage) for side in sides) for step in recorded):
            seen.append(stage)
        elif not recorded or not any(_absent(side, stage) for side in sides):
            unknown.append(stage)
    started = all(side.starts_known for side in sides) or all(side.unmoved for side in sides)
    if pair:
        seen += pair.begun
    if not (recorded and started):
        unknown.append(START)
    elif not pair:
        seen.append(START)
    unknown = [stage for stage in unknown if stage not in seen]
    return tuple(each for each in STAGES if each in seen), tuple(each for each in STAGES if each in unknown)


def _recorded(side: Side, step: int, stage: str) -> bool:
    if stage == GRADIENTS:
        return bool(side.gradients(step))
    if stage == CLIPPING:
        return side.steps.get(step, {}).get("global_norm") is not None
    return stage == UPDATE or any(line["loads"] for line in side.states[step].lines.values())


def _absent(side: Side, stage: str) -> bool:
    """Return whether a run has nothing that a stage could compare: no router, or gradients that are not clipped."""
    lines = [line for state in side.states.values() for line in state.lines.values()]
    without_routers = stage == ROUTERS and not any(line["loads"] or line.get("biases") for line in lines)
    return without_routers or (stage == CLIPPING and math.isinf(limit_of(side)))


@dataclass
class _Pair:
    """A `_Pair` holds two runs; `bits`: they must agree to the last bit; `same`: they are of one configuration."""

    a: Side
    b: Side
    bits: bool
    same: bool
    partial: list[tuple[str, str]] = field(default_factory=list)  # (run, tensor) whose parts do not make the whole
    begun: set[str] = field(default_factory=set)  # START, RESUME: the stages in which starts were compared

    def findings(self) -> Iterator[Finding]:
        if self.same:
            yield from self._built()
        yield from self._start()
        yield from self._resume()
        for step in sorted(self.a.steps.keys() & self.b.steps.keys()):
            yield from self._samples(step)
            yield from self._losses(step)
        for step in sorted(self.a.states.keys() & self.b.states.keys()):
            yield from self._modules(step)
            yield from self._gradients(step)
            yield from self._updates(step)
            yield from self._tensors(step, self.a.states[step], self.b.states[step], UPDATE)
            yield from self._routers(step)

    def tell_gaps(self) -> None:
        """Add to each run's gaps the tensors that only some ranks recorded, and the names that only the other run
        recorded.
        """
        found = []
        for place, side in enumerate((self.a, self.b)):
            if names := sorted({name for run, name in self.partial if run == side.name}):
                what = f"{len(names)} tensors are not recorded by all ranks that have a part, such as {names[0]}"
                found.append((place, what))
        found += beside(self.a, self.b) if self.bits and self.same else ()
        for place, what in found:
            side = (self.a, self.b)[place]
            side.gaps.append(what)
            side.notes.append(what)

    def _built(self) -> Iterator[Finding]:
        for name in sorted(self.a.effective.keys() & self.b.effective.keys()):
            one, two = self.a.effective[name], self.b.effective[name]
            if one != two:
                what = f"{name} was built as {one} and as {two}, though the recipes say the same"
                yield Finding(0, CONFIGURATION, "configuration", what)

    def _modules(self, step: int) -> Iterator[Finding]:
        """Yield a finding about the first module whose output differs: the modules after it read this output."""
        mine, others = self.a.modules(step), self.b.modules(step)
        for name, output in mine.items():
            if name not in others or output[0] == others[name][0]:
                continue
            error = apart(output, others[name])
            if not error <= (ROUNDING if self.bits else GROUP):
                what = f"the outputs of {name} are {error:.2g} of their norm apart; modules before it are equal"
                yield Finding(step, FORWARD, output_of(self.a, name), what, 1.0)
                return

    def _start(self) -> Iterator[Finding]:
        """Yield findings about the start of one step: of fresh runs, or of runs that both resumed at the same place."""
        for mine in self.a.starts:
            other = next((each for each in self.b.starts if each.step == mine.step), None)
            if other:
                self.begun.add(START)
                yield from self._tensors(mine.step, mine, other, START)
        if not (self.a.starts_known and self.b.starts_known):
            one, two = self.a.unmoved, self.b.unmoved
            if one and two:
                self.begun.add(START)
                yield from self._tensors(0, one, two, START)

    def _resume(self) -> Iterator[Finding]:
        """Yield findings about a state that one run restored, beside the state of the other run at that step."""
        for one, other in ((self.a, self.b), (self.b, self.a)):
            for start in one.starts:
                known = start.step > 0 and start.step not in one.states and start.step in other.states
                if known and not any(each.step == start.step for each in other.starts):
                    self.begun.add(RESUME)
                    sides = (other.states[start.step], start) if one is self.b else (start, other.states[start.step])
                    yield from self._tensors(start.step, *sides, RESUME)

    def _tensors(self, step: int, a: State, b: State, stage: str) -> Iterator[Finding]:
        mine, others = a.tensors(self.a.parts), b.tensors(self.b.parts)
        for name in sorted(mine.keys() ^ others.keys()):
            if is_trained(name):
                side = "A" if name in mine else "B"
                yield Finding(step, stage, module_of(name), f"{name}: only {side} has it")
        for name in sorted(mine.keys() & others.keys()):
            one, two = mine[name], others[name]
            if one.shape != two.shape:
                what = f"{name}: shape {list(one.shape)} and {list(two.shape)}"
                yield Finding(step, stage, module_of(name), what)
                continue
            self.partial += [(self.a.name, name)] * (not one.complete) + [(self.b.name, name)] * (not two.complete)
            if not (one.complete and two.complete) or (not self.bits and not is_trained(name)):
                continue
            error = far(one.norm, two.norm)
            if self.bits and one.digests.keys() == two.digests.keys():
                ranks = tuple(rank for rank, digest in one.digests.items() if two.digests[rank] != digest)
                wrong = bool(ranks)
            else:
                ranks, wrong = (), error > GROUP
            if wrong:
                detail = f"{name}: norm {one.norm:.7g} and {two.norm:.7g}"
                if error < ROUNDING:
                    detail += ", other bits"
                where = ROUTERS if stage == UPDATE and name.endswith(COUNTERS) else stage
                grave = 1.0 if where in (START, RESUME, ROUTERS) else 0.0  # there nothing is rounded
                yield Finding(step, where, module_of(name), detail, max(error, grave), ranks)

    def _samples(self, step: int) -> Iterator[Finding]:
        mine, others = self.a.ids(step), self.b.ids(step)
        if mine is None or others is None:
            return
        if set(mine) != set(others):
            yield Finding(step, SAMPLES, "data", self._whose(step, set(others), len(set(mine) & set(others))))
            return
        dealt, otherwise = ({rank: columns[IDS] for rank, columns in side.samples[step].items()}
                            for side in (self.a, self.b))  # fmt: skip
        if self.bits and dealt != otherwise:
            what = "the same samples in another order, another number of times, or dealt to other ranks"
            yield Finding(step, SAMPLES, "data", what, 1.0)
        theirs = self.b.columns(step)
        for name, pairs in self.a.columns(step).items():
            if name in theirs and pairs != theirs[name]:
                rows = len(pairs - theirs[name])
                yield Finding(step, SAMPLES, "data", f"{name} of {rows} of {len(mine)} samples differs", 1.0)

    def _whose(self, step: int, others: set[str], common: int) -> str:
        """Return a sentence that says which step of A has the samples of a step of B."""
        for other in self.a.samples:
            found = self.a.ids(other)
            if found is not None and set(found) == others:
                return f"step {step} of B has the samples of step {other} of A"
        if common == len(others):
            return (
                f"step {step} of B has {common} of the {len(self.a.ids(step) or ())} samples of A: ranks read the same"
            )
        return f"{common} of {len(others)} samples of step {step} of B are those of A"

    def _losses(self, step: int) -> Iterator[Finding]:
        mine, others = self.a.steps[step], self.b.steps[step]
        undefined = {*undefined_of(self.a), *undefined_of(self.b)}
        gravest = 0.0  # of the parts so far: what is wrong in the decoder is wrong in its MTP layer and routers, too
        explained = 0.0  # of the loss, which is the sum of its parts
        for name in PARTS:
            one, two = mine.get(name), others.get(name)
            if one is None or two is None or one == two or (one != one and two != two):
                continue
            if name in undefined:
                continue
            difference = abs(one - two) if math.isfinite(one - two) else math.inf
            if name == "loss" and explained and difference <= explained + LOSS:
                continue
            explained += difference
            if self.bits or not difference <= (LOSS * len(PARTS) if name == "loss" else LOSS):
                error = far(one, two)
                if gravest > ROUNDING:
                    error = min(error, gravest)
                gravest = max(gravest, error)
                yield Finding(step, FORWARD, OF_PART[name], f"{name} {one:.9g} and {two:.9g}", error)
        one, two = mine.get("global_norm"), others.get("global_norm")
        if one is not None and two is not None and (error := far(one, two)) > (0.0 if self.bits else NORM):
            yield Finding(step, CLIPPING, "global norm", f"global norm {one:.9g} and {two:.9g}", error)
        one, two = mine.get("learning_rate"), others.get("learning_rate")
        if one is not None and two is not None and far(one, two) > (0.0 if self.bits else 1e-6):
            yield Finding(step, UPDATE, "learning rate", f"learning rate {one:.9g} and {two:.9g}")

    def _gradients(self, step: int) -> Iterator[Finding]:
        """Yield findings about gradients before clipping, because a wrong global norm scales all gradients.

        If both runs have the same global norm, and the clipped gradients of one do not have the norm that it leaves
        them, clipping is wrong, and the gradients before it are not known.
        """
        one, two = (side.steps.get(step, {}).get("global_norm") for side in (self.a, self.b))
        same = one is not None and two is not None and abs(one - two) <= NORM * abs(one)
        if same and [*norm_law(self.a, step), *norm_law(self.b, step)]:
            return
        clips = any(math.isfinite(limit_of(side)) for side in (self.a, self.b))
        finite = {norm is not None and math.isfinite(norm) for norm in (one, two)}
        if len(finite) > 1 and clips:
            return  # by how much one of them was scaled down is not known
        sides = [{name: norm / clipping_of(side, step) for name, norm in side.gradients(step).items()}
                 for side in (self.a, self.b)]  # fmt: skip
        pairs = {name: (sides[0][name], sides[1][name]) for name in sorted(sides[0].keys() & sides[1].keys())}
        if len(pairs) > 1 and (common := common_factor(pairs.values())) is not None:
            what = f"the gradients of all {len(pairs)} weights are {ratio_of(1.0, common)} as large"
            yield Finding(step, GRADIENTS, "all weights", what)
            return
        for name, (one, two) in pairs.items():
            error = far(one, two)
            if error > (1e-6 if self.bits else GROUP):
                what = f"norm of the gradient of {name}: {one:.7g} and {two:.7g}"
                yield Finding(step, GRADIENTS, module_of(name), f"{what} ({ratio_of(one, two)})", error)

    def _updates(self, step: int) -> Iterator[Finding]:
        mine = {name: told for name, _, told in self.a.updates(step)}
        for name, rank, told in self.b.updates(step):
            for key, what in (("rate", "learning rate"), ("decay", "weight decay")):
                one, two = (mine.get(name) or {}).get(key), told.get(key)
                if one is None or two is None:
                    continue
                if not abs(one - two) <= max(2 * RATE * abs(one), NOISE[key]):
                    detail = f"{what} of {name}: {one:.4g} and {two:.4g}"
                    yield Finding(step, UPDATE, module_of(name), detail, abs(one - two), (rank,))
        fitted = set.intersection(*(
            {name for name, _, told in side.updates(step) if told.get("rate") is not None} for side in (self.a, self.b)
        ))  # fmt: skip
        moves = self.a.moves(step), self.b.moves(step)
        for name in sorted((moves[0].keys() & moves[1].keys()) - fitted):  # of Muon's matrices
            one, two = moves[0][name], moves[1][name]
            error = far(one, two)
            if error > (1e-6 if self.bits else MOVED):
                detail = f"norm of the step of {name}: {one:.7g} and {two:.7g} ({ratio_of(one, two)})"
                yield Finding(step, UPDATE, module_of(name), detail, error)

    def _routers(self, step: int) -> Iterator[Finding]:
        for router, one in loads_of(self.a, step).items():
            two = loads_of(self.b, step).get(router)
            if two is None:
                continue
            shares = [[each / max(sum(load), 1e-30) for each in load] for load in (one, two)]  # of all passes
            moved = sum(abs(x - y) for x, y in zip(*shares, strict=True)) / 2
            if moved > (0.0 if self.bits else 2e-3):  # tokens at a tie may choose the other expert in another layout
                yield Finding(
                    step, ROUTERS, module_of(router), f"{router}: {moved:.2%} of the choices went elsewhere", moved
                )


def common_factor(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return the ratio (second / first) of the pairs if all pairs have the same ratio and it is not 1; otherwise return
    None.
    """
    factors = [two / one for one, two in pairs if one and two]
    if (
        not factors
        or not all(map(math.isfinite, factors))
        or max(factors) > (1 + FACTOR) * min(factors)
        or abs(factors[0] - 1) < 10 * FACTOR
    ):
        return None
    return sum(factors) / len(factors)
