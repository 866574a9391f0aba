"""The pair as written, as read, and in the hands of the dataloader that recipes use; synthetic corpora."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindformers.dataset.blended_datasets import helpers
from mindformers.dataset.blended_datasets.utils import normalize

from benchmarks.corpora import CORPORA, document_lengths, synthetic_index
from plugins.attention_balance.samples import segments_of
from plugins.errors import DataError
from tools.data import index
from tools.data import tokenizer as tokenizers
from tools.data.blend import Corpora, shares_of
from tools.data.index import (
    BrokenIndexError,
    IndexReader,
    IndexWriter,
    choose_dtype,
    map_lengths,
    write_corpus,
    write_learnable,
)
from tools.data.prepare import PrepareOptions, prepare
from tools.data.sources import Corpus
from tools.data.tokenizer import Coder

Documents = list[list[int]]
DOCUMENTS = [[1, 2, 0], [0], list(range(300)), [65499, 0]]


def write(prefix: Path, documents: Documents, dtype: str = "uint16", at_once: int = 2) -> None:
    writer = IndexWriter(Path(f"{prefix}.bin"), dtype)
    for start in range(0, len(documents), at_once):
        group = documents[start : start + at_once]
        writer.add(np.array([len(d) for d in group], np.int32), np.array([i for d in group for i in d], dtype))
    writer.finish(Path(f"{prefix}.idx"))


@pytest.fixture(scope="session")
def mindformers_index(tmp_path_factory: pytest.TempPathFactory):
    """MindFormers' own module; importing it takes some 4 s and makes a log folder."""
    with pytest.MonkeyPatch.context() as patch:
        if "mindformers" not in sys.modules:
            patch.setenv("LOG_MF_PATH", str(tmp_path_factory.mktemp("mindformers-log")))
        return importlib.import_module("mindformers.dataset.blended_datasets.indexed_dataset")


@given(
    st.lists(st.lists(st.integers(0, 65499), min_size=1, max_size=40), min_size=1, max_size=40),
    st.sampled_from(["uint16", "int32"]),
    st.integers(1, 9),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, dtype: str, at_once: int
) -> None:
    prefix = tmp_path_factory.mktemp("pair") / "a"
    write(prefix, documents, dtype, at_once)
    reader = IndexReader(prefix)
    assert reader.dtype == dtype
    assert [reader[i].tolist() for i in range(len(reader))] == documents
    assert reader.tokens == sum(map(len, documents))
    assert np.concatenate(list(reader.blocks(7))).tolist() == [i for d in documents for i in d]
    assert reader.some().tolist() == [i for d in documents for i in d], "a small corpus is read whole"
    ends, last = [d[-1] for d in documents], reader.last().tolist()
    assert last == ends if len(ends) <= 16 else (last[0], last[-1], len(last)) == (ends[0], ends[-1], 16)


def test_offsets_are_right_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[i] * (1 + i % 5) for i in range(50)]
    write(tmp_path / "whole", documents)
    monkeypatch.setattr(index, "_CHUNK", 7)
    write(tmp_path / "chunked", documents)
    assert (tmp_path / "chunked.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_mindformers_reads_the_pair_and_writes_the_same_bytes(tmp_path: Path, mindformers_index, dtype: str) -> None:
    write(tmp_path / "ours", DOCUMENTS, dtype)
    builder = mindformers_index.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), getattr(np, dtype))
    for document in DOCUMENTS:
        builder.add_document(np.array(document, dtype), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    read = mindformers_index.IndexedDataset(str(tmp_path / "ours"))
    assert read.index.dtype == getattr(np, dtype)
    assert [read[i].tolist() for i in range(len(read))] == DOCUMENTS
    assert read.document_indices.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1, 65499, 65500, 65536, 200_000])
def test_the_dtype_is_megatrons(mindformers_index, vocab_size: int) -> None:
    assert choose_dtype("auto", vocab_size) == mindformers_index.DType.optimal_dtype(vocab_size).__name__


def test_a_forced_dtype_must_hold_the_largest_id() -> None:
    assert choose_dtype("uint16", 65536) == "uint16"
    assert choose_dtype("int32", 10) == "int32"
    with pytest.raises(DataError, match=r"--dtype uint16 holds ids up to 65,535, .* 65,537 ids"):
        choose_dtype("uint16", 65537)


def spoil(path: Path, offset: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)


