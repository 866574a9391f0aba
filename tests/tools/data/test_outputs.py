"""The files that one prefix stands for, and the one reader of `data_path`, which reads as MindFormers does.

Check, launch, resume, align and imbalance share that reader.
"""

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
from tools.data.index import Blend, read_blend
from tools.data.outputs import publish, staged
from tools.data.prepare import PrepareOptions, prepare
from tools.data.sources import Corpus
from tools.process.children import terminate_as_interrupt


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
        thread.join(timeout=300)
    assert contents(tmp_path) == {f"out{suffix}": "new" for suffix in outputs.SUFFIXES}


READABLE = [
    (["a"], ["a"], None),
    (["a", "b"], ["a", "b"], None),
    (["a", "b", "c"], ["a", "b", "c"], None),
    (["1", "2", "3"], ["1", "2", "3"], None),  # an odd number: prefixes, whatever they look like
    (["1", "a"], ["a"], [1.0]),
    (["0.3", "a", "7e-1", " b "], ["a", "b"], [0.3, 0.7]),
    (["2024", "2025"], ["2025"], [2024.0]),
    (["a", "1", "b", "2"], ["a", "1", "b", "2"], None),
]


@pytest.mark.parametrize(("data_path", "prefixes", "weights"), READABLE)
def test_prefixes_and_weights(data_path, prefixes, weights):
    assert read_blend(data_path) == Blend(prefixes, weights)


@pytest.mark.slow
@pytest.mark.parametrize("data_path", [data_path for data_path, *_ in READABLE])
def test_it_reads_as_mindformers_does(data_path):
    from mindformers.dataset.blended_datasets.utils import get_blend_from_list

    prefixes, weights = get_blend_from_list(data_path)
    assert read_blend(data_path) == Blend(list(prefixes), weights)


@pytest.mark.slow
def test_a_weight_that_mindformers_takes_for_a_prefix_is_refused():
    """Of these two it reads one as four corpora, the first called 1, and stops at the other."""
    from mindformers.dataset.blended_datasets.utils import get_blend_from_list

    assert get_blend_from_list(["1", "A", "B", "C"])[0] == ["1", "A", "B", "C"]
    with pytest.raises(AssertionError):
        get_blend_from_list(["A", "B", "1", "C"])


@pytest.mark.parametrize(
    ("data_path", "words"),
    [
        (["1", "A", "B", "C"], "gives weights to some prefixes only"),
        (["A", "B", "1", "C"], "gives weights to some prefixes only"),
        *((wrong, "must be a list such as") for wrong in (None, [], "a", [["a"]], {"a": 1}, [None], [True, "a"])),
        *(
            ([weight, "a"], "these weights cannot be shares of the data")
            for weight in ("nan", "inf", -1, 0, float("nan"))
        ),
        (["0", "A", "1", "B"], "leave out a corpus that is not to be trained on"),
    ],
)
def test_what_nobody_can_mean_is_refused(data_path, words):
    with pytest.raises(DataError, match=words):
        read_blend(data_path)
