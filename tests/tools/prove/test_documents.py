"""Ends of documents under a cut sequence: what the rule says of ways to compute them, and attention with these ends."""

from random import Random

import numpy as np
import pytest

from tests.tools.prove.test_spread import anything
from tools.dryrun.graph_text import Node
from tools.prove import rules
from tools.prove.call import Call
from tools.prove.documents import check_ends
from tools.prove.spread import Certain, Contradiction, NotKnown, Spread, plain

SIZES = {"c": 3}
PIECE, WHOLE = 4, 12
NAME = 7  # of the ends of all documents


def computed(op, *arguments, step=PIECE, first=0, name=NAME, shape=None, dtype="Int32", written=True):
    """Return the result of an operator of the graph; "start" is the first token of a rank's piece.

    Args:
        name: the name of the ends.
        shape, dtype: the shape and dtype of the result.
        written: whether the place of an entry is written.
    """
    values, texts, names, offsets = [], [], [], {}
    for place, given in enumerate(arguments):
        spread = isinstance(given, Spread)
        values.append(given if spread else plain(()))
        names.append(name if spread else 0)
        texts.append(
            f"%{place}" if spread else f"Tensor(shape=[], dtype=Int32, value={0 if given == 'start' else given})"
        )
        if given == "start":
            offsets[place, 0] = first, {"c": step}
    if op in ("AddExt", "SubExt"):
        texts[2], values[2] = f"I64({arguments[2]})", arguments[2]
    if op in ("Gather", "ScatterNdUpdate"):
        texts[1] = f"Tensor(shape=[1, 1], dtype=Int64, value= [[{arguments[1]}]])" if written else "%1"
        values = [*values[:2], arguments[2]] if op == "Gather" else values
        values[1] = values[1] if written else plain((1,))
    whole = any(isinstance(each, Spread) and each.shape == (5,) for each in arguments)
    shape = shape or ((1,) if op == "Gather" or not whole else (5,))
    head = f"{op}({', '.join(texts)})"
    types = (
        f"({', '.join(['<Tensor[Int32], (5)>'] * len(texts))})",
        f"<Tensor[{'Bool' if op == 'Equal' else dtype}], ({str(shape)[1:-1]})>",
    )
    differs = {key: frozenset("c") for key in offsets}
    return rules.apply(
        Call(Node(op, head, head, [], types=types), 1, values, SIZES, differs, offsets=offsets, names=tuple(names))
    )


def clipped(ends, **more):
    """(ends from the piece's first token, ends among the piece's queries)."""
    moved = computed("Sub", ends, "start", **more)
    return moved, computed("ClipByValue", moved, 0, PIECE)


def right(ends):
    moved, queries = clipped(ends)
    behind = computed("Sub", computed("ReLU", moved), queries)
    return queries, computed("Sub", ends, behind)


def by_the_smaller(ends):
    """The keys' ends as the least of two numbers, one of which differs by rank."""
    moved, queries = clipped(ends)
    last = computed("Add", computed("Sub", ends, moved), PIECE)
    return queries, computed("Minimum", ends, last)


def by_other_operators(ends):
    """The same as `right`, by operators with a factor, through a copy of another type."""
    moved = computed("Cast", computed("SubExt", ends, "start", 1))
    queries = computed("Minimum", computed("Maximum", moved, 0), PIECE)
    behind = computed("SubExt", computed("Maximum", moved, 0), queries, 1)
    return queries, computed("AddExt", computed("SubExt", ends, behind, 3), behind, 2)


def last_document_to_the_end(ends):
    """The last document keeps its end among the keys, where the piece ends before it."""
    queries, keys = right(ends)
    return queries, computed("Select", computed("Equal", ends, WHOLE), ends, keys)


def as_the_queries(ends):
    queries = clipped(ends)[1]
    return queries, queries


def not_cut_behind(ends):
    moved, queries = clipped(ends)
    return queries, computed("Add", computed("Sub", ends, moved), computed("ReLU", moved))


def a_smaller_piece(ends):
    moved = computed("Sub", ends, "start")
    queries = computed("ClipByValue", moved, 0, PIECE - 1)
    return queries, computed("Sub", ends, computed("Sub", computed("ReLU", moved), queries))


def as_mindspore(ends):
    """The last entry, which is padding, keeps its end."""
    queries, keys = right(ends)
    last = computed("Gather", ends, 4, 0)
    kept = computed("Select", computed("Equal", last, WHOLE), WHOLE, last)
    return queries, computed("ScatterNdUpdate", keys, 4, kept)


def an_entry_before_the_last(ends):
    queries, keys = right(ends)
    return queries, computed("ScatterNdUpdate", keys, 3, computed("Gather", ends, 3, 0))


def the_last_entry_of_the_queries(ends):
    queries, keys = right(ends)
    return queries, computed("ScatterNdUpdate", keys, 4, computed("Gather", queries, 4, 0))


