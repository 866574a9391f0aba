"""This module lists the weights of a checkpoint in groups whose names differ only in numbers, and finds damaged
weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from plugins.errors import CheckpointError, not_json
from plugins.sealed_checkpoint.plan import checksum
from tools.checkpoint.stored import KINDS, PLACEMENT, Kind, kind_of
from tools.hardware.units import GIB, MIB
from tools.process.host import compress
from tools.weights.source import CHECKSUMS, Source

SALVAGED = "salvaged.json"  # beside weights that were written from damaged ones: what was wrong with those
SALVAGED_LINE = "SALVAGED from damaged weights: {}"

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Values:
    """A `Values` holds the results of reading all elements of a group of tensors: their norm, the values that are not
    finite, and the copies that differ between ranks.

    Args:
        norm: the L2 norm of all elements, in float64.
        not_finite: the number of elements that are NaN or infinite.
        where: the name of the first tensor with such an element.
        differing: for each tensor the ranks whose copy differs from that of the first rank.
    """

    norm: float
    not_finite: int
    where: str | None
    differing: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Group:
    """A `Group` holds tensors of one kind, type and shape whose names differ only in numbers, such as the layer's
    number.

    Args:
        pattern: the name of the tensors, with `*` in place of each number.
        numbers: the numbers in the names, such as "0-44" for layers.
        cuts: the number of parts into which each axis is cut; empty if the checkpoint does not say this.
    """

    kind: Kind
    pattern: str
    numbers: str
    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[int, ...]
    names: tuple[str, ...]
    bytes: int
    values: Values | None = None

    @property
    def elements(self) -> int:
        """Return the number of elements in all tensors of the group."""
        return math.prod(self.shape) * len(self.names)


def inventory(source: Source, values: bool = False, progress: Callable[[str], None] = lambda name: None) -> list[Group]:
    """Return the tensors of `source` in groups: first the groups of weights, then the groups of the optimizer's state,
    then all other groups. Within each kind, the groups are in the order of the files.

    Args:
        values: whether all tensors are read, one at a time, to compute norms and to find values that are not finite.
        progress: a function that is called with the name of each tensor that is read.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for name, header in source.headers.items():
        key = (kind_of(name), _NUMBER.sub("*", name), header.dtype, str(header.shape))
        found.setdefault(key, []).append(name)
    groups = [_group(source, names, values, progress) for names in found.values()]
    return sorted(groups, key=lambda group: KINDS.index(group.kind))


def _group(source: Source, names: list[str], values: bool, progress: Callable[[str], None]) -> Group:
    header, tensor = source.headers[names[0]], source.stored.tensors.get(names[0])
    return Group(
        kind=kind_of(names[0]),
        pattern=_NUMBER.sub("*", names[0]),
        numbers=", ".join(
            compress({*map(int, column)}).replace(",", ", ")
            for column in zip(*map(_NUMBER.findall, names), strict=True)
        ),
        dtype=header.dtype,
        shape=header.shape,
        cuts=tensor.cuts if tensor else (),
        names=tuple(names),
        bytes=sum(source.headers[name].bytes for name in names),
        values=_values(source, names, progress) if values else None,
    )


def _values(source: Source, names: list[str], progress: Callable[[str], None]) -> Values:
    squares, not_finite, where, differing = 0.0, 0, None, {}
    for name in names:
        progress(name)
        array, ranks = source.read(name)
        wide = array.astype(np.float64)
        wrong = int(np.count_nonzero(~np.isfinite(wide)))
        where = where or (name if wrong else None)
        not_finite += wrong
        squares += float(np.square(wide[np.isfinite(wide)]).sum())
        if ranks:
            differing[name] = ranks
    return Values(math.sqrt(squares), not_finite, where, differing)


def salvaged(
    sources: Sequence[Source], allowed: bool, progress: Callable[[str], None] = lambda name: None
) -> list[str]:
    """Return a line of text for each kind of damage in weights that are about to be rewritten. The function reads every
    file completely.

    Args:
        allowed: whether damaged tensors are accepted (`--salvage`).
        progress: a function that is called with the name of each tensor that is read.

    Raises:
        CheckpointError: a tensor is damaged, and damaged tensors are not accepted.
    """
    found = [f"{source.path}: {line}" for source in sources for line in damage(source, progress)]
    if found and not allowed:
        more = f" (further findings of damage: {len(found) - 1})" if len(found) > 1 else ""
        raise CheckpointError(
            f"{found[0]}{more}; nothing was written, because new checksums would hide the damage. --salvage copies the "
            f"damaged values unchanged and records the damage in the result ({SALVAGED})"
        )
    return found


