"""This module runs `tc3 train` for the trainings of `tc3 accuracy equivalence`, and reads what the ranks recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import CheckpointError, DataError, RecipeError
from plugins.sealed_checkpoint.router_state import AVERAGES
from plugins.step_record.plan import IDS, STATE, adam_of
from tools.data.index import write_corpus
from tools.process import children
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

ROOT = Path(__file__).resolve().parents[3]
CALLBACK = {"type": "EquivalenceRecord", "auto_register": "equivalence_record.EquivalenceRecord"}
MUON = "Muon"  # the optimizer that has one moment of a layer's matrix
START = "start."  # of the names of the weights before training
FIRST = "first."  # of the names of the gradients of the first step, of runs whose checkpoints have them
LEAST = "least."  # of the names of the smallest mean squares of gradients that AdamW divided by in a step
# of the names of routers: shares of the choices that each expert got [steps, experts], and the biases by which choices
# are steered, at the start and after each step [steps + 1, experts]
LOAD, BIAS = "load.", "bias."
KEPT = (*STATE, f"{AVERAGES}sma.")  # of the names of the optimizer's state of a weight
PREFIXES = (*KEPT, START, FIRST, LEAST, LOAD, BIAS)
# the sum of the losses after its parts: where only it is wrong, it is the sum
LOSSES = ("lm_loss", "mtp_loss", "load_balancing_loss", "loss", "global_norm")
MONITORS = ({"type": "MFLossMonitor"},)  # the callbacks that MindFormers gives a recipe that names none
PASSES = ("micro_batch_num", "gradient_accumulation_steps")  # keys of a callback that counts the passes of a step
DOCUMENT = (20, 200)  # tokens of a document of the corpus


class RunFailedError(Exception):
    """This error means that a compared training failed; the message contains the last lines of its output."""


@dataclass(frozen=True)
class Trained:
    """A `Trained` holds what a training recorded: metrics, samples, norms of gradients and tensors."""

    workers: int  # the number of workers
    steps: list[dict[str, Any]]  # the metrics of each step
    samples: list[list[str]]  # for each step the sorted digests of its samples; empty if they are unknown
    norms: list[dict[str, float]]  # for each step the norm of each weight's gradient, after clipping
    state: dict[str, np.ndarray]  # whole tensors, by the names of weights and routers behind a prefix above
    differing: dict[str, tuple[int, ...]]  # tensor -> the ranks whose copy differs from that of rank 0
    shares: list[float] = field(default_factory=list)  # norms of the last stage's own gradient of the embedding
    held_out: dict[int, float] = field(default_factory=dict)  # step -> held-out loss, if the run evaluates


@dataclass
class Runs:
    """A `Runs` holds the trainings of one recipe by name; each training runs only once, when its results are first
    needed.
    """

    base: Recipe  # the recipe that `one_worker` returned
    steps: int
    work: Path  # the folder of the trainings
    started: Callable[[str], None]  # a function that is called with the name of each training before it starts
    runs: dict[str, Trained] = field(default_factory=dict)
    failures: dict[str, RunFailedError] = field(default_factory=dict)
    corpora: dict[int, str] = field(default_factory=dict)  # tokens of a sample (0: the recipe's) -> path prefix
    word = "training"

    def once(self, name: str, make: Callable[[], Trained]) -> Trained:
        """Return the results of a training, which `make` runs in the first call. Raise RunFailedError if the training
        failed, in this call or an earlier one, or if its record cannot be read.
        """
        if name in self.failures:
            raise self.failures[name]
        if name not in self.runs:
            self.started(name)
            try:
                self.runs[name] = make()
            except (RunFailedError, DataError, CheckpointError) as error:
                self.failures[name] = RunFailedError(f"the {self.word} of {name} failed: {error}")
                raise self.failures[name] from error
        return self.runs[name]

    def corpus(self, length: int = 0) -> str:
        """Return the path prefix of a random corpus for samples of `length` tokens (0: the recipe's length)."""
        if length not in self.corpora:
            folder = self.work.absolute() / (f"corpus_{length}" if length else "corpus")
            self.corpora[length] = make_corpus(folder, self.base, self.steps, length)
        return self.corpora[length]


def callbacks_of(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return copies of a recipe's callbacks, changed so that the loss monitor reports every step."""
    named = recipe.get("callbacks") or MONITORS
    return [each | {key: 1 for key in each if key == "per_print_times"} for each in named]


def refuse_other_data(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe does not read a Megatron corpus."""
    if not View(recipe).megatron:
        raise RecipeError(
            f"{recipe.source}: train_dataset.data_loader.type: the compared runs read a Megatron corpus, which the "
            "loader of this recipe cannot read; give the pretraining recipe of the same model"
        )


def make_corpus(folder: Path, recipe: Recipe, steps: int, length: int = 0) -> str:
    """Write a corpus of random tokens, the same on every machine, and return its path prefix; it is enough for `steps`
    steps with samples of `length` tokens (0: the recipe's length).
    """
    model = convert(View(recipe), load_schema()).fields  # with MindFormers' own sizes where the recipe leaves one out
    tokens = 2 * (steps + 2) * View(recipe).batch * ((length or model["seq_length"]) + 1)
    lengths = np.random.default_rng(0).integers(*DOCUMENT, tokens // DOCUMENT[0], dtype=np.int32)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / "random"
    shutil.rmtree(prefix / "cache", ignore_errors=True)  # the order of samples of a corpus that was here before
    end = recipe["train_dataset"]["data_loader"]["config"].get("eod") or 0
    write_corpus(prefix, lengths, model["vocab_size"], end, 1)
    return str(prefix)


def train(recipe: Recipe, run_dir: Path) -> Trained:
    """Train a recipe with workers that record their state, and return the results. Raise RunFailedError if the training
    fails, and DataError if its record is not complete.
    """
    run_dir = run_dir.absolute()
    adam = adam_of(recipe.get("optimizer") or {})
    record = {**CALLBACK, "run_dir": str(run_dir), "betas": [adam.beta1, adam.beta2]}
    recipe["callbacks"] = [record, *recipe["callbacks"]]
    for stale in (run_dir / "equivalence").glob("rank_*"):
        stale.unlink()
    launch(recipe, run_dir)
    return read_run(run_dir)


def launch(recipe: Recipe, run_dir: Path) -> None:
    """Write a recipe beside `run_dir`, and train it by `tc3 train` into `run_dir`; raise RunFailedError if the training
    fails.
    """
    run_dir = run_dir.absolute()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    file = run_dir.with_name(f"{run_dir.name}.yaml")
    dump_recipe(recipe, file)
    command = [str(Path(sys.executable).with_name("tc3")), "train", str(file), "--run-dir", str(run_dir), "--force"]
    environment = {**os.environ, "REGISTER_PATH": str(ROOT / "launch" / "workers")}
    done = children.run_child(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        raise RunFailedError("\n".join((done.stderr or done.stdout).strip().splitlines()[-12:]))


def read_run(run_dir: Path) -> Trained:
    """Return what all ranks of a training recorded; raise DataError if a record is not complete."""
    folder = run_dir / "equivalence"
    if not (folder / "rank_0.json").exists():
        raise DataError(
            f"{folder}: the folder has no rank_0.json, because tc3 accuracy equivalence did not start this run or "
            "the run did not end"
        )
    workers = json.loads((folder / "rank_0.json").read_text())["world_size"]
    missing = [rank for rank in range(workers) if not (folder / f"rank_{rank}.npz").exists()]
    if missing:
        raise DataError(f"{folder}: rank {missing[0]} of {workers} ranks did not record its results; train again")
    steps = read_steps(run_dir)
    records = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(workers)]
    parts = [dict(np.load(folder / f"rank_{rank}.npz")) for rank in range(workers)]
    for rank, (record, part) in enumerate(zip(records, parts, strict=True)):
        if lacking := sorted(parts[0].keys() ^ part.keys()):
            raise DataError(f"{folder}: only one of rank 0 and rank {rank} recorded {lacking[0]}; train again")
        known = min(len(record["squares"]), len(record["samples"]))  # a loader may hold more samples
        if len(record["squares"]) != len(steps) or known < len(steps):
            raise DataError(f"{folder}: rank {rank} recorded {known} of {len(steps)} steps; train again")
    split = set(records[0]["split"])
    whole = {name: _whole(name, [part[name] for part in parts], split) for name in sorted(parts[0])}
    state = {name: value for name, (value, _) in whole.items()}
    copied = {name: differing for name, (_, differing) in whole.items() if differing}
    read = zip(*(record["samples"][: len(record["squares"])] for record in records), strict=True)  # a loader holds more
    samples = [sorted(digest for rank in step for digest in rank) for step in read]
    norms = []  # the squares of split weights are added up over the ranks
    for step in zip(*(record["squares"] for record in records), strict=True):
        squares = {name: sum(rank[name] for rank in step) if name in split else step[0][name] for name in step[0]}
        norms.append({name: float(np.sqrt(square)) for name, square in squares.items()})
    return Trained(workers, steps, samples, norms, state, copied)


def _whole(name: str, parts: list[np.ndarray], split: set[str]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the tensor of all data-parallel workers, and those whose copy is not rank 0's: experts lie one after the
    other along axis 0, loads are averaged, all else is copied.
    """
    if weight_of(name) in split:
        return np.concatenate(parts), ()
    if name.startswith(LOAD):
        return np.sum(parts, 0) / len(parts), ()
    first = parts[0]
    return first, tuple(rank for rank, part in enumerate(parts) if not np.array_equal(part, first, equal_nan=True))


def weight_of(name: str) -> str:
    """Return the weight (or router) to which a recorded tensor, such as a moment, belongs."""
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)


def read_steps(run_dir: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return the metrics of all steps of one rank; raise DataError if the rank has written no metrics."""
    metrics = run_dir / "metrics" / f"rank_{rank}.jsonl"
    if not metrics.exists():
        raise DataError(f"{metrics}: the file is missing, because the run did not finish a step")
    records = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    return [record for record in records if "step" in record]


def read_samples(run_dir: Path, workers: int, steps: int) -> list[list[str]]:
    """Return the sorted digests of the samples of each step; raise DataError if a rank did not record them."""
    given = []
    for rank in range(workers):
        found = [(record.get("samples") or {}).get(IDS) for record in read_steps(run_dir, rank)]
        if len(found) != steps or not all(found):
            metrics, known = run_dir / "metrics" / f"rank_{rank}.jsonl", sum(map(bool, found))
            raise DataError(f"{metrics}: the file has the samples of {known} steps instead of {steps}; train again")
        given.append(found)
    return [sorted({each for rank in step for each in rank}) for step in zip(*given, strict=True)]


def least(square: np.ndarray, known: np.ndarray | None) -> np.ndarray:
    """Return for each element the smallest second moment above 0 of any step so far; `known` holds the smallest second
    moments of earlier steps. AdamW divides by the root of the second moment.
    """
    known = np.zeros_like(square) if known is None else known
    return np.where((square > 0) & ((known == 0) | (square < known)), square, known)


def group_of(weight: str) -> str:
    """Return the part of the model to which a weight belongs, such as layers.1.experts, embedding or norms."""
    words = weight.split(".")
    where = f"{'mtp.' if words[0] == 'mtp' else ''}layers.{words[2]}." if words[1:2] == ["layers"] else ""
    parts = {"norm": "norms", ".experts.": "experts", "shared_experts": "shared_expert", "router": "router"}
    parts |= {"self_attention": "attention", ".mlp.": "mlp", "embedding": "embedding", "output_layer": "head"}
    return where + next((name for part, name in parts.items() if part in weight), words[-2])


def group_norms(norms: dict[str, float]) -> dict[str, float]:
    """Return for each part of the model the norm of the gradients of its weights."""
    squares: dict[str, float] = {}
    for weight, norm in norms.items():
        squares[group_of(weight)] = squares.get(group_of(weight), 0.0) + norm**2
    return {group: float(np.sqrt(square)) for group, square in squares.items()}
