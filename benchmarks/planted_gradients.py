"""This program plants faults in the gradient sums and divisors of compiled graphs at full size, and prints the reports
of `tc3 dryrun`.

    python benchmarks/planted_gradients.py RECIPE [--full] [--set KEY=VALUE]

RECIPE is compiled as by `tc3 dryrun --quick` (with --full: one rank of each kind of stage at full depth), unless the
cache has it. Each fault is put into the graph once for each weight that the fault can befall; a divisor of the backward
pass's seed befalls all weights. A line for each fault says how often the dry run calls exactly these weights wrong, and
how often it says anything else.
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
from tools.dryrun.gradients import RIGHT, WRONG, judge_gradients, seeds_of
from tools.dryrun.graph_text import GraphText, Node, arguments_of, read_graph
from tools.dryrun.plan import plan_jobs, without_files
from tools.dryrun.quick import quick_plan
from tools.dryrun.scale import SCALED, Scale, judge_scale, number_of
from tools.layout.resolve import resolve
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

Place = tuple[str, int]


def sums_of(graph: GraphText, weight: str) -> list[Place]:
    """Return the places of the collectives that add up a weight's gradient: those whose operand is the weight's
    accumulated gradient.
    """
    found = []
    for name, nodes in graph.graphs.items():
        for number, node in enumerate(nodes):
            if node.op in ("AllReduce", "ReduceScatter") and f"ref_key=accu_grads.{weight}," in _origin(nodes, node):
                found.append((name, number))
    return found


def _origin(nodes: list[Node], node: Node) -> str:
    """Return the type of a collective's operand, which is read through operators that only wait (Depend)."""
    while (number := node.value) is not None and nodes[number].op == "Depend":
        node = nodes[number]
    return node.types[0]


def _group(graph: GraphText, node: Node) -> str:
    """Return the name of another collective's group, with other ranks than the group of this collective."""
    own = attributes_of(node.text)["group"]
    collectives = (
        each for nodes in graph.graphs.values() for each in nodes if each.op in ("AllReduce", "ReduceScatter")
    )
    groups = (attributes_of(each.text).get("group") for each in collectives)
    return next(str(group) for group in groups if group and group != own)


def removed(graph: GraphText, place: Place) -> None:
    """Leave out the sum of the gradient over ranks."""
    node = graph.graphs[place[0]][place[1]]
    node.op, node.head = "TensorMove", node.head.replace(node.op, "TensorMove", 1)


def another_group(graph: GraphText, place: Place) -> None:
    """Let the sum of the gradient go over the ranks of another group of this graph."""
    node = graph.graphs[place[0]][place[1]]
    own = attributes_of(node.text)["group"]
    node.text = node.text.replace(f'group: "{own}"', f'group: "{_group(graph, node)}"')


def twice(graph: GraphText, place: Place) -> None:
    """Take the sum of the gradient over ranks twice."""
    nodes = graph.graphs[place[0]]
    nodes.append(copy.deepcopy(nodes[place[1]]))
    nodes[place[1]].head = re.sub(r"\(%\d+", f"(%{len(nodes) - 1}", nodes[place[1]].head, count=1)


def largest(graph: GraphText, place: Place) -> None:
    """Take the largest part of the gradient instead of the sum over ranks."""
    node = graph.graphs[place[0]][place[1]]
    node.text = re.sub(r'\bop: "sum"', 'op: "max"', node.text)


def folded(graph: GraphText, weight: str) -> None:
    """Replace the value that is added to the accumulated gradient by a constant."""
    for nodes in graph.graphs.values():
        for node in nodes:
            if node.op == "AssignAdd" and f"ref_key=accu_grads.{weight}," in node.types[1]:
                target, value, *_ = arguments_of(node.head)
                node.head = node.head.replace(f"{target}, {value}", f"{target}, Tensor(shape=[1], value=[1.0])")


def divisors_of(graph: GraphText) -> list[Place]:
    """Return the places where the seed of the backward pass is divided by the number of micro-batches and of
    devices.
    """
    nodes = graph.graphs[graph.root]
    scaled: set[int] = set()
    found = []
    for number, node in enumerate(nodes):
        one = all(size == 1 for out in node.outputs for size in out.shape)
        if not ("_scale_sense" in node.head or scaled.intersection(node.operands)) or not one:
            continue
        if node.op in ("Divs", "RealDiv") and number_of(arguments_of(node.head)[1]):
            found.append((graph.root, number))
        if node.op in (*SCALED, "Load", "TensorMove", "SumExt") and "VirtualDiv" not in node.scope:
            scaled.add(number)
    return found


