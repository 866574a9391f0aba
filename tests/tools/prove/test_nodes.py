"""The dispatch in two levels (`alltoall_deredundency`: AllGather between nodes, AlltoAllV inside a node): its rules
against NumPy on simulated ranks, and on a compiled step with experts (dp4 x tp2 x ep4, two ranks a node).
"""

import re
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from benchmarks.planted_spreads import ELSEWHERE, NAMED, examine, faults, root
from tests.tools.prove.renew import read
from tests.tools.prove.test_spread import (
    RANKS,
    SIZES,
    along,
    anything,
    check,
    describes,
    hold,
    some_spread,
    whole_of,
)
from tools.dryrun.graph_text import Node
from tools.prove import experts
from tools.prove.call import Call, Order
from tools.prove.report import prove_rank, typing_of
from tools.prove.rules import RULES
from tools.prove.spread import Contradiction, NotKnown, Rows, Spread, Zeros, extent, multiply, plain

STEP = read("nodes")
EMPTY = (None,) * 5
TOKENS, WIDTH, COPIES, OWN = 4, 2, 2, 2  # of a rank, of a token, experts of a token, experts of a rank
WIDE = 6 * OWN  # experts in all


def result(op, *values, of=(), given=(), axes=(), over=(), number=0, text=""):
    """Return what the rule of an operator gives; its output has the shape `of`, and its constants
    differ along `over`.
    """
    tensor = "<Tensor[Float32], ({})>"
    types = tuple(f"({tensor.format(', '.join(map(str, shape)))})" for shape in (given, of))
    node = Node(op, f"{op}(%0)", f"{op}(%0) {text}", [], scope="", types=types)
    differs = {(1, 0): frozenset(over)} if over else {}
    call = Call(node, number, values, SIZES, differs, axes, offsets=offsets(op, over, given, of))
    on_order = isinstance(values[0], Order) and op in experts.ON_ORDERS
    return experts.ON_ORDERS[op](call) if on_order else RULES[op].of(call)


def offsets(op, over, given, of):
    """Return where the experts of the first node start, and how much further those of each next node start; a node has
    six experts.
    """
    if not over:
        return {}
    own = of[0] if op == "StridedSlice" else 6
    steps = {axis: own * int(np.prod([SIZES[each] for each in over[n:]])) for n, axis in enumerate(over, 1)}
    return {(1, 0): (own if op == "LessScalar" else 0, steps)}


def scatter(x, axes):
    return result("ReduceScatter", x, axes=axes, text='primitive_attrs: {op: "sum"}')


