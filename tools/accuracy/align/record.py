"""What one side of an alignment did, in the words of both: a record of named arrays. NumPy only.

trace      module -> its output in the first batch's forward pass, before training: [B, S, ...]
gradient   weight -> gradient of the first step
initial, updated   weight -> value before training, and after the first step that moves weights
curve      `loss`, `lm_loss`, `mtp_loss`, `global_norm`, `learning_rate` -> [steps]
batch      `input_ids`, `labels`, `loss_mask` -> [steps, B, S]
states     before each step and after the last: `weight`, and Adam's `moment` and `square`, each weight -> value
loads      for each step: layer -> share of the choices that each expert got, [E]
Weights have Hugging Face's names where one side is Hugging Face, MindFormers' otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tools.accuracy.reference.hyper import Hyper
from tools.weights.hugging_face.names import table, to_hugging_face
from tools.weights.hugging_face.sizes import Sizes

Arrays = dict[str, np.ndarray]
CURVES = ("loss", "lm_loss", "mtp_loss", "global_norm", "learning_rate")


@dataclass
class Record:
    """See the module. single: `reference.train.single_steps` from the other side's states. about: versions."""

    trace: Arrays
    gradient: Arrays
    initial: Arrays
    updated: Arrays
    curve: Arrays
    batch: Arrays
    states: list[dict[str, Arrays]] = field(default_factory=list)
    loads: list[Arrays] = field(default_factory=list)
    single: Arrays = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)


def of_reference(stored: Mapping[str, np.ndarray], weights: Arrays, batch: Arrays) -> Record:
    """The record of `tools.accuracy.reference.run`, with what it was given."""
    parts: dict[str, Any] = {
        kind: _below(stored, f"{kind}/") for kind in ("trace", "gradient", "updated", "curve", "single")
    }
    parts["gradient"] = {name: parts["gradient"][name] for name in weights if name in parts["gradient"]}
    about = json.loads(str(stored["about"])) if "about" in stored else {}
    return Record(initial=weights, batch=batch, about=about, **parts)


def of_mindformers(stored: Mapping[str, np.ndarray], metrics: Iterable[Mapping], hyper: Hyper) -> Record:
    """The record of `recorder` and the steps of `launch.workers.metrics`, under MindFormers' names.

    Gradients come out of Adam's first moments after one step, which are (1 - beta1) times the clipped gradient: no
    second graph is compiled, and it is the gradient that the trainer used.
    """
    steps = list(metrics)
    curve = {name: np.array([step[name] for step in steps], np.float64) for name in CURVES}
    scale = float(max(curve["global_norm"][0], hyper.clip) / hyper.clip) if hyper.clip else 1.0
    share = float(np.float32(1) - np.float32(hyper.betas[0]))
    kinds = ("weight", "moment", "square")
    states = [{kind: _below(stored, f"state/{step}/{kind}/") for kind in kinds} for step in range(len(steps) + 1)]
    gradient = {name: moment * np.float32(scale / share) for name, moment in states[1]["moment"].items()}
    trace = _below(stored, "trace/")
    trace["logits"] = stored["logits/graph"].reshape(trace["logits"].shape)
    for name in [name for name in trace if name.endswith(".router")]:
        trace[name] = trace[name].reshape(*trace["logits"].shape[:2], -1)
    return Record(
        trace=trace,
        gradient=gradient,
        initial=states[0]["weight"],
        updated=states[hyper.first_update]["weight"],
        curve=curve,
        batch=_below(stored, "batch/"),
        states=states,
        loads=[_below(stored, f"load/{step}/") for step in range(len(steps))],
    )


def in_hugging_face_names(record: Record, sizes: Sizes) -> Record:
    """The same record with every weight cut and named as Hugging Face's."""
    untrained = {entry.mindformers: entry.shape for entry in table(sizes) if not entry.trained}
    biases = [part for entry in table(sizes) if not entry.trained for part in entry.parts]

    def named(arrays: Arrays) -> Arrays:
        """Of trained weights only: without the biases."""
        full = to_hugging_face({**{name: np.zeros(shape) for name, shape in untrained.items()}, **arrays}, sizes)
        return {name: array for name, array in full.items() if name not in biases}

    return replace(
        record,
        gradient=named(record.gradient),
        initial=to_hugging_face(record.initial, sizes),
        updated=to_hugging_face(record.updated, sizes),
        states=[
            {
                "weight": to_hugging_face(state["weight"], sizes),
                "moment": named(state["moment"]),
                "square": named(state["square"]),
            }
            for state in record.states
        ],
        loads=[{_layer(name, sizes): load for name, load in loads.items()} for loads in record.loads],
    )


def _layer(router: str, sizes: Sizes) -> str:
    """The number of a MindFormers router's layer, MTP behind the others."""
    words = router.split(".")
    return str(int(words[2]) + sizes.layers * (words[0] == "mtp"))


def read_metrics(run_dir: Path, rank: int = 0) -> list[dict]:
    """The steps that a rank of a run wrote, in order."""
    lines = (run_dir / "metrics" / f"rank_{rank}.jsonl").read_text("utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "step" in record]


def read(file: Path) -> Arrays:
    """Everything in an .npz."""
    with np.load(file) as stored:
        return {name: stored[name] for name in stored.files}


def _below(stored: Mapping[str, np.ndarray], prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in stored.items() if name.startswith(prefix)}
