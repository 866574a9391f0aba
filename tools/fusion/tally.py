"""This module counts the operators, kernels and HBM bytes of a graph, by the part of the model to which they belong.

The parts of the model are the single layers (by number), the MTP layers, the embedding and the head. MindSpore keeps
the path of cells on most operators, and the names of parameters on operators that read parameters. In a backward pass a
gradient belongs to the layer whose weight gradients are accumulated next, whatever its path of cells is, because
tensors that several layers share (the angles of rotary positions) have the path of the first layer. An operator without
a path or parameter belongs to the part of the operators whose results it uses, or otherwise to the part of the operator
before it.

The HBM traffic of an operator or kernel consists of the tensors that it reads from outside, and of its results that are
read outside. A composite operator, which MindSpore for Ascend expands into basic operators before fusion, counts as one
kernel whether it is expanded or not; the tensors between its basic operators are not counted, because they never leave
the chip. An expanded operator follows the shape rules of its main basic operator: a sum over a dimension (SumExt) is a
reduction, an addition with a factor (AddExt) is elementwise.

`weight_gradients` compares a graph with the two named fusion passes for weight gradients in MindSpore 2.9.0 (report
section 4.5):

    matmul_assignadd_fusion           MatMul (- Cast) - AssignAdd                             -> InplaceMatmulAdd
    grouped_matmul_assignadd_fusion   TransposeExtView - GroupedMatmul - AssignAdd            -> InplaceGroupedMatmulAdd

With such a fusion, the gradient in compute precision is neither written to HBM nor read again. The names of both passes
occur in the wheel's library for Ascend. The conditions of the passes come from MindSpore's public
matmul_assignadd_fusion.cc and grouped_matmul_assignadd_fusion.cc. According to these public sources, both passes are
off unless `--enable_pass` names them (AddFusionPass(..., false) in backend_fusion, if the build has ENABLE_ATB). These
facts were not tested with MindSpore 2.9.0, because its CPU wheel runs no passes for Ascend.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from plugins.operator_fusion.plan import CUBE, EXPANDED, VECTOR, Fusion
from tools.dryrun.activations import VIEWS, backward_segments, tensor_bytes
from tools.dryrun.collectives import COLLECTIVES, MULTIPLY, role_of
from tools.dryrun.graph_text import GraphText, Node, TensorType, arguments_of, listed, tensors
from tools.fusion.cluster import VIRTUAL, Operator, clusters, of_node, refusal
from tools.fusion.split import kernels


@dataclass
class Tally:
    """A `Tally` holds the numbers of operators, kernels and bytes of one part of the model in one pass (forward,
    recomputation or gradient). The numbers in a `Tally` may be fractions, because they may be means over layers.

    Args:
        operators: the number of operators that DVM supports.
        kernels: the number of kernels that DVM makes of these operators.
        fused: the number of these kernels that have several operators.
        before, after: the bytes that the operators move through HBM, without fusion and in fused kernels.
        patterns: for each kind of fused kernel (the names of its operators joined with "-"), the number of such
            kernels.
        saved: for each kind of kernel in `patterns`, the bytes of HBM traffic that these kernels save.
        alone: the number of operators that are not fused by DVM, by (operator, reason). Collectives are not counted in
            `alone`.
        moved: the bytes of HBM traffic of the operators in `alone`.
        named: the number of operator chains at which a fusion pass of MindSpore aims, by (name of the pass, chain,
            reason why it does not match).
        named_bytes: the bytes of HBM traffic that the pass saves or would save there.
    """

    operators: float = 0
    kernels: float = 0
    fused: float = 0
    before: float = 0
    after: float = 0
    patterns: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)
    alone: Counter[tuple[str, str]] = field(default_factory=Counter)
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    named: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    named_bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(self, other: Tally, times: float = 1) -> None:
        """Add the numbers of operators, kernels and bytes of another tally, multiplied by `times`."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, Counter):
                for key, number in value.items():
                    mine[key] += number * times
            else:
                setattr(self, name, mine + value * times)

    @property
    def launches(self) -> float:
        """Return the number of kernel launches that fusion saves, which is the number of operators minus the number of
        kernels.
        """
        return self.operators - self.kernels

    @property
    def beside(self) -> float:
        """Return the HBM traffic in bytes of all operators that DVM does not fuse, without matrix products and
        attention.
        """
        return sum(size for (name, _), size in self.moved.items() if name not in MULTIPLY)

    def as_json(self) -> dict[str, Any]:
        """Return the total numbers of operators, kernels and bytes as values fit for JSON."""
        numbers = {name: round(getattr(self, name)) for name in ("operators", "kernels", "fused")}
        sizes = {"before": self.before, "after": self.after, "of_others": self.beside}
        return numbers | {"launches_saved": round(self.launches)} | {f"bytes_{k}": round(v) for k, v in sizes.items()}


