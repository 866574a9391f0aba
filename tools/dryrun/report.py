"""This module puts the results of a dry run together as plain data: memory, traffic and FLOPs by stage, and whether the
stages fit.

Traffic is what a device sends in a step, in bytes: its collectives by kind of group and of link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from plugins.errors import RecipeError
from plugins.expert_balance.settings import moves
from tools.check.check import check_recipe
from tools.dryrun.activations import added
from tools.dryrun.gradients import NO_SIZE, RIGHT, WRONG, reached_by
from tools.dryrun.graph_text import Pass
from tools.dryrun.memory import (
    WEIGHT,
    Held,
    exchange,
    fit_of,
    hccl_buffers,
    line_of,
    memory_of,
    over_limit,
    under_loads,
    unsure,
    update_of,
)
from tools.dryrun.order import check_links, check_order, count_groups, programs_of
from tools.dryrun.plan import Plan, Stage
from tools.dryrun.quick import ERROR, compose
from tools.dryrun.scale import Scale, judge_scale
from tools.estimate.from_recipe import from_recipe
from tools.estimate.loads import Loads, loads_of
from tools.estimate.memory.loaded import Judged
from tools.estimate.memory.room import DOES_NOT_FIT, FITS, NO_LIMIT, UNKNOWN
from tools.estimate.memory.time_line import TimeLine
from tools.hardware.units import GIB
from tools.pipeline.schedules import operations, schedule_of
from tools.recipe.load import Recipe
from tools.recipe.view import View, limit_of
from tools.schema.stages import runs_back

NOTHING: dict[str, Any] = {  # of a recipe of the CPU, which is built and not compiled
    **{name: [] for name in ("groups", "collectives", "passes", "activations", "flops")},
    "kept": {},
}


class Found(NamedTuple):
    """A `Found` holds the results of a dry run for one pipeline stage, and the compiled rank from which they come. The
    rank is None if a quick dry run computed the stage from single layers. The field `compiled` is True if the compiled
    rank belongs to the stage, and False if it belongs to another stage with the same layers.
    """

    stage: Stage
    rank: int | None
    compiled: bool
    held: Sequence[Held]
    graph: Mapping[str, Any]


def report_of(
    recipe: Recipe,
    plan: Plan,
    results: Sequence[Mapping[str, Any]],
    node: int,
    lines: dict[int, TimeLine] | None = None,
    loads: Loads | None = None,
    reserve: int = 0,
) -> dict[str, Any]:
    """Return the whole report of a dry run, in bytes and FLOPs of one device and step.

    Args:
        results: the results of the plan's jobs, none of which ended with an error.
        node: the number of devices of a node, which decides whether a link is inside a node or between nodes.
        lines: a mapping to which the time line of each stage is added.
        loads: the loads of the devices that share experts, as `loads_asked` returns them; None for even loads only.
        reserve: the bytes of the limit that are not available to the model, as `tc3 firsthour` measured.
    """
    view = View(recipe)
    quick = not plan.job_of
    if quick:  # each stage from its layers
        parts = zip(plan.stages, compose(recipe, plan.stages, results), strict=True)
        found = [Found(stage, None, False, held, graph) for stage, (held, graph) in parts]
    else:
        found = _compiled(plan, results)
    known = quick or all(
        [tuple(item) for item in one.graph["passes"]] == _passes(view, one.stage.number, plan.micro_batches)
        for one in found
        if one.compiled
    )
    limit = limit_of(recipe)
    limit = max(1, limit - reserve) if limit else 0
    lines = {} if lines is None else lines
    stages = [_stage(one, view, plan, limit, node, known, lines) for one in found]
    compiled = [result for result in results if "graph" in result]
    programs = programs_of(compiled)
    links = check_links(plan, compiled, view.devices // view.pp, alike=not runs_back(view))
    problems = check_order(programs) + links.problems
    error = ERROR if quick else 0.0
    problems += over_limit(stages, limit, error)
    problems += unsure(stages, limit, error)
    left_out = _left_out(plan, stages) if limit and not view.on_cpu else []
    problems += left_out
    problems += _uneven(found, view.devices // view.pp)
    small = View(plan.jobs[0].recipe)
    gradients = gradients_report(results) | {"norm": norm_report(results, small.devices)}
    gradients["scale"] = scale_report(results, plan.micro_batches * small.accumulation, small.devices // small.pp)
    problems += gradients["wrong"] + gradients["scale"]["wrong"]
    for stage in stages:
        stage["fit"] = UNKNOWN if view.on_cpu else fit_of(stage["memory"], limit, error)
    judged = _judged(recipe, stages, loads, limit, error) if limit and not view.on_cpu else None
    moving = None
    if moves(view.get(("plugins", "expert_balance"))) and not view.on_cpu:
        moving = exchange([(one.stage.number, one.held) for one in found], limit)
    problems += _beside(judged, moving, limit)
    worst = [*([judged.verdict] if judged and loads else []), *([moving["fit"]] if moving else [])]
    return {
        "recipe": recipe.source,
        "quick": quick,
        "quick_error": error if quick else None,
        "fit": _worst([stage["fit"] for stage in stages], len(plan.stages), worst),
        "loads": judged and {**judged.as_json(), "words": judged.lines},
        "left_out": left_out,
        "exchange": moving,
        "hccl": None if view.on_cpu else hccl_buffers(results),
        "compiled": not view.cpu_classes,
        "devices": view.devices,
        "layout": {"dp": view.dp, "tp": view.tp, "pp": view.pp, "cp": view.cp, "ep": view.ep, "chunks": view.chunks},
        "schedule": view.scheduler,
        "schedule_model_equals_graph": known,
        "micro_batches": {"step": view.micro_batches, "compiled": plan.micro_batches},
        "parameters": _parameters(found, len(plan.stages), view),
        "stages": stages,
        "links": links.as_json(),
        "groups": count_groups(programs),
        "gradients": gradients,
        "ranks": [{"rank": result["rank"], "held_bytes": _held_bytes(result["held"])} for result in results],
        "problems": problems,
        "seconds": [result["seconds"] for result in results],
        "peak_mib": [result.get("peak_mib") for result in results],
    }


def loads_asked(text: str, recipe: Recipe) -> Loads:
    """Return the loads of the devices (the tokens that their experts receive) that the option `--loads` describes. No
    value of the recipe may be `auto`.

    Raises:
        RecipeError: the memory model cannot predict the recipe's memory; or as for `loads_of`.
        DataError: see `loads_of`.
    """
    if View(recipe).on_cpu:
        raise RecipeError(
            "--loads: a dry run does not predict the memory of CPU workers; `tc3 memory --loads` predicts the memory "
            "that the recipe would take on an NPU"
        )
    if not limit_of(recipe):
        raise RecipeError(
            "--loads: the recipe sets no context.max_device_memory; set it to the memory into which the job must fit"
        )
    return loads_of(text, from_recipe(recipe))


def _judged(
    recipe: Recipe, stages: Sequence[Mapping[str, Any]], loads: Loads | None, limit: int, error: float
) -> Judged | None:
    """Return how the stages fit under uneven loads; None without experts or a model of the recipe."""
    try:
        config = from_recipe(recipe)
    except RecipeError:
        if loads is not None:
            raise
        return None
    return under_loads(stages, config, loads, limit, error) if config.model.experts else None


def _beside(judged: Judged | None, moving: Mapping[str, Any] | None, limit: int) -> list[str]:
    """Return sentences about memory that does not fit although the stages fit at even loads."""
    found = []
    if judged and judged.loads and judged.verdict != FITS:
        found.append(f"context.max_device_memory: under the loads: {judged.verdict}: {judged.lines[1]}")
    if moving and moving["fit"] == DOES_NOT_FIT:
        found.append(
            f"plugins.expert_balance: moving experts of stage {moving['stage']} takes {moving['bytes'] / GIB:.2f} GiB "
            f"between two steps, with all that is kept {moving['held'] / GIB:.1f}, the limit is {limit / GIB:.1f}: "
            "write every: 0, or a larger parallel_config.expert_parallel"
        )
    return found


def gradients_report(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a summary of the weights' gradients on all compiled ranks. The key "weights" is the number of weights, and
    "right" counts the weights whose gradient is summed over exactly the ranks that hold a copy. The keys "wrong" and
    "unknown" hold a sentence for each weight whose gradient is not right.
    """
    right = 0
    wrong: list[str] = []
    unknown: list[str] = []
    updating: dict[str, set[int]] = {}  # weight -> the stages whose optimizer decides its value
    for result in results:
        for name, found in result.get("gradients", {}).items():
            if "copy_of" not in found:
                updating.setdefault(name, set()).add(result["stage"])
            if found.get("verdict", RIGHT) == RIGHT:
                right += 1
            else:
                told = wrong if found["verdict"] == WRONG else unknown
                told.append(f"rank {result['rank']} (stage {result['stage']}): {name}: {found['why']}")
    count = right + len(wrong) + len(unknown)
    wrong += _sums_of_copies(results)
    wrong += [
        f"{name}: stages {', '.join(map(str, sorted(stages)))} each update a copy of it, and none is sent to the other"
        for name, stages in updating.items()
        if len(stages) > 1
    ]
    return {"weights": count, "right": right, "wrong": wrong, "unknown": unknown}


