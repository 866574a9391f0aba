"""This module checks the records of one run against laws, which are relations that hold in every correct run, and
defines findings and the stages in which runs are compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plugins.batch_ramp.plan import division_of
from plugins.finite_loss.plan import undefined_parts
from plugins.step_record.plan import END, adam_of, apart, sketch_of
from plugins.step_record.plan import START as START_FILE
from tools.accuracy.diagnose.evidence import COUNTERS, Side, State
from tools.accuracy.diagnose.reference import bias_rate_of, built_of, outputs_of
from tools.accuracy.equivalence.runs import group_of, weight_of
from tools.accuracy.judge import ROUNDOFF
from tools.recipe.view import View

VERSIONS, CONFIGURATION, START = "versions", "configuration", "start"
RESUME, SAMPLES = "resume", "samples"
FORWARD, GRADIENTS, CLIPPING, UPDATE, ROUTERS = "forward", "gradients", "norm and clipping", "update", "routers"
STAGES = (VERSIONS, CONFIGURATION, START, RESUME, SAMPLES, FORWARD, GRADIENTS, CLIPPING, UPDATE, ROUTERS)
PARTS = ("lm_loss", "load_balancing_loss", "mtp_loss", "loss")
OF_PART = {"lm_loss": "model", "load_balancing_loss": "router", "mtp_loss": "mtp", "loss": "model"}  # -> module
GROUP = 1e-4  # relative; norms of weights, gradients and moments of another layout
LAW = 5e-4  # relative; a global norm computed again from moments, which hold gradients in float32
RATE = 2e-3  # relative; a learning rate or weight decay fitted to an update
NOISE = {"rate": 1e-9, "decay": 1e-3}  # error of a fitted rate, and of a fitted decay whose right value is 0
REST = 1e-2  # share of an update that AdamW does not explain; rounding leaves 1e-4 to 1e-3
NEAR = 1e-5  # relative; a load at its share, where the sign of the difference is rounding
ROUNDING = 1e-6  # relative; below it, only bits differ
REFERENCE = 2e-5  # relative; a module's output in float32 against NumPy in float64
_TRAINED = re.compile(r"((weight|bias)\d*|\.hc_\w+)$")
WORST = 3  # findings shown of a stage
_FAR = 100  # times Adam's epsilon or rounding; beyond it neither can keep a weight from moving


@dataclass(frozen=True)
class Finding:
    """A `Finding` is a difference between two runs, or a law that the run `side` breaks. If `late` is True, the finding
    was made only after the last step, so that any earlier step may be its cause.
    """

    step: int
    stage: str
    module: str
    detail: str
    error: float = math.inf  # relative, to sort by
    ranks: tuple[int, ...] = ()
    side: str = ""
    late: bool = False

    def __post_init__(self) -> None:
        """Sort a difference that is not a number first."""
        if math.isnan(self.error):
            object.__setattr__(self, "error", math.inf)

    @property
    def rounding(self) -> bool:
        """Return whether another order of summation can explain the difference."""
        return self.error < ROUNDING

    @property
    def order(self) -> tuple[Any, ...]:
        """Return the key by which findings are sorted: step, stage, and the largest error first."""
        return self.step, STAGES.index(self.stage), -self.error


def laws(side: Side) -> Iterator[Finding]:
    """Yield a finding for each law (relation that holds in every correct run) that the records of a run break."""
    for start in side.starts:
        known = bool(side.parts) or len(start.lines) == 1  # which tensors are copies, and which are parts
        yield from _tensors_law(side, start, RESUME if start.step else START, known)
        if start.step in side.states:  # this run had been here itself before it was resumed
            yield from _restored(side, start)
    yield from _built_law(side)
    yield from _modules_law(side)
    yield from _losses_law(side)
    yield from _alike_law(side)
    starts = {start.step: start for start in side.starts}
    for step, state in sorted(side.states.items()):
        yield from _tensors_law(side, state, UPDATE)
        yield from _gradients_law(side, step)
        yield from norm_law(side, step)
        yield from _update_law(side, state)
        yield from _router_law(side, state, side.states.get(step - 1) or starts.get(step - 1))


def _tensors_law(side: Side, state: State, stage: str, copies: bool = True) -> Iterator[Finding]:
    """Yield findings about tensors that are not finite or, if `copies` are known, whose copies differ; `stage` is that
    of findings about weights.
    """
    when = "after the step" if stage == UPDATE else "when the training begins"
    for name, tensor in sorted(state.tensors(side.parts).items()):
        at = state.step, ROUTERS if stage == UPDATE and name.endswith(COUNTERS) else stage, module_of(name)
        if copies and tensor.differing:
            yield Finding(*at, f"{name}: copies differ", 1.0, tensor.differing, side.name)
        if tensor.not_finite:
            yield Finding(*at, f"{name} is not finite {when}", math.inf, tensor.not_finite, side.name)


def _built_law(side: Side) -> Iterator[Finding]:
    """Yield findings unless the built model and optimizer have the settings of the recipe."""
    for name, wanted in built_of(side.recipe).items():
        found = side.effective.get(name, wanted)
        numbers = isinstance(found, int | float) and isinstance(wanted, int | float)
        if found != wanted and not (numbers and math.isclose(found, wanted, rel_tol=1e-6)):
            what = f"{name} was built as {found}; the recipe says {wanted}"
            yield Finding(0, CONFIGURATION, "configuration", what, math.inf, (), side.name)


def _modules_law(side: Side) -> Iterator[Finding]:
    """Yield the first module whose output is not NumPy's, in the first recorded step and at the end."""
    for kept_in, recorded in ((START_FILE, any(map(side.modules, side.states))), (END, bool(side.end))):
        if not recorded:
            continue
        step, wanted, ties, why = outputs_of(side, kept_in)
        if why:
            side.notes.append(f"its modules are not compared with the forward pass in NumPy: {why}")
            return
        # of a run that was resumed the files are those of its last part
        found = side.modules(step) if kept_in == START_FILE else side.end if side.ended == step else {}
        side.held |= not found.keys().isdisjoint(wanted)
        if wrong := _wrong_module(found, wanted, ties):
            name, error = wrong
            what = f"the output of {name} is {error:.2g} of its norm away from that of the forward pass in NumPy"
            if kept_in == END:
                what += f", with the weights and biases that step {step} leaves; in the first step it is right"
            yield Finding(step, FORWARD, output_of(side, name), what, 1.0, (), side.name, late=kept_in == END)
            return


