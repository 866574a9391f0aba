"""This module compares a graph with the fusions of weight gradients that MindSpore 2.9.0 has under a name (report
section 4.5).

    matmul_assignadd_fusion           MatMul (- Cast) - AssignAdd                             -> InplaceMatmulAdd
    grouped_matmul_assignadd_fusion   TransposeExtView - GroupedMatmul - AssignAdd            -> InplaceGroupedMatmulAdd

Fused, the gradient in compute precision is neither written nor read again. Both names stand in the wheel's library for
Ascend. What they need is from MindSpore's public matmul_assignadd_fusion.cc and grouped_matmul_assignadd_fusion.cc, and
so is that both are off unless `--enable_pass` names them (backend_fusion's AddFusionPass(..., false), where the build
has ENABLE_ATB): not asked of 2.9.0, for a CPU wheel runs no pass of Ascend's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.dryrun.activations import tensor_bytes
from tools.dryrun.graph_text import Node, TensorType, arguments_of

MATMUL, GROUPED = "matmul_assignadd_fusion", "grouped_matmul_assignadd_fusion"
LIMIT = 10_000_000  # numbers of a MatMul's result, above which the pass leaves it alone
_PASS_OF = {"MatMul": MATMUL, "MatMulExt": MATMUL, "BatchMatMul": MATMUL, "GroupedMatmul": GROUPED}
_BETWEEN = frozenset(("Reshape", "Cast", "Transpose", "Mul", "AllReduce", "ReduceScatter", "Depend"))
_HALF = ("Float16", "BFloat16")


@dataclass(frozen=True)
class Found:
    """A `Found` is a matrix product whose result, a weight gradient, is added to the accumulated gradient.

    Args:
        fusion: name of the pass. place: of the AssignAdd.
        product: its operator; result: what it gives. between: operators between it and AssignAdd, in order.
        refusal: why the pass does not match; "" where it does, if it is enabled.
        bytes: HBM traffic that it would save: its result is written and read no more.
    """

    fusion: str
    place: int
    product: str
    result: TensorType
    between: tuple[str, ...]
    refusal: str
    bytes: int

    @property
    def chain(self) -> str:
        """Return the names of the matrix product, of the operators behind it, and AssignAdd, joined by "-"."""
        return "-".join((self.product, *self.between, "AssignAdd"))


def weight_gradients(nodes: Sequence[Node], rows: int) -> list[Found]:
    """Return a `Found` for every AssignAdd of a subgraph that adds the result of a matrix product.

    Args:
        rows: what stands for dimensions that only routing decides.
    """
    found = []
    for place, node in enumerate(nodes):
        if node.op != "AssignAdd" or len(node.inputs) < 2 or (chain := _chain(nodes, node)) is None:
            continue
        product, between = chain
        name, result = _PASS_OF[nodes[product].op], nodes[product].outputs[0]
        refusal = (_grouped if name == GROUPED else _single)(nodes, nodes[product], between, node.inputs[0].dtype)
        size = 2 * tensor_bytes(result, rows)
        found.append(Found(name, place, nodes[product].op, result, between, refusal, size))
    return found


def _chain(nodes: Sequence[Node], add: Node) -> tuple[int, tuple[str, ...]] | None:
    """Return the product that an AssignAdd adds up, and the operators between; None where it adds something else."""
    at, between = _taken(add, 1), []
    while at is not None and nodes[at].op not in _PASS_OF:
        if nodes[at].op in _BETWEEN:
            between.append(nodes[at].op)
        elif nodes[at].op != "TupleGetItem":
            return None
        at = _taken(nodes[at], 0)
    return None if at is None else (at, tuple(reversed(between)))


def _taken(node: Node, number: int) -> int | None:
    """Return the operator that one argument is."""
    arguments = arguments_of(node.head)
    word = arguments[number] if number < len(arguments) else ""
    return int(word[1:]) if word.startswith("%") and word[1:].isdecimal() else None


def _single(nodes: Sequence[Node], product: Node, between: tuple[str, ...], total: str) -> str:
    """Return why matmul_assignadd_fusion leaves a product alone."""
    if product.op != "MatMul":
        return f"the product is {product.op}, not MatMul"
    if between not in ((), ("Cast",)):
        return f"{_names(between)} between MatMul and AssignAdd"
    if [word for word in arguments_of(product.head) if word.startswith("Bool(")] != ["Bool(1)", "Bool(0)"]:
        return "transpose_a is needed, and no transpose_b"
    if math.prod(product.outputs[0].shape) > LIMIT:
        return f"more than {LIMIT:,} numbers"
    return _types(product.inputs[:2], total)


def _grouped(nodes: Sequence[Node], product: Node, between: tuple[str, ...], total: str) -> str:
    """Return why grouped_matmul_assignadd_fusion leaves a product alone."""
    if between:
        return f"{_names(between)} between GroupedMatmul and AssignAdd"
    arguments = arguments_of(product.head)
    if arguments[-4:] != ["I64(3)", "I64(2)", "Bool(0)", "Bool(0)"]:
        return "split_item 3 and group_type 2 are needed, and no transposition"
    if any(each != "None" for each in arguments[2:-5]):
        return "a bias, scale or offset is given"
    tuple_ = _taken(product, 0)
    member = _taken(nodes[tuple_], 0) if tuple_ is not None else None
    if member is None or nodes[member].op != "TransposeExtView":
        return "no TransposeExtView stands in front of GroupedMatmul"
    return _types(product.inputs[:2], total)


def _types(taken: Sequence[TensorType], total: str) -> str:
    wrong = next((tensor.dtype for tensor in taken if tensor.dtype not in _HALF), "")
    if wrong:
        return f"it takes {wrong}, and Float16 or BFloat16 is needed"
    return "" if total == "Float32" else f"it adds to {total}, and Float32 is needed"


def _names(between: tuple[str, ...]) -> str:
    return f"{'-'.join(between)} stand{'s' * (len(between) == 1)}"
