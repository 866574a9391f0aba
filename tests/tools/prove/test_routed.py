"""The dispatch of `plugins.hierarchical_ep` between nodes: what ranks exchange must fit, step by step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tools.dryrun.graph_text import Node
from tools.prove import rules
from tools.prove.call import Call, Order
from tools.prove.spread import Contradiction, NotKnown, Rows, Spread, Zeros, plain

SIZES = {"a": 2, "b": 3}
NODES, INNER = ("a",), ("b",)
TOKENS, WIDTH, EXPERTS_OF_NODE = 4, 2, 8
GROUPED = Spread((("a", "b", Rows(((("a", "b"), TOKENS),), (("group",),), TOKENS)), (WIDTH,)))
PIECE = plain((TOKENS // 2,))  # the tokens of a chunk, written out in the graph
EMPTY = (None,) * 5


def result(op, *values, of=(), dtype="Float32", over=(), axes=(), number=0, text="", scope="", backwards=False):
    """Return what the rules give for an operator; its output has the shape `of`, and a constant
    differs along `over`.
    """
    types = ("()", f"(<Tensor[{dtype}], ({', '.join(map(str, of))})>)")
    node = Node(op, f"{op}(%0)", f"{op}(%0) {text}", [], scope=scope, types=types)
    steps, far = {}, EXPERTS_OF_NODE * (-1 if backwards else 1)
    for axis in [axis for axis in reversed(SIZES) if axis in over]:
        steps[axis], far = far, far * SIZES[axis]
    differs = {(1, 0): frozenset(over)} if over else {}
    return rules.apply(Call(node, number, values, SIZES, differs, axes, offsets={(1, 0): (0, steps)} if over else {}))


def integers(op, *values, of=(-1,), **how):
    return result(op, *values, of=of, dtype="Int32", **how)


def counted(choice, axes, number):
    """The counts that a rank sends by its choices, and those that it receives."""
    sent = result("ReduceSum", choice, (0,), False, False, of=(3,), number=number)
    return sent, result("AlltoAll", sent, axes=axes, of=(3, 1))


def away(nodes=NODES, inner=INNER, first=NODES):
    """A chunk's rows, from the tokens to the experts; a node's first expert differs along the axes `first`."""
    chunk = result("IndexSelect", GROUPED, 0, PIECE, of=(TOKENS // 2, WIDTH))
    start = integers("Cast", chunk, 34, of=(TOKENS // 2, WIDTH))
    sent, got = counted(start, nodes, 1)
    at_node = result("AlltoAllV", result("IndexSelect", chunk, 0, start, of=(-1, WIDTH)), sent, got, axes=nodes)
    there = integers("Sub", integers("Cast", at_node, 34), 0, over=first)
    sent_on, got_on = counted(there, inner, 2)
    copies = result("AlltoAllV", result("IndexSelect", at_node, 0, there, of=(-1, WIDTH)), sent_on, got_on, axes=inner)
    return SimpleNamespace(
        chunk=chunk, start=start, there=there, copies=copies, out=(sent, got), on=(sent_on, got_on), inner=inner
    )


def product(way, weights):
    return result("GroupedMatmul", [way.copies], [weights], *EMPTY, way.on[1], 3, 0, of=(-1, WIDTH))[0]


def home(way, made):
    """The chunk's rows behind their experts, on the rank of their tokens."""
    (sent, got), (sent_on, got_on) = way.out, way.on
    pairs = result("AlltoAllV", made, got_on, sent_on, axes=INNER)
    summed = result("IndexAdd", Zeros(()), way.there, pairs, of=(-1, WIDTH))
    back = result("AlltoAllV", summed, got, sent, axes=NODES)
    return result("IndexAdd", Zeros(()), way.start, back, of=(TOKENS // 2, WIDTH))


EXPERTS = Spread((("a", "b", 2), (WIDTH,), (WIDTH,)))


def test_two_chunks_go_to_their_experts_and_come_back_as_the_tokens_that_they_were():
    way = away()
    chunk = home(way, product(way, EXPERTS))
    assert chunk == way.chunk
    whole = result("Concat", [chunk, chunk], 0, of=(TOKENS, WIDTH))
    assert result("IndexSelect", whole, 0, plain((TOKENS,)), of=(TOKENS, WIDTH)) == GROUPED
    (gradient,) = result("GroupedMatmul", [replaced(way)], [way.copies], *EMPTY, way.on[1], 3, 2, of=(2, WIDTH, WIDTH))
    assert gradient == EXPERTS  # the ranks that share tokens are exactly those over which the experts are cut


def test_whole_tokens_go_to_the_nodes_that_need_them_without_chunks():
    """Mode `deduplicated`: tokens of several samples, whose grouping the graph does not show, go to the nodes."""
    scope = "Default/mlp-MoELayer/experts-RoutedExperts/layer-RoutedLayer/rows-Rows/IndexSelect-op1"
    tokens = Spread((("a", 2), ("b", TOKENS), (WIDTH,)))
    grouped = result("Reshape", tokens, (1, -1, WIDTH), of=(1, 2 * TOKENS, WIDTH))
    rows = result("Reshape", grouped, (-1, WIDTH), of=(2 * TOKENS, WIDTH))
    matrix = result("Reshape", tokens, (-1, WIDTH), of=(2 * TOKENS, WIDTH))
    choice = integers("Cast", rows, 34, of=(2 * TOKENS, WIDTH), scope=scope)
    sent, got = counted(choice, NODES, 1)
    for x in (rows, matrix):
        own = result("IndexSelect", x, 0, choice, of=(-1, WIDTH), scope=scope)
        back = result("AlltoAllV", result("AlltoAllV", own, sent, got, axes=NODES), got, sent, axes=NODES)
        assert result("IndexAdd", Zeros(()), choice, back, of=(2 * TOKENS, WIDTH)) == rows
    assert isinstance(integers("Cast", rows, 34, of=(2 * TOKENS, WIDTH), scope="Default/other/Cast"), Spread)
    for x in (rows, matrix):  # a sum that is still missing is not forgotten
        unsummed = replace(x, partial=frozenset("c"))
        with pytest.raises((NotKnown, AssertionError)):
            found = result("Mul", unsummed, choice, of=(2 * TOKENS, WIDTH), scope=scope)
            assert isinstance(found, Spread) and found.partial == {"c"}
            raise NotKnown("it is kept")


def replaced(way):
    """The copies as the first argument of the product for a weight's gradient: turned."""
    return Spread(((WIDTH,), way.copies.dims[0]))


def test_a_nodes_first_expert_is_the_one_behind_those_of_the_nodes_before_it():
    with pytest.raises(Contradiction, match="starts -8 elements further"):
        integers("Sub", away().start, 0, over=NODES, backwards=True)


def test_a_nodes_first_expert_must_differ_along_the_nodes():
    for first in ((), INNER, NODES + INNER):
        with pytest.raises(Contradiction, match="first expert of a node"):
            away(first=first)


def gathered(x, axes=NODES, of=(TOKENS, WIDTH)):
    waited = result("Depend", x, plain(()), of=x.shape, scope="Default/first-Gather/gather-InTurn/enter-_Enter/Depend")
    return result("AllGather", waited, of=of, axes=axes)


def scattered(x, axes=NODES, of=(TOKENS // 2, WIDTH), op="sum"):
    return result("ReduceScatter", x, of=of, axes=axes, text=f'primitive_attrs: {{op: "{op}"}}')


def through_nodes(start, axes=NODES, first=NODES):
    """Mode `hierarchical`: rows that every node gathers, their experts' results, and what decides where they went."""
    rows = gathered(start, axes)
    there = integers("Sub", integers("Cast", rows, 34), 0, over=first)
    sent, got = counted(there, INNER, 2)
    copies = result("AlltoAllV", result("IndexSelect", rows, 0, there, of=(-1, WIDTH)), sent, got, axes=INNER)
    made = result("GroupedMatmul", [copies], [EXPERTS], *EMPTY, got, 3, 0, of=(-1, WIDTH))[0]
    pairs = result("AlltoAllV", made, got, sent, axes=INNER)
    return result("IndexAdd", Zeros(()), there, pairs, of=(TOKENS, WIDTH)), copies


@pytest.mark.parametrize("chunk", [True, False])
def test_gathered_rows_come_back_from_their_nodes_experts_by_the_sum_over_the_same_ranks(chunk):
    start, many = (away().chunk, TOKENS // 2) if chunk else (GROUPED, TOKENS)
    summed, _ = through_nodes(start)
    assert scattered(summed, of=(many, WIDTH)) == start
    for wrong in (INNER, NODES + INNER):
        with pytest.raises(Contradiction, match="gathered over the same ranks"):
            scattered(summed, wrong, of=(many, WIDTH))
    with pytest.raises(NotKnown, match="that add"):
        scattered(summed, of=(many, WIDTH), op="max")
    with pytest.raises(Contradiction, match="gathered over the same ranks"):
        scattered(start, of=(many // 2, WIDTH))


def test_rows_whose_tokens_are_not_seen_grouped_are_those_of_the_router():
    """The compiler makes one reshape of two. Outside of the dispatch such a matrix keeps the places of its tokens."""
    tokens = Spread((("a", 2), ("b", TOKENS), (WIDTH,)))
    grouped = result("Reshape", tokens, (1, -1, WIDTH), of=(1, 2 * TOKENS, WIDTH))
    rows = result("Reshape", grouped, (-1, WIDTH), of=(2 * TOKENS, WIDTH))
    matrix = result("Reshape", tokens, (-1, WIDTH), of=(2 * TOKENS, WIDTH))
    assert matrix.dims[0] == ("a", 2, "b", TOKENS) and matrix != rows
    scope = "Default/mlp-MoELayer/experts-PlacedDispatch/layer-RoutedLayer/rows-Rows/IndexSelect-op1"
    taken = [result("IndexSelect", x, 0, plain((3,)), of=(3, WIDTH), scope=scope) for x in (rows, matrix)]
    assert taken[0] == taken[1]
    whole = result("IndexSelect", taken[1], 0, plain((2 * TOKENS,)), of=(2 * TOKENS, WIDTH), scope=scope)
    assert result("Reshape", whole, (2, TOKENS, WIDTH), of=(2, TOKENS, WIDTH)) == tokens
    with pytest.raises(NotKnown):
        result("IndexSelect", matrix, 0, plain((3,)), of=(3, WIDTH))
    other = replace(matrix, merged=(("a", 2 * TOKENS), ("b",)))  # of another value
    with pytest.raises(NotKnown):
        result("IndexSelect", other, 0, plain((3,)), of=(3, WIDTH), scope=scope)


def test_rows_of_one_sample_become_grouped_tokens_and_not_samples():
    """[1, tokens, width] has the shape of both. The gradient of the router's probabilities was called a violation."""
    of = (1, TOKENS, WIDTH)
    tokens = Spread((("a",), ("b", TOKENS), (WIDTH,)))
    rows = Spread((("a", "b", Rows(tokens.dims[:2], (("group",),), TOKENS)), (WIDTH,)))
    found = result("Reshape", rows, (1, -1, WIDTH), of=of)
    assert found.dims[:2] == (("a", "b"), rows.dims[0][2:])


def test_gathered_rows_are_compared_with_their_own_nodes_experts_and_not_added_before_they_left_the_node():
    for first in ((), INNER, NODES + INNER):
        with pytest.raises(Contradiction, match="first expert of a node"):
            through_nodes(away().chunk, first=first)
    with pytest.raises(Contradiction, match="first expert of a node"):
        through_nodes(away().chunk, INNER)  # gathered inside of the nodes
    _, copies = through_nodes(away().chunk)
    with pytest.raises(Contradiction, match="gathered over the same ranks"):
        scattered(copies)  # they are still with their experts
    over = replace(away().chunk, dims=(("b", away().chunk.dims[0][-1]), (WIDTH,)), partial=frozenset("a"))
    with pytest.raises(Contradiction, match="over which they are not cut"):
        gathered(over)


def test_a_nodes_rows_that_came_without_an_exchange_are_unknown():
    chunk = result("IndexSelect", GROUPED, 0, PIECE, of=(TOKENS // 2, WIDTH))
    there = integers("Sub", integers("Cast", chunk, 34, of=(TOKENS // 2, WIDTH)), 0, over=NODES)
    with pytest.raises(NotKnown, match="neither by an exchange"):
        counted(there, INNER, 1)


def test_experts_must_be_cut_over_the_ranks_to_which_rows_went():
    for axes in (("b", "a"), ("b",), ()):
        with pytest.raises(Contradiction, match="experts are cut over"):
            product(away(), Spread(((*axes, 2), (WIDTH,), (WIDTH,))))


def test_the_way_back_must_take_the_exchanges_in_the_opposite_order_over_the_same_ranks():
    way = away()
    made = product(way, EXPERTS)
    with pytest.raises(Contradiction, match="not come back in the way"):
        result("AlltoAllV", made, *way.out[::-1], axes=NODES)  # past the node
    with pytest.raises(Contradiction, match="not the counts that the other ranks send"):
        result("AlltoAllV", made, way.on[1], way.out[0], axes=INNER)
    with pytest.raises(Contradiction, match="not the counts that the other ranks send"):
        result("AlltoAllV", made, *way.on[::-1], axes=NODES)
    again = result("AlltoAllV", made, *way.on, axes=INNER)  # as on the way to the experts
    with pytest.raises(Contradiction):
        home(way, again)


def test_rows_are_not_taken_by_the_choices_of_other_rows():
    way = away()
    with pytest.raises(Contradiction, match="choices of other rows"):
        result("IndexSelect", way.copies, 0, way.start, of=(-1, WIDTH))
    with pytest.raises(Contradiction, match="different rows"):
        integers("Maximum", way.start, way.there)


def test_rows_that_came_in_different_ways_are_not_joined():
    way = away()
    with pytest.raises(Contradiction, match="different ways"):
        result("Concat", [way.chunk, way.copies], 0, of=(-1, WIDTH))


def test_what_is_no_part_of_the_dispatch_is_unknown():
    way = away()
    with pytest.raises(NotKnown):
        result("ReduceSum", way.copies, (0,), False, False, of=(WIDTH,))
    with pytest.raises(NotKnown):
        result("Tile", way.copies, (2, 1), of=(-1, WIDTH))
    with pytest.raises(NotKnown):
        result("IndexAdd", way.chunk, way.start, way.chunk, of=(-1, WIDTH))


def test_a_table_of_places_is_read_where_it_is_the_same_on_all_ranks():
    ids = Spread((("a", 4), (2,)))
    assert integers("Gather", plain((12,)), ids, 0, 0, of=(4, 2)) == ids
    with pytest.raises(NotKnown):
        integers("Gather", Spread((("b", 4),)), ids, 0, 0, of=(4, 2))
    assert Order(("shape",)) == result("Shape", away().start)
