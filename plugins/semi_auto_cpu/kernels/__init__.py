"""This package computes in NumPy the operators that MindSpore cannot compute on CPU. `KERNELS` lists operators without
a CPU kernel, and `LOW_PRECISION` lists operators whose CPU kernel refuses 16-bit types (see `registry.py`).

`arithmetic` has elementwise operators, sums, norms, rotary positions and matrix products; `attention` has flash
attention; `experts` has grouped products and the sorting of tokens; `indexing` has gathers, slices, shapes and sorts.
"""

# ruff: noqa: F401  importing a module enters its operators
from plugins.semi_auto_cpu.kernels import arithmetic, attention, experts, indexing
from plugins.semi_auto_cpu.kernels.registry import KERNELS, LOW_PRECISION

__all__ = ["KERNELS", "LOW_PRECISION"]
