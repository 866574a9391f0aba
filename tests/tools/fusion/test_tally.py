"""Bytes and kernels of small graphs against sums that are written out.

Of weight gradients: which pass of MindSpore's would take them, and what stands between.
"""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.operator_fusion.plan import Fusion
from tests.tools.fusion.small_graphs import BYTES, node
from tools.dryrun.graph_text import GraphText
from tools.fusion.cli import level_of
from tools.fusion.tally import GROUPED, MATMUL, Tally, kernels_of, parts_of, tallies, weight_gradients

VECTOR = Fusion("vector")
ROWS, FULL = ("Float32", (4, 1)), ("Float32", (4, 8))
HALF = ("BFloat16", (4, 8))


def counted(nodes, fusion=VECTOR):
    """Everything of one subgraph."""
    whole = Tally()
    for tally in tallies(GraphText("main", {"main": list(nodes)}), fusion, rows=16).values():
        whole.add(tally)
    return whole


def size(tensor):
    return BYTES[tensor[0]] * prod(tensor[1])


def test_a_chain_reads_once_and_writes_once():
    """x (128 B) -> Cast -> 256 Exp -> Cast: 64 bytes in, 64 out, and 2 x 128 + 2 x 128 between."""
    nodes = [node("Cast", ["x"], [HALF], FULL), node("Exp", [0], [FULL], FULL), node("Cast", [1], [FULL], HALF)]
    found = counted(nodes)
    assert (found.operators, found.kernels, found.fused) == (3, 1, 1)
    assert (found.before, found.after) == (64 + 128 + 128 + 128 + 128 + 64, 64 + 64)
    assert found.patterns == {"Cast-Exp-Cast": 1}
    assert found.saved == {"Cast-Exp-Cast": 4 * 128}


def test_what_another_operator_reads_is_written():
    nodes = [node("Exp", ["x"], [FULL], FULL), node("Neg", [0], [FULL], FULL), node("Cos", [0], [FULL], FULL)]
    found = counted(nodes)
    assert (found.kernels, found.before, found.after) == (1, 4 * 128, 3 * 128)
    assert found.alone == {("Cos", "Cos is not fused at this level"): 1}
    assert found.beside == 2 * 128


def test_a_tensor_that_is_taken_twice_is_read_once():
    assert counted([node("Mul", ["x", "x"], [FULL, FULL], FULL)]).before == 2 * 128
    assert counted([node("Mul", ["x", "y"], [FULL, FULL], FULL)]).before == 3 * 128


def test_loads_are_what_they_load_and_an_assign_does_not_read_what_it_overwrites():
    nodes = [
        node("Load", ["w"], [FULL], FULL),
        node("Mul", [0, 0], [FULL, FULL], FULL),
        node("Assign", ["w", 1], [FULL, FULL], FULL),
    ]
    found = counted(nodes)
    assert (found.operators, found.kernels) == (2, 1)
    assert (found.before, found.after) == (2 * 128 + 2 * 128, 2 * 128)


def test_composites_count_as_their_main_part():
    """SumExt ends a kernel as ReduceSum does: the division is one of its own."""
    nodes = [
        node("AddExt", ["x", "y"], [FULL, FULL], FULL),
        node("SumExt", [0], [FULL], ROWS),
        node("Div", [0, 1], [FULL, ROWS], FULL),
    ]
    assert kernels_of(nodes, VECTOR) == [[0, 1], [2]]
    assert kernels_of(nodes, Fusion("vector", ("AddExt",))) == [[1], [2]]
    assert kernels_of(nodes, Fusion("vector", ("ReduceSum",))) == [[0], [2]]


def test_why_an_operator_stays_alone():
    int64 = ("Int64", (4, 8))
    nodes = [
        node("Exp", ["x"], [FULL], FULL),
        node("AddExt", ["n", "n"], [int64, int64], int64),
        node("Transpose", ["h"], [HALF], HALF),
    ]
    disabled = counted(nodes, Fusion("vector", ("Exp",))).alone
    assert disabled == {
        ("Exp", "Exp is in plugins.operator_fusion.disable"): 1,
        ("AddExt", "gives Int64 (opened into Mul)"): 1,
        ("Transpose", "gives BFloat16"): 1,
    }
    assert set(counted(nodes, Fusion("off")).alone) == {
        (name, "nothing is fused") for name in ("Exp", "AddExt", "Transpose")
    }


