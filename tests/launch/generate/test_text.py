"""Text from ids that come one by one, and which tokenizer they are of."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.generate.text import Spoken, harmless, tokenizer_of
from plugins.errors import DataError
from tools.data.tokenizer import Coder, train
from tools.recipe.load import Recipe

WORDS = ["the expert sends a token", "größer ≥ 3", "def read(self):\n    return 0\n", "日本語 and 🙂🙂"]


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    return Coder(train(WORDS, 300, tmp_path_factory.mktemp("tokenizer") / "t").spec)


@given(text=st.text(max_size=40), before=st.text(max_size=10))
@settings(max_examples=100)
def test_the_pieces_are_the_text(coder, text, before):
    spoken, ids = Spoken(coder, coder.encode([before])[0]), coder.encode([text])[0]
    pieces = [spoken.push(token) for token in ids]
    assert "".join(pieces) + spoken.rest() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(ids=st.lists(st.integers(0, 299), max_size=30))
@settings(max_examples=100)
def test_ids_that_are_no_text_are_said_as_they_decode(coder, ids):
    spoken = Spoken(coder, [])
    assert "".join(spoken.push(token) for token in ids) + spoken.rest() == coder.decode(ids)


def test_half_a_character_waits(coder):
    ids = coder.encode(["é"])[0]
    spoken = Spoken(coder, [])
    assert len(ids) == 2 and [spoken.push(token) for token in ids] == ["", "é"]


def test_a_terminal_is_told_nothing_but_text():
    assert harmless("a\tb\n\x1b[31mc\r\x07\x9b") == "a\tb\n\ufffd[31mc\ufffd\ufffd\ufffd"


@pytest.fixture
def corpus(tmp_path):
    """A prefix whose sidecar names its tokenizer."""
    found = train(WORDS, 280, tmp_path / "c_tokenizer")
    tokenizer = {"path": "c_tokenizer", "fingerprint": found.fingerprint, "trust_remote_code": False}
    sidecar = {
        "format": "tc3-data-1", "split": "train", "documents": 1, "tokens": 1, "dtype": "uint16", "bin_sha256": "",
        "vocab_size": 280, "eod_id": 0, "eod_token": "<|endoftext|>", "tokenizer": tokenizer,
        "sources": [{"input": "x"}], "jsonl_key": "text", "globs": [], "held_out": {"fraction": 0.0, "seed": 1},
    }  # fmt: skip
    (tmp_path / "c.json").write_text(json.dumps(sidecar))
    return tmp_path / "c"


def recipe_of(*prefixes):
    return Recipe({"train_dataset": {"data_loader": {"config": {"data_path": list(prefixes)}}}})


def test_the_corpus_names_it(corpus, tmp_path):
    found = tokenizer_of(recipe_of("1", str(corpus)), tmp_path / "weights", None)
    assert found.spec.folder == str(tmp_path / "c_tokenizer") and found.eod_id == 0


def test_one_that_is_given_or_lies_beside_the_weights_goes_first(corpus, tmp_path):
    for name in ("given", "weights"):
        train(WORDS, 270, tmp_path / name)
    recipe = recipe_of("1", str(corpus))
    assert tokenizer_of(recipe, tmp_path / "weights", None).spec.folder == str(tmp_path / "weights")
    assert tokenizer_of(recipe, tmp_path / "weights", tmp_path / "given").spec.folder == str(tmp_path / "given")


def test_another_tokenizer_in_its_place_is_refused(corpus, tmp_path):
    shutil.rmtree(tmp_path / "c_tokenizer")
    train(WORDS, 270, tmp_path / "c_tokenizer")
    with pytest.raises(DataError, match="c_tokenizer: is not the tokenizer that wrote"):
        tokenizer_of(recipe_of("1", str(corpus)), tmp_path / "weights", None)


def test_no_tokenizer_is_asked_for(tmp_path):
    with pytest.raises(DataError, match=r"gone.json, which names .* is not here; name the tokenizer's folder"):
        tokenizer_of(recipe_of("1", str(tmp_path / "gone")), tmp_path, None)
    with pytest.raises(DataError, match="does not say which tokenizer"):
        tokenizer_of(Recipe({}), tmp_path, None)


def test_instructions_name_it_in_their_handler(corpus, tmp_path):
    """Before the corpus of a recipe that they are the child of."""
    train(WORDS, 270, tmp_path / "t")
    recipe = recipe_of("1", str(corpus))
    handlers = [{"type": "AlpacaInstructDataHandler", "tokenizer": {"pretrained_model_dir": str(tmp_path / "t")}}]
    recipe["train_dataset"]["data_loader"]["handler"] = handlers
    assert tokenizer_of(recipe, tmp_path, None).spec.folder == str(tmp_path / "t")