class Dispatch:
    """The types of one dispatch: nodes lie along `nodes`, the ranks of a node along `inner`."""

    def __init__(self, nodes: str, inner: str):
        self.nodes, self.inner = (nodes,), (inner,)
        own = Rows(((nodes, inner, TOKENS),), (("group",),), TOKENS)
        self.tokens = Spread((("a", "b", own), (WIDTH,)))
        self.shares = Spread((("a", "b", own), (COPIES,)))
        self.all = self.gather(self.shares)
        self.copies = TOKENS * SIZES[nodes] * COPIES
        self.sorted, self.order = result("Sort", self.flat(self.all), number=7)
        self.own = result("NonZero", self.bounds())
        counted = result("OneHot", self.flat(self.all), WIDE, plain(()), plain(()), -1, number=1)
        experts_of_node = WIDE // SIZES[nodes]
        self.counts = result("StridedSlice", counted, (0,), (experts_of_node,), of=(experts_of_node,), given=(WIDE,),
                             over=self.nodes)  # fmt: skip
        pieces = (OWN,) * SIZES[inner]
        self.received = result("AlltoAllV", self.counts, pieces, pieces, axes=self.inner)

    def gather(self, x):
        return result("AllGather", x, axes=self.nodes)

    def flat(self, x):
        return result("Reshape", x, of=(extent(x.dims[0]) * extent(x.dims[1]),))

    def bounds(self, over=None):
        first = result("GreaterEqual", self.sorted, 0, over=over or self.nodes)
        return result("LogicalAnd", first, result("LessScalar", self.sorted, 6, over=self.nodes))

    def sent(self, x):
        """Rows at the ranks of their experts, sorted by expert."""
        tokens = result("IndexSelect", result("FloorDiv", self.order, COPIES), 0, self.own)
        rows = result("IndexSelect", self.gather(x), 0, tokens, of=(-1, WIDTH))
        return result("AlltoAllV", rows, self.counts, self.received, axes=self.inner)

    def returned(self, x):
        """Rows back on the ranks of their node that gathered them."""
        return result("AlltoAllV", x, self.received, self.counts, axes=self.inner)

    def chosen(self):
        """The router's shares of the rows that a rank's node computes."""
        order = result("IndexSelect", self.flat(self.gather(self.shares)), 0, self.order, of=(self.copies,))
        return result("IndexSelect", order, 0, self.own, of=(-1,))

    def shares_alone(self):
        """The shares of a rank's own tokens, without those of the other nodes."""
        return result("IndexSelect", self.flat(self.shares), 0, self.order, of=(TOKENS * COPIES,))

    def back(self, x):
        tokens = result("IndexSelect", result("FloorDiv", self.order, COPIES), 0, self.own)
        zeros = multiply(self.gather(self.tokens), Zeros(()))
        return result("InplaceIndexAddExt", zeros, 0, tokens, x, of=(TOKENS * SIZES[self.nodes[0]], WIDTH))


