"""This program inserts faults into small sharded runs, and compares the report of `tc3 prove` on the compiled graph
with the executed run.

    python -m benchmarks.proof_and_execution [--draws 8] [--seed 0] [--recipe tests/training/tiny.yaml]
    python -m benchmarks.proof_and_execution --known     # the faults of executed_faults.py, in graphs only

Each draw is one of the executed strategies of `tc3 accuracy equivalence --list`, and one call of a collective that all
ranks leave out in the first step, or a loss whose gradient is not divided by the ranks, or, where the sequence is cut,
rotary positions that begin at 0 on every rank, or no fault. The run is
executed on CPU processes and compared with one process. The same fault is planted in the graph that `tc3 dryrun`
compiles of the same recipe, at the collective with the same operator, ranks, shape and occurrence, and the graph is
typed. The proof should say that there is a violation if and only if the run differs. A line for each draw tells both;
the exit code is 1 if a run differs and nothing is said of its graph, or the reverse. A graph whose weights only become
unknown says nothing.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import click

from benchmarks.executed_faults import FAULTS, SHARDINGS, Bench, Fault, told
from benchmarks.planted_spreads import (
    ELSEWHERE,
    NAMED,
    SILENT,
    Known,
    compiled_step,
    copied,
    handed_on,
    outcome,
    ranks_at,
    root,
    same_everywhere,
    scoped,
)
from plugins.semi_auto_cpu.collectives import CallRecord
from tools.accuracy.equivalence.strategies import one_worker
from tools.dryrun.collectives import attributes_of, generated_groups
from tools.dryrun.compiles import compile_all
from tools.dryrun.executed import calls_file
from tools.dryrun.graph_text import GraphText, Node, arguments_of
from tools.dryrun.order import check_links
from tools.dryrun.plan import plan_jobs, without_files
from tools.prove.mesh import Mesh
from tools.prove.report import ranks_of

LAYOUTS = ("executed_tp2_sp", "executed_dp2_zero", "executed_moe_ep2", "executed_cp2")
LEFT_OUT = ("AllReduce", "ReduceScatter")
UNDIVIDED, POSITIONS = "undivided_loss", "first_positions"
KNOWN = ("missing_all_reduce", "undivided_loss", "rope_offset", "group_order")  # those of `FAULTS` in all ranks' graphs
LINKS = ("send_without_receive", "receive_without_send")  # those in the graph of one stage of a pipeline


@dataclass(frozen=True)
class Draw:
    """A `Draw` is a strategy with a fault, or without one.

    Args:
        layout: the name of a strategy of `SHARDINGS`.
        op: the operator of the collective that is left out; "" if none is left out.
        call: the index of the call of `op` that is left out.
        kind: the kind of a fault of layout_fault.py; "" for none.
    """

    layout: str
    op: str = ""
    call: int = 0
    kind: str = ""

    @property
    def fault(self) -> Fault:
        """Return the draw as a fault of an executed run."""
        return Fault(str(self), self.layout, f"skip:{self.op}:{self.call}" if self.op else "", self.kind)

    def __str__(self) -> str:
        """Return a text for the draw's fault, for instance "AllReduce 3 left out"."""
        return f"{self.op} {self.call} left out" if self.op else self.kind or "no fault"


