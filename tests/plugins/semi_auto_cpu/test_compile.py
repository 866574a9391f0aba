"""What a rank has to hold of a weight, by MindSpore's layout of it."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.compile import refuse_wrong_slices, slice_of

WHOLE = np.arange(24 * 12, dtype=np.float32).reshape(24, 12)
LAYOUTS = [
    ([2, 2], [-1, 0], 2),  # dp2 tp2: columns over neighbours, the optimizer over ranks 0 and 2, 1 and 3
    ([2, 2], [0, -1], 2),
    ([2, 2], [1, -1], 2),  # cut by the first axis: neighbours are the copies
    ([2, 2], [-1, -1], 4),
    ([2, 2], [1, 0], 1),
    ([4, 2], [-1, 0], 2),  # optimizer_weight_shard_size: 2 of 4 copies
    ([2, 2, 2], [1, -1], 4),
    ([2, 3, 2], [-1, 0], 6),
    ([2, 3, 2], [-1, 1], 2),
    ([2, 2, 3], [(2, 1), 0], 1),
]


def slowly(mesh, cuts, shards, rank):
    """By trying all ranks: those with the same slice, of which `shards` neighbours share it in their order."""

    def slice_and_index(other):
        place = list(product(*map(range, mesh)))[other]
        part, where = WHOLE, []
        for dimension, axes in enumerate(cuts):
            for axis in axes if isinstance(axes, tuple) else (axes,):
                if axis >= 0:
                    count, index = mesh[::-1][axis], place[::-1][axis]
                    part = np.split(part, count, dimension)[index]
                    where.append(index)
        return part, where

    part, mine = slice_and_index(rank)
    copies = [other for other in range(np.prod(mesh)) if slice_and_index(other)[1] == mine]
    return np.split(part.ravel(), shards)[copies.index(rank) % shards]


@pytest.mark.parametrize(("mesh", "cuts", "shards"), LAYOUTS)
def test_each_rank_holds_its_part(mesh, cuts, shards):
    for stage, rank in product(range(2), range(int(np.prod(mesh)))):
        want = slowly(mesh, cuts, shards, rank)
        layout = (mesh, cuts, [], 0, True, "", list(WHOLE.shape))
        found = slice_of(WHOLE, layout, stage * int(np.prod(mesh)) + rank, want.size)
        assert np.array_equal(found.ravel(), want), f"rank {rank}"


def test_another_part_is_refused():
    """Rank 1 of dp2 tp2 with the second part of its columns, which is rank 3's."""
    layout = ([2, 2], [-1, 0], [24, 6], 0, True, "2-4190060298023907007", [24, 12])
    columns = WHOLE[:, 6:]

    def check(held, rank):
        weight = SimpleNamespace(name="w", asnumpy=lambda: held)
        cell = SimpleNamespace(parameter_layout_dict={"w": layout}, get_parameters=lambda: [weight])
        refuse_wrong_slices(cell, {"w": WHOLE}, rank)

    check(columns[:12], 1)
    check(columns[12:], 3)
    with pytest.raises(ClusterError, match=r"rank 1: the slice that MindSpore cut out of w is not .* map \[-1, 0\]"):
        check(columns[12:], 1)
