"""The rules of attention against NumPy on simulated ranks: every layout, and queries whose sequence is cut."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.tools.prove.test_rules import gradient_like
from tests.tools.prove.test_spread import RANKS, SIZES, anything, describes, hold, whole_of
from tools.dryrun.graph_text import Node
from tools.prove.call import Call
from tools.prove.rules import RULES
from tools.prove.spread import Contradiction, NotKnown, Spread, plain, tidy

BSH, BNSD, SBH, BSND, TND = range(5)
HEADS, ROWS, WIDE, NARROW = 2, 2, 3, 2  # of a rank; the width of queries and keys, and of values


def arranged(layout, x):
    """Values [batch, heads, sequence, width] in a layout."""
    batch, heads, rows, width = x.shape
    if layout == BNSD:
        return x
    x = x.transpose(2, 0, 1, 3) if layout == SBH else x.transpose(0, 2, 1, 3)
    merged = {BSH: (batch, rows, heads * width), SBH: (rows, batch, heads * width), TND: (batch * rows, heads, width)}
    return x.reshape(merged.get(layout, x.shape))


def apart(layout, x, batch, heads):
    """The values [batch, heads, sequence, width] of `arranged`."""
    if layout == BNSD:
        return x
    if layout == SBH:
        return x.reshape(x.shape[0], batch, heads, -1).transpose(1, 2, 0, 3)
    return x.reshape(batch, -1, heads, x.shape[-1] // (heads if layout == BSH else 1)).transpose(0, 2, 1, 3)


def spread_of(layout, batch, heads, rows, width):
    """The spread of a value in a layout, from the parts of its dimensions."""
    wide = (*heads[:-1], heads[-1] * width)
    dims = {
        BSH: (batch, rows, wide), BNSD: (batch, heads, rows, (width,)), SBH: (rows, batch, wide),
        BSND: (batch, rows, heads, (width,)), TND: ((*batch, *rows), heads, (width,)),
    }[layout]  # fmt: skip
    return Spread(tuple(map(tidy, dims)))


def attended(q, k, v, first, dout=None):
    """Causal attention of queries whose first one is at position `first`; the gradients if `dout` is given."""
    seen = np.arange(k.shape[2])[None] <= first + np.arange(q.shape[2])[:, None]
    scores = np.exp(q @ k.swapaxes(-1, -2)) * seen
    weights = scores / scores.sum(-1, keepdims=True)
    if dout is None:
        return weights @ v
    of_weights = dout @ v.swapaxes(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True))
    return of_scores @ k, of_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout


def call(op, layout, values, differs, shapes, offsets=None, mode=2):
    """An operator of attention with its layout and sparse mode, whose results have these shapes."""
    head = f"{op}(%0, I64(0), I64(0), I64(0), I64({layout}), I64({mode}))"
    types = ("()", f"({', '.join(f'<Tensor[Float32], ({str(shape)[1:-1]})>' for shape in shapes)})")
    return RULES[op].of(
        Call(Node(op, head, head, [], types=types), 0, values, SIZES, differs, offsets=offsets or seen_by(differs))
    )


def seen_by(differs, order="ab"):
    """The tokens that are seen on the first rank, and how many more on the next ones: a piece, or less before it."""
    found = {}
    for key, over in differs.items():
        axes = [axis for axis in order if axis in over]
        steps = {axis: ROWS * int(np.prod([SIZES[each] for each in axes[n:]])) for n, axis in enumerate(axes, 1)}
        before = key[0] in (13, 18)
        found[key] = (1000, {axis: -step for axis, step in steps.items()}) if before else (0, steps)
    return found


class Case:
    """Axes that cut batch, heads and sequence, with the spreads that follow."""

    def __init__(self, layout, roles):
        self.layout = layout
        self.axes = {
            role: tuple(axis for axis in ("a", "b") if roles[axis] == role) for role in ("batch", "heads", "rows")
        }
        self.batch = 1 if layout == TND else 2
        cut = {"batch": (*self.axes["batch"], self.batch), "heads": (*self.axes["heads"], HEADS)}
        whole = ROWS * int(np.prod([SIZES[axis] for axis in self.axes["rows"]]))
        self.query = spread_of(layout, **cut, rows=(*self.axes["rows"], ROWS), width=WIDE)
        self.key, self.value = (spread_of(layout, **cut, rows=(whole,), width=width) for width in (WIDE, NARROW))
        self.out = spread_of(layout, **cut, rows=(*self.axes["rows"], ROWS), width=NARROW)

    def differs(self, op):
        """The numbers of tokens that are seen, which differ along the axes of the sequence."""
        first = 13 if op == "FlashAttentionScore" else 18
        return {(first + n, 0): frozenset(self.axes["rows"]) for n in (0, 1)} if self.axes["rows"] else {}

    def types(self, *values, differs=None, offsets=None):
        """Return the types that the rule gives to the result, or to the gradients of queries, keys and values."""
        op = "FlashAttentionScore" if len(values) == 3 else "FlashAttentionScoreGrad"
        masks = (None,) * 8 if len(values) == 3 else (None,) * 11
        small = (self.batch, HEADS, ROWS, 8) if self.layout != TND else (ROWS, HEADS, 8)
        found = call(op, self.layout, (*values, *masks), self.differs(op) if differs is None else differs,
                     [small, small, (1,), self.out.shape],
                     offsets or seen_by(self.differs(op), self.axes["rows"]))  # fmt: skip
        if len(values) == 3:
            assert found[0].shape == found[1].shape == small
        return found[3] if len(values) == 3 else found[:3]

    def of_whole(self, x):
        """All values [batch, heads, sequence, width]."""
        batch, heads = (int(np.prod([SIZES[axis] for axis in self.axes[role]])) for role in ("batch", "heads"))
        return apart(self.layout, x, batch * self.batch, heads * HEADS)

    def of_rank(self, x):
        """A rank's values [batch, heads, sequence, width]."""
        return apart(self.layout, x, self.batch, HEADS)

    def first(self, place):
        """The position of the first query of a rank."""
        at = 0
        for axis in self.axes["rows"]:
            at = at * SIZES[axis] + place[axis]
        return at * ROWS


