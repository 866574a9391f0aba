"""Which weights, which recipe, and what is refused before a process starts."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.generate.chosen import choose
from plugins.errors import CheckpointError, RecipeError
from plugins.sealed_checkpoint.plan import write_seal
from tools.accuracy.reference.start import initial_weights
from tools.recipe.load import load_recipe
from tools.weights.convert.plan import model_of
from tools.weights.hugging_face.names import to_mindformers

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
    assert (chosen.length, chosen.vocabulary) == (128, 2048)
    assert "skipping checkpoint" in capsys.readouterr().err


def test_an_iteration_knows_the_recipe_of_its_run(run):
    assert choose(run / "checkpoint" / "iteration_00000002", None).length == 128


def test_a_recipe_of_another_model_is_refused(run, tmp_path):
    smaller = tmp_path / "smaller.yaml"
    smaller.write_text(f"base_config: {MINI}\nmodel:\n  model_config:\n    num_hidden_layers: 2\n")
    with pytest.raises(
        CheckpointError, match=r"holds 2,170,752 weights, .*smaller.yaml has 1,699,360: name the recipe"
    ):
        choose(run / "checkpoint" / "iteration_00000002", smaller)


def test_a_damaged_checkpoint_is_refused(run):
    with pytest.raises(CheckpointError, match="iteration_00000004"):
        choose(run / "checkpoint" / "iteration_00000004", None)


def test_a_full_size_model_is_refused_with_its_size(tmp_path):
    save_file({"model.norm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(RecipeError, match=r"10\d,\d{3},\d{3},\d{3} parameters, 4\d\d GB in float32.*weights convert"):
        choose(tmp_path, ROOT / "recipes" / "telechat3_105b" / "finetune_4k.yaml")
