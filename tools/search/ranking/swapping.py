"""This module places layers with three choices for the activations of each layer: keep them, recompute them, or swap
them to the host. Swapping is only simulated, never executed.

MindFormers 1.9.0 swaps by `model.model_config.swap` with `layer_swap` (whole layers) or `op_swap` (operators by
pattern); `swap_config` is not passed to any model. A layer's activations are sent to the host while the layers after it
run, and fetched `backward_prefetch` layers ahead during the backward pass.

The model assumes a stage that is never idle (bubbles hide more):
* only the backward pass hides the fetch: if fetching a layer takes longer than the backward pass of a layer, the
  difference is added;
* the forward and backward passes of any micro-batch hide the sending, because the link works in both directions at
  once;
* the first layer of a backward pass is fetched during the pass before it, which is assumed to be a backward pass, too;
* only the swapped layers that are being transferred need memory on the device: the layer whose backward pass runs and
  the layer that is fetched ahead of it, however many micro-batches are in flight.

The model leaves out three effects: the host's memory bandwidth, which all devices of a node share; other traffic on the
link; and micro-batches whose backward pass directly follows their forward pass (on the last stage), which should not be
swapped.

Two options are offered for each kind of layer: to swap everything except its input, or to swap the largest set of
modules whose transfer the backward pass hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations
from operator import attrgetter

from plugins.errors import RecipeError
from tools.estimate.configuration import Configuration
from tools.estimate.memory.activations import saved, saved_parts
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.instance import LayerType, Option
from tools.layout.optimise import Outcome, optimise
from tools.layout.place import ways
from tools.layout.problem import PlacedInstance, pipeline_instance


@dataclass(frozen=True)
class Swapped:
    """A `Swapped` holds the time and memory of a layer that swaps its activations to the host."""

    extra_backward: float  # seconds added to the layer's backward
    activation: float  # bytes that stay on the device for each micro-batch in flight
    once: float  # bytes on their way, which a stage needs once, however many layers swap


def swapped(saved: float, moved: float, one_way: float, backward: float) -> Swapped:
    """Return the memory and time of a layer for one micro-batch if `moved` bytes of its activations (`saved` bytes) are
    swapped to the host. The copy takes `one_way` seconds in each direction, and the backward pass of the layer takes
    `backward` seconds.
    """
    return Swapped(max(0.0, one_way - backward), saved - moved, 2 * moved)


WHOLE, HIDDEN = "swap", "swap what is hidden"
_MS = 1000


@dataclass(frozen=True)
class Swapping:
    """A `Swapping` holds the step times without and with the choice to swap a layer's activations to the host (instead
    of keeping or recomputing them).
    """

    without_s: float  # seconds of a step; infinite where nothing fits
    with_s: float
    layers: Mapping[str, int]  # of the faster one, by option, dense and MoE layers together
    by_stage: tuple[int, ...]  # [stages] layers of it that swap
    peak: float  # bytes of its fullest stage


def place_swapping(config: Configuration, model: TimeModel, cap_bytes: float, budget: Budget) -> Swapping:
    """Place the layers of `config` with and without the choice of swapping activations to the host, and spend half of
    the effort on each of these two placements.

    Raises:
        RecipeError: the bandwidth to the host is unknown, or layers of this model cannot be placed by the optimiser.
    """
    every = ways(config)
    if not every:
        raise RecipeError(
            "swapping: the search cannot place this model's layers on stages, because dense and MoE layers alternate"
        )
    prices = prices_of(config, model)
    plain = [pipeline_instance(config, model, cap_bytes, *way) for way in every]
    by_time, of = attrgetter("time"), 2 * len(every)

    def best(instances: Iterable[PlacedInstance]) -> Outcome:
        return min((optimise(one, budget.part(1 / of, budget.seconds / of)) for one in instances), key=by_time)

    without = best(plain)
    found = min(without, best(with_swapping(one, prices) for one in plain), key=by_time)
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
    """Add options that swap a layer's activations to the host's memory to the pipeline-balance problem `instance`, and
    return the new problem. The static memory of every stage grows by the bytes that are being copied at the same time.
    A pass through a layer that swaps needs as much memory as a pass through a layer that recomputes nothing.
    """
    once = max(price.once for kind in instance.types for price in prices[kind.name].values())

    def swapping(kind: LayerType) -> list[Option]:
        passes = min(option.working for option in kind.options)
        ways = prices[kind.name].items()
        return [Option(name, one.extra_backward * _MS, one.activation / GIB, passes) for name, one in ways]

    types = tuple(replace(kind, options=(*kind.options, *swapping(kind))) for kind in instance.types)
    # simulated only: MindFormers counts no layers that swap, so that any order of options will do
    return replace(instance, types=types, static=instance.static + once / GIB, order=())


def prices_of(config: Configuration, model: TimeModel) -> dict[str, dict[str, Swapped]]:
    """Return the cost of swapping activations for each kind of layer, as a nested dictionary kind of layer -> option ->
    time and memory.
    """
    found = {}
    for kind in dict.fromkeys(config.model.pattern):
        layer, parts = model.layer(config, kind), saved_parts(config, kind)
        whole, backward = sum(parts.values()), layer.backward.total
        most = whole - saved(config, kind, "full")
        moved = {WHOLE: most, HIDDEN: min(hidden_bytes(parts.values(), backward, model), most)}
        found[kind] = {
            name: swapped(whole, size, _to_host(model, size), backward) for name, size in moved.items() if size
        }
    return found


def hidden_bytes(sizes: Iterable[float], backward: float, model: TimeModel) -> float:
    """Return the largest number of bytes of a layer's kept tensors that can be copied from the host while the layer's
    backward pass runs.
    """
    every = [size for size in sizes if size]
    sets = chain.from_iterable(combinations(every, count) for count in range(len(every) + 1))
    return max(total for total in map(sum, sets) if _to_host(model, total) <= backward)


def _to_host(model: TimeModel, size: float) -> float:
    seconds = model.to_host(size)
    if seconds is None:
        raise RecipeError(
            f"swapping: the time of swapping is unknown, because the cluster file of {model.hardware.name} has no "
            "host_link (bandwidth between device and host)"
        )
    return seconds
