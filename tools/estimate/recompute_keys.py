"""The keys of `recompute_config`, read and written: flags, counts of layers, and either for patterns of operators.

Where activations are swapped, MindFormers wants the numbers of the layers in the place of counts (`layer_numbers`).
"""

from __future__ import annotations

from typing import Any

from tools.estimate.configuration import Configuration, Recompute, Table, spread
from tools.estimate.from_recipe import Reader, of_norms, operators_of, patterns_of, select_of
from tools.estimate.layer_numbers import numbers_of
from tools.estimate.operators import PATTERNS

_SELECT = "select_recompute"
# the operators of a `select_recompute` that saves memory: MindFormers' default leaves the norms out, all that a fused
# SwiGLU has
SELECTED = (r".*\.norm", r"mlp\.mul", r"mlp\.activation_func\.silu", r"mlp\.shared_experts\.activation_func\.silu")


def table_of(key: str, value: Any, layers: Table, read: Reader = spread) -> Table | None:
    """Layers by chunk and stage of what stands at a recompute key; None of none, () where its patterns disagree."""
    if key == _SELECT and select_of(value, layers, read) is None:
        return None
    if isinstance(value, dict):
        tables = {not_empty(read(inner, layers)) for inner in value.values()}
        return tables.pop() if len(tables) == 1 else ()
    return not_empty(read(value, layers))


def swapped_value(key: str, table: Table | None, config: Configuration, now: Any) -> Any:
    """What a recompute key becomes where activations are swapped: numbers of layers, for the patterns `now` there.

    Patterns stand in a mapping: MindFormers refuses a list of them then, and False for one of them.
    """
    layers = config.layers
    value: Any = True if table == layers else numbers_of(table, layers, config.schedule)
    written = with_patterns(key, value, now)
    if isinstance(written, list) and patterns_of(written):
        return dict.fromkeys(written, value)
    return False if written == [] else written


def named_layers(value: Any, layers: Table) -> set[int]:
    """The layers that a key names where activations are swapped."""
    if isinstance(value, dict):
        return set().union(*(named_layers(inner, layers) for inner in value.values()))
    return set(range(sum(map(sum, layers)))) if value is True else set(value or [])


def not_empty(table: Table | None) -> Table | None:
    """The table, None where it names no layer."""
    return table if table and any(map(any, table)) else None


def has_counts(value: Any) -> bool:
    """Whether numbers of layers stand at a recompute key: they are for one number of stages and chunks."""
    if isinstance(value, dict):
        return any(map(has_counts, value.values()))
    return isinstance(value, list) and not patterns_of(value)


def plain_value(table: Table | None, layers: Table) -> Any:
    """A table as a flag, or as numbers of layers in offset's shape."""
    if table == layers:
        return True
    return [list(row) for row in table] if table and len(table) > 1 else list(table[0]) if table else False


def with_patterns(key: str, value: Any, now: Any) -> Any:
    """What a recompute key becomes: a plain value, for the patterns that stand there `now`.

    A `select_recompute` whose patterns, or MindFormers' own, would save nothing gets those that do. Patterns of all
    layers stay, or become, a list where there is no mapping: a child cannot turn a plain value into one.
    """
    patterns = patterns_of(now)
    if key == _SELECT and value and not any(map(of_norms, patterns)):
        patterns += [pattern for pattern in SELECTED if pattern not in patterns]
    if isinstance(now, dict) or (patterns and value and (now is None or value is not True)):
        return dict.fromkeys(patterns, value)
    return patterns if patterns and value else value


def with_groups(recompute: Recompute, layers: Table, now: Any) -> dict[str, Any] | None:
    """What `select_recompute` becomes where groups of operators are named, or stand there `now`; None: nothing changes.

    Every other pattern but those of the norms is switched off, not left out (a child's mapping is merged with its
    base's): MindFormers cannot build an operator that two patterns name.
    """
    select = not_empty(recompute.select)
    same = (not_empty(select_of(now, layers)), operators_of(now, layers)) == (select, recompute.operators)
    known = {*SELECTED, *(one for patterns in PATTERNS.values() for one in patterns)}
    if same and all(one in known or (isinstance(now, dict) and now[one] is False) for one in patterns_of(now)):
        return None
    norms = dict.fromkeys(SELECTED if select else (), plain_value(select, layers))
    tables = dict(recompute.operators)
    groups = {
        one: plain_value(tables.get(name), layers)
        for name, patterns in PATTERNS.items()
        for one in patterns
        if name in tables or one in patterns_of(now)
    }
    return {**dict.fromkeys(patterns_of(now), False), **norms, **groups}


def names_groups(value: Any) -> bool:
    """Whether patterns of groups of operators stand at a recompute key."""
    return any(one in patterns_of(value) for patterns in PATTERNS.values() for one in patterns)


def without_counts(value: Any) -> Any:
    """A key's patterns without their layers, which were counted for other stages."""
    return dict.fromkeys(patterns_of(value), False) if has_counts(value) else value
