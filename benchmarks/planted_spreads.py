"""This program plants faults in compiled graphs, inside the forward and backward pass, and prints the reports of `tc3
prove`.

    python benchmarks/planted_spreads.py RECIPE [--at-most N] [--set KEY=VALUE]

RECIPE must have no pipeline. It is compiled as by `tc3 prove`; graphs in the cache are used again. Each kind of fault
is planted at up to N places of the graph, one at a time, on every rank alike. A line for each kind says how often the
report names the operator of the fault, an operator directly before or behind it, or only the one weight whose gradient
is wrong (`named`), how often a violation is reported somewhere else (`elsewhere`), how often weights become unknown and
nothing is called wrong, and how often nothing is said.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from plugins.errors import TC3Error
from tools.dryrun.collectives import attributes_of, generated_groups
from tools.dryrun.compiles import compile_all, text_of
from tools.dryrun.gradients import WRONG, judge_gradients
from tools.dryrun.graph_text import GraphText, Node, arguments_of, read_graph
from tools.dryrun.plan import plan_jobs, without_files
from tools.dryrun.report import norm_report
from tools.layout.resolve import resolve
from tools.prove.cli import require_collectives
from tools.prove.mesh import Mesh, Peers
from tools.prove.origin import only_moves
from tools.prove.report import PROVEN, mesh_for, prove_rank, ranks_of, typing_of
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

Known = Callable[[str], tuple[int, ...] | None]
Plant = Callable[[list[GraphText], int, Known], None]  # the graph and those of the next ranks, the place, the groups
SUMMING = ("AllReduce", "AllGather", "ReduceScatter")
NAMED, ELSEWHERE, DOUBTED, SILENT = "named", "elsewhere", "unknown only", "silent"


def root(graph: GraphText) -> list[Node]:
    """Return the operators of the step's own graph."""
    return graph.graphs[graph.root]


def handed_on(graphs: list[GraphText], place: int, known: Known) -> None:
    """Leave out the operator: replace its result by its first argument of the same shape, or otherwise by its first
    argument.
    """
    for graph in graphs:
        node = root(graph)[place]
        given = [text for text in arguments_of(node.head) if text.startswith("%")]
        large = [text for text, own in zip(given, node.inputs, strict=False) if own.shape == node.outputs[0].shape]
        tensor = [*large, *given][0]
        node.op, node.head = "TensorMove", f"TensorMove({tensor})"


def other_group(graphs: list[GraphText], place: int, known: Known) -> None:
    """Let the collective go over a group with the same number of other ranks."""
    node = root(graphs[0])[place]
    own = ranks_at(node, known)
    for other in root(graphs[0]):
        if other.op in SUMMING and len(ranks := ranks_at(other, known)) == len(own) and ranks != own:
            group = attributes_of(other.text)["group"]
            node.text = re.sub(r'\bgroup: "[^"]*"', f'group: "{group}"', node.text)
            return
    smaller = [other for other in root(graphs[0]) if other.op in SUMMING and 1 < len(ranks_at(other, known)) < len(own)]
    if smaller and node.op == "AllReduce":  # a sum over all becomes one over an axis
        group = attributes_of(smaller[0].text)["group"]
        node.text = re.sub(r'\bgroup: "[^"]*"', f'group: "{group}"', node.text)
        return
    raise LookupError(f"no other group for {node.head}")


def ranks_at(node: Node, known: Known) -> tuple[int, ...]:
    """Return the ranks of a collective."""
    ranks = known(str(attributes_of(node.text)["group"]))
    assert ranks, f"{node.head} uses a group that nobody knows"
    return ranks


def twice(graphs: list[GraphText], place: int, known: Known) -> None:
    """Take the sum over ranks twice."""
    for graph in graphs:
        nodes = root(graph)
        again = copy.deepcopy(nodes[place])
        again.operands, again.head = [place], re.sub(r"\(%\d+", f"(%{place}", again.head, count=1)
        nodes.append(again)
        behind(graph, place, len(nodes) - 1)


