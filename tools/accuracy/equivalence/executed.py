"""This module trains a recipe as a sharded graph for `tc3 accuracy equivalence`, and compares what the ranks recorded
with a training of the same graph in one process.

Both sides run the same graph from the same weights, so losses and global norms must agree more closely than those of
trained runs. Gradients are judged by Table 2, and the state after the last step by its row for the tokens of all steps,
which the moments accumulate. All are whole tensors, read from the checkpoints of all ranks.

If the load of an expert is just its share, rounding decides whether its bias moves, by a whole step of the rate, and
layouts round differently: a mean of 1/12 is not exact, and a token at a tie between two experts may choose either. Such
a turn of a bias is a known difference, and what is computed with the bias is not judged. The loads are not compared: a
wrongly counted load of one or two experts of each router would look the same.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from plugins.errors import CheckpointError, DataError
from plugins.finite_loss.plan import undefined_parts
from plugins.sealed_checkpoint.router_state import MUON_MOMENT
from plugins.step_record.plan import MOMENTS, Adam, adam_of, gradient_square
from tools.accuracy.equivalence.runs import (
    BIAS,
    FIRST,
    KEPT,
    LEAST,
    LOSSES,
    START,
    Runs,
    Trained,
    group_of,
    launch,
    least,
    read_samples,
    read_steps,
    weight_of,
)
from tools.accuracy.equivalence.sharding import Sharding, derive_sharded
from tools.accuracy.equivalence.trained import (
    BACKWARD,
    DTYPE,
    FORWARD,
    OPTIMIZER,
    At,
    Comparison,
    Finding,
    copies,
    group_rows,
    other_length,
    phases,
    rates,
    samples,
    shared,
    starts,
    state_rows,
    unclipped,
)
from tools.accuracy.judge import tolerance
from tools.checkpoint.scan import iteration, iterations
from tools.checkpoint.stored import Whole, kind_of, moved, read_placements, read_whole
from tools.experts.restore import restore_order
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.runs.readings import read_held_out
from tools.schema.stages import loss_rank

LOSS = 1e-5  # absolute
HELD_OUT = 1e-6  # relative
NORM = 5e-5  # relative
SURE = 4  # times what groups' norms are allowed: a wrong global norm that they would show
MOVES = 0.05  # of the moves of a router's biases: a token at a tie turns that of an expert at its share
TURNED = 2  # experts of a router: rarely are more at their share, and a token at a tie chooses between two
TIE = (
    "rounding may have decided how the bias of an expert at its share moved (the loads are not compared, and a wrongly "
    "counted load of one or two experts would look the same); numbers that are computed with it are not judged"
)
OF_MOVES, OF_HELD_OUT = "moves of the bias", "held-out loss"
TWO_STAGES = "MindFormers counts MTP's share of the embedding's gradient twice (docs/stock-differences.md)"
TWICE = "embedding.word_embeddings.weight"  # its gradient is counted once more by a pipeline with an MTP layer
NOTE = {"type": "OwnGradient", "auto_register": "own_gradient.OwnGradient"}
NOTES = "equivalence"  # the folder of a run where the callback writes
ROUTER, ROUTER_BIAS = ".router.weight", ".router.expert_bias"


def compare_executed(run: Trained, reference: Trained, sharding: Sharding) -> Comparison:
    """Return the differences between a sharded training and one of the same graph in one process, in the order in which
    they arise; those with a known cause are listed separately.
    """
    if other := other_length(run, reference):
        return other
    moves = list(_moves(run, reference))
    rows = [*_numbers(run, reference, sharding), *_held_out(run, reference), *_tensors(run, reference)]
    turned = () if any(row.used > 1 for row in moves) else tuple(_turns(run, reference))
    turn = turned[0].step if turned else np.inf
    after = [row for row in rows if _with_bias(row, turn)]
    rows = [*(row for row in rows if not _with_bias(row, turn)), *moves]
    others = samples(run, reference) if sharding.cp == 1 else ()  # each rank of `cp` has a part of a sample
    wrong = [*others, *starts(run, reference), *filter(_differs, rows)]
    wrong += [*rates(run, reference), *copies(run), *(() if sharding.known else unclipped(run))]
    twice = tuple(_counted_twice(run, reference)) if sharding.known else ()
    known = (*twice, *turned, *filter(_differs, after))
    reason = "; ".join([TWO_STAGES] * bool(twice) + [TIE] * bool(turned))
    return Comparison(len(rows), max(finding.used for finding in rows), tuple(wrong), known, reason)


def _differs(row: Finding) -> bool:
    return not row.error <= row.allowed


def _numbers(run: Trained, reference: Trained, sharding: Sharding) -> Iterator[Finding]:
    """Yield comparisons of each step's losses and norms; those over what is allowed are findings."""
    micro_steps = sharding.accumulate or 2  # 0: of a rank's samples each
    undefined = undefined_parts(sharding.pp, micro_steps, float(sharding.aux))
    left_out = ["global_norm", *["load_balancing_loss"] * len(undefined)]
    losses = [name for name in LOSSES if name not in left_out]
    for step, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=True), 1):
        forward, backward = phases(run, step)
        told = [name for name in losses if (mine[name], theirs[name]) != (None, None)]
        for name in told:  # a loss that has no other part is that of the language model
            yield forward.number("loss", name if told[1:] else LOSSES[0], mine[name], theirs[name], LOSS, 1.0)
        norm = _norm_with_share(run, step, theirs["global_norm"]) if sharding.known else theirs["global_norm"]
        whole = backward.number("gradients", "global norm", mine["global_norm"], norm, NORM)
        allowed = tolerance(DTYPE, theirs["tokens"])
        groups = group_rows(backward, reference, allowed)
        if step == 1:
            yield from sorted(_first_gradients(run, reference, allowed), key=lambda row: -row.used)
        yield _placed(whole, allowed, not sharding.known and all(row.used <= 1 for row in groups))
        yield from groups


