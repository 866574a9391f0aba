import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.accuracy.merge import SAME, SUM, Layout, Rows


@st.composite
def layouts(draw):
    """A mesh of up to three axes, and a tensor that its rules can cut."""
    names = draw(st.permutations(["dp", "cp", "tp"]))[: draw(st.integers(1, 3))]
    mesh = {name: draw(st.integers(1, 3)) for name in names}
    rules = {name: draw(st.sampled_from([0, 1, SAME, SUM])) for name in names}
    shape = [draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))]
    for name, rule in rules.items():
        if not isinstance(rule, str):
            shape[rule] *= mesh[name]
    whole = np.arange(np.prod(shape), dtype=float).reshape(shape) + 1
    return Layout(mesh, rules), whole


def parts_of(layout, whole):
    """Parts whose sums are the pieces: integers, so that sums are exact."""
    pieces = layout.pieces(whole)
    parts = [np.zeros_like(piece) for piece in pieces]
    for group in layout.adding():
        rest = pieces[group[0]]
        for place, rank in enumerate(group):
            parts[rank] = rest if place == len(group) - 1 else np.full_like(rest, 7.0 * place)
            rest = rest - parts[rank]
    return parts


def place_by_place(layout, parts, shape):
    """The obvious merge: every rank writes (or adds) its part where its coordinates say."""
    out, seen = np.zeros(shape), set()
    for rank, part in enumerate(parts):
        at = np.unravel_index(rank, tuple(layout.mesh.values()))
        window, key = [slice(0, size) for size in shape], []
        for (name, size), index in zip(layout.mesh.items(), at, strict=True):
            rule = layout.rules[name]
            if rule == SAME and index:
                break
            if isinstance(rule, str):
                continue
            start, length = window[rule].start, (window[rule].stop - window[rule].start) // size
            window[rule] = slice(start + index * length, start + (index + 1) * length)
            key.append((name, index))
        else:
            out[tuple(window)] += part
            seen.add(tuple(key))
    return out


@given(layouts())
def test_merging_undoes_cutting(drawn):
    layout, whole = drawn
    parts = parts_of(layout, whole)
    merged = layout.merge(parts)
    np.testing.assert_array_equal(merged.value, whole)
    np.testing.assert_array_equal(place_by_place(layout, parts, whole.shape), whole)
    if SUM not in layout.rules.values():
        assert merged.differing == ()


@given(layouts(), st.data())
def test_a_copy_that_differs_is_named(drawn, data):
    layout, whole = drawn
    plain = layout.without_sums()
    parts = [piece.copy() for piece in plain.pieces(whole)]
    rank = data.draw(st.integers(0, plain.ranks - 1))
    parts[rank].reshape(-1)[-1] += 1
    differing = plain.merge(parts).differing
    if plain.copies() == 1:
        assert differing == () and not np.array_equal(plain.merge(parts).value, whole)
    else:
        assert differing
    held = plain.pieces(whole)
    assert [r for r in range(plain.ranks) if not np.array_equal(parts[r], held[r])] == [rank]


@given(layouts())
def test_ranks_that_add_up_hold_the_same_piece(drawn):
    layout, whole = drawn
    groups = layout.adding()
    assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))
    pieces = layout.pieces(whole)
    for group in groups:
        for rank in group:
            np.testing.assert_array_equal(pieces[rank], pieces[group[0]])


def test_the_slowest_axis_cuts_first():
    layout = Layout({"cp": 2, "tp": 2}, {"cp": 0, "tp": 0})
    assert [piece.tolist() for piece in layout.pieces(np.arange(8))] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(st.data())
def test_experts_go_where_their_map_says(data):
    """Experts in any order on any ranks, each on `times` of them."""
    total, times = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    whole = np.arange(total * 3.0).reshape(total, 3)
    index = []
    for _ in range(times):
        order = np.array(data.draw(st.permutations(range(total))))
        index += np.split(order, sorted(data.draw(st.lists(st.integers(0, total), min_size=1, max_size=3))))
    copies, sums = Rows(index, total, times), Rows(index, total, times, SUM)
    parts = copies.pieces(whole)
    assert copies.merge(parts).differing == ()
    np.testing.assert_array_equal(copies.merge(parts).value, whole)
    np.testing.assert_array_equal(sums.merge(parts).value, times * whole)


def test_a_swapped_copy_of_an_expert_is_named():
    rows = Rows([np.array([0, 1]), np.array([1, 0])], 2, times=2)
    whole = np.array([[1.0], [2.0]])
    assert rows.merge([whole, whole]).differing == (1,)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([[0, 1], [1]], "row 1 is held 2 times instead of 1"),
        ([[0], []], "row 1 is held 0 times instead of 1"),
    ],
)
def test_a_map_with_holes_is_refused(index, message):
    index = [np.array(part, int) for part in index]
    with pytest.raises(ValueError, match=message):
        Rows(index, 2).merge([np.ones((len(part), 1)) for part in index])


def test_a_part_without_an_index_is_refused():
    with pytest.raises(ValueError, match="must be equal"):
        Rows([np.array([0, 1])], 2).merge([np.ones((3, 1))])
