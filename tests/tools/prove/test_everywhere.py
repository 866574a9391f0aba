"""Contradictions that remain for every place of loose pieces, and those that a right graph may have for some places."""

import pytest

from tests.tools.prove.test_typing import node
from tools.dryrun.graph_text import read_graph
from tools.prove.everywhere import again, first_loose, remains
from tools.prove.frame import Failure
from tools.prove.mesh import Peers, mesh_of
from tools.prove.spread import Spread
from tools.prove.typing import Typing


@pytest.mark.parametrize("whole", [True, False])
def test_a_contradiction_that_remains_wherever_loose_pieces_lie_is_one(tmp_path, whole):
    """The maximum of each rank's part of the vocabulary is taken for that of the whole, unless the pieces lie in the
    dimension of one element. A product with a value whose pieces certainly lie in the vocabulary rules that out.
    """
    t2, t3, t1 = (f"<Tensor[Float32], ({sizes})>" for sizes in ("4, 8", "4, 1, 8", "4, 1, 1"))
    pair = f"<Tuple[Tensor[Int64],Tensor[Float32]], TupleShape({t1[18:-1]}, {t1[18:-1]})>"
    lines = [
        node(0, "Load(%para1_logits, UMonad[U])", t2, t2),
        node(1, "Reshape(%0, (I64(4), I64(1), I64(8)))", f"{t2}, <null>", t3),
        node(2, "PrimFunc_ArgMaxWithValue(%1, I64(2), Bool(1))", f"{t3}, <null>, <null>", pair),
        node(3, "TupleGetItem(%2, I64(1))", pair, t1),
        node(4, "PrimFunc_SubExt(%1, %3, I64(1))", f"{t3}, {t1}, <null>", t3),
        node(5, "PrimFunc_Mul(%4, %para2_other)", f"{t3}, {t3}", t3),
    ]
    text = f"subgraph @0_Step(%para1_logits, %para2_other) {{\n{''.join(lines)}}}\n"
    (tmp_path / "step.ir").write_text(f"# IR entry: @0_Step\n{text}", encoding="utf-8")
    read = read_graph(tmp_path / "step.ir")
    given = {"logits": Spread(((4,), ("tp", 8))), "other": Spread(((4,), ("tp",), (8,)))}
    if whole:
        given["other"] = Spread(((4,), (), ("tp", 8)))
    own = Typing(read, mesh_of([("tp", 2)], []), given.__getitem__, {}.get, Peers(read, {}))
    failed = own.of(5)
    assert not failed.contradicts and failed.loose == {"tp"} and failed.number == 4
    remaining = remains(own, lambda tried: tried.of(5))
    assert remaining == (failed if whole else None)


@pytest.mark.parametrize("how", ["call", "closure", "Split"])
def test_a_right_sum_of_loose_pieces_stays_unknown(tmp_path, how):
    """Heads become a dimension, of which each rank has one: their sum is partial, and not cut in another dimension."""
    t2, t3 = "<Tensor[Float32], (4, 8)>", "<Tensor[Float32], (4, 1, 8)>"
    half = "<Tensor[Float32], (2, 1, 8)>" if how == "Split" else t3
    pair = "<Tuple[Tensor[Float32]*2], TupleShape((2, 1, 8), (2, 1, 8))>"
    add = ["PrimFunc_SumExt({}, (I64(1)), Bool(1), None)", 'AllReduce({}) primitive_attrs: {{group: "tp", op: "sum"}}']
    root = [
        node(0, "Load(%para1_heads, UMonad[U])", t2, t2),
        node(1, "Reshape(%0, (I64(4), I64(1), I64(8)))", f"{t2}, <null>", t3),
    ]
    if how == "Split":
        root += [
            node(2, "PrimFunc_Split(%1, I64(0), I64(2))", f"{t3}, <null>, <null>", pair),
            node(3, "TupleGetItem(%2, I64(0))", f"{pair}, <null>", half),
            node(4, add[0].format("%3"), half, half),
            node(5, add[1].format("%4"), half, half),
        ]
    elif how == "call":
        root.append(node(2, "call @2_f(%1)", t3, t3))
    else:
        root += [node(2, "Partial(@2_f, %1)", t3, ""), node(3, "%2[@2_f]()", "", t3)]
    inner = [node(0, add[0].format("%para2_x"), t3, t3), node(1, add[1].format("%0"), t3, t3)]
    text = f"subgraph @1_Step(%para1_heads) {{\n{''.join(root)}}}\nsubgraph @2_f(%para2_x) {{\n{''.join(inner)}}}\n"
    (tmp_path / "step.ir").write_text(f"# IR entry: @1_Step\n{text}", encoding="utf-8")
    read, given = read_graph(tmp_path / "step.ir"), {"heads": Spread(((4,), ("tp", 8)))}
    own = Typing(read, mesh_of([("tp", 2)], []), given.__getitem__, {"tp": (0, 1)}.get, Peers(read, {}))
    last = len(root) - 1
    assert isinstance(own.of(last), Failure) and own.of(last).loose == {"tp"}
    assert remains(own, lambda tried: tried.of(last)) is None
    assert isinstance(again(own, {("1_Step", 1): (((4,), ("tp",), (8,)), frozenset({"tp"}))}).of(last), Spread), (
        "the graph is right"
    )


