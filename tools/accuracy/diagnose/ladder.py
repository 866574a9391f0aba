"""This module finds where two runs first differ, or where one run breaks a law that holds for every run. The module is
pure: it compares only data that `evidence.read_side` has read.

The rungs, in the order in which a difference arises: the configuration; what a (resumed) run starts from; then for each
step its samples, its loss and parts, its gradients, the global norm with clipping, the update, the routers. `diagnose`
makes all findings and sorts them by step and rung; the first rung with a difference above rounding is the verdict, and
what follows is usually its consequence.

Two runs of one layout and configuration must agree to the last bit: on CPU they do, and on a device with deterministic
operators. Other layouts add numbers in another order: for them losses are held to `LOSS`, norms to `NORM`, sums of
squares of weights and gradients to `GROUP`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.accuracy.diagnose.evidence import Side, State
from tools.accuracy.equivalence.executed import LOSS, NORM
from tools.accuracy.equivalence.runs import group_of
from tools.recipe.diff import Change, compare
from tools.recipe.view import MODEL, View

CONFIGURATION, START, RESUME, SAMPLES = "configuration", "start", "resume", "samples"
FORWARD, GRADIENTS, CLIPPING, UPDATE, ROUTERS = "forward", "gradients", "norm and clipping", "update", "routers"
RUNGS = (CONFIGURATION, START, RESUME, SAMPLES, FORWARD, GRADIENTS, CLIPPING, UPDATE, ROUTERS)
USUAL = {
    CONFIGURATION: "the runs were asked to compute different things",
    START: "initialisation (seed), conversion, another checkpoint, or shards that changed places",
    RESUME: "the save left it out, the resume did not load it, or it was loaded into another part",
    SAMPLES: "data: another seed or order, another share of the ranks, or a position that a resume took wrongly",
    FORWARD: "the forward pass: an operator, a mask, positions, or loss weighting",
    GRADIENTS: "the backward of the named module, or the collective that sums its gradient",
    CLIPPING: "the global norm: shards counted twice or left out, or clipping with another limit",
    UPDATE: "the optimizer: learning rate, weight decay of the wrong group, moments, bias correction",
    ROUTERS: "the routers' counters or biases: another rate, another sign, the load of one rank, or no update",
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_routed_experts",
         "moe_intermediate_size", "intermediate_size", "model_type")  # fmt: skip
PARTS = ("lm_loss", "load_balancing_loss", "mtp_loss", "loss")
COUNTED = ("expert_bias", "expert_load", "fi_accu")  # ends of names of routers' state, which no gradient moves
GROUP = 1e-4  # relative; norms of weights, gradients and moments of another layout
LAW = 5e-4  # relative; a global norm computed again from moments, which hold gradients in float32
RATE = 2e-3  # relative; a learning rate or weight decay fitted to an update
REST = 1e-2  # share of an update that AdamW does not explain; rounding leaves 1e-4 to 1e-3
NEAR = 1e-5  # relative; a load at its share, where the sign of the difference is rounding
ROUNDING = 1e-6  # relative; below it, only bits differ
WORST = 3  # findings shown of a rung


@dataclass(frozen=True)
class Finding:
    """This is one difference that was found. `side` is empty for a difference between two runs; otherwise it names the
    run that breaks a law.
    """

    step: int
    rung: str
    module: str
    detail: str
    error: float = math.inf  # relative, to sort by
    ranks: tuple[int, ...] = ()
    side: str = ""

    @property
    def rounding(self) -> bool:
        """Return whether this difference is so small that another order of additions can explain it."""
        return self.error < ROUNDING

    @property
    def order(self) -> tuple[Any, ...]:
        """Return the sort key of findings: by step, then by rung, the largest difference first."""
        return self.step, RUNGS.index(self.rung), -self.error


@dataclass(frozen=True)
class Verdict:
    """This is the result of a diagnosis.

    Args:
        findings: in order. changes: of the configuration that change numbers; layout: those of the layout.
        compared: rungs that had something to look at; unknown: rungs that had not, with what to record.
        bits: whether equality to the last bit was asked.
    """

    findings: tuple[Finding, ...]
    changes: tuple[Change, ...]
    layout: tuple[Change, ...]
    compared: tuple[str, ...]
    unknown: tuple[str, ...]
    bits: bool

    @property
    def first(self) -> tuple[Finding, ...]:
        """Return the findings of the first rung that differs by more than rounding; if no rung does, return those of
        the first rung.

        A sum in another order changes bits before a fault changes numbers, and explains no larger difference.
        """
        grave = [each for each in self.findings if not each.rounding] or list(self.findings)
        return tuple(each for each in grave if (each.step, each.rung) == (grave[0].step, grave[0].rung))

    @property
    def before(self) -> int:
        """Return how many findings, which differ only by rounding, precede those of `first`."""
        return self.findings.index(self.first[0]) if self.findings else 0

    @property
    def word(self) -> str:
        """Return in words the verdict on the runs."""
        if self.changes:
            return "the configuration was changed"
        if self.findings:
            return f"differs: {self.first[0].rung}, step {self.first[0].step}"
        if self.unknown:
            return "nothing differs in what was recorded"
        return "equal"


class OtherModelError(ValueError):
    """The two runs are of different models."""


def diagnose(a: Side, b: Side | None = None) -> Verdict:
    """Return the verdict on one run, or on the comparison of two runs.

    Raises:
        OtherModelError: the runs' models have other sizes.
    """
    changes = compare(a.recipe, b.recipe).changes if b else []
    if any(start.step for side in (a, b) if side for start in side.starts):
        changes = [each for each in changes if not _resuming(each)]
    numbers = tuple(each for each in changes if each.meaning.group == "numbers")
    layout = tuple(each for each in changes if each.meaning.group == "layout")
    if others := [each for each in numbers if each.words[-1] in SIZES and each.words[: len(MODEL)] == MODEL]:
        raise OtherModelError(", ".join(f"{each.words[-1]} {each.before} and {each.after}" for each in others))
    pair = _Pair(a, b, bits=not layout) if b else None
    findings = list(pair.findings()) if pair else []
    for side in (a, b) if b else (a,):
        findings += laws(side)
    seen, unknown = _looked_at(a, b)
    return Verdict(tuple(sorted(findings, key=lambda each: each.order)), numbers, layout, seen, unknown, not layout)


def _resuming(change: Change) -> bool:
    """Whether a key only says that a run goes on from a checkpoint: the rung `resume` looks at what came of it."""
    if change.path == "checkpoint.no_load_optim":
        return change.before is not True and change.after is not True
    return change.path == "checkpoint.load_path"


def _looked_at(a: Side, b: Side | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Rungs that had something to compare, and the others with why."""
    sides = (a, b) if b else (a,)
    seen, unknown = [CONFIGURATION, FORWARD] if b else [], []
    if b and all(side.samples for side in sides):
        seen.append(SAMPLES)
    elif b:
        unknown.append(SAMPLES)
    recorded = [set(side.states) for side in sides]
    if set.intersection(*recorded):
        seen += [START, GRADIENTS, CLIPPING, UPDATE, ROUTERS]
    else:
        unknown += [START, GRADIENTS, CLIPPING, UPDATE, ROUTERS]
    return tuple(each for each in RUNGS if each in seen), tuple(each for each in RUNGS if each in unknown)