@st.composite
def graphs(draw):
    """Lines of (operator, places or parameters, result); Cos is none of DVM's."""
    found = []
    for place in range(draw(st.integers(1, 16))):
        known = [*range(place), "x", "y"]
        op = draw(st.sampled_from(["Add", "Exp", "ReduceSum", "Cos", "AddExt", "Load"]))
        count = 2 if op in ("Add", "AddExt") else 1
        taken = [draw(st.sampled_from(known)) for _ in range(count)]
        shapes = [FULL if isinstance(each, str) else found[each][2] for each in taken]
        result = ROWS if op == "ReduceSum" else max(shapes, key=size)
        found.append((op, taken, result))
    return found


def source(lines, each):
    while isinstance(each, int) and lines[each][0] == "Load":
        each = lines[each][1][0]
    return each


def type_of(lines, each):
    return FULL if isinstance(each, str) else lines[each][2]


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_bytes_are_the_sums_written_out(lines):
    """Before: all that each takes and gives. After: by kernels, what comes from outside and what is read outside."""
    nodes = [node(op, taken, [type_of(lines, each) for each in taken], result) for op, taken, result in lines]
    mine = [place for place, (op, *_) in enumerate(lines) if op not in ("Cos", "Load")]
    groups = kernels_of(nodes, VECTOR)
    assert sorted(place for group in groups for place in group) == mine
    before = after = 0
    for group in groups:
        outer = set()
        for place in group:
            reads = {(source(lines, each), type_of(lines, each)) for each in lines[place][1]}
            before += sum(size(tensor) for _, tensor in reads) + size(lines[place][2])
            outer |= {(name, tensor) for name, tensor in reads if name not in group}
            users = [user for user, (_, taken, _) in enumerate(lines) if place in taken]
            if not users or any(user not in group for user in users):
                after += size(lines[place][2])
        after += sum(size(tensor) for _, tensor in outer)
    found = counted(nodes)
    assert (found.operators, found.kernels, found.before, found.after) == (len(mine), len(groups), before, after)
    assert found.after <= found.before
    assert sum(found.saved.values()) == before - after


@settings(max_examples=30, deadline=None)
@given(graphs())
def test_level_off_changes_nothing(lines):
    nodes = [node(op, taken, [type_of(lines, each) for each in taken], result) for op, taken, result in lines]
    found = counted(nodes, Fusion("off"))
    assert (found.kernels, found.before, found.after, found.launches) == (0, 0, 0, 0)


def test_operators_belong_to_layers_by_path_by_parameter_and_by_what_they_take():
    path = "Default/model-GPTModel/{}/x-op1"
    nodes = [
        node("Exp", ["x"], [FULL], FULL, path.format("embedding-Embedding")),
        node("Exp", [0], [FULL], FULL, path.format("decoder-TransformerBlock/layers-CellList/3-TransformerLayer")),
        node("Exp", [1], [FULL], FULL, "Default/Exp-op2"),
        node("Assign", ["accu_grads.decoder.layers.12.mlp.weight", 2], [FULL, FULL], FULL, "Default/Assign-op1"),
        node("Load", ["decoder.layers.4.mlp.weight"], [FULL], FULL, "Default/optimizer-AdamW/Load-op1"),
        node("Exp", [0], [FULL], FULL, path.format("mtp-MultiTokenPredictionBlock/layers-CellList/0-Layer")),
        node("Exp", ["output_layer.weight"], [FULL], FULL, "Default/Exp-op3"),
        node("Exp", ["x"], [FULL], FULL, "Default/Exp-op4"),
    ]
    assert parts_of(nodes) == ["embedding", "3", "3", "12", "4", "mtp", "head", "head"]


@pytest.mark.parametrize(
    ("context", "plugins", "level", "words"),
    [
        ({"jit_config": {"jit_level": "O1"}}, {}, "vector", "by default"),
        ({"jit_config": {"jit_level": "O0"}}, {}, "off", "O0"),
        ({}, {}, "off", "not written"),
        ({"device_target": "CPU", "jit_config": {"jit_level": "O1"}}, {}, "off", "not Ascend: only Ascend has DVM"),
        ({"jit_config": {"jit_level": "O1"}}, {"operator_fusion": {"level": "off"}}, "off", "plugins"),
        ({"jit_config": {"jit_level": "O1"}}, {"operator_fusion": {"level": "cube"}}, "cube", "plugins"),
        ({"graph_kernel_flags": "--opt_level=1"}, {}, "vector", "not read"),
    ],
)
def test_which_key_says_what_is_fused(context, plugins, level, words):
    fusion, why = level_of({"context": context, "plugins": plugins})
    assert fusion.level == level
    assert words in why


HALF_WEIGHT, TOTAL = ("BFloat16", (16, 32)), ("Float32", (16, 32))
STACK = ("BFloat16", (4, 16, 32))
NONE = ["None"] * 5


