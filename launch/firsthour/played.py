"""This module simulates the trainings of a cluster: NumPy trains a small model on simulated devices, some of which
compute wrong results. The simulated runs are `tools.accuracy.equivalence.runs.Trained` objects, as real trainings are,
so the same rules judge them.

The model predicts the next token from the current one: logits = E[token] @ W^T, with the embedding E and the head W.
AdamW trains it in float32, with gradients clipped by their global norm, and each rank takes its share of a step's
tokens. Three defects can be planted:

- wrong rounding: a device adds up its matrix products in float16 (the check `operators` also detects this defect);
- doubled gradient: the gradients of a device are counted twice when the ranks' gradients are summed;
- lost moments: a resumed run loads a checkpoint without AdamW's moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plugins.step_record.plan import MOMENTS
from tools.accuracy.equivalence.runs import LEAST, START, Trained, least

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VOCABULARY, WIDTH, TOKENS = 64, 32, 1024  # of the model, and tokens of a step of all ranks
RATE, BETAS, EPSILON, CLIP = 0.01, (0.9, 0.95), 1e-8, 0.05
Weights = dict[str, np.ndarray]
Product = Callable[[np.ndarray, np.ndarray], np.ndarray]  # [m, k], [n, k] -> [m, n]


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the product [m, k] x [n, k] -> [m, n] as a healthy device computes it, in float32."""
    return np.asarray(a @ b.T, np.float32)


def added_in_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the product [m, k] x [n, k] -> [m, n] whose partial sums are rounded to float16 after every term."""
    total = np.zeros((len(a), len(b)), np.float16)
    for term in range(a.shape[1]):
        product = np.outer(a[:, term], b[:, term]).astype(np.float32)
        total = (total.astype(np.float32) + product).astype(np.float16)
    return total


@dataclass(frozen=True)
class Rank:
    """A `Rank` is the simulated device of one rank: its matrix product, and the number of times that its gradients are
    counted.
    """

    product: Product = exact
    counted: float = 1.0


@dataclass
class State:
    """A `State` holds the content of a checkpoint: the number of trained steps, the weights, and the moments."""

    step: int
    weights: Weights
    moments: dict[str, Weights]
    smallest: Weights = field(default_factory=dict)  # smallest mean squares, which only the comparison needs

    def saved(self, whole: bool = True) -> State:
        """Return the copy of the state that a run has after it has loaded a checkpoint. If `whole` is False, the
        optimizer's moments in the copy are zeros.
        """
        moments = {
            name: {weight: array.copy() if whole else np.zeros_like(array) for weight, array in arrays.items()}
            for name, arrays in self.moments.items()
        }
        return State(self.step, {name: array.copy() for name, array in self.weights.items()}, moments)


def start(seed: int = 0) -> State:
    """Return the small model's state before the first training step: random weights, and moments of zero."""
    random = np.random.default_rng(seed)
    weights = {name: random.normal(0, 0.3, (VOCABULARY, WIDTH)).astype(np.float32) for name in (EMBEDDING, HEAD)}
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    moments = {moment: {name: array.copy() for name, array in zeros.items()} for moment in MOMENTS}
    return State(0, weights, moments)


def tokens_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the next tokens of a step, each int64 [TOKENS]: a seeded random walk, which a model can
    learn.
    """
    random = np.random.default_rng([11, step])
    walk = np.cumsum(random.choice([1, 2, 3, 17], TOKENS + 1)) % VOCABULARY
    return walk[:-1], walk[1:]


def train(ranks: Sequence[Rank], steps: int, state: State | None = None) -> tuple[Trained, State]:
    """Train the small model up to step `steps`; return the recorded run and the state at its end.

    Args:
        ranks: the devices; each takes an equal share of the tokens of a step, so their number divides TOKENS.
        state: the state from which the run goes on; by default a new state.
    """
    state = start() if state is None else state
    begin = {name: array.copy() for name, array in state.weights.items()}
    run = Trained(len(ranks), [], [], [], {}, {})
    while state.step < steps:
        tokens, targets = tokens_of(state.step)
        shares = [
            _gradients(rank, state.weights, own, wanted)
            for rank, own, wanted in zip(
                ranks, np.split(tokens, len(ranks)), np.split(targets, len(ranks)), strict=True
            )
        ]
        loss = sum(share[0] for share in shares) / TOKENS
        gradients = {
            name: np.sum([share[1][name] for share in shares], axis=0, dtype=np.float32) / np.float32(TOKENS)
            for name in state.weights
        }
        norm = float(np.sqrt(sum(np.square(one, dtype=np.float64).sum() for one in gradients.values())))
        scale = np.float32(min(1.0, CLIP / norm))
        gradients = {name: one * scale for name, one in gradients.items()}
        _update(state, gradients)
        run.steps.append(
            {"loss": loss, "lm_loss": loss, "mtp_loss": None, "load_balancing_loss": None, "global_norm": norm,
             "tokens": TOKENS, "learning_rate": RATE}
        )  # fmt: skip
        run.samples.append([str(state.step)])
        run.norms.append({name: float(np.linalg.norm(one)) for name, one in gradients.items()})
    for name, array in state.weights.items():
        run.state.update({name: array, START + name: begin[name], LEAST + name: state.smallest[name]})
        run.state.update({moment + name: state.moments[moment][name] for moment in MOMENTS})
    return run, state


def _gradients(rank: Rank, weights: Weights, tokens: np.ndarray, targets: np.ndarray) -> tuple[float, Weights]:
    """Return (loss, gradients) of a rank's tokens, both summed over the tokens."""
    hidden = weights[EMBEDDING][tokens]
    logits = rank.product(hidden, weights[HEAD]).astype(np.float32)
    shifted = logits - logits.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    places = np.arange(len(tokens))
    error = np.exp(logs)
    error[places, targets] -= 1
    embedding = np.zeros_like(weights[EMBEDDING])
    np.add.at(embedding, tokens, rank.product(error, np.ascontiguousarray(weights[HEAD].T)).astype(np.float32))
    head = rank.product(np.ascontiguousarray(error.T), np.ascontiguousarray(hidden.T)).astype(np.float32)
    counted = np.float32(rank.counted)
    return float(-logs[places, targets].sum(dtype=np.float64)), {EMBEDDING: counted * embedding, HEAD: counted * head}


def _update(state: State, gradients: Weights) -> None:
    """Make one step of AdamW without weight decay, in place."""
    state.step += 1
    first, second = (state.moments[moment] for moment in MOMENTS)
    for name, gradient in gradients.items():
        first[name] = np.float32(BETAS[0]) * first[name] + np.float32(1 - BETAS[0]) * gradient
        second[name] = np.float32(BETAS[1]) * second[name] + np.float32(1 - BETAS[1]) * gradient**2
        square = second[name] / np.float32(1 - BETAS[1] ** state.step)
        state.smallest[name] = least(square, state.smallest.get(name))
        mean = first[name] / np.float32(1 - BETAS[0] ** state.step)
        state.weights[name] = state.weights[name] - np.float32(RATE) * mean / (np.sqrt(square) + np.float32(EPSILON))


def resumed(rank: Rank, steps: int, save: int, whole: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return the losses by step of two runs: one without a kill, and one with a kill and a resume from step `save`. If
    `whole` is False, the resumed run starts with optimizer moments of zero.
    """
    one, _ = train([rank], steps)
    before, state = train([rank], save)
    after, _ = train([rank], steps, state.saved(whole))
    return _losses(one.steps), _losses([*before.steps, *after.steps])


def _losses(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {str(number): float(step["loss"]) for number, step in enumerate(steps, 1)}