Tallies = dict[tuple[str, str], Tally]  # (part, pass: "forward", "recompute", "gradient" or "step")


def tallies(graph: GraphText, fusion: Fusion, rows: int) -> Tallies:
    """Count all operators of a graph by part of the model and by pass. A subgraph counts once even if the graph calls
    it several times, because a micro-batch calls it once.

    Args:
        rows: the number of rows that is assumed for dimensions that are unknown before routing.
    """
    found: Tallies = {}
    for name, nodes in graph.graphs.items():
        _count(nodes, name, fusion, rows, found)
    return found


def kernels_of(nodes: Sequence[Node], fusion: Fusion) -> list[list[int]]:
    """Return the kernels that DVM makes of a subgraph, each as a list of operator indices. An operator that DVM
    supports but does not fuse with another operator is a kernel with one operator.
    """
    ops = [_operator(node) for node in nodes]
    names = taken_at(fusion)
    taken = [node.op in names and not refused(_operator(node, False), fusion) for node in nodes]
    users = users_of(nodes)
    found, left = [], {place for place, good in enumerate(taken) if good}
    for group in clusters(ops, taken):
        here = {place: number for number, place in enumerate(group)}
        body = [_inside(ops[place], here) for place in group]
        outputs = {here[place] for place in read_outside(nodes, users, group)}
        found += [[group[place] for place in kernel] for kernel in kernels(body, outputs)]
        left -= set(group)
    return sorted(found + [[place] for place in left])


def _count(nodes: Sequence[Node], name: str, fusion: Fusion, rows: int, found: Tallies) -> None:
    parts, users = parts_of(nodes, "◂" in name), users_of(nodes)

    def tally(place: int) -> Tally:
        return found.setdefault((parts[place], _pass(nodes[place], name)), Tally())

    seen: set[int] = set()
    for kernel in kernels_of(nodes, fusion):
        alone = [moved_alone(nodes, place, rows) for place in kernel]
        after = moved_together(nodes, kernel, read_outside(nodes, users, kernel), rows) if len(kernel) > 1 else alone[0]
        one, pattern = tally(kernel[-1]), "-".join(nodes[place].op for place in kernel)
        one.add(Tally(len(kernel), 1, len(kernel) > 1, sum(alone), after))
        if len(kernel) > 1:
            one.patterns[pattern] += 1
            one.saved[pattern] += sum(alone) - after
        seen.update(kernel)
    for place, node in enumerate(nodes):
        if place not in seen and node.op not in UNMOVED | COLLECTIVES:
            key = (node.op, refused(_operator(node, False), fusion))
            tally(place).alone[key] += 1
            tally(place).moved[key] += moved_alone(nodes, place, rows)
    for gradient in weight_gradients(nodes, rows):
        chain = (gradient.fusion, gradient.chain, gradient.refusal)
        tally(gradient.place).named[chain] += 1
        tally(gradient.place).named_bytes[chain] += gradient.bytes


