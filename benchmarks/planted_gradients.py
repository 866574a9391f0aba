"""Faults planted in the gradient sums of compiled graphs at full size, and what `tc3 dryrun` says of them.

    python benchmarks/planted_gradients.py RECIPE [--full] [--set KEY=VALUE]

RECIPE is compiled as by `tc3 dryrun --quick` (with --full: one rank of each kind of stage at full depth), unless the
cache has it. Each fault is put into the graph once for each weight that the fault can befall. A line for each fault
says for how many weights the dry run calls exactly that weight wrong, and for how many it says anything else.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from plugins.semi_auto_cpu.ranks import WORLD
from tools.dryrun.collectives import attributes_of
from tools.dryrun.compiles import compile_all, text_of
from tools.dryrun.gradients import RIGHT, WRONG, judge_gradients
from tools.dryrun.graph_text import GraphText, Node, arguments_of, read_graph
from tools.dryrun.plan import plan_jobs, without_files
from tools.dryrun.quick import quick_plan
from tools.layout.resolve import resolve
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

Place = tuple[str, int]


def sums_of(graph: GraphText, weight: str) -> list[Place]:
    """Where the collectives are that add up a weight's gradient: those whose operand is its accumulated gradient."""
    found = []
    for name, nodes in graph.graphs.items():
        for number, node in enumerate(nodes):
            if node.op in ("AllReduce", "ReduceScatter") and f"ref_key=accu_grads.{weight}," in _origin(nodes, node):
                found.append((name, number))
    return found


def _origin(nodes: list[Node], node: Node) -> str:
    """The types of a collective's operand, behind what only waits."""
    while (number := node.value) is not None and nodes[number].op == "Depend":
        node = nodes[number]
    return node.types[0]


def _group(graph: GraphText, node: Node) -> str:
    """A group of another collective, with other ranks."""
    own = attributes_of(node.text)["group"]
    groups = (attributes_of(each.text).get("group") for nodes in graph.graphs.values() for each in nodes)
    return next(str(group) for group in groups if group and group != own)


def removed(graph: GraphText, place: Place) -> None:
    """The sum is left out."""
    node = graph.graphs[place[0]][place[1]]
    node.op, node.head = "TensorMove", node.head.replace(node.op, "TensorMove", 1)


def another_group(graph: GraphText, place: Place) -> None:
    """The sum is over the ranks of another group of this graph."""
    node = graph.graphs[place[0]][place[1]]
    own = attributes_of(node.text)["group"]
    node.text = node.text.replace(f'group: "{own}"', f'group: "{_group(graph, node)}"')


def twice(graph: GraphText, place: Place) -> None:
    """The sum is taken twice."""
    nodes = graph.graphs[place[0]]
    nodes.append(copy.deepcopy(nodes[place[1]]))
    nodes[place[1]].head = re.sub(r"\(%\d+", f"(%{len(nodes) - 1}", nodes[place[1]].head, count=1)


def largest(graph: GraphText, place: Place) -> None:
    """The largest part is taken instead of the sum."""
    node = graph.graphs[place[0]][place[1]]
    node.text = re.sub(r'\bop: "sum"', 'op: "max"', node.text)


def folded(graph: GraphText, weight: str) -> None:
    """What is added to the accumulated gradient is a constant."""
    for nodes in graph.graphs.values():
        for node in nodes:
            if node.op == "AssignAdd" and f"ref_key=accu_grads.{weight}," in node.types[1]:
                target, value, *_ = arguments_of(node.head)
                node.head = node.head.replace(f"{target}, {value}", f"{target}, Tensor(shape=[1], value=[1.0])")


PLANTED: dict[str, Callable[[GraphText, Place], None]] = {
    "left out": removed,
    "another group": another_group,
    "twice": twice,
    "largest instead of sum": largest,
}


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path, exists=True))
@click.option("--full", is_flag=True, help="Compile at full depth.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE")
def main(recipe: Path, full: bool, overrides: tuple[str, ...]) -> None:
    """Plant each fault in each weight's gradient, one at a time."""
    loaded = resolve(without_files(apply_overrides(load_recipe(recipe), overrides)), partial(click.echo, err=True))
    plan = plan_jobs(loaded) if full else quick_plan(loaded)
    results = compile_all(plan, 1, True, texts=True)
    tally: dict[str, list[int]] = {name: [0, 0] for name in ("none", *PLANTED, "folded away")}
    stage = View(loaded).devices // View(loaded).pp
    for job, result in zip(plan.jobs, results, strict=True):
        if "error" in result:
            raise SystemExit(result["error"]["message"])
        graph = read_graph(text_of(job))
        groups = {name: tuple(ranks) for name, ranks in result["groups"]}
        groups.setdefault(WORLD, tuple(range(job.rank // stage * stage, (job.rank // stage + 1) * stage)))
        weights = {name: found["copies"] for name, found in result["gradients"].items() if "copies" in found}
        told = partial(judge_gradients, ranks_of=groups.get, copies=weights, rank=job.rank)
        tally["none"][0] += sum(found["verdict"] == RIGHT for found in told(graph).values())
        tally["none"][1] += sum(found["verdict"] != RIGHT for found in told(graph).values())
        for weight in weights:
            for place in sums_of(graph, weight):
                for name, plant in PLANTED.items():
                    faulty = copy.deepcopy(graph)
                    plant(faulty, place)
                    _count(tally[name], told(faulty), weight)
            faulty = copy.deepcopy(graph)
            folded(faulty, weight)
            _count(tally["folded away"], told(faulty), weight)
    click.echo("| fault | exactly that weight is wrong | anything else |\n|---|---|---|")
    for name, (named, other) in tally.items():
        click.echo(f"| {name} | {named} | {other} |" if name != "none" else f"| none: all right | {named} | {other} |")


def _count(tally: list[int], found: dict[str, dict[str, Any]], weight: str) -> None:
    wrong = [name for name, one in found.items() if one.get("verdict") == WRONG]
    tally[wrong != [weight]] += 1


if __name__ == "__main__":
    main()