def _wrong_module(
    found: Mapping[str, list[Any]], wanted: Mapping[str, Any], ties: Mapping[str, int]
) -> tuple[str, float] | None:
    """Return the first module whose output is wrong, and by how much.

    A token at a tie may choose another expert by rounding, which changes about its share of the output.
    """
    for name, output in wanted.items():
        if name not in found:
            continue
        error = apart(found[name], sketch_of(output))
        if not error <= REFERENCE:
            if error < 2 * math.sqrt(ties.get(name, 0) / math.prod(output.shape[:2])):
                return None  # what follows differs with it
            return name, error
    return None


def _restored(side: Side, start: State) -> Iterator[Finding]:
    saved, found = side.states[start.step].tensors(side.parts), start.tensors(side.parts)
    for name in sorted(saved.keys() & found.keys()):
        ranks = tuple(rank for rank, digest in saved[name].digests.items() if found[name].digests.get(rank) != digest)
        if ranks and not name.endswith((".fi_accu", ".expert_load")):
            norms = f"norm {saved[name].norm:.7g} when the step ended, {found[name].norm:.7g} restored"
            yield Finding(start.step, RESUME, module_of(name), f"{name}: {norms}", 1.0, ranks, side.name)


def _losses_law(side: Side) -> Iterator[Finding]:
    """Yield each part of the loss, learning rate, and global norm (of a step with an update) that is not finite."""
    undefined = undefined_of(side)
    for step, record in side.steps.items():
        for name in PARTS:
            value = record.get(name)
            if value is not None and not math.isfinite(value) and name not in undefined:
                yield Finding(step, FORWARD, OF_PART[name], f"{name} is {value}", math.inf, (), side.name)
        norm, rate = record.get("global_norm"), record.get("learning_rate")
        if norm is not None and not math.isfinite(norm) and not record.get("overflow"):
            yield Finding(step, CLIPPING, "global norm", f"the global norm is {norm}", math.inf, (), side.name)
        if rate is not None and not math.isfinite(rate):
            yield Finding(step, UPDATE, "learning rate", f"the learning rate is {rate}", math.inf, (), side.name)