RIGHT = [right, by_the_smaller, by_other_operators, as_mindspore]
WAYS = [
    *RIGHT,
    an_entry_before_the_last,
    the_last_entry_of_the_queries,
    last_document_to_the_end,
    as_the_queries,
    not_cut_behind,
    a_smaller_piece,
]


def number(formula, ends, at):
    """The value of a formula on the rank `at`, by its operators one after another."""
    if not isinstance(formula, tuple):
        return formula
    op, *given = formula
    if op == "ends of documents":
        return ends
    if op.startswith("a number"):
        return given[0] + at * dict(given[1])["c"]
    x = [number(each, ends, at) for each in given]
    return {
        "Sub": lambda: x[0] - x[1], "Add": lambda: x[0] + x[1], "ReLU": lambda: np.maximum(x[0], 0),
        "SubExt": lambda: x[0] - x[2] * x[1], "AddExt": lambda: x[0] + x[2] * x[1],
        "Maximum": lambda: np.maximum(x[0], x[1]),
        "ClipByValue": lambda: np.minimum(np.maximum(x[0], x[1]), x[2]), "Minimum": lambda: np.minimum(x[0], x[1]),
        "Equal": lambda: x[0] == x[1], "Select": lambda: np.where(*x), "Gather": lambda: x[0][x[1], None],
        "ScatterNdUpdate": lambda: np.where(np.arange(len(x[0])) == x[1], x[2], x[0]),
    }[op]()  # fmt: skip


def attended(q, k, v, ends, key_ends):
    """Causal attention within documents, counted from the last query and key of each; ends must rise."""
    if any((np.diff(each) < 0).any() for each in (ends, key_ends)):
        return np.full((len(q), v.shape[1]), np.nan)
    found, q0, k0 = np.zeros((len(q), v.shape[1])), 0, 0
    for q1, k1 in zip(ends, key_ends, strict=True):
        seen = np.arange(k1 - k0)[None] <= np.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        scores = np.exp(q[q0:q1] @ k[k0:k1].T) * seen
        found[q0:q1] = scores / np.maximum(scores.sum(1, keepdims=True), 1e-30) @ v[k0:k1]
        q0, k0 = max(q0, q1), max(k0, k1)
    return found


def agrees(queries, keys, seed, most=4):
    """Return whether ranks that attend to these ends compute the same as one device, for random documents, of which
    there are at most `most`.
    """
    random = np.random.default_rng(seed)
    count = random.integers(0, most)
    ends = np.array([*sorted(random.choice(np.arange(1, WHOLE), count, replace=False)), *[WHOLE] * (5 - count)])
    q, k, v = random.normal(size=(3, WHOLE, 2))
    pieces = [
        attended(q[at * PIECE : (at + 1) * PIECE], k, v, number(queries, ends, at), number(keys, ends, at))
        for at in range(SIZES["c"])
    ]
    return np.allclose(attended(q, k, v, ends, ends), np.concatenate(pieces))


@pytest.mark.parametrize("way", WAYS)
@anything
def test_ends_are_right_where_attention_with_them_is(way, random: Random) -> None:
    queries, keys = way(plain((5,)))
    assert queries.shifted == {"c"} and keys.shifted == {"c"}
    try:
        check_ends(queries, keys, ("c",), PIECE, WHOLE, SIZES)
    except NotKnown:
        assert way is an_entry_before_the_last
    except Certain:
        assert not all(agrees(queries.formula, keys.formula, seed) for seed in range(60))
        assert way not in RIGHT
    else:
        assert all(agrees(queries.formula, keys.formula, random.randrange(2**32)) for _ in range(5))
        assert way in RIGHT


def test_what_is_said_of_wrong_ends():
    with pytest.raises(
        Certain, match="among the keys of piece 0, a document that ends at token 12 ends at 12 and not at 4"
    ):
        check_ends(*last_document_to_the_end(plain((5,))), ("c",), PIECE, WHOLE, SIZES)


def test_pieces_in_another_order_and_ends_of_other_documents_are_not_right():
    for more in ({"step": -PIECE}, {"step": 2 * PIECE}, {"first": PIECE}):
        with pytest.raises(Contradiction):
            queries = clipped(plain((5,)), **more)[1]
            check_ends(queries, right(plain((5,)))[1], ("c",), PIECE, WHOLE, SIZES)
    queries, keys = right(plain((5,)))
    other = Spread(keys.dims, shifted=keys.shifted, formula=("Sub", ("ends of documents", NAME + 1), 0))
    for wrong in (other, plain((5,))):
        with pytest.raises(NotKnown, match="is unknown"):
            check_ends(queries, wrong, ("c",), PIECE, WHOLE, SIZES)