def executed(nodes, inner, ids, x, shares, w, dy):
    """Return what each rank holds: the outputs before and after the sum over nodes, and the gradients of the weights
    and the shares.

    Args:
        ids, x, shares, w, dy: of each rank: experts of its tokens, tokens, shares, its experts' weights, gradients.
    """
    node_of, rank_of = (lambda e: e // (OWN * SIZES[inner])), (lambda e: e // OWN % SIZES[inner])
    groups = [along((nodes,), place) for place in RANKS]
    kept = []
    for number, place in enumerate(RANKS):
        flat = np.concatenate([ids[at] for at in groups[number]]).reshape(-1)
        order = np.argsort(flat, kind="stable")
        mine = order[node_of(flat[order]) == place[nodes]]
        kept.append((mine, flat[mine]))
    every = [[np.concatenate([each[at] for at in group]) for group in groups] for each in (x, shares, dy)]
    out = [np.zeros_like(each) for each in every[0]]
    share_gradients = [np.zeros(each.size) for each in every[1]]
    weights = [np.zeros((OWN, WIDTH, WIDTH)) for _ in RANKS]
    for number, place in enumerate(RANKS):  # the rows that come to a rank, of all ranks of its node
        for at in along((inner,), place):
            for copy, expert in zip(*kept[at], strict=True):
                if rank_of(expert) == place[inner]:
                    token, local = copy // COPIES, expert % OWN
                    made, share = every[0][at][token] @ w[number][local], every[1][at].reshape(-1)[copy]
                    out[at][token] += share * made
                    share_gradients[at][copy] += made @ every[2][at][token]
                    weights[number][local] += np.outer(every[0][at][token], share * every[2][at][token])

    def summed(parts):
        return [np.split(sum(parts[at] for at in groups[n]), len(groups[n]))[groups[n].index(n)] for n in range(6)]

    shaped = [each.reshape(-1, COPIES) for each in share_gradients]
    return out, summed(out), weights, summed(shaped)


@anything
def test_tokens_that_other_nodes_compute(random: Random) -> None:
    """Nodes lie along one axis and the ranks of a node along the other, in both orders."""
    nodes, inner = random.choice([("a", "b"), ("b", "a")])
    lies, share_lies = Spread((("a", "b", TOKENS), (WIDTH,))), Spread((("a", "b", TOKENS), (COPIES,)))
    cut = Spread(((nodes, inner, OWN), (WIDTH,), (WIDTH,)))
    x, shares, w, dy = (whole_of(each, random, n) for n, each in enumerate((lies, share_lies, cut, lies)))
    ids = np.random.default_rng(random.randrange(2**32)).integers(0, WIDE, shares.shape)
    held = [hold(*each, random) for each in ((share_lies, ids), (lies, x), (share_lies, shares), (cut, w), (lies, dy))]
    parts, outputs, weights, share_gradients = executed(nodes, inner, *held)

    types = Dispatch(nodes, inner)
    there = types.sent(types.tokens)
    made = result("GroupedMatmul", [there], [cut], *EMPTY, types.received, 3, 0, of=(-1, WIDTH))[0]
    weighted = multiply(result("ExpandDims", types.chosen(), 1), types.returned(made))
    added = types.back(weighted)
    assert added.partial == {nodes} and added.dims == types.gather(types.tokens).dims
    assert scatter(added, types.nodes) == types.tokens
    made_by_one = np.einsum("tw,tkwv->tkv", x, w[ids])
    wanted = (shares[..., None] * made_by_one).sum(1)
    assert describes(lies, wanted, outputs)
    lie = hold(lies, wanted, random)
    for place in RANKS:  # the parts over nodes add up to all gathered tokens
        group = along((nodes,), place)
        assert np.allclose(sum(parts[at] for at in group), np.concatenate([lie[at] for at in group]))

    gradient_rows = types.sent(types.tokens)
    found = result("GroupedMatmul", [result("Transpose", there, (1, 0))], [gradient_rows], *EMPTY, types.received, 3, 2,
                   of=(OWN, WIDTH, WIDTH))[0]  # fmt: skip
    whole = np.zeros((WIDE, WIDTH, WIDTH))
    share_whole = np.zeros(shares.shape)
    for t, k in np.ndindex(*ids.shape):
        whole[ids[t, k]] += np.outer(x[t], shares[t, k] * dy[t])
        share_whole[t, k] = made_by_one[t, k] @ dy[t]
    assert found == cut and describes(found, whole, weights)

    one = Spread(types.chosen().dims)
    sorted_copies = result("InplaceIndexAddExt", Zeros(()), 0, types.own, one, of=(types.copies,))
    copies = result("InplaceIndexAddExt", Zeros(()), 0, types.order, sorted_copies, of=(types.copies,))
    tokens = result("Reshape", copies, of=(types.copies // COPIES, COPIES))
    assert tokens.partial == {nodes} and scatter(tokens, types.nodes) == types.shares
    assert describes(share_lies, share_whole, share_gradients)


def test_a_dispatch_between_nodes_that_is_not_undone_is_refused():
    types = Dispatch("a", "b")
    rows, all_tokens = types.returned(types.sent(types.tokens)), types.gather(types.tokens)
    with pytest.raises(Contradiction, match="a sum over a adds different pieces"):
        scatter(
            replace(types.gather(types.tokens), dims=(("a", *types.gather(types.tokens).dims[0]), (WIDTH,))), ("a",)
        )
    with pytest.raises(Contradiction, match="not the rows that were gathered over the same ranks"):
        scatter(types.back(rows), ("b",))
    with pytest.raises(Contradiction, match="over which they are not cut"):
        result("AllGather", all_tokens, axes=("a",))
    with pytest.raises(Contradiction, match="put back into other rows"):
        types.back(types.sent(types.tokens))
    with pytest.raises(Contradiction, match="differ along different axes"):
        types.bounds(over="b")
    with pytest.raises(Contradiction, match="not gathered over these ranks"):
        result("IndexSelect", types.shares_alone(), 0, types.own, of=(-1,))
    with pytest.raises(Contradiction, match="4 of 12 experts"):
        result("StridedSlice", Order(("counts", 1)), (0,), (4,), of=(4,), given=(12,), over="a")
    with pytest.raises(Contradiction, match="2 pieces over b"):
        result("AlltoAllV", types.counts, (3, 3), (3, 3), axes=("b",))
    with pytest.raises(Contradiction, match="rows are exchanged over a, b, but experts are cut over b"):
        result("GroupedMatmul", [types.sent(types.tokens)], [Spread((("b", OWN), (WIDTH,), (WIDTH,)))], *EMPTY,
               types.received, 3, 0)  # fmt: skip


def test_forms_of_orders_that_no_dispatch_has_are_unknown():
    types = Dispatch("a", "b")
    for op, values in (("GreaterEqual", (types.order, 0)), ("LogicalAnd", (types.own, types.own)),
                       ("NonZero", (types.sorted,)), ("IndexSelect", (types.own, 0, types.own)),
                       ("StridedSlice", (types.received, (0,), (1,))), ("NonZero", (plain((4,)),)),
                       ("AlltoAllV", (types.counts, (1, 2, 3), (1, 2, 3)))):  # fmt: skip
        with pytest.raises(NotKnown):
            result(op, *values, axes=("b",))
    with pytest.raises(NotKnown, match="constants differ along a"):
        result("FloorDiv", types.order, COPIES, over="a")


@anything
def test_gradients_of_factors_that_were_repeated(random: Random) -> None:
    """The axes that ShapeCalc names for a sum are those of NumPy's broadcasting, on each rank."""
    shape = [random.choice([1, 2]), random.choice([1, 3])]
    x = some_spread(random, shape, partial=False, powers=False)
    y = some_spread(random, [random.choice([size, 1]) for size in shape], partial=False, powers=False)
    told = result("ShapeCalc", x, y, text="functor: Functor[ShapeCalc_BroadcastGradientArgs]{0}")
    large = np.broadcast_shapes(x.shape, y.shape)
    for own, axes in zip((x, y), told, strict=True):
        assert np.ones(large).sum(axes, keepdims=True).shape == own.shape
    given = some_spread(random, list(large))
    rule = lambda g: result("ReduceSum", g, told[0], True, True, of=x.shape)  # noqa: E731
    check(rule, lambda g: g.sum(told[0], keepdims=True), [given], random)


@anything
def test_sums_along_a_dimension_and_products_with_zero(random: Random) -> None:
    given = some_spread(random, [2, 3])
    axis = random.choice([0, 1])
    check(lambda x: result("CumSum", x, axis, False, False), lambda x: np.cumsum(x, axis), [given], random)
    assert result("ExpandAs", given, given) == given
    zero = multiply(given, Zeros(()))
    assert isinstance(zero, Zeros) and zero.shape == given.shape


def test_what_is_not_written_out_in_a_repetition_is_unknown():
    x = Spread((("a", 4), (2,)))
    with pytest.raises(NotKnown, match="repeated to the size"):
        result("ExpandAs", x, plain((8, 2)))
    with pytest.raises(NotKnown, match="only for the dimensions of a broadcast"):
        result("ShapeCalc", x, x)


def test_every_weight_of_a_step_with_nodes_is_proven():
    found = prove_rank(STEP[0], typing_of(*STEP), {})
    assert not found.contradictions and not found.missing and found.typed == found.asked > 4000
    assert Counter(weight.verdict for weight in found.weights) == {"proven": 60}
    spreads = {weight.kind: weight.spread for weight in found.weights}
    assert spreads["decoder.layers.*.mlp.experts.weight1"] == "[dp.1*tp*512, 128]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "every rank keeps the rows of the first node",
        "rows exchanged by the counts of the way back",
        "forward: sum and scatter over another group",
    ],
)
def test_faults_of_a_dispatch_between_nodes_are_found(kind, monkeypatch):
    places, plant = faults(STEP[1], STEP[3])[kind]
    inside = [place for place in places if re.search("token_dispatcher", root(STEP[1])[place].source)]
    monkeypatch.setattr("benchmarks.planted_spreads.faults", lambda *_: {kind: (inside, plant)})
    (told,) = examine(*STEP, 1)[kind]
    assert told in (NAMED, ELSEWHERE)
