"""Lists of cores as Linux writes them: ``0-3,8``."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 1 << 17  # more than any host has cores, and than there are ports


def expand(text: str) -> list[int]:
    """``"0-3,8"`` -> [0, 1, 2, 3, 8], in the order written.

    Raises:
        ValueError: something else than numbers and ranges, or more of them than any host has.
    """
    cores: list[int] = []
    for part in filter(None, "".join(text.split()).split(",")):
        first, _, last = part.partition("-")
        found = range(int(first), int(last or first) + 1)
        if len(found) + len(cores) > MOST:
            raise ValueError(f"{part}: more than {MOST:,} numbers")
        cores += found
    return cores


def compress(cores: Iterable[int]) -> str:
    """[0, 1, 2, 3, 8] -> ``"0-3,8"``; nothing for no cores."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
