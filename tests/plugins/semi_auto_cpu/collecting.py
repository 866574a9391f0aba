"""Ranks as threads of one process, each with its collectives."""

from contextlib import contextmanager

from plugins.semi_auto_cpu.collectives import Collectives
from plugins.semi_auto_cpu.ranks import Ranks, made_up_name
from tests.plugins.cpu_backend.ranks import LONG, meshes, on_ranks

__all__ = ["LONG", "attributes", "collectives", "on_ranks"]


@contextmanager
def collectives(size, timeout=LONG, test=""):
    with meshes(size, timeout) as every:
        yield [Collectives(mesh, Ranks(size, mesh.rank), test) for mesh in every]


def attributes(members, **more):
    """As MindSpore's C++ states them for a group that it made up."""
    stated = {"group": made_up_name(tuple(members)), "group_rank_ids": str(tuple(members))}
    return stated | {name: str(value) for name, value in more.items()}
