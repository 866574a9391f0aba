"""Run the sharded graph for the equivalence matrix, read what its ranks left, and hold it to one process of it.

Losses are held to 1e-5 absolute and global norms to 5e-5 relative, tighter than those of trained runs: both sides are
the same graph from the same weights. Gradients go by Table 2, as there; the state after the last step by its row for
the tokens of all steps, which moments accumulate. Gradients, weights and moments are read from the checkpoints of all
ranks as whole tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from plugins.errors import CheckpointError, DataError
from plugins.finite_loss.plan import undefined_parts
from tools.accuracy.equivalence.runs import (
    BETAS,
    BIAS,
    FIRST,
    LEAST,
    LOSSES,
    MOMENTS,
    START,
    RunFailedError,
    Trained,
    group_norms,
    group_of,
    launch,
    make_corpus,
    read_steps,
    weight_of,
)
from tools.accuracy.equivalence.sharding import Sharding, derive_sharded
from tools.accuracy.equivalence.trained import (
    BACKWARD,
    DTYPE,
    FORWARD,
    OPTIMIZER,
    Comparison,
    Finding,
    finding_of,
    state_rows,
    unclipped,
)
from tools.accuracy.judge import judge, tolerance
from tools.checkpoint.scan import iteration, iterations
from tools.checkpoint.stored import Whole, read_whole
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.stages import loss_rank

LOSS = 1e-5  # absolute
NORM = 5e-5  # relative
SURE = 4  # times what groups' norms are allowed: a wrong global norm that they would show
MOVES = 0.05  # of the moves of a router's biases: a token at a tie turns that of an expert at its share
TWICE = "embedding.word_embeddings.weight"  # its gradient is counted once more by a pipeline with an MTP layer
NOTE = {"type": "OwnGradient", "auto_register": "own_gradient.OwnGradient"}
NOTES = "equivalence"  # the folder of a run where the callback writes
ROUTER, ROUTER_BIAS = ".router.weight", ".router.expert_bias"


def compare_executed(run: Trained, reference: Trained, sharding: Sharding) -> Comparison:
    """Return the findings in the order in which a difference arises; known stock differences apart."""
    if len(run.steps) != len(reference.steps):
        detail = f"{len(run.steps)} steps, should be {len(reference.steps)}"
        return Comparison(1, np.inf, (finding_of(run, 1, FORWARD, "data", "steps", np.inf, 0.0, detail),))
    rows = [*_numbers(run, reference, sharding), *_tensors(run, reference)]
    wrong = list(_starts(run, reference))
    wrong += [finding for finding, _ in rows if not finding.error <= finding.allowed]
    wrong += list(_copies(run))
    wrong += [] if sharding.known else list(unclipped(run))
    known = list(_counted_twice(run, reference)) if sharding.known else []
    return Comparison(len(rows), max(share for _, share in rows), tuple(wrong), tuple(known))


def _starts(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Weights that do not start as those of one process; they are drawn whole, and then cut."""
    for name in (name for name in reference.state.keys() & run.state.keys() if name.startswith(START)):
        if not np.array_equal(run.state[name], reference.state[name]):
            weight = name.removeprefix(START)
            yield finding_of(run, 1, FORWARD, group_of(weight), f"start of {weight}", np.inf, 0.0, "other weights")


def _numbers(run: Trained, reference: Trained, sharding: Sharding) -> Iterator[tuple[Finding, float]]:
    """Losses and norms of each step: (what would be a finding if it is over what is allowed, share of that)."""
    micro_steps = sharding.accumulate or 2  # 0: of a rank's samples each
    undefined = undefined_parts(sharding.pp, micro_steps, float(sharding.aux))
    left_out = ["global_norm", *["load_balancing_loss"] * len(undefined)]
    losses = [name for name in LOSSES if name not in left_out]
    for step, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=True), 1):
        phase = FORWARD if step == 1 else OPTIMIZER
        told = [name for name in losses if (mine[name], theirs[name]) != (None, None)]
        for name in told:  # a loss that has no other part is that of the language model
            yield _row(run, step, phase, "loss", name if told[1:] else LOSSES[0], mine[name], theirs[name], LOSS, 1.0)
        phase = BACKWARD if step == 1 else OPTIMIZER
        norm = _norm_with_share(run, step, theirs["global_norm"]) if sharding.known else theirs["global_norm"]
        whole = _row(run, step, phase, "gradients", "global norm", mine["global_norm"], norm, NORM, norm)
        found, allowed = group_norms(run.norms[step - 1]), tolerance(DTYPE, theirs["tokens"])
        groups = [
            _row(run, step, phase, group, "gradient norm", found.get(group), want, allowed, want)
            for group, want in group_norms(reference.norms[step - 1]).items()
        ]
        clipped = not sharding.known
        if step == 1:
            yield from sorted(_first_gradients(run, reference, allowed), key=lambda row: -row[1])
        yield _placed(*whole, allowed, clipped and all(share <= 1 for _, share in groups))
        yield from groups


