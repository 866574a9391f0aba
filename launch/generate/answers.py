"""What the worker says before its first logits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """The model is there and compiled."""


@dataclass(frozen=True)
class Refused:
    """It is not, for what the user can mend."""

    reason: str
