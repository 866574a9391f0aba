"""This module decides for each weight of each compiled rank whether its gradient is right, wrong or unknown, and makes
the report of `tc3 prove`.

A weight is *proven* if two conditions hold. The first condition: after the last sum over ranks, the gradient is
distributed over the ranks as the weight does (cut in the same way, and neither partial nor scaled); this follows
operator by operator from the layouts of weights and inputs. The second condition: the check of `tc3 dryrun` finds that
the sums and divisors of the gradient are right. A weight is *wrong* if one of the two checks finds a fault, and
*unknown* if an operator between the inputs and the gradient has no rule or does not allow the spreads of its arguments;
such a contradiction is reported once, with its operator.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plugins.semi_auto_cpu.ranks import WORLD
from tools.dryrun.collectives import generated_groups
from tools.dryrun.gradients import RIGHT, UNKNOWN, WRONG, last_sums
from tools.dryrun.graph_text import GraphText
from tools.dryrun.report import gradients_report, norm_report, scale_report
from tools.dryrun.scale import Scale, judge_scale
from tools.prove.balance import averaged_sends, is_gradient_of_one_number
from tools.prove.everywhere import remains
from tools.prove.frame import Direction, Failure
from tools.prove.mesh import Mesh, Peers, mesh_of
from tools.prove.moves import reshape
from tools.prove.origin import explained, since
from tools.prove.places import in_common
from tools.prove.spread import Contradiction, NotKnown, Spread, placements, tidy
from tools.prove.typing import Typing

PROVEN = "proven"
EXPLAINED = 20  # wrong weights and refused operators of a rank of which the report names the operators behind
_STRATEGY = re.compile(r"(?<=\)) \{(?:in|out)_strategy: .*")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Weight:
    """A `Weight` holds what was proven about the gradient of one weight on one compiled rank.

    Args:
        name: the name of the weight.
        verdict: `PROVEN`, `WRONG` or `UNKNOWN`.
        why: a description of what is wrong or unknown; "" for a proven weight.
        spread: a text that says how the weight's gradient is distributed over the ranks after the last sum; "" if this
            is unknown.
        operator: the first operator for whose result it is unknown how it is distributed over the ranks; "" if there is
            no such operator.
    """

    name: str
    verdict: str
    why: str = ""
    spread: str = ""
    operator: str = ""

    @property
    def kind(self) -> str:
        """Return the weight's name with * in place of layer and expert numbers."""
        return _LAYER.sub("*", self.name)


@dataclass(frozen=True)
class Stage:
    """A `Stage` holds what was proven about the gradients of one compiled rank, which stands for its pipeline stage.

    Args:
        rank, stage: the rank that was compiled, and its pipeline stage.
        mesh: the axes of the device mesh with their sizes, as text.
        weights: the weights that the optimizer updates.
        contradictions: the operators whose arguments are distributed over the ranks in a way that they do not allow,
            with the reason.
        typed: the number of operators, of those that the gradients depend on, for whose results it is known how they
            are distributed over the ranks.
        asked: the number of all operators on which the gradients depend.
        missing: for each kind of operator without a result, the number of places in the graph at which all later values
            become unknown because of it.
    """

    rank: int
    stage: int
    mesh: str
    weights: list[Weight]
    contradictions: list[str]
    typed: int
    asked: int
    missing: Mapping[str, int]


def ranks_of(result: Mapping[str, Any], devices: int) -> Callable[[str], tuple[int, ...] | None]:
    """Return a function that maps the name of a communication group in the graph of one compiled rank to the group's
    ranks. The world group consists of the devices of the pipeline stage.

    Args:
        devices: the number of devices of one stage.
    """
    groups = {name: tuple(ranks) for name, ranks in result["groups"]}
    first = result["rank"] // devices * devices
    groups.setdefault(WORLD, tuple(range(first, first + devices)))
    return groups.get


def mesh_for(
    results: Sequence[Mapping[str, Any]], graphs: Sequence[GraphText], degrees: Sequence[tuple[str, int]]
) -> Mesh:
    """Return the device mesh of a pipeline stage; all compiled stages have the same mesh.

    Args:
        degrees: (name, number of ranks) of the recipe's tensor, context and data parallelism.

    Raises:
        NotKnown: the groups do not form a mesh.
    """
    devices = math.prod(size for _, size in degrees)
    groups, meshes = [], []
    for result, graph in zip(results, graphs, strict=True):
        first = result["rank"] // devices * devices
        own = [ranks for _, ranks in result["groups"]] + list(generated_groups(graph).values())
        inside = (ranks for ranks in own if all(first <= rank < first + devices for rank in ranks))
        groups += [[rank - first for rank in ranks] for ranks in inside]
        meshes += [layout["mesh"] for layout in result["layouts"].values()]
    return mesh_of(degrees, groups, meshes)


