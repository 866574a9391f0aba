"""A pipeline's graph: passes of micro-batches are called, return closures, and exchange values with other stages.

The axes of a mesh, and what lies along them.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.prove.test_spread import SIZES, anything, describes, hold, shape, some_spread, whole_of
from tools.dryrun.gradients import copies_of
from tools.dryrun.graph_text import Node, read_graph
from tools.prove import moves
from tools.prove.frame import Failure, Frame
from tools.prove.mesh import FAR, Peers, mesh_of, runs
from tools.prove.origin import since
from tools.prove.places import outside, total_of
from tools.prove.report import type_stages, typing_of
from tools.prove.spread import Contradiction, NotKnown, Spread, _settled, joined, placements, plain, tidy
from tools.prove.typing import Typing

CUT = Spread((("dp", 4), (8,)))
T48, T88 = "<Tensor[Float32], (4, 8)>", "<Tensor[Float32], (8, 8)>"
HALF = "PrimFunc_RealDiv({}, Tensor(shape=[], dtype=Float32, value=2))"
ACCU = "<Ref[Tensor[Float32]], (8, 8), ref_key=accu_grads.w, is_parameter>"


def node(number, text, given, gives, scope="Default"):
    return f"  %{number}(x) = {text}\n      : ({given}) -> ({gives})\n      # Fullname with scope: ({scope}/x)\n"


def graph(own, tmp_path, first=True, added="%0", more=()):
    """Return the graph of one stage with one micro-batch; its input comes from the data or from the stage before."""
    forward = [
        node(0, "PrimFunc_MatMul(%para11_x, %para12_w, Bool(0), Bool(1))", f"{T48}, {T88}", T48),
        node(1, "Partial(@2_◂Step, %para11_x, %para13_accu)", f"{T48}, {ACCU}", ""),
        node(2, "MakeTuple(%0, %1)", T48, ""),
    ]
    backward = [
        node(0, "PrimFunc_MatMul(%para23_dout, %para21_x, Bool(1), Bool(0))", f"{T48}, {T48}", T88),
        node(1, f"PrimFunc_AssignAdd(%para22_accu, {added})", f"{ACCU}, {T88}", ACCU),
        node(2, "Depend(%para23_dout, %1)", T48, T48),
    ]
    root = [
        node(0, "Load(%para1_inputs0, UMonad[U])" if first else "Receive(%para1_inputs0)", T48, T48),
        node(1, "call @1_▸Step(%0, %para2_w, %para3_accu_grads.w)", f"{T48}, {T88}, {ACCU}", ""),
        node(2, "TupleGetItem(%1, I64(0))", "", T48),
        node(3, "TupleGetItem(%1, I64(1))", "", ""),
        node(4, "Send(%2)" if first else "TensorMove(%2)", T48, T48),
        node(5, "Receive(%4)" if first else "TensorMove(%4)", T48, T48, "Gradients/Default"),
        node(6, "%3[@Partial(@2_◂Step)](%5)", T48, T48),
        node(7, "TensorMove(%6)" if first else "Send(%6)", T48, T48, "Gradients/Default"),
        node(8, "Depend(%para3_accu_grads.w, %7)", f"{ACCU}, {T48}", ACCU),
        node(9, 'AllReduce(%8) primitive_attrs: {group: "dp", op: "sum"}', ACCU, T88),
        *more,
    ]
    text = "# IR entry: @0_Step\n"
    text += f"subgraph @1_▸Step(%para11_x, %para12_w, %para13_accu) {{\n{''.join(forward)}}}\n"
    text += f"subgraph @2_◂Step(%para21_x, %para22_accu, %para23_dout) {{\n{''.join(backward)}}}\n"
    text += f"subgraph @0_Step(%para1_inputs0, %para2_w, %para3_accu_grads.w) {{\n{''.join(root)}}}\n"
    file = tmp_path / f"{own}.ir"
    file.write_text(text, encoding="utf-8")
    return read_graph(file)


def typing(read, received=None):
    layouts = {"inputs0": CUT, "w": plain((8, 8))}

    def parameter(name):
        if name not in layouts:
            raise NotKnown(name)
        return layouts[name]

    mesh = mesh_of([("dp", 2)], [])
    return Typing(read, mesh, parameter, {"dp": (0, 1)}.get, Peers(read, {}), received)


def test_a_gradient_is_followed_through_the_passes_of_a_pipeline(tmp_path):
    both = [graph("first", tmp_path), graph("last", tmp_path, first=False)]
    found, differ = type_stages([lambda received, read=read: typing(read, received) for read in both])
    assert differ == []
    for each in found:
        assert each.summed("w") == Spread(((8,), (8,)), frozenset({"dp"}))
        assert each.of(9) == plain((8, 8))
        assert each.sums_of("w") == [9]
        assert not each.failures


def test_a_weight_of_two_stages_adds_the_gradient_of_the_other_stage_before_any_sum_over_ranks(tmp_path):
    """An embedding that the last stage's MTP layer uses, too: without data parallelism AddN takes the accumulated sum
    itself, in a tuple.
    """
    tied = [
        node(10, "Receive(%9)", T88, T88, "Gradients/Default"),
        node(11, "MakeTuple(%8, %10)", f"{ACCU}, {T88}", f"<Tuple[{T88}*2]>"),
        node(12, "PrimFunc_AddN(%11)", f"<Tuple[{T88}*2]>", T88),
    ]
    read, parts = graph("first", tmp_path, more=tied), Spread(((8,), (8,)), frozenset({"dp"}))
    received = {("backward", (4, 8)): CUT, ("backward", (8, 8)): parts}
    assert typing(read, received).of(12) == parts
    wrong = typing(read, received | {("backward", (8, 8)): plain((8, 8))}).of(12)
    assert isinstance(wrong, Failure) and wrong.contradicts


def test_the_gradient_of_a_reshape_lies_in_the_dimensions_of_its_argument(tmp_path):
    """One sample on a rank: the graph does not show that the samples, and not the tokens, are cut."""
    t14, t4 = "<Tensor[Float32], (1, 4)>", "<Tensor[Float32], (4)>"
    loss = [
        node(10, "Reshape(%para4_inputs1, (I64(4)))", f"{t14}, Tuple", t4),
        node(11, "Reshape(%10, (I64(1), I64(4)))", f"{t4}, Tuple", t14, "Gradients/Default"),
    ]
    read = graph("first", tmp_path, more=loss)
    samples, tokens = Spread((("dp",), (4,))), Spread(((), ("dp", 4)))
    for argument in (samples, tokens):
        own = typing(read)
        own.parameter = lambda name, argument=argument: argument
        assert own.of(10).dims == (("dp", 4),)
        assert own.of(11) == replace(argument, loose=own.of(11).loose) and "dp" in own.of(11).loose
    undecided = typing(read)
    undecided.reshaped[(("dp", 4),), (1, 4)] |= {samples.dims, tokens.dims}
    undecided.parameter = lambda name: tokens
    assert undecided.of(11).dims == moves.reshape(Spread((("dp", 4),)), (1, 4)).dims


def test_the_backward_pass_uses_the_place_of_pieces_that_a_stated_layout_decides(tmp_path):
    """A mean's stated layout says that rows are cut, not the columns over which it goes; the sum of the backward pass
    over the same columns then is no partial sum.
    """
    t3, t2, t1 = (f"<Tensor[Float32], ({sizes})>" for sizes in ("4, 1, 8", "4, 8", "4, 1"))
    more = f"{t2}, <null>, <null>, <null>"
    lines = [
        node(0, "Load(%para1_inputs0, UMonad[U])", t3, t3),
        node(1, "Reshape(%0, (I64(4), I64(8)))", f"{t3}, <null>", t2),
        node(2, "PrimFunc_Square(%1)", t2, t2),
        node(3, "PrimFunc_MeanExt(%2, (I64(-1)), Bool(1), None) primitive_attrs: {in_strategy: ((2, 1))}", more, t1),
        node(4, "PrimFunc_SumExt(%1, (I64(1)), Bool(1), I64(43))", more, t1, "Gradients/Default"),
        node(5, "PrimFunc_RsqrtGrad(%3, %4)", f"{t1}, {t1}", t1, "Gradients/Default"),
        node(6, "Reshape(%0, (I64(4), I64(8)))", f"{t3}, <null>", t2, "recompute_Default"),
        node(7, "PrimFunc_SumExt(%6, (I64(1)), Bool(1), I64(43))", more, t1, "Gradients/recompute_Default"),
        node(8, "PrimFunc_RsqrtGrad(%3, %7)", f"{t1}, {t1}", t1, "Gradients/recompute_Default"),
    ]
    given = Spread(((4,), ("dp",), (8,)))
    for stated in (True, False):
        text = "".join(lines) if stated else "".join(lines).replace("in_strategy", "other")
        file = tmp_path / f"{stated}.ir"
        file.write_text(f"# IR entry: @0_Step\nsubgraph @0_Step(%para1_inputs0) {{\n{text}}}\n", encoding="utf-8")
        read = read_graph(file)
        own = Typing(read, mesh_of([("dp", 2)], []), {"inputs0": given}.__getitem__, {}.get, Peers(read, {}))
        for gradient in (5, 8):  # of the value, and of the value that is computed again
            assert (own.of(gradient) == Spread(((4, "dp"), ()))) == stated


def test_sums_and_maxima_of_a_value_are_two_values():
    frame, text = Frame("graph", {}), 'AllReduce(%0) primitive_attrs: {{group: "dp", op: "{}"}}'.format
    names = [frame.name_node(n, Node("AllReduce", "AllReduce(%0)", text(op), [0]), ["%0"])
             for n, op in enumerate(("sum", "max", "sum"), 1)]  # fmt: skip
    assert names[0] == names[2] != names[1]


def test_two_stated_layouts_of_one_value_must_agree(tmp_path):
    t3, t2, t1 = (f"<Tensor[Float32], ({sizes})>" for sizes in ("4, 1, 8", "4, 8", "4, 1"))
    more = f"{t2}, <null>, <null>, <null>"
    own = None
    for second in ("2, 1", "1, 2"):
        means = [f"PrimFunc_MeanExt(%1, (I64(-1)), Bool(1), None) primitive_attrs: {{in_strategy: (({cut}))}}"
                 for cut in ("2, 1", second)]  # fmt: skip
        lines = [
            node(0, "Load(%para1_inputs0, UMonad[U])", t3, t3),
            node(1, "Reshape(%0, (I64(4), I64(8)))", f"{t3}, <null>", t2),
            node(2, means[0], more, t1),
            node(3, means[1], more, t1),
            node(4, "PrimFunc_Add(%2, %3)", f"{t1}, {t1}", t1),
        ]
        file = tmp_path / f"{second[0]}.ir"
        text = f"# IR entry: @0_Step\nsubgraph @0_Step(%para1_inputs0) {{\n{''.join(lines)}}}\n"
        file.write_text(text, encoding="utf-8")
        read, given = read_graph(file), Spread(((4,), ("dp",), (8,)))
        own = Typing(read, mesh_of([("dp", 2)], []), {"inputs0": given}.__getitem__, {}.get, Peers(read, {})).of(4)
        if second == "2, 1":
            assert own == Spread(((4, "dp"), ()))
    assert isinstance(own, Failure) and "two operators state different layouts" in own.why


def test_sequences_that_become_samples_stay_before_the_vocabulary():
    """Before the loss, data and context parallelism cut the samples; only a rank's heads may join the width behind."""
    logits = Spread((("dp.2", 8), ("dp.1",), ("cp",), ("tp", 16)))
    assert moves.reshape(logits, (8, 1, 16)).dims == (("dp.2", 8), ("dp.1", "cp"), ("tp", 16))
    heads = Spread(((8,), ("dp",), ("tp",), (16,)))
    assert moves.reshape(heads, (8, 1, 16)).dims == ((8,), ("dp",), ("tp", 16))


