"""What the operators of fused kernels compute, in NumPy; the type of the values decides how precisely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tools.accuracy.fusion.kernel import Step, UnreadableError

_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Abs": np.abs,
    "Add": np.add,
    "Ceil": np.ceil,
    "Div": np.divide,
    "Equal": np.equal,
    "Exp": np.exp,
    "Floor": np.floor,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "IsFinite": np.isfinite,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Log": np.log,
    "LogicalAnd": np.logical_and,
    "LogicalNot": np.logical_not,
    "LogicalOr": np.logical_or,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "NotEqual": np.not_equal,
    "Pow": np.power,
    "RealDiv": np.divide,
    "Reciprocal": lambda x: 1 / x,
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "Select": np.where,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Trunc": np.trunc,
}
_OTHERS = ("Assign", "BroadcastTo", "Cast", "ReduceSum", "Reshape", "Transpose")
KNOWN = frozenset((*_ELEMENTWISE, *_OTHERS))


def compute(step: Step, values: list[Any]) -> np.ndarray:
    """The result of an operator, in the type that NumPy makes of its operands'; a Cast between floats changes nothing.

    Args:
        values: arrays, and plain numbers and tuples where the graph has constants.

    Raises:
        UnreadableError: an operator that is not in `KNOWN`.
    """
    shape = step.output.shape
    if step.op in _ELEMENTWISE:
        with np.errstate(all="ignore"):
            return np.asarray(_ELEMENTWISE[step.op](*values))
    if step.op == "ReduceSum":
        axes = values[1] if len(values) > 1 else ()
        axes = tuple(np.atleast_1d(np.asarray(axes, np.int64)).tolist()) or None  # none given: all of them
        return np.asarray(values[0]).sum(axis=axes, keepdims=step.keep_dims)
    if step.op == "Transpose":
        return np.transpose(values[0], tuple(np.asarray(values[1], np.int64).tolist()))
    if step.op == "Reshape":
        return np.reshape(values[0], shape)
    if step.op == "BroadcastTo":
        return np.broadcast_to(values[0], shape)
    if step.op == "Assign":
        return np.asarray(values[1])
    if step.op == "Cast":
        return _cast(np.asarray(values[0]), step.output.dtype)
    raise UnreadableError(f"the operator {step.op}")


def _cast(value: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "Bool":
        return value != 0
    if dtype.startswith(("Int", "UInt")):
        with np.errstate(all="ignore"):
            return value.astype(dtype.lower())
    return value  # who calls decides what floats are held in