def _pass(node: Node, graph: str) -> str:
    """Return the pass to which an operator belongs, by `role_of`; an operator that adds up gradients has no mark of a
    gradient or of recomputation, and counts as gradient.
    """
    role = role_of(node, graph)
    return "gradient" if role == "recompute" and not node.scope.startswith("recompute_") else role


def _operator(node: Node, standing: bool = True) -> Operator:
    """Return a node as an operator of the fusion model; a composite is represented by its main part."""
    return of_node(node, main_part(node.op) if standing else node.op)


def _inside(operator: Operator, here: dict[int, int]) -> Operator:
    """Return an operator of a cluster with the positions of those of its operands that are in the cluster."""
    return replace(operator, inputs=tuple(here[place] for place in operator.inputs if place in here))


EMBEDDING, HEAD, MTP, COMMON = "embedding", "head", "mtp", "other"
_LAYER = re.compile(r"decoder-\w+/layers-CellList/(\d+)-|(?<![A-Za-z])decoder\.layers\.(\d+)\.")
_MTP = re.compile(r"/mtp-\w+/|(?<![A-Za-z])mtp\.")
_WORDS = (
    (EMBEDDING, re.compile(r"/embedding-\w+|(?<![A-Za-z])embedding\.\w")),
    (
        HEAD,
        re.compile(
            r"/output_layer-\w+|/final_layernorm-|(?<![A-Za-z])(?:output_layer|decoder\.final_layernorm)\.|/loss-\w+"
        ),
    ),
)


def parts_of(nodes: Sequence[Node], backward: bool = False) -> list[str]:
    """Return for each operator of a subgraph the part of the model to which it belongs: a layer number such as "0", or
    "embedding", "head", "mtp" or "other".
    """
    found: list[str] = []
    segments = backward_segments(list(nodes)) if backward else []
    for place, node in enumerate(nodes):
        own = next(filter(None, map(_written, (node.scope, node.head, *node.types))), "")
        if (not own or own.isdecimal()) and not node.scope.startswith("recompute_"):
            own = _layer_behind(segments, place) or own
        taken = (found[place] for place in node.operands if found[place] != COMMON)
        found.append(own or next(taken, found[-1] if found else COMMON))
    return found


def _layer_behind(segments: Sequence[tuple[str, int]], place: int) -> str:
    """Return the layer to whose part of the backward pass an operator belongs; "" for an operator of the head or of the
    embedding.
    """
    part = next((part for part, end in segments if place < end), "")
    return part if part.isdecimal() else ""


def _written(text: str) -> str:
    """Return the part of the model that a path of cells or a parameter's name states."""
    if _MTP.search(text):
        return MTP
    if layer := _LAYER.search(text):
        return layer[1] or layer[2]
    return next((part for part, pattern in _WORDS if pattern.search(text)), "")


_SUMS = ("SumExt", "ReduceMean", "MeanExt", "BiasAddGrad", "ClipByNormNoDivSum")
_WHOLE_NUMBERS = ("AddExt", "AddN", "SubExt", "AssignAdd", "Muls", "Square")  # int32, too
_BROADCASTS = ("Tile",)
_OTHERS = "Exp"  # only floats


def main_part(name: str) -> str:
    """Return the name of the basic operator by which a composite operator is classified; return the name of any other
    operator unchanged.
    """
    if name not in EXPANDED:
        return name
    if name in _SUMS:
        return "ReduceSum"
    if name in _BROADCASTS:
        return "BroadcastTo"
    return "Mul" if name in _WHOLE_NUMBERS else _OTHERS


def taken_at(fusion: Fusion) -> Collection[str]:
    """Return the names of the operators that MindSpore fuses at a fusion level, including composite operators.
    Operators that the recipe disables are left out.

    `cube` counts as `vector`: how products are joined with their neighbours is not modelled.
    """
    known = () if fusion.level == "off" else (*VECTOR, *EXPANDED)
    return frozenset(known) - set(fusion.disable)


