"""What the estimator's step times rest on, term by term: each may be off by a factor that all layouts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import KnownError
from tools.estimate.time_model import TimeModel

UNKNOWN_ERROR = 0.10  # mean error of step times where no published run tells (assumed)
_DEVIATION = (np.pi / 2) ** 0.5  # of a normal error, for its mean size


@dataclass(frozen=True)
class Term:
    """One term.

    Args:
        name: in a few words.
        keys: of `Efficiency`, or a link of the hardware, all off by the same factor.
        deviation: of the factor's logarithm, beside the other terms' (assumed: small for what published Ascend runs
            fit, large for what is a guess there); `scaled` brings the sum to the estimator's known error.
        experiment: what would measure it.
        nodes: on how many nodes; 0 is one device.
    """

    name: str
    keys: tuple[str, ...]
    deviation: float
    experiment: str
    nodes: int


TERMS = (
    Term("matmul", ("matmul", "matmul_fp8"), 0.1, "time a layer's large matmuls", 0),
    Term("narrow matmul", ("half_size",), 0.2, "time a layer's matmuls at each layout's tensor-parallel width", 0),
    Term("attention", ("attention",), 0.15, "time fused attention at the recipe's sequence length", 0),
    Term("HBM", ("memory",), 0.2, "time a layer's norms, residuals and activations", 0),
    Term("routing", ("moe_s",), 0.5, "time a MoE layer's routing and sorting beside its matmuls", 0),
    Term("launch", ("layer_s",), 0.5, "time a layer's gaps between kernels in a profile", 0),
    Term("links of a node", ("intra_node",), 0.15, "time the tensor- and expert-parallel collectives inside a node", 1),
    Term("links of nodes", ("inter_node",), 0.25, "time the experts' AlltoAll between nodes", 2),
    Term("overlap", ("hidden", "hidden_ep"), 0.25, "one step of a few layers with and without its overlaps", 1),
)


def perturbed(model: TimeModel, term: Term, factor: float) -> TimeModel:
    """The model with a term's efficiencies, bandwidths or seconds times `factor`."""
    reached, hardware = model.reached, model.hardware
    for key in term.keys:
        if hasattr(reached, key):
            value = getattr(reached, key) * factor
            reached = replace(reached, **{key: min(1.0, value) if term.name == "overlap" else value})
        else:
            hardware = hardware.with_faster(key, factor)
    return TimeModel(hardware, reached)


def slopes(model: TimeModel, configs: Sequence[Configuration], terms: Sequence[Term] = TERMS) -> np.ndarray:
    """[configs, terms] change of ln(step seconds) for a deviation of each term; closed form of the pipeline."""
    found = np.zeros((len(configs), len(terms)))
    for column, term in enumerate(terms):
        up, down = (perturbed(model, term, float(np.exp(sign * term.deviation))) for sign in (1, -1))
        for row, config in enumerate(configs):
            found[row, column] = np.log(up.step(config).total / down.step(config).total) / 2
    return found


def scaled(slope: np.ndarray, known: KnownError | None) -> np.ndarray:
    """`slopes` with all deviations times one factor, so that step times vary as the known error says."""
    wanted = _DEVIATION * (known.mean if known else UNKNOWN_ERROR)
    varies = float(np.sqrt((slope**2).sum(axis=1).mean()))
    return slope * (wanted / varies) if varies else slope
