"""This module finds which plugins go together, with which kinds of parallelism they go together, and which evidence
shows this.

    python -m tools.accuracy.together          # rewrite docs/together.md

A pair is put into a small recipe for Ascend. Either `tc3 check` refuses it, or there is evidence: a row of `tc3
accuracy equivalence`, or a recipe whose card says that it was trained or compiled. A pair without either is "not
shown".
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from plugins import ADAPTERS, REPLACED, UNWRITTEN
from tools.accuracy.equivalence.sharding import Sharding, derive_sharded
from tools.accuracy.equivalence.strategies import CASES, Variant, one_worker
from tools.check.check import check_recipe
from tools.files.atomic import write_atomically
from tools.layout.resolve import resolve
from tools.recipe.catalogue import load_cards
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import PARALLEL, View

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "together.md"
BASE, CHATS = ROOT / "recipes/mini/pretrain.yaml", ROOT / "recipes/mini/finetune.yaml"
DENSE = ROOT / "recipes/telechat3_36b/context_32k.yaml"
EQUAL, TRAINS, COMPILED, REFUSED, UNSHOWN = "equal", "trains", "compiled", "refused", "not shown"
_SMALLEST = Sharding(moe=True, aux=True)


@dataclass(frozen=True)
class Plugin:
    """A `Plugin` holds what a small recipe with a plugin needs."""

    settings: Any = field(default_factory=dict)  # the settings in the plugin's section of the recipe
    needs: Mapping[str, Any] = field(default_factory=dict)  # fields of a `Sharding` that the plugin needs
    beside: Sequence[str] = ()  # the names of other plugins that must be on
    chats: bool = False  # whether the plugin needs conversations as data
    dense: bool = False  # whether the plugin needs grouped-query attention, which the models without experts have
    model: Mapping[str, Any] = field(default_factory=dict)  # the keys of `model_config` that the plugin needs
    grows: bool = False  # whether the plugin needs a batch that can be halved, and data that pass through the process


FACTS = yaml.safe_load(Path(__file__).with_name("together.yaml").read_text("utf-8"))
KINDS: Mapping[str, Mapping[str, Any]] = FACTS["kinds"]
PLUGINS: Mapping[str, Plugin] = {name: Plugin(**row) for name, row in FACTS["plugins"].items()}


@dataclass(frozen=True)
class Cell:
    """A `Cell` says how two plugins, or a plugin and a kind of parallelism, go together, and the reason or evidence."""

    one: str
    other: str
    how: str
    by: str


def pairs() -> Iterator[tuple[str, str]]:
    """Yield every pair of two plugins, then every pair of a plugin and a kind of parallelism."""
    yield from itertools.combinations(PLUGINS, 2)
    yield from itertools.product(PLUGINS, KINDS)


def cells() -> list[Cell]:
    """Return a `Cell` for every pair."""
    return [cell(*pair) for pair in pairs()]


def cell(one: str, other: str) -> Cell:
    """Return whether a plugin goes with another plugin or a kind of parallelism."""
    if found := check_recipe(recipe_of(one, other)).errors:
        return Cell(one, other, REFUSED, f"{found[0].key}: {found[0].wrong}")
    for how, by, has in shown():
        if {one, other} <= has:
            return Cell(one, other, how, by)
    return Cell(one, other, UNSHOWN, "")


def recipe_of(*names: str) -> Recipe:
    """Return a small recipe for Ascend with the named plugins and kinds of parallelism."""
    plugins = list(dict.fromkeys(each for name in names if name in PLUGINS for each in (*PLUGINS[name].beside, name)))
    needs = [KINDS[name] for name in names if name in KINDS] + [PLUGINS[name].needs for name in plugins]
    sharding = _SMALLEST
    for need in needs:
        sharding = replace(sharding, **{name: max(getattr(sharding, name), value) for name, value in need.items()})
    chats = any(PLUGINS[name].chats for name in plugins)
    if chats:  # these are documents that do not see each other already
        sharding = replace(sharding, documents=False)
    if grows := any(PLUGINS[name].grows for name in plugins):
        part, least = ("micro", 2 * sharding.pp) if sharding.pp > 1 else ("accumulate", 4)
        sharding = replace(sharding, **{part: max(getattr(sharding, part), least)})
    if dense := any(PLUGINS[name].dense for name in plugins):
        sharding = replace(sharding, moe=False, aux=False)
    base = copy.deepcopy(_base(DENSE if dense else BASE))
    if grows:
        base["runner_config"]["batch_size"] = 2 * _base(BASE)["runner_config"]["batch_size"]
    recipe = derive_sharded(base, sharding, 4, "x")
    recipe["context"].update(device_target="Ascend", jit_config={"jit_level": "O1"})
    recipe["runner_config"]["sink_mode"] = not grows
    recipe["context"]["dataset_broadcast_opt_level"] = 0 if grows else 3
    model = recipe["model"]["model_config"]
    model.update(compute_dtype="bfloat16", npu_nums_per_device=max(sharding.ep // 2, 1))
    for name in plugins:
        model.update(PLUGINS[name].model)
    if dense and "yarn" not in plugins:  # which the dense base has
        model.update(position_embedding_type="rope", rope_scaling=None, max_position_embeddings=model["seq_length"])
    recipe["plugins"] = {name: copy.deepcopy(PLUGINS[name].settings) for name in plugins}
    if chats:
        other = load_recipe(CHATS)
        recipe["train_dataset"] = other["train_dataset"]
        length = other["model"]["model_config"]["seq_length"]
        model["seq_length"] = length
        if not dense:
            model["max_position_embeddings"] = length
    return recipe


@cache
def _base(path: Path) -> Recipe:
    return one_worker(str(path))


@cache
def shown() -> tuple[tuple[str, str, frozenset[str]], ...]:
    """Return for each piece of evidence its kind, its name, and the plugins and kinds of parallelism that it covers;
    the strongest evidence comes first.
    """
    rows = [(EQUAL, case.name, _of_sharding(case.sharding)) for case in CASES if case.sharding]
    rows += [(EQUAL, case.name, _of_variant(case.variant)) for case in CASES if case.variant]
    for how, claim in ((TRAINS, "trained-on-cpu-mini"), (COMPILED, "compiled-virtual-")):
        entries = [entry for card in load_cards(ROOT / "recipes") for entry in card.entries]
        claimed = [entry.file for entry in entries if any(s["claim"].startswith(claim) for s in entry.status)]
        rows += [
            (how, str(file.relative_to(ROOT)), _of_recipe(file).difference(FACTS["left_out"][how])) for file in claimed
        ]
    return tuple((how, by, frozenset(has)) for how, by, has in rows)


def _of_sharding(sharding: Sharding) -> set[str]:
    has = {"hierarchical_ep"} if sharding.mode else set()
    named = {"ep_overlap": sharding.chunks > 1, "held_out_loss": sharding.held_out, "expert_balance": sharding.moves}
    named |= {"hyper_connections": sharding.streams > 1, "group_aux_loss": sharding.together}
    named |= {"lora": sharding.lora, "batch_ramp": sharding.ramp}
    has |= {name for name, on in named.items() if on}
    return has | kinds_of(sharding)


def kinds_of(sharding: Sharding) -> set[str]:
    """Return the kinds of parallelism that a layout uses."""
    has = {name for name, need in KINDS.items() if _covers(sharding, need)}
    groups = sharding.dp * sharding.tp * sharding.cp // sharding.ep
    return (has | {"several expert groups"}) if sharding.ep > 1 and groups > 1 else has - {"several expert groups"}


def _covers(sharding: Sharding, need: Mapping[str, Any]) -> bool:
    about = {name for name in need if name not in ("micro", "layers")}
    return all(
        getattr(sharding, name) > getattr(Sharding(), name) for name in about - ({"dp"} if "ep" in about else set())
    )


def _of_variant(variant: Variant) -> set[str]:
    has = {"hierarchical_ep", "expert parallel"} if variant.mode else set()
    named = {"ep_overlap": variant.chunks > 1, "attention_balance": variant.balance, "held_out_loss": variant.held_out}
    named |= {"recomputation": variant.recompute, "data parallel": variant.workers > 1}
    return has | {name for name, on in named.items() if on}


def _of_recipe(path: Path) -> set[str]:
    recipe = resolve(load_recipe(path))
    view = View(recipe)
    named = UNWRITTEN | (recipe.get("plugins") or {})
    on = {name for name, settings in named.items() if settings is not False}
    on -= {name for name, other in REPLACED.items() if other in on}
    layout = Sharding(
        tp=view.tp, dp=view.dp, cp=view.cp, pp=view.pp, ep=view.ep if view.parallel else 1, vpp=view.chunks,
        sp=view.flag((*PARALLEL, "use_seq_parallel")),
        zero=view.flag(("parallel", "enable_parallel_optimizer")), accumulate=view.accumulation,
        recompute=bool((recipe.get("recompute_config") or {}).get("recompute")),
    )  # fmt: skip
    return (on & ADAPTERS.keys()) | kinds_of(layout)


_MARKS = {EQUAL: "=", TRAINS: "t", COMPILED: "c", REFUSED: "x", UNSHOWN: "."}
_INTRO = """# Which plugins go together