def _alike_law(side: Side) -> Iterator[Finding]:
    """Yield each step whose global norm or learning rate is not the same on every rank."""
    for step, numbers in side.alike.items():
        for name, told in numbers.items():
            (first, one), *others = sorted(told.items())
            if wrong := [(rank, two) for rank, two in others if far(one, two) > ROUNDING]:
                words, stage = name.replace("_", " "), CLIPPING if name == "global_norm" else UPDATE
                what = f"{words} {one:.9g} on rank {first}, {wrong[0][1]:.9g} on rank {wrong[0][0]}"
                yield Finding(step, stage, words, what, 1.0, tuple(rank for rank, _ in wrong), side.name)


def _gradients_law(side: Side, step: int) -> Iterator[Finding]:
    for name, norm in sorted(side.gradients(step).items()):
        if not math.isfinite(norm):
            what = f"the norm of the gradient of {name} is {norm}"
            yield Finding(step, GRADIENTS, module_of(name), what, math.inf, (), side.name)


def norm_law(side: Side, step: int) -> Iterator[Finding]:
    """Yield a finding unless the norm of the clipped gradients equals the logged global norm or, if the clipping limit
    is smaller than this norm, the limit.
    """
    record, view = side.steps.get(step, {}), View(side.recipe)
    model = side.recipe["model"]["model_config"]
    mtp = model.get("num_nextn_predict_layers") or model.get("mtp_num_layers")
    norm, gradients = record.get("global_norm"), side.gradients(step)
    if norm is None or not gradients or record.get("overflow") or (view.pp > 1 and mtp):
        return
    if not math.isfinite(norm):
        return  # a finding by itself
    limit = limit_of(side)
    want, got = min(norm, limit), math.sqrt(sum(each**2 for each in gradients.values()))
    # of a norm of 0: gradients that follow from moments in float32 are never quite 0
    if not abs(got - want) <= LAW * (want or min(limit, 1.0)):
        what = (
            f"the global norm is {norm:.7g}, and its limit is {limit:.7g}; the norm of the clipped gradients is "
            f"{got:.7g}, but must be {want:.7g} ({ratio_of(want, got)})"
        )
        error = abs(got - want) / want if want else math.inf
        yield Finding(step, CLIPPING, "global norm", what, error, (), side.name)


