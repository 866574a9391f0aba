"""Devices by the words that people and publications use: "Atlas 800T A2", "DGX-H100", "910B"."""

from __future__ import annotations

import re

# words -> name of a hardware file or a cluster; the first that fits
_WORDS = (
    ("A100", "a100_80g"),
    ("96GB HBM2e", "h100_96g"),
    ("H800", "h800"),
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B300", "b300"),
    ("B200", "b200"),
    ("H100", "h100"),
    ("Atlas 900 A2", "atlas_900_a2"),
    ("Atlas 900 A3", "atlas_900_a3"),
    ("910C", "atlas_900_a3"),
    ("Atlas 800T A2", "atlas_800t_a2"),
    ("910B", "atlas_800t_a2"),
)
NAMES = tuple(dict.fromkeys(name for _, name in _WORDS))


def name_of(text: str) -> str:
    """The name that `text` is, or stands for as a whole; `text` itself where it is none.

    Words that stand somewhere in it are not enough: a file that is missing must not pass for a device.
    """
    plain = _plain(text)
    return next((name for words, name in _WORDS if plain in (_plain(words), name)), text)


def device_in(text: str) -> str:
    """The name of the device in a description such as "H100-80GB SXM, 8 a node"; "" where none is known."""
    name = name_of(text)
    if name in NAMES:
        return name
    return next((name for words, name in _WORDS if words.lower() in text.lower()), "")


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