def _first_gradients(run: Trained, reference: Trained, allowed: float) -> Iterator[Finding]:
    """Yield comparisons of step 1's gradients by element: the worst is nearest to the fault."""
    for name in shared(run, reference, FIRST):
        sides = run.state[FIRST + name], reference.state[FIRST + name]
        yield At(run, 1, BACKWARD).judged(name, f"gradient of {name}", *sides, allowed)


def _placed(norm: Finding, allowed: float, alike: bool) -> Finding:
    """Return the finding about a wrong global norm. If the clipped gradients of all groups are right, the finding names
    the loss's gradient, because clipping hides only a factor that all gradients share.
    """
    if alike and SURE * allowed < norm.error < np.inf:
        return replace(norm, module="loss", tensor="gradient of the loss", detail=f"global norm {norm.detail}")
    return norm


def _held_out(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Yield comparisons of the held-out losses after each step, and before the first."""
    for step in sorted(run.held_out.keys() | reference.held_out.keys()):
        got, want = run.held_out.get(step), reference.held_out.get(step)
        yield At(run, step, FORWARD).number("loss", OF_HELD_OUT, got, want, HELD_OUT)


def _tensors(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Yield comparisons of weights and moments after the last step; what only one training has is a finding."""
    last = len(reference.steps)
    for name in sorted(run.state.keys() ^ reference.state.keys()):
        side = "no checkpoint of the run holds it" if name in reference.state else "one process has none"
        yield At(run, last, OPTIMIZER).found(group_of(weight_of(name)), name, side)
    if run.state.keys() == reference.state.keys():
        yield from state_rows(run, reference, sum(step["tokens"] for step in reference.steps))


def _moves(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Yield for each router the share of all moves of its biases that go in another direction than in one process."""
    for name in shared(run, reference, BIAS):
        moves, right = (_directions(side.state[BIAS + name]) for side in (run, reference))
        others = float(np.mean(moves != right))
        detail = f"{others:.1%} of the moves of experts' biases are others"
        yield At(run, len(right), OPTIMIZER).found(group_of(name), OF_MOVES, detail, others, MOVES)


def _directions(biases: np.ndarray) -> np.ndarray:
    """Return +1 where a bias rose in a step, -1 where it fell: [steps, experts] of the biases after each step."""
    return np.sign(np.diff(biases, axis=0, prepend=np.zeros_like(biases[:1])))


def _turns(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Yield each router whose biases differ first; nothing if more than `TURNED` differ, which is no rounding."""
    other = {
        name: _directions(run.state[BIAS + name]) != _directions(reference.state[BIAS + name])
        for name in shared(run, reference, BIAS)
    }
    first = min((int(np.argmax(each.any(1))) for each in other.values() if each.any()), default=0)
    found = {name: np.flatnonzero(each[first]) for name, each in other.items() if each[first].any()}
    if any(len(experts) > TURNED for experts in found.values()):
        return
    for name, experts in found.items():
        got, want = (side.state[BIAS + name][first][experts].tolist() for side in (run, reference))
        detail = f"of experts {experts.tolist()} it is {got}, in one process {want}"
        yield At(run, first + 1, OPTIMIZER).found(group_of(name), "turn of the bias", detail, 0.0, 1.0)


def _with_bias(row: Finding, step: float) -> bool:
    """Return whether a number is computed with the biases after `step`: it is of a later step, or a held-out loss."""
    return row.step > step or (row.step == step and row.tensor == OF_HELD_OUT)


def _norm_with_share(run: Trained, step: int, norm: float | None) -> float | None:
    """Return the norm of one process with the last stage's share of the embedding, as a pipeline with MTP counts it."""
    return None if norm is None else float(np.hypot(norm, run.shares[step - 1]))


def _counted_twice(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Yield global norms that are not those of one process."""
    for step, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=True), 1):
        norm, right = mine["global_norm"], theirs["global_norm"]
        share, want = run.shares[step - 1], _norm_with_share(run, step, right)
        if norm is not None and right is not None:
            detail = f"{norm:.9g}, of one process {right:.9g}; with the share {share:.6g} of the last stage {want:.9g}"
            yield phases(run, step)[1].found("gradients", "global norm", detail, abs(norm - right) / right, NORM)


class ExecutedRuns(Runs):
    """An `ExecutedRuns` holds the sharded trainings of one recipe."""

    word = "run"

    def compare(self, name: str, sharding: Sharding) -> Comparison:
        """Compare a layout with one process; raise RunFailedError if a training fails."""
        reference = self.trained(sharding.against, sharding.alone)
        return compare_executed(self.trained(name, sharding), reference, sharding)

    def trained(self, name: str, sharding: Sharding) -> Trained:
        """Return the results of the training in a layout, which runs only once; raise RunFailedError if it fails."""

        def run() -> Trained:
            recipe = derive_sharded(self.base, sharding, self.steps, self.corpus(sharding.sample))
            return execute(recipe, self.work / name, TWICE if sharding.known and sharding.pp > 1 else "")

        return self.once(name, run)


def execute(recipe: Recipe, run_dir: Path, noted: str = "") -> Trained:
    """Train a recipe of `derive_sharded`, return what its checkpoints and metrics hold, and delete the checkpoints.
    Each rank also records the norm of its own gradient of the weight `noted`, because no checkpoint holds the gradient
    of the last stage's copy of this weight. Raise RunFailedError if the training fails, and DataError or
    CheckpointError if its record is not complete.
    """
    checkpoints = run_dir / "checkpoint"
    shutil.rmtree(checkpoints, ignore_errors=True)
    shutil.rmtree(run_dir / NOTES, ignore_errors=True)
    if noted:
        callback = {
            **NOTE,
            "weight": noted,
            "run_dir": str(run_dir.absolute()),
            "beta1": adam_of(recipe.get("optimizer") or {}).beta1,
        }
        recipe["callbacks"] = [callback, *recipe["callbacks"]]
    launch(recipe, run_dir)
    run = read_executed(run_dir, recipe)
    if noted and len(run.shares) != len(run.steps):
        wrong = f"a rank of the last stage did not record the gradient of {noted} in some steps"
        raise DataError(f"{run_dir / NOTES}: {wrong}; train again")
    shutil.rmtree(checkpoints)
    return run


def read_executed(run_dir: Path, recipe: Recipe) -> Trained:
    """Return the results of a sharded training from its metrics and from the checkpoint of every step.

    A gradient (after reduction and clipping) is computed from AdamW's first moment, m' = beta1 * m + (1 - beta1) * g,
    or from Muon's, m' = momentum * m + g.

    Raises:
        DataError: there are no metrics, or the first step changed the weights.
        CheckpointError: a step has no complete checkpoint, or several.
    """
    view = View(recipe)
    steps = read_steps(run_dir, loss_rank(view))
    if not steps or steps[0]["learning_rate"] != 0:
        metrics = run_dir / "metrics" / f"rank_{loss_rank(view)}.jsonl"
        raise DataError(
            f"{metrics}: the learning rate of the first step is not 0, so the first checkpoint does not hold the "
            "starting weights; train with a warm-up from 0"
        )
    folders = iterations(run_dir / "checkpoint")[::-1]
    if [iteration(folder) for folder in folders] != list(range(1, len(steps) + 1)):
        raise CheckpointError(
            f"{run_dir / 'checkpoint'}: the folder must hold one checkpoint for each of {len(steps)} steps, but does "
            "not; train again into a new folder"
        )
    adam = adam_of(recipe.get("optimizer") or {})
    record = _Record(adam)
    differing: dict[str, tuple[int, ...]] = {}
    for folder in folders:
        whole = _in_order(folder)
        biases = biases_of(whole)
        record.add(whole.arrays, {name: next(iter(each.values())) for name, each in biases.items()})
        wrong: dict[str, tuple[int, ...]] = {}  # ranks whose copy of a bias is not the first's
        for name, each in biases.items():
            (_, first), *others = each.items()
            if ranks := tuple(rank for rank, copy in others if copy.tobytes() != first.tobytes()):
                wrong[name] = ranks
        for name, ranks in (whole.differing | wrong).items():
            differing.setdefault(name, ranks)
    shares = _shares(run_dir, range(view.devices - view.devices // view.pp, view.devices))
    given = read_samples(run_dir, view.devices, len(steps))
    held_out = {int(step): loss for step, loss in read_held_out(run_dir).items()}  # the batch of this run never changes
    return Trained(view.devices, steps, given, record.norms, record.state(), differing, shares, held_out)


def _shares(run_dir: Path, ranks: Iterable[int]) -> list[float]:
    """Return by step the norm of the gradient of a weight's copy on the last stage, from the squares of its ranks."""
    files = [run_dir / NOTES / f"gradient_rank_{rank}.json" for rank in ranks]
    own = [json.loads(file.read_text()) if file.exists() else [] for file in files]
    return [math.hypot(*each) for each in zip(*own, strict=False)]


def _in_order(folder: Path) -> Whole:
    """Return the tensors of a checkpoint, every expert at its own number, wherever the run has moved it."""
    if not moved(read_placements(folder)):
        return read_whole(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        target = Path(place) / folder.name
        restore_order(folder, target)
        return read_whole(target)


def biases_of(whole: Whole) -> dict[str, dict[int, np.ndarray]]:
    """Return ``{router's bias: {rank: its copy}}`` for ranks that have the router's weight, because the metadata of a
    checkpoint list no biases.
    """
    one = {name: {0: value} for name, value in whole.arrays.items() if name.endswith(ROUTER_BIAS)}
    found = {name: copies for name, copies in whole.unlisted.items() if name.endswith(ROUTER_BIAS)}
    routers = {name: whole.ranks[name.removesuffix(ROUTER_BIAS) + ROUTER] for name in found}
    return one | {name: {rank: found[name][rank] for rank in ranks} for name, ranks in routers.items()}


def _updated(arrays: dict[str, np.ndarray], prefix: str) -> list[str]:
    """Return the weights with a moment of their own shape; Muon keeps unused ones of one element for the others."""
    found = (name.removeprefix(prefix) for name in arrays if name.startswith(prefix))
    return [name for name in found if name in arrays and arrays[prefix + name].shape == arrays[name].shape]


class _Record:
    """A `_Record` collects gradient norms and the mean squares by which the optimizer divided."""

    def __init__(self, adam: Adam):
        self.adam = adam
        self.norms: list[dict[str, float]] = []
        self.start: dict[str, np.ndarray] = {}
        self.last: dict[str, np.ndarray] = {}
        self.least: dict[str, np.ndarray] = {}
        self.biases: list[dict[str, np.ndarray]] = []

    def add(self, arrays: dict[str, np.ndarray], biases: dict[str, np.ndarray]) -> None:
        """Add the tensors and the routers' biases of the checkpoint of the next step to this record."""
        self.biases.append(biases)
        first, second = MOMENTS
        norms = {}
        for name in _updated(arrays, first):
            before = self.last.get(first + name, 0.0)
            norms[name] = gradient_square(arrays[first + name], before, self.adam.beta1) ** 0.5
            square = arrays[second + name] / (1 - self.adam.beta2 ** (len(self.norms) + 1))
            self.least[LEAST + name] = least(square, self.least.get(LEAST + name))
        if not self.norms:
            self.start = {FIRST + name: arrays[first + name] / (1 - self.adam.beta1) for name in norms}
        for name in _updated(arrays, MUON_MOMENT):
            gradient = arrays[MUON_MOMENT + name] - self.adam.momentum * self.last.get(MUON_MOMENT + name, 0.0)
            norms[name] = float(np.square(gradient, dtype=np.float64).sum()) ** 0.5
            if not self.norms:
                self.start[FIRST + name] = gradient
        if not self.norms:  # frozen weights, which have no gradient, must not change either
            weights = (name for name in arrays if kind_of(name) == "weights")
            self.start |= {START + name: arrays[name] for name in weights}
        self.norms.append(norms)
        self.last = arrays

    def state(self) -> dict[str, np.ndarray]:
        """Return the recorded tensors in the form of the field `state` of `Trained`."""
        states = {prefix + name for prefix in KEPT for name in _updated(self.last, prefix)}
        kept = {name: value for name, value in self.last.items() if START + name in self.start or name in states}
        biases = {BIAS + name: np.stack([step[name] for step in self.biases]) for name in self.biases[0]}
        return {**self.start, **self.least, **kept, **biases}