@anything
def test_other_dimensions_with_the_same_parts_say_the_same_of_every_rank(random):
    given = some_spread(random, shape(random, 3))
    atoms = [atom for dim in given.dims for atom in dim]
    cuts = sorted(random.choices(range(len(atoms) + 1), k=2))
    dims = tuple(map(tidy, (atoms[: cuts[0]], atoms[cuts[0] : cuts[1]], atoms[cuts[1] :])))
    found = moves.with_dims(given, dims)
    whole = whole_of(given, random)
    held = hold(given, whole, random)
    if found.shape == given.shape:
        assert describes(found, whole.reshape(found.whole(SIZES)), held)
    assert found == given or found.dims == dims


def test_only_a_stage_that_has_the_whole_backward_pass_says_that_nothing_divides(tmp_path):
    """The loss's gradient is divided in the last stage."""
    whole = {"inputs0": plain((4, 8))}
    for name, first in (("first", True), ("last", False)):
        own = typing(
            graph(name, tmp_path, first=first), {(way, (4, 8)): plain((4, 8)) for way in ("forward", "backward")}
        )
        own.parameter = lambda name: whole.get(name, plain((8, 8)))
        told = since(own, "w", 9, own.of(9))
        assert "it is too large since AllReduce %9" in told
        assert ("nothing in the backward pass" in told) == (not first)


