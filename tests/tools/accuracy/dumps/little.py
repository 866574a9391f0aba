"""A little mixture of experts that trains in NumPy and writes what L0 shows of it, with one fault at a time.

It has everything that a headline must tell apart: weights; state that the forward pass fills (the load of each expert,
a cache of keys, a running mean, a count of calls), state that is moved between steps (the router's bias) and the
optimizer's moments.
"""

from dataclasses import dataclass

import numpy as np

from tests.tools.accuracy.dumps.dump_writer import write_dump

T, H, V, E = 24, 16, 32, 4  # tokens, width, vocabulary, experts


@dataclass(frozen=True)
class Faults:
    """A `Faults` says what is wrong with the model; by default nothing is wrong."""

    softmax: float = 1.0  # factor of the attention's weights
    inside: float = 1.0  # factor of the scores that go to the router's inner cell
    loss_gradient: float = 1.0
    decay: float = 0.1
    rate: float = 1e-3
    beta: float = 0.9
    seed: int = 0  # of weights and data
    weights_seed: int = 0
    one_weight: float = 1.0  # factor of the experts' first weights, as of a wrong checkpoint
    data_from: int = 99  # step from which other samples come
    start_bias: float = 0.0  # of the first expert
    bias_rate: float = 1e-3
    load: float = 1.0  # factor of the counted load
    cache: float = 1.0  # factor of the kept keys
    momentum: float = 0.9  # of the running mean
    calls: int = 0  # where the count starts
    dropout: int = 0  # seed
    moments: bool = True  # the optimizer is hooked too


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _initial(faults):
    rng = np.random.default_rng([faults.seed, faults.weights_seed])
    held = {"embed": (V, H), "attn": (H, H), "router": (E, H), "experts": (E * H, H), "head": (V, H)}
    weights = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in held.items()}
    weights["experts"] = weights["experts"] * np.float32(faults.one_weight)
    return weights


def _state(faults):
    bias = np.zeros(E, np.float32)
    bias[0] = faults.start_bias
    return {
        "bias": bias,
        "mean": np.zeros(H, np.float32),
        "keys": np.zeros((T, H), np.float32),
        "calls": np.array([faults.calls], np.int32),
        "first": {},
        "second": {},
    }


def _call(path, inputs, outputs, **parameters):
    return {f"Cell.{path}.forward.0": {"input_args": inputs, "output": outputs, "parameters": parameters}}


def _forward(tokens, labels, w, state, faults, step):
    """The calls in the order in which they end, and what the backward pass needs."""
    f = np.float32
    x = w["embed"][tokens]
    calls = _call("net.embed.Embedding", [tokens], [x], weight=w["embed"])
    state["mean"] = f(faults.momentum) * state["mean"] + f(1 - faults.momentum) * x.mean(0)
    state["calls"] = state["calls"] + np.int32(1)
    calls |= _call("net.norm.Norm", [x], [x], running_mean=state["mean"], count=state["calls"])
    state["keys"] = x * f(faults.cache)
    mixed = (softmax(x @ x.T) * f(faults.softmax)) @ x
    calls |= _call("net.attn.core.Attention", [x], [mixed], key_cache=state["keys"])
    y = mixed @ w["attn"].T
    calls |= _call("net.attn.proj.Linear", [mixed], [y], weight=w["attn"])
    kept = np.random.default_rng([9, step, faults.dropout]).random(y.shape) > 0.1
    dropped = np.where(kept, y, 0).astype(f)
    calls |= _call("net.attn.dropout.Dropout", [y], [dropped])
    scores = (1 / (1 + np.exp(-dropped @ w["router"].T))).astype(f)
    biased = (scores + state["bias"]) * f(faults.inside)
    chosen = biased.argmax(1).astype(np.int32)
    calls |= _call("net.moe.router.topk.TopK", [biased], [chosen])
    load = (np.bincount(chosen, minlength=E) / T * faults.load).astype(f)
    gate = scores[np.arange(T), chosen]
    router = {"weight": w["router"], "expert_bias": state["bias"], "expert_load": load}
    calls |= _call("net.moe.router.Router", [dropped], [chosen, gate], **router)
    experts = w["experts"].reshape(E, H, H)[chosen]
    raw = np.einsum("tij,tj->ti", experts, dropped)
    calls |= _call("net.moe.experts.gemm.Matmul", [dropped, w["experts"]], [raw])
    z = dropped + gate[:, None] * raw
    calls |= _call("net.moe.experts.Experts", [dropped, gate], [z], weight1=w["experts"])
    logits = z @ w["head"].T
    calls |= _call("net.head.Linear", [z], [logits], weight=w["head"])
    loss = np.array([-np.log(softmax(logits)[np.arange(T), labels]).mean()], f)
    calls |= _call("net.Model", [tokens, labels], [loss])
    return calls, (x, mixed, kept, dropped, scores, chosen, gate, raw, z, logits, load)


