"""recipes/README.md, written from the cards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tools.catalogue.cards import Card, Entry, load_cards

HEAD = """\
# Recipes

Written by `python -m tools.catalogue` from the `card.yaml` of each folder; a test fails when it is stale.

A recipe is a native MindFormers YAML: `base_config:` pulls shared sections from `base/`, and every file loads in
stock MindFormers. Layouts read data x tensor x context x pipeline (x interleaved) parallel, and the expert-parallel
degree inside them. The card of a folder names the sources, lists under `assumed` what no public source states, with
the reasoning, and under `conflicts` what two sources state differently: both values, and why the recipe has its own.
Under `host_measures` stands which measures of the report's section 6 a launch applies, and which `tc3 doctor` only
checks; what they gained there, and who acts, is in [doctor.md](../docs/doctor.md#section-6-of-the-report).

What a status says: **trained-on-cpu-mini** was trained on CPU by the command given; **compiled-virtual-N** compiled
for N virtual devices; **modelled** serves search and comparison only, MindFormers cannot run it as published;
**assumed** has not been compiled or run in this form.
"""
COLUMNS = ("Recipe", "Stage", "Devices", "Layout", "Global batch", "Status")


def catalogue(recipes: Path) -> str:
    """The text of recipes/README.md for the cards below `recipes`."""
    cards = load_cards(recipes)
    return "\n".join([HEAD, *(_section(card) for card in cards)])


def _section(card: Card) -> str:
    """One model: heading, size, table of its recipes, and why it cannot run, where it cannot."""
    folder = card.file.parent.name
    lines = [
        f"## {card.model}",
        "",
        f"{_size(card)}{_sentence(card.summary)} Card: [{folder}]({folder}/card.yaml).",
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


def _size(card: Card) -> str:
    return f"{card.parameters / 1e9:,.1f} B parameters. " if card.parameters else ""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