def behind(graph: GraphText, place: int, new: int) -> None:
    """Let all users of an operator use another one, which is moved in front of them."""
    nodes = root(graph)
    moved = nodes.pop(new)
    nodes.insert(place + 1, moved)
    for number, node in enumerate(nodes):
        if number <= place + 1:
            continue

        def renamed(found: re.Match[str]) -> str:
            old = int(found[1])
            return f"%{place + 1}" if old == place else f"%{old + 1}" if old > place else found[0]

        node.head = re.sub(r"%(\d+)\b", renamed, node.head)
        node.operands = [int(number) for number in re.findall(r"%(\d+)\b", node.head)]


def same_everywhere(graphs: list[GraphText], place: int, known: Known) -> None:
    """Give the operator on every rank the constants of the first rank."""
    for peer in graphs[1:]:
        root(peer)[place].head = root(graphs[0])[place].head


def along_another_axis(graphs: list[GraphText], place: int, known: Known) -> None:
    """Let the constants of the operator differ between ranks along another axis of the mesh."""
    beside = graphs[1:-1] if len(graphs) > 3 else graphs[1:]  # without the last rank along all axes
    heads = [root(peer)[place].head for peer in beside]
    for peer, head in zip(beside, heads[1:] + heads[:1], strict=True):
        root(peer)[place].head = head


def largest(graphs: list[GraphText], place: int, known: Known) -> None:
    """Turn the sum of a collective over ranks into the largest value, or the largest value into the sum."""
    node = root(graphs[0])[place]
    node.text = re.sub(r'\bop: "(sum|max)"', lambda found: f'op: "{"max" if found[1] == "sum" else "sum"}"', node.text)


def other_number(graphs: list[GraphText], place: int, known: Known) -> None:
    """Halve the divisors or factors of an operator."""

    def halved(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) // 2}"

    for graph in graphs:
        node = root(graph)[place]
        node.head = re.sub(r"(value=|I64\()(\d+)(?=\)|\.)", halved, node.head)


def other_dimension(graphs: list[GraphText], place: int, known: Known) -> None:
    """Join gathered pieces along the last dimension instead of their own dimension."""
    for graph in graphs:
        node = root(graph)[place]
        shape = node.outputs[0].shape
        node.head = re.sub(r"I64\((-?\d+)\)\)$", f"I64({len(shape) - 1}))", node.head)


def counts_swapped(graphs: list[GraphText], place: int, known: Known) -> None:
    """Exchange rows by the row counts of the opposite direction."""
    for graph in graphs:
        node = root(graph)[place]
        node.head = re.sub(r"\((%\d+), (%\d+), (%\d+)\)$", r"(\1, \3, \2)", node.head)


def other_order(graphs: list[GraphText], place: int, known: Known) -> None:
    """Take rows in the order that the previous operator of the same kind uses."""
    for graph in graphs:
        nodes = root(graph)
        before = next(node for node in reversed(nodes[:place]) if node.op == nodes[place].op)
        order = arguments_of(before.head)[2]
        arguments = arguments_of(nodes[place].head)
        nodes[place].head = nodes[place].head.replace(arguments[2], order)
        nodes[place].operands = [int(number) for number in re.findall(r"%(\d+)\b", nodes[place].head)]


def own_part(graphs: list[GraphText], place: int, known: Known) -> None:
    """Replace a ReduceScatter by a slice: every rank keeps its piece of its own part of the sum."""
    node = root(graphs[0])[place]
    part, tensor, ranks = node.outputs[0].shape, arguments_of(node.head)[0], ranks_at(node, known)
    for number, graph in enumerate(graphs):  # of two axes, and of the last rank along both
        last = number == len(graphs) - 1 > 2
        at = int(last or (number > 0 and (number == 1) == (ranks[1] - ranks[0] == 1)))
        begin = ", ".join(f"I64({part[0] * at if not axis else 0})" for axis in range(len(part)))
        end = ", ".join(f"I64({part[0] * (at + 1) if not axis else size})" for axis, size in enumerate(part))
        ones = ", ".join("I64(1)" for _ in part)
        other = root(graph)[place]
        other.op, other.head = "StridedSlice", f"StridedSlice({tensor}, ({begin}), ({end}), ({ones}))"