def one_graph(tmp_path, lines, given, sizes, more=""):
    """Return the typing of a root graph of these operators with these parameters, whose loose pieces are uncertain."""
    parameters = ", ".join(f"%para{number}_{name}" for number, name in enumerate(given, 1))
    text = f"subgraph @1_Step({parameters}) {{\n{''.join(lines)}}}\n{more}"
    (tmp_path / "step.ir").write_text(f"# IR entry: @1_Step\n{text}", encoding="utf-8")
    read, mesh = read_graph(tmp_path / "step.ir"), mesh_of(sizes, [])
    groups = {axis: tuple(stride * place for place in range(2)) for axis, stride in mesh.strides.items()}
    return Typing(read, mesh, given.__getitem__, groups.get, Peers(read, {}))


def test_pieces_of_one_element_may_be_parts_of_a_sum_that_the_graph_does_not_show(tmp_path):
    """If a rank has one head or one sample, the graph has no operator for the sum over heads or samples."""
    t2, t3, total = "<Tensor[Float32], (4, 8)>", "<Tensor[Float32], (4, 1, 8)>", "AllReduce({}) primitive_attrs: {}"
    heads = [
        node(0, "Load(%para1_x, UMonad[U])", t2, t2),
        node(1, "Reshape(%0, (I64(4), I64(1), I64(8)))", f"{t2}, <null>", t3),
        node(2, total.format("%1", '{group: "tp", op: "sum"}'), t3, t3),
    ]
    own = one_graph(tmp_path, heads, {"x": Spread(((4,), ("tp", 8)))}, [("tp", 2)])
    assert own.of(2).loose and remains(own, lambda tried: tried.of(2)) is None
    half, pair = "<Tensor[Float32], (2, 1, 8)>", "<Tuple[Tensor[Float32]*2], TupleShape((2, 1, 8), (2, 1, 8))>"
    split = [
        *heads[:2],
        node(2, "PrimFunc_Split(%1, I64(0), I64(2))", f"{t3}, <null>, <null>", pair),
        node(3, "TupleGetItem(%2, I64(0))", f"{pair}, <null>", half),
        node(4, total.format("%3", '{group: "tp", op: "sum"}'), half, half),
    ]
    own = one_graph(tmp_path, split, {"x": Spread(((4,), ("tp", 8)))}, [("tp", 2)])
    assert own.of(4).loose and remains(own, lambda tried: tried.of(4)) is None
    for add, what in (("PrimFunc_Add(%1, %para2_y)", t2), ("PrimFunc_AddN(%2)", f"<Tuple[{t2}*2]>")):
        summed = [
            node(0, "Load(%para1_x, UMonad[U])", t3, t3),
            node(1, "Reshape(%0, (I64(4), I64(8)))", f"{t3}, <null>", t2),
            node(2, "MakeTuple(%1, %para2_y)", f"{t2}, {t2}", f"<Tuple[{t2}*2]>"),
            node(3, add, what, t2),
        ]
        both = {"x": Spread(((4,), ("tp",), (8,))), "y": Spread(((4,), (8,)), frozenset({"tp"}))}
        own = one_graph(tmp_path, summed, both, [("tp", 2)])
        assert own.of(3).loose and remains(own, lambda tried: tried.of(3)) is None
    samples = [
        node(0, "Load(%para1_x, UMonad[U])", t2, t2),
        node(1, "Reshape(%0, (I64(4), I64(1), I64(8)))", f"{t2}, <null>", t3),
        node(2, "MakeTuple(%1, %para2_y)", f"{t3}, {t3}", f"<Tuple[{t3}*2]>"),
        node(3, "PrimFunc_AddN(%2)", f"<Tuple[{t3}*2]>", t3),
    ]
    both = {"x": Spread(((4,), ("tp", 8))), "y": Spread(((4,), (), (8,)), frozenset({"tp"}))}
    own = one_graph(tmp_path, samples, both, [("tp", 2)])
    assert own.of(3).loose and remains(own, lambda tried: tried.of(3)) is None


