"""This module writes what the ranks of a small run record, and offers ways to spoil it."""

import json

import numpy as np

from plugins.step_record.plan import MOMENTS
from tools.accuracy.equivalence import runs


def record(folder, workers=1, change=None, steps=2):
    """Write what the ranks of a small run record; `change(rank, arrays, json, metrics)` spoils it."""
    rng = np.random.default_rng(0)
    state = {name: rng.standard_normal((8, 4)).astype(np.float32) for name in WEIGHTS}
    state |= {f"{runs.START}{name}": value - 0.25 for name, value in state.items()}
    for prefix in MOMENTS:
        state |= {f"{prefix}{name}": np.abs(rng.standard_normal((8, 4))).astype(np.float32) for name in WEIGHTS}
    state |= {f"{runs.LEAST}{name}": state[f"{MOMENTS[1]}{name}"] for name in WEIGHTS}
    squares = [{name: float(step + 1) for name in WEIGHTS} for step in range(steps)]
    digests = [[f"{step}{sample}" for sample in range(4)] for step in range(steps)]
    losses = {"lm_loss": 2.5, "mtp_loss": None, "load_balancing_loss": 1.0, "global_norm": 5.0}
    metrics = [
        {"step": step + 1, "tokens": 64, "learning_rate": 0.1, "loss": 3.0 - step, **losses} for step in range(steps)
    ]
    for rank in range(workers):
        split = ["decoder.layers.1.mlp.experts.weight1"] if workers > 1 else []
        arrays = {
            name: value.reshape(workers, -1, 4)[rank] if any(name.endswith(part) for part in split) else value.copy()
            for name, value in state.items()
        }
        shared = [{n: s / workers if n in split else s for n, s in step.items()} for step in squares]
        # each pair of ranks leans to other experts; dyadic numbers, so that the mean is exact
        lean = np.resize([1, -1], len(LOADS)) / 128 * (0 if workers == 1 else (-1) ** rank)
        arrays[f"{runs.LOAD}{ROUTER}"] = np.stack([LOADS + lean] * steps).astype(np.float32)
        moves = RATE * np.sign(1 / len(LOADS) - LOADS)
        arrays[f"{runs.BIAS}{ROUTER}"] = np.arange(steps + 1, dtype=np.float32)[:, None] * moves.astype(np.float32)
        own = [step[rank::workers][::-1] for step in digests]
        content = {"world_size": workers, "samples": [*own, ["more"]], "squares": shared, "split": split}
        if change:
            change(rank, arrays, content, metrics)
        (folder / "equivalence").mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"equivalence/rank_{rank}.npz", **arrays)
        (folder / f"equivalence/rank_{rank}.json").write_text(json.dumps(content))
    (folder / "metrics").mkdir(exist_ok=True)
    lines = [json.dumps(line) for line in [{"total_steps": steps}, *metrics]]
    (folder / "metrics/rank_0.jsonl").write_text("\n".join(lines) + "\n")
    return runs.read_run(folder)


WEIGHTS = ("embedding.word_embeddings.weight", "decoder.layers.1.mlp.experts.weight1", "decoder.final_layernorm.weight")
EXPERTS = WEIGHTS[1]
ROUTER = "decoder.layers.1.mlp.router"
LOADS = np.array([8, 8, 7, 9, 5, 11, 12, 4]) / 64  # the first two got just their share
RATE = np.float32(0.001)


def spoil_data(rank, arrays, content, metrics):
    content["samples"][0][0] = "another"


def spoil_forward(rank, arrays, content, metrics):
    for line in metrics:
        line["loss"] += 0.01


def spoil_backward(rank, arrays, content, metrics):
    for step in content["squares"]:
        step[EXPERTS] *= 1.001


def scaled(name, factor):
    def spoil(rank, arrays, content, metrics):
        arrays[name] *= factor

    return spoil


def added(name, place, number, only=range(99)):
    """One element has another value, on the ranks `only`."""

    def spoil(rank, arrays, content, metrics):
        arrays[name][place] += number * (rank in only)

    return spoil


def spoil_loss_slightly(rank, arrays, content, metrics):
    metrics[1]["loss"] *= 1 + 5e-5


def spoil_clipping(rank, arrays, content, metrics):
    for line in metrics:
        line["global_norm"] = (len(WEIGHTS) * content["squares"][line["step"] - 1][WEIGHTS[0]]) ** 0.5


def spoil_bias_by_own_load(rank, arrays, content, metrics):
    """Every rank moves its bias by the load of rank 0, as if nothing was reduced and rank 0 sent its bias round."""
    load = LOADS + np.resize([1, -1], len(LOADS)) * 3 / 128
    arrays[f"bias.{ROUTER}"] = np.arange(3, dtype=np.float32)[:, None] * (RATE * np.sign(1 / 8 - load))


def tie(rank, arrays, content, metrics):
    """Move one of 1024 choices between two experts that have exactly their share, so that one of them gets too much."""
    arrays[f"load.{ROUTER}"][1, :2] += np.float32([1 / 1024, -1 / 1024])
    arrays[f"bias.{ROUTER}"][2:, :2] += [-RATE, RATE]


def spoil_number(name):
    """The number of a step is not one, from the second step on."""

    def spoil(rank, arrays, content, metrics):
        metrics[1][name] = float("nan")

    return spoil
