"""Layouts drawn at random: legal, the same for the same seed, and with one process of the same model each."""

import pytest
from click.testing import CliRunner

from launch.run.msrun import worker_count
from plugins.errors import RecipeError
from tests.training.runs import TINY
from tools.accuracy.cli import accuracy
from tools.accuracy.equivalence import strategies
from tools.accuracy.equivalence.compare import Comparison
from tools.accuracy.equivalence.draws import draw_cases, misfit
from tools.accuracy.equivalence.matrix import choose
from tools.accuracy.equivalence.runs import RunFailedError
from tools.accuracy.equivalence.sharding import EXECUTED_ROWS, Sharding, derive_sharded
from tools.check.check import check_recipe
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

MOST = 8


@pytest.fixture(scope="module")
def base():
    return strategies.one_worker(str(TINY))


def test_a_seed_draws_the_same_layouts_and_another_one_others(base):
    one, again, other = (draw_cases(base, 20, seed, MOST) for seed in (7, 7, 8))
    assert one == again and {case.sharding for case in one} != {case.sharding for case in other}
    assert len({case.sharding for case in one}) == 20
    assert [case.name for case in one[:2]] == ["draw_7_1", "draw_7_2"]
    assert draw_cases(base, 5, 7, MOST) == one[:5]


def test_what_is_drawn_varies(base):
    drawn = [case.sharding for case in draw_cases(base, 200, 0, MOST)]
    for name in ("tp", "dp", "cp", "pp", "ep", "vpp", "micro", "schedule", "zero", "recompute", "accumulate"):
        assert len({getattr(each, name) for each in drawn}) > 1, name
    for name in ("moe", "mtp", "layers", "aux", "groups", "shared", "length", "sp"):
        assert len({getattr(each, name) for each in drawn}) > 1, name
    assert any(each.zero and each.tp > 1 and each.ep > 1 for each in drawn)
    assert any(each.zero and 1 < each.ep < each.dp for each in drawn)


def test_drawn_recipes_are_sound_and_both_sides_train_the_same_model(base, tmp_path):
    for case in draw_cases(base, 15, 3, MOST):
        each = case.sharding
        changed, alone = (derive_sharded(base, side, 3, "corpus") for side in (each, each.alone))
        assert worker_count(changed) == each.workers and worker_count(alone) == 1
        dump_recipe(changed, tmp_path / "recipe.yaml")
        assert check_recipe(load_recipe(tmp_path / "recipe.yaml")).errors == [], case.what
        models = [recipe["model"]["model_config"] for recipe in (changed, alone)]
        layout = ("batch_size", "offset", "pp_interleave_num", "npu_nums_per_device")
        same, other = ({key: value for key, value in model.items() if key not in layout} for model in models)
        assert same == other, case.what
        assert changed["train_dataset"] == alone["train_dataset"], case.what


def test_names_of_their_baselines_tell_models_apart(base):
    seen = {}
    for sharding in [case.sharding for case in draw_cases(base, 200, 0, MOST)] + [each for _, _, each in EXECUTED_ROWS]:
        assert seen.setdefault(sharding.against, sharding.alone) == sharding.alone


@pytest.mark.parametrize(
    ("sharding", "why"),
    [
        (Sharding(tp=8), "attention heads"),
        (Sharding(tp=2, length=63), "sequence"),
        (Sharding(dp=2, ep=4, moe=True), "experts cannot be dealt"),
        (Sharding(pp=2, micro=2, layers=3), "layers"),
        (Sharding(pp=4, micro=2, layers=4), "too few micro-batches"),
        (Sharding(dp=2, moe=True, aux=True), "auxiliary loss"),
        (Sharding(dp=2, ep=2, moe=True, zero=True, accumulate=2), "accumulated gradients of experts"),
        (Sharding(dp=8), "4 samples of a step cannot be cut into 8"),
    ],
)
def test_what_is_not_legal_is_not_drawn(base, sharding, why):
    assert why in misfit(sharding, base)


def test_more_layouts_than_there_are_is_an_error(base, monkeypatch):
    monkeypatch.setattr("tools.accuracy.equivalence.draws.TRIES", 50)
    with pytest.raises(RecipeError, match=r"--draws 1000: this recipe has only \d+ layouts on at most 2 processes"):
        draw_cases(base, 1000, 0, 2)


def test_the_command_says_what_it_would_execute(base):
    arguments = ["equivalence", str(TINY), "--draws", "3", "--seed", "5", "--dry-run"]
    done = CliRunner().invoke(accuracy, arguments)
    assert done.exit_code == 0, done.output
    wanted = draw_cases(base, 3, 5, 4)
    assert done.output.splitlines() == [f"{case.name}: executed: {case.what}" for case in wanted]
    assert choose((), base, (3, 5, 4)) == wanted
    assert [case.name for case in choose(("executed_cp2",), base, (1, 5, 4))] == ["executed_cp2", "draw_5_1"]


def test_a_layout_that_failed_is_drawn_again_by_itself(base):
    (again,) = choose(("draw_5_2",), base, (3, 5, 4))
    assert again == draw_cases(base, 3, 5, 4)[1]
    with pytest.raises(RecipeError, match="--only draw_5_4: no such strategy; give the --draws"):
        choose(("draw_5_4",), base, (3, 5, 4))


def test_each_verdict_is_told_before_the_next_run_starts(monkeypatch, tmp_path):
    """Who interrupts a night of draws keeps what was found."""

    def compare(runs, name, sharding):
        runs.started(name)
        if name == "draw_5_2":
            raise RunFailedError("the run of draw_5_2 failed: no kernel")
        if name == "draw_5_3":
            raise KeyboardInterrupt
        return Comparison(7, 0.25, ())

    monkeypatch.setattr("tools.accuracy.equivalence.executed.ExecutedRuns.compare", compare)
    arguments = ["equivalence", str(TINY), "--draws", "3", "--seed", "5", "--work", str(tmp_path)]
    done = CliRunner().invoke(accuracy, arguments)
    assert done.exit_code == 1 and "Aborted" in done.output
    first, second, _ = draw_cases(strategies.one_worker(str(TINY)), 3, 5, 4)
    assert done.stderr.splitlines()[:6] == [
        "draw_5_1 ...",
        f"draw_5_1 ({first.what}): pass, 7 compared, 25% of a tolerance used",
        "draw_5_2 ...",
        f"draw_5_2 ({second.what}): fail",
        "  the run of draw_5_2 failed: no kernel",
        "draw_5_3 ...",
    ]
