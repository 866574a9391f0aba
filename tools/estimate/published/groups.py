"""Groups of measured runs: one model on one device. What is cross-validated is left out by whole groups.

A model is its sizes without its depth, so truncated models of one kind are one group, whatever their layout, precision
or release. Leaving out rows instead would leave the same configuration of another release in the fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tools.estimate.published.rows import Row
from tools.model.architecture import Model


class Group(NamedTuple):
    """A model, by its sizes, on a cluster."""

    model: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}"


def sizes(model: Model) -> str:
    """What tells one model from another, but for its depth."""
    attention = f"{model.heads}/{model.kv_heads} heads"
    if not model.experts:
        return f"{model.hidden} wide, {attention}, MLP {model.ffn}, vocabulary {model.vocab}"
    experts = f"{model.experts} experts of {model.expert_ffn}, top {model.top_k}"
    return f"{model.hidden} wide, {attention}, {experts}, vocabulary {model.vocab}"


def group_of(row: Row) -> Group:
    """The group of a row that has a configuration."""
    assert row.config is not None
    return Group(sizes(row.config.model), row.cluster)


def grouped(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Rows by their group, in the order in which groups first occur."""
    found: dict[Group, list[Row]] = {}
    for row in rows:
        found.setdefault(group_of(row), []).append(row)
    return found