def some_case(random, layout):
    rows = "none" if layout == TND else "rows"
    roles = {axis: random.choice(["batch", "heads", rows, rows, "none"]) for axis in SIZES}
    return Case(layout, roles)


@pytest.mark.parametrize("layout", range(5))
@anything
def test_every_layout(layout: int, random: Random) -> None:
    case = some_case(random, layout)
    wholes = [whole_of(x, random, n) for n, x in enumerate((case.query, case.key, case.value))]
    held = [
        hold(x, whole, random, n)
        for n, (x, whole) in enumerate(zip((case.query, case.key, case.value), wholes, strict=True))
    ]
    found = case.types(case.query, case.key, case.value)
    assert found == case.out
    expected = attended(*map(case.of_whole, wholes), 0)
    made = [
        arranged(layout, attended(*map(case.of_rank, own), case.first(place)))
        for own, place in zip(zip(*held, strict=True), RANKS, strict=True)
    ]
    assert describes(found, arranged(layout, expected), made)

    gradient = gradient_like(random, case.out)
    dout = whole_of(gradient, random, 3)
    parts = hold(gradient, dout, random, 3)
    types = case.types(case.query, case.key, case.value, gradient)
    expected = attended(*map(case.of_whole, wholes), 0, case.of_whole(dout))
    made = [
        attended(*map(case.of_rank, own), case.first(place), case.of_rank(part))
        for own, place, part in zip(zip(*held, strict=True), RANKS, parts, strict=True)
    ]
    for number, each in enumerate(types):
        assert describes(each, arranged(layout, expected[number]), [arranged(layout, own[number]) for own in made])
    for axis in case.axes["rows"]:
        assert axis in types[1].partial and axis in types[2].partial


def test_a_part_of_the_queries_that_does_not_know_where_it_begins_is_refused():
    case = Case(BSH, {"a": "batch", "b": "rows"})
    given = (case.query, case.key, case.value)
    for differs in ({}, {(14, 0): frozenset("b")}, {(13, 0): frozenset("a"), (14, 0): frozenset("a")}):
        with pytest.raises(Contradiction, match="b cuts the queries' sequence, but the number of visible tokens"):
            case.types(*given, differs=differs)
    whole = Case(BSH, {"a": "batch", "b": "none"})
    with pytest.raises(Contradiction, match="no axis cuts the queries' sequence"):
        whole.types(whole.query, whole.key, whole.value, differs={(13, 0): frozenset("b"), (14, 0): frozenset("b")})


def test_tokens_that_are_seen_move_with_the_queries():
    case = Case(BSH, {"a": "batch", "b": "rows"})
    given = (case.query, case.key, case.value)
    right = seen_by(case.differs("FlashAttentionScore"))
    assert case.types(*given, offsets=right) == case.out
    for wrong in (
        {(13, 0): right[13, 0], (14, 0): (0, {"b": -ROWS})},  # each other's positions
        {(13, 0): right[13, 0], (14, 0): (0, {"b": 2 * ROWS})},  # every second piece
        {(13, 0): (1000, {"b": ROWS}), (14, 0): right[14, 0]},
    ):
        with pytest.raises(Contradiction, match=r"own piece|do not shift equally"):
            case.types(*given, offsets=wrong)


def test_keys_of_which_a_rank_has_a_part_are_refused():
    case = Case(BNSD, {"a": "heads", "b": "rows"})
    with pytest.raises(Contradiction, match="batch or heads are not cut equally, or another dimension is cut"):
        case.types(case.query, case.query, case.value)
    other = Case(BNSD, {"a": "batch", "b": "rows"})
    with pytest.raises(Contradiction, match="not cut equally"):
        case.types(case.query, other.key, other.value)


