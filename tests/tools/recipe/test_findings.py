"""The one way in which a tool refuses a value of a recipe."""

import re
from pathlib import Path

from plugins.errors import RecipeError
from tools.recipe.findings import refusal
from tools.recipe.load import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[3]


def test_file_and_line_as_far_as_known():
    path = ("parallel_config", "data_parallel")
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    error = refusal(recipe, path, "8; write 4")
    assert isinstance(error, RecipeError)
    assert re.search(r"pretrain\.yaml:\d+: parallel_config\.data_parallel: 8; write 4$", str(error))
    assert re.search(r"pretrain\.yaml: not\.there: gone$", str(refusal(recipe, ("not", "there"), "gone")))
    assert str(refusal(Recipe(), path, "8; write 4")) == "parallel_config.data_parallel: 8; write 4"


def test_no_tool_has_one_of_its_own():
    own = [path for path in (ROOT / "tools").rglob("*.py") if "mark = recipe.marks.get(path)" in path.read_text()]
    assert own == [ROOT / "tools/recipe/findings.py"]
