"""This module holds what these tests share in addition to fixtures; it is not in conftest.py, because other folders
use that module name, too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from tools.data.index import IndexWriter

REPOSITORY = Path(__file__).resolve().parents[3]
CALL = [sys.executable, "-c", "from launch.cli import main; main()"]


def environment() -> dict[str, str]:
    """The environment of a process that imports this checkout from anywhere."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def write_index(prefix: Path, lengths: np.ndarray) -> None:
    """PREFIX.idx of documents with these lengths, and a PREFIX.bin without their tokens."""
    writer = IndexWriter(Path(f"{prefix}.bin"), "int32")
    writer.add(lengths, np.zeros(0, np.int32))
    writer.finish(Path(f"{prefix}.idx"))
