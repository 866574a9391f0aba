"""The command with a model that repeats itself, in the place of the process."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from launch.cli import tc3
from launch.generate import command
from launch.generate.command import sampling_of
from launch.generate.sampling import Sampling
from tools.data.tokenizer import train

TEXT = ["the expert sends the token to the next expert"]


@pytest.fixture
def say(tmp_path, monkeypatch):
    """Run `tc3 generate` on a model of 300 ids that says what is scripted."""
    tokenizer = train(TEXT, 280, tmp_path / "t")
    script: list[int] = []

    @contextmanager
    def model(recipe, weights):
        yield lambda ids: np.eye(300)[script.pop(0)] * 9

    source = SimpleNamespace(step=7)
    chosen = SimpleNamespace(recipe={}, weights="weights", source=source, length=8, vocabulary=300)
    monkeypatch.setattr(command, "choose", lambda path, recipe: chosen)
    monkeypatch.setattr(command, "forward_recipe", lambda recipe: recipe)
    monkeypatch.setattr(command, "model_of", model)
    monkeypatch.setattr(command, "tokenizer_of", lambda *given: tokenizer)

    def run(text, *options, then=()):
        script[:] = [*command.Coder(tokenizer.spec).encode([text])[0], *then]
        return CliRunner().invoke(tc3, ["generate", "weights", *options])

    return run


def test_prompt_and_text_go_to_stdout_and_the_rest_to_stderr(say):
    result = say(" expert", "--prompt", "the", "--tokens", "99", then=[0])
    assert result.stdout == "the expert\n"
    assert "(weights, step 7: " in result.stderr and "1 of 1 came to the end of a document" in result.stderr


def test_json_has_ids_and_why_it_ended(say):
    content = json.loads(say(" expert the expert", "--prompt", "the", "--json", "--tokens", "2").stdout)
    (text,) = content["texts"]
    assert (content["step"], content["sampling"], text["prompt"], text["ended"]) == (7, None, "the", "tokens")
    assert len(text["ids"]) == 2 and text["prompt_tokens"] >= 1


def test_a_prompt_longer_than_the_window_is_said(say):
    assert "the model sees the last 8" in say("x", "--prompt", "the expert " * 9, "--tokens", "1").stderr


def test_no_prompt_at_all_begins_a_document(say):
    assert json.loads(say("the", "--prompt", "", "--json", "--tokens", "1").stdout)["texts"][0]["prompt_tokens"] == 1


def test_ids_without_text_are_never_said(say):
    """The model has 300 ids, the tokenizer fewer: the likeliest of those that are text is taken."""
    result = say("", "--prompt", "the", "--tokens", "1", "--json", then=[299])
    assert json.loads(result.stdout)["texts"][0]["ids"] == [0]


def test_a_tokenizer_of_another_model_is_refused(say, monkeypatch):
    monkeypatch.setattr(command, "choose", lambda *given: SimpleNamespace(recipe={}, weights="w", vocabulary=100))
    result = say("", "--prompt", "the")
    assert result.exit_code and "not its tokenizer" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ((None, None, None, None), None),
        ((0.0, None, None, None), None),
        ((0.7, None, None, None), Sampling(0.7)),
        ((None, 5, None, None), Sampling(1.0, 5)),
        ((None, None, 0.9, None), Sampling(1.0, 0, 0.9)),
        ((None, None, None, 3), Sampling()),
    ],
)
def test_chance_is_asked_for(options, how):
    assert sampling_of(*options) == how