@pytest.mark.parametrize("alike", [True, False])
def test_calls_of_a_graph_may_have_their_loose_pieces_in_different_places(tmp_path, alike):
    """In both calls the pieces lie in the only place that fits: for the first, in the heads, for the second, before
    them.
    """
    t2, t3, t1 = (f"<Tensor[Float32], ({sizes})>" for sizes in ("4, 8", "4, 1, 8", "4, 1, 1"))
    pair = f"<Tuple[Tensor[Int64],Tensor[Float32]], TupleShape({t1[18:-1]}, {t1[18:-1]})>"
    inner = [
        node(0, "Reshape(%para11_a, (I64(4), I64(1), I64(8)))", f"{t2}, <null>", t3),
        node(1, "PrimFunc_ArgMaxWithValue(%0, I64(2), Bool(1))", f"{t3}, <null>, <null>", pair),
        node(2, "TupleGetItem(%1, I64(1))", pair, t1),
        node(3, "PrimFunc_SubExt(%0, %2, I64(1))", f"{t3}, {t1}, <null>", t3),
        node(4, "PrimFunc_Mul(%3, %para12_b)", f"{t3}, {t3}", t3),
    ]
    root = [
        node(0, "Load(%para1_x, UMonad[U])", t2, t2),
        node(1, "Load(%para2_y, UMonad[U])", t2, t2),
        node(2, "call @2_f(%0, %para3_b)", f"{t2}, {t3}", t3),
        node(3, "call @2_f(%1, %para4_c)", f"{t2}, {t3}", t3),
        node(4, "MakeTuple(%2, %3)", f"{t3}, {t3}", ""),
    ]
    cut, before = Spread(((4,), ("tp", 8))), Spread(((4, "tp"), (8,)))
    given = {
        "x": cut,
        "y": cut if alike else before,
        "b": Spread(((4,), ("tp",), (8,))),
        "c": Spread(((4, "tp"), (), (8,))),
    }
    more = f"subgraph @2_f(%para11_a, %para12_b) {{\n{''.join(inner)}}}\n"
    own = one_graph(tmp_path, root, given, [("tp", 2)], more)
    own.of(4)
    remaining = remains(own, lambda tried: tried.of(4))
    assert (remaining is not None) == alike and any(each.loose for each in own.failures.values())


def test_pieces_are_tried_in_every_place_that_they_can_have_together_with_other_loose_pieces(tmp_path):
    """The place of the pieces over dp in front of them is a guess, too, and must not rule out dimension 0."""
    t3, t4 = "<Tensor[Float32], (4, 1, 8)>", "<Tensor[Float32], (4, 1, 1, 8)>"
    lines = [
        node(0, "Load(%para1_x, UMonad[U])", t3, t3),
        node(1, "Reshape(%0, (I64(4), I64(1), I64(1), I64(8)))", f"{t3}, <null>", t4),
        node(2, 'AllReduce(%1) primitive_attrs: {group: "tp", op: "sum"}', t4, t4),
    ]
    own = one_graph(tmp_path, lines, {"x": Spread(((4,), ("dp",), ("tp", 8)))}, [("tp", 2), ("dp", 2)])
    assert own.of(1).dims == ((4,), ("dp",), (), ("tp", 8)) and own.of(1).loose == {"dp", "tp"}
    assert own.of(2).loose == {"tp"}
    operator, ways = first_loose(own, own.of(2))
    places = [[number for number, dim in enumerate(dims) if "tp" in dim] for dims in ways]
    assert operator == ("1_Step", 1) and sorted(places) == [[0], [1], [2], [3]]
    tried = again(own, {operator: (ways[places.index([0])], frozenset({"tp"}))})
    assert tried.of(1).dims[0] == (4, "dp", "tp") and tried.of(1).loose == {"dp"}
