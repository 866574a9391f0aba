"""These tests check how the sums of gradients over ranks are read from the text of a graph, and compared with the
ranks that hold a copy.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.compile import slice_of
from tools.dryrun.gradients import (
    RIGHT,
    UNKNOWN,
    WRONG,
    Way,
    _Walk,
    _with_sizes,
    copies_of,
    judge,
    judge_gradients,
)
from tools.dryrun.graph_text import read_graph
from tools.dryrun.report import gradients_report, judge_norm, norm_report
from tools.dryrun.scale import Scale

GROUPS = {"dp": (0, 2), "tp": (0, 1), "stage": (0, 1, 2, 3), "zero": (0, 1)}
COPIES = {"norm": (0, 1, 2, 3), "proj": (0, 2)}


def gradients_of(graph, ranks_of, weights):
    """The paths of each weight's gradient to the optimizer; there are none where the optimizer does not update it."""
    walk = _Walk(graph, ranks_of)
    return {name: sorted(walk.of_weight(name)) for name in weights}


def node(number, text, types):
    return f"  %{number}(x) = {text}\n      : {types}\n"


F32 = "<Tensor[Float32], (8)>"


def root(reduce_norm='AllReduce(%5) primitive_attrs: {group: "stage", op: "sum"}', reduce_proj="", start=""):
    """A step with two micro-batches: backward passes add into `accu_grads`, the root reduces, scales and clips."""
    proj = reduce_proj or 'ReduceScatter(%9) primitive_attrs: {group: "dp", op: "sum"}'
    lines = [
        node(0, "call @1_▸Model_construct_2(%para3_accu_grads.norm, %para4_accu_grads.proj)", f"({F32}) -> ({F32})"),
        node(1, "TupleGetItem(%0, I64(1))", f"({F32}) -> (<Func, NoShape>)"),
        node(2, "%1[@Partial(@2_◂Model_construct_3)](%para5_data)", f"({F32}) -> ({F32})"),
        node(3, "%1[@Partial(@2_◂Model_construct_3)](%para5_data)", f"({F32}) -> ({F32})"),
        node(4, "Depend(%para3_accu_grads.norm, %2)", f"({F32}) -> ({F32})"),
        node(5, "Depend(%4, %3)", f"({F32}) -> ({F32})"),
        node(6, reduce_norm, f"({F32}) -> ({F32})"),
        node(
            7,
            "PrimFunc_Mul(%6, Tensor(shape=[], dtype=Float32, value=0.5))",
            f"({F32}, <Tensor[Float32], ()>) -> ({F32})",
        ),
        node(8, "Depend(%para4_accu_grads.proj, %2)", f"({F32}) -> ({F32})"),
        node(9, "Depend(%8, %3)", f"({F32}) -> ({F32})"),
        node(10, proj, f"({F32}) -> (<Tensor[Float32], (4)>)"),
        node(
            11,
            "Partial(@3_✓Step_construct_4, %para6_adam_m.norm, %para7_adam_m.proj, %7, %10)",
            f"({F32}) -> (<Func, NoShape>)",
        ),
        node(12, "%11[@Partial(@3_✓Step_construct_4)]()", f"({F32}) -> ({F32})"),
    ]
    names = "%para1_norm, %para2_proj, %para3_accu_grads.norm, %para4_accu_grads.proj, %para5_data, "
    names += "%para6_adam_m.norm, %para7_adam_m.proj"
    return f"subgraph @0_Step_construct_1({names}) {{\n{''.join(lines)}}}\n"


FORWARD = (
    "subgraph @1_▸Model_construct_2(%para8_▸accu_grads.norm, %para9_▸accu_grads.proj) {\n"
    + node(
        0,
        "Partial(@2_◂Model_construct_3, %para8_▸accu_grads.norm, %para9_▸accu_grads.proj)",
        f"({F32}) -> (<Func, NoShape>)",
    )
    + node(1, "MakeTuple(F32(0), %0)", f"({F32}) -> (<Func, NoShape>)")
    + "}\n"
)