def test_a_division_in_a_called_backward_pass_is_not_said_to_be_missing(tmp_path):
    """One sum over ranks is too many; the division is in another called graph than the weight's gradient."""
    twice = node(10, 'AllReduce(%9) primitive_attrs: {group: "dp", op: "sum"}', T88, T88)
    graph("last", tmp_path, first=False, more=[twice])
    half = node(0, HALF.format("%para31_dout"), T48, T48, "Gradients/Default/Grad__VirtualDiv")
    text = (tmp_path / "last.ir").read_text("utf-8")
    text = text.replace("%5(x) = TensorMove(%4)", "%5(x) = call @3_◂Loss(%4)")
    text = text.replace("subgraph @0_", f"subgraph @3_◂Loss(%para31_dout) {{\n{half}}}\nsubgraph @0_")
    (tmp_path / "last.ir").write_text(text, encoding="utf-8")
    own = typing(read_graph(tmp_path / "last.ir"), {("forward", (4, 8)): plain((4, 8))})
    assert own.of(9) == plain((8, 8)) and own.of(10) == Spread(((8,), (8,)), powers=(("dp", 1),))
    told = since(own, "w", 10, own.of(10))
    assert "it is too large since AllReduce %10" in told and "nothing in the backward pass" not in told


def test_what_no_stage_sends_is_unknown(tmp_path):
    alone = typing(graph("first", tmp_path))
    assert alone.sent() == {("forward", (4, 8)): {CUT}}
    failed = alone.of(9)
    assert isinstance(failed, Failure) and not failed.contradicts
    assert "it is unknown how the other stage sends this value (backward)" in failed.why


