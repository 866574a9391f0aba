"""This program draws parallel layouts that no table lists, inserts a fault into each, and compares `tc3 prove` on the
compiled graphs with the executed runs.

    python -m benchmarks.drawn_proofs [--draws 20] [--seed 0] [--most 4] [--recipe tests/training/tiny.yaml]

The layouts are those of `tc3 accuracy equivalence --draws`. Each layout is first executed on CPU processes without a
fault and compared with one process, and the graphs of all of its stages are typed. Then a fault is drawn: on all ranks
of a pipeline stage, all AllReduces or ReduceScatters of one kind are left out, or all AllGathers of one kind join their
pieces in the reverse order. Collectives are of one kind if they have the same operator, shape, and distances between
the ranks of the group. The layout is executed again with the fault in each step (and without evaluations on held-out
data, which call collectives, too), and the same fault is planted in the graphs. The
proof should report a violation if and only if the run differs from one process. A line for each run tells both, and the
exit code is 1 if a run differs and nothing is reported of its graphs, or the reverse. If weights only become unknown,
the two do not agree. A fault after which the global norm counts fewer weights once is told as a violation, although
`tc3 prove` itself only prints how many weights the norm counts once, and ends with 0.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click

from benchmarks.planted_spreads import Known, copied, in_step, ranks_at
from benchmarks.proof_and_execution import leave_out
from plugins.semi_auto_cpu.collectives import VARIABLE, CallRecord
from tools.accuracy.equivalence.executed import ExecutedRuns
from tools.accuracy.equivalence.runs import RunFailedError
from tools.accuracy.equivalence.sharding import Sharding, derive_sharded
from tools.accuracy.equivalence.strategies import draw_cases, one_worker
from tools.accuracy.equivalence.trained import finding_text
from tools.dryrun.collectives import attributes_of, generated_groups
from tools.dryrun.compiles import compile_all
from tools.dryrun.executed import calls_file
from tools.dryrun.gradients import judge_gradients
from tools.dryrun.graph_text import GraphText, Node
from tools.dryrun.plan import plan_jobs, without_files
from tools.dryrun.report import norm_report
from tools.prove.cli import Compiled, read_compiled
from tools.prove.report import PROVEN, Stage, prove_rank, ranks_of, type_stages, typing_of
from tools.recipe.load import Recipe

OPERATORS = {"AllReduce": "skip", "ReduceScatter": "skip", "AllGather": "reverse"}
SAME = "as one process"
VIOLATION, DOUBTED, SILENT = "violation", "unknown only", "silent"


class Kind(NamedTuple):
    """A `Kind` is a kind of collectives: the operator, the distances of the ranks of its group from the first of them,
    and the shape of the larger tensor.
    """

    op: str
    distances: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        how = "left out" if OPERATORS[self.op] == "skip" else "in reverse order"
        shape = " x ".join(map(str, self.shape)) or "one number"
        return f"{self.op} of {shape} over ranks {', '.join(f'+{each}' for each in self.distances)} {how}"


def kind_of(op: str, ranks: Sequence[int], shape: Sequence[int]) -> Kind:
    """Return the kind of a collective over these ranks."""
    return Kind(op, tuple(rank - ranks[0] for rank in ranks), tuple(shape))


@dataclass
class Drawn:
    """A `Drawn` holds the compiled graphs of a layout, one for each pipeline stage.

    Args:
        results: the results of the compiles.
        read: the graphs and those of the neighbours of the compiled ranks.
    """

    results: list[dict[str, Any]]
    read: Compiled

    def __post_init__(self) -> None:
        self.per = self.read.mesh.devices
        self.peers = [in_step(graph, own) for graph, own in zip(self.read.graphs, self.read.peers, strict=True)]
        self.norm = self._once(self.results)

    def says(self, stage: int = 0, kind: Kind | None = None) -> str:
        """Return what `tc3 prove` reports of the graphs, without a fault or with one in the collectives of a kind.

        Raises:
            LookupError: the stage has no collective of this kind.
        """
        graphs, peers, results = [*self.read.graphs], [*self.peers], [*self.results]
        if kind:
            result = {**results[stage], "groups": [*results[stage]["groups"]]}
            faulty, *others = (copied(each) for each in (graphs[stage], *peers[stage].values()))
            known = _known(self.results[stage], graphs[stage], self.per)
            places = [node for nodes in faulty.graphs.values() for node in nodes if _is(node, kind, known)]
            if not places:
                raise LookupError(kind)
            for graph in (faulty, *others):
                for node in (node for nodes in graph.graphs.values() for node in nodes if _is(node, kind, known)):
                    _plant(node, kind, result, known)
            graphs[stage], peers[stage], results[stage] = faulty, dict(zip(peers[stage], others, strict=True)), result
        devices = self.per * len(results)  # the global norm adds squares over the ranks of all stages
        judged = [_judged(result, graph, devices) for result, graph in zip(results, graphs, strict=True)]
        mesh = self.read.mesh
        made = [partial(typing_of, *each[:2], mesh, each[2]) for each in zip(judged, graphs, peers, strict=True)]
        typings, differ = type_stages(made)
        stages = [prove_rank(result, typing, {}) for result, typing in zip(judged, typings, strict=True)]
        return _word(stages, differ, self._once(judged) < self.norm)

    def _once(self, results: Sequence[Mapping[str, Any]]) -> int:
        """Return for how many weights the global norm counts each element once."""
        return norm_report(results, self.per * len(results))["once"]


def compiled(recipe: Recipe, sharding: Sharding) -> Drawn:
    """Return the compiled graphs of a recipe with this layout."""
    recipe = without_files(recipe)
    first = range(0, sharding.workers, sharding.workers // sharding.pp)
    plan = plan_jobs(recipe, tuple(first), sharding.micro)
    results = compile_all(plan, 1, True, texts=True)
    return Drawn(results, read_compiled(recipe, plan, results, 1))


def _word(stages: Sequence[Stage], differ: Sequence[str], norm: bool) -> str:
    weights = [weight for stage in stages for weight in stage.weights]
    if differ or norm or any(stage.contradictions for stage in stages):
        return VIOLATION
    if any(weight.verdict == "wrong" for weight in weights):
        return VIOLATION
    return SILENT if all(weight.verdict == PROVEN for weight in weights) else DOUBTED


def _known(result: Mapping[str, Any], graph: GraphText, devices: int) -> Known:
    own, made = ranks_of(result, devices), generated_groups(graph)
    return lambda group: own(group) or made.get(group)


def _judged(result: dict[str, Any], graph: GraphText, devices: int) -> dict[str, Any]:
    """Return the result of a compile with the walk over the graph with a fault."""
    copies = {name: found["copies"] for name, found in result["gradients"].items() if "copies" in found}
    walked = judge_gradients(graph, _known(result, graph, devices), copies, result["rank"])
    return {**result, "gradients": {**result["gradients"], **walked}}


def _is(node: Node, kind: Kind, known: Known) -> bool:
    """Return whether an operator is a collective of a kind."""
    if node.op != kind.op:
        return False
    larger = node.outputs if node.op == "AllGather" else node.inputs
    return kind_of(node.op, ranks_at(node, known), larger[0].shape) == kind


def _plant(node: Node, kind: Kind, result: dict[str, Any], known: Known) -> None:
    """Leave a collective out, or let it have the ranks of its group in the reverse order."""
    if OPERATORS[kind.op] == "skip":
        leave_out(node)
        return
    name = str(attributes_of(node.text)["group"])
    ranks = ranks_at(node, known)
    result["groups"] += [(name, ranks), (f"{name} reversed", ranks[::-1])]
    node.text = node.text.replace(f'group: "{name}"', f'group: "{name} reversed"')


def calls_of(run_dir: Path, rank: int) -> list[CallRecord]:
    """Return the collectives that a rank executed in the first step of a run."""
    calls = json.loads(calls_file(run_dir, rank).read_text("utf-8"))["calls"]
    return [CallRecord(op, tuple(ranks), size, tuple(shape), *rest) for op, ranks, size, shape, *rest in calls]


def words_of(run_dir: Path, kind: Kind, ranks: Sequence[int], steps: int = 1) -> str:
    """Return the value of TC3_COLLECTIVES_TEST that puts a fault into all collectives of a kind on these ranks, in each
    of the first `steps` steps. Every step calls the same collectives.
    """
    words, how = [], OPERATORS[kind.op]
    for rank in ranks:
        calls = [call for call in calls_of(run_dir, rank) if call.op == kind.op]
        hit = [number for number, call in enumerate(calls) if kind_of(call.op, call.ranks, call.shape) == kind]
        words += [f"{how}:{kind.op}:{step * len(calls) + number}@{rank}" for step in range(steps) for number in hit]
    return " ".join(words)


@dataclass
class Bench:
    """A `Bench` executes layouts of a recipe with faults, and compares them with one process."""

    runs: ExecutedRuns

    @property
    def faults(self) -> Path:
        """Return the file with the faults of the run, which may have more words than a variable can hold."""
        return self.runs.work / "faults.txt"

    def compare(self, name: str, sharding: Sharding, words: str = "") -> str:
        """Return how the run of a layout differs from one process; `SAME` if it does not."""
        try:
            self.runs.trained(sharding.against, sharding.alone)
            if words:
                self.faults.write_text(words, "utf-8")
                os.environ[VARIABLE] = f"@{self.faults}"
            found = self.runs.compare(name, sharding)
        except RunFailedError as error:
            return f"fails: {str(error).strip().splitlines()[-1]}"
        finally:
            os.environ.pop(VARIABLE, None)
        return finding_text(found.findings[0], sharding) if found.findings else SAME

    def recipe(self, sharding: Sharding) -> Recipe:
        """Return the recipe that is executed for a layout."""
        return derive_sharded(self.runs.base, sharding, self.runs.steps, self.runs.corpus(sharding.sample))

    def kinds(self, run_dir: Path, sharding: Sharding, numbers: Random) -> list[tuple[int, Kind]]:
        """Return the stages and kinds of collectives into which a fault can be put, in a random order."""
        per = sharding.workers // sharding.pp
        found = {
            (stage, kind_of(call.op, call.ranks, call.shape))
            for stage in range(sharding.pp)
            for call in calls_of(run_dir, stage * per)
            if call.op in OPERATORS and len(call.ranks) > 1
        }
        return numbers.sample(sorted(found), len(found))


@click.command()
@click.option("--draws", default=20, type=click.IntRange(min=1), show_default=True, help="Draw this many layouts.")
@click.option("--seed", default=0, show_default=True, help="Draw layouts and faults with this seed.")
@click.option(
    "--most",
    default=4,
    type=click.IntRange(min=2),
    show_default=True,
    help="Draw only layouts on at most this many processes.",
)
@click.option(
    "--recipe",
    default="tests/training/tiny.yaml",
    show_default=True,
    help="Train this recipe; a run must take only seconds.",
)
@click.option(
    "--work", type=click.Path(path_type=Path), help="Keep the runs in this folder; by default in a temporary one."
)
@click.option("--only", multiple=True, help="Execute only the layouts with these names, for instance draw_0_3.")
def main(draws: int, seed: int, most: int, recipe: str, work: Path | None, only: tuple[str, ...]) -> None:
    """Print a table of layouts and faults; exit code 1 if proof and execution do not agree."""
    wrong, base = 0, one_worker(recipe)
    cases = draw_cases(base, draws, seed, most)
    if unknown := set(only) - {case.name for case in cases}:
        raise click.BadParameter(f"this seed draws no layout {min(unknown)}; it draws {cases[0].name} and so on", None)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(ExecutedRuns(base, 3, (work or Path(folder)).absolute(), lambda name: None))
        click.echo("| layout | fault | executed | types | agree |\n|---|---|---|---|---|")
        for case in cases:
            sharding = case.sharding
            assert sharding is not None, "a drawn case"
            if only and case.name not in only:
                continue
            for fault, shown, said in lines(bench, case.name, sharding, Random(f"{seed} {case.name}")):
                agree = (shown != SAME) == (said == VIOLATION)
                wrong += not agree
                click.echo(f"| {case.what} | {fault} | {shown} | {said} | {'yes' if agree else 'NO'} |")
    sys.exit(bool(wrong))


def lines(bench: Bench, name: str, sharding: Sharding, numbers: Random) -> Iterator[tuple[str, str, str]]:
    """Yield (fault, what the run shows, what the proof reports) of a layout without a fault, and with one."""
    shown, drawn = bench.compare(name, sharding), compiled(bench.recipe(sharding), sharding)
    yield "no fault", shown, drawn.says()
    if shown != SAME:
        return
    run_dir = bench.runs.work / name
    for stage, kind in bench.kinds(run_dir, sharding, numbers):
        try:
            said = drawn.says(stage, kind)
        except LookupError:  # renamed, or merged by the passes for Ascend
            continue
        ranks = range(stage * drawn.per, (stage + 1) * drawn.per)
        words = words_of(run_dir, kind, ranks, bench.runs.steps)
        shown = bench.compare(f"{name}_fault", replace(sharding, held_out=False), words)  # evaluations call some, too
        yield f"{kind}" + f" in stage {stage}" * (sharding.pp > 1), shown, said
        return


if __name__ == "__main__":
    main()
