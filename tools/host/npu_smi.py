"""What `npu-smi` prints, read leniently: columns and words differ between generations of the driver.

Read so far: the tables of drivers 23.0, 24.1 and 25.x (Atlas A2, one chip a card; Atlas A3, two). A row that is not
understood is left out, and whoever counts rows notices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEALTH = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]+)\s*\|", re.MULTILINE)
_CHIP = re.compile(
    r"^\|\s*(\d+)(?:\s+(\d+|NA))?\s*\|\s*([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*\|", re.MULTILINE
)
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(\S*)\s*\|", re.MULTILINE)
_VERSION = re.compile(r"npu-smi\s+(?:v|V)?(\d\S*)")
_TOPOLOGY = re.compile(r"^\s*NPU(\d+)\s(.*)$", re.MULTILINE)
_CORES = re.compile(r"\d+-\d+(?:,\d+(?:-\d+)?)*")


@dataclass(frozen=True)
class Chip:
    """One device of `npu-smi info`: its number for programs, card, name, health in npu-smi's word, PCI address."""

    device: int
    card: int
    name: str
    health: str
    bus: str


def chips(text: str) -> list[Chip]:
    """The devices of `npu-smi info`, numbered from 0 in its order; `Phy-ID` where it prints one."""
    found: list[Chip] = []
    for health, chip in zip(_HEALTH.finditer(text), _CHIP.finditer(text), strict=False):
        number = int(chip[2]) if (chip[2] or "NA") != "NA" else len(found)
        found.append(Chip(number, int(health[1]), health[2], health[3], chip[3].lower()))
    return found


def version(text: str) -> str | None:
    """Of the driver's tools: the first line of `npu-smi info`."""
    found = _VERSION.search(text)
    return found[1] if found else None


def processes(text: str) -> list[tuple[int, int, str]]:
    """(card, process id, name) of each row of the table of processes."""
    return [(int(row[1]), int(row[3]), row[4]) for row in _PROCESS.finditer(text)]


def core_lists(text: str) -> dict[int, str]:
    """Device -> its column `CPU Affinity` in `npu-smi info -t topo`; nothing where a driver has no such column."""
    found = {}
    for row in _TOPOLOGY.finditer(text):
        words = row[2].split()
        if words and _CORES.fullmatch(words[-1]):
            found[int(row[1])] = words[-1]
    return found
