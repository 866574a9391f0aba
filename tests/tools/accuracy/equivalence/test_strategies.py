"""The rows of the matrix, and the recipes of its runs."""

import pytest

from launch.run.effective import steps_overrides
from launch.run.msrun import worker_count
from plugins.errors import RecipeError
from tests.training.runs import ROOT
from tools.accuracy.equivalence import runs, strategies
from tools.accuracy.equivalence.matrix import choose
from tools.check.check import check_recipe
from tools.data.index import IndexReader
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

MINI = str(ROOT / "recipes/mini/pretrain.yaml")
RECIPES = [
    MINI,
    str(ROOT / "recipes/mini/pretrain_ep4_overlap.yaml"),
    str(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml"),
]
VARIANTS = {case.name: case.variant for case in strategies.cases() if case.variant}


def test_names_are_unique_and_every_row_is_one_of_three_kinds():
    cases = strategies.cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert sum(map(bool, (case.variant, case.sharding))) <= 1
        assert case.how != strategies.NOT_EXECUTABLE or case.reason
    kinds = [case.how for case in cases]
    ways = (strategies.TRAINED, strategies.EXECUTED, strategies.NOT_EXECUTABLE)
    assert min(kinds.count(kind) for kind in ways) >= 3


def test_rows_are_chosen_by_name_or_kind():
    assert [case.name for case in choose(("recompute", "executed_tp2"))] == ["recompute", "executed_tp2"]
    assert {case.how for case in choose(("trained",))} == {strategies.TRAINED}
    assert [case for case in choose(()) if not case.sharding] == [c for c in strategies.cases() if not c.sharding]
    assert choose(("baseline",)) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("executed_tp22", "did you mean 'executed_tp2'"),
        ("emulated", "no such strategy.*--list shows all"),
        ("bfloat16", "nothing that can be compared here .* rounding would hide"),
    ],
)
def test_a_wrong_choice_says_what_would_be_right(name, message):
    with pytest.raises(RecipeError, match=message):
        choose((name,))


@pytest.mark.parametrize("path", RECIPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_run_is_a_sound_recipe_with_the_same_data_and_weights(path, name, tmp_path):
    base, variant = strategies.one_worker(path), VARIANTS[name]
    reference = strategies.derive(base, strategies.baseline_variant(variant.against), 3, "corpus")
    changed = strategies.derive(base, variant, 3, "corpus")
    assert worker_count(changed) == variant.workers and worker_count(reference) == 1
    for recipe in (changed, reference):
        assert strategies.batch_of(recipe) == strategies.batch_of(base)
        assert steps_overrides(recipe, 3)[0] == f"train_dataset.data_loader.sizes.0={3 * strategies.batch_of(base)}"
        assert recipe["runner_wrapper"]["use_clip_grad"] is True
        assert recipe["runner_wrapper"]["max_grad_norm"] == strategies.CLIP < 0.1
        dump_recipe(recipe, tmp_path / "recipe.yaml")
        assert check_recipe(load_recipe(tmp_path / "recipe.yaml")).errors == []
    for key in ("seed", "optimizer", "lr_schedule", "train_dataset", "runner_wrapper"):
        assert changed.get(key) == reference.get(key), key
    same = {
        key: value
        for key, value in changed["model"]["model_config"].items()
        if "npu_nums" not in key and key != "batch_size"
    }
    assert same.items() <= reference["model"]["model_config"].items()


def test_the_corpus_is_the_same_each_time_and_long_enough(tmp_path):
    base = strategies.one_worker(MINI)
    first, again = (runs.make_corpus(tmp_path / name, base, 3) for name in "ab")
    for end in (".bin", ".idx"):
        assert (tmp_path / f"a/random{end}").read_bytes() == (tmp_path / f"b/random{end}").read_bytes()
    assert first != again
    reader = IndexReader(first)
    assert reader.lengths.sum() > 3 * 8 * 129
    assert reader.lengths.sum() < 10 * 3 * 8 * 129
