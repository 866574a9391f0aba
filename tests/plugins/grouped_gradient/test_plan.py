"""Which recipes `plugins.grouped_gradient` can work in."""

import pytest

from plugins.errors import RecipeError
from plugins.grouped_gradient import plan
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

OVERLAP = "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml"  # cuts each micro-batch into chunks
SHIPPED = [*(f"recipes/telechat3_{size}/pretrain_4k.yaml" for size in ("438b", "1119b")), OVERLAP]


def of(recipe, *changes, settings=None, **others):
    recipe = apply_overrides(load_recipe(recipe), changes)
    recipe["plugins"] = {**(recipe.get("plugins") or {}), "grouped_gradient": settings or {}, **others}
    return recipe


@pytest.mark.parametrize("recipe", SHIPPED)
def test_off_unless_named(recipe):
    assert not plan.check(load_recipe(recipe))
    assert not plan.check(of(recipe) | {"plugins": {"grouped_gradient": False}})
    assert plan.check(of(recipe))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("parallel_config.pipeline_stage=1", "parallel_config.pipeline_stage: .* micro-batches"),
        ("parallel.parallel_optimizer_config.gradient_accumulation_shard=True", "shard: a ReduceScatter stands"),
        ("model.model_config.compute_dtype=float32", "compute_dtype: .* not float32"),
        ("model.model_config.params_dtype=bfloat16", "params_dtype: .* float32, not in bfloat16"),
        ("context.jit_config.jit_level=O2", "jit_level: .* not with O2"),
        ("model.model_config.n_routed_experts=0", "the model has no experts"),
    ],
)
def test_what_has_no_such_gradient_is_refused(change, words):
    with pytest.raises(RecipeError, match=f"{words}.*plugins.grouped_gradient: False"):
        plan.check(of(SHIPPED[0], change))


@pytest.mark.parametrize("settings", [{"mode": 1}, True, [1]])
def test_there_is_nothing_to_set(settings):
    with pytest.raises(RecipeError, match=r"plugins\.grouped_gradient"):
        plan.check(of(SHIPPED[0], settings=settings))


def test_a_cpu_does_without():
    assert not plan.check(of("recipes/mini/pretrain.yaml"))
