"""This module handles the samples that a run leaves out: it counts them, and reads and writes `RUN/skipped.json`, which
records the spikes. The module is pure Python and NumPy.

Samples are numbered in the order in which the loader would deliver them if no sample were left out: sample 0 is the
first sample of the first step. The left-out samples are ranges (first, stop) of these numbers. The samples after each
range move forward into its place, and samples after the last one that the recipe trains fill the end: the run keeps its
number of steps, and therefore its learning rates. (`reference.py` computes this in an obvious way.) The file has this
form:

    {"skipped": [{"step": 12, "first": 12, "why": "step 12: loss is NaN", "samples": [[44, 48]]}]}

Every rank that decides to go back to a checkpoint adds the same entry, and writes the whole file again before it ends
the run; no other process writes this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import DataError, not_json
from plugins.lines import locked, write_whole

Ranges = tuple[tuple[int, int], ...]
FILE = "skipped.json"


def normal(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Return `ranges` of samples as sorted ranges that hold the same samples and neither overlap nor adjoin."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted((int(first), int(stop)) for first, stop in ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif first < stop:
            found.append((first, stop))
    return tuple(found)


def count(skipped: Ranges) -> int:
    """Return the number of samples in `ranges`, which are the ranges of samples that a run leaves out."""
    return sum(stop - first for first, stop in skipped)


def original(position: int, skipped: Ranges) -> int:
    """Return the index, in the whole data, of the sample on which a run trains at `position` if it leaves out the
    ranges of samples in `skipped`, which must be sorted and must not overlap.
    """
    for first, stop in skipped:
        if position < first:
            break
        position += stop - first
    return position


def originals(first: int, stop: int, skipped: Ranges) -> Ranges:
    """Return, as ranges of sample numbers in the whole data, the samples on which a run without the skipped samples
    trains at positions `first` to `stop` - 1.
    """
    return normal((sample, sample + 1) for sample in (original(each, skipped) for each in range(first, stop)))


def reached(done: int, skipped: Ranges) -> int:
    """Return the index, in the whole data, of the sample after the last one on which a run has trained when it has
    trained on `done` samples.
    """
    return original(done - 1, skipped) + 1 if done else 0


def same_until(done: int, one: Ranges, two: Ranges) -> bool:
    """Return whether two runs, each of which has trained on `done` samples, have trained on the same samples in the
    same order.
    """
    end = reached(done, one)
    return end == reached(done, two) and until(end, one) == until(end, two)


def until(end: int, skipped: Ranges) -> Ranges:
    """Return the samples of `skipped` whose numbers are below `end`."""
    return normal((first, min(stop, end)) for first, stop in skipped if first < end)


def continued(weights: Sequence[float], counts: Sequence[int], lengths: Sequence[int], wanted: int) -> np.ndarray:
    """Return the items with which a blend of data sets would continue, as MindFormers' `build_blending_indices` would
    choose them.

    Args:
        weights: the weights of the data sets in the blend.
        counts: the number of items of each data set in the blend.
        lengths: the lengths of the data sets.
        wanted: the number of additional items.

    Returns:
        int64 [up to `wanted`, 2]: data set, and item in it. There are fewer items if the next data set has none left.
    """
    share, taken = np.asarray(weights, np.float64), np.array(counts, np.int64)
    found: list[tuple[int, int]] = []
    for done in range(int(taken.sum()), int(taken.sum()) + wanted):
        chosen = int(np.argmax(share * max(done, 1) - taken))
        if taken[chosen] >= lengths[chosen]:
            break
        found.append((chosen, int(taken[chosen])))
        taken[chosen] += 1
    return np.array(found, np.int64).reshape(-1, 2)


def behind(source: Any, wanted: int) -> tuple[np.ndarray, list[Any]]:
    """Return up to `wanted` samples that follow the last sample of a blend, as int64 [n, 2] of (number of the data set,
    item), and the list of the blend's data sets.

    A dataset that is not a blend has no samples beyond its length.
    """
    blend = getattr(source, "source", source)  # of attention_balance's view
    parts = getattr(blend, "datasets", [])
    if not parts or not wanted:
        return np.empty((0, 2), np.int64), parts
    counts = np.bincount(np.asarray(blend.dataset_index), minlength=len(parts))
    return continued(blend.weights, counts.tolist(), [len(part) for part in parts], wanted), parts


@dataclass(frozen=True)
class Entry:
    """An `Entry` records that a run goes back to an earlier checkpoint after a spike. The field `step` is the step of
    the spike, `first` is the first step whose samples are left out, and `samples` are the ranges of these samples.
    """

    step: int
    first: int
    why: str
    samples: Ranges


def ledger_file(run_dir: str | Path) -> Path:
    """Return the path of a run's `skipped.json`."""
    return Path(run_dir) / FILE


def read_ledger(run_dir: str | Path) -> list[Entry]:
    """Return the entries of a run's ledger, the oldest first; the list is empty if the run has no `skipped.json`.

    Raises:
        DataError: the file cannot be read, or is of another form.
    """
    path = ledger_file(run_dir)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["skipped"]
        found = [Entry(int(e["step"]), int(e["first"]), str(e["why"]), normal(e["samples"])) for e in entries]
        if not all(1 <= each.first <= each.step <= each.first - 1 + count(each.samples) for each in found):
            raise ValueError  # a step has at least one sample
        return found
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: this file cannot be read ({error.strerror})") from None
    except KeyError as error:
        raise DataError(
            f"{path}: this is not a list of the samples that were left out: the key {error} is missing; restore the "
            "run's own file"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:
        why = (
            not_json(error)
            if isinstance(error, json.JSONDecodeError | RecursionError)
            else ("does not have the form of the file that the run wrote")
        )
        raise DataError(
            f"{path}: this is not a list of the samples that were left out: it {why}; restore the run's own file"
        ) from None


def write_ledger(run_dir: str | Path, entries: Sequence[Entry]) -> None:
    """Write all entries of `skipped.json` atomically."""
    write_whole(ledger_file(run_dir), {"skipped": [asdict(entry) for entry in entries]})


def add_entry(run_dir: str | Path, entry: Entry) -> None:
    """Add `entry` to the entries in `skipped.json`, unless another rank has added it. A rank that writes later than
    other ranks does not remove their entries.

    No lock coordinates ranks of two hosts. The ranks of one attempt all add the same entry, so no entry is lost. If a
    late rank of an earlier attempt replaces a newer list by an older one, the next attempt still leaves out what the
    attempts before it have left out (`launch.resume.data.apply_ledger`).
    """
    with locked(Path(run_dir)):
        entries = read_ledger(run_dir)
        if not any((each.step, each.samples) == (entry.step, entry.samples) for each in entries):
            write_ledger(run_dir, [*entries, entry])


def samples_of(entries: Sequence[Entry]) -> Ranges:
    """Return all samples that the entries of a run's ledger leave out."""
    return normal(pair for entry in entries for pair in entry.samples)
