"""This module describes the pipeline of a configuration as a `tools.layout.instance.Instance`, with the times and bytes
that the estimator predicts.

Times are in milliseconds, and memory is in GiB. The layer types are "dense" and "moe". Embedding, head and MTP layers
stay on the first and last stage: their times are the head and tail of the instance, and their weights are static
memory. The memory of each plan is that which the estimator predicts for the fullest moment of the passes or of the
optimizer's update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tools.estimate.configuration import NORMS, Configuration, Table, joined, offered, parts_of
from tools.estimate.layer_time import LayerTime
from tools.estimate.memory.activations import mtp_option, saved, working
from tools.estimate.memory.model import (
    buffers_of,
    counted_weights,
    kind_weights,
    static_memory,
    update_gradients,
    updating,
)
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.instance import CAP_TOLERANCE, Instance, LayerType, Option
from tools.pipeline.schedules import is_v_shaped

OPTIONS = ("none", "communication", "select", "full")
ORDER = ("full", "select", "communication", "none")  # of a chunk's layers, as MindFormers counts them
_MS = 1000


@dataclass(frozen=True)
class PlacedInstance(Instance):
    """A `PlacedInstance` is a pipeline-balance problem that also counts the time in which a stage receives activations
    and gradients from another stage.

    receiving   the time that is added to each forward pass except the first chunk's and to each backward pass except
                the last chunk's; the time of the sender is left out, so that no real plan is faster than the instance
                says
    end_weights the times of the weight gradients in the backward passes of head and tail
    """

    receiving: float = 0.0
    end_weights: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def fixed(self) -> np.ndarray:
        """Return for each chunk the times of work outside of layers, as an array [rows, C]. The rows are forward,
        backward, and the weight gradients of embedding and head if the schedule splits them off.
        """
        found = super().fixed
        found[2:, 0] += self.end_weights[0]
        found[2:, -1] += self.end_weights[1]
        return found

    @property
    def transfer(self) -> float:
        """Return the time for which a stage is busy when it sends to another stage, which is also the time for
        receiving.
        """
        return self.receiving

    @cached_property
    def received(self) -> np.ndarray:
        """Return for each stage the part of the times `ends` that is spent on receiving from another stage."""
        every = self.by_stage(self.ends.sum(axis=0) - super().ends.sum(axis=0))
        return every.reshape(self.chunks, self.stages).sum(axis=0)

    @cached_property
    def ends(self) -> np.ndarray:
        """Return for each chunk the forward and backward times of work outside of layers (embedding, head, receiving),
        as an array [2, C].
        """
        fixed = np.full((2, self.chunks * self.stages), self.receiving)
        fixed[:, 0] += self.head
        fixed[:, -1] += self.tail
        fixed[0, 0] -= self.receiving
        fixed[1, -1] -= self.receiving
        stays = np.flatnonzero(np.diff(self.stage_of) == 0)  # where a V turns round nothing is sent
        fixed[0, stays + 1] -= self.receiving
        fixed[1, stays] -= self.receiving
        return fixed


def pipeline_instance(
    config: Configuration, model: TimeModel, cap_bytes: float, full: bool, mtp: bool = False, groups: Sequence[str] = ()
) -> PlacedInstance:
    """Return the pipeline-balance problem of placing the layers of `config`. The present placement and recomputation of
    `config` have no effect.

    Args:
        full, mtp: whether layers may, and MTP layers do recompute fully (if the last layer of a plan does).
        groups: the groups of operators that layers may recompute, each with all groups before it (`by_price`).
    """
    kinds = [kind for kind in ("dense", "moe") if kind in config.model.pattern]
    some = table_of(config, [0] * (config.pp * config.chunks)) if full else None
    some = config.layers if mtp else some
    recompute = replace(config.recompute, full=some, select=None, communication=None, operators=())
    probe = replace(config, recompute=recompute)
    names = tuple(joined(groups[:count]) for count in range(len(groups) + 1)) if groups else OPTIONS[:-1]
    named = tuple((name, config.layers) for name in groups if name != NORMS)
    probe = replace(probe, recompute=replace(recompute, operators=named))
    (static, updated), parameters = _parameters(probe, kinds)
    times = {kind: model.layer(probe, kind) for kind in (*kinds, "embedding", "head")}
    tail = [times["head"]]
    if config.model.mtp:  # with what it repeats in its backward
        layer = model.layer(probe, "mtp")
        fixed = layer.backward.fixed + layer.recomputed[mtp_option(probe)].total
        tail += [replace(layer, backward=replace(layer.backward, fixed=fixed))] * config.model.mtp
    ends = [times["embedding"]]
    if config.pp == 1:
        ends, tail = ends + tail, []
    types = tuple(
        LayerType(
            kind,
            config.model.pattern.count(kind),
            times[kind].forward.total * _MS,
            times[kind].backward.total * _MS,
            parameters[kind][0] / GIB,
            _options(probe, kind, times[kind], (*names, "full") if full else names, bool(groups)),
            _weights([times[kind]]),
            buffers_of(probe, [kind]) / GIB,
            parameters[kind][1] / GIB,
            _zeroed(probe, [kind]) / GIB,
        )
        for kind in kinds
    )
    kept, passes = _of_ends(probe)
    return PlacedInstance(
        name="placement",
        stages=config.pp,
        chunks=config.chunks,
        micro_batches=config.micro_batches,
        schedule=config.schedule if config.pp > 1 else "1f1b",
        cap=cap_bytes / GIB - 2 * CAP_TOLERANCE,  # the solver may go over by its tolerance
        static=static / GIB,
        head=_both(ends),
        tail=_both(tail),
        types=types,
        receiving=0.0 if config.overlap_pp else model.transfer(config) * _MS,
        end_weights=(_weights(ends), _weights(tail)),
        # MTP, which `tail` and `static` put on the last stage, goes where the last layer is; only the first and the
        # last entry of an offset may leave no layer, and a V ends at neither
        last_layers=int(config.pp > 1 and (config.model.mtp > 0 or _last_stage(config) == 0)),
        last_option="full" if mtp else "",
        order=strongest_first(option.name for kind in types for option in kind.options),
        working=passes / GIB,
        kept=kept / GIB,
        updated=updated / GIB,
        zeroed=np.array([_zeroed(probe, own) for own in _kinds_of_ends(probe)]) / GIB,
    )


def strongest_first(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of recompute options with the strongest first, which is the order in which MindFormers assigns
    them to the layers of a chunk.
    """

    def place(name: str) -> tuple[int, int, str]:
        return ORDER.index(name) if name in ORDER else 1, -len(parts_of(name)), name

    return tuple(sorted(set(names), key=place))