@dataclass
class _Pair:
    """Two runs. `bits`: whether they must agree to the last bit."""

    a: Side
    b: Side
    bits: bool

    def findings(self) -> Iterator[Finding]:
        yield from self._start()
        yield from self._resume()
        for step in sorted(self.a.steps.keys() & self.b.steps.keys()):
            yield from self._samples(step)
            yield from self._losses(step)
        for step in sorted(self.a.states.keys() & self.b.states.keys()):
            yield from self._gradients(step)
            yield from self._updates(step)
            yield from self._tensors(step, self.a.states[step], self.b.states[step], UPDATE)
            yield from self._routers(step)

    def _start(self) -> Iterator[Finding]:
        """Starts of one step: fresh runs, or both resumed at the same place."""
        for mine in self.a.starts:
            other = next((each for each in self.b.starts if each.step == mine.step), None)
            if other:
                yield from self._tensors(mine.step, mine, other, START)

    def _resume(self) -> Iterator[Finding]:
        """What one run restored against what the other one had at that step."""
        for one, other in ((self.a, self.b), (self.b, self.a)):
            for start in one.starts:
                known = start.step > 0 and start.step not in one.states and start.step in other.states
                if known and not any(each.step == start.step for each in other.starts):
                    sides = (other.states[start.step], start) if one is self.b else (start, other.states[start.step])
                    yield from self._tensors(start.step, *sides, RESUME)

    def _tensors(self, step: int, a: State, b: State, rung: str) -> Iterator[Finding]:
        """Weights, moments, counters and biases of two states."""
        mine, others = a.tensors(self.a.parts()), b.tensors(self.b.parts())
        for name in sorted(mine.keys() ^ others.keys()):
            if _trained(name):
                side = "A" if name in mine else "B"
                yield Finding(step, rung, _module(name), f"{name}: only {side} has it")
        for name in sorted(mine.keys() & others.keys()):
            one, two = mine[name], others[name]
            if not (one.complete and two.complete) or (not self.bits and not _trained(name)):
                continue
            error = abs(one.norm - two.norm) / max(one.norm, two.norm) if one.norm != two.norm else 0.0
            if self.bits and one.digests.keys() == two.digests.keys():
                ranks = tuple(rank for rank, digest in one.digests.items() if two.digests[rank] != digest)
                wrong = bool(ranks)
            else:
                ranks, wrong = (), error > GROUP
            if wrong:
                detail = f"{name}: norm {one.norm:.7g} and {two.norm:.7g}"
                if error < ROUNDING:
                    detail += ", other bits"
                where = ROUTERS if rung == UPDATE and name.endswith(COUNTED) else rung
                grave = 1.0 if where in (START, RESUME, ROUTERS) else 0.0  # there nothing is rounded
                yield Finding(step, where, _module(name), detail, max(error, grave), ranks)

    def _samples(self, step: int) -> Iterator[Finding]:
        mine, others = self.a.ids(step), self.b.ids(step)
        if mine is None or others is None:
            return
        if set(mine) != set(others):
            yield Finding(step, SAMPLES, "data", self._whose(step, set(others), len(set(mine) & set(others))))
            return
        if self.bits and mine != others:
            yield Finding(step, SAMPLES, "data", "the same samples in another order, or dealt to other ranks", 1.0)
        theirs = self.b.columns(step)
        for name, pairs in self.a.columns(step).items():
            if name in theirs and pairs != theirs[name]:
                rows = len(pairs - theirs[name])
                yield Finding(step, SAMPLES, "data", f"{name} of {rows} of {len(mine)} samples differs", 1.0)

    def _whose(self, step: int, others: set[str], common: int) -> str:
        """In words, which step of A has B's samples."""
        for other in self.a.samples:
            found = self.a.ids(other)
            if found is not None and set(found) == others:
                return f"step {step} of B has the samples of step {other} of A"
        return f"{common} of {len(others)} samples of step {step} of B are those of A"

    def _losses(self, step: int) -> Iterator[Finding]:
        mine, others = self.a.steps[step], self.b.steps[step]
        gravest = 0.0  # of the parts so far: what is wrong in the decoder is wrong in its MTP layer and routers, too
        for name in PARTS:
            one, two = mine.get(name), others.get(name)
            if one is None or two is None or one == two or (one != one and two != two):
                continue
            if name == "loss" and any(mine.get(each) is not None for each in PARTS[:-1]):
                continue  # the sum of what is compared
            if self.bits or not abs(one - two) <= LOSS:
                error = abs(one - two) / max(abs(one), 1e-30)
                if gravest > ROUNDING:
                    error = min(error, gravest)
                gravest = max(gravest, error)
                yield Finding(step, FORWARD, _FORWARD[name], f"{name} {one:.9g} and {two:.9g}", error)
        one, two = mine.get("global_norm"), others.get("global_norm")
        if one is not None and two is not None and one != two and (self.bits or not abs(one - two) <= NORM * abs(one)):
            yield Finding(
                step, CLIPPING, "global norm", f"global norm {one:.9g} and {two:.9g}", abs(one - two) / abs(one)
            )
        one, two = mine.get("learning_rate"), others.get("learning_rate")
        if one is not None and two is not None and abs(one - two) > 1e-6 * abs(one):
            yield Finding(step, UPDATE, "learning rate", f"learning rate {one:.9g} and {two:.9g}")

    def _gradients(self, step: int) -> Iterator[Finding]:
        """Gradients before clipping: a wrong norm scales them all, and is not their fault."""
        sides = [{name: norm / _clip(side, step) for name, norm in side.gradients(step).items()}
                 for side in (self.a, self.b)]  # fmt: skip
        for name in sorted(sides[0].keys() & sides[1].keys()):
            one, two = sides[0][name], sides[1][name]
            error = abs(one - two) / max(one, two) if one != two else 0.0
            if error > (1e-6 if self.bits else GROUP):
                what = f"norm of the gradient of {name}: {one:.7g} and {two:.7g}"
                yield Finding(step, GRADIENTS, _module(name), f"{what} ({_ratio(one, two)})", error)

    def _updates(self, step: int) -> Iterator[Finding]:
        mine = {name: told for name, _, told in self.a.updates(step)}
        for name, rank, told in self.b.updates(step):
            for key, what in (("rate", "learning rate"), ("decay", "weight decay")):
                one, two = (mine.get(name) or {}).get(key), told.get(key)
                if one is not None and two is not None and abs(one - two) > max(2 * RATE * abs(one), _noise(key)):
                    detail = f"{what} of {name}: {one:.4g} and {two:.4g}"
                    yield Finding(step, UPDATE, _module(name), detail, abs(one - two), (rank,))

    def _routers(self, step: int) -> Iterator[Finding]:
        for router, one in loads_of(self.a, step).items():
            two = loads_of(self.b, step).get(router)
            if two is None:
                continue
            moved = sum(abs(x - y) for x, y in zip(one, two, strict=True)) / 2 / max(sum(one), 1e-30)
            if moved > (0.0 if self.bits else 2e-3):  # tokens at a tie may choose the other expert in another layout
                yield Finding(
                    step, ROUTERS, _module(router), f"{router}: {moved:.2%} of the choices went elsewhere", moved
                )


