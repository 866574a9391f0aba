"""All tensors of a checkpoint at once, every element once, and copies compared: for small models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.checkpoint.stored import open_stored


@dataclass(frozen=True)
class Whole:
    """A checkpoint as if one process had written it.

    Args:
        arrays: name -> the whole tensor.
        differing: name -> ranks whose copy of a slice is not, bit by bit, that of the first rank that holds it.
        ranks: name -> those that hold a part of it.
        unlisted: name -> rank -> what the rank wrote without saying how it lies: counters, the biases of routers.
    """

    arrays: dict[str, np.ndarray]
    differing: dict[str, tuple[int, ...]]
    ranks: dict[str, tuple[int, ...]]
    unlisted: dict[str, dict[int, np.ndarray]]


def read_whole(folder: Path) -> Whole:
    """All tensors of one iteration, in whole.

    Args:
        folder: MindFormers' `iteration_*`.

    Raises:
        CheckpointError: a file, a slice or a tensor is missing, or has another shape than the metadata say.
    """
    stored = open_stored(folder)
    read = {name: stored.read(name) for name in stored.tensors}
    return Whole(
        arrays={name: array for name, (array, _) in read.items()},
        differing={name: ranks for name, (_, ranks) in read.items() if ranks},
        ranks={name: tensor.ranks for name, tensor in stored.tensors.items()},
        unlisted={
            name: {rank: stored.read_from(file, name) for rank, file in files.items()}
            for name, files in stored.unlisted.items()
        },
    )
