"""Where a failed rung first goes wrong, and what that usually means (report, section 3.2.1). NumPy only."""

from __future__ import annotations

import re

import numpy as np

from tools.accuracy.align.compare import FAILED, Rung, first_difference, moved, relative
from tools.accuracy.align.record import Record
from tools.accuracy.reference.hyper import Hyper

# one layer's modules in the order of execution, with MindFormers' name and what a first difference there means
MODULES = {
    "input_norm": ("input_layernorm", "the norm: its weight or epsilon"),
    "query": ("self_attention (query)", "the query's projections and norm, or positions (RoPE)"),
    "key": ("self_attention (key)", "the key's projections and norm, or positions (RoPE)"),
    "value": ("self_attention (value)", "the value's projections and norm"),
    "context": ("self_attention.core_attention", "the softmax: its scale, the mask, or the product with the values"),
    "attention": ("self_attention.linear_proj", "the output projection"),
    "post_norm": ("pre_mlp_layernorm", "the residual connection, or the norm: its weight or epsilon"),
    "router": ("mlp.router", "routing: scores, bias, choice, normalisation or scaling"),
    "shared_expert": ("mlp.shared_experts", "the shared expert"),
    "mlp": ("mlp", "the routed experts' weights or the combination (dense layers: the feed-forward weights)"),
    "output": ("(residual)", "the residual connection"),
}


def forward_order(layers: int) -> list[str]:
    """Names of a trace in the order of execution; `layers` with MTP."""
    names = ["embedding"]
    for layer in range(layers):
        names += [f"layers.{layer}.{module}" for module in MODULES]
    return names


def explain_forward(rung: Rung, ours: Record, theirs: Record, rope: int) -> str:
    """The first module that differs; `rope`: the last dimensions of a head that are rotated."""
    bad = [row.name for row in rung.rows if row.status == FAILED]
    given = [name for name in bad if name.startswith(("initial", "batch"))]
    if given:
        return f"the two sides were not given the same: {', '.join(given[:3])}"
    layers = 1 + max((int(name.split(".")[1]) for name in ours.trace if name.startswith("layers.")), default=-1)
    decoder_first = [name for name in forward_order(layers) if name in ours.trace]
    rows = first_difference(ours.trace, theirs.trace, [*decoder_first, "final_norm", "logits"])
    first = next((row for row in rows if row.status == FAILED), None)
    if first is None:
        return "every module agrees: the loss itself differs (mask, labels, auxiliary losses)"
    if not first.name.startswith("layers."):
        return f"first difference: {first.name} (relative {first.error:.1e})"
    _, layer, module = first.name.split(".")
    where, meaning = MODULES[module]
    if module in ("query", "key"):
        meaning = _rotated_only(ours.trace[first.name], theirs.trace[first.name], rope) or meaning
    return f"first difference: layer {layer}, {where} (relative {first.error:.1e}): {meaning}"


def explain_backward(rung: Rung, ours: Record, theirs: Record) -> str:
    """The failed gradient that backward reaches first, and how far they reach."""
    bad = [row for row in rung.rows if row.status == FAILED]
    weights = [row for row in bad if row.name != "global norm"]
    if not weights:
        return "every gradient agrees, the global norm does not: how the norm is taken"
    last = weights[-1]  # rows are in forward order
    factor = _factor(ours.gradient[last.name], theirs.gradient[last.name])
    text = f"{len(weights)} of {len(rung.rows) - 1} gradients differ; backward meets {last.name} first"
    return f"{text} ({last.error:.1e} relative{factor})"


def explain_update(rung: Rung, ours: Record, theirs: Record, hyper: Hyper) -> str:
    """Which parameter group moved differently, and whether weight decay or the rate explains it."""
    bad = [row.name for row in rung.rows if row.status == FAILED]
    biases = [name for name in bad if re.search(r"e_score_correction_bias|expert_bias", name)]
    weights = [name for name in bad if name not in biases]
    if not weights:
        return f"weights agree; the router's bias does not: {biases[0]} (the aux-free update)"
    steps = moved(ours), moved(theirs)
    groups = {
        "weight_decay": [name for name in weights if ours.initial[name].ndim > 1],
        "no_weight_decay": [name for name in weights if ours.initial[name].ndim <= 1],
    }
    said = []
    for group, names in groups.items():
        if names:
            name = max(names, key=lambda each: relative(steps[0][each], steps[1][each]))
            said.append(f"group {group}: {len(names)} differ, most {name}{_cause(name, steps, ours, hyper)}")
    return "; ".join(said)


def explain_curve(rung: Rung) -> str:
    """The first step that differs."""
    first = next(row for row in rung.rows if row.status == FAILED)
    meaning = "state that one step does not show"
    if "by itself" in first.name:
        meaning = "wrong from equal weights, moments and tokens: what only this step does (schedule, tokens, bias)"
    return f"{first.name} is the first to differ, by {first.error:.1e}: {meaning}"


def _rotated_only(ours: np.ndarray, theirs: np.ndarray, rope: int) -> str:
    """Says so when the rotated part of the heads differs and the rest does not."""
    if ours.shape != theirs.shape or not 0 < rope < ours.shape[-1]:
        return ""
    plain, rotated = (relative(ours[..., part], theirs[..., part]) for part in (np.s_[:-rope], np.s_[-rope:]))
    if plain > 1e-4 or rotated <= 1e-4:
        return ""
    first = relative(ours[:, :1, ..., -rope:], theirs[:, :1, ..., -rope:])
    at = (
        "from the first position on: RoPE's offset, layout or scale"
        if first > 1e-4
        else "not at position 0: RoPE's angles"
    )
    return f"only the rotated dimensions differ, {at}"


def _cause(name: str, steps: tuple, ours: Record, hyper: Hyper) -> str:
    """Whether the difference of two steps is along the weight (decay) or along the step (learning rate)."""
    apart = (steps[0][name] - steps[1][name]).ravel()
    rate = hyper.rates[hyper.first_update - 1]
    along_weight = _cosine(apart, ours.initial[name].ravel())
    if abs(along_weight) > 0.9:
        decay = -float(apart @ ours.initial[name].ravel()) / float(np.square(ours.initial[name]).sum()) / rate
        return f": decayed by {decay:+.3g} more than on the other side (the recipe's weight_decay is {hyper.decay:g})"
    return _factor(steps[0][name], steps[1][name])


def _factor(ours: np.ndarray, theirs: np.ndarray) -> str:
    """``, 1.010 times the other side`` where one is a multiple of the other."""
    if ours.shape != theirs.shape or _cosine(ours.ravel(), theirs.ravel()) < 0.999:
        return ""
    return f", {np.linalg.norm(ours) / np.linalg.norm(theirs):.4f} times the other side's"


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    size = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one.astype(np.float64) @ other / size) if size and np.isfinite(size) else 0.0
