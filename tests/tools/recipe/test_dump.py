"""Writing flat recipes: what is read back is what was written, and what was shared stays shared.

Stock MindFormers reads the flat effective recipe to the same values.
"""

import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import DataError, RecipeError
from tests.crashes import patch_os
from tools.recipe.cli import effective, recipe_as_text
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

    patch_os(monkeypatch, "replace", fail)
    with pytest.raises(DataError, match=r"flat\.yaml: this path cannot be written \(disk full"):
        dump_recipe({"a": 2}, target)
    assert target.read_text() == "a: 1\n" and os.listdir(tmp_path) == ["flat.yaml"]


@pytest.mark.slow
@given(st.dictionaries(text, values, max_size=4))
def test_any_plain_recipe_survives(recipe):
    assert yaml.safe_load(recipe_text(recipe)) == recipe


ROOT = Path(__file__).resolve().parents[3]
DP2 = ROOT / "recipes" / "mini" / "pretrain_dp2.yaml"


def test_the_text_is_the_recipe_with_its_bases_and_overrides():
    flat = yaml.safe_load(recipe_as_text(DP2, ["optimizer.weight_decay=0.01", "runner_config.batch_size=2"]))
    assert "base_config" not in flat and flat["optimizer"]["type"] == "AdamW"  # from the base
    assert flat["optimizer"]["weight_decay"] == 0.01
    assert flat["runner_config"]["batch_size"] == flat["model"]["model_config"]["batch_size"] == 2  # one anchor
    assert yaml.safe_load(recipe_as_text(DP2)) == load_recipe(DP2)


def test_json_is_the_same(tmp_path):
    assert json.loads(recipe_as_text(DP2, as_json=True)) == load_recipe(DP2)
    dated = tmp_path / "dated.yaml"
    dated.write_text("since: 2025-01-01\n")
    assert json.loads(recipe_as_text(dated, as_json=True)) == {"since": "2025-01-01"}


def test_what_is_shown_keeps_its_anchors_for_later_overrides(tmp_path):
    flat = tmp_path / "flat.yaml"
    flat.write_text(recipe_as_text(DP2))
    assert effective(flat, ["runner_config.batch_size=1"])["model"]["model_config"]["batch_size"] == 1


def test_an_unknown_key_is_refused():
    with pytest.raises(RecipeError, match=r"did you mean 'optimizer\.weight_decay'"):
        effective(DP2, ["optimizer.weight_decai=1"])


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("recipes/*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_nothing_that_is_shown_is_auto(path):
    if path.name != "card.yaml" and path.parent.name != "base":
        assert ": auto" not in recipe_as_text(path)


@pytest.mark.slow
def test_stock_mindformers_reads_what_is_shown(tmp_path):
    from mindformers import MindFormerConfig

    names = ["mini/pretrain_dp2", "telechat3_105b/pretrain_4k", "telechat3_438b/finetune_4k"]
    names.append("telechat3_438b/pretrain_4k_ep_overlap")  # its dispatch is `auto`
    paths = [path for name in names if (path := ROOT / "recipes" / f"{name}.yaml").exists()]
    assert paths
    for path in paths:
        flat = tmp_path / f"{path.stem}.yaml"
        flat.write_text(recipe_as_text(path))
        assert _plain(MindFormerConfig._file2dict(str(flat))) == effective(path)
        shown, own = (_plain(MindFormerConfig(str(file))) for file in (flat, path))
        assert {**shown, "plugins": 0} == {**own, "plugins": 0}  # there stand the values that are resolved


def _plain(node):
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    return [_plain(item) for item in node] if isinstance(node, list) else node
