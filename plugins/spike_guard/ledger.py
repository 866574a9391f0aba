"""`RUN/skipped.json`: the spikes for which a run has gone back, and the samples that it leaves out since. Pure.

    {"skipped": [{"step": 12, "first": 12, "why": "step 12: loss is NaN", "samples": [[44, 48]]}]}

Every rank that decides to go back adds the same entry, and writes the file whole, before it ends the run; nobody else
writes it.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plugins.errors import DataError, not_json
from plugins.spike_guard.skip import Ranges, normal

FILE = "skipped.json"


@dataclass(frozen=True)
class Entry:
    """One time that a run goes back. step: of the spike; first: the first guilty step; samples: see `skip`."""

    step: int
    first: int
    why: str
    samples: Ranges


def ledger_file(run_dir: str | Path) -> Path:
    """Where a run keeps it."""
    return Path(run_dir) / FILE


def read_ledger(run_dir: str | Path) -> list[Entry]:
    """The entries of a run, the oldest first; none where it has no ledger.

    Raises:
        DataError: the file cannot be read, or is of another form.
    """
    path = ledger_file(run_dir)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["skipped"]
        return [Entry(int(e["step"]), int(e["first"]), str(e["why"]), normal(e["samples"])) for e in entries]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except KeyError as error:
        raise DataError(f"{path}: not a ledger of left-out samples: it lacks {error}; put back the run's own") from None
    except (ValueError, TypeError, RecursionError) as error:
        why = not_json(error) if isinstance(error, json.JSONDecodeError | RecursionError) else "has another form"
        raise DataError(f"{path}: not a ledger of left-out samples: it {why}; put back the run's own") from None


def write_ledger(run_dir: str | Path, entries: Sequence[Entry]) -> None:
    """Write all entries, atomically."""
    path = ledger_file(run_dir)
    part = path.with_name(f".{uuid.uuid4().hex}.{path.name}")  # ranks of several hosts write
    with part.open("w", encoding="utf-8") as out:
        json.dump({"skipped": [asdict(entry) for entry in entries]}, out, indent=1)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)


def add_entry(run_dir: str | Path, entry: Entry) -> None:
    """Add `entry` to what stands in the ledger now, unless another rank has. A late rank takes nothing away."""
    entries = read_ledger(run_dir)
    if not any((each.step, each.samples) == (entry.step, entry.samples) for each in entries):
        write_ledger(run_dir, [*entries, entry])


def samples_of(entries: Sequence[Entry]) -> Ranges:
    """All samples that they leave out."""
    return normal(pair for entry in entries for pair in entry.samples)
