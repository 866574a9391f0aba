from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from plugins.errors import DataError
from tools.data import outputs
from tools.data import prepare as pipeline
from tools.data.outputs import publish, staged
from tools.data.prepare import PrepareOptions, prepare
from tools.data.sources import Corpus
from tools.process.signals import terminate_as_interrupt


def fill(stage: Path, content: str) -> None:
    for suffix in outputs.SUFFIXES:
        (stage / f"out{suffix}").write_text(content)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_never_cuts_publishing_in_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    fill(tmp_path, "old")
    replace = os.replace

    def signalled(source: Path, target: Path) -> None:
        os.kill(os.getpid(), number)
        replace(source, target)

    monkeypatch.setattr(outputs.os, "replace", signalled)
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt(), staged(tmp_path / "out") as stage:
        fill(stage, "new")
        publish(stage, tmp_path / "out", ("train",), force=True)
    assert contents(tmp_path) == {f"out{suffix}": "new" for suffix in outputs.SUFFIXES}


@pytest.mark.parametrize("held_out", [0.0, 0.3])
def test_the_slower_of_two_runs_does_not_replace_the_other(
    tmp_path: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch, held_out: float
) -> None:
    check, first, published = pipeline._check, [True], {}
    corpus = Corpus((str(jsonl),))

    def overtaken(*arguments: Any) -> None:
        check(*arguments)
        if first and first.pop():
            prepare(PrepareOptions(corpus, tmp_path / "out", vocab_size=290, held_out=held_out))
            published.update((path, path.read_bytes()) for path in tmp_path.glob("out*.*"))

    monkeypatch.setattr(pipeline, "_check", overtaken)
    with pytest.raises(DataError, match=r"exists; choose another --output, or replace it with --force"):
        prepare(PrepareOptions(corpus, tmp_path / "out", vocab_size=300))
    assert published == {path: path.read_bytes() for path in tmp_path.glob("out*.*")} and published
    assert not outputs.leftovers(tmp_path / "out")


def test_only_one_run_publishes_at_a_time(tmp_path: Path) -> None:
    with staged(tmp_path / "out") as stage:
        fill(stage, "new")
        descriptor = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as the other run does
        thread = threading.Thread(target=publish, args=(stage, tmp_path / "out", ("train",), False))
        thread.start()
        thread.join(timeout=0.2)
        assert thread.is_alive() and not (tmp_path / "out.bin").exists()
        os.close(descriptor)
        thread.join(timeout=60)
    assert contents(tmp_path) == {f"out{suffix}": "new" for suffix in outputs.SUFFIXES}