def _update_law(side: Side, state: State) -> Iterator[Finding]:
    """Yield findings unless each weight moves by AdamW with the step's rate; those of one dimension do not decay.

    Of Muon's steps of matrices nothing is fitted; it leaves the other weights to AdamW. Nothing is said of a step in
    which PmaAdamW has replaced the weights by their averages.
    """
    optimizer = side.recipe.get("optimizer") or {}
    kind = str(optimizer.get("type", ""))
    if not (kind.endswith("AdamW") or kind == "Muon") or optimizer.get("weight_decay") is None:
        return
    step, grouped = state.step, side.recipe.get("grouped_lr_schedule")
    rate = side.steps.get(step, {}).get("learning_rate")
    if any(adam_of(optimizer, count=line.get("updates") or 0).averaged for line in state.lines.values()):
        return
    for name, rank, told in side.updates(step):
        decay = 0.0 if told["dimensions"] == 1 or name.endswith(".bias") else float(optimizer["weight_decay"])
        at = step, UPDATE, module_of(name)
        if rate == 0 and told.get("square") and not grouped:
            detail = f"{name} moved by {told['square'] ** 0.5:.4g}, but must not move, because the learning rate is 0"
            yield Finding(*at, detail, math.inf, (rank,), side.name)
        if not rate or told.get("rate") is None or grouped:
            continue
        fitted, decayed, rest = told["rate"], told["decay"], told["rest"] or 0.0
        lost, eps = _lost(side, state, name, rank, rate), _roundoff(side)
        if not abs(fitted - rate) <= (RATE + lost) * rate:
            detail = f"{name} moved as with a learning rate of {fitted:.4g}, but the rate must be {rate:.4g}"
            yield Finding(*at, detail, abs(fitted - rate) / rate, (rank,), side.name)
        elif not rest <= REST + lost:
            detail = f"{name}: {rest:.1%} of its update is not AdamW's"
            yield Finding(*at, detail, rest, (rank,), side.name)
        elif not abs(decayed - decay) <= max(0.02 * decay, NOISE["decay"], 2 * eps / rate):
            detail = f"{name} decayed by {decayed:.4g}, but must decay by {decay:.4g}"
            yield Finding(*at, detail, abs(decayed - decay), (rank,), side.name)


def _roundoff(side: Side) -> float:
    return ROUNDOFF.get(side.recipe["model"]["model_config"].get("params_dtype", ""), ROUNDOFF["float32"])


def _lost(side: Side, state: State, name: str, rank: int, rate: float) -> float:
    """Return the share of a weight's update that rounding of the new weight may change; infinity for a weight that did
    not move because each element's update was lost, which cannot be where the update is far above rounding, and the
    gradient far above Adam's epsilon.
    """
    told, (_, square, shape) = (state.lines[rank][key][name] for key in ("weights", "state"))
    stored = 2 * _roundoff(side) * math.sqrt(square)
    if told["square"]:
        return stored / math.sqrt(told["square"])
    root, epsilon = math.sqrt(math.prod(shape)), adam_of(side.recipe.get("optimizer") or {}).eps
    large = math.sqrt(told.get("gradient") or 0.0) > _FAR * epsilon * root and rate * root > _FAR * stored
    return 0.0 if large else math.inf


def _router_law(side: Side, state: State, before: State | None) -> Iterator[Finding]:
    """Yield findings unless loads add up to the choices, and biases move by the sign of share less load."""
    model, passes = side.recipe["model"]["model_config"], _passes(side, state.step)
    rate = bias_rate_of(side.recipe)
    loads = loads_of(side, state.step)
    for router in sorted({name for line in state.lines.values() for name in line["loads"]} - loads.keys()):
        what = f"{router}: no rank has counted a choice"
        yield Finding(state.step, ROUTERS, module_of(router), what, 1.0, (), side.name)
    for router, load in loads.items():
        at = state.step, ROUTERS, module_of(router)
        total = sum(load)
        if not abs(total - passes) <= 1e-3 * passes:
            detail = f"{router}: the sum of the experts' shares is {total:.6g}, but must be {passes:g}, 1 for each pass"
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
            move, right = new[number] - old[number], math.copysign(rate, share - load[number])
            detail = (
                f"{router}: the bias of {len(wrong)} of {len(load)} experts is wrong: that of expert {number} "
                f"moved by {move:+.3g}, but must move by {right:+.3g}"
            )
            yield Finding(*at, detail, len(wrong) / len(load), tuple(ranks), side.name)


def _passes(side: Side, step: int) -> float:
    """Return the forward passes of a step: its micro-batches, of which a ramp's smaller batches have fewer."""
    view = View(side.recipe)
    passes = view.micro_batches * view.accumulation
    whole = division_of(side.recipe).whole
    return passes if whole else passes * view.ramp.batch_at(step) / view.ramp.full