def inverses_of(graph: GraphText, weight: str) -> list[Place]:
    """Return the places where the sum of a weight's gradient is multiplied by the inverse of the loss scale."""
    nodes = graph.graphs[graph.root]
    summed = {number for _, number in sums_of(graph, weight)}
    found = []
    for number, node in enumerate(nodes):
        if node.op == "Mul" and nodes[node.operands[-1]].op == "Reciprocal":
            source = nodes[node.operands[-1]]
            while source.value is not None:
                source = nodes[source.value]
            if "_scale_sense" not in source.head:  # by another factor, which is 1
                continue
            gradient = node
            while gradient.op in ("Mul", "Depend") and gradient.value is not None:
                place, gradient = gradient.value, nodes[gradient.value]
            if place in summed:
                found.append((graph.root, number))
    return found


SUMS: dict[str, Callable[[GraphText, Place], None]] = {
    "left out": removed,
    "another group": another_group,
    "twice": twice,
    "largest instead of sum": largest,
}
FACTORS: dict[str, Callable[[GraphText, Place], None]] = {"left out": removed, "twice": twice}


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path, exists=True))
@click.option("--full", is_flag=True, help="Compile at full depth.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE")
def main(recipe: Path, full: bool, overrides: tuple[str, ...]) -> None:
    """Plant each fault in each weight's gradient, one at a time."""
    loaded = resolve(without_files(apply_overrides(load_recipe(recipe), overrides)), partial(click.echo, err=True))
    plan = plan_jobs(loaded) if full else quick_plan(loaded)
    results = compile_all(plan, 1, True, texts=True)
    small = View(plan.jobs[0].recipe)
    stage = small.devices // small.pp
    tally: dict[str, list[int]] = {}
    for job, result in zip(plan.jobs, results, strict=True):
        if "error" in result:
            raise SystemExit(result["error"]["message"])
        seeds = [Scale(*seed) for one in results for seed in one["seeds"]]
        examine(read_graph(text_of(job)), result, seeds, plan.micro_batches * small.accumulation, stage, tally)
    none = tally.pop("none")
    click.echo("| fault | exactly these weights are wrong | anything else |\n|---|---|---|")
    click.echo(f"| none: all right | {none[0]} | {none[1]} |")
    for name, (named, other) in tally.items():
        click.echo(f"| {name} | {named} | {other} |")


def examine(
    graph: GraphText,
    result: dict[str, Any],
    seeds: list[Scale],
    micro_batches: int,
    stage: int,
    tally: dict[str, list[int]],
) -> None:
    """Plant each fault in one rank's graph, and add to `tally` how often [exactly the weights concerned, anything else]
    were called wrong.

    Args:
        result: the result of the rank's compile.
        seeds: the seeds of the backward pass on all compiled ranks, which judge a stage without losses.
        stage: number of devices of a pipeline stage.
    """
    rank = result["rank"]
    groups = {name: tuple(ranks) for name, ranks in result["groups"]}
    groups.setdefault(WORLD, tuple(range(rank // stage * stage, (rank // stage + 1) * stage)))
    weights = {name: found["copies"] for name, found in result["gradients"].items() if "copies" in found}

    def count(name: str, faulty: GraphText, concerned: list[str]) -> None:
        told = judge_gradients(faulty, groups.get, weights, rank)
        start = seeds_of(faulty, groups.get) or seeds
        wrong = [weight for weight, found in told.items() if found.get("verdict") == WRONG]
        scaled = {
            weight: [Scale(*each) for each in found["scales"]] for weight, found in told.items() if "scales" in found
        }
        judged = {weight: judge_scale(each, start, micro_batches, stage) for weight, each in scaled.items()}
        wrong += [weight for weight, (fine, _) in judged.items() if not fine and weight not in wrong]
        known = all(found["verdict"] == RIGHT for found in told.values()) and not any(why for _, why in judged.values())
        tally.setdefault(name, [0, 0])[sorted(wrong) != sorted(concerned) or (name == "none" and not known)] += 1

    count("none", graph, [])
    for weight in weights:
        for place in sums_of(graph, weight):
            for name, plant in SUMS.items():
                count(f"sum: {name}", planted(graph, plant, place), [weight])
        count("folded away", planted(graph, folded, weight), [weight])
        for place in inverses_of(graph, weight):
            for name, plant in FACTORS.items():
                count(f"division by the loss scale: {name}", planted(graph, plant, place), [weight])
    for place in divisors_of(graph):
        kind = "devices" if "VirtualDiv" in graph.graphs[place[0]][place[1]].scope else "micro-batches"
        for name, plant in FACTORS.items():
            count(f"division by the {kind}: {name}", planted(graph, plant, place), list(weights))


def planted(graph: GraphText, plant: Callable[[GraphText, Any], None], where: Any) -> GraphText:
    """Return a copy of the graph with a fault in it."""
    faulty = copy.deepcopy(graph)
    plant(faulty, where)
    return faulty


if __name__ == "__main__":
    main()
