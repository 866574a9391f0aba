"""The committed schemas: current, and open to every recipe."""

import importlib.metadata
import json

import pytest

from tests.tools.check.test_mutations import RECIPES, ROOT, name
from tools.recipe.load import load_recipe
from tools.schema.schema import FILE, SCHEMA_FILE, json_schema, load_schema


def test_the_editors_schema_is_current():
    assert SCHEMA_FILE.read_text("utf-8") == json_schema(load_schema()), "python -m tools.schema.extract"


def test_the_schema_was_made_from_the_installed_versions():
    installed = {package: importlib.metadata.version(package) for package in ("mindformers", "mindspore")}
    assert load_schema().versions == installed


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_the_editors_schema_knows_every_key_of_a_recipe(path):
    schema = json.loads(SCHEMA_FILE.read_text("utf-8"))
    recipe = load_recipe(path)
    assert set(recipe) <= set(schema["properties"])
    model = schema["properties"]["model"]["properties"]["model_config"]
    assert model["additionalProperties"] is False
    assert set(recipe["model"]["model_config"]) <= set(model["properties"])
    for section in ("runner_config", "parallel_config", "context", "parallel"):
        assert set(recipe[section]) <= set(schema["properties"][section]["properties"])


def test_every_reference_leads_somewhere():
    schema = json.loads(SCHEMA_FILE.read_text("utf-8"))
    names = set()

    def walk(node):
        if isinstance(node, dict):
            names.update([node["$ref"]] if "$ref" in node else [])
            node = list(node.values())
        for item in node if isinstance(node, list) else []:
            walk(item)

    walk(schema)
    assert {reference.removeprefix("#/$defs/") for reference in names} <= set(schema["$defs"])


@pytest.mark.slow
def test_mindformers_still_says_what_the_schema_says(tmp_path):
    import subprocess
    import sys

    code = (
        "import json; from tools.schema.extract import extract; print('tc3 ' + json.dumps(extract(), sort_keys=True))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**__import__("os").environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    fresh = next(line for line in output.splitlines() if line.startswith("tc3 "))
    assert json.loads(fresh[4:]) == json.loads(FILE.read_text("utf-8")), "python -m tools.schema.extract"
