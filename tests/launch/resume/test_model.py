"""These tests compare a checkpoint with models that nothing converts to Hugging Face: experts in every second layer or
without a shared expert, LayerNorm, fused projections, and grouped queries with norms or biases. Adapters, settings that
no shape shows and Hugging Face folders are compared with their recipe, too.
"""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.resume.checkpoints import check_data_order
from launch.resume.model import check_load_path, check_model
from plugins.errors import CheckpointError
from tests.tools.checkpoint.saved import Saved
from tests.tools.test_model import VARIANTS, variant
from tests.training.runs import ROOT
from tools.accuracy.reference.start import initial_weights
from tools.checkpoint.scan import CheckpointInfo
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.override import apply_overrides
from tools.weights.convert_plan import changed_settings
from tools.weights.convert_plan import model_of as weights_model_of
from tools.weights.hugging_face_config import config_of
from tools.weights.reshard_target import target_of

STRANGERS = [
    *("every second layer", "gate of the shared expert", "no shared expert, but its width"),
    *("grouped, biases", "grouped, normed queries", "grouped, no gate", "LayerNorm"),
    "joint matrix with biases",
]


def stranger(name):
    """Return the recipe of a model on one device."""
    recipe = variant(*VARIANTS[name])
    recipe["parallel_config"] |= dict.fromkeys(
        ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel", "expert_parallel"), 1
    )
    recipe["recompute_config"] = {"recompute": False}  # counts of layers are those of the pipeline
    return recipe


def saved(folder, recipe, states=("adam_m", "adam_v")):
    """Write what one rank saves of a recipe's model, with all values zero."""
    checkpoint, target = Saved(folder, 1), target_of(recipe)
    for name, placed in target.weights.items():
        for each in (name, *(f"{state}.{name}" for state in states)):
            kind = "model" if each == name else "opt"
            checkpoint.put(each, np.zeros(placed.shape, np.float32), (1,) * len(placed.shape), [[0]], kind=kind)
    for name, placed in target.states.items():
        if name.endswith("expert_bias"):
            checkpoint.put(name, np.zeros(placed.shape, np.float32), (1,), [[0]])
    (folder / "common.json").write_text('{"step_num": 4, "global_step": 4, "global_batch_size": 8}')
    return checkpoint.write()


@pytest.mark.parametrize("name", STRANGERS)
def test_moments_of_a_strangers_model_are_not_begun_anew(tmp_path, name):
    recipe = stranger(name)
    check_model(recipe, saved(tmp_path / "whole" / "iteration_00000004", recipe))
    folder = saved(tmp_path / "without" / "iteration_00000004", recipe, states=["adam_m"])
    with pytest.raises(CheckpointError, match=r"moments of the optimizer are missing .*: no adam_v\."):
        check_model(recipe, folder)


@pytest.mark.parametrize("name", STRANGERS)
def test_a_strangers_model_begins_with_no_other_models_weights(tmp_path, name):
    recipe = stranger(name)
    folder = saved(tmp_path / "iteration_00000004", recipe)
    check_load_path(apply_overrides(recipe, [f"checkpoint.load_path={folder}"]))
    wider = apply_overrides(recipe, [f"checkpoint.load_path={folder}", "model.model_config.intermediate_size=384"])
    with pytest.raises(CheckpointError, match=r"these are not the weights of the recipe's model: \S+ has the shape \["):
        check_load_path(wider)


