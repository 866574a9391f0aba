"""Weight gradients: which pass of MindSpore's would take them, and what stands between."""

import pytest

from tests.tools.fusion.small_graphs import node
from tools.fusion.count.named_passes import GROUPED, MATMUL, weight_gradients

HALF, TOTAL = ("BFloat16", (16, 32)), ("Float32", (16, 32))
STACK = ("BFloat16", (4, 16, 32))
NONE = ["None"] * 5


def single(op="MatMul", flags=("Bool(1)", "Bool(0)"), between=(), gives=HALF, total=TOTAL, takes=HALF):
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
        (single(flags=("Bool(0)", "Bool(0)")), "MatMul-AssignAdd", "wants transpose_a and no transpose_b"),
        (single(gives=("BFloat16", (5000, 2000))), "MatMul-AssignAdd", ""),
        (single(gives=("BFloat16", (5000, 2001))), "MatMul-AssignAdd", "more than 10,000,000 numbers"),
        (single(takes=TOTAL), "MatMul-AssignAdd", "takes Float32, wants Float16 or BFloat16"),
        (single(total=HALF), "MatMul-AssignAdd", "adds to BFloat16, wants Float32"),
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
        (grouped(kind="I64(0)"), "GroupedMatmul-AssignAdd", "wants split_item 3, group_type 2 and no transposition"),
        (
            grouped(view="Transpose"),
            "GroupedMatmul-AssignAdd",
            "wants a TransposeExtView in front of GroupedMatmul",
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
