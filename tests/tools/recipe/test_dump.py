"""Writing flat recipes: what is read back is what was written, and what was shared stays shared."""

import os

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import DataError
from tools.recipe.dump import dump_recipe, recipe_text
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

SHARED = """\
zebra: {batch_size: &bs 4, name: '007', odd: '1e-3'}
data: &data {sizes: [1, 2], path: ["1", "x: y"], nested: [{a: [1, 2]}, 3, {b: 4}]}
again: {config: *data, batch-size: *bs, other: 4}
apple: {rate: 1.e-8, none: , yes_text: "yes", big: 1.0e+22}
"""

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.sampled_from(["1e-3", "on"])
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))


def test_the_written_file_reads_back_equal_in_the_same_order(tmp_path):
    (tmp_path / "x.yaml").write_text(SHARED)
    recipe = load_recipe(tmp_path / "x.yaml")
    dump_recipe(recipe, tmp_path / "run" / "flat.yaml")
    back = load_recipe(tmp_path / "run" / "flat.yaml")
    assert back == recipe and list(back) == ["zebra", "data", "again", "apple"]
    assert back["zebra"]["odd"] == "1e-3" and back["apple"]["rate"] == 1e-8
    assert os.listdir(tmp_path / "run") == ["flat.yaml"], "no temporary file may stay"


def test_anchors_survive_so_that_the_flat_file_can_be_overridden_like_the_recipe(tmp_path):
    (tmp_path / "x.yaml").write_text(SHARED)
    dump_recipe(load_recipe(tmp_path / "x.yaml"), tmp_path / "flat.yaml")
    flat = load_recipe(tmp_path / "flat.yaml")
    assert "&batch_size" in (tmp_path / "flat.yaml").read_text()
    changed = apply_overrides(flat, ["zebra.batch_size=9", "data.sizes.0=8"])
    assert changed["again"] == {"config": {**flat["data"], "sizes": [8, 2]}, "batch-size": 9, "other": 4}


def test_a_value_changed_behind_the_recipes_back_is_written_as_it_is(tmp_path):
    (tmp_path / "x.yaml").write_text("a: &n 1\nb: *n\nc: *n\n")
    recipe = load_recipe(tmp_path / "x.yaml")
    recipe["b"] = 2
    assert yaml.safe_load(recipe_text(recipe)) == {"a": 1, "b": 2, "c": 1}


def test_the_file_is_never_half_written(tmp_path, monkeypatch):
    target = tmp_path / "flat.yaml"
    dump_recipe({"a": 1}, target)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("tools.files.atomic.os.replace", fail)
    with pytest.raises(DataError, match=r"flat\.yaml: cannot be written \(disk full"):
        dump_recipe({"a": 2}, target)
    assert target.read_text() == "a: 1\n" and os.listdir(tmp_path) == ["flat.yaml"]


@given(st.dictionaries(text, values, max_size=4))
def test_any_plain_recipe_survives(recipe):
    assert yaml.safe_load(recipe_text(recipe)) == recipe