@pytest.mark.parametrize("changed, right", [({"alpha": 32.0}, None), ({"alpha": 16.0}, 32), ({}, 32)])
def test_adapters_go_on_with_the_factor_that_they_were_trained_with(tmp_path, changed, right):
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    recipe["checkpoint"]["save_path"] = str(tmp_path / "checkpoint")
    before, after = ({**recipe, "plugins": {"lora": {"rank": 8, **own}}} for own in ({"alpha": 32}, changed))
    dump_recipe(before, tmp_path / "recipe.yaml")
    checkpoint = CheckpointInfo(tmp_path / "checkpoint" / "iteration_00000004", 4)
    with (
        nullcontext()
        if right is None
        else pytest.raises(
            CheckpointError,
            match=rf"lora\.alpha: .* alpha / rank = 4, but .* by 2; write alpha: {right}, or merge .*0004 TO",
        )
    ):
        check_data_order(Recipe(after), tmp_path, checkpoint)


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ({"rank": 4, "alpha": 12}, None),
        ({"rank": 4, "alpha": 16}, r"lora\.alpha: .* alpha / rank = 3, but .* by 4; write alpha: 12, or merge"),
        (
            {"rank": 8, "alpha": 24},
            r"load_path: .*04: the LoRA adapters of these weights do not match .* without .* merge \S+ TO",
        ),
        (
            {"rank": 4, "alpha": 12, "targets": ["self_attention.linear_proj"]},
            "LoRA adapters of these weights do not match",
        ),
        (False, "LoRA adapters of these weights do not match .*lora_A"),
    ],
)
def test_a_new_run_begins_with_trained_adapters_as_they_were_trained_or_not_at_all(tmp_path, capsys, adapters, words):
    before = Recipe({**stranger("grouped, no gate"), "plugins": {"lora": {"rank": 4, "alpha": 12}}})
    dump_recipe(before, tmp_path / "recipe.yaml")
    folder = saved(tmp_path / "checkpoint" / "iteration_00000004", before)
    after = apply_overrides({**before, "plugins": {"lora": adapters}}, [f"checkpoint.load_path={folder}"])
    with nullcontext() if words is None else pytest.raises(CheckpointError, match=words):
        check_load_path(after)
    assert capsys.readouterr().err == ""
    if words is None:
        (tmp_path / "recipe.yaml").unlink()
        check_load_path(after)
        assert "the recipe of the run that trained the adapters cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["checkpoint.no_load_optim=False", "resume_training=True"])
def test_mindformers_does_not_resume_what_is_said_to_be_a_new_run(tmp_path, words):
    """Neither moments nor the order of the data were compared."""
    recipe = Recipe({**stranger("grouped, no gate"), "resume_training": False, "load_checkpoint": ""})
    folder = saved(tmp_path / "iteration_00000004", recipe, states=["adam_m"])
    recipe["checkpoint"] |= {"load_path": str(folder), "no_load_optim": None}
    check_load_path(recipe)
    recipe["checkpoint"]["no_load_optim"] = True
    check_load_path(recipe)
    recipe["checkpoint"]["no_load_optim"] = None
    check_load_path(apply_overrides(recipe, ["resume_training=True"]))  # which MindFormers switches off without a path
    recipe["load_checkpoint"] = str(folder)
    name, _, value = words.partition("=")
    with pytest.raises(CheckpointError, match=rf"{name} is {value}, so MindFormers would resume .* --resume \S+04$"):
        check_load_path(apply_overrides(recipe, [words]))


@pytest.mark.parametrize(
    "change, said",
    [
        ("model.model_config.rope_theta=50000.0", r"rope_theta was 10000\.0 and is 50000\.0 now"),
        ("model.model_config.routed_scaling_factor=1.0", r"routed_scaling_factor was 2\.8 and is 1\.0 now"),
        ("model.model_config.moe_router_load_balancing_type=aux_loss", None),
        ("optimizer.weight_decay=0.2", None),
        ("model.model_config.moe_aux_loss_coeff=0.1", None),
    ],
)
def test_a_resume_goes_on_with_the_model_that_was_trained(tmp_path, change, said):
    """No shape shows these settings: the run went on with a model that computes something else."""
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    recipe["checkpoint"]["save_path"] = str(tmp_path / "checkpoint")
    dump_recipe(recipe, tmp_path / "recipe.yaml")
    checkpoint = CheckpointInfo(tmp_path / "checkpoint" / "iteration_00000004", 4)
    with (
        nullcontext()
        if said is None
        else pytest.raises(CheckpointError, match=rf"changes settings of the model, .*: {said}\. Undo")
    ):
        check_data_order(apply_overrides(recipe, [change]), tmp_path, checkpoint)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("telechat3_36b/pretrain_8k.yaml", {"use_contiguous_weight_layout_attention": True}),
        ("telechat3_36b/pretrain_8k.yaml", {"nope_layer_interval": 2}),
        ("telechat3_105b/pretrain_4k.yaml", {"use_alibi_mask": True}),
    ],
)
def test_settings_with_which_a_model_can_no_longer_be_converted_are_compared(name, changed):
    """With the first one, rows of queries were taken for those of keys and values."""
    before, after = (load_mini(ROOT / "recipes" / name) for _ in range(2))
    after["model"]["model_config"] |= changed
    (key,) = changed
    assert changed_settings(before, before) == [] == changed_settings(after, after)
    assert [said.split()[0] for said in changed_settings(before, after)] == [key]
    assert [said.split()[0] for said in changed_settings(after, before)] == [key]


