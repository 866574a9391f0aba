"""The TCP mesh between this run's workers, for what MindSpore's CPU communication lacks."""

from __future__ import annotations

import atexit
import os
import socket

import numpy as np

from plugins.cpu_backend.network.transport import Mesh

_open: list[Mesh] = []


def mesh() -> Mesh:
    """The mesh of this process; `connect` comes first."""
    return _open[0]


def connect(timeout: float = 120.0) -> None:
    """Connect all ranks to each other, once; every rank must call it.

    Args:
        timeout: seconds that one exchange may take: also how much longer one rank may compile than another.

    Raises ClusterError where a rank cannot be reached.
    """
    if _open:
        return
    from mindspore import Tensor, ops
    from mindspore.communication import get_group_size, get_rank

    rank, size = get_rank(), get_group_size()
    new = Mesh(rank, size, timeout)
    host, port = new.listen(_own_address())
    table = np.zeros((size, 5), np.float32)  # octets and port: exact in float32
    table[rank] = [*map(int, host.split(".")), port]
    table = ops.AllReduce()(Tensor(table)).asnumpy().astype(int)
    new.connect([(".".join(map(str, row[:4])), int(row[4])) for row in table])
    _open.append(new)
    atexit.register(new.close)


def _own_address() -> str:
    """The address by which other workers reach this one: the interface that leads to msrun's scheduler."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((os.environ.get("MS_SCHED_HOST", "127.0.0.1"), 9))
        return probe.getsockname()[0]
