"""This module predicts how some changes affect the step time under uneven expert loads (`tc3 ep-report --loads`). The
examined changes are moving experts, an expert capacity, another EP degree, and routing each token to few nodes.

Each row is the estimator's prediction for the recipe with one change. If the effect of a change on the loads is
unknown, the seconds of its row are None, and its note says why:

* only a run's log of expert loads or a routing log shows which experts stay busy, so a prediction of moving experts
  needs such a log;
* a single max/mean does not determine the loads at another EP degree;
* a router that is limited to few nodes would choose other experts; the prediction uses the unchanged loads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from plugins.expert_balance.record import Record
from plugins.expert_balance.replay import replay
from plugins.expert_balance.settings import KEY, Settings
from plugins.expert_balance.settings import read as read_settings
from plugins.hierarchical_ep.topology import degrees_of
from tools.check.check import new_errors
from tools.estimate.configuration import Configuration, weight_cut, weight_shards
from tools.estimate.loads import EVEN, Counted, Loads, loads_of, moe_layers, of_ratios
from tools.estimate.memory.training_graph import EXPERTS, module_of_weight
from tools.estimate.time_model import TimeModel
from tools.layout.advise import Advice, step_under, straddles
from tools.model import weights
from tools.recipe.load import Recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import PARALLEL, View

CAPACITIES = (1.25, 1.5)  # times the mean, of a device
_SPARSE = "deduplicated"  # the mode whose bytes between nodes depend on how many nodes a token visits


@dataclass(frozen=True)
class Change:
    """A `Change` is the predicted step of a recipe in which one setting is changed.

    Args:
        name: the change in words.
        step_s: the seconds of a step with this change; None: unknown.
        max_over_mean: the mean load of the fullest devices divided by the mean load; None: unknown.
        note: the cost of the change, or the reason why its effect is unknown.
    """

    name: str
    step_s: float | None
    max_over_mean: float | None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the change and its predicted effects as the values that `--json` prints."""
        return asdict(self)


def what_if(advice: Advice, asked: str) -> list[Change]:
    """Return the predicted steps of the unchanged recipe under its uneven expert loads, of the recipe under even loads,
    and of the recipe after each change, in this order.

    Args:
        advice: the recipe on a cluster, under uneven loads.
        asked: the text of `--loads`, from which the loads at other EP degrees are computed.
    """
    times, own, loads = TimeModel(advice.hardware), advice.written.config, advice.loads
    even = step_under(times, own, EVEN).total
    return [
        Change("as written", advice.written.step.total, loads.typical),
        Change("even loads", even, 1.0, "the best that loads can be"),
        _moved(times, own, loads, advice),
        *_capped(times, own, loads),
        *_degrees(times, own, loads, asked, advice),
        *_few_nodes(times, own, loads, 1 if straddles(own.ep, advice.hardware) else advice.topology.nodes),
    ]


def _moved(times: TimeModel, own: Configuration, loads: Loads, advice: Advice) -> Change:
    """Return the change in which experts move to other devices every N steps, by the recipe's `plugins.expert_balance`
    or its defaults.
    """
    section = View(advice.recipe).get(tuple(KEY.split(".")))
    settings = read_settings(section) if section not in (None, False) else Settings()
    settings = settings if settings.every else replace(settings, every=Settings().every)
    name = f"experts move every {settings.every} steps ({settings.method})"
    if loads.counted is None:
        return Change(name, None, None, "unknown: a record or a routing log tells which experts stay busy")
    steps = len(loads.steps)
    if steps <= settings.every:
        return Change(name, None, None, f"unknown: the log has {steps} steps, a plan needs more than {settings.every}")
    records = _records(loads.counted, own.ep)
    found = replay(records, settings)
    behind = range(settings.every, steps)
    seconds = step_under(times, own, of_ratios(found.ratios[behind], behind, "replayed")).total
    before = step_under(times, own, replace(loads, shares=loads.shares[behind])).total
    cost = move_seconds(times, own, records[0].slots, found.slots, found.plans)
    return Change(
        name,
        seconds + cost / settings.every,
        float(found.ratios[behind].mean()),
        f"of the {len(behind)} steps after the first plan, which take {before:.2f} s without; a plan moves "
        f"{found.moves.sum() / found.plans / found.moves.shape[1]:.1f} experts of a layer, {cost:.2f} s over the links "
        "(modelled; moves were not measured on a device)",
    )


def _records(counted: Counted, devices: int) -> list[Record]:
    """Return the log in the form of the records that a run with the plugin would have written."""
    tokens = np.rint(counted.tokens).astype(np.int64)
    layers = tuple(range(tokens.shape[1]))
    rows = zip(tokens, counted.slots, strict=True)
    return [
        Record(step, devices, layers, one, slots.astype(np.int64), (None,) * len(layers))
        for step, (one, slots) in enumerate(rows, 1)
    ]


