"""This module computes the values that a rank records in a training step for `tc3 accuracy diagnose`: digests of the
samples, and sizes of weights, gradients, optimizer and routers. The module uses only Python and NumPy.

In one CPU process the first recorded step also has a sketch of every module's output, computed in PyNative mode from
the step's batch, and for a small model also the weights and the batch, from which anybody can compute the outputs
again. The same values are recorded when the training ends: the routers' biases are then not 0 and the weights of norms
not 1 any more, so a forward pass that uses them wrongly is detected. Recording these outputs between two steps would
make MindSpore compile the train step again.

Every run records its samples, if the step's data pass through the process (not in sink mode). All other values cost a
copy of the weights and of the first moments in the host's memory, and time for each recorded step; therefore they are
recorded only if a recipe sets `plugins.step_record`, and only in the first steps of a (resumed) run.

A gradient is computed from AdamW's first moment, m' = beta1 * m + (1 - beta1) * g, or from Muon's, m' = momentum * m +
g, so it is the gradient after reduction and clipping. AdamW's learning rate and weight decay for a weight are fitted to
the weight's change, not copied from the optimizer's groups: with u the normalised moment, ``before - after = lr * u +
lr * decay * before`` has two unknowns, and a weight has many elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plugins.sealed_checkpoint.router_state import AVERAGING, MUON_MOMENT
from plugins.settings import WATCHES, Section, setting

KEY = "plugins.step_record"
IDS = "input_ids"  # the column whose rows are the samples
MOMENTS = ("adam_m.", "adam_v.")
STATE = (*MOMENTS, MUON_MOMENT)
BETAS, MUON_BETAS, MOMENTUM, EPS = (0.9, 0.999), (0.95, 0.95), 0.95, 1e-8  # MindFormers' defaults, of AdamW and Muon
LOAD, BIAS = ".expert_load", ".expert_bias"  # ends of the names of a router's state
START = "start_rank_0.npz"  # beside the record: weights and batch of the first step, of a model that is small enough
END = "end_rank_0.npz"  # the same of the end: weights after the last step, and its batch
SMALL = 256 * 2**20  # bytes of weights that are kept there
PROJECTIONS = 4  # of a module's output
_DIGITS = 16  # of a digest


@dataclass(frozen=True)
class Settings(Section):
    """The only setting is the number of steps of a run that are recorded."""

    KEY = KEY
    RIGHT = f"write `steps: 3` under it, or {KEY}: False"
    CHANGE = WATCHES

    steps: int = setting(
        3,
        "steps of a (resumed) run whose weights, gradients, optimizer and routers are recorded",
        "write a number of steps from 1 on",
        least=1,
    )


@dataclass(frozen=True)
class Adam:
    """An `Adam` holds the optimizer's values for one step: the learning rate, and `count`, the number of updates that
    the optimizer has made. The field `momentum` is the momentum of the matrices that Muon updates; Muon leaves the
    other weights to AdamW. The field `averaged` says whether PmaAdamW has replaced the weights by their averages in
    this step, which no learning rate explains.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    count: int
    momentum: float = MOMENTUM
    averaged: bool = False


def adam_of(optimizer: Mapping[str, Any], lr: float = 0.0, count: int = 0) -> Adam:
    """Return the optimizer's values (`Adam`) that a recipe's section `optimizer` states, for a step with this learning
    rate and number of updates.
    """
    muon = "adamw_" if optimizer.get("type") == "Muon" else ""
    beta1, beta2 = optimizer.get(f"{muon}betas") or (MUON_BETAS if muon else BETAS)
    eps, momentum = optimizer.get(f"{muon}eps") or EPS, optimizer.get("momentum")
    momentum = MOMENTUM if momentum is None else float(momentum)
    number, between = (optimizer.get(key) or AVERAGING[key] for key in ("fused_num", "interleave_step"))
    averaged = optimizer.get("type") == "PmaAdamW" and count > 0 and count % (number * between) == 0
    return Adam(lr, float(beta1), float(beta2), float(eps), count, momentum, averaged)


def record_file(run_dir: str | Path, rank: int) -> Path:
    """Return the file into which rank `rank` of a run writes its record."""
    return Path(run_dir) / "metrics" / f"state_rank_{rank}.jsonl"


def digest(array: np.ndarray) -> str:
    """Return 16 hexadecimal digits that depend on every bit, the shape and the type of an array."""
    array = np.ascontiguousarray(array)
    made = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=_DIGITS // 2)
    made.update(array.tobytes())
    return made.hexdigest()


def samples_of(columns: Iterable[str], batch: Iterable[np.ndarray]) -> dict[str, list[str] | str]:
    """Return, for each column of a batch, the digest of each sample's entry in order, or one digest if all samples have
    the same entry.

    The rows of `input_ids` are the samples.
    """
    found: dict[str, list[str] | str] = {}
    for name, rows in zip(columns, batch, strict=False):
        digests = [digest(np.asarray(row)) for row in np.atleast_1d(rows)]
        found[name] = digests[0] if name != IDS and len(set(digests)) == 1 else digests
    return found


def sum_of_squares(array: np.ndarray) -> float:
    """Return the sum of the squares of an array's elements, in float64."""
    flat = array.reshape(-1).astype(np.float64)
    return float(flat @ flat)