def _first_gradients(run: Trained, reference: Trained, allowed: float) -> Iterator[tuple[Finding, float]]:
    """Every weight's gradient of step 1, element by element: the one that errs most is nearest to the fault."""
    for name in (name for name in reference.state.keys() & run.state.keys() if name.startswith(FIRST)):
        verdict, weight = judge(run.state[name], reference.state[name], allowed, DTYPE), name.removeprefix(FIRST)
        numbers = (verdict.error, allowed, verdict.detail)
        yield finding_of(run, 1, BACKWARD, group_of(weight), f"gradient of {weight}", *numbers), verdict.error / allowed


def _placed(norm: Finding, share: float, allowed: float, alike: bool) -> tuple[Finding, float]:
    """A wrong global norm is the loss's where clipping leaves each group's gradient as it should be.

    Both sides are clipped to one norm: only a factor that all gradients share is lost in that. `allowed`: of groups.
    """
    if alike and SURE * allowed < norm.error < np.inf:
        norm = replace(norm, module="loss", tensor="gradient of the loss", detail=f"global norm {norm.detail}")
    return norm, share


def _row(
    run: Trained,
    step: int,
    phase: str,
    module: str,
    tensor: str,
    got: float | None,
    want: float | None,
    allowed: float,
    size: float | None,
) -> tuple[Finding, float]:
    """A number whose error is told relative to `size`; one that is missing, or not finite, is wrong."""
    number, right, scale = (np.nan if value is None else value for value in (got, want, size))
    finite = np.isfinite(number) and np.isfinite(right)
    error = abs(number - right) / max(abs(scale), 1e-30) if finite else np.inf
    detail = f"{number:.9g}, should be {right:.9g}"
    return finding_of(run, step, phase, module, tensor, error, allowed, detail), error / allowed


def _tensors(run: Trained, reference: Trained) -> Iterator[tuple[Finding, float]]:
    """Weights and moments after the last step; one that only one side has is wrong."""
    last = len(reference.steps)
    for name in sorted(run.state.keys() ^ reference.state.keys()):
        side = "no checkpoint of the run holds it" if name in reference.state else "one process has none"
        yield finding_of(run, last, OPTIMIZER, group_of(weight_of(name)), name, np.inf, 0.0, side), np.inf
    if run.state.keys() == reference.state.keys():
        yield from state_rows(run, reference, sum(step["tokens"] for step in reference.steps))
    for name in (name for name in reference.state.keys() & run.state.keys() if name.startswith(BIAS)):
        yield _bias_row(run, name, run.state[name], reference.state[name])


def _bias_row(run: Trained, name: str, got: np.ndarray, want: np.ndarray) -> tuple[Finding, float]:
    """A router's biases after each step [steps, experts]; how many moves may be others stands at MOVES."""
    moves, right = (np.sign(np.diff(side, axis=0, prepend=np.zeros_like(side[:1]))) for side in (got, want))
    others = float(np.mean(moves != right))
    detail = f"{others:.1%} of the moves of experts' biases are others"
    group = group_of(name.removeprefix(BIAS))
    return finding_of(run, len(want), OPTIMIZER, group, "moves of the bias", others, MOVES, detail), others / MOVES


def _copies(run: Trained) -> Iterator[Finding]:
    for name, ranks in run.differing.items():
        where = group_of(weight_of(name))
        yield finding_of(run, len(run.steps), OPTIMIZER, where, name, np.inf, 0.0, "copies differ", ranks)


def _norm_with_share(run: Trained, step: int, norm: float | None) -> float | None:
    """What a pipeline with an MTP layer takes for the global norm, from that of one process.

    The last stage's share of the embedding's gradient is in the first stage's, and counts once more
    (docs/stock-differences.md).
    """
    return None if norm is None else float(np.hypot(norm, run.shares[step - 1]))


def _counted_twice(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Global norms that are not those of one process."""
    for step, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=True), 1):
        norm, right = mine["global_norm"], theirs["global_norm"]
        share, want = run.shares[step - 1], _norm_with_share(run, step, right)
        if norm is not None and right is not None:
            detail = f"{norm:.9g}, of one process {right:.9g}; with the share {share:.6g} of the last stage {want:.9g}"
            phase, error = BACKWARD if step == 1 else OPTIMIZER, abs(norm - right) / right
            yield finding_of(run, step, phase, "gradients", "global norm", error, NORM, detail)


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
        """Return a sharding against one process of the same graph.

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
    """Return what a run did, from its metrics and from the checkpoint of every step.

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