def test_masks_and_lengths_are_of_the_rank_s_own_queries():
    case = Case(BNSD, {"a": "batch", "b": "rows"})
    small = (2, HEADS, ROWS, 8)

    def with_mask(mask, given=(case.query, case.key, case.value)):
        values = (*given, None, None, None, mask, None, None, None)
        return call("FlashAttentionScore", BNSD, values, case.differs("FlashAttentionScore"),
                    [small, small, (1,), case.out.shape])[3]  # fmt: skip

    assert with_mask(Spread((("a", 2), (), ("b", ROWS), (6,)))) == case.out
    assert with_mask(plain((2048, 2048))) == case.out
    for mask in (Spread((("a", 2), (), (ROWS,), (6,))), Spread((("b", 2), (), ("a", ROWS), (6,)))):
        with pytest.raises(Contradiction, match="the batch or the rows of the mask"):
            with_mask(mask)
    one_sample = [replace(x, dims=(("a",), *x.dims[1:])) for x in (case.query, case.key, case.value)]
    with_mask(Spread((("a", "b"), (), (ROWS,), (6,))), one_sample)  # rows that a Reshape had moved to the samples
    with pytest.raises(Contradiction, match="the batch or the rows of the mask"):
        with_mask(Spread((("b", "a"), (), (ROWS,), (6,))), one_sample)
    with pytest.raises(Contradiction, match="the columns of the mask are cut"):
        with_mask(Spread((("a",), (), (ROWS,), ("b", 6))), one_sample)
    with pytest.raises(Contradiction, match="the mask, which must be the same on all ranks, is cut"):
        with_mask(Spread((("a", 2048), (2048,))))
    tokens = Case(TND, {"a": "batch", "b": "heads"})
    for lengths, right in ((Spread((("a", 4),)), True), (plain((4,)), False)):
        values = (tokens.query, tokens.key, tokens.value, *(None,) * 5, lengths, lengths)
        shapes = [(ROWS, HEADS, 8)] * 2 + [(1,), tokens.out.shape]
        if right:
            assert call("FlashAttentionScore", TND, values, {}, shapes)[3] == tokens.out
        else:
            with pytest.raises(Contradiction, match="lengths of the sequences do not fit the tokens of the rank"):
                call("FlashAttentionScore", TND, values, {}, shapes)


def test_another_layout_is_unknown():
    documents = Case(TND, {"a": "batch", "b": "rows"})
    with pytest.raises(
        NotKnown, match="there is a rule only for ends of documents whose keys are counted from the last key"
    ):
        documents.types(documents.query, documents.key, documents.value, differs={})
    shapes = [(ROWS, HEADS, 8)] * 2 + [(1,), documents.out.shape]
    own = (documents.query, documents.key, documents.value, *(None,) * 5)
    ends = Spread((("a", 4),), shifted=frozenset("b"))
    with pytest.raises(NotKnown, match="only for ends of documents whose keys"):  # one list of two
        call("FlashAttentionScore", TND, (*own, ends, None), {}, shapes, mode=3)
    turned = [
        Spread((rows, *x.dims[1:])) for x, rows in zip(own[:3], (("b", "a", 2), (3, "a", 2), (3, "a", 2)), strict=False)
    ]
    with pytest.raises(NotKnown, match="are not inside the pieces of the tokens"):
        call("FlashAttentionScore", TND, (*turned, *(None,) * 5, ends, ends), {}, shapes, mode=3)
    cut = Case(BSH, {"a": "batch", "b": "rows"})
    values = (cut.query, cut.key, cut.value, *(None,) * 5, Spread((("a", 4),)), Spread((("a", 4),)))
    with pytest.raises(NotKnown, match="ends of documents under a cut sequence have a rule only in the layout TND"):
        call(
            "FlashAttentionScore",
            BSH,
            values,
            cut.differs("FlashAttentionScore"),
            [(2, 2, 2, 8)] * 2 + [(1,), (2, 2, 4)],
        )
    whole = Case(TND, {"a": "batch", "b": "none"})
    moved = (whole.query, whole.key, whole.value, *(None,) * 5, *(Spread((("a", 4),), shifted=frozenset("b")),) * 2)
    with pytest.raises(
        Contradiction, match="no axis cuts the queries' sequence, and the ends of documents move along b"
    ):
        call("FlashAttentionScore", TND, moved, {}, [(2, 2, 8)] * 2 + [(1,), whole.out.shape])
    case = Case(BSH, {"a": "batch", "b": "none"})
    with pytest.raises(NotKnown, match="this layout of attention has no rule"):
        call("FlashAttentionScore", 5, (case.query, case.key, case.value, *(None,) * 7), {}, [(2, 2, 2, 8)])
