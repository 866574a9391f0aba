"""Run the sharded graph for the equivalence matrix, and read what its ranks left: metrics and whole checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plugins.errors import CheckpointError, DataError
from tools.accuracy.equivalence.compare import Comparison
from tools.accuracy.equivalence.executed_gates import TWICE, compare_executed
from tools.accuracy.equivalence.runs import (
    BETAS,
    BIAS,
    FIRST,
    LEAST,
    MOMENTS,
    START,
    RunFailedError,
    Trained,
    launch,
    make_corpus,
    read_steps,
)
from tools.accuracy.equivalence.sharding import Sharding, derive_sharded
from tools.checkpoint.scan import iteration, iterations
from tools.checkpoint.whole import Whole, read_whole
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.stages import loss_rank

NOTE = {"type": "OwnGradient", "auto_register": "own_gradient.OwnGradient"}
NOTES = "equivalence"  # the folder of a run where the callback writes
ROUTER, ROUTER_BIAS = ".router.weight", ".router.expert_bias"


@dataclass
class ExecutedRuns:
    """Executes shardings of one recipe, each once: runs in one process when they are first needed.

    Args:
        base: of `one_worker`. work: folder for the runs. started: told the name of each run before it starts.
    """

    base: Recipe
    steps: int
    work: Path
    started: Callable[[str], None]
    corpora: dict[int, str] = field(default_factory=dict)  # by the length of a sample, where it is not the recipe's
    runs: dict[str, Trained] = field(default_factory=dict)
    failures: dict[str, RunFailedError] = field(default_factory=dict)

    def compare(self, name: str, sharding: Sharding) -> Comparison:
        """A sharding against one process of the same graph.

        Raises:
            RunFailedError: one of the two failed, now or when it was first needed, or left no whole record.
        """
        reference = self._run(sharding.against, sharding.alone)
        return compare_executed(self._run(name, sharding), reference, sharding)

    def _run(self, name: str, sharding: Sharding) -> Trained:
        if name in self.failures:
            raise self.failures[name]
        if name not in self.runs:
            self.started(name)
            try:
                recipe = derive_sharded(self.base, sharding, self.steps, self._corpus(sharding.sample))
                noted = TWICE if sharding.known and sharding.pp > 1 else ""
                self.runs[name] = execute(recipe, self.work / name, noted)
            except (RunFailedError, DataError, CheckpointError) as error:
                self.failures[name] = RunFailedError(f"the run of {name} failed: {error}")
                raise self.failures[name] from error
        return self.runs[name]

    def _corpus(self, length: int) -> str:
        """The corpus of random tokens for samples of `length` tokens, 0 for the recipe's."""
        if length not in self.corpora:
            folder = self.work.absolute() / (f"corpus_{length}" if length else "corpus")
            self.corpora[length] = make_corpus(folder, self.base, self.steps, length)
        return self.corpora[length]


def execute(recipe: Recipe, run_dir: Path, noted: str = "") -> Trained:
    """Train a recipe of `derive_sharded`, and read its checkpoints, which are then deleted.

    Args:
        noted: a weight of whose gradient the last rank shall note the norm, because no checkpoint has its copy.

    Raises:
        RunFailedError: the training failed. DataError, CheckpointError: it left no whole record.
    """
    checkpoints = run_dir / "checkpoint"
    shutil.rmtree(checkpoints, ignore_errors=True)
    shutil.rmtree(run_dir / NOTES, ignore_errors=True)
    if noted:
        callback = {**NOTE, "weight": noted, "run_dir": str(run_dir.absolute()), "beta1": _betas(recipe)[0]}
        recipe["callbacks"] = [callback, *recipe["callbacks"]]
    launch(recipe, run_dir)
    run = read_executed(run_dir, recipe)
    if noted and len(run.shares) != len(run.steps):
        raise DataError(f"{run_dir / NOTES}: the last rank's own gradient of {noted} is not noted for each step")
    shutil.rmtree(checkpoints)
    return run