# the header is 34 bytes: 9 magic, 8 version, 1 dtype, 8 sequences, 8 documents
@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (0, b"X", "not a Megatron index"),
        (9, b"\x02", "version 2"),
        (17, b"\x07", "dtype code 7"),
        (18, b"\x09", "by the counts in its header"),
        (34, b"\x00", "a document of the index has 0 tokens"),
        (34, b"\x04", "offsets of the documents do not agree"),
        (34 + 16 + 8, b"\x08", "offsets of the documents do not agree"),
        (34 + 16 + 32 + 8, b"\x02", "one sequence for each document"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, offset: int, value: bytes, why: str) -> None:
    write(tmp_path / "a", DOCUMENTS)
    IndexReader(tmp_path / "a")
    spoil(tmp_path / "a.idx", offset, value)
    with pytest.raises(BrokenIndexError, match=why):
        IndexReader(tmp_path / "a")


def test_documents_without_tokens_are_left_out(mindformers_index, tmp_path: Path) -> None:
    """Megatron's preprocessing adds an empty text as a document without a sequence; MindFormers reads sequences."""
    builder = mindformers_index.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for document in ([], DOCUMENTS[0], [], [], *DOCUMENTS[1:], []):
        builder.add_document(np.array(document, np.uint16), [len(document)] if document else [])
    builder.finalize(str(tmp_path / "a.idx"))
    reader = IndexReader(tmp_path / "a")
    assert [reader[number].tolist() for number in range(len(reader))] == DOCUMENTS
    assert map_lengths(tmp_path / "a").tolist() == [len(document) for document in DOCUMENTS]
    builder = mindformers_index.IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=np.uint16)
    builder.add_document(np.array([1, 2, 0, 0], np.uint16), [3, 1])
    builder.add_document(np.array([], np.uint16), [])
    builder.finalize(str(tmp_path / "b.idx"))
    with pytest.raises(BrokenIndexError, match="one sequence for each document"):
        IndexReader(tmp_path / "b")


@pytest.mark.parametrize(("suffix", "keep"), [(".bin", -1), (".bin", 0), (".idx", -1), (".idx", 20), (".idx", 0)])
def test_a_truncated_pair_is_refused(tmp_path: Path, suffix: str, keep: int) -> None:
    write(tmp_path / "a", DOCUMENTS)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BrokenIndexError):
        IndexReader(tmp_path / "a")


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.idx").unlink()
    with pytest.raises(DataError, match=r"a\.idx: there is no such file"):
        IndexReader(tmp_path / "a")


SETTINGS = {
    "seed": 1,
    "split": "1, 0, 0",
    "seq_length": 32,
    "eod_mask_loss": False,
    "reset_position_ids": False,
    "create_attention_mask": False,
    "reset_attention_mask": False,
    "create_compressed_eod_mask": False,
    "eod": 0,
    "pad": -1,
}


def samples(prefix: Path) -> list[str]:
    """Twenty samples as text, read through MindFormers."""
    from mindformers.dataset.dataloader.blended_megatron_dataloader import BlendedMegatronDatasetDataLoader

    loader = BlendedMegatronDatasetDataLoader(
        datasets_type="GPTDataset",
        sizes=[20, 0, 0],
        config={**SETTINGS, "data_path": ["1", str(prefix)]},
        column_names=["input_ids", "labels", "loss_mask", "position_ids"],
        shuffle=False,
        num_shards=1,
        shard_id=0,
    )
    coder = Coder(tokenizers.load(f"{prefix}_tokenizer").spec)
    rows = loader.create_dict_iterator(output_numpy=True, num_epochs=1)
    return [coder.decode(row["input_ids"].tolist()) for row in rows]


