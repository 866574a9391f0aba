"""This program measures the speed of `tc3 data prepare` on Python's standard library, with one worker and with all
cores.

    python benchmarks/data_prepare.py

The program prints one JSON line for each run: wall seconds, files, documents, tokens, MB of text per second.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

from tools.data.prepare import PrepareOptions, prepare
from tools.data.sources import Corpus


def measure(workers: int) -> dict[str, float]:
    corpus = Corpus(("stdlib",))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        summary = prepare(PrepareOptions(corpus, Path(folder, "stdlib"), workers=workers))
        seconds = time.perf_counter() - start
    return {
        "workers": workers,
        "seconds": round(seconds, 2),
        "files": corpus.measure()[0],
        "documents": summary["documents"],
        "tokens": summary["tokens"],
        "vocab_size": summary["vocab_size"],
        "megabytes_per_second": round(summary["text_bytes"] / seconds / 1e6, 2),
    }


if __name__ == "__main__":
    for count in sorted({1, os.cpu_count() or 1}):
        print(json.dumps(measure(count)), flush=True)
