from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import DataError
from tools.data import outputs, sources
from tools.data import prepare as pipeline
from tools.data import tokenizer as tokenizers
from tools.data.index import IndexReader, IndexWriter
from tools.data.outputs import read_sidecar
from tools.data.prepare import PrepareOptions, prepare
from tools.data.sources import Corpus, spread
from tools.data.tokenizer import EOD_TOKEN, Coder
from tools.process.waiting import Reporter


def options(source: Path, output: Path, **settings: Any) -> PrepareOptions:
    return PrepareOptions(Corpus((str(source),)), output, **{"vocab_size": 300, **settings})


def decoded(prefix: Path) -> list[str]:
    """The documents of a pair as text, read by other means than `verify`."""
    sidecar, reader = read_sidecar(prefix), IndexReader(prefix)
    coder = Coder(tokenizers.load(prefix.parent / sidecar["tokenizer"]["path"]).spec)
    documents = [reader[i].tolist() for i in range(len(reader))]
    assert all(ids[-1] == sidecar["eod_id"] and sidecar["eod_id"] not in ids[:-1] for ids in documents)
    return [coder.decode(ids[:-1]) for ids in documents]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_document_comes_back_and_the_sidecar_tells_all(tmp_path: Path, jsonl: Path, texts: list[str]) -> None:
    output = tmp_path / "new" / "folder" / "out"
    returned = prepare(options(jsonl, output))
    assert names(output.parent) == {"out.bin", "out.idx", "out.json", "out_tokenizer"}
    assert decoded(output) == texts
    content = Path(f"{output}.bin").read_bytes()
    assert returned == read_sidecar(output)
    assert returned | {"tokenizer": None} == {
        "format": "tc3-data-1",
        "split": "train",
        "documents": 60,
        "tokens": len(content) // 2,
        "text_bytes": sum(len(text.encode()) for text in texts),
        "dtype": "uint16",
        "bin_sha256": hashlib.sha256(content).hexdigest(),
        "vocab_size": 300,
        "eod_id": 0,
        "eod_token": EOD_TOKEN,
        "tokenizer": None,
        "sources": [{"input": str(jsonl)}],
        "jsonl_key": "text",
        "globs": [],
        "held_out": {"fraction": 0.0, "seed": 1234},
        "skipped": {"empty": 0, "invalid_utf8": 0, "broken_lines": 0},
    }
    assert returned["tokenizer"]["path"] == "out_tokenizer" and returned["tokenizer"]["lossless"] is True


def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_JOB_CHARACTERS", 200)  # many jobs
    for workers in (1, 2, 3):
        prepare(options(jsonl, tmp_path / f"out{workers}", workers=workers, held_out=0.3))
    for suffix in (".bin", ".idx", "_heldout.bin", "_heldout.idx"):
        first, *others = [(tmp_path / f"out{n}{suffix}").read_bytes() for n in (1, 2, 3)]
        assert others == [first, first], suffix


