"""Small graphs as MindSpore writes them, from a line for each operator."""

from collections.abc import Sequence

from tools.dryrun.graph_text import Node

BYTES = {"Float32": 4, "BFloat16": 2, "Int64": 8}


def node(op, taken: Sequence[int | str], takes, gives, scope="", more=()):
    """Return the node of one operator.

    Args:
        taken: the places of operators, or the names of parameters, whose results the operator takes.
        takes: (type, shape) of each input.
        gives: (type, shape) of the result.
        more: further arguments, as text.
    """
    words = [f"%{each}" if isinstance(each, int) else f"%para1_{each}" for each in taken]
    types = [f"<Tensor[{dtype}], ({', '.join(map(str, shape))})>" for dtype, shape in takes]
    head = f"PrimFunc_{op}({', '.join([*words, *more])})"
    texts = (f"({', '.join([*types, *['<Bool, NoShape>'] * len(more)])})", f"(<Tensor[{gives[0]}], {tuple(gives[1])}>)")
    operands = [each for each in taken if isinstance(each, int)]
    return Node(op, head, head, operands, types=texts, scope=scope)


def text_of(nodes: Sequence[Node]) -> str:
    """A whole graph in MindSpore's format."""
    lines = ["# IR entry: @main", "subgraph @main(%para1_x) {"]
    for place, each in enumerate(nodes):
        lines.append(f"  %{place}(each) = {each.head} {{instance name: {each.op}}}")
        lines.append(f"      : {each.types[0]} -> {each.types[1]}")
        lines.append(f"      # Fullname with scope: ({each.scope})")
    return "\n".join([*lines, "}", ""])
