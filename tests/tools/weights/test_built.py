"""The table's MindFormers side, at full width, against the models that MindFormers builds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tools.recipe.load import load_recipe
from tools.weights.convert.plan import model_of
from tools.weights.hugging_face.names import STATE, table

pytestmark = pytest.mark.slow
RECIPES = Path(__file__).resolve().parents[3] / "recipes"
MODELS = ["telechat3_36b/pretrain_8k.yaml", "telechat3_105b/pretrain_4k.yaml"]
LAYERS = 2


@pytest.fixture(scope="module")
def built(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    worker = ("-m", "tests.tools.weights.built_worker", LAYERS, *(RECIPES / name for name in MODELS))
    done = forks.python(*worker, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("built: ") for line in done.stdout.splitlines() if line.startswith("built: ")]
    return dict(zip(MODELS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_its_row(built, name):
    model = model_of(load_recipe(RECIPES / name))
    model = replace(model, hf={**model.hf, "num_hidden_layers": LAYERS})
    found = {key: tuple(shape) for key, shape in built[name].items() if not key.endswith(STATE)}
    assert found == {entry.mindformers: entry.shape for entry in table(model)}