def read_executed(run_dir: Path, recipe: Recipe) -> Trained:
    """What a run did, from its metrics and from the checkpoint of every step.

    A gradient is read off AdamW's first moment, m' = beta1 * m + (1 - beta1) * g: after reduction and clipping.

    Raises:
        DataError: no metrics, or the first step moved the weights. CheckpointError: not one whole checkpoint a step.
    """
    view = View(recipe)
    metrics = run_dir / "metrics" / f"rank_{loss_rank(view)}.jsonl"
    if not metrics.exists():
        raise DataError(f"{metrics}: missing; the run has noted no step")
    steps = read_steps(metrics)
    if not steps or steps[0]["learning_rate"] != 0:
        raise DataError(f"{metrics}: the first step's learning rate is not 0, so that no checkpoint holds the start")
    folders = iterations(run_dir / "checkpoint")[::-1]
    if [iteration(folder) for folder in folders] != list(range(1, len(steps) + 1)):
        raise CheckpointError(f"{run_dir / 'checkpoint'}: not one checkpoint for each of {len(steps)} steps")
    record = _Record(*_betas(recipe))
    differing: dict[str, tuple[int, ...]] = {}
    for folder in folders:
        whole = read_whole(folder)
        biases = biases_of(whole)
        record.add(whole.arrays, {name: next(iter(copies.values())) for name, copies in biases.items()})
        wrong = {name: ranks for name, copies in biases.items() if (ranks := _others(copies))}
        for name, ranks in {**whole.differing, **wrong}.items():
            differing.setdefault(name, ranks)
    shares = _shares(run_dir, view.devices)
    return Trained(view.devices, steps, [], record.norms, record.state(), differing, shares)


def _betas(recipe: Recipe) -> list[float]:
    return (recipe.get("optimizer") or {}).get("betas") or BETAS


def _shares(run_dir: Path, workers: int) -> list[float]:
    """What the last rank noted of its own gradient; nothing where it was not asked."""
    noted = run_dir / NOTES / f"gradient_rank_{workers - 1}.json"
    return json.loads(noted.read_text()) if noted.exists() else []


def biases_of(whole: Whole) -> dict[str, dict[int, np.ndarray]]:
    """Router's bias -> rank -> its copy, on the ranks that have the router: metadata do not say where biases lie."""
    one = {name: {0: value} for name, value in whole.arrays.items() if name.endswith(ROUTER_BIAS)}
    found = {name: copies for name, copies in whole.unlisted.items() if name.endswith(ROUTER_BIAS)}
    routers = {name: whole.ranks[name.removesuffix(ROUTER_BIAS) + ROUTER] for name in found}
    return one | {name: {rank: found[name][rank] for rank in ranks} for name, ranks in routers.items()}


def _others(copies: dict[int, np.ndarray]) -> tuple[int, ...]:
    """Ranks whose copy is not the first's."""
    (_, first), *others = copies.items()
    return tuple(rank for rank, copy in others if copy.tobytes() != first.tobytes())


class _Record:
    """Norms, and what the optimizer divided by, step by step.

    Args:
        beta1, beta2: of AdamW.
    """

    def __init__(self, beta1: float, beta2: float):
        self.beta1, self.beta2 = beta1, beta2
        self.norms: list[dict[str, float]] = []
        self.start: dict[str, np.ndarray] = {}
        self.last: dict[str, np.ndarray] = {}
        self.least: dict[str, np.ndarray] = {}
        self.biases: list[dict[str, np.ndarray]] = []

    def add(self, arrays: dict[str, np.ndarray], biases: dict[str, np.ndarray]) -> None:
        """The next step's checkpoint, and the routers' biases in it."""
        self.biases.append(biases)
        first, second = MOMENTS
        norms = {}
        for name in (name.removeprefix(first) for name in arrays if name.startswith(first)):
            before = self.last.get(first + name, 0.0)
            gradient = (arrays[first + name] - self.beta1 * before) / (1 - self.beta1)
            norms[name] = float(np.sqrt(np.square(gradient, dtype=np.float64).sum()))
            square = arrays[second + name] / (1 - self.beta2 ** (len(self.norms) + 1))
            known = self.least.get(LEAST + name, np.zeros_like(square))
            self.least[LEAST + name] = np.where((square > 0) & ((known == 0) | (square < known)), square, known)
        if not self.norms:
            self.start = {START + name: arrays[name] for name in norms}
            self.start |= {FIRST + name: arrays[first + name] / (1 - self.beta1) for name in norms}
        self.norms.append(norms)
        self.last = arrays

    def state(self) -> dict[str, np.ndarray]:
        """As `Trained` has it."""
        names = self.norms[0]
        kept = {name: value for name, value in self.last.items() if name in names or name.startswith(MOMENTS)}
        biases = {BIAS + name: np.stack([step[name] for step in self.biases]) for name in self.biases[0]}
        return {**self.start, **self.least, **kept, **biases}
