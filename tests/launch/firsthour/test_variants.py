"""Variants of a stage: which dispatch modes and fused operators are tried, which wins, and what the overlay holds."""

from pathlib import Path

import pytest

from launch.firsthour import hour as hours
from launch.firsthour.hour import Hour
from launch.firsthour.variants import SURE, judge_variants, variants_of, winner_of, write_overlay
from plugins.errors import ClusterError
from plugins.hierarchical_ep.plan import MODES
from tools.recipe.load import load_recipe
from tools.recipe.view import View

ROOT = Path(__file__).parents[3]
OVERLAP = ROOT / "recipes" / "telechat3_1119b" / "pretrain_4k_ep_overlap.yaml"
PLAIN = ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"


def of(recipe, on_cpu=False):
    return variants_of(View(load_recipe(recipe)), on_cpu)


def test_modes_and_fused_operators_are_those_of_the_recipe():
    modes = of(OVERLAP, on_cpu=True)
    assert {one.key for one in modes} == {"plugins.hierarchical_ep.mode"}
    assert [one.own for one in modes] == [True] + [False] * (len(modes) - 1)
    assert {one.value for one in modes} >= set(MODES)
    plain = of(PLAIN)
    assert {one.path[-1] for one in plain} == {
        *("moe_token_dispatcher_type", "apply_rope_fusion", "bias_swiglu_fusion"),
    }  # fmt: skip
    assert [one.value for one in plain if one.path[-1] == "apply_rope_fusion"] == [False, True]
    assert of(PLAIN, on_cpu=True) == []
    assert of(ROOT / "recipes" / "mini" / "pretrain.yaml", on_cpu=True) == []


@pytest.mark.parametrize(
    ("faster", "winner"), [(1.0, None), (1 - SURE / 2, None), (1 - 2 * SURE, True), (1.5, None), (None, None)]
)
def test_a_variant_wins_only_if_it_is_surely_faster(tmp_path, faster, winner):
    variants = [one for one in of(PLAIN) if one.path[-1] == "apply_rope_fusion"]
    seconds = {"own": 0.5, "apply_rope_fusion_true": None if faster is None else 0.5 * faster}
    best = winner_of(variants, seconds)
    assert (best.value if best else None) == winner
    file = tmp_path / "overlay.yaml"
    assert write_overlay(PLAIN, variants, seconds, file) == file.exists() == bool(winner)
    (found,) = judge_variants(variants, seconds, file)
    assert found.verdict == ("unknown" if faster is None else "ok")
    assert ("written to overlay.yaml" in found.seen) == bool(winner)
    if winner:
        child = load_recipe(file)
        assert child["model"]["model_config"]["apply_rope_fusion"] is True
        assert child["model"]["model_config"]["num_hidden_layers"] == 54


def test_each_run_is_started_once_and_one_that_fails_is_not_judged(tmp_path, monkeypatch):
    hour, started = Hour(OVERLAP, tmp_path), []

    def ask(words, seconds):
        started.append(words)
        if "plugins.hierarchical_ep.mode=global" in words:
            raise ClusterError("it failed")

    class Read:
        def __init__(self, folder):
            self.folder = folder

        def usual(self):
            return {"own": 0.4, "mode_hierarchical": 0.3, "mode_deduplicated": 0.5}[self.folder.name]

    monkeypatch.setattr(hours, "ask", ask)
    monkeypatch.setattr(hours, "load_run", Read)
    (found,), seconds = hour.compare_variants(0.0)
    assert seconds == {"own": 0.4, "mode_global": None, "mode_hierarchical": 0.3, "mode_deduplicated": 0.5}
    assert found.verdict == "ok"
    assert "global did not train" in found.seen and "hierarchical is written to overlay.yaml" in found.seen
    assert load_recipe(tmp_path / "overlay.yaml")["plugins"]["hierarchical_ep"]["mode"] == "hierarchical"
    assert len(started) == 4 and all(words[1] == str(hour.small) for words in started)
    assert [words for words in started if "--set" not in words] == started[:1]