def test_settings_that_change_nothing_are_no_difference():
    before, after = (load_mini(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml") for _ in range(2))
    after["model"]["model_config"] |= {
        "use_contiguous_weight_layout_attention": True,
        "rotary_seq_len_interpolation_factor": 1.0,
    }
    before["model"]["model_config"]["use_alibi_mask"] = after["model"]["model_config"]["use_alibi_mask"] = True
    assert changed_settings(before, after) == []
    before, after = (load_mini(ROOT / "recipes/telechat3_36b/pretrain_8k.yaml") for _ in range(2))
    after["model"]["model_config"]["rotary_seq_len_interpolation_factor"] = 1
    before["model"]["model_config"]["use_alibi_mask"] = after["model"]["model_config"]["use_alibi_mask"] = True
    assert changed_settings(before, after) == []
    after["model"]["model_config"]["rotary_seq_len_interpolation_factor"] = 2
    assert [said.split()[0] for said in changed_settings(before, after)] == ["rotary_seq_len_interpolation_factor"]


def test_settings_of_models_that_hugging_face_cannot_express_are_compared(tmp_path, capsys):
    """Neither model was compared then, and a damaged recipe beside the weights ended what does not need it."""
    recipe = stranger("no shared expert, but its width")
    folder = saved(tmp_path / "checkpoint" / "iteration_00000004", recipe)
    dump_recipe(recipe, tmp_path / "recipe.yaml")
    new = ["model.model_config.rope_theta=50000.0", f"checkpoint.load_path={folder}"]
    check_load_path(apply_overrides(recipe, new[1:]))
    assert capsys.readouterr().err == ""
    check_load_path(apply_overrides(recipe, new))
    assert "rotary_base was 10000.0 and is 50000.0 now" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text("base_config: gone.yaml")
    check_load_path(apply_overrides(recipe, new))
    assert f"so the settings with which {folder} was trained are not compared" in capsys.readouterr().err


def test_biases_of_routers_that_a_new_run_leaves_out_are_named(tmp_path, capsys):
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    loads = f"checkpoint.load_path={saved(tmp_path / 'iteration_00000004', recipe)}"
    check_load_path(apply_overrides(recipe, [loads]))
    assert capsys.readouterr().err == ""
    check_load_path(apply_overrides(recipe, [loads, "model.model_config.moe_router_enable_expert_bias=False"]))
    assert "does not have decoder.layers.1.mlp.router.expert_bias;" in capsys.readouterr().err


def test_a_run_begins_with_a_hugging_face_folder_only_of_its_own_model(tmp_path, capsys):
    """The workers compared names only, after they had compiled; rope_theta and its like were compared by nobody."""
    recipe = apply_overrides(load_recipe(ROOT / "recipes/mini/pretrain.yaml"), [f"checkpoint.load_path={tmp_path}"])
    sizes = weights_model_of(recipe)
    save_file(initial_weights(sizes, 0), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_of(sizes, "float32")))
    check_load_path(recipe)
    check_load_path(apply_overrides(recipe, ["model.model_config.rope_theta=50000.0"]))  # as extends a context
    assert "RoPE changes" in (said := capsys.readouterr().err) and "rope_theta is 10000.0, but" in said
    with pytest.raises(CheckpointError, match=r"load_path: .*config\.json: .*routed_scaling_factor is 2\.8, but"):
        check_load_path(apply_overrides(recipe, ["model.model_config.routed_scaling_factor=1.0"]))
    (tmp_path / "config.json").unlink()
    weights = initial_weights(sizes, 0)
    save_file(
        {k: v for k, v in weights.items() if not k.endswith("score_correction_bias")}, tmp_path / "model.safetensors"
    )
    check_load_path(apply_overrides(recipe, ["model.model_config.moe_router_enable_expert_bias=False"]))
    with pytest.raises(CheckpointError, match=r"no model\.layers\.1\.mlp\.gate\.e_score_correction_bias"):
        check_load_path(recipe)
    save_file(weights, tmp_path / "model.safetensors")
    capsys.readouterr()
    check_load_path(apply_overrides(recipe, ["model.model_config.moe_router_enable_expert_bias=False"]))
    assert "does not have model.layers.1.mlp.gate.e_score_correction_bias;" in capsys.readouterr().err
    wider = apply_overrides(recipe, ["model.model_config.intermediate_size=192"])
    with pytest.raises(
        CheckpointError, match=r"not the weights of the recipe's model: model\.layers\.0\S+ has the shape \["
    ):
        check_load_path(wider)
