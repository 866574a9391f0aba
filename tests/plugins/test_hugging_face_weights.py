"""Names of TeleChat3's weights; those of the full 105B and 36B are held to transformers' in tests/tools/weights.

MindFormers' own way to Hugging Face's weights, with the template, against `tc3 weights convert`: the same bits.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mindformers.tools.register import MindFormerConfig
from safetensors.numpy import load_file, save_file

from plugins.errors import CheckpointError, RecipeError
from plugins.hugging_face_weights import adapter
from plugins.hugging_face_weights.plan import Model, copies, is_hugging_face, rows
from tests.tools.accuracy.reference import renew as golden
from tests.tools.weights import renew as frozen
from tools.accuracy.reference.start import initial_weights
from tools.recipe.load import load_recipe
from tools.weights.convert import convert
from tools.weights.convert_plan import model_of, prepare
from tools.weights.hugging_face_config import config_of
from tools.weights.hugging_face_names import STATE, names_of
from tools.weights.source import INDEX, open_source

RECIPES = Path(__file__).parents[2] / "recipes"
MOE = Model(layers=2, mtp_layers=1, dense=1, experts=8, latent_query=True)


@pytest.mark.parametrize("size", ["105b", "438b", "1119b"])
def test_every_tensor_has_one_place(size):
    model = names_of(model_of(load_recipe(RECIPES / f"telechat3_{size}/pretrain_4k.yaml")))
    found = rows(model)
    parts = [part for row in found for part in row.parts]
    assert len(set(parts)) == len(parts) and not copies(model).keys() & set(parts)
    assert len({row.mindformers for row in found}) == len(found)
    experts = [row for row in found if row.how == "experts"]
    assert len(experts) == 2 * (model.layers + model.mtp_layers - model.dense)


def test_the_mtp_layer_is_one_more_layer_and_repeats_embedding_and_head():
    names = {part: row.mindformers for row in rows(MOE) for part in row.parts}
    assert names["model.layers.2.enorm.weight"] == "mtp.layers.0.enorm.weight"
    assert names["model.layers.2.mlp.experts.7.up_proj.weight"] == "mtp.layers.0.transformer_layer.mlp.experts.weight1"
    assert copies(MOE) == {
        "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight": "lm_head.weight",
    }


def test_experts_have_one_name_of_a_kind():
    row = next(row for row in rows(MOE) if row.mindformers.endswith("layers.1.mlp.experts.weight1"))
    assert row.stacks == tuple(f"model.layers.1.mlp.experts.stack.{kind}_proj.weight" for kind in ("gate", "up"))
    assert len(row.parts) == 16


def test_what_mindformers_takes_for_hugging_faces(tmp_path):
    assert not is_hugging_face(None) and not is_hugging_face("") and not is_hugging_face(str(tmp_path / "none"))
    assert not is_hugging_face(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert is_hugging_face(str(tmp_path))


def test_the_folder_of_another_kind_of_model_is_refused_and_not_taken_for_one_with_experts():
    config = MindFormerConfig(checkpoint={}, model={"model_config": {"model_type": "telechat3"}})
    with pytest.raises(
        RecipeError, match=r"^checkpoint\.load_path: only weights of 'telechat3_moe' .* weights convert"
    ):
        adapter.enable(config)


@pytest.mark.parametrize("unknown", ["self_attention.linear_proj.bias", "input_layernorm.gamma"])
def test_a_parameter_that_hugging_faces_form_does_not_know_is_refused_and_not_left_random(unknown):
    template = object.__new__(adapter.TeleChat3MoeTemplate)
    linear, router = "decoder.layers.0.self_attention.linear_proj", "decoder.layers.1.mlp.router"
    template.mf_name_to_converter, template.counts = {}, {}
    template.network_tensor_info = dict.fromkeys((f"{router}.expert_load", f"{linear}.lora_A.weight"))
    assert not any(map(template._is_strange, template.network_tensor_info)), "counters and adapters are not its affair"
    template.network_tensor_info[f"decoder.layers.0.{unknown}"] = None
    with pytest.raises(
        CheckpointError,
        match=rf"^checkpoint\.load_path: 1 parameters .* such as decoder.layers.0.{unknown}; name a recipe",
    ):
        template.get_mf_state_dict({})


MTP, COPY = golden.RECIPE, "model.layers.2.embed_tokens.weight"  # of a recipe with an MTP layer, behind two others


def written(folder, weights, sizes):
    """A Hugging Face folder of two files; expert 0 and the others of a layer are apart."""
    folder.mkdir()
    where = {name: f"model-{1 + (i % 2):05d}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in weights if where[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config_of(sizes, "bfloat16")))
    return folder


@pytest.fixture(scope="module")
def loaded(forks, tmp_path_factory):
    """case -> parameters, or the words of a refusal."""
    folder = tmp_path_factory.mktemp("loaded")
    sizes = model_of(load_recipe(MTP))
    weights = {name: array.astype(ml_dtypes.bfloat16) for name, array in initial_weights(sizes, 4).items()}
    weights[COPY] = weights["model.embed_tokens.weight"]
    whole = written(folder / "hf", weights, sizes)
    opened = open_source(whole)
    plan = prepare(opened, MTP, None, 300_000)
    convert(opened, folder / "ms", plan.plan, plan.sizes)
    lost = "model.layers.1.mlp.experts.5.up_proj.weight"
    short = written(folder / "short", {name: weights[name] for name in weights if name != lost}, sizes)
    more = written(folder / "more", {**weights, "model.layers.0.self_attn.q_norm.weight": weights[COPY]}, sizes)
    cases = {"template": whole, "converted": folder / "ms", "short": short, "more": more}
    found = {}
    for recipe, chosen in ((MTP, cases), (frozen.RECIPE, {"frozen": frozen.FOLDER})):
        out = folder / Path(recipe).stem
        out.mkdir()
        worker = ("-m", "tests.plugins.hugging_face_weights.load_worker", recipe, out, *chosen.values())
        done = forks.python(*worker, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        for number, case in enumerate(chosen):
            refused = out / f"{number}.txt"
            found[case] = refused.read_text() if refused.exists() else dict(np.load(out / f"{number}.npz"))
    return found


def weights_of(parameters):
    assert isinstance(parameters, dict), parameters
    return {name: array for name, array in parameters.items() if not name.endswith(STATE)}


@pytest.mark.slow
def test_both_ways_give_the_same_bits(loaded):
    ours, theirs = weights_of(loaded["converted"]), weights_of(loaded["template"])
    assert ours.keys() == theirs.keys() and any(name.startswith("mtp.") for name in ours)
    for name, array in ours.items():
        assert np.isfinite(array).all() and array.tobytes() == theirs[name].tobytes(), name


@pytest.mark.slow
def test_the_frozen_model_of_transformers(loaded, tmp_path):
    opened = open_source(frozen.FOLDER)
    plan = prepare(opened, frozen.RECIPE, None, int(5e9))
    convert(opened, tmp_path / "ms", plan.plan, plan.sizes)
    (file,) = (tmp_path / "ms").glob("*.safetensors")
    wanted, found = load_file(file), weights_of(loaded["frozen"])
    assert wanted.keys() == found.keys()
    assert all(array.tobytes() == found[name].tobytes() for name, array in wanted.items())


@pytest.mark.slow
def test_what_is_missing_or_unknown_is_refused(loaded):
    assert (
        "lacks weights for 1 parameters of the recipe's model, such as decoder.layers.1.mlp.experts.weight1"
        in loaded["short"]
    )
    unknown = "the folder holds model.layers.0.self_attn.q_norm.weight, which is not a weight of the recipe's model"
    assert unknown in loaded["more"]
