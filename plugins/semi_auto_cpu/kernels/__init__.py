"""Operators that MindSpore cannot compute on CPU, in NumPy: `KERNELS` and `LOW_PRECISION` (see `registry.py`)."""

# ruff: noqa: F401  importing a module enters its operators
from plugins.semi_auto_cpu.kernels import (
    elementwise,
    grouped_matmul,
    indexing,
    matmul,
    moe,
    norm,
    reduce,
    rotary,
    shapes,
    sort,
    status,
)
from plugins.semi_auto_cpu.kernels.attention import operators
from plugins.semi_auto_cpu.kernels.registry import KERNELS, LOW_PRECISION

__all__ = ["KERNELS", "LOW_PRECISION"]
