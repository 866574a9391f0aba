"""Compare two dumps: every tensor of both, in the order of execution, judged by Table 2.

msprobe's own `compare` is not used. Its Result lets a bfloat16 cast or a softmax scaled by 1.01 pass, an API that one
side lacks is "pass", and it computes cosines and percentages that Table 2 does not ask for at many times the cost of
reading the data (benchmarks/accuracy_compare.py). The dump's format is all that is msprobe's here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from plugins.errors import DataError
from tools.accuracy.compare.report import Report
from tools.accuracy.compare.rows import Pair, Row, judged, pairs
from tools.accuracy.compare.trained import Trained
from tools.accuracy.compare.updates import judge_updates
from tools.accuracy.dumps.read import Dump
from tools.accuracy.dumps.read_items import Entry

BATCH = 64  # tensors that a thread takes at a time
THREADS = min(8, os.cpu_count() or 1)  # NumPy and the reads let go of the interpreter


def compare_dumps(
    golden: Dump, bench: Dump, promoted: bool = False, progress: Callable[[int, int], object] = lambda done, total: None
) -> Report:
    """All tensors of two dumps.

    Args:
        promoted: the golden side computed in a wider type (report section 3.1 (1)), which is no finding then.
        progress: called with tensors done and in all.

    Raises:
        DataError: the dumps are not of the same kind, one is broken, or neither holds a tensor.
    """
    check_alike(golden, bench)
    found: list[Pair] = []
    entries: list[Entry] = []
    for step in golden.steps:
        for rank in golden.ranks:
            sides = golden.entries(step, rank), bench.entries(step, rank)
            entries += [*sides[0], *sides[1]]
            found += pairs(step, rank, *sides)
    trained = Trained(entries)
    batches = [found[start : start + BATCH] for start in range(0, len(found), BATCH)]
    rows: list[Row | None] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for batch in pool.map(lambda batch: [judged(pair, promoted, trained) for pair in batch], batches):
            rows += batch
            progress(len(rows), len(found))
    rows, updates = judge_updates(found, rows)
    sound = golden.marker is not None and bench.marker is not None
    kept = [row for row in rows if row is not None]
    if not kept:
        raise DataError(f"{golden.folder} and {bench.folder} hold no tensor: nothing to compare")
    return Report(str(golden.folder), str(bench.folder), golden.level, golden.task, sound, kept, updates, trained.known)


def check_alike(golden: Dump, bench: Dump) -> None:
    """Raise DataError when the two cannot be paired."""
    for name, ours, theirs in (("level", golden.level, bench.level), ("task", golden.task, bench.task)):
        if ours != theirs:
            raise DataError(
                f"{golden.folder} is a dump of {name} {ours}, {bench.folder} of {theirs}: "
                f"dump both with --{name} {ours}"
            )
    if len(golden.ranks) != len(bench.ranks):
        raise DataError(
            f"{golden.folder} has {len(golden.ranks)} rank(s), {bench.folder} {len(bench.ranks)}: compare pairs rank "
            "by rank; for two parallel layouts of one model use `tc3 accuracy equivalence`"
        )
    if golden.ranks != bench.ranks:
        raise DataError(f"{golden.folder} has ranks {golden.ranks}, {bench.folder} {bench.ranks}: the same are needed")
    if golden.steps != bench.steps:
        raise DataError(
            f"{golden.folder} has steps {golden.steps}, {bench.folder} {bench.steps}: dump both with the same --steps"
        )
    if list(golden.weights) != list(bench.weights):
        raise DataError(
            f"{golden.folder} has weights of steps {list(golden.weights)}, {bench.folder} of {list(bench.weights)}: "
            "dump both with this version of `tc3 accuracy dump`"
        )