def single(op="MatMul", flags=("Bool(1)", "Bool(0)"), between=(), gives=HALF_WEIGHT, total=TOTAL, takes=HALF_WEIGHT):
    """A product, what stands between, AssignAdd."""
    nodes = [node(op, ["x", "y"], [takes, takes], gives, more=flags)]
    for each in between:
        nodes.append(node(each, [len(nodes) - 1], [gives], gives))
    nodes.append(node("AssignAdd", ["accu_grads.decoder.layers.1.w", len(nodes) - 1], [total, gives], total))
    return nodes


def grouped(between=(), view="TransposeExtView", kind="I64(2)"):
    """A grouped product as MindSpore's own gradient has it."""
    more = [*NONE, "%9", "I64(3)", kind, "Bool(0)", "Bool(0)"]
    nodes = [
        node(view, ["x"], [("BFloat16", (64, 16))], ("BFloat16", (16, 64))),
        node("MakeTuple", [0], [("BFloat16", (16, 64))], ("BFloat16", (16, 64))),
        node("MakeTuple", ["dy"], [("BFloat16", (64, 32))], ("BFloat16", (64, 32))),
        node("GroupedMatmul", [1, 2], [("BFloat16", (16, 64)), ("BFloat16", (64, 32))], STACK, more=more),
        node("TupleGetItem", [3], [STACK], STACK),
    ]
    for each in between:
        nodes.append(node(each, [len(nodes) - 1], [STACK], STACK))
    total = ("Float32", STACK[1])
    nodes.append(node("AssignAdd", ["accu_grads.decoder.layers.1.w", len(nodes) - 1], [total, STACK], total))
    return nodes


@pytest.mark.parametrize(
    ("nodes", "chain", "refusal"),
    [
        (single(), "MatMul-AssignAdd", ""),
        (single(between=["Cast"]), "MatMul-Cast-AssignAdd", ""),
        (single(between=["Reshape"]), "MatMul-Reshape-AssignAdd", "Reshape stands between MatMul and AssignAdd"),
        (single("MatMulExt"), "MatMulExt-AssignAdd", "the product is MatMulExt, not MatMul"),
        (single(flags=("Bool(0)", "Bool(0)")), "MatMul-AssignAdd", "transpose_a is needed, and no transpose_b"),
        (single(gives=("BFloat16", (5000, 2000))), "MatMul-AssignAdd", ""),
        (single(gives=("BFloat16", (5000, 2001))), "MatMul-AssignAdd", "more than 10,000,000 elements"),
        (single(takes=TOTAL), "MatMul-AssignAdd", "it takes Float32, and Float16 or BFloat16 is needed"),
        (single(total=HALF_WEIGHT), "MatMul-AssignAdd", "it adds to BFloat16, and Float32 is needed"),
        (grouped(), "GroupedMatmul-AssignAdd", ""),
        (
            grouped(["Reshape"]),
            "GroupedMatmul-Reshape-AssignAdd",
            "Reshape stands between GroupedMatmul and AssignAdd",
        ),
        (
            grouped(["Reshape", "Cast"]),
            "GroupedMatmul-Reshape-Cast-AssignAdd",
            "Reshape-Cast stand between GroupedMatmul and AssignAdd",
        ),
        (
            grouped(kind="I64(0)"),
            "GroupedMatmul-AssignAdd",
            "split_item 3 and group_type 2 are needed, and no transposition",
        ),
        (
            grouped(view="Transpose"),
            "GroupedMatmul-AssignAdd",
            "no TransposeExtView stands in front of GroupedMatmul",
        ),
    ],
    ids=str,
)
def test_what_a_pass_says_of_a_weight_gradient(nodes, chain, refusal):
    (found,) = weight_gradients(nodes, rows=1)
    assert (found.chain, found.refusal, found.place) == (chain, refusal, len(nodes) - 1)
    assert found.fusion == (GROUPED if chain.startswith("Grouped") else MATMUL)


def test_bytes_at_stake_are_the_gradient_written_and_read():
    assert weight_gradients(single(), rows=1)[0].bytes == 2 * 2 * 16 * 32
    assert weight_gradients(grouped(), rows=1)[0].bytes == 2 * 2 * 4 * 16 * 32


def test_sums_of_other_operators_are_no_weight_gradients_of_products():
    nodes = [node("Exp", ["x"], [TOTAL], TOTAL), node("AssignAdd", ["w", 0], [TOTAL, TOTAL], TOTAL)]
    assert weight_gradients(nodes, rows=1) == []
