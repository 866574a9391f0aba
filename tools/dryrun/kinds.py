"""Kinds of layer: dense or MoE, how it is recomputed and how it is swapped; and the few stages that hold each kind.

What a recipe says by stage, by chunk or by number of layer (`recompute`, `select_recompute`, `select_comm_recompute`,
what is excluded of them, `layer_swap`, `op_swap`) becomes, for each such setting, the set of layers for which it is on.
Two layers of which the same settings are on compile to the same operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tools.dryrun.stages import SWAP, Stage
from tools.estimate.configuration import spread
from tools.model.architecture import MOE
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.view import View
from tools.schema.stages import EXCLUDE, RECOMPUTE, swaps

_FULL: KeyPath = ("recompute_config", RECOMPUTE[0])


@dataclass(frozen=True)
class Setting:
    """A setting that is not the same for all layers.

    Args:
        path: its keys, and places in lists.
        layers: numbers of the layers for which it is on.
        numbered: whether the recipe lists numbers of layers (under swapping), not how many layers of each stage.
    """

    path: tuple[str | int, ...]
    layers: frozenset[int]
    numbered: bool


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Args:
        block: "dense" or "moe".
        on: for each of the recipe's settings whether it is on for this layer.
        whole: whether the layer is recomputed as a whole.
    """

    block: str
    on: tuple[bool, ...]
    whole: bool = False


def settings_of(view: View, stages: Sequence[Stage]) -> list[Setting]:
    """The settings that differ by layer."""
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
    """Kinds of layers [stage][chunk][layer]."""
    return [
        [
            [_kind(view, block, first + place, settings) for place, block in enumerate(blocks)]
            for first, blocks in chunks
        ]
        for chunks in (stage.chunks for stage in stages)
    ]


def _kind(view: View, block: str, layer: int, settings: Sequence[Setting]) -> Kind:
    """A layer that is recomputed whole pays no heed to what else would be: any value stands for every other."""
    on = [layer in setting.layers for setting in settings]
    whole = view.get(_FULL) is True or any(
        here for here, setting in zip(on, settings, strict=True) if setting.path == _FULL
    )
    if whole:
        on = [here or setting.path[1] in RECOMPUTE for here, setting in zip(on, settings, strict=True)]
    return Kind(block, tuple(on), whole)


def _lists(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], list[Any]]]:
    """The lists of layers or of numbers of layers in a setting, each with where it stands."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lists(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, inner in enumerate(value):
            yield from _lists(inner, (*path, place))
    elif isinstance(value, list) and value and not any(isinstance(item, str) for item in value):
        yield path, value


def _counted(value: list[Any], stages: Sequence[Stage]) -> frozenset[int]:
    """The layers that numbers of layers stand for: the first of each chunk."""
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
    """Each kind once, in as few stages as the recipe can say: dense layers first, and on a stage a setting that is off
    for a layer is off for those behind it.

    Args:
        numbered: settings list numbers of layers, so that one stage can hold any of them.
    """
    groups: list[list[Kind]] = [[]]
    for kind in sorted(dict.fromkeys(kinds), key=_order):
        first = max((at for at, group in enumerate(groups) if any(item.block != MOE for item in group)), default=0)
        start = first if kind.block == MOE else 0
        fits = (group for group in groups[start:] if numbered or _falls(sorted([*group, kind], key=_order)))
        group = next(fits, None)
        if group is None:
            groups.append([kind])
        else:
            group.append(kind)
            group.sort(key=_order)
    return groups


def _order(kind: Kind) -> tuple[bool, int, tuple[bool, ...]]:
    return kind.block == MOE, -sum(kind.on), tuple(not here for here in kind.on)


def _falls(group: Sequence[Kind]) -> bool:
    pairs = pairwise(group)
    return all(not after or before for one, other in pairs for before, after in zip(one.on, other.on, strict=True))


def write_settings(recipe: Recipe, settings: Sequence[Setting], groups: Sequence[Sequence[Kind]]) -> None:
    """Say of the recipe's layers, which are now `groups` by stage, what they are."""
    layers = [kind for group in groups for kind in group]
    for place, setting in enumerate(settings):
        value: list[int] = [sum(kind.on[place] for kind in group) for group in groups]
        if setting.numbered:
            value = [number for number, kind in enumerate(layers) if kind.on[place]]
        inside: Any = recipe
        for key in setting.path[:-1]:
            inside = inside[key]
        inside[setting.path[-1]] = value
