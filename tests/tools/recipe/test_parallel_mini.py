"""Minis that keep their recipe's parallel strategy: how degrees are scaled, and that `tc3 check` takes every one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.layout.resolve import resolve
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.parallel_mini import Degrees, scale_degrees
from tools.recipe.view import View

ROOT = Path(__file__).resolve().parents[3]
POWERS = st.sampled_from([1, 2, 4, 8, 64])


@given(pp=POWERS, tp=POWERS, dp=POWERS, cp=POWERS, ep=POWERS, workers=st.integers(1, 16))
def test_no_degree_grows_and_no_worker_is_left_that_could_be_used(pp, tp, dp, cp, ep, workers):
    own = Degrees(pp, tp, dp, cp, ep)
    scaled = scale_degrees(own, workers)
    names = ("pp", "tp", "dp", "cp")
    assert scaled.workers <= workers
    assert all(1 <= getattr(scaled, name) <= getattr(own, name) for name in (*names, "ep"))
    more = [name for name in names if getattr(scaled, name) * 2 <= getattr(own, name)]
    assert not more or scaled.workers * 2 > workers
    ranks = scaled.tp * scaled.dp
    assert ranks % scaled.ep == 0 and (scaled.ep * 2 > min(own.ep, ranks))


def test_the_degrees_of_a_large_recipe():
    assert scale_degrees(Degrees(8, 2, 256, 1, 16), 4) == Degrees(2, 2, 1, 1, 2)
    assert scale_degrees(Degrees(8, 2, 256, 1, 16), 8) == Degrees(2, 2, 2, 1, 4)
    assert scale_degrees(Degrees(16, 8, 8, 8, 32), 16) == Degrees(2, 2, 2, 2, 4)
    assert scale_degrees(Degrees(1, 1, 64, 1, 8), 4) == Degrees(1, 1, 4, 1, 4)


def family():
    for path in sorted(ROOT.glob("recipes/telechat3_*b/[!c]*.yaml")) + sorted(
        ROOT.glob("recipes/telechat3_*b/con*.yaml")
    ):
        recipe = load_recipe(path)
        megatron = "Megatron" in recipe["train_dataset"]["data_loader"]["type"]
        if recipe["model"]["model_config"]["model_type"] == "telechat3_moe" and megatron:
            yield path


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("path", list(family()), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_of_the_family_gives_a_sound_mini(path, workers):
    own, mini = View(load_recipe(path)), resolve(load_mini(path, workers=workers))
    view = View(mini)
    assert view.sharded_on_cpu and view.devices == workers
    assert [str(error) for error in check_recipe(mini).errors if "data_path" not in str(error)] == []
    assert (view.chunks, view.scheduler) == (own.chunks, own.scheduler)
    assert mini["model"]["model_config"]["compute_dtype"] == own.get(("model", "model_config", "compute_dtype"))
    assert mini["model"]["model_config"]["num_hidden_layers"] >= view.pp * view.chunks
    for key in ("enable_parallel_optimizer", "gradients_mean"):
        assert view.flag(("parallel", key)) == own.flag(("parallel", key))
    written, made = (of.get(("recompute_config", "recompute")) for of in (own, view))
    if isinstance(written, list):  # layers of each stage, of which the mini has fewer, with fewer layers
        assert isinstance(made, list) and len(made) == view.pp and any(made)
    else:
        assert made == written


def test_a_recipe_that_splits_nothing_is_refused():
    with pytest.raises(RecipeError, match="--parallel keeps how a recipe splits its model; this one is not split"):
        load_mini(ROOT / "recipes/mini/pretrain.yaml", workers=4)
    with pytest.raises(RecipeError, match="needs a degree above 1 that fits 1 workers"):
        load_mini(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml", workers=1)
