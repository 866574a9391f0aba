"""The command with a model that repeats itself, in the place of the process."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from launch.cli import tc3
from launch.generate import command
from launch.generate.command import choose, forward_recipe, sampling_of
from launch.generate.text import Sampling
from plugins.errors import CheckpointError, RecipeError
from plugins.sealed_checkpoint.plan import write_seal
from tests.tools.weights.test_merge import LORA, adapted, recipe_of
from tools.accuracy.reference.start import initial_weights
from tools.data.tokenizer import train
from tools.recipe.load import load_recipe
from tools.weights.convert_plan import KEPT, model_of
from tools.weights.hugging_face_names import to_mindformers
from tools.weights.merge import merge, plan_merge
from tools.weights.source import open_source

ROOT = Path(__file__).resolve().parents[3]
MINI = ROOT / "recipes" / "mini" / "pretrain.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the mini that saved steps 2 and 4, the later one cut short."""
    folder = tmp_path_factory.mktemp("run")
    weights = initial_weights(model_of(load_recipe(MINI)), 0)
    (folder / "recipe.yaml").write_text(f"base_config: {MINI}\n")
    for step in (2, 4):
        place = folder / "checkpoint" / f"iteration_{step:08d}"
        place.mkdir(parents=True)
        save_file(
            to_mindformers(weights, model_of(load_recipe(MINI))), place / "mini-model-0000000-0000001.safetensors"
        )
        write_seal(place, 0, 1, step)
    (folder / "checkpoint" / "iteration_00000004" / "mini-model-0000000-0000001.safetensors").write_bytes(b"cut")
    return folder


def test_of_a_run_it_takes_the_newest_whole_checkpoint(run, capsys):
    chosen = choose(run, None)
    assert (chosen.weights, chosen.source.step) == (run / "checkpoint" / "iteration_00000002", 2)
    assert (chosen.sizes["seq_length"], chosen.sizes["vocab_size"]) == (128, 2048)
    assert "skipping checkpoint" in capsys.readouterr().err


def test_an_iteration_knows_the_recipe_of_its_run(run):
    assert choose(run / "checkpoint" / "iteration_00000002", None).sizes["seq_length"] == 128


def test_a_recipe_of_another_model_is_refused(run, tmp_path):
    smaller = tmp_path / "smaller.yaml"
    smaller.write_text(f"base_config: {MINI}\nmodel:\n  model_config:\n    num_hidden_layers: 2\n")
    with pytest.raises(
        CheckpointError, match=r"holds 2,170,752 weights, .*smaller.yaml has 1,699,360: with --recipe name"
    ):
        choose(run / "checkpoint" / "iteration_00000002", smaller)


def test_a_recipe_whose_routers_would_leave_the_biases_out_is_refused(run, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(f"base_config: {MINI}\nmodel: {{model_config: {{moe_router_enable_expert_bias: False}}}}\n")
    with pytest.raises(RecipeError, match=r"moe_router_enable_expert_bias: the routers in \S+02 have biases"):
        choose(run / "checkpoint" / "iteration_00000002", other)


def test_settings_that_the_run_did_not_train_with_are_said(run, tmp_path, capsys):
    (run / "attempts").mkdir()
    other = tmp_path / "other.yaml"
    other.write_text(f"base_config: {MINI}\nmodel:\n  model_config:\n    rope_theta: 5.e+4\n")
    choose(run / "checkpoint" / "iteration_00000002", MINI)
    assert not capsys.readouterr().err
    choose(run / "checkpoint" / "iteration_00000002", other)
    assert (
        "rope_theta was 10000.0 and is 50000.0 now. The text is not that of the trained model"
        in capsys.readouterr().err
    )


def test_adapters_are_taken_with_a_recipe_that_has_them_and_only_with_it(tmp_path):
    """They were counted as weights of the model, and the run's own recipe was said to be that of another model."""
    recipe, plain = recipe_of(tmp_path / "lora", {"plugins": {"lora": LORA}}), recipe_of(tmp_path / "plain")
    checkpoint, _ = adapted(tmp_path / "run" / "checkpoint", recipe)
    assert forward_recipe(choose(checkpoint, recipe).recipe)["plugins"]["lora"] == LORA
    (checkpoint.parents[1] / "recipe.yaml").write_text(f"base_config: {recipe}\n")
    wrong = (
        ({"alpha": 8}, r"alpha/\S+: plugins\.lora\.alpha: .* = 3, .* by 4;"),
        ({"targets": ["*.linear_qkv"]}, r"linear_proj\.lora_A"),
    )
    for own, words in wrong:
        other = recipe_of(tmp_path / next(iter(own)), {"plugins": {"lora": LORA | own}})
        with pytest.raises(CheckpointError, match=words):
            choose(checkpoint, other)
    with pytest.raises(CheckpointError, match=r"LoRA adapters, but \S+plain/recipe.yaml does not have plugins.lora"):
        choose(checkpoint, plain)


def test_merged_weights_are_taken_with_the_recipe_that_trained_their_adapters(tmp_path, capsys):
    """Its adapters are in the weights; the model was built with adapters, which the weights lack."""
    recipe = recipe_of(tmp_path / "lora", {"plugins": {"lora": LORA}})
    source = open_source(adapted(tmp_path / "run" / "checkpoint", recipe)[0])
    merge(source, tmp_path / "merged", plan_merge(source, recipe, 10**9))
    assert "lora" not in forward_recipe(choose(tmp_path / "merged", recipe).recipe)["plugins"]
    assert capsys.readouterr().err == ""
    (tmp_path / "merged" / KEPT).unlink()  # as of the weights before the training
    choose(tmp_path / "merged", recipe)
    assert "merged has no adapters, so plugins.lora of the recipe is left out" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(run):
    with pytest.raises(CheckpointError, match="iteration_00000004"):
        choose(run / "checkpoint" / "iteration_00000004", None)


def test_a_full_size_model_is_refused_with_its_size(tmp_path):
    save_file({"model.norm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        RecipeError, match=r"10\d,\d{3},\d{3},\d{3} parameters \(4\d\d GB in float32\).*weights convert"
    ):
        choose(tmp_path, ROOT / "recipes" / "telechat3_105b" / "finetune_4k.yaml")


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
    chosen = SimpleNamespace(recipe={}, weights="weights", source=source, sizes={"seq_length": 8, "vocab_size": 300})
    monkeypatch.setattr(command, "choose", lambda path, recipe: chosen)
    monkeypatch.setattr(command, "forward_recipe", lambda recipe: recipe)
    monkeypatch.setattr(command, "answering_model", model)
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


@pytest.mark.parametrize("options", [[], ["--temperature", "1"]])
def test_a_model_that_computes_nan_says_nothing(say, monkeypatch, options):
    """The likeliest id was 0, the end of a document; drawn at random, an id that no tokenizer has."""

    @contextmanager
    def broken(recipe, weights):
        yield lambda ids: np.full(300, np.nan)

    monkeypatch.setattr(command, "answering_model", broken)
    result = say("x", "--prompt", "the", *options)
    assert isinstance(result.exception, CheckpointError) and "logits are not numbers (NaN)" in str(result.exception)


def test_a_tokenizer_of_another_model_is_refused(say, monkeypatch):
    monkeypatch.setattr(
        command,
        "choose",
        lambda *given: SimpleNamespace(recipe={}, weights="w", sizes={"seq_length": 8, "vocab_size": 100}),
    )
    result = say("", "--prompt", "the")
    assert result.exit_code and "name the model's own tokenizer" in str(result.exception)


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
