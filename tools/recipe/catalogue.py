"""This module writes the catalogue of recipes. For each folder of recipes, the module writes one table into
recipes/README.md, from the folder's `card.yaml` and its recipes.

    python -m tools.recipe.catalogue          # writes recipes/README.md; --check only says whether it is current

A card (the file `card.yaml`) says what was verified for the recipes in its folder, and what each recipe assumes. Its
key `host_measures` says which of the host optimisations of section 6 of the technical report a launch of this
repository applies, and which of them `tc3 doctor` checks; docs/doctor.md shows the same facts as a table.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from plugins.errors import RecipeError, TC3Error, did_you_mean, refuse_unknown

ROLES = ("applied", "checked")  # by each launch; by `tc3 doctor` only, and the administrator mends it


@dataclass(frozen=True)
class Measure:
    """A `Measure` is one optimisation of the host from section 6 of the TeleChat3-MoE report. A `Measure` holds the
    gain that the report states, how this repository applies the optimisation, and which checks cover it.

    The gains are quoted from the report; they were not measured with this repository.
    """

    gain: str
    role: str
    checks: tuple[str, ...]


_ISOLATION = "10-15 % in large configurations, 1-2 % in small ones, up to 38 % less variance; both together"
MEASURES = {
    "core_binding": Measure(_ISOLATION, "applied", ("binding", "cores")),
    "isolation": Measure(_ISOLATION, "checked", ("irqbalance", "interrupts", "isolated")),
    "idle_threshold": Measure("25-30 %", "checked", ("npu_clock",)),
    "iommu_passthrough": Measure("3-5 %", "checked", ("iommu",)),
}


CARD = "card.yaml"
KINDS = ("full", "mini", "modelled")
# a trailing dash wants a number
CLAIMS = ("trained-on-cpu-mini", "compiled-virtual-", "proven-virtual-", "modelled", "assumed")
_MEASURED = re.compile(r"measured-[A-Za-z0-9._]+-[1-9]\d*")  # tc3 firsthour card writes it
_CARD_KEYS = {"model", "name_billion", "kind", "summary", "recipes", "assumed", "sources"}
_ENTRY_KEYS = {"stage", "devices", "layout", "global_batch_size", "status"}
_OPTIONAL = {
    "card": {"parameters", "why", "conflicts", "host_measures"},
    "entry": {"kind", "why", "assumed", "parameters"},
}
_CONFLICT_KEYS = {"key", "recipe", "ours", "ours_at", "other", "other_at", "why"}


@dataclass(frozen=True)
class Entry:
    """An `Entry` describes one recipe of a folder: its training stage, its parallel layout in words, and how it was
    verified.
    """

    file: Path
    stage: str
    devices: int
    layout: str
    global_batch_size: int
    kind: str
    status: list[dict[str, str]]
    assumed: dict[str, str] = field(default_factory=dict)  # key path -> reasoning
    why: str = ""  # a modelled recipe says why it cannot train
    parameters: int = 0  # the card's unless the recipe leaves a part of the model away


@dataclass(frozen=True)
class Conflict:
    """A `Conflict` is a value on which public sources disagree, with the reason for the recipe's choice."""

    key: str  # key path in the recipe, or global_batch_size
    recipe: str  # file beside the card
    ours: Any
    ours_at: str
    other: Any
    other_at: str
    why: str
    child: str = ""  # the recipe beside the card that has the other value


@dataclass(frozen=True)
class Card:
    """A `Card` describes the recipes of a folder. The field `parameters` is 0 if the model's name states no size."""

    file: Path
    entries: list[Entry]
    model: str
    name_billion: float
    kind: str
    summary: str
    assumed: dict[str, str]  # of every recipe in the folder
    sources: list[dict[str, str]]
    parameters: int = 0
    why: str = ""
    conflicts: list[Conflict] = field(default_factory=list)
    host_measures: dict[str, str] = field(default_factory=dict)  # of section 6: applied or checked; none: not launched