def typing_of(
    result: Mapping[str, Any],
    graph: GraphText,
    mesh: Mesh,
    peers: Mapping[str, GraphText],
    received: Mapping[Direction, Spread] | None = None,
) -> Typing:
    """Return a `Typing` object, which finds how each value in the graph of one compiled rank is distributed over the
    ranks.

    Args:
        result: the result of the rank's compile, as `tools.dryrun.rank` reports it.
        peers: the graphs of the ranks in `Mesh.neighbours`.
        received: how the values that other stages send are distributed over the ranks (their spreads).
    """
    known, generated = ranks_of(result, mesh.devices), generated_groups(graph)
    for each in (graph, *peers.values()):
        _without_strategies(each)

    def parameter(name: str) -> Spread:
        layout = result["layouts"].get(name)
        if layout is None:
            raise NotKnown(f"MindSpore gives no layout of parameter {name}")
        group = layout["group"]
        sharded = (known(group) or generated.get(group)) if group else ()
        if sharded is None:
            raise NotKnown(f"the optimizer shards {name} over group {group!r}, whose ranks are unknown")
        return mesh.of_layout(layout, sharded)

    return Typing(graph, mesh, parameter, known, Peers(graph, peers, mesh, result["rank"]), received)


def _without_strategies(graph: GraphText) -> None:
    """Leave out what MindSpore writes behind the arguments of an operator that it has cut itself (in place)."""
    for node in (each for nodes in graph.graphs.values() for each in nodes):
        node.head = _STRATEGY.sub("", node.head)


def type_stages(make: Sequence[Callable[[Mapping[Direction, Spread]], Typing]]) -> tuple[list[Typing], list[str]]:
    """Return for each compiled stage a `Typing`, which says how each value of the stage's graph is distributed over the
    ranks. Also return a sentence for each direction (forward or backward) in which stages send values with different
    distributions.

    A stage receives the values that a neighbouring stage sends. The spreads of the values that the first stage sends in
    its forward pass, and of those that the last stage sends in its backward pass, are assumed for all stages. Every
    stage must then send values with these spreads, for some possible places of loose pieces. If it is unknown how one
    of the stages sends a value, it is unknown how all stages receive values of its direction and shape.
    """
    received, doubted, averaged = dict[Direction, Spread](), set[Direction](), set[Direction]()
    while True:
        found = [each(received) for each in make]
        sent: dict[Direction, set[Spread]] = {}
        unknown = set[Direction]()
        for typing in found:
            for direction, values in typing.sent().items():
                spreads = {value for value in values if isinstance(value, Spread)}
                sent.setdefault(direction, set()).update(spreads)
                unknown |= {direction} if len(spreads) < len(values) else set()
        left = {direction: spreads for direction, spreads in sent.items() if spreads and direction not in doubted}
        new = {each: in_common(left[each]) or min(left[each], key=str) for each in left if each not in received}
        if not new:
            divided = set[Direction]().union(*map(averaged_sends, found)) - averaged
            if not (wrong := unknown & received.keys()) and not divided:
                break
            doubted |= wrong
            averaged |= divided
        received = {
            each: replace(value, undivided=is_gradient_of_one_number(each) and each not in averaged)
            for each, value in (received | new).items()
            if each not in doubted
        }
    return found, [
        f"stages send {direction} values of shape {shape} as {' and as '.join(sorted(map(str, spreads)))}"
        for (direction, shape), spreads in sent.items()
        if spreads and in_common(spreads) is None
    ]


