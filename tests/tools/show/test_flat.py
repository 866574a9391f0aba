"""The flat effective recipe, as stock MindFormers reads it."""

import json
from pathlib import Path

import pytest
import yaml

from plugins.errors import RecipeError
from tools.recipe.load import load_recipe
from tools.show.cli import effective, recipe_as_text

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