def load_cards(recipes: Path) -> list[Card]:
    """Return the cards (`card.yaml`) below the folder `recipes`. The cards of TeleChat3-MoE come first, and model
    families that are only modelled come last. Within a family of models, the cards of small models come first.

    Raises:
        RecipeError: a card lacks a key, has an unknown key, or makes a claim that no card may make.
    """
    cards = [load_card(path) for path in sorted(recipes.glob(f"*/{CARD}"))]
    cards.sort(key=lambda card: card.name_billion)

    def order(card: Card) -> tuple[bool, bool, str]:
        return card.kind != "modelled", card.model.startswith("TeleChat"), card.model.split()[0]

    return sorted(cards, key=order, reverse=True)


def why_modelled(files: Iterable[str]) -> str:
    """Return the reason why a recipe is only for predictions and should not be trained; return "" if no `card.yaml`
    says so. The cards of all `files` are read, because the card of a base recipe also applies to its child recipes.
    """
    for path in sorted(map(Path, files)):
        try:
            card = load_card(path.parent / CARD)
        except (OSError, RecipeError):
            continue  # no card, or a file of that name that means something else
        for entry in card.entries:
            if entry.file.name == path.name and entry.kind == "modelled":
                return entry.why
    return ""


@functools.lru_cache(maxsize=32)  # every check of a recipe asks the cards of all its files
def _content(text: str) -> Any:
    """Return what a card says, which nobody changes; libyaml reads it ten times as fast as Python."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def load_card(path: Path) -> Card:
    """Return the content of a `card.yaml`. If a key is wrong, the function raises a RecipeError that names the file and
    the key. If the file does not exist, the function raises an OSError.
    """
    try:
        raw = _content(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: {error}") from None
    _check_keys(path, "", raw, _CARD_KEYS, _OPTIONAL["card"])
    _check_mapping(path, "recipes", raw["recipes"])
    _check_choice(path, "kind", raw["kind"])
    entries = [_entry(path, name, body, raw) for name, body in raw["recipes"].items()]
    checked: dict[str, Any] = {
        "conflicts": [
            _conflict(path, number, body)
            for number, body in enumerate(_list(path, "conflicts", raw.get("conflicts") or []))
        ],
        "host_measures": raw.get("host_measures") or {},
    }
    _check_keys(path, "host_measures", checked["host_measures"], set(), set(MEASURES))
    for name, role in checked["host_measures"].items():
        _check_choice(path, f"host_measures.{name}", role, ROLES)
    given = {key: value for key, value in raw.items() if key != "recipes"}
    return Card(path, entries, **given | checked)


def _entry(path: Path, name: str, body: dict[str, Any], card: dict[str, Any]) -> Entry:
    where = f"recipes.{name}"
    _check_keys(path, where, body, _ENTRY_KEYS, _OPTIONAL["entry"])
    _check_choice(path, f"{where}.kind", body.get("kind", card["kind"]))
    for number, status in enumerate(_list(path, f"{where}.status", body["status"])):
        _check_keys(path, f"{where}.status[{number}]", status, {"claim", "how", "what"}, set())
        _check_claim(path, f"{where}.status[{number}].claim", status["claim"])
    if not (path.parent / name).is_file():
        raise RecipeError(f"{path}: {where}: the recipe does not exist in the card's folder")
    of_card: dict[str, Any] = {key: card[key] for key in ("kind", "why", "parameters") if key in card}
    return Entry(path.parent / name, **{**of_card, **body, "assumed": body.get("assumed") or {}})


def _conflict(path: Path, number: int, body: dict[str, Any]) -> Conflict:
    where = f"conflicts[{number}]"
    _check_keys(path, where, body, _CONFLICT_KEYS, {"child"})
    for name in (body["recipe"], *([body["child"]] if "child" in body else [])):
        if not (path.parent / name).is_file():
            raise RecipeError(f"{path}: {where}: {name} does not exist in the card's folder")
    return Conflict(**body)


def _check_mapping(path: Path, where: str, raw: Any) -> None:
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: {where or 'the card'}: {raw!r} is not a mapping of keys to values")


def _list(path: Path, where: str, raw: Any) -> list[Any]:
    if not isinstance(raw, list):
        raise RecipeError(f"{path}: {where}: {raw!r} is not a list")
    return raw


def _check_keys(path: Path, where: str, raw: Any, wanted: set[str], optional: set[str]) -> None:
    _check_mapping(path, where, raw)
    prefix = f"{where}." if where else ""
    refuse_unknown(f"{path}: {prefix}", raw, sorted(wanted | optional))
    for key in sorted(wanted - set(raw)):
        raise RecipeError(f"{path}: {prefix}{key}: the key is missing")


def _check_choice(path: Path, where: str, value: str, choices: tuple[str, ...] = KINDS) -> None:
    if value not in choices:
        hint = did_you_mean(value, list(choices))
        raise RecipeError(f"{path}: {where}: {value!r} is not a valid value; write one of {', '.join(choices)}{hint}")


def _check_claim(path: Path, where: str, claim: Any) -> None:
    for known in CLAIMS if isinstance(claim, str) else ():
        numbered = known.endswith("-")
        if claim.startswith(known) and (claim[len(known) :].isdigit() if numbered else claim == known):
            return
    if isinstance(claim, str) and _MEASURED.fullmatch(claim):
        return
    raise RecipeError(
        f"{path}: {where}: {claim!r} is not a claim that a card can make; write trained-on-cpu-mini, "
        "compiled-virtual-<devices>, proven-virtual-<devices>, measured-<device>-<devices>, modelled or assumed"
    )  # fmt: skip


HEAD = """\
# Recipes

