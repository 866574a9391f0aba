"""What `npu-smi` prints, read leniently: columns and words differ between generations of the driver.

Read so far: tables of drivers 22.0 to 26.0 (910A and Atlas A2, one chip a card; Atlas A3, two), and the layout of
Ascend 950, whose columns are others (tests/tools/host/outputs/SOURCES.md). A table that is not understood is None or
empty, and whoever asks says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BUS = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")
_VERSION = re.compile(r"npu-smi\s+(?:v|V)?(\d\S*)")
_TOPOLOGY = re.compile(r"^\s*NPU(\d+)\s(.*)$", re.MULTILINE)
_CORES = re.compile(r"\d+-\d+(?:,\d+(?:-\d+)?)*")


@dataclass(frozen=True)
class Chip:
    """One device of `npu-smi info`: number for programs, card, name, health in npu-smi's word, PCI address or ""."""

    device: int
    card: int
    name: str
    health: str
    bus: str


def chips(text: str) -> list[Chip]:
    """The devices of `npu-smi info`, numbered from 0 in its order; `Phy-ID` where it prints one.

    Each takes two rows: card, name and health; then chip, `Phy-ID` and PCI address.
    """
    found: list[Chip] = []
    first: tuple[int, str, str] | None = None
    for cells in _table(text, "Health"):
        if first is None:
            first = _first_row(cells)
        else:
            bus = _BUS.search(" ".join(cells))
            chip = cells[0].split()
            number = int(chip[1]) if len(chip) > 1 and chip[1].isdigit() else len(found)
            found.append(Chip(number, *first, bus[0].lower() if bus else ""))
            first = None
    return found


def _first_row(cells: list[str]) -> tuple[int, str, str] | None:
    """(card, name, health): the first two share a column, except on Ascend 950; None for what is no such row."""
    words = cells[0].split()
    card, name, health = (words + cells[1:] + ["", "", ""])[:3]
    return (int(card), name, health) if card.isdigit() and name and health.isalpha() else None


def processes(text: str) -> list[tuple[int, int, str]] | None:
    """(card, process id, name) of each row of the table of processes; None where it is not there or not understood."""
    rows = list(_table(text, "Process id"))
    found = []
    for cells in rows:
        card = cells[0].split()
        if len(cells) > 2 and card and all(word.isdigit() for word in card) and cells[1].isdigit():
            found.append((int(card[0]), int(cells[1]), cells[2]))
        elif not cells[0].startswith("No running processes"):
            return None
    return found if rows else None


def _table(text: str, column: str) -> Iterator[list[str]]:
    """The rows, by cells, of the table that has a column of this name; rows of a title and lines are left out."""
    inside = False
    for line in text.splitlines():
        if "|" not in line:
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if any(cell.startswith(("NPU ", "Chip", "Bus-Id")) for cell in cells):
            inside = column in cells or (inside and not cells[0].startswith("NPU "))
        elif inside:
            yield cells


def version(text: str) -> str | None:
    """Of the driver's tools: the first line of `npu-smi info`."""
    found = _VERSION.search(text)
    return found[1] if found else None


def core_lists(text: str) -> dict[int, str]:
    """Device -> its column `CPU Affinity` in `npu-smi info -t topo`; nothing where a driver has no such column."""
    found = {}
    for row in _TOPOLOGY.finditer(text):
        words = row[2].split()
        if words and _CORES.fullmatch(words[-1]):
            found[int(row[1])] = words[-1]
    return found
