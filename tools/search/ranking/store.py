"""What a search has found so far, on disk: interrupted, it goes on from there.

One JSON file for each question (recipe, cluster, devices, batch, memory, limits, and the code that answers), in the
user's cache. It holds placements, which take minutes; the ranking takes seconds and is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from plugins.errors import DataError
from plugins.hierarchical_ep import plan
from tools.estimate.configuration import Configuration
from tools.estimate.time_model import TimeModel
from tools.files.atomic import write_atomically
from tools.placement.place import Placement
from tools.search.space.candidates import Candidate, configuration
from tools.search.space.request import Request

_TOOLS = Path(__file__).resolve().parents[2]
# what an answer depends on; the last counts the bytes of dispatch modes
_ROOMS = ("search/space", "search/ranking", "placement", "pipeline", "estimate", "model", "hardware")
_CODE = (*(_TOOLS / room for room in _ROOMS), Path(plan.__file__).parent)
_BEGIN = b'{"digest": '
_TABLES = ("full", "select", "communication")


class Store:
    """Placements of one question by candidate.

    Args:
        path: of the file; the question's own in the cache by default.
        resume: read what is there; otherwise the file is begun anew.

    Raises:
        DataError: `path` is a file of something else.
    """

    def __init__(self, request: Request, times: TimeModel, path: Path | None = None, resume: bool = False):
        self.request = request
        self.digest = digest_of(request, times)
        self.path = path or folder() / f"{self.digest}.json"
        if path is not None and path.exists() and not is_state(path):
            raise DataError(f"--state {path}: is no state of a search, and would be lost; give it another name")
        self._placed: dict[str, dict[str, Any]] = self._read() if resume else {}

    def __len__(self) -> int:
        return len(self._placed)

    def find(self, candidate: Candidate, effort: float) -> Placement | None:
        """A placement that was made with the same effort, and that no deadline cut short."""
        known = self._placed.get(_key(candidate))
        if known is None or known["effort"] != effort or known["cut"]:
            return None
        config = None
        if known["layers"] is not None:
            config = _with_tables(configuration(self.request, candidate), known)
        bound = known["bound_s"] if known["bound_s"] is not None else float("inf")
        step = known["step_s"] if known["step_s"] is not None else float("inf")
        least = known["least_s"] if known["least_s"] is not None else float("inf")
        return Placement(config, step, bound, tuple(known["peak_bytes"]), known["why"], least)

    def keep(self, candidate: Candidate, placement: Placement, effort: float) -> None:
        """Write a placement; the file is whole at any time."""
        config = placement.configuration
        tables = {name: getattr(config.recompute, name) if config else None for name in _TABLES}
        self._placed[_key(candidate)] = {
            "effort": effort,
            "cut": placement.cut,
            "layers": config.layers if config else None,
            **tables,
            "operators": dict(config.recompute.operators) if config else {},
            "step_s": _finite(placement.step_s),
            "bound_s": _finite(placement.bound_s),
            "least_s": _finite(placement.least_s),
            "peak_bytes": placement.peak_bytes,
            "why": placement.why,
        }
        content = {"digest": self.digest, "placed": self._placed}
        write_atomically(self.path, json.dumps(content) + "\n")

    def _read(self) -> dict[str, dict[str, Any]]:
        """What the file holds of this question; nothing where it is missing, broken or of another one."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content["placed"] if content.get("digest") == self.digest else {}


def is_state(path: Path) -> bool:
    """Whether a file is one of these, of whatever question, or begins as one."""
    try:
        with path.open("rb") as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def folder() -> Path:
    """Where states lie: the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tc3" / "search"


def code() -> list[Path]:
    """The files that make an answer."""
    return [file for place in _CODE for file in sorted(place.rglob("*.py"))]


def digest_of(request: Request, times: TimeModel) -> str:
    """Of all that an answer depends on."""
    digest = hashlib.sha256(repr((request, times.reached)).encode())
    for file in code():
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def _key(candidate: Candidate) -> str:
    return " ".join(map(str, candidate))


def _with_tables(config: Configuration, known: dict[str, Any]) -> Configuration:
    tables: dict[str, Any] = {name: _table(known[name]) for name in _TABLES}
    tables["operators"] = tuple((name, _table(rows)) for name, rows in known["operators"].items())
    return replace(config, layers=_table(known["layers"]), recompute=replace(config.recompute, **tables))


def _table(rows: Any) -> Any:
    return None if rows is None else tuple(tuple(row) for row in rows)


def _finite(number: float) -> float | None:
    return number if number < float("inf") else None