def damage(source: Source, progress: Callable[[str], None] = lambda name: None) -> list[str]:
    """Return a line of text for each kind of damage in `source`: elements of weights that differ from the saved
    elements, or that are not finite.
    """
    found = faults(source, checksums=True)
    if (source.stored.folder / SALVAGED).exists():
        found.append(f"{SALVAGED} says that it was written from damaged weights")
    every = [(file, name) for file, headers in source.stored.files.items() for name in headers]
    wrong = [place for place in every if not _finite(source, *place, progress)]
    if wrong:
        more = f" and {len(wrong) - 1} other tensors have" if len(wrong) > 1 else " has"
        found.append(f"{wrong[0][1]} in {wrong[0][0]}{more} values that are not finite")
    return found


def faults(source: Source, checksums: bool) -> list[str]:
    """Return a sentence for each file of `source` that differs from the recorded sizes and checksums. Sizes and
    checksums are recorded in seals (files beside the weights) or, after `tc3 weights convert`, in checksums.json.

    Args:
        checksums: whether every file is read to compare checksums; otherwise only the sizes are compared, which only
            seals record.
    """
    reason = source.seal_fault(checksums)
    return [*filter(None, [reason]), *(_corrupted(source) if checksums else ())]


def _corrupted(source: Source) -> list[str]:
    """Return a sentence for each file of a Hugging Face folder that is not what `tc3 weights convert` wrote, or if its
    checksums cannot be read.
    """
    try:
        content = json.loads((source.stored.folder / CHECKSUMS).read_text("utf-8"))
    except OSError as error:
        return [] if isinstance(error, FileNotFoundError) else [f"{CHECKSUMS} cannot be read ({error.strerror})"]
    except (ValueError, RecursionError) as error:  # as of a folder that was copied in part
        return [f"{CHECKSUMS} {not_json(error)}, so that nothing shows whether the files are whole"]
    known = content.get("files") if isinstance(content, dict) else None
    if not isinstance(known, dict):
        return []  # another program's
    files = {file: source.stored.folder / file for file in source.stored.files if file in known}
    return [
        f"{file} does not match its checksum: corrupted"
        for file, path in files.items()
        if checksum(path) != known[file]
    ]


def _finite(source: Source, file: str, name: str, progress: Callable[[str], None]) -> bool:
    progress(name)
    array = source.stored.read_from(file, name)
    if array.dtype.kind in "iub":
        return True
    return bool(np.isfinite(array.astype(np.float64 if array.dtype.itemsize > 4 else np.float32)).all())


def mark(folder: Path, damaged: Sequence[str]) -> None:
    """Write a file into `folder` that lists the damaged tensors from which the weights in the folder were made; write
    no file if no tensor was damaged.
    """
    if damaged:
        (folder / SALVAGED).write_text(json.dumps({"damaged": list(damaged)}, indent=1) + "\n", "utf-8")


# What sets two sets of weights apart, tensor by tensor, whatever the layouts that they were saved in.


@dataclass(frozen=True)
class Change:
    """A `Change` describes a tensor whose elements differ between two compared checkpoints.

    Args:
        relative: the L2 norm of the difference divided by the L2 norm of A's tensor; inf if A's tensor is zero.
        largest: the largest absolute difference of two elements. `relative` and `largest` are nan if an element of A or
            B is not finite.
    """

    name: str
    relative: float
    largest: float


@dataclass(frozen=True)
class Comparison:
    """A `Comparison` holds the differences between the tensors of two checkpoints A and B.

    Args:
        only: the names of the tensors that only A has, and the names of the tensors that only B has.
        other: (name, type and shape in A, type and shape in B) for tensors whose type or shape differs.
        same: the names of the tensors whose bits are equal.
        changes: all other tensors, the largest relative difference first.
        differing: ("A" or "B", the name of a tensor, the ranks whose copy in this checkpoint differs from that of the
            first rank). Only the copies of the first ranks were compared between A and B.
        hint: why no tensor could be compared, and what to do first; "" where nothing of the kind is known.
    """

    only: tuple[tuple[str, ...], tuple[str, ...]]
    other: tuple[tuple[str, str, str], ...]
    same: tuple[str, ...]
    changes: tuple[Change, ...]
    differing: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    hint: str = ""

    @property
    def equal(self) -> bool:
        """Return whether both checkpoints hold the same tensors with the same bits, on all ranks."""
        return not (any(self.only) or self.other or self.changes or self.differing)