def refused(operator: Operator, fusion: Fusion) -> str:
    """Return the reason why DVM does not fuse an operator; return "" if DVM may fuse it."""
    if fusion.level == "off":
        return "nothing is fused"
    if operator.name in fusion.disable:
        return f"{operator.name} is in plugins.operator_fusion.disable"
    if fusion.level == "cube" and operator.name in CUBE:
        return f"{operator.name}: fused at level cube, which is not modelled"
    part = main_part(operator.name)
    if operator.name in EXPANDED and part in fusion.disable:
        return f"{part}, which it is opened into, is in plugins.operator_fusion.disable"
    if operator.name not in taken_at(fusion):
        return refusal(operator)
    why = refusal(replace(operator, name=part))
    return f"{why} (opened into {part})" if why and part != operator.name else why


_BINDS = frozenset(("", "UpdateState", "Partial", "Switch", "FuncUnion", "Stack", "StopGradient", "TransposeExtView"))
UNMOVED = VIEWS | _BINDS | frozenset(VIRTUAL)  # they name, bind and view tensors
_WRITES_FIRST = ("Assign",)  # what they overwrite is not read
_ALIKE = frozenset(("Load", "Depend", "Reshape"))  # the same bytes as their first argument


class Read(NamedTuple):
    """A `Read` describes a tensor that an operator reads, by the operator (or parameter) that made the tensor and by
    the tensor's type.
    """

    source: str
    tensor: TensorType


def reads_of(nodes: Sequence[Node], place: int) -> list[Read]:
    """Return the tensors that an operator reads from HBM, without duplicates."""
    node = nodes[place]
    arguments, types = arguments_of(node.head), _split(node.types[0])
    if len(arguments) != len(types):
        own = [Read(f"{place}.{number}", tensor) for number, tensor in enumerate(node.inputs)]
    else:
        own = [
            Read(_source(nodes, argument), tensor)
            for argument, text in zip(arguments, types, strict=True)
            for tensor in tensors(text)
        ]
    return list(dict.fromkeys(own[1:] if node.op in _WRITES_FIRST else own))


def moved_alone(nodes: Sequence[Node], place: int, rows: int) -> int:
    """Return the bytes of HBM traffic of one operator that is not fused: all of its inputs and outputs."""
    return _bytes((read.tensor for read in reads_of(nodes, place)), rows) + _bytes(nodes[place].outputs, rows)


def moved_together(nodes: Sequence[Node], kernel: Collection[int], kept: Collection[int], rows: int) -> int:
    """Return the HBM traffic in bytes of a fused kernel: the kernel reads each input once, and writes only the results
    that are read outside the kernel.

    Args:
        kept: the positions of the operators whose results are read outside the kernel, or overwrite a parameter (see
            `read_outside`).
    """
    inner = {f"%{place}" for place in kernel}
    reads = dict.fromkeys(read for place in kernel for read in reads_of(nodes, place) if read.source not in inner)
    written = (tensor for place in kernel if place in kept for tensor in nodes[place].outputs)
    return _bytes((read.tensor for read in reads), rows) + _bytes(written, rows)


def users_of(nodes: Sequence[Node]) -> list[list[int]]:
    """Return for each operator the indices of the operators that take its result as an input."""
    users: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for operand in set(node.operands):
            users[operand].append(place)
    return users


def read_outside(nodes: Sequence[Node], users: Sequence[Sequence[int]], kernel: Collection[int]) -> set[int]:
    """Return the indices of the operators of a kernel whose results are read outside the kernel; an operator that
    writes a parameter always counts.
    """
    inside = set(kernel)
    return {
        place
        for place in kernel
        if nodes[place].op.startswith("Assign") or not users[place] or not inside.issuperset(users[place])
    }


