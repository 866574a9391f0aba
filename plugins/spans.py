"""For how long a run's training stood still for a save or an evaluation: one JSON line each, beside its steps.

Both halves of the form: the plugins that save and evaluate write it, by rank 0 alone; `tc3 runs` reads it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from plugins.lines import append_line

Kind = Literal["save", "evaluation"]


@dataclass(frozen=True)
class Span:
    """From `begin` to `end` (seconds since 1970, by the worker's clock) no step was made.

    Args:
        step: the newest step made before it.
        sealed: of a save: the checkpoint of `step` was whole at its end. A save in the background is two spans.
    """

    kind: Kind
    step: int
    begin: float
    end: float
    sealed: bool = False


def spans_file(run_dir: str | Path) -> Path:
    """Where a run writes them."""
    return Path(run_dir) / "metrics" / "spans.jsonl"


def note(run_dir: str | Path, span: Span) -> None:
    """Append one."""
    append_line(spans_file(run_dir), json.dumps(asdict(span)))


def as_span(record: dict[str, Any]) -> Span | None:
    """The span of one line; None for a line of another form."""
    numbers = [record.get(name, math.nan) for name in ("step", "begin", "end")]
    good = all(type(number) in (int, float) and 0 <= number < 1e15 for number in numbers)
    if record.get("kind") not in get_args(Kind) or not good or record["end"] < record["begin"]:
        return None
    return Span(record["kind"], record["step"], record["begin"], record["end"], record.get("sealed") is True)