def prove_rank(result: Mapping[str, Any], typing: Typing, scales: Mapping[str, str]) -> Stage:
    """Return for each weight of one compiled rank whether its gradient is right, wrong or unknown.

    Args:
        result: the result of the rank's compile.
        scales: for each weight the fault that the dry run finds in the divisors of its gradient; weights without a
            fault are left out.
    """
    weights = [name for name, found in result["gradients"].items() if "copy_of" not in found]
    ends = last_sums(typing.graph, typing.ranks_of, weights)
    found: list[Weight] = []
    for name in weights:
        few = sum(each.verdict == WRONG for each in found) < EXPLAINED
        found.append(_weight(typing, name, ends[name], result["gradients"][name], scales, few))
    told = [f"the loss is reported as {each}" for each in typing.losses()]
    failures, asked = typing.failures, len(typing.asked)
    causes = {(each.graph, each.number): each for each in failures.values()}
    told += [
        f"{typing.name_of(each.graph, each.number)}: {each.why}{explained(typing, each) if place < EXPLAINED else ''}"
        for place, each in enumerate(each for each in causes.values() if each.contradicts)
    ]
    if not told and (wrong := remains(typing, lambda tried: _ask(tried, weights))):
        why = wrong.why.partition(" (the place of")[0]
        place = typing.name_of(wrong.graph, wrong.number)
        others = "; every other place of the pieces leads to a contradiction, too"
        told.append(f"{place}: {why}{others}{explained(typing, wrong)}")
    missing = Counter(
        typing.graph.graphs[each.graph][each.number].op or "a call" for each in causes.values() if not each.contradicts
    )
    axes = ", ".join(f"{axis} {size}" for axis, size in typing.mesh.sizes.items())
    return Stage(result["rank"], result["stage"], axes, found, told, asked - len(failures), asked, dict(missing))


def _ask(typing: Typing, weights: Sequence[str]) -> None:
    """Let a typing find how the losses and the gradients of all weights are distributed over the ranks."""
    typing.losses()
    for name, own in last_sums(typing.graph, typing.ranks_of, weights).items():
        _by_spread(typing, name, own)


def _weight(
    typing: Typing,
    name: str,
    ends: Sequence[tuple[str, int]],
    walked: Mapping[str, Any],
    scales: Mapping[str, str],
    explain: bool,
) -> Weight:
    """Return the verdict on one weight: by the spreads, and by the dry run's walk. If `explain`, the reason for a wrong
    gradient names the operators behind it; the search for these takes as long as the step has operators.
    """
    own = _by_spread(typing, name, ends, explain)
    if walked["verdict"] == WRONG or own.verdict == WRONG:
        why = "; ".join(filter(None, [walked["why"] if walked["verdict"] == WRONG else "", own.why]))
        return Weight(name, WRONG, why, own.spread, own.operator)
    if own.verdict == PROVEN and (walked["verdict"] != RIGHT or name in scales):
        return Weight(name, UNKNOWN, walked["why"] or scales[name], own.spread)
    return own


def _by_spread(typing: Typing, name: str, ends: Sequence[tuple[str, int]], explain: bool = False) -> Weight:
    """Return the verdict on one weight by the spread of its gradient. For `explain`, see `_weight`."""
    told = ""
    for number in [each for _, each in ends] or typing.sums_of(name) or [-1]:
        if any(graph != typing.graph.root for graph, _ in ends):
            return Weight(name, UNKNOWN, "the last sum of its gradient over ranks is in a called graph")
        place = "" if number < 0 else typing.name_of(typing.graph.root, number)
        try:
            found = typing.summed(name) if number < 0 else typing.of(number)
            wanted = typing.parameter(name)
            if isinstance(found, Spread) and found.shape != wanted.shape:  # it is reshaped on the way to the optimizer
                found = reshape(found, wanted.shape)
        except (Contradiction, NotKnown) as error:
            return Weight(name, WRONG if isinstance(error, Contradiction) else UNKNOWN, str(error))
        if isinstance(found, Failure):
            root = found.graph == typing.graph.root
            own = found.contradicts and root and number >= 0 and found.number in typing.sums_before(number)
            cause = typing.name_of(found.graph, found.number)
            return Weight(name, WRONG if own else UNKNOWN, f"{cause}: {found.why}", operator=cause)
        told = str(found)
        if fault := against(found, wanted):
            why = f"{place}: its gradient is {found}: {fault}" if place else f"its gradient is {found}: {fault}"
            why += since(typing, name, number, found) if explain and not found.loose else ""
            return Weight(name, UNKNOWN if found.loose else WRONG, why, told, place)
    return Weight(name, PROVEN, spread=told)