def norm_report(results: Sequence[Mapping[str, Any]], devices: int) -> dict[str, Any]:
    """Return how the global gradient norm counts the weights. The key "weights" is the number of weights, "once" is the
    number of weights whose elements are counted exactly once, and "otherwise" holds a sentence for each other weight.
    Weights of a rank whose graph computes no global norm are left out. The argument `devices` is the number of all
    ranks of the recipe.
    """
    once, otherwise = 0, []
    for result in results:
        shards = {item["name"]: item["shards"] for item in result["held"]}
        found = {name: each for name, each in result.get("gradients", {}).items() if "norm" in each}
        if not any(each["norm"] for each in found.values()):
            continue
        for name, each in found.items():
            missing = "its square is not found in the graph" if not each["norm"] and "copy_of" not in each else ""
            why = missing or judge_norm(each, shards[name], result["rank"], devices)
            once += not why
            if why:
                otherwise.append(f"rank {result['rank']} (stage {result['stage']}): {name}: {why}")
    return {"weights": once + len(otherwise), "once": once, "otherwise": otherwise}


def judge_norm(found: Mapping[str, Any], shards: int, rank: int, devices: int) -> str:
    """Return the reason why the global gradient norm does not count each element of a weight exactly once; return "" if
    it does. Every rank adds the squares of the gradient elements that it holds. If several ranks hold an element, its
    square must therefore be divided by the number of these ranks. The number of ranks that hold an element is
    `found["copies"]` divided by the number of the optimizer's shards. The argument `devices` is the number of all ranks
    of the recipe.
    """
    if "copy_of" in found:
        return "the gradient of a copy on another stage is counted, too" if found["norm"] else ""
    holding = len(found["copies"]) // shards
    for square in found["norm"]:
        if square["divisor"] == NO_SIZE != holding and 1 < holding < len(found["copies"]):
            return (
                f"unknown: without devices MindSpore reads {NO_SIZE} as the number of ranks that hold each of its parts"
            )
        if square["divisor"] != holding:
            by = f"{square['divisor']:g}"
            return f"{holding} ranks hold each of its parts, but the sum of its squares is divided by {by}"
        reached = reached_by(square["ranks"], rank)
        if sorted(reached) != list(range(devices)):
            return f"its squares are added over {len(set(reached))} of {devices} ranks, of them {len(reached)} times"
    return ""