_FORWARD = {"lm_loss": "model", "load_balancing_loss": "router", "mtp_loss": "mtp", "loss": "model"}


def laws(side: Side) -> Iterator[Finding]:
    """Yield a finding for each law that one run breaks, of the laws that need no reference run."""
    for start in side.starts:
        if start.step in side.states:  # this run had been here itself before it was resumed
            yield from _restored(side, start)
    before: State | None = next((each for each in side.starts if each.step == 0), None)
    for step, state in sorted(side.states.items()):
        for name, tensor in sorted(state.tensors(side.parts()).items()):
            if tensor.differing:
                yield Finding(step, UPDATE, _module(name), f"{name}: copies differ", 1.0, tensor.differing, side.name)
        yield from _norm_law(side, step)
        yield from _update_law(side, step)
        previous = before if before and before.step == step - 1 else None
        yield from _router_law(side, state, previous)
        before = state


def _restored(side: Side, start: State) -> Iterator[Finding]:
    saved, found = side.states[start.step].tensors(side.parts()), start.tensors(side.parts())
    for name in sorted(saved.keys() & found.keys()):
        ranks = tuple(rank for rank, digest in saved[name].digests.items() if found[name].digests.get(rank) != digest)
        if ranks and not name.endswith((".fi_accu", ".expert_load")):
            norms = f"norm {saved[name].norm:.7g} when the step ended, {found[name].norm:.7g} restored"
            yield Finding(start.step, RESUME, _module(name), f"{name}: {norms}", 1.0, ranks, side.name)