class Proofs:
    """A `Proofs` holds the compiled graph of each strategy, and returns what `tc3 prove` reports of the graph with a
    fault.

    Args:
        bench: the bench that makes the recipes that are compiled.
    """

    def __init__(self, bench: Bench):
        self.bench = bench
        self.step = cache(lambda layout: compiled_step(without_files(bench.recipe(bench.sharding(layout)))))

    def calls(self, layout: str, op: str) -> int:
        """Return how often a rank calls a collective in a step."""
        return len(scoped(self.step(layout)[1], op, ""))

    def says_of_all(self, fault: Fault) -> str:
        """Return what `tc3 prove` reports of the graph with a fault of `executed_faults.FAULTS` in all calls of its
        collective.
        """
        result, graph, mesh, peers = self.step(fault.strategy)
        how, _, op = fault.words.partition(":")
        graphs = [copied(each) for each in (graph, *peers.values())]
        places = scoped(graph, op, "") if op else places_of(fault.kind, graph)
        result = {**result, "groups": [*result["groups"]]}
        for place in places:
            if how == "reverse":
                reverse(result, graphs[0], place, mesh.devices)
            if not op and fault.kind == POSITIONS:
                same_everywhere(graphs, place, self._known(result, graph, mesh))
            elif how != "reverse":
                for each in graphs:
                    leave_out(root(each)[place])
        return outcome(result, graphs[0], mesh, dict(zip(peers, graphs[1:], strict=True)), *places)

    def says_of_link(self, fault: Fault) -> str:
        """Return what `tc3 dryrun` reports of the graphs of a pipeline with a fault of `executed_faults.FAULTS`, in
        which one rank leaves out a Send or a Receive.
        """
        plan = plan_jobs(without_files(self.bench.recipe(self.bench.sharding(fault.strategy))), (0, 1))
        results = copy.deepcopy(compile_all(plan, 1, True))
        (_, op, call), rank = fault.words.partition("@")[0].split(":"), int(fault.words.partition("@")[2])
        calls = results[rank]["graph"]["collectives"]
        calls.remove([each for each in calls if each["op"] == op][int(call)])
        problems = check_links(plan, results, 1, alike=False).problems
        return NAMED if any(f"rank {rank}'s {op} {int(call) + 1} " in each for each in problems) else SILENT

    def says(self, draw: Draw, executed: list[CallRecord]) -> str:
        """Return what `tc3 prove` reports of the graph with the fault of a draw: one of the words of `planted_spreads`.

        Args:
            executed: the calls of rank 0 in the first step of the run with this fault.
        """
        result, graph, mesh, peers = self.step(draw.layout)
        known = self._known(result, graph, mesh)
        faulty, *others = (copied(each) for each in (graph, *peers.values()))
        places = places_of(draw.kind, graph) if draw.kind else []
        if draw.op:
            places = [place_of(graph, draw, executed, known)]
            for each in (faulty, *others):
                leave_out(root(each)[places[0]])
        for place in places if draw.kind else ():
            plant = same_everywhere if draw.kind == POSITIONS else handed_on
            plant([faulty, *others], place, known)
        return outcome(result, faulty, mesh, dict(zip(peers, others, strict=True)), *places)

    def _known(self, result: dict[str, Any], graph: GraphText, mesh: Mesh) -> Known:
        """Return a function that gives the ranks of each communication group of a compiled step."""
        groups = generated_groups(graph)
        return lambda group: ranks_of(result, mesh.devices)(group) or groups.get(group)


def places_of(kind: str, graph: GraphText) -> list[int]:
    """Return the operators of a graph that a kind of fault of layout_fault.py changes."""
    return scoped(graph, *(("StridedSlice", "ApplyRotaryPosEmb") if kind == POSITIONS else ("RealDiv", "VirtualDiv")))


def place_of(graph: GraphText, draw: Draw, executed: list[CallRecord], known: Known) -> int:
    """Return the collective of a graph that was left out: that of the same operator, ranks, shape and occurrence.

    Raises:
        LookupError: there are several sums of one number, such as that of the loss and that of the global norm, and
            nothing says which of them is executed first.
    """
    calls = [call for call in executed if call.op == draw.op]
    wanted = calls[draw.call]
    kind = (wanted.ranks, wanted.shape)
    occurrence = sum((call.ranks, call.shape) == kind for call in calls[: draw.call])

    def fits(node: Node) -> bool:
        return node.op == draw.op and (ranks_at(node, known), node.inputs[0].shape) == kind

    places = [place for place, node in enumerate(root(graph)) if fits(node)]
    if math.prod(kind[1]) == 1 and len(places) > 1:
        raise LookupError
    return places[occurrence]


def reverse(result: dict[str, Any], graph: GraphText, place: int, devices: int) -> None:
    """Let a collective have the ranks of its group in the reverse order."""
    node = root(graph)[place]
    name = str(attributes_of(node.text)["group"])
    ranks = ranks_of(result, devices)(name) or generated_groups(graph)[name]
    result["groups"] += [(name, tuple(ranks)), (f"{name} reversed", tuple(ranks)[::-1])]
    node.text = node.text.replace(f'group: "{name}"', f'group: "{name} reversed"')