def collectives(graph: GraphText, op: str, backward: bool | None, mirror: bool = False) -> Iterator[int]:
    """Yield the places of the collectives of the forward or backward pass, or of those that sum the gradients of
    weights.
    """
    for number, node in enumerate(root(graph)):
        if node.op != op or "clip" in node.scope + node.source or math_size(node) == 1:
            continue
        of_weight = "Mirror" in node.scope
        back = "Gradients/" in node.scope or "Grad_" in node.scope
        if of_weight == mirror and (mirror or backward is None or back == backward):
            yield number


def math_size(node: Node) -> int:
    """Return the elements of the first output."""
    total = 1
    for size in node.outputs[0].shape:
        total *= size
    return total


def differing(graph: GraphText, peers: Mapping[str, GraphText], op: str) -> list[int]:
    """Return the places of the operators of a kind whose constants are not the same on all ranks."""
    return [
        number
        for number, node in enumerate(root(graph))
        if node.op == op and any(root(peer)[number].head != node.head for peer in peers.values())
    ]


def scoped(graph: GraphText, op: str, scope: str) -> list[int]:
    """Return the places of the operators of a kind whose scope matches a pattern."""
    return [number for number, node in enumerate(root(graph)) if node.op == op and re.search(scope, node.scope)]


def faults(graph: GraphText, peers: Mapping[str, GraphText]) -> dict[str, tuple[list[int], Plant]]:
    """Return kind of fault -> the places where it can be planted, and how."""
    mirrors = list(collectives(graph, "AllReduce", None, mirror=True))
    masks = [n for n, node in enumerate(root(graph)) if node.op == "Mul" and _mask(graph, node)]
    joins = [n for n, node in enumerate(root(graph)) if node.op == "Concat" and re.search(r"I64\(1\)\)$", node.head)]
    gathers = [n for n in joins if _gathered(graph, root(graph)[n])]
    exchanges = scoped(graph, "AlltoAllV", "")
    by_data = [n for n in exchanges if len(re.findall(r"%\d+", root(graph)[n].head)) == 3]
    forward, back = "forward", "backward"
    found: dict[str, tuple[list[int], Plant]] = {
        "a gradient's sum left out": (mirrors, handed_on),
        "a gradient's sum over another group": (mirrors, other_group),
        "a gradient's sum taken twice": (mirrors, twice),
        "a gradient's largest part instead of the sum": (mirrors, largest),
        f"{forward}: sum and scatter over another group": (
            list(collectives(graph, "ReduceScatter", False)),
            other_group,
        ),
        f"{forward}: each rank keeps its own part instead of the sum": (
            list(collectives(graph, "ReduceScatter", False)),
            own_part,
        ),
        f"{forward}: pieces gathered over another group": (list(collectives(graph, "AllGather", False)), other_group),
        f"{forward}: a sum over ranks left out": (list(collectives(graph, "AllReduce", False)), handed_on),
        f"{forward}: the largest instead of a sum, or the reverse": (
            list(collectives(graph, "AllReduce", False)),
            largest,
        ),
        f"{back}: sum and scatter over another group": (list(collectives(graph, "ReduceScatter", True)), other_group),
        f"{back}: each rank keeps its own part instead of the sum": (
            list(collectives(graph, "ReduceScatter", True)),
            own_part,
        ),
        f"{back}: pieces gathered over another group": (list(collectives(graph, "AllGather", True)), other_group),
        "the factor of the loss's ranks left out": (scoped(graph, "Muls", "_NLLLoss"), handed_on),
        "the loss's gradient divided by half the devices": (scoped(graph, "RealDiv", "VirtualDiv"), other_number),
        "the division by the devices left out": (scoped(graph, "RealDiv", "VirtualDiv"), handed_on),
        "the mask of the vocabulary left out": (masks, handed_on),
        "the vocabulary starts at 0 on every rank": (differing(graph, peers, "Sub"), same_everywhere),
        "every rank takes the same slice": (differing(graph, peers, "StridedSlice"), same_everywhere),
        "slices taken along another axis": (differing(graph, peers, "StridedSlice"), along_another_axis),
        "zeros put around along another axis": (differing(graph, peers, "StridedSliceGrad"), along_another_axis),
        "pieces joined along another dimension": (gathers, other_dimension),
        "rows exchanged over another group": (exchanges, other_group),
        "rows exchanged by the counts of the way back": (by_data, counts_swapped),
        "every rank keeps the rows of the first node": (
            differing(graph, peers, "GreaterEqual") + differing(graph, peers, "LessScalar"),
            same_everywhere,
        ),
        "rows taken in another order": (scoped(graph, "IndexSelect", "")[1:], other_order),
    }
    return found


