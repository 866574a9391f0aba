"""Names and shapes of full-size models against those that transformers builds (on the meta device, kept in a file)."""

import json
from dataclasses import replace

import pytest

from tools.accuracy.reference import frozen
from tools.recipe.load import load_recipe
from tools.weights.convert.plan import model_of
from tools.weights.hugging_face.names import hugging_face_shapes


@pytest.mark.parametrize("recipe", frozen.FULL)
def test_every_name_and_shape(recipe):
    """The MTP layer apart, which transformers leaves out."""
    model = replace(model_of(load_recipe(frozen.RECIPES / recipe)), mtp_layers=0)
    found, kept = frozen.summary(hugging_face_shapes(model)), json.loads(frozen.NAMES.read_text())[recipe]
    assert found["groups"] == kept["groups"]
    assert found["sha256"] == kept["sha256"]


def test_the_checksum_sees_a_number():
    shapes = {"a.0.b": (2, 3), "a.1.b": (2, 3)}
    other = {"a.0.b": (2, 3), "a.2.b": (2, 3)}
    assert frozen.summary(shapes)["groups"] == frozen.summary(other)["groups"]
    assert frozen.summary(shapes)["sha256"] != frozen.summary(other)["sha256"]