def table_of(config: Configuration, counts: list[int]) -> Table:
    """Convert numbers of layers, listed in model order, to a table [chunks][stages]. In a V-shaped schedule the stages
    of odd chunks are reversed.
    """
    stages, turned = config.pp, is_v_shaped(config.schedule)
    rows = [tuple(counts[first : first + stages]) for first in range(0, len(counts), stages)]
    return tuple(row[::-1] if turned and chunk % 2 else row for chunk, row in enumerate(rows))


def _both(times: list) -> tuple[float, float]:
    return sum(t.forward.total for t in times) * _MS, sum(t.backward.total for t in times) * _MS


def _weights(times: list) -> float:
    """Return weight gradients, as `TimeModel.weight_gradients` counts them."""
    return float(sum(t.backward.matmul / 2 for t in times)) * _MS


def by_price(config: Configuration, model: TimeModel) -> tuple[str, ...]:
    """Return the names of all groups of operators that can be recomputed (the norms are one such group), ordered by the
    time that their recomputation costs per freed byte; the cheapest group comes first.

    MindFormers counts every group from a chunk's first layer, so that of two layers in a chunk, the earlier layer
    recomputes at least all groups of the later layer. Options that add one group after another in this order form the
    lower convex hull of time over memory, which is computed for the kind with the most layers.
    """
    kind = max(dict.fromkeys(config.model.pattern), key=config.model.pattern.count)
    layer, whole = model.layer(config, kind), saved(config, kind)
    price = {}
    for name in (NORMS, *offered(config)):
        freed = whole - saved(config, kind, name)
        if freed > 0:
            price[name] = layer.again(name).total / freed
    return tuple(sorted(price, key=lambda name: price[name]))