def state_of(arrays: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Return a dictionary from the name of each tensor to [digest, sum of squares, shape]."""
    return {name: [digest(array), sum_of_squares(array), list(array.shape)] for name, array in arrays.items()}


def sketch_of(array: np.ndarray) -> list[Any]:
    """Return [digest, sum of squares, projections] of a module's output.

    The projections are products of the output with fixed random vectors: the projections of two outputs show how far
    the outputs are `apart`.
    """
    flat, rng = array.reshape(-1).astype(np.float64), np.random.default_rng(0)
    return [
        digest(array),
        float(flat @ flat),
        [float(flat @ rng.standard_normal(flat.size)) for _ in range(PROJECTIONS)],
    ]


def apart(one: Iterable[Any], two: Iterable[Any]) -> float:
    """Return the distance of two module outputs relative to the norm of the first output; it is estimated from their
    sketches, and right to a factor of about two.
    """
    (_, square, mine), (_, _, others) = one, two
    return float(np.sqrt(np.mean(np.square(np.subtract(mine, others))) / max(square, 1e-30)))


def gradient_square(moment: np.ndarray, before: np.ndarray | float, beta1: float) -> float:
    """Return the sum of squares of the (clipped) gradient, which follows from the first moment before and after a
    step.
    """
    return sum_of_squares((np.asarray(moment, np.float64) - beta1 * np.asarray(before, np.float64)) / (1 - beta1))


def weight_of(
    name: str, before: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray], adam: Adam
) -> dict[str, Any] | None:
    """Return the recorded values of one rank's part of a weight in a step; return None if the rank keeps no moment of
    this weight.

    Args:
        before, now: name -> weight or moment, before and after the step.

    Returns:
        "dimensions"; "gradient", the sum of squares of the gradient, if it can be computed; and the entries of
            `update_of`, of which a matrix that Muon updates has only "square", because no single factor explains its
            step.
    """
    value, old = now[name], before.get(name)
    found: dict[str, Any] = {"dimensions": value.ndim}
    muon = MUON_MOMENT + name
    if muon in now and now[muon].shape == value.shape:
        if old is not None and muon in before and old.shape == before[muon].shape == value.shape:
            found |= dict.fromkeys(("rate", "decay", "rest")) | {"square": sum_of_squares(value - old)}
            found["gradient"] = sum_of_squares(now[muon] - np.float64(adam.momentum) * before[muon])
        elif adam.count == 1:
            found["gradient"] = sum_of_squares(now[muon])
        return found
    first, second = (prefix + name for prefix in MOMENTS)
    if first not in now or second not in now or now[first].size < value.size:  # Muon keeps one unused number
        return None
    if old is not None and first in before and old.shape == before[first].shape == value.shape:
        found |= update_of(old, value, now[first], now[second], adam)
        found["gradient"] = gradient_square(now[first], before[first], adam.beta1)
    elif adam.count == 1:  # the graph has cut its weights since the start; before the first update moments are 0
        found["gradient"] = gradient_square(now[first], 0.0, adam.beta1)
    return found


def without_update(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the recorded values of the weights (name -> values of `weight_of`) for a step that the loss scale skipped:
    the optimizer left moments and weights unchanged, so no gradient and no update can be computed from them.
    """
    return {name: {"dimensions": told["dimensions"]} for name, told in weights.items() if "dimensions" in told}


def update_of(
    before: np.ndarray, after: np.ndarray, moment: np.ndarray, square: np.ndarray, adam: Adam
) -> dict[str, float | None]:
    """Return the size of an update of one rank's part of a weight, and the learning rate and weight decay that fit the
    update.

    Returns:
        "square": the sum of squares of the change; "rate", "decay": the learning rate and the weight decay that fit the
        change best; "rest": the norm of the remaining part of the change, as a share of the norm of the change. The
            last three are None if they cannot be determined: there is no learning rate, there are fewer than four
            elements, averages have replaced the weights, or the two effects cannot be separated.
    """
    weight = before.reshape(-1).astype(np.float64)
    change = weight - after.reshape(-1).astype(np.float64)
    found: dict[str, float | None] = {"square": float(change @ change), "rate": None, "decay": None, "rest": None}
    if not adam.lr or weight.size < 4 or adam.averaged:
        return found
    mean = moment.reshape(-1).astype(np.float64) / (1 - adam.beta1**adam.count)
    usual = mean / (np.sqrt(square.reshape(-1).astype(np.float64) / (1 - adam.beta2**adam.count)) + adam.eps)
    a, b, c = usual @ usual, usual @ weight, weight @ weight
    if a * c - b * b <= 1e-6 * a * c:
        return found
    rate = (c * (usual @ change) - b * (weight @ change)) / (a * c - b * b)
    decayed = (a * (weight @ change) - b * (usual @ change)) / (a * c - b * b)
    rest = change - rate * usual - decayed * weight
    norm = float(np.sqrt(change @ change))
    found |= {"rate": float(rate), "decay": float(decayed / adam.lr)}
    found["rest"] = float(np.sqrt(rest @ rest)) / norm if norm else None
    return found