def loads_of(side: Side, step: int) -> dict[str, list[float]]:
    """Return for each router the load of each expert in a step, averaged over the ranks that counted tokens.

    In a data-parallel graph each rank counts its own tokens, and the bias moves by the mean of the loads; in a sharded
    graph all ranks of a stage have the same counts, and ranks of other stages have none.
    """
    found: dict[str, list[list[float]]] = {}
    for line in side.states[step].lines.values() if step in side.states else ():
        for router, load in line.get("loads", {}).items():
            if sum(load):
                found.setdefault(router, []).append(load)
    return {router: [sum(each) / len(ranks) for each in zip(*ranks, strict=True)] for router, ranks in found.items()}


def limit_of(side: Side) -> float:
    """Return the largest global norm after clipping; infinity if the run does not clip."""
    wrapper = side.recipe.get("runner_wrapper") or {}
    return float(wrapper.get("max_grad_norm", 1.0)) if wrapper.get("use_clip_grad") else math.inf


def clipping_of(side: Side, step: int) -> float:
    """Return the factor (at most 1) by which clipping multiplied a step's gradients; a factor of 0 is returned as 1."""
    norm = side.steps.get(step, {}).get("global_norm")
    return (min(1.0, limit_of(side) / norm) if norm else 1.0) or 1.0


def undefined_of(side: Side) -> tuple[str, ...]:
    """Return the parts of the loss that MindFormers logs as NaN (0 / 0) even if the training is correct."""
    model, view = side.recipe["model"]["model_config"], View(side.recipe)
    layers, dense = model.get("num_hidden_layers"), model.get("first_k_dense_replace") or 0
    trained = model.get("moe_aux_loss_coeff") or 0.0 if layers is None or dense < layers else 0.0
    return ("load_balancing_loss",) if undefined_parts(view.pp, view.accumulation, trained) else ()


def is_trained(name: str) -> bool:
    """Return whether a name, such as `weight`, `weight1` (experts) or `hc_fn`, belongs to a trained weight or to a
    moment of a trained weight.
    """
    return bool(_TRAINED.search(name)) and not name.endswith("expert_bias")


def module_of(name: str) -> str:
    """Return the part of the model to which a weight, a moment or a router's counter belongs."""
    name = weight_of(name)
    group = group_of(name) if "." in name else name
    inside = "self_attention" in name and group.endswith(".norms")  # such as that of the latent keys and values
    return group.removesuffix("norms") + "attention.norms" if inside else group


def output_of(side: Side, name: str) -> str:
    """Return the module to which a recorded output belongs: MTP layers come after the decoder layers, and queries, keys
    and values belong to `attention`.
    """
    words, layers = name.split("."), int(side.recipe["model"]["model_config"]["num_hidden_layers"])
    if words[0] == "layers" and int(words[1]) >= layers:
        words = ["mtp", "layers", str(int(words[1]) - layers), *words[2:]]
    if words[-1] in ("query", "key", "value", "context"):
        words.insert(-1, "attention")
    return ".".join(words)


def far(one: float, two: float) -> float:
    """Return the relative difference of two numbers; return 0 if both are NaN, and infinity if only one is finite."""
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    error = abs(one - two) / max(abs(one), abs(two))
    return error if math.isfinite(error) else math.inf


def ratio_of(one: float, two: float) -> str:
    """Return the ratio of the second number to the first as text, such as "2 times" or "1/2 times"."""
    factor = two / one if one else math.inf
    if not math.isfinite(factor):
        return f"{factor:.6g} times"
    whole = round(factor) if factor >= 1 else (round(1 / factor) if factor else 0)
    near = whole > 1 and abs((factor if factor >= 1 else 1 / factor) - whole) < 1e-3
    return f"{'' if factor >= 1 else '1/'}{whole} times" if near else f"{factor:.6g} times"
