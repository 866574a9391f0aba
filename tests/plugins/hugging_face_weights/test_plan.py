"""Names of TeleChat3's weights; those of the full 105B and 36B are held to transformers' in tests/tools/weights."""

from pathlib import Path

import pytest

from plugins.hugging_face_weights.plan import Model, copies, is_hugging_face, rows
from tools.recipe.load import load_recipe
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_names import names_of

RECIPES = Path(__file__).parents[3] / "recipes"
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
