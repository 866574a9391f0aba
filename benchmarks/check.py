"""This program compares the time of `tc3 check` on the 438B recipe with that of importing MindFormers, which building
its model would need.

    python benchmarks/check.py

"pure" is the time of the checks that `tc3 check` makes before it imports MindFormers: schema, values, arithmetic.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml")
RUNS = 5
WORK = {
    "import mindformers": "import mindformers",
    "tc3 check, pure": "from tools.check.check import check_recipe; check_recipe(sys.argv[1])",
    "tc3 check": "from tools.check.cli import check; check()",
}


def seconds(code: str) -> float:
    """Return the processor seconds that a Python process and its children take to run `code`."""
    before = os.times()
    command = [sys.executable, "-c", f"import sys; {code}", RECIPE]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    for code in WORK.values():
        seconds(code)  # reads the files
    taken = {name: np.median([seconds(code) for _ in range(RUNS)]) for name, code in WORK.items()}
    baseline = taken["import mindformers"]
    print("| processor time, median of 5 | s | ratio |\n|---|---:|---:|")
    for name, value in taken.items():
        print(f"| {name} | {value:.2f} | {value / baseline:.2f} |")


if __name__ == "__main__":
    main()
