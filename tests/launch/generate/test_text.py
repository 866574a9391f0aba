"""Text from ids that come one by one, and which tokenizer they are of."""

import json
import math
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from launch.generate.text import Sampling, Spoken, draw, harmless, likeliest, probabilities, tokenizer_of
from plugins.errors import DataError
from tools.data.tokenizer import Coder, train
from tools.recipe.load import Recipe

# few different values, so that ties are common, and some far apart
values = st.one_of(st.sampled_from([-3.0, 0.0, 0.5, 2.0]), st.floats(-40, 40, width=32))
logits_of = arrays(np.float32, st.integers(1, 24), elements=values)
ways = st.builds(
    Sampling, temperature=st.floats(0.05, 20), top_k=st.integers(0, 30), top_p=st.floats(0.01, 1.0, exclude_min=True)
)


def slow(logits, how):
    """Plain Python, token by token: id -> chance; and how near the sum of likelier tokens came to top_p."""
    scaled = {token: float(logit) / how.temperature for token, logit in enumerate(logits)}
    most = max(scaled.values())
    likely = sorted(scaled, key=lambda token: (-logits[token], token))
    if how.top_k:
        likely = likely[: how.top_k]
    weights = {token: math.exp(scaled[token] - most) for token in likely}
    total = math.fsum(weights.values())
    kept, before, near = [], 0.0, 1.0
    for token in likely:
        near = min(near, abs(before - how.top_p))
        if before >= how.top_p and kept and how.top_p < 1:
            break
        kept.append(token)
        before += weights[token] / total
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}, near


@given(logits_of, ways)
@settings(max_examples=150)
def test_chances_are_those_of_a_slow_count(logits, how):
    want, near = slow(logits, how)
    got = probabilities(logits, how)
    assert got.shape == logits.shape and got.dtype == np.float64
    assert abs(got.sum() - 1) < 1e-12
    if near > 1e-9 or how.top_p == 1:  # else rounding decides whether a token is the last that is needed
        assert {int(token) for token in np.flatnonzero(got)} == {token for token, share in want.items() if share > 0}
        for token, share in want.items():
            assert math.isclose(got[token], share, rel_tol=1e-9, abs_tol=1e-300)


@given(logits_of, ways, st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_a_draw_has_a_chance_and_a_seed_repeats_it(logits, how, seed):
    drawn = draw(logits, how, np.random.default_rng(seed))
    assert probabilities(logits, how)[drawn] > 0
    assert drawn == draw(logits, how, np.random.default_rng(seed))


@given(logits_of, st.floats(0.05, 20))
def test_one_token_to_choose_from_is_the_likeliest(logits, temperature):
    random = np.random.default_rng(0)
    assert draw(logits, Sampling(temperature, top_k=1), random) == likeliest(logits)
    assert draw(logits, Sampling(temperature, top_p=1e-9), random) == likeliest(logits)


def test_of_equal_logits_the_first_is_the_likeliest():
    assert likeliest(np.array([0.0, 2.0, 2.0, 1.0])) == 1


def test_draws_follow_their_chances():
    logits, how = np.log([0.5, 0.3, 0.15, 0.05]), Sampling(top_p=0.9)
    random = np.random.default_rng(3)
    counts = np.bincount([draw(logits, how, random) for _ in range(20_000)], minlength=4) / 20_000
    assert counts == pytest.approx(np.array([0.5, 0.3, 0.15, 0]) / 0.95, abs=0.012)


@pytest.mark.parametrize(
    ("how", "want"),
    [
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.5), [1, 0, 0, 0]),
        (Sampling(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Sampling(temperature=0.5), np.square([0.5, 0.3, 0.15, 0.05]) / 0.365),
        (Sampling(top_k=2, top_p=0.7), [0.625, 0.375, 0, 0]),  # shares of what top-k left
    ],
)
def test_by_hand(how, want):
    assert probabilities(np.log(np.array([0.5, 0.3, 0.15, 0.05])), how) == pytest.approx(want)


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
    with pytest.raises(DataError, match="c_tokenizer: this is not the tokenizer with which"):
        tokenizer_of(recipe_of("1", str(corpus)), tmp_path / "weights", None)


def test_no_tokenizer_is_asked_for(tmp_path):
    with pytest.raises(DataError, match=r"gone.json, which names .* does not exist; give the tokenizer's folder"):
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