def backward(proj="%2"):
    ref = "(<Ref[Tensor[Float32]], (8), ref_key=accu_grads.{}, is_parameter>)"
    return (
        "subgraph @2_◂Model_construct_3(%para10_◂accu_grads.norm, %para11_◂accu_grads.proj, %para12_dout) {\n"
        + node(
            0,
            "PrimFunc_RmsNormGrad(%para12_dout, F32(1))",
            f"({F32}) -> (<Tuple[Tensor[Float32]*2], TupleShape((8), (8))>)",
        )
        + node(1, "TupleGetItem(%0, I64(1))", f"({F32}) -> ({F32})")
        + node(2, "PrimFunc_MatMul(%para12_dout, %para12_dout, Bool(1), Bool(0))", f"({F32}) -> ({F32})")
        + node(3, "PrimFunc_AssignAdd(%para10_◂accu_grads.norm, %1)", f"({F32}) -> {ref.format('norm')}")
        + node(4, f"PrimFunc_AssignAdd(%para11_◂accu_grads.proj, {proj})", f"({F32}) -> {ref.format('proj')}")
        + node(5, "MakeTuple(%3, %4)", f"({F32}) -> ({F32})")
        + "}\n"
    )


def update():
    parts = []
    for place, (weight, grad, shape) in enumerate(
        (("norm", "%para15_clip_x", "(8)"), ("proj", "%para16_clip_x", "(4)"))
    ):
        own, kind = 5 * place, f"<Tensor[Float32], {shape}>"
        ref = f"(<Ref[Tensor[Float32]], {shape}, ref_key=adam_m.{weight}, is_parameter>)"
        parts += [
            node(own, f"Load(%para{13 + place}_adam_m.{weight}, U)", f"({kind}) -> ({kind})"),
            node(own + 1, f"PrimFunc_Mul(%{own}, F32(0.9))", f"({kind}, <Float32, NoShape>) -> ({kind})"),
            node(own + 2, f"PrimFunc_Mul({grad}, F32(0.1))", f"({kind}, <Float32, NoShape>) -> ({kind})"),
            node(own + 3, f"PrimFunc_Add(%{own + 1}, %{own + 2})", f"({kind}, {kind}) -> ({kind})"),
            node(
                own + 4, f"PrimFunc_Assign(%para{13 + place}_adam_m.{weight}, %{own + 3})", f"({kind}, {kind}) -> {ref}"
            ),
        ]
    names = "%para13_adam_m.norm, %para14_adam_m.proj, %para15_clip_x, %para16_clip_x"
    return f"subgraph @3_✓Step_construct_4({names}) {{\n{''.join(parts)}}}\n"


@pytest.fixture
def read(tmp_path):
    def graph(own=None, passes=None):
        file = tmp_path / "step.ir"
        text = "# IR entry: @0_Step_construct_1\n" + (own or root()) + FORWARD + (passes or backward()) + update()
        file.write_text(text, encoding="utf-8")
        return read_graph(file)

    return graph


def verdicts(graph):
    return {name: found["verdict"] for name, found in judge_gradients(graph, GROUPS.get, COPIES, 0).items()}


def test_the_way_of_a_gradient_is_found_through_closures_and_sums_over_micro_batches(read):
    assert gradients_of(read(), GROUPS.get, COPIES) == {
        "norm": [Way((("AllReduce", (0, 1, 2, 3)),), "RmsNormGrad", Scale(pytest.approx(0.5)))],
        "proj": [Way((("ReduceScatter", (0, 2)),), "MatMul", Scale(pytest.approx(1)))],
    }
    assert verdicts(read()) == {"norm": RIGHT, "proj": RIGHT}


