"""Ranks as threads of one process, for tests of the transport."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from plugins.cpu_backend.transport import Mesh


def on_ranks(size, work):
    """work(rank) on a thread each; the results by rank, or the first error."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(work, rank) for rank in range(size)]]


@contextmanager
def meshes(size, timeout=20.0):
    every = [Mesh(rank, size, timeout) for rank in range(size)]
    addresses = [mesh.listen() for mesh in every]
    try:
        on_ranks(size, lambda rank: every[rank].connect(addresses, timeout=20))
        yield every
    finally:
        for mesh in every:
            mesh.close()
