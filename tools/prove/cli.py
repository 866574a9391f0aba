"""This module is the command `tc3 prove`, which reports for how many weights of a recipe the gradient is proven to be
right. The exit code of the command is 0 if no gradient is wrong, 1 if a gradient is wrong, and 2 for wrong usage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plugins.errors import RecipeError
from tools.check.check import require_sound
from tools.dryrun.compiles import compile_all, refusal_of, text_of
from tools.dryrun.gradients import UNKNOWN, WRONG
from tools.dryrun.graph_text import GraphText, read_graph
from tools.dryrun.plan import Plan, plan_jobs, without_files
from tools.dryrun.quick import quick_plan
from tools.layout.resolve import resolve
from tools.prove.mesh import Mesh
from tools.prove.report import (
    PROVEN,
    Stage,
    mesh_for,
    prove_rank,
    report_of,
    scale_faults,
    type_stages,
    typing_of,
)
from tools.prove.spread import NotKnown
from tools.ranges import jobs_option, overrides_option
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View
from tools.schema.versions import require_verified, unverified_option

_WIDTH = 150  # of tables in a file or pipe
_SHOWN = 10  # problems that are printed; --json has all


@click.command("prove", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True, help="Compile each kind of layer once instead of whole pipeline stages.")
@overrides_option
@jobs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@unverified_option
def prove(recipe: Path, quick: bool, overrides: tuple[str, ...], jobs: int | None, as_json: bool) -> None:
    """Prove on the compiled graphs of RECIPE that every gradient is summed exactly once, over the right ranks.

    The command uses the graphs of tc3 dryrun, the graph of one more rank for each axis of the device mesh, and that of
    the last rank. For every value from which a gradient is computed, the command finds on which axes the value is
    replicated, cut or a partial sum. No graph is executed.

    Exit codes: 0 no violation was found, although weights may be unknown; 1 a violation was found, or the recipe does
    not compile; 2 a wrong input; 130 interrupted.
    """
    require_verified()
    loaded = without_files(apply_overrides(load_recipe(recipe), overrides))
    require_sound(loaded)
    loaded = resolve(loaded, partial(click.echo, err=True))
    require_collectives(loaded)
    plan = quick_plan(loaded) if quick else plan_jobs(loaded)
    report = proof_of(loaded, plan, _compiled(loaded, plan, jobs, as_json=as_json), jobs, as_json=as_json)
    if as_json:
        click.echo(json.dumps(report))
    else:
        console = Console(highlight=False)
        render(report, console if console.is_terminal else Console(highlight=False, width=_WIDTH))
    sys.exit(1 if report["problems"] else 0)


def require_collectives(recipe: Recipe) -> None:
    """Raise an error for a recipe whose compiled graphs have no collectives, because nothing can be proven about sums
    over ranks without collectives.

    Raises:
        RecipeError: the recipe trains on the CPU backend.
    """
    if View(recipe).cpu_classes:
        raise RecipeError(
            f"{recipe.source}: this recipe trains on the CPU backend, whose compiled graphs hold no collectives, so "
            "there is nothing to prove; give the recipe of the full-size model, or a sharded one "
            "(parallel.parallel_mode: 1)"
        )


def proof_of(
    recipe: Recipe,
    plan: Plan,
    results: Sequence[dict[str, Any]],
    at_once: int | None,
    use_cache: bool = True,
    as_json: bool = False,
) -> dict[str, Any]:
    """Return, as values fit for JSON, which gradients of a compiled recipe are proven to be right. For each compiled
    rank, the function also compiles its neighbours along each axis of the device mesh, and the last rank along all
    axes. In the compiled graphs, the function finds how each value is distributed over the ranks. An axis is divided
    into smaller axes if a constant in the graphs (such as the start of a slice) does not grow evenly from rank to rank
    along the axis.

    Args:
        recipe: the recipe that was compiled.
        plan: the jobs, whose graphs were kept as text.
        results: the results of the plan's jobs, in the order of the jobs; none may be a refusal.
        at_once: the number of compiles that run at the same time; None for as many as cores and memory allow.
        use_cache: whether the kept results of earlier compiles of the neighbours are used instead of new compiles.
        as_json: whether an error with which MindSpore refuses the recipe is printed as JSON.

    Raises:
        RecipeError: the groups of the graphs do not form a mesh.
    """
    small = View(plan.jobs[0].recipe)
    read = read_compiled(recipe, plan, results, at_once, use_cache, as_json)
    return report_of(
        recipe.source, results, read.stages, read.differ, read.micro_batches, read.mesh.devices, small.devices
    )


@dataclass(frozen=True)
class Compiled:
    """A `Compiled` holds the compiled graphs of a recipe, and what is proven about the gradients in them.

    Args:
        mesh: the device mesh of a stage, with axes so small that every constant grows evenly along each axis.
        graphs: the graph of each job of the plan.
        peers: for each job, the graphs of the ranks in `Mesh.neighbours`.
        stages: what is proven about the gradients of each job's rank.
        differ: a sentence for each direction in which stages send values that are distributed differently.
        micro_batches: the number of micro-batches of a step, including those of gradient accumulation.
    """

    mesh: Mesh
    graphs: list[GraphText]
    peers: list[dict[str, GraphText]]
    stages: list[Stage]
    differ: list[str]
    micro_batches: int


def read_compiled(
    recipe: Recipe,
    plan: Plan,
    results: Sequence[dict[str, Any]],
    at_once: int | None,
    use_cache: bool = True,
    as_json: bool = False,
) -> Compiled:
    """Compile the neighbours (on the device mesh) of the ranks in a plan. Return all graphs with the proofs about their
    gradients. The arguments and the errors are the same as for `proof_of`.
    """
    graphs = [read_graph(text_of(job)) for job in plan.jobs]
    small = View(plan.jobs[0].recipe)
    degrees = [("tp", small.tp), ("cp", small.cp), ("dp", small.dp)]
    try:
        mesh = mesh_for(results, graphs, degrees)
    except NotKnown as error:
        raise RecipeError(
            f"{recipe.source}: {error}, so nothing can be proven; `tc3 dryrun` checks without a proof how gradients "
            "are summed over ranks"
        ) from None
    micro_batches = plan.micro_batches * small.accumulation
    scales = scale_faults(results, micro_batches, mesh.devices)
    read = dict[int, GraphText]()
    while True:
        beside = {rank: job for job in plan.jobs for rank in mesh.neighbours(job.rank).values() if rank not in read}
        missing = [replace(job, rank=rank) for rank, job in beside.items()]
        _compiled(recipe, replace(plan, jobs=missing), at_once, use_cache, as_json)
        read |= {job.rank: read_graph(text_of(job)) for job in missing}
        peers = [{key: read[rank] for key, rank in mesh.neighbours(job.rank).items()} for job in plan.jobs]
        compiled = zip(results, graphs, peers, strict=True)
        typings, differ = type_stages([partial(typing_of, result, graph, mesh, own) for result, graph, own in compiled])
        stages = [
            prove_rank(result, typing, scales[result["rank"]]) for result, typing in zip(results, typings, strict=True)
        ]
        finer = mesh.refined(frozenset().union(*(typing.divided for typing in typings)))
        if finer == mesh:
            return Compiled(mesh, graphs, peers, stages, differ, micro_batches)
        mesh = finer


def _compiled(
    recipe: Recipe, plan: Plan, at_once: int | None, use_cache: bool = True, as_json: bool = False
) -> list[dict[str, Any]]:
    """Return the results of a plan; end the command if a rank does not compile."""
    results = compile_all(plan, at_once, use_cache, texts=True)
    refused = [refusal_of(result, recipe) for result in results if "error" in result]
    if refused:
        for line in [json.dumps({"problems": refused})] if as_json else refused:
            click.echo(line)
        sys.exit(1)
    return results


def render(report: Mapping[str, Any], console: Console) -> None:
    """Print the report on the gradients as text to `console`."""
    told = f"proven for {report['proven']} of {report['weights']} weights"
    if report["wrong"]:
        told += f"; {report['wrong']} wrong"
    if report["unknown"]:
        names = ", ".join(f"{name} {count}" for name, count in report["missing"].items())
        told += f"; {report['unknown']} unknown" + (f" (operators {names})" if names else "")
    console.print(told)
    for stage in report["stages"]:
        mesh = f"mesh {stage['mesh']}" if stage["mesh"] else "one device"
        console.print(
            f"rank {stage['rank']} (stage {stage['stage']}), {mesh}: {stage['typed']} of "
            f"{stage['operators']} operators on the way to its gradients have a type"
        )
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for stage in report["stages"]:
        for weight in stage["weights"]:
            kinds.setdefault(weight["kind"], []).append(weight)
    table = Table("weight", PROVEN, WRONG, UNKNOWN, "gradient on a rank", box=None)
    for kind, weights in kinds.items():
        counts = [str(sum(weight["verdict"] == verdict for weight in weights)) for verdict in (PROVEN, WRONG, UNKNOWN)]
        table.add_row(kind, *counts, escape(next((w["spread"] for w in weights if w["spread"]), "")))
    console.print(table)
    sums, scale, norm = report["sums"], report["scale"], report["norm"]
    console.print(
        f"by tc3 dryrun's walk: summed over the right ranks {sums['right']} of {sums['weights']}, divided right "
        f"{scale['right']} of {scale['weights']}, counted once in the global norm {norm['once']} of {norm['weights']}"
    )
    for weight in [weight for own in kinds.values() for weight in own if weight["verdict"] == UNKNOWN][:_SHOWN]:
        console.print(escape(f"unknown: {weight['name']}: {weight['why']}"))
    for problem in report["problems"][:_SHOWN]:
        console.print(escape(f"violation: {problem}"))
    if len(report["problems"]) > _SHOWN:
        console.print(f"... and {len(report['problems']) - _SHOWN} more (--json)")