def against(found: Spread, wanted: Spread) -> str:
    """Return the reason (such as a missing sum) why a gradient, after all sums over ranks, is not distributed over the
    ranks like its weight. Return "" if the gradient is distributed like the weight.
    """
    if found.partial:
        return f"it must still be summed over {_told(found.partial)}"
    for axis, power in found.powers:
        if power > 0:
            return f"it is summed over {axis} once more than it is divided by its size: one sum over {axis} is too many"
        return f"it is divided by the ranks along {axis} and not summed over them: a sum over {axis} is missing"
    if found.shifted or found.greatest:
        return f"the ranks along {_told(found.shifted | found.greatest)} hold different values"
    dims = tuple(map(tidy, wanted.dims))
    if not any(tuple(map(tidy, given.dims)) == dims for given in placements(found)):
        return f"the weight itself is {wanted}"
    return ""


def _told(axes: frozenset[str]) -> str:
    return ", ".join(sorted(axes))


def scale_faults(results: Sequence[Mapping[str, Any]], micro_batches: int, devices: int) -> dict[int, dict[str, str]]:
    """Return the reasons why `tc3 dryrun` found the divisor of a weight's gradient wrong or unknown, as a nested
    dictionary rank -> weight -> reason.

    Args:
        micro_batches, devices: the numbers of micro-batches and devices, as in `tools.dryrun.report.scale_report`.
    """
    seeds = [Scale(*seed) for result in results for seed in result.get("seeds", [])]
    found: dict[int, dict[str, str]] = {}
    for result in results:
        own = found.setdefault(result["rank"], {})
        for name, each in result["gradients"].items():
            if "scales" in each:
                _, why = judge_scale([Scale(*scale) for scale in each["scales"]], seeds, micro_batches, devices)
                own |= {name: why} if why else {}
    return found


def _walked(stage: Stage, weight: Weight, wrong: Sequence[str]) -> Weight:
    """Return the verdict on a weight, which is wrong if a sentence of the dry run's walk says so of the weight, on this
    rank or on all stages.
    """
    starts = (f"{weight.name}: ", f"rank {stage.rank} (stage {stage.stage}): {weight.name}: ")
    told = [each.removeprefix(starts[1]).removeprefix(starts[0]) for each in wrong if each.startswith(starts)]
    return replace(weight, verdict=WRONG, why=told[0]) if told and weight.verdict != WRONG else weight


def report_of(
    recipe: str,
    results: Sequence[Mapping[str, Any]],
    stages: Sequence[Stage],
    differ: Sequence[str],
    micro_batches: int,
    per: int,
    all_: int,
) -> dict[str, Any]:
    """Return the report of `tc3 prove` as dicts, lists and numbers that can be written as JSON.

    Args:
        recipe: the file of the recipe.
        results: the results of the compiled ranks, one for each of `stages`.
        differ: a sentence for each case in which a stage does not send values as other stages receive them.
        micro_batches: the number of micro-batches of a step of the compiled recipe, including those of gradient
            accumulation.
        per: the number of devices of one stage.
        all_: the number of devices of the compiled recipe.
    """
    gradients = gradients_report(results)
    scale = scale_report(results, micro_batches, per)
    problems = list(differ)
    problems += [
        f"rank {stage.rank} (stage {stage.stage}): {each}" for stage in stages for each in stage.contradictions
    ]
    problems += [
        f"rank {stage.rank} (stage {stage.stage}): {weight.name}: {weight.why}"
        for stage in stages
        for weight in stage.weights
        if weight.verdict == WRONG
    ]
    walked = gradients["wrong"] + scale["wrong"]
    problems += [each for each in walked if each not in problems]
    stages = [replace(stage, weights=[_walked(stage, each, walked) for each in stage.weights]) for stage in stages]
    weights = [weight for stage in stages for weight in stage.weights]
    missing: Counter[str] = Counter()
    for stage in stages:
        missing.update(stage.missing)
    return {
        "recipe": recipe,
        "weights": len(weights),
        "proven": sum(weight.verdict == PROVEN for weight in weights),
        "wrong": sum(weight.verdict == WRONG for weight in weights),
        "unknown": sum(weight.verdict == UNKNOWN for weight in weights),
        "missing": dict(missing.most_common()),
        "stages": [
            {
                "rank": stage.rank,
                "stage": stage.stage,
                "mesh": stage.mesh,
                "typed": stage.typed,
                "operators": stage.asked,
                "weights": [{**vars(weight), "kind": weight.kind} for weight in stage.weights],
            }
            for stage in stages
        ],
        "sums": gradients,
        "scale": scale,
        "norm": norm_report(results, all_),
        "problems": problems,
    }