def move_seconds(times: TimeModel, config: Configuration, first: np.ndarray, slots: np.ndarray, plans: int) -> float:
    """Return the mean seconds in which the experts of one plan are moved, one layer after another. The device that
    sends the most bytes over the slowest link of the EP group determines the time.

    Args:
        first: [layers, E] the placement before the first step.
        slots: [steps, layers, E] the placement after each step.
        plans: the number of plans in these steps.
    """
    experts = slots.shape[2]
    each = experts // config.ep
    sizes = [
        weight.size / weight_cut(weight, config) / weight_shards(weight, config)
        for weight in weights(config.model, "moe", config.shared_whole)
        if module_of_weight(weight.name) == EXPERTS
    ]
    size = sum(sizes) / each * (config.weight_item + config.state_item)  # bytes of an expert that a rank holds
    before = np.concatenate([first[None], slots[:-1]]) // each
    gone = before != slots // each  # [steps, layers, E]
    sent = np.stack([(gone & (before == device)).sum(axis=2) for device in range(config.ep)], axis=2).max(axis=2)
    places = {number: place for place, number in enumerate(moe_layers(config))}
    most = 0.0
    for stage in range(config.pp):
        rows = [places[number] for number in config.layer_numbers(stage) if number in places]
        moved = sent[:, [row for row in rows if row < sent.shape[1]]]
        most = max(most, sum(times.sending(float(count) * size, config.ep) for count in moved.ravel() if count))
    return most / max(plans, 1)


def _capped(times: TimeModel, own: Configuration, loads: Loads) -> Iterator[Change]:
    """Yield changes in which no device takes more than a given multiple of the mean number of tokens; further tokens
    are dropped.
    """
    for capacity in CAPACITIES:
        name = f"a device takes at most {capacity:g} x the mean"
        if loads.ratios.max() <= capacity:
            yield Change(name, step_under(times, own, loads).total, loads.typical, "drops nothing")
            continue
        capped = replace(loads, shares=np.minimum(loads.shares, capacity))
        described = loads.shares.shape[-1] > 1
        dropped = float(np.maximum(loads.shares - capacity, 0).mean()) if described else 0.0
        note = f"drops {dropped:.1%} of the tokens' copies" if described else "what it drops is unknown"
        yield Change(name, step_under(times, own, capped).total, capped.typical, note)


def _degrees(times: TimeModel, own: Configuration, loads: Loads, asked: str, advice: Advice) -> Iterator[Change]:
    """Yield a change for half and one for twice the degree of expert parallelism, if the command accepts the degree. If
    `tc3 check` refuses the degree, also because of a plugin of the recipe, the change says why.
    """
    able = degrees_of(advice.hardware.devices_per_node, own.model.experts, own.dp * own.tp)
    for degree in (one for one in (own.ep // 2, 2 * own.ep) if one in able):
        name = f"expert_parallel: {degree}"
        if loads.shares.shape[-1] == 1:
            yield Change(name, None, None, "unknown: one max/mean says nothing of another degree")
            continue
        if refused := new_errors(advice.recipe, with_degree(advice.recipe, degree)):
            yield Change(name, None, None, f"refused by tc3 check: {refused[0]}")
            continue
        other = replace(own, ep=degree)
        found = loads_of(asked, other)
        seconds = step_under(times, replace(other, skew=found.typical), found).total
        yield Change(name, seconds, found.typical, "its memory is not looked at: tc3 memory --loads")


def with_degree(recipe: Recipe, degree: int) -> Recipe:
    """Return the recipe with another EP degree; the recipe need not state an EP degree."""
    if View(recipe).has((*PARALLEL, "expert_parallel")):
        return apply_overrides(recipe, [f"parallel_config.expert_parallel={degree}"])
    changed = copy.deepcopy(recipe)
    changed.setdefault("parallel_config", {})["expert_parallel"] = degree
    return changed


def _few_nodes(times: TimeModel, own: Configuration, loads: Loads, nodes: int) -> Iterator[Change]:
    """Yield the change to routing that visits at most half of the group's nodes for a token."""
    limit = nodes // 2
    if nodes < 2 or own.model.nodes_of_token(nodes) <= limit:
        return
    sparse = replace(own, ep_mode=_SPARSE)
    free = step_under(times, sparse, loads).total
    limited = replace(sparse, model=replace(own.model, node_limit=limit, groups=0))
    seconds = step_under(times, limited, loads).total
    note = f"mode {_SPARSE}, which takes {free:.2f} s without; another router, whose loads are taken to be the same"
    yield Change(f"a token visits at most {limit} of {nodes} nodes", seconds, loads.typical, note)


def lines(changes: Sequence[Change]) -> list[str]:
    """Return a table as text with a row for each change to the recipe: the seconds of a step, the difference from the
    unchanged recipe's step, the max/mean of the expert loads, the change, and a note.
    """
    own = changes[0].step_s
    assert own is not None
    found = [f"{'step s':>8}  {'to it':>7}  max/mean"]
    for one in changes:
        seconds = "unknown" if one.step_s is None else f"{one.step_s:.2f}"
        gain = "" if one.step_s is None else f"{one.step_s / own - 1:+.1%}"
        ratio = "" if one.max_over_mean is None else f"{one.max_over_mean:.2f}"
        found.append(f"{seconds:>8}  {gain:>7}  {ratio:>8}  {one.name}{f': {one.note}' if one.note else ''}")
    return found
