"""Weights of a dense model with YaRN, as the public 36B: converted there and back, and what they compute."""

import json

import pytest
from safetensors.numpy import save_file

from plugins.errors import CheckpointError, RecipeError
from tools.accuracy.reference.start import initial_weights
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.weights.convert import convert
from tools.weights.convert_plan import model_of, prepare
from tools.weights.hugging_face_config import check_config, config_of
from tools.weights.source import open_source

RECIPE = "recipes/telechat3_36b/context_32k.yaml"
ORIGINAL, LENGTH = 32, 128  # of the mini: tokens before the extension, and after it
PUBLIC = {
    "rope_type": "telechat3-yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
STANDARD = {"plugins": {"yarn": {"attention_factor": "standard"}}}
ROPE = {"position_embedding_type": "rope", "rope_scaling": None}
PLAIN = {"plugins": {"yarn": False}, "model": {"model_config": ROPE}}


def recipe_of(folder, change=None):
    """The mini of the 36B at 32K, in a file that may change it."""
    folder.mkdir(exist_ok=True)
    dump_recipe(dict(load_mini(RECIPE)), folder / "mini.yaml")
    (folder / "recipe.yaml").write_text(json.dumps({"base_config": "./mini.yaml", **(change or {})}))
    return folder / "recipe.yaml"


def public(folder, recipe, scaling=PUBLIC, **config):
    """A folder as the public one: one file, and a config.json that says how positions are stretched."""
    sizes = model_of(load_recipe(recipe))
    folder.mkdir()
    save_file(initial_weights(sizes, 3), folder / "model.safetensors", {"format": "pt"})
    content = {**config_of(sizes, "float32"), "rope_scaling": scaling, **config}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def converted(source, target, recipe):
    opened = open_source(source)
    conversion = prepare(opened, recipe, None, int(5e9))
    convert(opened, target, conversion.plan, conversion.sizes)
    return target


def test_there_and_back_to_the_file(tmp_path):
    recipe = recipe_of(tmp_path / "recipe")
    theirs = public(tmp_path / "hf", recipe)
    back = converted(converted(theirs, tmp_path / "ms", recipe), tmp_path / "back", recipe)
    assert (back / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    written = json.loads((back / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("telechat3", ["TeleChat3ForCausalLM"])
    assert written["rope_scaling"] == PUBLIC and written["max_position_embeddings"] == LENGTH


def test_standard_yarn_is_written_for_llama(tmp_path):
    config = config_of(model_of(load_recipe(recipe_of(tmp_path, STANDARD))), "float32")
    assert (config["model_type"], config["rope_scaling"]) == ("llama", PUBLIC | {"rope_type": "yarn"})


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        (None, "rope_scaling is None, but the recipe has {'rope_type': 'telechat3-yarn'"),
        (PUBLIC | {"factor": 8.0}, "rope_scaling.factor is 8.0, but the recipe has 4.0"),
        (PUBLIC | {"beta_fast": 16}, "rope_scaling.beta_fast is 16, but the recipe has 32.0"),
        (PUBLIC | {"mscale": 2.0}, "rope_scaling.attention_factor is 1.19"),
        (PUBLIC | {"original_max_position_embeddings": 64}, "rope_scaling.original_max_position_embeddings is 64"),
        (PUBLIC | {"rope_type": "yarn"}, "rope_scaling.attention_factor is 1.138"),
        (PUBLIC | {"truncate": False}, "rope_scaling.truncate is False"),
        ({"type": "linear", "factor": 4.0}, "'linear', 'factor': 4.0}, but the recipe has"),
        ({"rope_type": "dynamic", "factor": 4.0}, "'dynamic', 'factor': 4.0}, but the recipe has"),
        ({"rope_type": "llama3", "factor": 4.0}, "'llama3', 'factor': 4.0}, but the recipe has"),
        ("yarn", "rope_scaling is 'yarn'"),
        ({"rope_type": "telechat3-yarn"}, "rope_scaling.factor is None"),
    ],
)
def test_positions_that_the_recipe_does_not_compute_are_refused(tmp_path, scaling, says):
    recipe = recipe_of(tmp_path / "recipe")
    theirs = public(tmp_path / "hf", recipe, scaling)
    with pytest.raises(CheckpointError) as refused:
        check_config(theirs, model_of(load_recipe(recipe)))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "scaling",
    [
        PUBLIC | {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"type": "telechat3-yarn", "factor": 4, "original_max_position_embeddings": ORIGINAL},  # betas by default
        PUBLIC | {"rope_type": "yarn", "attention_factor": 1.0970406},  # as transformers' Llama can say it
    ],
)
def test_the_same_positions_in_other_words_are_taken(tmp_path, scaling):
    recipe = recipe_of(tmp_path / "recipe")
    assert check_config(public(tmp_path / "hf", recipe, scaling), model_of(load_recipe(recipe)))


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        (PUBLIC, "plugins.yarn: {attention_factor: telechat3}"),
        (PUBLIC | {"rope_type": "yarn"}, "plugins.yarn: {attention_factor: standard}"),
        (
            {"rope_type": "llama3", "factor": 8.0},
            "the training graph has plain RoPE and, with plugins.yarn, yarn and tele",
        ),
    ],
)
def test_a_recipe_with_plain_positions_says_what_to_write(tmp_path, scaling, says):
    recipe = recipe_of(tmp_path / "recipe", PLAIN)
    theirs = public(tmp_path / "hf", recipe, scaling)
    with pytest.raises(CheckpointError) as refused:
        check_config(theirs, model_of(load_recipe(recipe)))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "config", [{}, {"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {"rope_type": "default"}}]
)
def test_plain_positions_have_three_words(tmp_path, config):
    plain = recipe_of(tmp_path / "recipe", PLAIN)
    assert check_config(public(tmp_path / "hf", plain, None, **config), model_of(load_recipe(plain)))
    with pytest.raises(CheckpointError, match="rope_scaling is None, but the recipe has"):
        check_config(tmp_path / "hf", model_of(load_recipe(recipe_of(tmp_path / "other"))))


def test_a_factor_that_config_json_cannot_say_is_refused(tmp_path):
    change = {"model": {"model_config": {"rope_scaling": {"mscale": 0.7}}}}
    with pytest.raises(RecipeError, match=r"rope_scaling\.mscale: .* has no word for it"):
        model_of(load_recipe(recipe_of(tmp_path, change)))
