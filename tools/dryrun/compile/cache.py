"""Results of compiles by content: the same recipe, rank, code and versions are compiled once."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import tempfile
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.dryrun.compile.job import Job

ROOT = Path(__file__).resolve().parents[3]
# what a result depends on: not how it is put together and shown
_CODE = (
    *("plugins", "launch/workers/dryrun_rank.py", "tools/recipe/view.py", "tools/check/arithmetic.py"),
    "tools/schema/defaults.py",
    *("tools/dryrun/compile/rank.py", "tools/dryrun/compile/virtual_cluster.py", "tools/dryrun/layout.py"),
    *("tools/dryrun/graph/text.py", "tools/dryrun/graph/collectives.py", "tools/dryrun/graph/activations.py"),
    "tools/estimate/memory/training_graph.py",
)
_PACKAGES = ("mindspore", "mindformers")


def folder() -> Path:
    """Where results lie: the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tc3" / "dryrun"


def find(job: Job) -> dict[str, Any] | None:
    """The result of an equal job, if there is one."""
    try:
        return json.loads(gzip.decompress((folder() / _name(job)).read_bytes()))
    except (OSError, EOFError, ValueError):
        return None


def keep(job: Job, result: dict[str, Any]) -> None:
    """Store a result, whole or not at all; refusals too are results, but for those of the host."""
    if result.get("of_the_host"):
        return
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder(), suffix=".part", delete=False) as part:
        try:
            part.write(gzip.compress(json.dumps(result).encode()))
            part.close()
            os.replace(part.name, folder() / _name(job))
        except BaseException:
            os.unlink(part.name)
            raise


def text_of(job: Job) -> Path:
    """Where the text of an equal job's final graph lies, if somebody asked for it (`tc3 fusion`); gzip."""
    return folder() / _name(job).replace(".json.gz", ".ir.gz")


def _name(job: Job) -> str:
    content = json.dumps([dataclasses.asdict(job), _code()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32] + ".json.gz"


@lru_cache
def _code() -> str:
    """A digest of the code that a result depends on."""
    digest = hashlib.sha256(" ".join(version(name) for name in _PACKAGES).encode())
    for part in _CODE:
        place = ROOT / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()