@pytest.mark.slow
def test_the_dataloader_serves_the_corpus_and_its_replacement(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "mindformers" not in sys.modules:
        monkeypatch.setenv("LOG_MF_PATH", str(tmp_path_factory.mktemp("mindformers-log")))
    source = tmp_path / "source.txt"
    monkeypatch.chdir(tmp_path)  # MindSpore drops log folders where it stands
    # the second corpus is shorter than the 20 samples of 32 tokens that were cached for the first
    for force, letters, count in ((False, "abcdefgh", 300), (True, "stuvwxyz", 20)):
        text = "".join(f"{letter}{number} " for number in range(count) for letter in letters)
        source.write_text(text)
        prepare(PrepareOptions(Corpus((str(source),)), tmp_path / "out", vocab_size=257, force=force))
        served = samples(tmp_path / "out")
        assert len(served) >= 20
        whole = (text + tokenizers.EOD_TOKEN) * 3  # samples run on from one epoch into the next
        assert all(sample in whole for sample in served)
        assert (tmp_path / "out" / "cache" / "GPTDataset_indices").exists()


@pytest.mark.parametrize("sequence_length", CORPORA)
def test_lengths_are_seeded_and_have_a_long_tail(sequence_length):
    sources = CORPORA[sequence_length]
    assert sum(source.share for source in sources) == pytest.approx(1)
    tokens = 20_000_000
    lengths = document_lengths(tokens, sources, 1)
    np.testing.assert_array_equal(lengths, document_lengths(tokens, sources, 1))
    assert not np.array_equal(lengths[:100], document_lengths(tokens, sources, 2)[:100])
    assert lengths.dtype == np.int32 and lengths.min() >= 2
    assert tokens <= lengths.sum() < 1.1 * tokens
    # most documents are short, most tokens are in documents far above the median
    assert np.median(lengths) < 1_500
    assert lengths[lengths > 5 * np.median(lengths)].sum() > 0.3 * lengths.sum()
    assert lengths.max() > 20_000


def test_an_index_holds_the_samples_asked_for():
    index = synthetic_index(64, 131_072, 3)
    assert len(index) >= 64
    assert segments_of(index, 0, 64).values.sum() == 64 * 131_072


def test_a_written_corpus_reads_back(tmp_path):
    lengths = document_lengths(50_000, CORPORA[4_096], 5)[:40]
    write_corpus(tmp_path / "corpus", lengths, 300, 7, seed=1)
    reader = IndexReader(tmp_path / "corpus")
    np.testing.assert_array_equal(reader.lengths, lengths)
    for document in range(len(reader)):
        tokens = reader[document]
        assert tokens[-1] == 7 and not (tokens[:-1] == 7).any()
        assert tokens.min() >= 0 and tokens.max() < 300


def test_a_learnable_corpus_has_ids_of_the_whole_vocabulary(tmp_path):
    """Ids of 16 bits began anew at 0, which ends a document, in a vocabulary of 131,072."""
    write_learnable(tmp_path / "v1.5", 131_072)
    reader = IndexReader(tmp_path / "v1.5")
    ids = np.concatenate(list(reader.blocks())).astype(np.int64)
    assert reader.dtype == np.int32 and ids.min() >= 1 and ids.max() > 65_536
    assert set((np.diff(ids) % 131_071).tolist()) == {1, 2, 3, 17}


@pytest.mark.parametrize(
    ("weights", "samples"),
    [((0.3, 7, 0.1, 0.2, 10, 1, 2, 1, 0.1, 0.3), 278), ((1,) * 900, 9000), ((0.9, 0.1), 2)],
)
def test_samples_are_dealt_as_mindformers_deals_them(weights, samples, monkeypatch):
    """It divides weights by their sum twice, which moves a sample; hundreds of corpora took minutes."""
    where, number = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
    helpers.build_blending_indices(where, number, normalize(normalize(weights)), len(weights), samples, False)
    taken = np.bincount(where, minlength=len(weights)).tolist()
    monkeypatch.setattr(Corpora, "size", lambda *_: samples)
    monkeypatch.setattr(Corpora, "held", lambda *_: taken)
    read, began = Corpora(tuple(taken), tuple(shares_of(weights)), 1, 0), time.process_time()
    assert read.too_small(samples) is None and read.spare(samples - 1, 1) == 1
    assert time.process_time() - began < 2


def test_corpora_without_weights_are_read_once_also_without_a_further_token():
    assert Corpora((100, 57), None, 10, 0).held(400) == [10, 5]
    assert Corpora((100, 57), None, 10, 1).held(400) == [9, 5]
    assert Corpora((100,), None, 10, 1).held(25) == [29], "three times"


def test_further_numbers_of_samples_of_a_blend_are_dealt_at_once():
    """Advice for a refused blend of nearly 100,000 samples tried many numbers, each from the first sample on."""
    read, began = Corpora((70_000, 35_000), (2 / 3, 1 / 3), 1, 0), time.process_time()
    first = read.too_small(99_000), time.process_time() - began
    assert [read.too_small(samples) for samples in range(98_980, 99_000)] == [None] * 20 == [first[0]] * 20
    assert time.process_time() - began < 5 * first[1]
