"""Inventories and comparisons of weights as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from tools.checkpoint.names import KINDS
from tools.hardware.units import GIB, MIB
from tools.weights.compare import Comparison
from tools.weights.inventory import SALVAGED, Group
from tools.weights.source import Source

_SHOWN = 20  # tensors that differ; --json has them all
_TITLES = {"weights": "weights", "optimizer": "optimizer's state", "other": "counters and balance"}


def summary_lines(source: Source, groups: list[Group], fault: str | None, values: bool) -> Iterator[str]:
    """What holds for the whole of it."""
    step = "step unknown" if source.step is None else f"step {source.step:,}"
    yield f"{source.path}: {source.form}, {step}, files of {source.ranks} rank{'s' * (source.ranks > 1)}"
    for kind in KINDS:
        own = [group for group in groups if group.kind == kind]
        if own:
            size = sum(group.bytes for group in own)
            words = f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / MIB:,.2f} MiB"
            yield f"  {_TITLES[kind]}: {sum(group.elements for group in own):,} numbers, {words}"
    if fault:
        yield f"  seals: {fault}"
    elif source.sealed:
        yield "  seals: every rank's; " + ("checksums match" if values else "sizes match (--values compares checksums)")
    else:
        yield "  seals: none, so that nobody can tell whether it is whole"
    if (source.stored.folder / SALVAGED).exists():
        yield f"  salvaged: written from damaged weights, see {SALVAGED}"
    if source.placements:
        yield f"  experts of {len(source.placements)} layers have moved: rows are in the order of slots"
    for group in groups:
        if group.values and group.values.not_finite:
            yield f"  not finite: {group.values.not_finite:,} numbers of {group.pattern}, first in {group.values.where}"
        for name, ranks in group.values.differing.items() if group.values else ():
            yield f"  copies differ: {name} on ranks {', '.join(map(str, ranks))}"


def inventory_table(groups: list[Group]) -> Table:
    """A row for each group; the optimizer's, which are as the weights, where their values were read."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for title in ("numbers", "type", "shape", "cut", "elements"):
        table.add_column(title, justify="right", no_wrap=title in ("type", "elements"))
    read = any(group.values for group in groups)
    if read:
        table.add_column("L2 norm", justify="right")
    for group in (group for group in groups if read or group.kind != "optimizer"):
        cut = " x ".join(map(str, group.cuts)) if any(count > 1 for count in group.cuts) else ""
        shape = " x ".join(map(str, group.shape)) or "scalar"
        norm = [f"{group.values.norm:.6g}"] if group.values else [""] * read
        table.add_row(group.pattern, group.numbers, group.dtype, shape, cut, f"{group.elements:,}", *norm)
    return table


def comparison_lines(comparison: Comparison, a: Path, b: Path) -> Iterator[str]:
    """What sets both apart; `equal` where nothing does."""
    yield f"A {a}"
    yield f"B {b}"
    if comparison.equal:
        yield f"equal, bit by bit: {len(comparison.same):,} tensors"
        return
    for side, names in zip("AB", comparison.only, strict=True):
        if names:
            yield f"only in {side}: {len(names):,}, such as {names[0]}"
    for name, first, second in comparison.other[:_SHOWN]:
        yield f"{name}: {first} in A, {second} in B"
    yield f"equal bit by bit: {len(comparison.same):,}; different: {len(comparison.changes):,}"
    for change in comparison.changes[:_SHOWN]:
        yield f"  {change.name}: |B - A| / |A| = {change.relative:.3g}, at most {change.largest:.3g}"
    if len(comparison.changes) > _SHOWN:
        yield f"  and {len(comparison.changes) - _SHOWN:,} more (--json has them)"