def _norm_law(side: Side, step: int) -> Iterator[Finding]:
    """The global norm, computed again from the gradients by weight."""
    record, view = side.steps.get(step, {}), View(side.recipe)
    norm, gradients = record.get("global_norm"), side.gradients(step)
    if norm is None or not gradients or record.get("overflow") or (view.pp > 1 and _mtp(side)):
        return
    limit = _limit(side)
    want, got = min(norm, limit), math.sqrt(sum(each**2 for each in gradients.values()))
    if want and abs(got - want) > LAW * want:
        what = f"the global norm is {norm:.7g}, the limit {limit:.7g}; the clipped gradients have the norm {got:.7g}"
        error = abs(got - want) / want
        yield Finding(
            step, CLIPPING, "global norm", f"{what}, should be {want:.7g} ({_ratio(want, got)})", error, (), side.name
        )


def _update_law(side: Side, step: int) -> Iterator[Finding]:
    """Each weight moves by AdamW with the step's learning rate; weights of one dimension do not decay."""
    optimizer = side.recipe.get("optimizer") or {}
    if not str(optimizer.get("type", "")).endswith("AdamW") or optimizer.get("weight_decay") is None:
        return
    rate, grouped = side.steps.get(step, {}).get("learning_rate"), side.recipe.get("grouped_lr_schedule")
    for name, rank, told in side.updates(step):
        decay = 0.0 if told["dimensions"] == 1 or name.endswith(".bias") else float(optimizer["weight_decay"])
        if not rate or told.get("rate") is None or grouped:
            continue
        fitted, decayed, rest = told["rate"], told["decay"], told["rest"] or 0.0
        at = step, UPDATE, _module(name)
        if abs(fitted - rate) > RATE * rate and told["square"]:
            detail = f"{name} moved as with a learning rate of {fitted:.4g}, should be {rate:.4g}"
            yield Finding(*at, detail, abs(fitted - rate) / rate, (rank,), side.name)
        elif rest > REST:
            detail = f"{name}: {rest:.1%} of its update is not AdamW's"
            yield Finding(*at, detail, rest, (rank,), side.name)
        elif abs(decayed - decay) > max(0.02 * decay, _noise("decay")):
            detail = f"{name} decayed by {decayed:.4g}, should be {decay:.4g}"
            yield Finding(*at, detail, abs(decayed - decay), (rank,), side.name)


