"""The overflow flags of an NPU: a CPU has none, so nothing ever overflowed."""

from __future__ import annotations

from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import Attrs, kernel


@kernel(widen=False)
def NPUClearFloatStatusV2(attrs: Attrs, *inputs: Any) -> np.ndarray:
    """Eight flags, cleared."""
    return np.zeros(8, np.int32)


@kernel(widen=False)
def NPUGetFloatStatusV2(attrs: Attrs, *inputs: Any) -> np.ndarray:
    """Eight flags, none of them up."""
    return np.zeros(8, np.int32)
