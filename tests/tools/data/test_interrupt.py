"""What a killed run leaves behind: nothing that reads as whole, and no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def long_corpus(tmp_path: Path) -> Path:
    """Some 20 MB: seconds of work."""
    source = tmp_path / "source"
    source.mkdir()
    line = json.dumps({"text": Path(psutil.__file__).read_text()}) + "\n"
    (source / "a.jsonl").write_text(line * (20_000_000 // len(line)))
    return source


def until_encoding(process: subprocess.Popen[str], folder: Path) -> list[psutil.Process]:
    """Wait until .bin grows; return the worker processes."""
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in folder.glob(".out.unfinished-*/out.bin")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(process.pid).children()
    assert len(children) >= 2
    return children


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run(tmp_path: Path, long_corpus: Path, tokenizer_folder: str, start_tc3, number: int) -> None:
    folder = tmp_path / "out"
    arguments = ["--input", long_corpus, "--output", folder / "out", "--tokenizer", tokenizer_folder, "--workers", 2]
    process = start_tc3("prepare", *arguments)
    children = until_encoding(process, folder)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C reaches the whole group
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    left = [path.name for path in folder.iterdir()]
    if number == signal.SIGKILL:  # nobody could clean up, but nothing carries the name
        assert len(left) == 1 and left[0].startswith(".out.unfinished-")
    else:
        assert left == []