def _source(nodes: Sequence[Node], argument: str) -> str:
    """Return the argument from which an argument comes through operators that only rename the same bytes."""
    while argument.startswith("%") and argument[1:].isdecimal() and nodes[int(argument[1:])].op in _ALIKE:
        inner = arguments_of(nodes[int(argument[1:])].head)
        if not inner or not inner[0].startswith("%"):
            break
        argument = inner[0]
    return argument


def _bytes(found: Iterable[TensorType], rows: int) -> int:
    return sum(tensor_bytes(tensor, rows) for tensor in found)


def _split(text: str) -> list[str]:
    """Return the types in a text such as `(<A, (1, 2)>, <B>)` as a list."""
    return [part for part in listed(text[1:-1], "([{<", ")]}>") if part]


MATMUL, GROUPED = "matmul_assignadd_fusion", "grouped_matmul_assignadd_fusion"
LIMIT = 10_000_000  # numbers of a MatMul's result, above which the pass leaves it alone
_PASS_OF = {"MatMul": MATMUL, "MatMulExt": MATMUL, "BatchMatMul": MATMUL, "GroupedMatmul": GROUPED}
_BETWEEN = frozenset(("Reshape", "Cast", "Transpose", "Mul", "AllReduce", "ReduceScatter", "Depend"))
_HALF = ("Float16", "BFloat16")


@dataclass(frozen=True)
class Found:
    """A `Found` is a matrix product whose result, a weight gradient, is added to the accumulated gradient.

    Args:
        fusion: the name of the fusion pass.
        place: the position of the AssignAdd among the operators.
        product: the operator of the matrix product.
        result: the output of this operator.
        between: the operators between the product and AssignAdd, in order.
        refusal: the reason why the pass does not match here; "" if it matches when it is enabled.
        bytes: the HBM traffic that the fusion pass saves, because the product's result is no longer written and read.
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
        """Return the names of the operators from the matrix product to AssignAdd as one text, such as
        "MatMul-Cast-AssignAdd".
        """
        return "-".join((self.product, *self.between, "AssignAdd"))


def weight_gradients(nodes: Sequence[Node], rows: int) -> list[Found]:
    """Return a `Found` for every AssignAdd of a subgraph that adds the result of a matrix product.

    Args:
        rows: the number of rows that is assumed for dimensions that are unknown before routing.
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
    """Return the matrix product whose result an AssignAdd adds, and the operators between the two; None if there is no
    such product.
    """
    at, between = _taken(add, 1), []
    while at is not None and nodes[at].op not in _PASS_OF:
        if nodes[at].op in _BETWEEN:
            between.append(nodes[at].op)
        elif nodes[at].op != "TupleGetItem":
            return None
        at = _taken(nodes[at], 0)
    return None if at is None else (at, tuple(reversed(between)))


def _taken(node: Node, number: int) -> int | None:
    """Return the index of the operator whose result is the given argument; None if the argument is not the result of an
    operator.
    """
    arguments = arguments_of(node.head)
    word = arguments[number] if number < len(arguments) else ""
    return int(word[1:]) if word.startswith("%") and word[1:].isdecimal() else None


def _single(nodes: Sequence[Node], product: Node, between: tuple[str, ...], total: str) -> str:
    """Return the reason why matmul_assignadd_fusion does not match a product."""
    if product.op != "MatMul":
        return f"the product is {product.op}, not MatMul"
    if between not in ((), ("Cast",)):
        return f"{_names(between)} between MatMul and AssignAdd"
    if [word for word in arguments_of(product.head) if word.startswith("Bool(")] != ["Bool(1)", "Bool(0)"]:
        return "transpose_a is needed, and no transpose_b"
    if math.prod(product.outputs[0].shape) > LIMIT:
        return f"more than {LIMIT:,} elements"
    return _types(product.inputs[:2], total)


def _grouped(nodes: Sequence[Node], product: Node, between: tuple[str, ...], total: str) -> str:
    """Return the reason why grouped_matmul_assignadd_fusion does not match a product."""
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
