from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.data import prepare as pipeline
from tools.data import sources
from tools.data import tokenizer as tokenizers
from tools.data.prepare import PrepareOptions, prepare
from tools.data.reporter import Reporter
from tools.data.sources import Corpus, spread


class Recorder(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        self.lines.append(message)


def size(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


@given(
    st.lists(st.integers(1, 5 * 16).map(lambda n: "aé一😀"[n % 4] * n), min_size=1, max_size=40), st.integers(1, 4000)
)
def test_the_budget_is_met_within_a_piece(texts: list[str], budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", 16)
        found = list(spread(texts, size(texts), budget))
        assert found == list(spread(texts, size(texts), budget))
    if size(texts) <= budget:
        assert found == texts
    else:
        assert found[0] == texts[0][:16]
        assert abs(size(found) - budget) < 4 * 16 and all(len(piece) <= 16 for piece in found)


@pytest.mark.parametrize("documents", [1, 4, 200])
def test_the_choice_is_spread_evenly_whatever_the_sizes(documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    piece, width = 1024, 8
    monkeypatch.setattr(sources, "PIECE", piece)
    total, budget = 400 * piece, 100 * piece
    text = "".join(f"{place:{width}}" for place in range(total // width))
    step = total // documents
    found = "".join(spread((text[i : i + step] for i in range(0, total, step)), total, budget))
    assert len(found) == pytest.approx(budget, abs=piece)
    places = [int(found[i : i + width]) * width * 4 // total for i in range(0, len(found), width)]
    assert all(0.15 < places.count(quarter) / len(places) < 0.35 for quarter in range(4))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the trainer is given."""
    given_texts: list[str] = []
    train = tokenizers.train

    def spy(texts: Iterable[str], *arguments: Any) -> tokenizers.Tokenizer:
        given_texts.extend(texts)
        return train(given_texts, *arguments)

    monkeypatch.setattr(tokenizers, "train", spy)
    monkeypatch.setattr(pipeline, "TRAIN_BYTES", 20_000)
    monkeypatch.setattr(sources, "PIECE", 500)
    return given_texts


def run(source: Path, output: Path, vocab_size: int = 280, **settings: Any) -> list[str]:
    reporter = Recorder()
    prepare(PrepareOptions(Corpus((str(source),)), output, vocab_size=vocab_size, **settings), reporter)
    return reporter.lines


def words(name: str, count: int) -> str:
    return "".join(f"{name}{number} " for number in range(count))


def test_a_few_large_documents_train_a_tokenizer(tmp_path: Path, seen: list[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in "abc":
        (source / f"{name}.txt").write_text(words(name, 30_000))
    lines = run(source, tmp_path / "out")
    assert size(seen) == pytest.approx(20_000, abs=500)
    assert all(any(f"{name}1" in piece for piece in seen) for name in "abc")
    assert not any("ids, not" in line for line in lines)


def test_a_compressed_corpus_is_used_to_its_end(tmp_path: Path, seen: list[str]) -> None:
    source = tmp_path / "corpus.jsonl.gz"
    lines = [json.dumps({"text": words(f"{number:04}-", 20)}) for number in range(1000)]
    source.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert source.stat().st_size < 100_000 < size(lines)
    run(source, tmp_path / "out")
    assert size(seen) == pytest.approx(20_000, abs=500)
    assert int(seen[-1][:4]) > 900


def test_a_small_corpus_is_used_whole_and_blamed_only_if_it_is_small(tmp_path: Path, seen: list[str]) -> None:
    source = tmp_path / "a.jsonl"
    texts = [words(name, 200) for name in "abc"]  # longer than a piece
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    lines = run(source, tmp_path / "small", vocab_size=5000)
    assert seen == texts
    assert any(f"not 5,000: all {size(texts):,} bytes of text" in line for line in lines)
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 20))
    lines = run(source, tmp_path / "large", vocab_size=5000)
    assert any(f"not 5,000: about 20,000 of the {size(texts) * 20:,} bytes" in line for line in lines)