This page says for every plugin whether it can be combined with every other plugin, and with every kind of parallelism.
`python -m tools.accuracy.together` writes the page `docs/together.md`. A test makes sure that `tc3 check` refuses each
pair of plugins that this page calls refused, for the reason that this page gives, and accepts every other pair.

| sign | meaning |
|---|---|
| = | equal: executed on CPU processes and compared with one process (`tc3 accuracy equivalence`) |
| t | trains: a recipe with both was trained on CPU (its card says by which command) |
| c | compiled: a recipe with both was compiled for a virtual cluster by `tc3 dryrun` |
| . | accepted by `tc3 check`; no run or compile had both |
| x | refused, for the reason below |
"""


def page(found: list[Cell]) -> str:
    """Return the text of docs/together.md for these results."""
    known = {frozenset((each.one, each.other)): each for each in found}
    parts = [_INTRO]
    for title, others in (("Plugins with plugins", list(PLUGINS)), ("Plugins with kinds of parallelism", list(KINDS))):
        numbers = {name: str(number) for number, name in enumerate(others, 1)}
        named = ", ".join(f"{number} {name}" for name, number in numbers.items())
        parts.append(f"## {title}\n\nThe columns of the next table stand for {named}.\n")
        rows = []
        for name in PLUGINS:
            signs = [_MARKS[known[pair].how] if (pair := frozenset((name, other))) in known else "" for other in others]
            rows.append([f"`{name}`", *signs])
        parts.append(_table(["", *numbers.values()], rows))
    refused = [(f"`{each.one}`", each.other, each.by) for each in found if each.how == REFUSED]
    parts.append("## Refused\n\n" + _table(("plugin", "with", "reason"), refused))
    seen = [
        (f"`{each.one}`", each.other, each.how, f"`{each.by}`") for each in found if each.how not in (REFUSED, UNSHOWN)
    ]
    parts.append("## Shown by\n\n" + _table(("plugin", "with", "how", "shown by"), seen))
    return "\n".join(parts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    write_atomically(PAGE, page(cells()))