def with_muon(text, weight="proj"):
    """A step in which Muon has the weight's moment: m' = momentum x m + g, and reads the moment further."""
    text = text.replace(f"adam_m.{weight}", f"muon_m.{weight}")
    return text.replace("PrimFunc_Mul(%para16_clip_x, F32(0.1))", "PrimFunc_Mul(%para16_clip_x, F32(1))")


@pytest.mark.parametrize(
    ("reduced", "verdict"),
    [('ReduceScatter(%9) primitive_attrs: {group: "dp", op: "sum"}', RIGHT), ("TensorMove(%9)", WRONG)],
)
def test_muons_moment_takes_all_of_the_gradient(tmp_path, reduced, verdict):
    file = tmp_path / "step.ir"
    step = root(reduce_proj=reduced) + FORWARD + backward() + update()
    file.write_text("# IR entry: @0_Step_construct_1\n" + with_muon(step), encoding="utf-8")
    graph = read_graph(file)
    assert verdicts(graph) == {"norm": RIGHT, "proj": verdict}
    (way,) = gradients_of(graph, GROUPS.get, ["proj"])["proj"]
    assert way.scale == Scale(pytest.approx(1)), "1 - momentum is AdamW's share"


@pytest.mark.parametrize(
    ("reduced", "said"),
    [
        ("TensorMove(%5)", "summed over no ranks, but 4 ranks 0, 1, 2, 3 hold a copy"),
        ('AllReduce(%5) primitive_attrs: {group: "dp", op: "sum"}', "over 2 ranks 0, 2 (AllReduce), but 4 ranks"),
        ('AllReduce(%5) primitive_attrs: {group: "stage", op: "max"}', "by AllReduce (max), which does not add"),
    ],
)
def test_a_sum_that_is_missing_or_another_is_wrong(read, reduced, said):
    found = judge_gradients(read(root(reduced)), GROUPS.get, COPIES, 0)
    assert found["norm"]["verdict"] == WRONG and said in found["norm"]["why"]
    assert found["proj"]["verdict"] == RIGHT


def test_two_sums_over_the_axes_of_a_mesh_are_one_over_all_of_it(read):
    graph = read(root('AllReduce(%13) primitive_attrs: {group: "dp", op: "sum"}'))
    graph.graphs[graph.root] += read(root('AllReduce(%5) primitive_attrs: {group: "tp"}')).graphs[graph.root][6:7]
    assert verdicts(graph)["norm"] == RIGHT
    graph.graphs[graph.root][-1].text = graph.graphs[graph.root][-1].text.replace('"tp"', '"stage"')
    found = judge_gradients(graph, GROUPS.get, COPIES, 0)["norm"]
    assert found["verdict"] == WRONG and "some of these twice" in found["why"]


@pytest.mark.parametrize(
    ("reduced", "read_behind", "verdict"),
    [
        ('AllReduce(%5) primitive_attrs: {group: "stage", op: "sum"}', True, RIGHT),
        ('AllReduce(%5) primitive_attrs: {group: "stage", op: "sum"}', False, WRONG),
        ("TensorMove(%5)", True, WRONG),
    ],
)
def test_a_sum_that_is_assigned_back_counts_only_for_what_is_read_behind_it(read, reduced, read_behind, verdict):
    """Without a sharded optimizer, MindSpore assigns the sum over ranks to the accumulated gradient."""
    ref = f"({F32}, {F32}) -> (<Ref[Tensor[Float32]], (8), ref_key=accu_grads.norm, is_parameter>)"
    back = [
        node(13, "PrimFunc_Assign(%5, %6)", ref),
        node(14, f"Depend(%para3_accu_grads.norm, %{13 if read_behind else 5})", f"({F32}) -> ({F32})"),
    ]
    text = root(reduced).removesuffix("}\n") + "".join(back) + "}\n"
    graph = read(text.replace("PrimFunc_Mul(%6,", "PrimFunc_Mul(%14,"))
    assert verdicts(graph) == {"norm": verdict, "proj": RIGHT}