def scale_report(results: Sequence[Mapping[str, Any]], micro_batches: int, devices: int) -> dict[str, Any]:
    """Return a summary of the factors of the weights' gradients. The key "weights" is the number of weights, and
    "right" counts the weights whose gradient is the mean over the micro-batches of a step, without the loss scale. The
    keys "wrong" and "unknown" hold a sentence for each weight whose factor is not right. The argument `devices` is the
    number of devices of one pipeline stage.
    """
    seeds = [Scale(*seed) for result in results for seed in result.get("seeds", [])]
    right = 0
    told: dict[bool, list[str]] = {False: [], True: []}  # wrong, unknown
    for result in results:
        for name, found in result.get("gradients", {}).items():
            if "scales" not in found:
                continue
            fine, why = judge_scale([Scale(*scale) for scale in found["scales"]], seeds, micro_batches, devices)
            right += fine and not why
            if why:
                told[fine].append(f"rank {result['rank']} (stage {result['stage']}): {name}: {why}")
    count = right + len(told[False]) + len(told[True])
    return {"weights": count, "right": right, "wrong": told[False], "unknown": told[True]}


def _sums_of_copies(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return gradients of copies on another stage that are summed before they are sent and behind, or neither."""
    gradients = {result["rank"]: result.get("gradients", {}) for result in results}
    wrong = []
    for rank, every in gradients.items():
        for name, found in every.items():
            owner = gradients.get(found.get("copy_of", -1), {}).get(name, {})
            behind = owner.get("received", {}).get(str(rank), owner.get("received", {}).get(rank))
            if behind is None or len(owner["copies"]) == 1 or behind != found["summed"]:
                continue
            where = "before it is sent and again behind" if behind else "neither before it is sent nor behind"
            wrong.append(f"{name}: the gradient of its copy on rank {rank} is summed {where} (rank {found['copy_of']})")
    return wrong


def _worst(fits: Sequence[str], stages: int, beside: Sequence[str] = ()) -> str:
    """Return the pipeline's verdict: that of its worst stage; unknown where a stage that might not fit was left out."""
    known = [*fits, *beside, *[UNKNOWN] * (len(fits) < stages)]
    return next(verdict for verdict in (DOES_NOT_FIT, NO_LIMIT, UNKNOWN, FITS) if verdict in known)


def _left_out(plan: Plan, stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line about the stages of which `--ranks` compiles none, if there are any."""
    told = {stage["stage"] for stage in stages}
    names = [str(stage.number) for stage in plan.stages if stage.number not in told]
    if not names:
        return []
    every = f"stage{'s' * (len(names) > 1)} {', '.join(names)}"
    return [
        f"context.max_device_memory: {every}: unknown whether it fits: no rank "
        "of this kind of stage was compiled: add one to --ranks, or leave --ranks out"
    ]


def _compiled(plan: Plan, results: Sequence[Mapping[str, Any]]) -> list[Found]:
    """Return each stage by the job that stands for it."""
    held = [[Held(**item) for item in result["held"]] for result in results]
    own = {job.stage for job in plan.jobs}
    return [
        Found(stage, plan.jobs[at].rank, stage.number in own, held[at], results[at].get("graph", NOTHING))
        for stage, at in zip(plan.stages, plan.job_of, strict=True)
        if at >= 0
    ]


def _stage(
    found: Found, view: View, plan: Plan, limit: int, node: int, known: bool, lines: dict[int, TimeLine]
) -> dict[str, Any]:
    """Return one stage's part of the report; its time line goes to `lines`."""
    number = found.stage.number
    if known and not found.compiled:  # of a schedule that has no model, plain 1F1B gives the estimate of a quick run
        order = _passes(view, number, view.micro_batches) or _passes(view, number, view.micro_batches, "1f1b")
        passes = [Pass(*item) for item in order]
    else:
        passes = [Pass(*item) for item in found.graph["passes"]]
    update = update_of(found.held, view.flag(("parallel", "enable_parallel_optimizer")))
    line = lines[number] = line_of(found.held, found.graph, passes, update)
    return {
        "stage": number,
        "compiled_rank": found.rank,
        "compiled": found.compiled,
        "layers": len(found.stage.kinds),
        "kinds": [list(kinds) for _, kinds in found.stage.chunks],
        "holds": list(found.stage.ends),
        "parameters": sum(math.prod(item.shape) for item in _trained(found.held)),
        "memory": memory_of(found.held, found.graph, passes, limit, update).as_json(),
        "host": sum(item.host_bytes for item in found.held),
        "peak": line.peak_as_json(),
        "flops": _flops(found.graph, view.micro_batches),
        "traffic": traffic_of(found.graph, view.micro_batches, plan.micro_batches, node),
    }


def _held_bytes(held: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes of the parameters that a compiled rank keeps, by kind."""
    return added({item.kind: item.bytes} for item in (Held(**each) for each in held))


def _passes(view: View, stage: int, micro_batches: int, schedule: str = "") -> list[tuple[str, int, int]]:
    """Return a schedule's order of a stage, by default the recipe's; nothing when it has no model for these sizes."""
    if view.pp == 1:
        return [("F", 0, 0), ("B", 0, 0)]
    name = schedule_of(schedule or view.scheduler, view.chunks)
    with suppress(RecipeError):
        order = operations(name, stage, view.pp, view.chunks, micro_batches)
        return [(op.kind, op.micro_batch, op.chunk) for op in order]
    return []


def _trained(held: Sequence[Held]) -> list[Held]:
    """Return the weights that the optimizer updates."""
    return [item for item in held if item.kind == WEIGHT and item.trainable]


def _uneven(found: Sequence[Found], ranks: int) -> list[str]:
    """Return a line for each weight whose elements are not all held by the same number of the stage's devices."""
    uneven = [(one.stage.number, item) for one in found for item in one.held if item.copies(ranks) % 1]
    return [f"stage {stage}: {item.name} is held {item.copies(ranks):.2f} times" for stage, item in uneven]


def _parameters(found: Sequence[Found], stages: int, view: View) -> dict[str, Any]:
    """Return trained weights of the model, summed over the stages, against the closed form of `tc3 check`. A weight
    that two stages hold (the embedding, which MTP layers use again on the last stage) counts once. None when not every
    stage was compiled.
    """
    table = check_recipe(view.recipe).table or {}
    counted = {"compiled": None, "check": table.get("parameters_trained")}
    if len(found) < stages:
        return counted
    trained = [item for one in found for item in _trained(one.held)]
    own = [item.name.startswith("decoder.layers.") for item in trained]  # of equal stages they have other numbers
    outside = {item.name: item for item, layer in zip(trained, own, strict=True) if not layer}
    weights = [*outside.values(), *itertools.compress(trained, own)]
    return counted | {"compiled": sum(math.prod(item.shape) for item in weights)}


def _flops(graph: Mapping[str, Any], micro_batches: int) -> dict[str, int]:
    """Return FLOPs of a device in a step, by role."""
    return {role: number * micro_batches for role, number in added(graph["flops"]).items()}


INSIDE, BETWEEN = "inside a node", "between nodes"
Stream = tuple[str, int, tuple[int, ...], str, int]  # operator, peer, shape, type and chunk of a Send or Receive


def traffic_of(graph: Mapping[str, Any], step: int, compiled: int, node: int) -> list[dict[str, Any]]:
    """Return the number and the bytes of a step's collectives, summed by operator, role (such as forward), group size
    and link; the largest sum of bytes comes first.

    The key "bytes" holds the number of bytes that leave the device, by the textbook volume of each operator: for n
    ranks and B bytes of the larger one of the operator's input and output, AllGather, ReduceScatter and All-to-All send
    B (n - 1) / n bytes, AllReduce sends 2 B (n - 1) / n, and Send sends B. The key "routed" marks rows whose sizes
    assume even routing.

    Args:
        step, compiled: the numbers of micro-batches of a step and of the graph; calls that each micro-batch repeats are
            multiplied.
        node: the number of devices of a node; a group inside one node uses only the node's links.
    """
    found: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    micros = _micros(graph["collectives"])
    for item in graph["collectives"]:
        ranks = _ranks(item, graph["groups"])
        link = INSIDE if len({rank // node for rank in ranks}) == 1 else BETWEEN
        key = item["op"], item["role"], len(ranks), link
        names = ("op", "role", "ranks", "link")
        line = found.setdefault(key, dict(zip(names, key, strict=True)) | {"calls": 0.0, "bytes": 0.0})
        times = step / compiled if _repeats(item, micros, compiled) else 1.0
        line["calls"] += times
        line["bytes"] += times * item["bytes"] * _share(item["op"], len(ranks))
        if item.get("routed"):
            line["routed"] = True
    for line in found.values():
        line["calls"], line["bytes"] = round(line["calls"]), round(line["bytes"])
    return sorted(found.values(), key=lambda line: -line["bytes"])


def _ranks(item: Mapping[str, Any], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks that take part in a call: the ranks of the group, or for Send and Receive this rank's and its
    peer's index.
    """
    return [item["me"], item["peer"]] if "peer" in item else list(groups[item["group"]])


def _micros(collectives: Sequence[Mapping[str, Any]]) -> dict[Stream, set[int]]:
    """Return for each stream of equal Sends, or Receives, the micro-batches that it carries."""
    found: dict[Stream, set[int]] = {}
    for item in collectives:
        if item.get("micro") is not None:
            found.setdefault(_stream(item), set()).add(item["micro"])
    return found


def _stream(item: Mapping[str, Any]) -> Stream:
    return item["op"], item["peer"], tuple(item["shape"]), item["dtype"], item["chunk"]


def _repeats(item: Mapping[str, Any], micros: Mapping[Stream, set[int]], compiled: int) -> bool:
    """Return whether each micro-batch does it again. An embedding that the first and the last stage share goes between
    them once a step, and carries micro-batch 0.
    """
    if item.get("micro") is None:
        return item["role"] != "step"
    return len(micros[_stream(item)]) == compiled


def _share(op: str, ranks: int) -> float:
    if op in ("Send", "Broadcast"):
        return 1.0
    if op in ("Receive", "Barrier"):
        return 0.0
    return (2.0 if op == "AllReduce" else 1.0) * (ranks - 1) / ranks
