"""Keep, recompute or swap: layers placed with swapping to the host as a third choice. Simulated only.

The price is that of `tools.pipeline.swap`: the link to the host carries bytes both ways at once beside computation;
what takes longer than a layer's backward adds to it. Two ways to swap are offered for each kind of layer: all but its
input, and those modules' tensors that the backward hides, the most bytes of them. What is on its way takes room on
every stage. Nobody else is on the link: devices of a node share the host's memory, which is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations

from plugins.errors import RecipeError
from tools.estimate.configuration import Configuration
from tools.estimate.memory.activations import saved, saved_parts
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.pipeline.swap import Swapped, swapped
from tools.placement.budget import Budget
from tools.placement.instance import LayerType, Option
from tools.placement.optimise import Outcome, optimise
from tools.placement.place import ways
from tools.placement.problem import PlacedInstance, pipeline_instance

WHOLE, HIDDEN = "swap", "swap what is hidden"
_MS = 1000


@dataclass(frozen=True)
class Swapping:
    """What the third choice brings.

    Args:
        without_s, with_s: seconds of a step; infinite where nothing fits.
        layers: of the faster one, by option, dense and MoE layers together.
        by_stage: [stages] layers of it that swap.
        peak: bytes of its fullest stage.
    """

    without_s: float
    with_s: float
    layers: Mapping[str, int]
    by_stage: tuple[int, ...]
    peak: float


def place_swapping(
    config: Configuration, model: TimeModel, cap_bytes: float, budget: Budget, seed: int = 0
) -> Swapping:
    """`config`'s layers placed with and without swapping, half of the effort each.

    Raises:
        RecipeError: the bandwidth to the host is unknown, or layers of this model are not placed.
    """
    every = ways(config)
    if not every:
        raise RecipeError("swapping: layers that alternate between dense and MoE are not placed")
    prices = prices_of(config, model)
    plain = [pipeline_instance(config, model, cap_bytes, *way) for way in every]
    without = _best([optimise(one, _share(budget, 2 * len(every)), seed) for one in plain])
    outcomes = [optimise(with_swapping(one, prices), _share(budget, 2 * len(every)), seed) for one in plain]
    found = min(without, _best(outcomes), key=lambda outcome: outcome.time)
    step = model.step(config, simulated=True)
    rest = step.total - step.pipeline
    if found.plan is None:
        return Swapping(float("inf"), float("inf"), {}, (0,) * config.pp, 0.0)
    instance = found.instance
    names = [instance.types[t].options[o].name for t, o in instance.columns]
    counts = {name: int(found.plan[[n == name for n in names]].sum()) for name in dict.fromkeys(names)}
    swapping = instance.by_stage(found.plan[[name in (WHOLE, HIDDEN) for name in names]].sum(axis=0))
    by_stage = tuple(int(count) for count in swapping.reshape(config.chunks, config.pp).sum(axis=0))
    layers = {name: count for name, count in counts.items() if count}
    times = (rest + without.time / _MS, rest + found.time / _MS)
    return Swapping(*times, layers, by_stage, float(found.peak.max()) * GIB)


def with_swapping(instance: PlacedInstance, prices: Mapping[str, Mapping[str, Swapped]]) -> PlacedInstance:
    """An instance whose layers may swap, too; every stage has room for what is on its way, at its largest."""
    once = max(price.once for kind in instance.types for price in prices[kind.name].values())
    types = tuple(_with_options(kind, prices[kind.name]) for kind in instance.types)
    return replace(instance, types=types, static=instance.static + once / GIB)


def _with_options(kind: LayerType, prices: Mapping[str, Swapped]) -> LayerType:
    more = [Option(name, price.extra_backward * _MS, price.activation / GIB) for name, price in prices.items()]
    return replace(kind, options=(*kind.options, *more))


def prices_of(config: Configuration, model: TimeModel) -> dict[str, dict[str, Swapped]]:
    """Kind -> way to swap -> its price."""
    found = {}
    for kind in dict.fromkeys(config.model.pattern):
        layer, parts = model.layer(config, kind), saved_parts(config, kind)
        whole, forward, backward = sum(parts.values()), layer.forward.total, layer.backward.total
        free = hidden_bytes(parts.values(), backward, model)
        moved = {WHOLE: whole - saved(config, kind, "full"), HIDDEN: min(free, whole - saved(config, kind, "full"))}
        found[kind] = {
            name: swapped(whole, size, _to_host(model, size), forward, backward) for name, size in moved.items() if size
        }
    return found


def hidden_bytes(sizes: Iterable[float], backward: float, model: TimeModel) -> float:
    """The most bytes of some tensors that the link carries in a layer's backward."""
    every = [size for size in sizes if size]
    sets = chain.from_iterable(combinations(every, count) for count in range(len(every) + 1))
    return max(total for total in map(sum, sets) if _to_host(model, total) <= backward)


def _to_host(model: TimeModel, size: float) -> float:
    seconds = model.to_host(size)
    if seconds is None:
        raise RecipeError(f"swapping: {model.hardware.name} has no host_link: the price is not known")
    return seconds


def _best(outcomes: list[Outcome]) -> Outcome:
    return min(outcomes, key=lambda outcome: outcome.time)


def _share(budget: Budget, of: int) -> Budget:
    return budget.part(1 / of, budget.seconds / of)