def _options(
    config: Configuration, kind: str, layer: LayerTime, names: Sequence[str], every: bool
) -> tuple[Option, ...]:
    """Return the recompute options of a kind, without those that another beats in time and memory unless all are
    wanted. No option needs less working memory than one that recomputes less. A dense layer has no experts, but where
    it stands before MoE layers that repeat theirs its option must say so.
    """
    found: list[Option] = []
    for name in names:
        passes = working(config, [(kind, name)]) / GIB
        option = Option(name, layer.again(name).total * _MS, saved(config, kind, name) / GIB, passes)
        better = (
            option.activation < other.activation or option.extra_backward < other.extra_backward for other in found
        )
        if every or all(better):
            found.append(option)
    return tuple(found)


def _parameters(config: Configuration, kinds: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return bytes that are a sum over layers: those that stay for the whole step, and those that the optimizer's
    update has; without any layer [2, stages], and of a layer of each kind [2]. An update that makes no new tensors has
    0: it needs less than the passes.
    """
    some = _zeroed(config, ("embedding", *kinds, "head")) > 0

    def summed(laid: Configuration, stage: int) -> np.ndarray:
        static = static_memory(laid, stage)
        gradients = update_gradients(laid, counted_weights(laid, stage)) if some else []
        return np.array([sum(static), some * (sum(static[:3]) + sum(divided for divided, _ in gradients))])

    ends, each = by_layers(config, kinds, summed)
    return ends.T, each


def _zeroed(config: Configuration, kinds: Sequence[str]) -> float:
    """Return bytes that the optimizer's update of a stage with such layers needs once, for the largest gradient."""
    gradients = update_gradients(config, ((weight, 1) for kind in kinds for weight in kind_weights(config, kind)))
    return updating((0.0, summed) for _, summed in gradients)


def _kinds_of_ends(config: Configuration) -> list[list[str]]:
    """Return for each stage the kinds of layers that it has whatever the plan is; some may be named twice."""
    found: list[list[str]] = [[] for _ in range(config.pp)]
    found[0].append("embedding")
    mtp, repeated = config.model.mtp > 0, config.model.mtp > 0 or config.model.tied
    found[_last_stage(config)] += ["head", *["mtp"] * mtp, *["embedding"] * repeated]
    return found


def by_layers(
    config: Configuration, kinds: Sequence[str], of_stage: Callable[[Configuration, int], np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Divide a quantity that is a sum over the weights of a stage (such as bytes) into two results: its value without
    any layer, [stages, values], and the value that one layer of each kind adds, [values]. If there is only one stage,
    the value without any layer includes all layers, because layers cannot move.
    """
    if config.pp == 1:
        whole = of_stage(replace(config, layers=((config.model.layers,),)), 0)
        return whole[None], dict.fromkeys(kinds, 0 * whole)
    model = config.model
    # one layer more, which stays at the end: MTP goes where the last layer is
    more = replace(model, pattern=(*model.pattern, model.last_kind))
    begin, end = int(_last_stage(config) == 0), _last_stage(config)
    # of a V both ends are on stage 0: layers are counted on the next one

    def held(first: int, stage: int) -> np.ndarray:
        """Return the quantity `of_stage` for a model with `first` layers in the chunk `begin` and all other layers in
        the last chunk.
        """
        counts = [0] * (config.pp * config.chunks - 1) + [more.layers - first]
        counts[begin] = first
        return of_stage(replace(config, model=more, layers=table_of(config, counts)), stage)

    each, before = {}, 0
    for kind in kinds:
        each[kind] = held(before + 1, begin) - held(before, begin)
        before += model.pattern.count(kind)
    last = held(0, end) - each[more.last_kind] - sum(each[kind] * model.pattern.count(kind) for kind in kinds)
    ends = np.zeros((config.pp, len(last)))  # stages between the ends hold nothing but layers
    ends[0], ends[end] = held(0, 0), last
    return ends, each


def _of_ends(config: Configuration) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes of embedding, head and MTP: kept of a micro-batch [C], and needed by a pass [stages]."""
    whole, last = mtp_option(config), ["head", *["mtp"] * config.model.mtp]
    kept, passes = np.zeros(config.pp * config.chunks), np.zeros(config.pp)
    kept[0] = saved(config, "embedding", whole)
    kept[-1] += sum(saved(config, kind, whole) for kind in last)
    passes[0] = working(config, [("embedding", whole)])
    passes[_last_stage(config)] = max(passes[_last_stage(config)], working(config, [(kind, whole) for kind in last]))
    return kept, passes


def _last_stage(config: Configuration) -> int:
    return 0 if is_v_shaped(config.schedule) and config.chunks % 2 == 0 else config.pp - 1