def test_what_is_not_computed_element_by_element_has_no_formula():
    queries = clipped(plain((5,)))[1]
    assert queries.formula and computed("TensorMove", queries).formula
    assert not computed("Square", queries).formula
    assert not computed("ReLU", plain((2, 5)), shape=(2, 5)).formula


def test_twice_the_start_of_a_piece_is_not_where_it_starts():
    assert computed("SubExt", plain((5,)), "start", 1).shifted == {"c"}
    with pytest.raises(NotKnown, match="differ along c"):
        computed("SubExt", plain((5,)), "start", 2)


def refused(queries, keys):
    """Return whether ends that were computed in this way are refused as unknown."""
    with pytest.raises(NotKnown, match="documents"):
        check_ends(queries, keys, ("c",), PIECE, WHOLE, SIZES)
    return True


def test_ends_that_depend_on_the_place_of_an_entry_are_not_known():
    """All entries are computed alike, so that each is right where it stands; one entry may only replace the last."""
    ends = plain((5,))
    queries, keys = right(ends)
    third, last = (computed("Gather", ends, place, 0) for place in (3, 4))
    assert refused(queries, computed("ScatterNdUpdate", keys, 4, third))
    assert refused(queries, computed("ScatterNdUpdate", computed("ScatterNdUpdate", keys, 3, third), 4, last))
    assert refused(queries, computed("Minimum", keys, computed("Add", last, 1)))
    assert refused(computed("Minimum", queries, computed("Add", last, 1)), keys)
    moved = computed("Gather", computed("ScatterNdUpdate", ends, 4, third), 4, 0)
    assert refused(queries, computed("ScatterNdUpdate", keys, 4, moved))


def test_ends_of_other_documents_are_not_known():
    queries, keys = clipped(plain((5,)), name=NAME + 1)[1], right(plain((5,)))[1]
    assert refused(queries, keys)


@pytest.mark.parametrize(("more", "said"), [(1, "ends at 13 and not at 4"), (-WHOLE, "ends at 0 and not at 4")])
def test_the_last_entry_ends_between_its_own_end_and_the_last_key(more, said):
    queries, keys = right(plain((5,)))
    last = computed("Add", computed("Gather", plain((5,)), 4, 0), more)
    with pytest.raises(Certain, match=said):
        check_ends(queries, computed("ScatterNdUpdate", keys, 4, last), ("c",), PIECE, WHOLE, SIZES)


def test_an_entry_is_of_each_ranks_own_list():
    own = Spread((("b", 5),))
    last = computed("Gather", own, 4, 0)
    assert last.dims == (("b",),) and computed("ScatterNdUpdate", own, 4, last).dims == own.dims
    moved = computed("Sub", last, "start")
    assert computed("ScatterNdUpdate", own, 4, moved).shifted == {"c"}
    assert not computed("Gather", plain((5,)), 4, 0, written=False).formula
    for op, *given in (
        ("ScatterNdUpdate", own, 4, computed("Gather", plain((5,)), 4, 0)),  # the same number on all ranks
        ("ScatterNdUpdate", Spread((("b", 5), (1,))), 4, last),
        ("Gather", Spread((("b", 5), (1,))), 4, 0),
        ("Gather", own, 4, 1),
    ):
        with pytest.raises(NotKnown):
            computed(op, *given)
    for more in ({"written": False}, {"dtype": "Float32"}, {"shape": (2,)}):
        with pytest.raises(NotKnown):
            computed("Gather", own, 4, 0, **more)
    for more in ({"written": False}, {"dtype": "Float32"}):
        with pytest.raises(NotKnown, match="only for one entry"):
            computed("ScatterNdUpdate", own, 4, last, **more)


def test_pieces_over_two_axes_lie_in_their_order():
    """Pieces of 2 tokens, over 3 ranks along c times 2 along d, which is the inner one."""
    ends, sizes = ("ends of documents", NAME), {"c": 3, "d": 2}
    moved = ("Sub", ends, ("a number of the rank's own", 0, (("c", 4), ("d", 2))))
    queries = Spread(((5,),), formula=("ClipByValue", moved, 0, 2))
    keys = Spread(((5,),), formula=("Minimum", ends, ("Add", ("Sub", ends, moved), 2)))
    check_ends(queries, keys, ("c", "d"), 2, WHOLE, sizes)
    with pytest.raises(Certain, match="piece 1"):
        check_ends(queries, keys, ("d", "c"), 2, WHOLE, sizes)


def test_a_last_document_without_padding_behind_it_sees_keys_behind_its_queries():
    """The proof assumes that the last entry of MindSpore's ends is padding: without padding, queries of the last
    document would see keys that come after them.
    """
    queries, keys = as_mindspore(plain((5,)))
    assert all(agrees(queries.formula, keys.formula, seed) for seed in range(60))
    assert not all(agrees(queries.formula, keys.formula, seed, most=5) for seed in range(60))