def _router_law(side: Side, state: State, before: State | None) -> Iterator[Finding]:
    """Loads add up to the choices made; a bias moves by its rate times the sign of share less load."""
    model, view = side.recipe["model"]["model_config"], View(side.recipe)
    rate = model.get("moe_router_bias_update_rate")
    passes = view.micro_batches * view.number(("runner_config", "gradient_accumulation_steps"), 1)
    loads = loads_of(side, state.step)
    for router in sorted({name for line in state.lines.values() for name in line["loads"]} - loads.keys()):
        what = f"{router}: no rank has counted a choice"
        yield Finding(state.step, ROUTERS, _module(router), what, 1.0, (), side.name)
    for router, load in loads.items():
        at = state.step, ROUTERS, _module(router)
        total = sum(load)
        if abs(total - passes) > 1e-3 * passes:
            detail = f"{router}: the experts' shares add up to {total:.6g}, should be {passes:g}: one for each pass"
            yield Finding(*at, detail, abs(total - passes) / passes, (), side.name)
            continue
        if before is None or not rate or not model.get("moe_router_enable_expert_bias"):
            continue
        ranks = [rank for rank, line in state.lines.items() if sum(line["loads"].get(router, ()))]
        old, new = (each.lines[ranks[0]].get("biases", {}).get(router) for each in (before, state))
        if old is None or new is None:
            continue
        share = passes / len(load)
        wrong = [
            number
            for number, (x, y, each) in enumerate(zip(old, new, load, strict=True))
            if abs(each - share) > NEAR * share and abs(y - x - math.copysign(rate, share - each)) > 0.01 * rate
        ]
        if wrong:
            number = wrong[0]
            moved = (
                f"moved by {new[number] - old[number]:+.3g}, should be {math.copysign(rate, share - load[number]):+.3g}"
            )
            detail = (
                f"{router}: the bias of {len(wrong)} of {len(load)} experts is wrong: that of expert {number} {moved}"
            )
            yield Finding(*at, detail, len(wrong) / len(load), tuple(ranks), side.name)


def loads_of(side: Side, step: int) -> dict[str, list[float]]:
    """Return router -> load of each expert, averaged over the ranks that counted it.

    In a data-parallel graph each rank counts its own tokens, and the bias moves by their mean; in a sharded graph all
    ranks of a stage have the same counts, and the others have none.
    """
    found: dict[str, list[list[float]]] = {}
    for line in side.states[step].lines.values() if step in side.states else ():
        for router, load in line.get("loads", {}).items():
            if sum(load):
                found.setdefault(router, []).append(load)
    return {router: [sum(each) / len(ranks) for each in zip(*ranks, strict=True)] for router, ranks in found.items()}


def _limit(side: Side) -> float:
    """The norm to which gradients are clipped."""
    wrapper = side.recipe.get("runner_wrapper") or {}
    return float(wrapper.get("max_grad_norm", 1.0)) if wrapper.get("use_clip_grad") else math.inf


def _clip(side: Side, step: int) -> float:
    """The factor by which a step's gradients were scaled down, by the norm that the run itself computed."""
    norm = side.steps.get(step, {}).get("global_norm")
    return min(1.0, _limit(side) / norm) if norm else 1.0


def _mtp(side: Side) -> int:
    model = side.recipe["model"]["model_config"]
    return int(model.get("num_nextn_predict_layers") or model.get("mtp_num_layers") or 0)


def _noise(key: str) -> float:
    """What fitting leaves of a rate, or of a weight decay of 0."""
    return 1e-9 if key == "rate" else 1e-3


def _trained(name: str) -> bool:
    return name.endswith(("weight", "bias")) and not name.endswith("expert_bias")


def _module(name: str) -> str:
    for prefix in ("adam_m.", "adam_v."):
        name = name.removeprefix(prefix)
    return group_of(name) if "." in name else name


def _ratio(one: float, two: float) -> str:
    """A factor between two numbers, as a whole number where it is one."""
    factor = two / one if one else math.inf
    whole = round(factor) if factor >= 1 else (round(1 / factor) if factor else 0)
    near = whole and abs((factor if factor >= 1 else 1 / factor) - whole) < 1e-3
    return f"{'' if factor >= 1 else '1/'}{whole} times" if near else f"{factor:.6g} times"
