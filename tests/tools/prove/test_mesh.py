"""The axes of a mesh, and what lies along them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.dryrun.gradients import copies_of
from tools.prove.mesh import mesh_of, runs
from tools.prove.spread import NotKnown, Spread


def test_groups_as_distances_and_counts():
    assert runs((3,)) == []
    assert runs((0, 2, 4, 6)) == [(2, 4)]
    assert runs((0, 1, 4, 5)) == [(1, 2), (4, 2)]
    for ranks in ((0, 1, 3), (0, 1, 2, 4), (0, 1, 4, 6)):
        with pytest.raises(NotKnown, match="do not form a mesh"):
            runs(ranks)


def test_axes_are_cut_where_a_group_takes_a_part_of_them():
    mesh = mesh_of([("tp", 2), ("cp", 1), ("dp", 4)], [(0, 2), (0, 1)])
    assert dict(mesh.sizes) == {"tp": 2, "dp.1": 2, "dp.2": 2}
    assert dict(mesh.strides) == {"tp": 1, "dp.1": 2, "dp.2": 4}
    assert mesh.of_group((0, 2)) == ("dp.1",)
    assert mesh.of_group((0, 1, 4, 5)) == ("dp.2", "tp")
    assert mesh.devices == 8
    with pytest.raises(NotKnown, match="not a product"):
        mesh.of_group((0, 1, 2))
    with pytest.raises(NotKnown, match="not in order"):
        mesh.of_group((2, 0))
    with pytest.raises(NotKnown, match="which is not a mesh"):
        mesh_of([("tp", 4), ("dp", 3)], [(0, 3)])


def test_a_layout_is_a_spread():
    mesh = mesh_of([("tp", 2), ("dp", 4)], [], [(2, 2, 2)])
    layout = {"mesh": [2, 2, 2], "map": [0, -1], "slice": [8, 3]}
    assert mesh.of_layout(layout) == Spread((("tp", 8), (3,)))
    assert mesh.of_layout(layout, (0, 2, 4, 6)) == Spread((("tp", "dp.2", "dp.1", 2), (3,)))
    both = {"mesh": [4, 2], "map": [-1, [1, 0]], "slice": [8, 3]}
    assert mesh.of_layout(both) == Spread(((8,), ("dp.2", "dp.1", "tp", 3)))


@given(st.permutations([0, 1, 2]), st.integers(0, 2))
def test_a_spread_is_cut_over_the_axes_that_the_dry_run_finds_in_the_layout(order, cuts):
    """Ranks along axes over which a weight is not cut are those that `copies_of` names."""
    shape = [2, 3, 2]
    mapped = [order[dim] if dim < cuts else -1 for dim in range(3)]
    layout = [shape, mapped]
    mesh = mesh_of([("tp", 2), ("cp", 3), ("dp", 2)], [])
    holes = mesh.of_layout({"mesh": shape, "map": mapped, "slice": [4, 4, 4]}).holes
    place = np.unravel_index(np.arange(12), shape)
    axes = dict(zip(("dp", "cp", "tp"), place, strict=True))
    alike = [rank for rank in range(12) if all(axes[axis][rank] == axes[axis][7] for axis in holes)]
    assert tuple(alike) == copies_of(layout, 7)
