"""What sets two sets of weights apart, tensor by tensor, whatever the layouts that they were saved in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.checkpoint.slot_order import PLACEMENT
from tools.weights.source import Source


@dataclass(frozen=True)
class Change:
    """A tensor of which the numbers differ.

    Args:
        relative: L2 of the difference over L2 of A's; inf where A's is zero. largest: of the absolute differences.
            Both are nan where a number is not finite on one side.
    """

    name: str
    relative: float
    largest: float


@dataclass(frozen=True)
class Comparison:
    """Args:
    only: names that one side alone has, (of A, of B). other: (name, A's type and shape, B's).
    same: names whose bits are equal. changes: the others, the largest relative difference first.
    """

    only: tuple[tuple[str, ...], tuple[str, ...]]
    other: tuple[tuple[str, str, str], ...]
    same: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors, bit by bit."""
        return not (any(self.only) or self.other or self.changes)


def compare(a: Source, b: Source, progress: Callable[[str], None] = lambda name: None) -> Comparison:
    """Read both, a tensor at a time; experts that have moved are compared with themselves.

    Args:
        progress: is told the name of each tensor that is read.
    """
    left, right = _names(a), _names(b)
    other: list[tuple[str, str, str]] = []
    same, changes = [], []
    for name in (name for name in left if name in right):
        if (kind := _kind(a, name)) != _kind(b, name):
            other.append((name, kind, _kind(b, name)))
            continue
        progress(name)
        first, second = a.read(name)[0], b.read(name)[0]
        if first.tobytes() == second.tobytes():
            same.append(name)
        else:
            changes.append(_change(name, first, second))
    changes.sort(key=lambda change: -change.relative if change.relative == change.relative else -math.inf)
    only = (tuple(name for name in left if name not in right), tuple(name for name in right if name not in left))
    return Comparison(only, tuple(other), tuple(same), tuple(changes))


def _names(source: Source) -> list[str]:
    """All tensors but the placements of experts, which say how the others lie."""
    return [name for name in source.headers if name.rsplit(".", 1)[-1] != PLACEMENT]


def _kind(source: Source, name: str) -> str:
    header = source.headers[name]
    return f"{header.dtype} {list(header.shape)}"


def _change(name: str, a: np.ndarray, b: np.ndarray) -> Change:
    wide = a.astype(np.float64)
    difference = b.astype(np.float64) - wide
    norm = float(np.linalg.norm(wide))
    relative = float(np.linalg.norm(difference)) / norm if norm else math.inf
    return Change(name, relative, float(np.abs(difference).max()))
