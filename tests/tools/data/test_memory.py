"""Peak memory must not depend on the size of the corpus."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.tools.data.data_helpers import environment

MEASURE = """
import json, resource, sys
from launch.cli import main
if __name__ == "__main__":
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps(peaks))
"""


def peaks(folder: Path, megabytes: int) -> list[int]:
    """Peak KiB of the parent and of the largest worker."""
    source = folder / f"{megabytes}.jsonl"
    text = Path(psutil.__file__).read_text()
    with open(source, "w") as stream:
        while stream.tell() < megabytes << 20:
            for start in range(0, len(text), 8000):
                stream.write(json.dumps({"text": text[start : start + 8000]}) + "\n")
    arguments = ["data", "prepare", "--input", str(source), "--output", str(folder / f"out{megabytes}")]
    command = [sys.executable, "-c", MEASURE, *arguments, "--workers", "2", "--held-out", "0.1", "--json"]
    result = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_is_flat_in_the_corpus(tmp_path: Path) -> None:
    small, large = peaks(tmp_path, 5), peaks(tmp_path, 20)
    for before, after in zip(small, large, strict=True):
        assert after - before < 6 * 1024, (small, large)  # KiB; 15 MiB more text