def leave_out(node: Node) -> None:
    """Replace a collective by its own input, cut to the size of the collective's result."""
    tensor, size = arguments_of(node.head)[0], node.outputs[0].shape
    if size == node.inputs[0].shape:
        node.op, node.head = "TensorMove", f"TensorMove({tensor})"
        return
    begin, end, ones = (
        ", ".join(f"I64({number})" for number in numbers) for numbers in ([0] * len(size), size, [1] * len(size))
    )
    node.op, node.head = "StridedSlice", f"StridedSlice({tensor}, ({begin}), ({end}), ({ones}))"


def draws(random: Random, count: int, proofs: Proofs, layouts: Sequence[str] = LAYOUTS) -> Iterator[Draw]:
    """Yield each strategy without a fault, then strategies with random faults."""
    yield from map(Draw, layouts)
    for _ in range(count):
        layout = random.choice(layouts)
        ops = [op for op in LEFT_OUT if proofs.calls(layout, op)]
        if random.random() < 0.15:
            yield Draw(layout, kind=UNDIVIDED)
        elif SHARDINGS[layout].cp > 1 and random.random() < 0.15:
            yield Draw(layout, kind=POSITIONS)
        else:
            op = random.choice(ops)
            yield Draw(layout, op, random.randrange(proofs.calls(layout, op)))


def judged(bench: Bench, proofs: Proofs, draw: Draw, name: str) -> tuple[str, str, bool]:
    """Return what the executed run of a draw shows, what `tc3 prove` reports of its graph, and whether the run and the
    report agree.

    Args:
        name: the name of the run's folder.
    """
    found = bench.outcome(name, draw.fault)
    differs = bool(found.code or found.findings)
    calls = json.loads(calls_file(bench.work / name, 0).read_text("utf-8"))["calls"]
    records = [CallRecord(op, tuple(ranks), size, tuple(shape), *rest) for op, ranks, size, shape, *rest in calls]
    shown = told(found, SHARDINGS[draw.layout])[0] if differs else "as one process"
    try:
        said = proofs.says(draw, records)
    except LookupError:
        return shown, "unclear which of several", True
    return shown, said, differs == (said in (NAMED, ELSEWHERE))


@click.command()
@click.option("--draws", "count", default=8, show_default=True, help="Draw this many random faults.")
@click.option("--seed", default=0, show_default=True, help="Draw with this seed.")
@click.option(
    "--recipe",
    default="tests/training/tiny.yaml",
    show_default=True,
    help="Train this recipe; a run must take only seconds.",
)
@click.option(
    "--work", type=click.Path(path_type=Path), help="Keep the runs in this folder; by default in a temporary one."
)
@click.option(
    "--layout", "layouts", multiple=True, type=click.Choice(LAYOUTS), help="Use only these strategies; by default all."
)
@click.option("--known", is_flag=True, help="Plant the faults of executed_faults.py in graphs, and execute nothing.")
def main(count: int, seed: int, recipe: str, work: Path | None, layouts: tuple[str, ...], known: bool) -> None:
    """Print a table of draws, and whether proof and execution agree; exit code 1 if one does not."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(one_worker(recipe), 2, (work or Path(folder)).absolute())
        bench.work.mkdir(parents=True, exist_ok=True)
        proofs = Proofs(bench)
        if known:
            click.echo("| fault | strategy | types |\n|---|---|---|")
            for fault in [FAULTS[name] for name in KNOWN]:
                click.echo(f"| {fault.what} | {fault.strategy} | {proofs.says_of_all(fault)} |")
            for fault in [FAULTS[name] for name in LINKS]:
                click.echo(f"| {fault.what} | {fault.strategy} | {proofs.says_of_link(fault)} |")
            return
        click.echo("| strategy | fault | executed | types | agree |\n|---|---|---|---|---|")
        for number, draw in enumerate(draws(Random(seed), count, proofs, layouts or LAYOUTS)):
            name = re.sub(r"\W+", "_", f"{number}_{draw.layout}_{draw}")
            shown, said, agree = judged(bench, proofs, draw, name)
            wrong += not agree
            click.echo(f"| {draw.layout} | {draw} | {shown} | {said} | {'yes' if agree else 'NO'} |")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
