"""Bytes of one rank's parameters, optimizer state and accumulated gradients, from the layouts that MindSpore chose.

A layout is what MindSpore's front end decided for one parameter: the slice that tensor and expert parallelism leave,
and the group over which the optimizer shards that slice again (ZeRO). Per-rank elements = slice / group. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

BYTES = {"Float64": 8, "Int64": 8, "Float32": 4, "Int32": 4, "Float16": 2, "BFloat16": 2, "Int8": 1, "UInt8": 1}
BYTES |= {"Bool": 1, "Int16": 2, "UInt16": 2, "UInt32": 4, "UInt64": 8}
WEIGHT, STATE, ACCUMULATED = "weight", "state", "accumulated"
_PREFIXES = {"accu_grads": ACCUMULATED}  # of the weight's name, in MindFormers' wrapper and optimizers
_PREFIXES |= dict.fromkeys(("adam_m", "adam_v", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "muon_m"), STATE)
_AVERAGES = "pma_weight_"  # and the way of averaging


@dataclass(frozen=True)
class Held:
    """One parameter as a rank holds it.

    Args:
        name: MindSpore's.
        kind: "weight", "state" (of the optimizer: moments) or "accumulated" (gradients over micro-batches).
        dtype: MindSpore's name, such as "Float32".
        shape: of the whole tensor.
        slice: shape that tensor, expert and context parallelism leave on a rank.
        shards: ranks over which the optimizer shards the slice.
        trainable: whether the optimizer updates it.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    slice: tuple[int, ...]
    shards: int
    trainable: bool = True

    @property
    def elements(self) -> int:
        """Numbers that the rank keeps."""
        return math.prod(self.slice) // self.shards

    @property
    def bytes(self) -> int:
        """Bytes that the rank keeps."""
        return self.elements * BYTES[self.dtype]

    def copies(self, ranks: int) -> float:
        """How often the `ranks` devices of the stage keep each number."""
        return self.elements * ranks / math.prod(self.shape)


def kinds_of(step: Any) -> dict[str, str]:
    """What each parameter of a training step is: what its optimizer holds beside the weights it trains is state."""
    state = {item.name for item in step.optimizer.get_parameters()} - {item.name for item in step.optimizer.parameters}
    return {item.name: STATE if item.name in state else kind_of(item.name) for item in step.get_parameters()}


def kind_of(name: str) -> str:
    """What a parameter of a training step is, by its name."""
    prefix = name.partition(".")[0]
    return STATE if prefix.startswith(_AVERAGES) else _PREFIXES.get(prefix, WEIGHT)


def total(held: Iterable[Held], kind: str) -> int:
    """Bytes of one kind."""
    return sum(item.bytes for item in held if item.kind == kind)