def sliced():
    """Backward passes in which the first three and the last five numbers of "norm" each multiply tokens."""
    half, whole = "(<Tensor[Float32], (3)>)", f"({F32}) -> ({F32})"
    own = [
        node(0, "PrimFunc_ReduceSum(%para12_dout)", f"({F32}) -> {half}"),
        node(1, "StridedSliceGrad(%0, (I64(8)), (I64(0)), (I64(3)), (I64(1)))", f"({half}) -> ({F32})"),
        node(2, "PrimFunc_MatMul(%para12_dout, %para12_dout, Bool(1), Bool(0))", whole),
        node(3, "PrimFunc_ReduceSum(%2)", f"({F32}) -> (<Tensor[Float32], (5)>)"),
        node(4, "StridedSliceGrad(%3, (I64(8)), (I64(3)), (I64(8)), (I64(1)))", f"({half}) -> ({F32})"),
        node(5, "PrimFunc_Add(%1, %4)", f"({F32}, {F32}) -> ({F32})"),
    ]
    text = backward()
    rest = text[text.index("  %3(x) =") :]  # what adds to the sums over micro-batches
    for number in (5, 4, 3):
        rest = rest.replace(f"%{number}(x)", f"%{number + 3}(x)").replace(f"%{number})", f"%{number + 3})")
    rest = rest.replace("accu_grads.norm, %1)", "accu_grads.norm, %5)").replace("MakeTuple(%3,", "MakeTuple(%6,")
    return text[: text.index("  %0(x) =")] + "".join(own) + rest


@pytest.mark.parametrize("group", ["stage", "dp", "tp"])
def test_gradients_of_slices_are_summed_as_those_of_the_weight(read, group):
    """Against NumPy: each rank has tokens of its own, and puts zeros around what they give for a slice."""
    graph = read(root(f'AllReduce(%5) primitive_attrs: {{group: "{group}", op: "sum"}}'), sliced())
    ways = gradients_of(graph, GROUPS.get, ["norm"])["norm"]
    assert [way.start for way in ways] == ["ReduceSum"]
    tokens = np.random.default_rng(3).normal(size=(4, 6, 8))  # of each rank: what multiplies each number of the weight
    first, last = np.zeros((4, 8)), np.zeros((4, 8))
    first[:, :3], last[:, 3:] = tokens[..., :3].sum(axis=1), tokens[..., 3:].sum(axis=1)
    summed = sum((first + last)[rank] for rank in GROUPS[group])
    is_right = np.allclose(summed, tokens.sum(axis=(0, 1)))
    assert judge_gradients(graph, GROUPS.get, COPIES, 0)["norm"]["verdict"] == (RIGHT if is_right else WRONG)


def test_a_gradient_that_the_compiler_folded_away_is_wrong(read):
    """So MindSpore did with accumulated gradients of experts that have no copy."""
    found = judge_gradients(read(passes=backward("Tensor(shape=[8], dtype=Float32, value=1.5)")), GROUPS.get, COPIES, 0)
    assert found["proj"]["verdict"] == WRONG and found["proj"]["why"] == "its gradient is a constant in the graph"


def test_what_is_not_known_is_said_and_is_not_right(read):
    graph = read(passes=backward("%0"))
    found = judge_gradients(graph, GROUPS.get, COPIES | {"bias": (0,)}, 0)
    assert found["bias"]["verdict"] == UNKNOWN
    assert found["bias"]["why"] == "the optimizer's update of it was not found in the graph"
    graph = read(root(reduce_proj='AllGather(%9) primitive_attrs: {group: "dp"}'))
    assert "goes through AllGather" in judge_gradients(graph, GROUPS.get, COPIES, 0)["proj"]["why"]
    assert judge([Way((), "Custom")], (0,), 0)[0] == UNKNOWN
    assert judge([Way((), "received from rank 4")], (0,), 0)[0] == UNKNOWN


