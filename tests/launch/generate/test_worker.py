"""The same tensors, wherever they lie; and the recipe that they are read for."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.generate.command import forward_recipe
from launch.generate.worker import reader
from plugins.errors import CheckpointError
from tests.tools.checkpoint.saved import Saved
from tools.accuracy.reference.start import initial_weights
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_names import to_mindformers

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "tests" / "training" / "tiny.yaml"


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(TINY)


@pytest.fixture(scope="module")
def theirs(recipe):
    """Under Hugging Face's names."""
    return initial_weights(model_of(recipe), 0)


@pytest.fixture(scope="module")
def ours(recipe, theirs):
    return to_mindformers(theirs, model_of(recipe))


def test_a_hugging_face_folder_is_read_under_our_names(recipe, theirs, ours, tmp_path):
    save_file(theirs, tmp_path / "model.safetensors")
    read = reader(tmp_path, recipe)
    for name, array in ours.items():
        np.testing.assert_array_equal(read(name), array)


def test_bfloat16_becomes_float32(recipe, ours, tmp_path):
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in ours.items()}
    save_file(half, tmp_path / "weights-model-0000000-0000001.safetensors")
    read = reader(tmp_path, recipe)
    for name, array in half.items():
        assert read(name).dtype == np.float32
        np.testing.assert_array_equal(read(name), array.astype(np.float32))


def test_slices_of_ranks_are_put_together(recipe, ours, tmp_path):
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    saved = Saved(tmp_path / "iteration_00000002", 2)
    saved.put(name, ours[name], (1, 2), [[0], [1]])
    np.testing.assert_array_equal(reader(saved.write(), recipe)(name), ours[name])


def test_what_is_missing_is_named(recipe, ours, tmp_path):
    save_file({"output_layer.weight": ours["output_layer.weight"]}, tmp_path / "model-0000000-0000001.safetensors")
    with pytest.raises(CheckpointError, match=r"the weight decoder\.final_layernorm\.weight of the recipe"):
        reader(tmp_path, recipe)("decoder.final_layernorm.weight")


def plain(recipe):
    return forward_recipe(recipe)["model"]["model_config"]


@pytest.mark.parametrize("name", ["telechat3_438b/context_128k", "telechat3_105b/pretrain_4k", "xing4_29b/pretrain_4k"])
def test_a_mini_of_many_workers_is_cut_down_to_one_process_in_float32(name):
    mini = load_mini(ROOT / "recipes" / f"{name}.yaml", workers=4)
    cut = forward_recipe(mini)
    assert cut["use_parallel"] is False and cut["context"]["device_target"] == "CPU"
    assert list(cut["plugins"]) == (["hyper_connections"] if name.startswith("xing4") else []), "the model itself"
    assert plain(mini)["compute_dtype"] == "float32" and plain(mini)["num_nextn_predict_layers"] == 0
    assert mini["parallel"]["parallel_mode"] == 1, "the recipe itself stays"


def test_sizes_and_scales_of_the_model_stay(recipe):
    whole, cut = recipe["model"]["model_config"], plain(recipe)
    changed = {key for key in whole if whole[key] != cut[key]}
    assert changed == {"batch_size", "num_nextn_predict_layers"}
