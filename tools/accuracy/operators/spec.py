"""What a test of one operator consists of. Specs are data: small functions over NumPy arrays and one MindSpore call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.accuracy.operators.accumulation import Counter

Array = np.ndarray


@dataclass(frozen=True)
class Spec:
    """One operator.

    Args:
        name: what the user types; a `.suffix` names another kernel or formula for the same golden baseline.
        source: who uses it in TeleChat3-MoE training, or which kernel it is.
        shapes: test cases; each is the tuple of sizes that `make` takes.
        make: (rng, *sizes) -> input arrays: float32 (rounded to the tested type later), integers or booleans.
        golden: inputs -> output or tuple of outputs, in the float type of its inputs.
        call: the module `mindspore` -> function of tensors that returns a tensor or a tuple.
        counts: inputs -> accumulation counts.
        grad: (*inputs, *gradients of the float outputs) -> gradients of inputs `wrt`; None: not differentiable.
        wrt: which inputs have gradients.
        fixed: which float inputs stay float32 whatever type is tested.
        roundings: kernels in a row that store in the tested type; an upper bound.
        clip: whether inputs are clipped from below; not where zero means something.
        special: "each" to try all special values (elementwise), "row" to put one in each row of the first input.
        dtypes: tested types other than the three usual ones, or fewer.
    """

    name: str
    source: str
    shapes: tuple[tuple[int, ...], ...]
    make: Callable[..., tuple[Array, ...]]
    golden: Callable[..., Any]
    call: Callable[[Any], Callable[..., Any]]
    counts: Counter
    grad: Callable[..., tuple[Array, ...]] | None = None
    wrt: tuple[int, ...] = (0,)
    fixed: tuple[int, ...] = ()
    roundings: int = 1
    clip: bool = True
    special: str = ""
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A single output as a tuple of one."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def kernel(name: str, *arguments: Any, **settings: Any) -> Callable[[Any], Callable[..., Any]]:
    """The `call` of one MindSpore primitive: `auto_generate`'s, or the older one of `mindspore.ops`."""

    def call(ms: Any) -> Callable[..., Any]:
        primitive = getattr(ms.ops.auto_generate, name, None) or getattr(ms.ops, name)
        return primitive(*arguments, **settings)

    return call
