"""What these tests share beyond fixtures; not in conftest.py, whose module name other folders use too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
CALL = [sys.executable, "-c", "from launch.cli import main; main()"]


def environment() -> dict[str, str]:
    """The environment of a process that imports this checkout from anywhere."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}