def test_what_one_of_the_stages_sends_in_an_unknown_way_is_unknown_to_all(tmp_path):
    """A stage in the middle, of whose result nothing is known, would be taken to send what the first stage sends."""
    middle = [node(10, "Mystery(%2)", T48, T48), node(11, "Send(%10)", T48, T48)]
    last, first, other = (
        graph("last", tmp_path, first=False),
        graph("first", tmp_path),
        graph("other", tmp_path, more=middle),
    )
    for reads, proven in (((first, last), True), ((first, other, last), False)):
        found, differ = type_stages([lambda received, read=read: typing(read, received) for read in reads])
        assert differ == [] and isinstance(found[0].of(2), Spread)
        for each in (found[0], found[-1]):
            assert isinstance(each.summed("w"), Spread) == proven


def test_stages_that_send_differently_are_told(tmp_path):
    first, other = graph("first", tmp_path), graph("other", tmp_path)
    whole = {"inputs0": plain((4, 8))}

    def another(received):
        own = typing(other, received)
        own.parameter = lambda name: whole.get(name, plain((8, 8)))
        return own

    _, differ = type_stages([lambda received: typing(first, received), another])
    assert len(differ) == 1 and "stages send forward values of shape (4, 8) as [4, 8] and as [dp*4, 8]" in differ[0]


def test_stages_and_micro_batches_are_alike_if_a_place_of_loose_pieces_makes_them_so(tmp_path):
    """A sum or a sent value differs only if it does for every place; what is certain is assumed of the others."""
    heads, (first, other) = Spread(((4,), (), ("tp", 8)), loose=frozenset({"tp"})), (graph("first", tmp_path),) * 2
    certain = Spread(((4,), ("tp",), (8,)))
    assert total_of([heads, certain]) == total_of([certain, heads]) == certain
    with pytest.raises(NotKnown, match="the place of the pieces over tp is uncertain"):
        total_of([heads, plain((4, 1, 8))])
    sent = [replace(CUT, loose=frozenset({"dp"})), CUT]

    def stage(read, given):
        def made(received):
            own = typing(read, received)
            own.parameter = lambda name: given if name == "inputs0" else plain((8, 8))
            return own

        return made

    assert type_stages([stage(first, sent[0]), stage(other, sent[1])])[1] == []


def test_micro_batches_must_add_alike(tmp_path):
    own = typing(graph("first", tmp_path), {("backward", (4, 8)): CUT})
    own.summed("w")
    own.added["w"].append(plain((8, 8)))
    with pytest.raises(Contradiction, match="micro-batches add"):
        own.summed("w")
    with pytest.raises(NotKnown, match="no operator is known that adds"):
        own.summed("v")


