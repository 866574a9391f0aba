"""Adapters merged into the weights of a checkpoint, and what is no checkpoint with the recipe's adapters."""

import numpy as np
import pytest
from click.testing import CliRunner

from launch.cli import tc3
from plugins.errors import CheckpointError, RecipeError
from plugins.lora.plan import Settings, adapters_of
from plugins.sealed_checkpoint.plan import fault, write_seal
from tests.tools.checkpoint.saved import Saved
from tests.tools.weights.test_yarn import converted, public, recipe_of
from tools.accuracy.reference.start import initial_weights
from tools.checkpoint.stored import read_whole
from tools.recipe.load import load_recipe
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_names import to_mindformers
from tools.weights.merge import plan_merge
from tools.weights.source import open_source

LORA = {"rank": 2, "alpha": 6, "targets": ["self_attention.*"]}
SCALE = 3.0


@pytest.fixture
def recipe(tmp_path):
    return recipe_of(tmp_path / "recipe", {"plugins": {"lora": LORA}})


def adapted(folder, recipe, seed=5):
    """A checkpoint of a run with adapters, which two ranks made with tensor parallelism; and its weights as whole
    tensors.
    """
    flat = load_recipe(recipe)
    weights = to_mindformers(initial_weights(model_of(flat), 3), model_of(flat))
    rng = np.random.default_rng(seed)
    shapes = adapters_of({name: array.shape for name, array in weights.items()}, Settings.read(LORA))
    whole = weights | {name: 0.1 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    checkpoint = Saved(folder / "iteration_00000004", 2)
    for name, array in whole.items():
        if "linear_qkv" in name and "lora_A" not in name:
            cuts = (2, 1)
        elif "linear_proj" in name and "lora_B" not in name:
            cuts = (1, 2)
        else:
            cuts = (1,) * array.ndim
        checkpoint.put(name, array, cuts, [[0], [1]] if 2 in cuts else [[0, 1]])
        if name in shapes:
            checkpoint.put(f"adam_m.{name}", array, cuts, [[0], [1]] if 2 in cuts else [[0, 1]], "opt")
    path = checkpoint.write()
    for rank in (0, 1):
        write_seal(path, rank, 2, 4)
    return path, whole


def test_slices_of_two_ranks_are_merged_into_whole_weights(tmp_path, recipe):
    checkpoint, whole = adapted(tmp_path, recipe)
    command = ["weights", "merge", str(checkpoint), str(tmp_path / "merged"), "--recipe", str(recipe)]
    done = CliRunner().invoke(tc3, [*command, "--file-size", "0.001"])
    assert done.exit_code == 0, done.output
    assert "4 of them with their adapters, times 3" in done.output and fault(tmp_path / "merged") is None
    found = read_whole(tmp_path / "merged").arrays
    assert found.keys() == {name for name in whole if "lora" not in name}
    for name, array in found.items():
        layer = name.removesuffix(".weight")
        right = whole[name].astype(np.float64)
        if f"{layer}.lora_A.weight" in whole:
            a, b = (whole[f"{layer}.lora_{matrix}.weight"].astype(np.float64) for matrix in "AB")
            right += SCALE * (b @ a)
        np.testing.assert_array_equal(array, right.astype(np.float32), err_msg=name)
    back = converted(tmp_path / "merged", tmp_path / "hf", recipe)
    assert (back / "model.safetensors").exists(), "it can be converted as any weights"


def test_what_is_refused(tmp_path, recipe):
    checkpoint, _ = adapted(tmp_path, recipe)
    source = open_source(checkpoint)
    with pytest.raises(
        CheckpointError,
        match="holds adapters beside the weights; first merge the adapters into the weights: tc3 weights merge",
    ):
        converted(checkpoint, tmp_path / "hf", recipe)
    plain = recipe_of(tmp_path / "plain")
    with pytest.raises(RecipeError, match=r"plugins\.lora: the recipe trains no adapters"):
        plan_merge(source, plain, 10**9)
    wider = recipe_of(tmp_path / "wider", {"plugins": {"lora": LORA | {"rank": 3}}})
    with pytest.raises(CheckpointError, match=r"not the adapters that .*lora_A\.weight \[2, .* instead of"):
        plan_merge(source, wider, 10**9)
    more = recipe_of(tmp_path / "more", {"plugins": {"lora": LORA | {"targets": ["*"]}}})
    with pytest.raises(CheckpointError, match=r"no decoder\.layers\.0\.mlp\.linear_fc1\.lora_A\.weight"):
        plan_merge(source, more, 10**9)
    with pytest.raises(CheckpointError, match="only iterations of runs have adapters"):
        plan_merge(open_source(public(tmp_path / "theirs", recipe)), recipe, 10**9)
