"""The number of a checkpoint's weights, from what MindFormers writes beside them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.resume.checkpoint_model import check_model, weights_in
from plugins.errors import CheckpointError
from tests.training.runs import ROOT
from tools.recipe.load import load_recipe

SHAPES = {
    "decoder.layers.0.mlp.linear_fc1.weight": [64, 8],
    "decoder.layers.1.mlp.experts.weight1": [4, 8, 16],
    "decoder.layers.0.self_attention.linear_q.bias": [64],
}
OTHERS = {  # moments, a pipeline's sums of gradients, a counter, a router's balance
    "adam_m.decoder.layers.0.mlp.linear_fc1.weight": [64, 8],
    "adam_v.decoder.layers.0.mlp.linear_fc1.weight": [64, 8],
    "accu_grads.decoder.layers.0.mlp.linear_fc1.weight": [64, 8],
    "accu_grads.decoder.layers.1.mlp.experts.weight1": [4, 8, 16],
    "global_step": [1],
    "decoder.layers.1.mlp.router.expert_bias": [4],
}
WEIGHTS = 64 * 8 + 4 * 8 * 16 + 64


def of_ranks(folder, shapes):
    """What several ranks leave: their shapes in one file."""
    shapes = {name: {"global_shape": shape} for name, shape in shapes.items()}
    (folder / "metadata.json").write_text(json.dumps({"state_dict_metadata": shapes}))


def test_weights_alone_are_counted(tmp_path):
    of_ranks(tmp_path, {**SHAPES, **OTHERS})
    assert weights_in(tmp_path) == WEIGHTS


def test_one_process_has_its_shapes_in_its_file(tmp_path):
    arrays = {name: np.zeros(shape, np.float32) for name, shape in {**SHAPES, **OTHERS}.items()}
    save_file(arrays, tmp_path / "x-model-0000000-0000001.safetensors")
    assert weights_in(tmp_path) == WEIGHTS


def test_another_number_is_another_model(tmp_path):
    of_ranks(tmp_path, SHAPES)
    with pytest.raises(CheckpointError, match=r"holds 1,088 weights, the recipe's model has [\d,]+: a checkpoint of"):
        check_model(load_recipe(ROOT / "recipes/mini/pretrain.yaml"), tmp_path)


def test_what_does_not_say_is_not_judged(tmp_path):
    assert weights_in(tmp_path) is None
    (tmp_path / "metadata.json").write_text("{")
    assert weights_in(tmp_path) is None
    check_model(load_recipe(ROOT / "recipes/mini/pretrain.yaml"), tmp_path)