def test_a_sum_of_micro_batches_that_do_not_add_alike_may_be_sent(tmp_path):
    """The gradient of a copy of the embedding goes to another stage: the proof went on to no weight."""
    sends = [node(10, "Send(%8)", ACCU, T88, "Gradients/Default")]
    own = typing(graph("first", tmp_path, more=sends), {("backward", (4, 8)): CUT})
    own.summed("w")
    own.added["w"].append(plain((8, 8)))
    assert own.sent() == {("forward", (4, 8)): {CUT}}


@pytest.mark.parametrize(("ranks", "sums"), [((0,), True), ((0, 1), False)])
def test_in_a_stage_of_one_device_every_value_is_whole_but_for_what_comes_from_other_ranks(tmp_path, ranks, sums):
    """An operator needs no rule there, but a sum over a rank of another stage is unknown."""
    read = graph("first", tmp_path)
    for nodes in read.graphs.values():
        for each in nodes:
            if each.op == "MatMul":
                each.op = "Mystery"
    received = {("backward", (4, 8)): plain((4, 8))}
    own = Typing(read, mesh_of([], []), lambda name: plain((4, 8) if name == "inputs0" else (8, 8)),
                 {"dp": ranks}.get, Peers(read, {}), received)  # fmt: skip
    assert own.summed("w") == plain((8, 8)) and own.sent() == {("forward", (4, 8)): {plain((4, 8))}}
    found = own.of(9)
    assert (
        found == plain((8, 8))
        if sums
        else isinstance(found, Failure) and "not a product of axes of the mesh" in found.why
    )
    two = typing(read, received)
    assert isinstance(two.summed("w"), Failure) and "no rule" in two.summed("w").why, "where there are axes, it is one"


def test_the_neighbours_of_any_rank_are_in_its_stage_and_differ_along_one_axis(tmp_path):
    """`tc3 dryrun --prove --ranks` compiles any rank: the next one along an axis may be in another row, or stage."""
    mesh = mesh_of([("tp", 2), ("dp", 4)], [])
    assert mesh.neighbours(8) == {"tp": 9, "dp": 10, FAR: 15}
    assert mesh.neighbours(15) == {"tp": 14, "dp": 13, FAR: 8}

    def sliced(start):
        text = f"StridedSlice(%para1_x, ({start}, I64(0)), (I64(9), I64(8)), (I64(1), I64(1)))"
        head = "# IR entry: @0_Step\nsubgraph @0_Step(%para1_x) {\n"
        (tmp_path / "slice.ir").write_text(f"{head}{node(0, text, T48, T48)}}}\n", encoding="utf-8")
        return read_graph(tmp_path / "slice.ir")

    result = {"rank": 15, "groups": [], "layouts": {}}
    graphs = {"tp": sliced("I64(12)"), "dp": sliced("I64(8)")}  # a rank of tp is 4 further, one of dp 8
    made = typing_of(result, sliced("I64(16)"), mesh, graphs)
    assert made.peers.offsets("0_Step", 0) == {(1, 0): (16 - 4 - 3 * 8, {"tp": 4, "dp": 8})}


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


def test_an_outer_axis_behind_an_inner_one_cuts_the_next_dimension_also_where_a_part_of_it_was_divided():
    """Both pieces lie between the same extents, one of which may have them: the second begins the next dimension."""
    for inner, outer in (("tp", "cp"), ("cp.1", "cp.2"), ("tp", "cp.2.1"), ("cp.2.1", "cp.2.2"), ("cp.2.2", "dp.1")):
        assert outside(outer, inner) and not outside(inner, outer)
        given = Spread(((4,), (inner,), (outer,), (8,)))
        assert moves.reshape(given, (4, 1, 8)).dims == ((4,), (inner,), (outer, 8))


def test_a_sum_of_many_loose_pieces_is_refused_without_trying_all_pairs_of_their_places():
    """Each of the 165 x 165 pairs of places was tried by the rule, and each operator took seconds."""
    axes, calls = tuple(f"dp.{number}" for number in range(8)), []
    one, other = (Spread((own, (), (), (8,)), loose=frozenset(axes)) for own in (axes, axes[::-1]))
    assert len(list(placements(one))) == 165
    with pytest.raises(Contradiction, match="dimension 0 is not cut equally"):
        joined(one, other)

    def refuse(first, second):
        calls.append((first, second))
        raise Contradiction("never")

    with pytest.raises(Contradiction, match="never"):
        _settled(refuse, one, other, equal=True)
    assert len(calls) < 165 * 165 / 20


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
