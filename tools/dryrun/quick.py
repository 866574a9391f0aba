"""This module does the quick dry run: it compiles each kind of layer once, in a model with few stages, and computes the
memory of the real stages from the results.

A kind of layer is given by its block (dense or MoE), its recomputation settings and its swapping settings. Each setting
that a recipe states by stage, by chunk or by number of layer (`recompute`, `select_recompute`, `select_comm_recompute`,
their exclusions, `layer_swap`, `op_swap`) becomes the set of layers for which it is on. Two layers with the same active
settings compile to the same operators.

Sharding depends on the devices of a stage, not on how many stages there are or how deep they are: a layer of each kind,
the embedding, the head and the MTP layers on stages of the same size have the layouts of the whole model. Sums over
layers are exact (weights, optimizer state, gradients, gathered weights). Activations are added up from the parts of the
compiled passes, and differ from those of full depth by at most `ERROR`. A quick dry run does not report traffic.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from tools.dryrun.activations import BACK, COMMON, FRONT, added, curves_of, put_together
from tools.dryrun.memory import Held
from tools.dryrun.plan import SWAP, Job, Plan, Stage, plan_jobs, stages_of
from tools.estimate.configuration import spread
from tools.model import DENSE, MOE
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.view import View
from tools.schema.stages import EXCLUDE, RECOMPUTE, swaps

_FULL: KeyPath = ("recompute_config", RECOMPUTE[0])


@dataclass(frozen=True)
class Setting:
    """A `Setting` is a key of the recipe whose value differs between layers, with the layers for which the setting is
    on. The field `numbered` says whether the recipe lists layer numbers (with swapping) instead of a number of layers.
    """

    path: tuple[str | int, ...]
    layers: frozenset[int]
    numbered: bool


@dataclass(frozen=True)
class Kind:
    """A `Kind` describes layers that compile to the same graph: whether they are "dense" or "moe", which settings are
    on for them, and whether they are recomputed as a whole.
    """

    block: str
    on: tuple[bool, ...]
    whole: bool = False


def settings_of(view: View, stages: Sequence[Stage]) -> list[Setting]:
    """Return the settings that differ between the recipe's layers."""
    found = []
    for key in (*RECOMPUTE, *EXCLUDE):
        numbered = swaps(view) and key in RECOMPUTE
        for path, value in _lists(view.get(("recompute_config", key)), ("recompute_config", key)):
            layers = frozenset(value) if numbered else _counted(value, stages)
            found.append(Setting(path, frozenset() if swaps(view) and key in EXCLUDE else layers, numbered))
    for swap in SWAP if swaps(view) else ():
        for path, value in _lists(view.get(swap), swap):
            found.append(Setting(path, frozenset(item for item in value if isinstance(item, int)), True))
    return found


def kinds_of(view: View, stages: Sequence[Stage], settings: Sequence[Setting]) -> list[list[list[Kind]]]:
    """Return the kind of each layer of a recipe, as nested lists [stage][chunk][layer]."""

    def kinds(first: int, blocks: Sequence[str]) -> list[Kind]:
        return [_kind(view, block, first + place, settings) for place, block in enumerate(blocks)]

    return [[kinds(*chunk) for chunk in stage.chunks] for stage in stages]


def _kind(view: View, block: str, layer: int, settings: Sequence[Setting]) -> Kind:
    """Return the kind of a layer; if it is recomputed as a whole, its other recompute settings do nothing."""
    whole = view.get(_FULL) is True or any(layer in each.layers for each in settings if each.path == _FULL)
    return Kind(block, tuple(layer in each.layers or (whole and each.path[1] in RECOMPUTE) for each in settings), whole)


