"""This module holds the measurements that a single worker makes: the speed of matrix products, of copies in the host's
memory, and of writes to the disk.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import numpy as np

from plugins.straggler_probe.watch import DEVICE_SIDE, device_products

_SIDE = 768  # of a product for one thread: some 10 ms of a current core
_COPY = 128 << 20  # bytes, more than a last-level cache holds of both copies


def cpu_matmul(threads: int) -> Callable[[], float]:
    """Return a function that multiplies float32 matrices with NumPy's BLAS and returns the number of GFLOP that it
    computed.
    """
    side = round(_SIDE * threads ** (1 / 3) / 64) * 64
    left, right = (np.full((side, side), 0.5, np.float32) for _ in range(2))
    out = np.empty_like(left)

    def work() -> float:
        np.matmul(left, right, out=out)
        return 2e-9 * side**3

    work()  # threads are started, pages are there
    return work


def device_matmul(target: str = "Ascend", side: int = DEVICE_SIDE) -> Callable[[], float]:
    """Return a function that multiplies float16 matrices with MindSpore on the worker's device and returns the number
    of GFLOP that it computed.

    This function was never run on an NPU; tests run it with `target` CPU.
    """
    import mindspore as ms

    ms.set_device(target)
    return device_products(side)


def memory_copy() -> Callable[[], float]:
    """Return a function that copies data in the host's memory in one thread and returns the number of GB that it read
    and wrote.
    """
    source, target = (np.ones(_COPY // 8) for _ in range(2))

    def work() -> float:
        np.copyto(target, source)
        return 2e-9 * _COPY

    work()
    return work


def disk_write(folder: str, size: int) -> float:
    """Return the MB/s at which `size` bytes are written and synchronised below `folder`, into a file without a name.

    Raises:
        OSError: the folder cannot be written to.
    """
    content = os.urandom(size)  # a file system may leave out zeros
    began = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as part:
        view = memoryview(content)
        while view:
            view = view[part.write(view) :]
        os.fsync(part.fileno())
    return size / 1e6 / (time.perf_counter() - began)