def _backward(tokens, labels, w, kept_values, faults):
    """Calls and gradients; through the attention's values, not its scores."""
    x, mixed, kept, dropped, scores, chosen, gate, raw, z, logits, _ = kept_values
    out = (softmax(logits) - np.eye(V)[labels]) / T * faults.loss_gradient
    out = out.astype(np.float32)
    dz = out @ w["head"]
    dgate = (dz * raw).sum(1)
    dscores = np.zeros_like(scores)
    dscores[np.arange(T), chosen] = dgate * gate * (1 - gate)
    experts = np.zeros((E, H, H), np.float32)
    np.add.at(experts, chosen, (dz * gate[:, None])[:, :, None] * dropped[:, None, :])
    held = w["experts"].reshape(E, H, H)[chosen]
    dy = (dz + gate[:, None] * np.einsum("tij,ti->tj", held, dz) + dscores @ w["router"]) * kept
    embed = np.zeros_like(w["embed"])
    np.add.at(embed, tokens, softmax(x @ x.T).T @ (dy @ w["attn"]))
    gradients = {"head": out.T @ z, "experts": experts.reshape(E * H, H), "router": dscores.T @ dropped}
    gradients |= {"attn": dy.T @ mixed, "embed": embed}
    gradients = {name: gradient.astype(np.float32) for name, gradient in gradients.items()}
    cells = {"head": "net.head.Linear", "experts": "net.moe.experts.Experts", "router": "net.moe.router.Router"}
    cells |= {"attn": "net.attn.proj.Linear", "embed": "net.embed.Embedding"}
    calls = {"Cell.net.head.Linear.backward.0": {"input": [out], "output": [dz.astype(np.float32)]}}
    for name, cell in cells.items():
        label = "weight1" if name == "experts" else "weight"
        calls[f"Cell.{cell}.parameters_grad.0"] = {label: [gradients[name]]}
    return calls, gradients


def _update(w, gradients, state, faults, step):
    for name, gradient in gradients.items():
        first, second = (state[each].get(name, np.zeros_like(gradient)) for each in ("first", "second"))
        state["first"][name] = first = np.float32(faults.beta) * first + np.float32(1 - faults.beta) * gradient
        state["second"][name] = second = np.float32(0.95) * second + np.float32(0.05) * gradient**2
        moved = first / (1 - faults.beta ** (step + 1)) / (np.sqrt(second / (1 - 0.95 ** (step + 1))) + 1e-8)
        w[name] = (w[name] - np.float32(faults.rate) * (moved + np.float32(faults.decay) * w[name])).astype(np.float32)


def train(faults, steps=2):
    """Return what a dump of level L0 shows of each step, and of the weights after the last step."""
    w, state, found = _initial(faults), _state(faults), []
    for step in range(steps):
        rng = np.random.default_rng([5, faults.seed, step, step >= faults.data_from])
        tokens, labels = (rng.integers(0, V, T).astype(np.int32) for _ in range(2))
        calls, values = _forward(tokens, labels, w, state, faults, step)
        back, gradients = _backward(tokens, labels, w, values, faults)
        w = dict(w)
        _update(w, gradients, state, faults, step)
        state["bias"] = state["bias"] + np.float32(faults.bias_rate) * np.sign(1 / E - values[-1]).astype(np.float32)
        moments = {f"{kind}.{name}": state[kind][name] for kind in ("first", "second") for name in w}
        found.append(calls | back | (_call("optimizer.AdamW", [], [], **moments) if faults.moments else {}))
    behind = {key: {"parameters": groups["parameters"]} for key, groups in found[0].items() if groups.get("parameters")}
    names = {"net.embed.Embedding": "embed", "net.attn.proj.Linear": "attn", "net.head.Linear": "head"}
    names |= {"net.moe.router.Router": "router", "net.moe.experts.Experts": "experts"}
    last = {}
    for cell, name in names.items():
        last[f"Cell.{cell}.forward.0"] = {"parameters": {"weight1" if name == "experts" else "weight": w[name]}}
    assert set(last) <= set(behind)
    return [*found, last]


def write_little(folder, task="tensor", **faults):
    return write_dump(folder, train(Faults(**faults)), task=task)