def test_a_group_that_nobody_created_is_an_error(read):
    with pytest.raises(ClusterError, match="'dp', which was never created"):
        gradients_of(read(), {"stage": (0, 1, 2, 3)}.get, COPIES)


ACCUMULATED = "(<Ref[Tensor[Float32]], (8), ref_key=accu_grads.proj, is_parameter>)"


def with_nodes(*lines, **changed):
    """The root with further operators behind its own, from %13 on."""
    more = "".join(node(13 + place, text, types) for place, (text, types) in enumerate(lines))
    return root(**changed).removesuffix("}\n") + more + "}\n"


def owner(reduced="TensorMove(%9)"):
    """Rank 0: it sends the weight to rank 4 and adds what comes back, before its own sum or behind."""
    return with_nodes(
        ("Send(%para2_proj) primitive_attrs: {dst_global_rank: I64(4)}", f"({F32}) -> ({F32})"),
        ("Receive(%0) primitive_attrs: {src_global_rank: I64(4)}", f"({F32}) -> ({F32})"),
        ("PrimFunc_AssignAdd(%para4_accu_grads.proj, %14)", f"({F32}) -> {ACCUMULATED}"),
        reduce_proj=reduced,
    )


def copied(sent):
    """Rank 4: what it sends back is %9, unsummed, or %10, summed."""
    return with_nodes(
        ("Receive(%para2_proj) primitive_attrs: {src_global_rank: I64(0)}", f"({F32}) -> ({F32})"),
        (f"Send({sent}) primitive_attrs: {{dst_global_rank: I64(0)}}", f"({F32}) -> ({F32})"),
    )


@pytest.mark.parametrize(("behind", "before"), [(True, False), (True, True)])
def test_the_gradient_of_a_copy_on_another_stage_is_summed_once(read, behind, before):
    summed = 'ReduceScatter(%9) primitive_attrs: {group: "dp", op: "sum"}'
    first = judge_gradients(read(owner(summed)), GROUPS.get, COPIES, 0)
    second = judge_gradients(read(copied("%10" if before else "%9")), GROUPS.get, COPIES, 0)
    assert first["proj"]["received"] == {4: behind} and first["proj"]["verdict"] == RIGHT
    assert second["proj"] == {"copy_of": 0, "summed": before, "norm": []}
    results = [
        {"rank": 0, "stage": 0, "gradients": first},
        {"rank": 4, "stage": 1, "gradients": {"proj": second["proj"]}},
    ]
    wrong = gradients_report(results)["wrong"]
    assert wrong == ([] if behind != before else [wrong[0]]) and ("again behind" in "".join(wrong)) == before


def test_a_copy_whose_gradient_is_not_sent_back_is_wrong(read):
    ways = [Way((), "EmbeddingDenseBackward"), Way((), "received from rank 4")]
    assert judge(ways, (0,), 0, [4]) == (RIGHT, "")
    verdict, why = judge(ways[:1], (0,), 0, [4])
    assert verdict == WRONG and "is not received from rank 4" in why
    found = judge_gradients(read(copied("%4")), GROUPS.get, COPIES, 0)["proj"]
    assert found["verdict"] == WRONG and "to which its gradient is not sent" in found["why"]


def squared(divided="%15", extra=()):
    """The root with a global norm of the two gradients: the norm's weight is divided by the ranks that hold it."""
    return with_nodes(
        ("PrimFunc_Square(%7)", f"({F32}) -> ({F32})"),
        ("PrimFunc_SumExt(%13)", f"({F32}) -> (<Tensor[Float32], ()>)"),
        (
            "PrimFunc_RealDiv(%14, Tensor(shape=[], dtype=Float32, value=4))",
            "(<Tensor[Float32], ()>) -> (<Tensor[Float32], ()>)",
        ),
        ("PrimFunc_Square(%10)", "(<Tensor[Float32], (4)>) -> (<Tensor[Float32], (4)>)"),
        ("PrimFunc_SumExt(%16)", "(<Tensor[Float32], (4)>) -> (<Tensor[Float32], ()>)"),
        (f"MakeTuple({divided}, %17)", "() -> ()"),
        ("PrimFunc_AddN(%18)", "() -> (<Tensor[Float32], ()>)"),
        ('AllReduce(%19) primitive_attrs: {group: "stage", op: "sum"}', "() -> (<Tensor[Float32], ()>)"),
        *extra,
        (f"PrimFunc_Sqrt(%{20 + len(extra)})", "() -> (<Tensor[Float32], ()>)"),
    )


