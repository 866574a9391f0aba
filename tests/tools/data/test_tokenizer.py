from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers as hugging_face
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import DataError
from tools.data import tokenizer as tokenizers
from tools.data.tokenizer import EOD_TOKEN, SMALLEST_VOCAB, Coder, Tokenizer


def word_level(folder: Path, words: list[str], truncate: bool = False, **settings: str) -> Path:
    """A tokenizer that loses text: lower case, words at white space, [UNK] for the rest."""
    backend = hugging_face.Tokenizer(
        hugging_face.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    backend.normalizer = hugging_face.normalizers.Lowercase()
    backend.pre_tokenizer = hugging_face.pre_tokenizers.Whitespace()
    if truncate:
        backend.enable_truncation(3)
        backend.enable_padding(length=5)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.just(f"a{EOD_TOKEN}b"))
def test_byte_level_bpe_keeps_any_text_and_never_invents_an_end(trained: Tokenizer, text: str) -> None:
    coder = Coder(trained.spec)
    ids = coder.encode([text])[0]
    assert coder.decode(ids) == text
    assert trained.eod_id not in ids


def test_training_gives_the_same_files_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Path(__file__).read_text()] * 3
    tokenizers.train(texts, 600, tmp_path / "a")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    tokenizers.train(iter(texts), 600, tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_trained_tokenizer_loads_in_transformers_with_the_same_ids(trained: Tokenizer) -> None:
    loaded = tokenizers.load(trained.spec.folder)
    assert (loaded.vocab_size, loaded.eod_id, loaded.eod_token) == (300, 0, EOD_TOKEN)
    assert loaded.lossless and trained.lossless
    assert loaded.fingerprint == trained.fingerprint
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(trained.spec.folder, local_files_only=True)
    text = "def naïve():\n    return '☕'  "
    assert theirs.eos_token_id == 0
    assert theirs(text, add_special_tokens=False)["input_ids"] == Coder(trained.spec).encode([text])[0]
    assert theirs.decode(Coder(trained.spec).encode([text])[0]) == text


def test_a_small_corpus_gives_a_smaller_vocabulary_and_too_small_a_size_is_refused(tmp_path: Path) -> None:
    assert tokenizers.train(["ab ab"], 5000, tmp_path / "a").vocab_size < 300
    assert tokenizers.train(["ab ab"], SMALLEST_VOCAB, tmp_path / "b").vocab_size == SMALLEST_VOCAB
    with pytest.raises(DataError, match=r"--vocab-size 256 is too small.*257"):
        tokenizers.train(["ab"], 256, tmp_path / "c")


def test_a_tokenizer_that_loses_text_is_known_as_such(tmp_path: Path) -> None:
    loaded = tokenizers.load(word_level(tmp_path / "t", ["[UNK]", "</s>", "fox"], eos_token="</s>"))
    assert not loaded.lossless
    assert (loaded.eod_id, loaded.vocab_size) == (1, 3)
    assert Coder(loaded.spec).encode(["Fox dog FOX"]) == [[2, 0, 2]]


def test_truncation_and_padding_stored_in_a_tokenizer_do_not_touch_documents(tmp_path: Path) -> None:
    loaded = tokenizers.load(word_level(tmp_path / "t", ["[UNK]", "</s>", "fox"], truncate=True, eos_token="</s>"))
    assert Coder(loaded.spec).encode(["fox " * 9, "fox"]) == [[2] * 9, [2]]


def test_a_tokenizer_without_a_known_end_is_refused(tmp_path: Path) -> None:
    folder = word_level(tmp_path / "t", ["[UNK]", "<end>", "fox"])
    with pytest.raises(DataError, match=r"has no eos_token.*--eod-token"):
        tokenizers.load(folder)
    with pytest.raises(DataError, match=r"'<edn>' is not in its vocabulary \(did you mean '<end>'\?\)"):
        tokenizers.load(folder, "<edn>")
    assert tokenizers.load(folder, "<end>").eod_id == 1


def test_more_than_65535_ids_are_counted(tmp_path: Path) -> None:
    folder = word_level(tmp_path / "t", ["[UNK]", "</s>"] + [f"w{i}" for i in range(70_000)], eos_token="</s>")
    assert tokenizers.load(folder).vocab_size == 70_002


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_folder_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match=r"not a tokenizer that transformers can load") as error:
        tokenizers.load(folder)
    assert len(str(error.value)) < 300 + len(str(folder)), "transformers lists hundreds of models"
    with pytest.raises(DataError, match=r"nowhere: there is no such folder"):
        tokenizers.load(tmp_path / "nowhere")


def test_a_tokenizer_that_is_code_runs_only_on_demand(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(DataError, match="--trust-remote-code"):
        tokenizers.load(folder)


def test_a_slow_tokenizer_works(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>"}')
    loaded = tokenizers.load(folder)
    assert loaded.spec.backend is None and not loaded.lossless
    ids = Coder(loaded.spec).encode(["a</s>é"])[0]
    assert ids == [3 + byte for byte in "a</s>é".encode()]
    assert loaded.eod_id not in ids