def in_step(graph: GraphText, peers: Mapping[str, GraphText]) -> dict[str, GraphText]:
    """Return the graph once for each axis, with the constants that the next rank along it has."""
    found = {}
    for axis, peer in peers.items():
        found[axis], both = copy.deepcopy(graph), Peers(graph, {"next": peer})
        for place, (name, nodes) in enumerate(graph.graphs.items()):
            for number, node in enumerate(nodes):
                if node.op and both.differs(name, number):  # a call of a graph, whose name may differ, has no constants
                    found[axis].graphs[name][number].head = both.counterpart("next", place, number, node).head
    return found


def _mask(graph: GraphText, node: Node) -> bool:
    """Return whether a product has the mask of the vocabulary as a factor."""
    sources = [root(graph)[number] for number in node.operands]
    return any(each.op == "ExpandDims" and _op(graph, each) in ("Equal", "Cast") for each in sources)


def _op(graph: GraphText, node: Node) -> str:
    return root(graph)[node.value].op if node.value is not None else ""


def _gathered(graph: GraphText, node: Node) -> bool:
    """Return whether a Concat moves pieces that an AllGather has gathered."""
    while node.value is not None and node.op in ("Concat", "MakeTuple", "TupleGetItem", "Split"):
        node = root(graph)[node.value]
    return node.op == "AllGather"


def outcome(
    result: Mapping[str, Any], graph: GraphText, mesh: Mesh, peers: Mapping[str, GraphText], *places: int
) -> str:
    """Return the word for what `tc3 prove` reports about a graph with a fault at some places: `named`, `elsewhere`,
    `unknown only` or `silent`.
    """
    known = ranks_of(result, mesh.devices)
    copies = {name: found["copies"] for name, found in result["gradients"].items() if "copies" in found}
    judged = {**result, "gradients": judge_gradients(graph, known, copies, result["rank"])}
    stage = prove_rank(judged, typing_of(judged, graph, mesh, peers), {})
    wrong = [weight for weight in stage.weights if weight.verdict == WRONG]
    if wrong or stage.contradictions:
        reported = stage.contradictions + [f"{weight.name}: {weight.why}" for weight in wrong]
        operators = set[str]().union(*(operators_at(graph, place) for place in places))
        sure = names(reported, operators) or of_one_weight(reported, [weight.name for weight in wrong])
        return NAMED if sure else ELSEWHERE
    norms = [norm_report([each], mesh.devices)["once"] for each in (judged, result)]
    if norms[0] < norms[1]:  # `tc3 prove` prints that the global norm counts fewer weights once
        return ELSEWHERE
    return SILENT if all(weight.verdict == PROVEN for weight in stage.weights) else DOUBTED


def operators_at(graph: GraphText, place: int) -> set[str]:
    """Return an operator of a graph as reports name it, and the operators that give it its arguments or take its
    result, also through operators that only move what they are given.
    """
    nodes, found = root(graph), {place}
    for users in (False, True):
        todo = [place]
        while todo:
            at = todo.pop()
            moves = at == place or only_moves(nodes[at])
            found.add(at)
            if moves:
                todo += [n for n, node in enumerate(nodes) if at in node.operands] if users else nodes[at].operands
    return {f"{nodes[number].op} %{number}" for number in found}