@pytest.mark.parametrize(
    ("own", "devices", "otherwise"),
    [
        (squared(), 4, []),
        (squared("%14"), 4, ["norm: 4 ranks hold each of its parts, but the sum of its squares is divided by 1"]),
        (squared(), 8, ["are added over 4 of 8 ranks"] * 2),
        (
            squared(extra=[('AllReduce(%20) primitive_attrs: {group: "tp"}', "() -> (<Tensor[Float32], ()>)")]),
            4,
            ["of them 8 times"] * 2,
        ),
    ],
)
def test_the_global_norm_counts_each_element_once(read, own, devices, otherwise):
    found = judge_gradients(read(own), GROUPS.get, COPIES, 0)
    held = [{"name": "norm", "shards": 1}, {"name": "proj", "shards": 2}]
    report = norm_report([{"rank": 0, "stage": 0, "gradients": found, "held": held}], devices)
    assert report["weights"] == 2 and report["once"] == 2 - len(otherwise)
    assert all(text in said for text, said in zip(otherwise, report["otherwise"], strict=True))


@pytest.mark.parametrize(
    ("sums", "divisor"),
    [
        ([("AllReduce", (0, 2)), ("ReduceScatter", (0, 1))], 2),
        ([("AllReduce", (0, 1, 2, 3))], 2048),
        ([("ReduceScatter", (0, 1))], 2048),
        ([("AllReduce", (0, 2)), ("AllReduce", (0, 1, 2, 3))], 2048),
        ([], 2048),
    ],
)
def test_the_norm_is_divided_by_the_size_of_the_group_that_devices_would_tell(sums, divisor):
    norm = [{"divisor": 2048.0, "ranks": [[0, 1, 2, 3]]}, {"divisor": 8.0, "ranks": []}]
    found = _with_sizes(norm, [Way(tuple(sums), "MatMul"), Way(tuple(sums), "MatMulExt")])
    assert found == [{"divisor": divisor, "ranks": [[0, 1, 2, 3]]}, {"divisor": 8.0, "ranks": []}]
    assert bool(judge_norm({"copies": [0, 1, 2, 3], "norm": found[:1]}, 2, 0, 4)) == (divisor != 2)


def test_a_size_that_only_devices_tell_is_that_of_the_gradients_sum(read):
    """The weight's copies are 0, 1, 2, 3; the optimizer shards it over 0 and 2."""
    text = squared().replace("Depend(%8, %3)", 'AllReduce(%8) primitive_attrs: {group: "tp", op: "sum"}')
    text = text.replace("Square(%7)", "Square(%10)").replace("value=4)", "value=2048)")
    found = judge_gradients(read(text), GROUPS.get, COPIES, 0)["proj"]
    assert [square["divisor"] for square in found["norm"]] == [2, 1]


def test_the_norm_must_not_count_the_copy_of_another_stage(read):
    found = judge_gradients(read(copied("%9")), GROUPS.get, COPIES, 0)["proj"]
    assert judge_norm(found, 1, 4, 8) == ""
    some = {"copies": [0, 1, 2, 3], "norm": [{"divisor": 2048.0, "ranks": [[0, 1, 2, 3]]}]}
    assert judge_norm(some, 2, 0, 4).startswith("unknown: without devices"), "two of four copies share the weight"
    assert "divided by 2048" in judge_norm(some, 1, 0, 4) and "divided by 2048" in judge_norm(some, 4, 0, 4)
    assert "is counted, too" in judge_norm(found | {"norm": [{"divisor": 1.0, "ranks": []}]}, 1, 4, 8)
    assert norm_report([{"rank": 0, "stage": 0, "held": []}], 4) == {"weights": 0, "once": 0, "otherwise": []}


MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(MESHES, st.data())
def test_copies_are_the_ranks_that_hold_the_same_slice(mesh, data):
    axes = data.draw(st.permutations(range(len(mesh))))
    cuts = data.draw(
        st.lists(
            st.sampled_from([*axes, -1]), min_size=2, max_size=2, unique_by=lambda axis: axis if axis >= 0 else object()
        )
    )
    devices = int(np.prod(mesh))
    whole = np.arange(devices * devices * 4).reshape(devices * 2, devices * 2)
    layout = [mesh, cuts, None, None, None, "", whole.shape]
    first = devices * data.draw(st.integers(0, 2))
    rank = first + data.draw(st.integers(0, devices - 1))
    size = whole.size // int(np.prod([mesh[len(mesh) - 1 - axis] for axis in cuts if axis >= 0]))
    own = slice_of(whole, layout, rank, size).tobytes()
    same = [other for other in range(first, first + devices) if slice_of(whole, layout, other, size).tobytes() == own]
    assert list(copies_of(layout, rank)) == same


@given(st.lists(st.integers(2, 3), min_size=1, max_size=3), st.data())
def test_sums_over_chosen_axes_are_right_exactly_if_they_are_the_copies_axes(mesh, data):
    """Against the sum itself: each rank holds one bit, and collectives add."""
    ranks = np.arange(int(np.prod(mesh))).reshape(mesh)
    one = st.integers(0, len(mesh) - 1)
    copied = data.draw(st.lists(one, unique=True))
    steps = data.draw(st.lists(st.lists(one, unique=True, min_size=1), max_size=3))
    rank = int(data.draw(st.sampled_from(list(ranks.ravel()))))

    def group(chosen, of):
        here = np.argwhere(ranks == of)[0]
        return tuple(
            int(each)
            for each in ranks[tuple(slice(None) if axis in chosen else here[axis] for axis in range(len(mesh)))].ravel()
        )

    held = {of: np.eye(ranks.size, dtype=int)[of] for of in range(ranks.size)}
    for step in reversed(steps):  # the last collective stands first
        held = {of: sum(held[other] for other in group(step, of)) for of in held}
    wanted = np.zeros(ranks.size, dtype=int)
    wanted[list(group(copied, rank))] = 1
    way = Way(tuple(("AllReduce", group(step, rank)) for step in steps), "MatMul")
    assert (judge([way], group(copied, rank), rank)[0] == RIGHT) == bool((held[rank] == wanted).all())


def test_the_report_counts_and_names(read):
    graph = read(root("TensorMove(%5)"))
    results = [{"rank": 0, "stage": 0, "gradients": judge_gradients(graph, GROUPS.get, COPIES | {"bias": (0,)}, 0)}]
    results.append({"rank": 4, "stage": 1, "gradients": {"proj": {"copy_of": 0, "summed": False}}})
    found = gradients_report(results)
    assert (found["weights"], found["right"], len(found["wrong"]), len(found["unknown"])) == (4, 2, 1, 1)
    assert found["wrong"][0].startswith("rank 0 (stage 0): norm: its gradient is summed over no ranks")
    results[1]["gradients"] = {"proj": {"verdict": RIGHT, "why": ""}}
    assert "stages 0, 1 each update a copy" in gradients_report(results)["wrong"][-1]
    assert gradients_report([{"rank": 0, "stage": 0}]) == {"weights": 0, "right": 0, "wrong": [], "unknown": []}
