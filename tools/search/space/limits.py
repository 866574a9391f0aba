"""User limits on the space: `tp<=8`, `pp=8,16`, `ep%8=0`, `mode!=global`, `recompute=full,none`.

limit  = name operator value
name   = dp | tp | pp | vpp | cp | ep | mbs | m | mode | shard | recompute
"="    one of the values after it, "!=" none of them; "<", "<=", ">", ">=" a number; "%N=" the remainder by N
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from plugins.hierarchical_ep.plan import MODES

SHARDS = ("none", "optimizer", "gradients")  # of the data-parallel copies: nothing, ZeRO-1, accumulated gradients, too
POLICIES = ("none", "select", "communication", "full")  # the same for all layers
PLANNED = "planned"  # by layer, chosen by the pipeline optimiser
NUMBERS = ("dp", "tp", "pp", "vpp", "cp", "ep", "mbs", "m")
WORDS = {"mode": MODES, "shard": SHARDS, "recompute": (*POLICIES, PLANNED)}

_LARGEST = 1_000_000_000
_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_FORM = re.compile(r"\s*([a-z]+)\s*(<=|>=|!=|<|>|=|%\s*(\d+)\s*=)\s*([\w,\s]+?)\s*")


@dataclass(frozen=True)
class Limit:
    """One limit, as the user wrote it and taken apart.

    Args:
        name: what it limits; sign: "=", "!=", "<", "<=", ">", ">=" or "%".
        values: numbers, or for words their indices in `WORDS`.
        modulus: of "%".
    """

    text: str
    name: str
    sign: str
    values: tuple[int, ...]
    modulus: int = 1

    def keeps(self, numbers: Any) -> np.ndarray:
        """Which of the numbers (or indices of words) pass."""
        numbers = np.asarray(numbers)
        if self.sign == "%":
            return numbers % self.modulus == self.values[0]
        if self.sign in _ORDER:
            return np.asarray(_ORDER[self.sign](numbers, self.values[0]))
        among = np.isin(numbers, self.values)
        return among if self.sign == "=" else ~among


def read_limit(text: str) -> Limit:
    """Take a limit apart.

    Raises:
        RecipeError: it is none; says what one looks like.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise RecipeError(f"--limit {text!r}: want a name, a sign and a value, such as tp<=8, pp=8,16 or ep%8=0")
    name, sign, modulus, written = match.groups()
    if name not in (*NUMBERS, *WORDS):
        known = [*NUMBERS, *WORDS]
        raise RecipeError(
            f"--limit {text!r}: no {name!r} here{did_you_mean(name, known)}; known are {', '.join(known)}"
        )
    words = [word.strip() for word in written.split(",")]
    if modulus is not None:
        sign = "%"
    if name in WORDS:
        values = _words(text, name, sign, words)
    elif modulus is not None and not 0 < int(modulus) <= _LARGEST:
        raise RecipeError(f"--limit {text!r}: remainders by {modulus[:20]} are none; by 1 to {_LARGEST:,}")
    elif all(word.isdecimal() and int(word[:20]) <= _LARGEST for word in words):
        values = tuple(int(word) for word in words)
    else:
        raise RecipeError(f"--limit {text!r}: {name} is a number, at most {_LARGEST:,}")
    if sign not in ("=", "!=") and len(values) > 1:
        raise RecipeError(f"--limit {text!r}: {sign} takes one number")
    if modulus is not None and not 0 <= values[0] < int(modulus):
        raise RecipeError(f"--limit {text!r}: remainders by {modulus} are 0 to {int(modulus) - 1}")
    return Limit(text, name, sign, values, int(modulus or 1))


def _words(text: str, name: str, sign: str, words: Sequence[str]) -> tuple[int, ...]:
    known = WORDS[name]
    if sign not in ("=", "!="):
        raise RecipeError(f"--limit {text!r}: {name} takes = or !=")
    for word in words:
        if word not in known:
            hint = did_you_mean(word, list(known))
            raise RecipeError(f"--limit {text!r}: {name} is one of {', '.join(known)}, not {word!r}{hint}")
    return tuple(known.index(word) for word in words)