def test_the_held_out_split_is_a_partition_that_only_the_seed_changes(
    tmp_path: Path, jsonl: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = prepare(options(jsonl, tmp_path / "a", held_out=0.25))
    train, held = decoded(tmp_path / "a"), decoded(tmp_path / "a_heldout")
    assert sorted(train + held) == sorted(texts)
    assert 5 <= len(held) <= 25
    assert [t for t in texts if t in held] == held and [t for t in texts if t in train] == train
    assert summary["heldout"] == read_sidecar(tmp_path / "a_heldout")
    assert summary["heldout"]["split"] == "heldout" and summary["heldout"]["documents"] == len(held)
    monkeypatch.setattr(pipeline, "_JOB_CHARACTERS", 100)
    prepare(options(jsonl, tmp_path / "b", held_out=0.25, workers=2))
    assert decoded(tmp_path / "b_heldout") == held
    prepare(options(jsonl, tmp_path / "c", held_out=0.25, seed=7))
    assert decoded(tmp_path / "c_heldout") != held


def test_the_tokenizer_never_sees_the_held_out_split(tmp_path: Path) -> None:
    for name, secret in (("a", "zqzqzqzq" * 50), ("b", "other" * 50)):
        folder = tmp_path / name
        folder.mkdir()
        for index in range(40):
            text = secret if pipeline.held_out(1234, index, 0.2) else f"public words {index} "
            (folder / f"{index:02}.txt").write_text(text)
        prepare(options(folder, tmp_path / f"out_{name}", held_out=0.2))
    trained = [(tmp_path / f"out_{name}_tokenizer" / "tokenizer.json").read_bytes() for name in "ab"]
    assert trained[0] == trained[1]


def test_a_tokenizer_of_an_earlier_run_is_reused(tmp_path: Path, jsonl: Path, texts: list[str]) -> None:
    first = prepare(options(jsonl, tmp_path / "a"))
    second = prepare(options(jsonl, tmp_path / "b", tokenizer=str(tmp_path / "a_tokenizer")))
    assert second["tokenizer"] == first["tokenizer"]
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert not (tmp_path / "b_tokenizer").exists()
    # and over its own output
    again = prepare(options(jsonl, tmp_path / "a", tokenizer=str(tmp_path / "a_tokenizer"), force=True))
    assert again == first and decoded(tmp_path / "a") == texts


def test_a_small_training_budget_still_covers_every_byte(
    tmp_path: Path, jsonl: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "TRAIN_BYTES", 500)
    prepare(options(jsonl, tmp_path / "a"))
    assert decoded(tmp_path / "a") == texts


def test_skips_are_counted_once_though_the_corpus_is_read_often(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "one"}\noops\n\n{"text": "\xff"}\n{"text": "two"}\n')
    summary = prepare(options(source, tmp_path / "out"))
    assert summary["skipped"] == {"empty": 1, "invalid_utf8": 1, "broken_lines": 1}
    assert decoded(tmp_path / "out") == ["one", "two"]
    with pytest.raises(DataError, match=r"a\.jsonl:2: is not JSON .*--strict"):
        prepare(options(source, tmp_path / "strict", strict=True))
    assert names(tmp_path) == {"a.jsonl", "out.bin", "out.idx", "out.json", "out_tokenizer"}


def test_an_existing_output_is_refused_before_any_work(tmp_path: Path, jsonl: Path) -> None:
    before = prepare(options(jsonl, tmp_path / "out", held_out=0.3))
    missing = tmp_path / "missing"  # would be an error too, if any work were done
    for settings in ({}, {"held_out": 0.1}, {"tokenizer": "nowhere"}):
        with pytest.raises(DataError, match=r"exists; .*--force"):
            prepare(options(missing, tmp_path / "out", **settings))
    (tmp_path / "lonely_tokenizer").mkdir()
    with pytest.raises(DataError, match="lonely_tokenizer: the file exists"):
        prepare(options(missing, tmp_path / "lonely"))
    assert read_sidecar(tmp_path / "out") == {k: v for k, v in before.items() if k != "heldout"}


def test_force_leaves_no_held_out_split_of_an_earlier_run_behind(tmp_path: Path, jsonl: Path, texts: list[str]) -> None:
    prepare(options(jsonl, tmp_path / "out", held_out=0.3))
    prepare(options(jsonl, tmp_path / "out", force=True))
    assert decoded(tmp_path / "out") == texts
    assert not [name for name in names(tmp_path) if "heldout" in name]


def test_samples_that_mindformers_cached_for_the_earlier_corpus_go(tmp_path: Path, jsonl: Path) -> None:
    """MindFormers finds its cache by the name of the pair, not by its content."""
    caches = [tmp_path / name / "cache" / "GPTDataset_indices" for name in ("out", "out_heldout", "other")]
    for cache in caches:
        cache.mkdir(parents=True)
        (cache / "0123-GPTDataset-train-sample_index.npy").write_text("stale")
    (tmp_path / "out" / "notes.txt").write_text("the user's own")
    prepare(options(jsonl, tmp_path / "out", held_out=0.3))
    assert [cache.exists() for cache in caches] == [False, False, True]
    assert (tmp_path / "out" / "notes.txt").exists()


def test_a_failed_forced_run_keeps_the_earlier_output(tmp_path: Path, jsonl: Path, texts: list[str]) -> None:
    prepare(options(jsonl, tmp_path / "out"))
    before = names(tmp_path)
    bad = tmp_path / "corpus.jsonl.gz"
    bad.write_bytes(b"\x1f\x8b broken")
    with pytest.raises(DataError, match="truncated or broken"):
        prepare(options(bad, tmp_path / "out", force=True))
    assert decoded(tmp_path / "out") == texts
    assert names(tmp_path) == before | {bad.name}


def test_what_does_not_read_back_is_not_published(tmp_path: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = IndexWriter.finish

    def finish_and_flip(writer: IndexWriter, idx_path: Path) -> None:
        finish(writer, idx_path)
        path = idx_path.with_suffix(".bin")
        content = bytearray(path.read_bytes())
        content[6] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(IndexWriter, "finish", finish_and_flip)
    with pytest.raises(DataError, match="differs from its source when it is read back, so no output was written"):
        prepare(options(jsonl, tmp_path / "out"))
    assert names(tmp_path) == {"corpus.jsonl"}


@pytest.mark.parametrize("stop", range(1, 10))
def test_a_cut_while_publishing_never_leaves_a_pair_that_reads_but_lies(
    tmp_path: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """`stop`: the rename that does not happen any more; from the third on these are .bin, .json and .idx."""
    old = prepare(options(jsonl, tmp_path / "out", held_out=0.3))
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join(jsonl.read_text().splitlines(keepends=True)[:30]))
    replace, count = os.replace, iter(range(1, 100))

    def cut(source: Path, target: Path) -> None:
        if next(count) == stop:
            raise OSError(errno.EIO, "power cut")
        replace(source, target)

    monkeypatch.setattr(outputs.os, "replace", cut)
    new = None
    try:
        new = prepare(options(shorter, tmp_path / "out", held_out=0.3, force=True))
    except DataError as error:
        assert "power cut" in str(error)
    assert (new is None) == (stop <= 8), "two tokenizer files and three files a split are renamed"
    for split in ("out", "out_heldout"):
        if (tmp_path / f"{split}.idx").exists():
            sidecar, reader = read_sidecar(tmp_path / split), IndexReader(tmp_path / split)
            digest = hashlib.sha256((tmp_path / f"{split}.bin").read_bytes()).hexdigest()
            assert (digest, len(reader)) == (sidecar["bin_sha256"], sidecar["documents"])
            assert sidecar["documents"] < old["documents"]


def test_a_full_disk_is_one_error_and_leaves_nothing(
    tmp_path: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(IndexWriter, "add", full)
    with pytest.raises(DataError, match=r"--output .*out: No space left on device"):
        prepare(options(jsonl, tmp_path / "out"))
    assert names(tmp_path) == {"corpus.jsonl"}


def test_corpora_without_documents_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("")
    with pytest.raises(DataError, match=r"a\.jsonl: the corpus has no documents$"):
        prepare(options(source, tmp_path / "out"))
    source.write_text('{"txt": "x"}\n' * 3)
    with pytest.raises(
        DataError, match=r"no documents: skipped items: 3 .*; the first skipped item is .*a\.jsonl:1: .*'txt'"
    ):
        prepare(options(source, tmp_path / "out"))
    source.write_text('{"text": "only one"}\n')
    with pytest.raises(DataError, match=r"--held-out 0\.1 of 1 documents leaves the heldout split empty"):
        prepare(options(source, tmp_path / "out", held_out=0.1))
    assert names(tmp_path) == {"a.jsonl"}


def test_outputs_that_cannot_be_are_refused(tmp_path: Path, jsonl: Path) -> None:
    with pytest.raises(DataError, match=r"give the prefix without \.bin"):
        prepare(options(jsonl, tmp_path / "out.bin"))
    with pytest.raises(DataError, match="its folder cannot be written"):
        prepare(options(jsonl, jsonl / "out"))


def test_a_vocabulary_too_large_for_uint16(tmp_path: Path, jsonl: Path) -> None:
    import tokenizers as hugging_face

    words = {"[UNK]": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 70_000)} | {"fox": 70_000}
    backend = hugging_face.Tokenizer(hugging_face.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = hugging_face.pre_tokenizers.Whitespace()
    folder = tmp_path / "large"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="--dtype uint16 holds ids up to 65,535"):
        prepare(options(jsonl, tmp_path / "out", tokenizer=str(folder), dtype="uint16"))
    summary = prepare(options(jsonl, tmp_path / "out", tokenizer=str(folder)))
    assert (summary["dtype"], summary["vocab_size"], summary["eod_id"]) == ("int32", 70_001, 1)
    assert 70_000 in IndexReader(tmp_path / "out")[0]


@pytest.mark.slow
def test_a_slow_tokenizer_goes_through_workers(tmp_path: Path, jsonl: Path, texts: list[str]) -> None:
    folder = tmp_path / "t5"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>"}')
    prepare(options(jsonl, tmp_path / "out", tokenizer=str(folder), workers=2))
    reader = IndexReader(tmp_path / "out")
    assert reader[1].tolist() == [3 + byte for byte in texts[1].encode()] + [1]


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
