"""The fixed piece of work of a probe, and its time without what other processes took of the core.

MindSpore is imported only for an NPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from plugins.processor_time import thread_waited

DEVICE_SIDE, _PRODUCTS = 4096, 16  # some 8 ms of an Atlas A2
_NUMBERS, _PASSES = 1 << 15, 24  # 128 KiB, which stay in a core's own cache: some 0.5 ms of a current core
ROUNDS = 5  # of which the median counts: a pause of a few milliseconds falls into one of them


def device_products(side: int = DEVICE_SIDE) -> Callable[[], float]:
    """Products in float16 by MindSpore on the device of this process; it returns GFLOP. Never run on an NPU."""
    import mindspore as ms

    left = ms.Tensor(np.full((side, side), 0.01), ms.float16)

    def work() -> float:
        for _ in range(_PRODUCTS):
            ms.ops.matmul(left, left)
        ms.runtime.synchronize()
        return 2e-9 * side**3 * _PRODUCTS

    work()  # compiles
    return work


def processor_work() -> Callable[[], float]:
    """Square roots by one thread of this process; it returns billions of them.

    Neither MindSpore's operators nor a product by NumPy's BLAS: both spread over as many threads as they like, which
    then wait for the cores of others.
    """
    numbers = np.full(_NUMBERS, 2.0, np.float32)
    out = np.empty_like(numbers)

    def work() -> float:
        for _ in range(_PASSES):
            np.sqrt(numbers, out=out)
            np.add(out, numbers, out=out)
        return 1e-9 * _NUMBERS * _PASSES

    work()
    return work


def of_device(device: str) -> Callable[[], float]:
    """The piece of work for a type of device."""
    return processor_work() if device == "CPU" else device_products()


def seconds_of(work: Callable[[], float], pieces: int) -> float:
    """Time of so many pieces of `work`: the median of `ROUNDS`, each without what the thread waited for a core.

    Time in which a limit or a signal stopped the process stays in, as far as the kernel counts it as no waiting.
    """
    times = []
    for _ in range(ROUNDS):
        began, waited = time.perf_counter(), thread_waited()
        for _ in range(pieces):
            work()
        took = time.perf_counter() - began
        times.append(max(took - (thread_waited() - waited), 1e-9))
    return median(times)
