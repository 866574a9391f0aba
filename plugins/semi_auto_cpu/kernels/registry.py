"""This module holds the tables of this package's CPU kernels, by MindSpore's operator names, and the decorator that
adds a kernel.

A kernel is called as ``function(attrs, *inputs)``. `attrs` are the operator's attributes as text; `inputs` are in the
operator's own order: each is an array that shares MindSpore's memory, a list of arrays, or a constant of Python (None
if an optional input is missing). A kernel returns an array, or a tuple in the order of the operator's outputs, with
None for an output that is not used. The caller converts these arrays to the outputs' types and shapes, and stores them.

Order and meaning of the inputs are those of the class of the same name in `mindspore/ops/auto_generate/gen_ops_prim.py`
(2.9.0), unless a kernel's docstring cites another source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Attrs = dict[str, str]
Kernel = Callable[..., Any]

KERNELS: dict[str, Kernel] = {}  # MindSpore has no CPU kernel of these
# MindSpore has one that refuses bfloat16, or a mixture with it (some refuse float16 as well): for nodes that hold such
# tensors
LOW_PRECISION: dict[str, Kernel] = {}

_LOW = frozenset(("bfloat16", "float16"))


def kernel(
    table: dict[str, Kernel] | None = None, *, widen: bool = True, updates: int | None = None
) -> Callable[[Kernel], Kernel]:
    """Return a decorator that adds a kernel (a function) to a table of kernels, under the function's name.

    Args:
        table: `KERNELS` by default.
        widen: whether the function gets bfloat16 and float16 as float32, so that its result is rounded only once, when
            it is stored. False for operators that only move values.
        updates: the input that the operator changes in place; the function's (first) result is written there as well.
    """

    def enter(function: Kernel) -> Kernel:
        @functools.wraps(function)
        def run(attrs: Attrs, *inputs: Any) -> Any:
            result = function(attrs, *map(_wide, inputs)) if widen else function(attrs, *inputs)
            if updates is not None:
                _update(inputs[updates], result[0] if isinstance(result, tuple) else result)
            return result

        (KERNELS if table is None else table)[function.__name__] = run
        return run

    return enter


def enter(table: dict[str, Kernel], functions: dict[str, Kernel], *, widen: bool = True) -> None:
    """Add several short kernels, given as operator name -> function, to a table of kernels, in the same way as the
    decorator `kernel`.
    """
    for name, function in functions.items():
        function.__name__ = name
        kernel(table, widen=widen)(function)


def is_low(x: Any) -> bool:
    """Return whether an array holds 16-bit floating-point values."""
    return isinstance(x, np.ndarray) and x.dtype.name in _LOW


def _wide(x: Any) -> Any:
    if isinstance(x, list):
        return [_wide(item) for item in x]
    return x.astype(np.float32) if is_low(x) else x


def _update(target: np.ndarray, value: np.ndarray) -> None:
    if not np.shares_memory(target, value):
        np.copyto(target, value, casting="unsafe")