Written by `python -m tools.recipe.catalogue` from the `card.yaml` of each folder; a test fails when it is stale.

A recipe is a native MindFormers YAML: `base_config:` pulls shared sections from `base/`, and every file loads in
stock MindFormers. Layouts read data x tensor x context x pipeline (x interleaved) parallel, and the expert-parallel
degree inside them. The card of a folder names the sources, lists under `assumed` what no public source states, with
the reasoning, and under `conflicts` what two sources state differently: both values, and why the recipe has its own.
Under `host_measures` stands which measures of the report's section 6 a launch applies, and which `tc3 doctor` only
checks; what they gained there, and who acts, is in [doctor.md](../docs/doctor.md#section-6-of-the-report).

What a status says: **trained-on-cpu-mini** was trained on CPU by the command given, at toy size where that has
`--mini`; **compiled-virtual-N** compiled for N virtual devices; **proven-virtual-N** by the types of the compiled
graphs, each gradient is summed once over the right ranks of N virtual devices, except for what the claim calls trusted
([prove.md](../docs/prove.md)); **measured-DEVICE-N** was measured on N such devices by
`tc3 firsthour`; **modelled** serves search and comparison only,
MindFormers cannot run it as published; **assumed** has not been compiled or run in this form.
"""
COLUMNS = ("Recipe", "Stage", "Devices", "Layout", "Global batch", "Status")


def catalogue(recipes: Path) -> str:
    """Return the text of recipes/README.md for the cards below the folder `recipes`."""
    cards = load_cards(recipes)
    return "\n".join([HEAD, *(_section(card) for card in cards)])


def _section(card: Card) -> str:
    """Return one model: heading, size, table of its recipes, and why it cannot run, where it cannot."""
    folder = card.file.parent.name
    size = f"{card.parameters / 1e9:,.1f} B parameters. " if card.parameters else ""
    lines = [
        f"## {card.model}",
        "",
        f"{size}{card.summary[:1].upper()}{card.summary[1:]}. Card: [{folder}]({folder}/card.yaml).",
        "",
    ]
    lines += [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(_cells(folder, entry)) for entry in card.entries)]
    reasons = dict.fromkeys(entry.why for entry in card.entries if entry.why)
    for reason in reasons:
        lines += ["", f"Modelled because {reason}."]
    return "\n".join([*lines, ""])


def _cells(folder: str, entry: Entry) -> list[str]:
    status = "; ".join(f"{item['claim']} ({item['how']})" for item in entry.status)
    name = f"[{entry.file.name}]({folder}/{entry.file.name})"
    return [name, entry.stage, f"{entry.devices:,}", entry.layout, f"{entry.global_batch_size:,}", status]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing, and exit with code 1 if recipes/README.md is out of date.")
def main(check: bool) -> None:
    """Write recipes/README.md from the `card.yaml` files of all folders of recipes."""
    target = RECIPES / "README.md"
    try:
        text = catalogue(RECIPES)
    except TC3Error as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    stale = not target.is_file() or target.read_text(encoding="utf-8") != text
    if check:
        stale_text = "recipes/README.md is stale: python -m tools.recipe.catalogue"
        click.echo(stale_text if stale else "recipes/README.md is current")
        sys.exit(int(stale))
    if stale:
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