def compare(a: Source, b: Source, progress: Callable[[str], None] = lambda name: None) -> Comparison:
    """Compare the weights of two checkpoints tensor by tensor. Experts that plugins.expert_balance has moved are
    compared in their logical order.

    Args:
        progress: a function that is called with the name of each tensor that is read.
    """
    left, right = _compared_names(a), _compared_names(b)
    other: list[tuple[str, str, str]] = []
    same, changes, differing = [], [], []
    for name in (name for name in left if name in right):
        if (kind := _kind(a, name)) != _kind(b, name):
            other.append((name, kind, _kind(b, name)))
            continue
        progress(name)
        (first, apart), (second, there) = a.read(name), b.read(name)
        differing += [(side, name, ranks) for side, ranks in (("A", apart), ("B", there)) if ranks]
        if first.tobytes() == second.tobytes():
            same.append(name)
        else:
            changes.append(_change(name, first, second))
    changes.sort(key=lambda change: -change.relative if change.relative == change.relative else -math.inf)
    only = (tuple(name for name in left if name not in right), tuple(name for name in right if name not in left))
    hint = "" if {*left} & {*right} else _of_other_names(a, b)
    return Comparison(only, tuple(other), tuple(same), tuple(changes), tuple(differing), hint)


def _of_other_names(a: Source, b: Source) -> str:
    """Return a sentence about two checkpoints of which one has the names of Hugging Face and one has MindFormers'."""
    if {a.form, b.form} != {"Hugging Face", "MindFormers"}:
        return ""
    return (
        f"A has tensors with the names of {a.form}, B with those of {b.form}, so that none could be compared: convert "
        "one of them first with tc3 weights convert"
    )


def _compared_names(source: Source) -> list[str]:
    """Return all tensors but the placements of experts, which say how the others lie."""
    return [name for name in source.headers if name.rsplit(".", 1)[-1] != PLACEMENT]


def _kind(source: Source, name: str) -> str:
    header = source.headers[name]
    return f"{header.dtype} {list(header.shape)}"


def _change(name: str, a: np.ndarray, b: np.ndarray) -> Change:
    wide = a.astype(np.float64)
    difference = b.astype(np.float64) - wide
    norm = float(np.linalg.norm(wide))
    relative = float(np.linalg.norm(difference)) / norm if norm else math.inf
    return Change(name, relative, float(np.abs(difference).max()))


# Inventories and comparisons of weights as text.

_SHOWN = 20  # tensors that differ; --json has them all
_TITLES = {"weights": "weights", "optimizer": "optimizer's state", "other": "counters and balance"}


def summary_lines(source: Source, groups: list[Group], fault: str | None, values: bool) -> Iterator[str]:
    """Yield lines of text with a summary of all weights of a checkpoint."""
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
        yield "  seals: none, so it is unknown whether the checkpoint is complete"
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
    """Return a table with a row for each group of tensors. The optimizer's state has the same groups as the weights, so
    it has rows only if the values of tensors were read.
    """
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
    """Yield a line of text for each difference between two checkpoints, or one line that says that the checkpoints are
    equal.
    """
    yield f"A {a}"
    yield f"B {b}"
    if comparison.equal:
        yield f"equal, bit by bit: {len(comparison.same):,} tensors"
        return
    if comparison.hint:
        yield comparison.hint
    for side, names in zip("AB", comparison.only, strict=True):
        if names:
            yield f"only in {side}: {len(names):,}, such as {names[0]}"
    for name, first, second in comparison.other[:_SHOWN]:
        yield f"{name}: {first} in A, {second} in B"
    for side, name, ranks in comparison.differing[:_SHOWN]:
        yield f"copies differ in {side}: {name} on ranks {', '.join(map(str, ranks))}"
    yield f"equal bit by bit: {len(comparison.same):,}; different: {len(comparison.changes):,}"
    for change in comparison.changes[:_SHOWN]:
        yield f"  {change.name}: |B - A| / |A| = {change.relative:.3g}, at most {change.largest:.3g}"
    if len(comparison.changes) > _SHOWN:
        yield f"  and {len(comparison.changes) - _SHOWN:,} more (--json has them)"