def names(texts: Sequence[str], operators: set[str]) -> bool:
    """Return whether texts of a report name one of some operators."""
    return any(operators & set(re.findall(r"\w+ %\d+", text)) for text in texts)


def of_one_weight(texts: Sequence[str], wrong: Sequence[str]) -> bool:
    """Return whether texts of a report speak only of the gradient of one weight, which the report calls wrong."""
    return len(set(wrong)) == 1 and all(f"{wrong[0]}: " in text for text in texts)


def copied(graph: GraphText) -> GraphText:
    """Return a copy of a graph; changes of its operators do not change the original."""
    nodes = {
        name: [replace(node, operands=list(node.operands)) for node in each] for name, each in graph.graphs.items()
    }
    return GraphText(graph.root, nodes, graph.parameters)


def examine(
    result: Mapping[str, Any], graph: GraphText, mesh: Mesh, peers: Mapping[str, GraphText], at_most: int
) -> dict[str, Counter[str]]:
    """Return kind of fault -> how often each word of `outcome` is reported, for faults at operators on the way to a
    gradient or a loss.
    """
    groups, found = generated_groups(graph), dict[str, Counter[str]]()
    sound = typing_of(result, graph, mesh, peers)
    prove_rank(result, sound, {})

    def known(group: str) -> tuple[int, ...] | None:
        return ranks_of(result, mesh.devices)(group) or groups.get(group)

    for name, (every, plant) in faults(graph, peers).items():
        places = [place for place in every if (graph.root, place) in sound.asked]
        tally = found[name] = Counter()
        for place in places[:: max(1, -(-len(places) // at_most))]:
            faulty, *others = (copied(each) for each in (graph, *peers.values()))
            try:
                plant([faulty, *others], place, known)
            except LookupError:  # the graph has no other group of this size
                continue
            tally[outcome(result, faulty, mesh, dict(zip(peers, others, strict=True)), place)] += 1
    return found


def compiled_step(recipe: Recipe) -> tuple[dict[str, Any], GraphText, Mesh, dict[str, GraphText]]:
    """Return what `examine` needs of a recipe without a pipeline: the compiled graphs of rank 0 and of the next rank
    along each axis.
    """
    view = View(recipe)
    plan = plan_jobs(recipe, (0,))
    result = compile_all(plan, 1, True, texts=True)[0]
    graph = read_graph(text_of(plan.jobs[0]))
    mesh = mesh_for([result], [graph], [("tp", view.tp), ("cp", view.cp), ("dp", view.dp)])
    beside = {axis: replace(plan.jobs[0], rank=rank) for axis, rank in mesh.neighbours(0).items()}
    compile_all(replace(plan, jobs=list(beside.values())), 1, True, texts=True)
    return result, graph, mesh, in_step(graph, {axis: read_graph(text_of(job)) for axis, job in beside.items()})


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--at-most", default=8, show_default=True, help="Plant each kind of fault at no more than this many places."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE")
def main(recipe: Path, at_most: int, overrides: tuple[str, ...]) -> None:
    """Plant each kind of fault in the graph of the first rank."""
    loaded = resolve(
        without_files(apply_overrides(load_recipe(recipe), overrides)), lambda line: click.echo(line, err=True)
    )
    try:
        require_collectives(loaded)
        step = compiled_step(loaded)
    except TC3Error as error:
        raise click.UsageError(str(error)) from None
    click.echo(f"| fault | {NAMED} | {ELSEWHERE} | {DOUBTED} | {SILENT} |\n|---|---|---|---|---|")
    for name, tally in examine(*step, at_most).items():
        click.echo(f"| {name} | " + " | ".join(str(tally[each]) for each in (NAMED, ELSEWHERE, DOUBTED, SILENT)) + " |")


if __name__ == "__main__":
    main()