def _lists(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], list[Any]]]:
    """Yield the lists of layers or of numbers of layers in a setting, each with where it stands."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lists(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, inner in enumerate(value):
            yield from _lists(inner, (*path, place))
    elif isinstance(value, list) and value and not any(isinstance(item, str) for item in value):
        yield path, value


def _counted(value: list[Any], stages: Sequence[Stage]) -> frozenset[int]:
    """Return the layers that numbers of layers stand for: the first of each chunk."""
    sizes = tuple(
        tuple(len(stage.chunks[chunk][1]) for stage in stages) for chunk in range(len(stages[0].chunks))
    )  # [chunks][stages]
    if not any(isinstance(item, list) for item in value):
        value = [*value, *[0] * (len(stages) - len(value))][: len(stages)]  # MindFormers takes a shorter list, too
    table = spread(value, sizes) or ()
    return frozenset(
        stages[stage].chunks[chunk][0] + place
        for chunk, row in enumerate(table)
        for stage, count in enumerate(row)
        for place in range(count)
    )


def groups_of(kinds: Sequence[Kind], numbered: bool) -> list[list[Kind]]:
    """Distribute one layer of each kind to as few stages as a recipe can express, and return these stages. On each
    stage of the result, dense layers come before MoE layers. A setting (such as recomputation) that is off for one
    layer is off for all later layers of the stage. If the recipe names layers by number (`numbered`), a stage can hold
    every combination of settings.
    """
    groups: list[list[Kind]] = [[]]
    for kind in sorted(dict.fromkeys(kinds), key=_order):
        first = max((at for at, group in enumerate(groups) if any(item.block != MOE for item in group)), default=0)
        start = first if kind.block == MOE else 0
        fits = (group for group in groups[start:] if numbered or _falls(sorted([*group, kind], key=_order)))
        if (group := next(fits, None)) is None:
            groups.append([kind])
        else:
            group[:] = sorted([*group, kind], key=_order)
    return groups


def _order(kind: Kind) -> tuple[bool, int, tuple[bool, ...]]:
    return kind.block == MOE, -sum(kind.on), tuple(not here for here in kind.on)


def _falls(group: Sequence[Kind]) -> bool:
    return all(old >= new for one, other in pairwise(group) for old, new in zip(one.on, other.on, strict=True))


def write_settings(recipe: Recipe, settings: Sequence[Setting], groups: Sequence[Sequence[Kind]]) -> None:
    """Write the recompute and swap settings of the given layers into the recipe. The layers are given as a list of
    kinds for each stage.
    """
    layers = [kind for group in groups for kind in group]
    for place, setting in enumerate(settings):
        value: list[int] = [sum(kind.on[place] for kind in group) for group in groups]
        if setting.numbered:
            value = [number for number, kind in enumerate(layers) if kind.on[place]]
        inside: Any = recipe
        for key in setting.path[:-1]:
            inside = inside[key]
        inside[setting.path[-1]] = value


ERROR = 0.03  # most that a total is off, against full depth: benchmarks/dryrun_quick_vs_full.py
_LAYER = "decoder.layers."
_NOTHING = {"saved": 0, "forward": 0, "backward": 0}
_LEAST = 2  # layers of a stage in front: what two of them share belongs to none


class Small(NamedTuple):
    """A `Small` describes the small model that a quick dry run compiles instead of the real model: its recipe, the
    kinds of layers in each stage, and the kinds of the real model's layers [stage][chunk][layer].
    """

    groups: list[list[Kind]]
    kinds: list[list[list[Kind]]]
    recipe: Recipe


def quick_plan(recipe: Recipe) -> Plan:
    """Return the plan of a quick dry run: the few compiles from which `compose` computes all stages. A recipe with only
    one stage is compiled unchanged.
    """
    view = View(recipe)
    if view.pp == 1:
        return plan_jobs(recipe)
    small = small_of(recipe).recipe
    per_stage = view.devices // view.pp
    jobs = [Job(small, stage * per_stage, stage) for stage in range(View(small).pp)]
    return Plan(stages_of(view), jobs, [], View(small).micro_batches)


def small_of(recipe: Recipe) -> Small:
    """Return a recipe of a small model with one layer of each kind of the real model. The small model ends with one
    more layer of the last kind, the head, and the MTP layers.
    """
    view = View(recipe)
    stages = stages_of(view)
    settings = settings_of(view, stages)
    kinds = kinds_of(view, stages, settings)
    by_first = {
        first: chunk
        for stage, chunks in zip(stages, kinds, strict=True)
        for (first, _), chunk in zip(stage.chunks, chunks, strict=True)
        if chunk
    }
    layers = [kind for first in sorted(by_first) for kind in by_first[first]]
    groups = [group * (_LEAST if len(group) < _LEAST else 1) for group in groups_of(layers, swaps(view))]
    groups.append(layers[-1:])
    small = copy.deepcopy(recipe)
    _set_layers(small, groups)
    write_settings(small, settings, groups)
    return Small(groups, kinds, small)


def _set_layers(small: Recipe, groups: Sequence[Sequence[Kind]]) -> None:
    """Make the groups the layers of the recipe's stages."""
    model = small["model"]["model_config"]
    blocks = [kind.block for group in groups for kind in group]
    total, pp = len(blocks), len(groups)
    model["num_hidden_layers"] = total
    if MOE in blocks:  # whichever way the recipe spells its layers, or leaves to a default
        dense = blocks.index(MOE)
        behind = [int(block == MOE) for block in blocks] if DENSE in blocks[dense:] else 1
        model |= {"first_k_dense_replace": 0 if behind != 1 else dense, "moe_layer_freq": behind}
    elif "first_k_dense_replace" in model:
        model["first_k_dense_replace"] = min(model["first_k_dense_replace"] or 0, total)
    model["offset"] = [len(group) - total // pp for group in groups]
    model["pp_interleave_num"] = 1
    small["parallel_config"] |= {"pipeline_stage": pp, "micro_batch_num": pp}
    small["parallel"]["pipeline_config"] = {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"}


def compose(
    recipe: Recipe, stages: Sequence[Stage], results: Sequence[Mapping[str, Any]]
) -> list[tuple[list[Held], dict[str, Any]]]:
    """Compute the parameters and the graph's summary (without communication) of each stage of the real recipe from the
    results of a quick dry run.
    """
    small = small_of(recipe)
    layers = _Compiled(small.groups, results)
    found = []
    for stage, chunks in zip(stages, small.kinds, strict=True):
        own = [layers.of(kind) for chunk in chunks for kind in chunk]
        held = [item for one in own for item in one.held]
        kept = {f"{place}:{name}": size for place, one in enumerate(own) for name, size in one.kept.items()}
        ends = [layers.results[place] for end, place in (("embedding", 0), ("head", -1)) if end in stage.ends]
        outside = {item["name"]: Held(**item) for result in ends for item in result["held"]}
        held += [item for name, item in outside.items() if _LAYER not in name]
        for result in ends:
            kept |= {name: size for name, size in result["graph"]["kept"].items() if _LAYER not in name}
        passes = [
            layers.chunk(chunk, "embedding" in stage.ends and number == 0, "head" in stage.ends and chunk is chunks[-1])
            for number, chunk in enumerate(chunks)
        ]
        found.append((held, {"activations": passes, "kept": kept, "flops": [], "collectives": []}))
    return found


class _Layer(NamedTuple):
    """A `_Layer` holds the results for one compiled layer."""

    held: list[Held]
    kept: dict[str, int]
    part: Mapping[str, Any]


class _Compiled:
    """A `_Compiled` holds the compiles of the small model, by kind of layer."""

    def __init__(self, groups: Sequence[Sequence[Kind]], results: Sequence[Mapping[str, Any]]):
        self.results = results
        self._parts = [result["graph"]["activations"][0]["parts"] for result in results]
        self._whole = [all(kind.whole for kind in group) for group in groups]
        self._layers: dict[Kind, _Layer] = {}
        numbered = [(job, kind) for job, group in enumerate(groups) for kind in group]
        for number, (job, kind) in enumerate(numbered):
            if kind not in self._layers:
                self._layers[kind] = self._layer(job, number)

    def _layer(self, job: int, number: int) -> _Layer:
        name = f"{_LAYER}{number}."
        held = [Held(**item) for item in self.results[job]["held"] if name in item["name"]]
        kept = {key: size for key, size in self.results[job]["graph"]["kept"].items() if name in key}
        return _Layer(held, kept, self._parts[job].get(str(number), _NOTHING))

    def of(self, kind: Kind) -> _Layer:
        """Return the parameters and the bytes that the compile found for one layer of the given kind."""
        return self._layers[kind]

    def _common(self, kinds: Sequence[Kind], head: bool) -> Mapping[str, Any]:
        """Return what several layers read: layers that are recomputed whole make it again and keep none of it."""
        whole = all(kind.whole for kind in kinds)
        jobs = range(len(self._parts) - (not head))
        found = [self._parts[job].get(COMMON, _NOTHING) for job in jobs if self._whole[job] or not whole]
        return max(found, key=lambda part: part["saved"], default=_NOTHING)

    def chunk(self, kinds: Sequence[Kind], embedding: bool, head: bool) -> dict[str, Any]:
        """Return the activation bytes of a micro-batch's forward and backward passes through a chunk with the given
        kinds of layers. The embedding and the head are included if requested.
        """
        front, back = self._parts[0], self._parts[-1]
        parts = [self._common(kinds, head)]
        parts += [front.get(FRONT, _NOTHING)] if embedding else []
        parts += [self.of(kind).part for kind in kinds]
        if head:
            parts += [back.get(FRONT, _NOTHING), back.get(BACK, _NOTHING)]
        modules = added(part.get("modules", {}) for part in parts)
        return {**put_together(parts), "modules": modules, "curves": curves_of(parts)}
