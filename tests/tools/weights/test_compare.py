"""Two sets of weights side by side, whatever their layouts."""

import math

import numpy as np

from tests.tools.checkpoint.saved import Saved, numbered
from tests.tools.experts.test_restore import MODULE, WEIGHT, write
from tools.weights.inventory import compare
from tools.weights.source import open_source


def saved(folder, ranks, cuts, more=0.0, **others):
    checkpoint = Saved(folder / "iteration_00000001", ranks)
    checkpoint.put("linear.weight", numbered(4, 4) + np.float32(more), cuts, [[rank] for rank in range(ranks)])
    for name, array in others.items():
        checkpoint.put(name, array, (1,) * array.ndim, [list(range(ranks))])
    return open_source(checkpoint.write())


def test_layouts_make_no_difference(tmp_path):
    found = compare(saved(tmp_path / "a", 2, (2, 1)), saved(tmp_path / "b", 4, (2, 2)))
    assert found.equal and found.same == ("linear.weight",)


def test_experts_that_have_moved_are_compared_with_themselves(tmp_path):
    there, _ = write(tmp_path / "a", np.array([2, 0, 1, 3]), 2)
    here, _ = write(tmp_path / "b", np.arange(4), 4)
    assert compare(open_source(there), open_source(here)).equal
    stored = open_source(there)
    assert stored.placements.keys() == {MODULE}
    assert not np.array_equal(stored.stored.read(WEIGHT)[0], stored.read(WEIGHT)[0]), "rows do stand elsewhere"


def test_what_differs_is_told_by_how_much(tmp_path):
    a = saved(tmp_path / "a", 2, (2, 1), only_a=numbered(2), typed=numbered(2), zero=np.zeros(2, np.float32))
    b = saved(tmp_path / "b", 2, (2, 1), 0.5, only_b=numbered(2), typed=numbered(3), zero=np.ones(2, np.float32))
    found = compare(a, b)
    assert found.only == (("only_a",), ("only_b",)) and found.other == (("typed", "F32 [2]", "F32 [3]"),)
    zero, linear = found.changes
    assert (zero.name, zero.relative, zero.largest) == ("zero", math.inf, 1)
    assert linear.relative == np.linalg.norm(np.full(16, 0.5)) / np.linalg.norm(np.arange(16.0))
    assert linear.largest == 0.5 and not found.equal


def test_one_bit_is_a_difference_and_a_nan_is_equal_to_itself(tmp_path):
    nan = np.array([np.nan, 1], np.float32)
    found = compare(
        saved(tmp_path / "a", 1, (1, 1), odd=np.float32([0.0]), same=nan),
        saved(tmp_path / "b", 1, (1, 1), odd=np.float32([-0.0]), same=nan),
    )
    assert found.same == ("linear.weight", "same") and [change.name for change in found.changes] == ["odd"]
