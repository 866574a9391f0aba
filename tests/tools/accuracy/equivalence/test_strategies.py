"""The rows of the matrix and layouts drawn at random: which there are, and the recipes of their runs."""

import pytest
from click.testing import CliRunner

from launch.run.effective import steps_overrides
from launch.run.msrun import worker_count
from plugins.errors import RecipeError
from plugins.semi_auto_cpu.chosen import chosen
from tests.training.runs import ROOT, TINY
from tools.accuracy.cli import accuracy
from tools.accuracy.equivalence import runs, strategies
from tools.accuracy.equivalence.matrix import choose
from tools.accuracy.equivalence.runs import RunFailedError
from tools.accuracy.equivalence.sharding import (
    BIAS_CALLBACK,
    UNROUNDED,
    USUAL,
    Sharding,
    derive_sharded,
)
from tools.accuracy.equivalence.strategies import draw_cases, misfit
from tools.accuracy.equivalence.trained import Comparison
from tools.check.check import check_recipe
from tools.data.index import IndexReader
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.view import View

MINI = str(ROOT / "recipes/mini/pretrain.yaml")
RECIPES = [
    MINI,
    str(ROOT / "recipes/mini/pretrain_ep4_overlap.yaml"),
    str(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml"),
]
DENSE = str(ROOT / "recipes/telechat3_36b/pretrain_8k.yaml")
VARIANTS = {case.name: case.variant for case in strategies.CASES if case.variant}


def model_of(recipe):
    """The sizes of a recipe's model, without its layout."""
    layout = ("batch_size", "offset", "pp_interleave_num", "npu_nums_per_device")
    return {key: value for key, value in recipe["model"]["model_config"].items() if key not in layout}


@pytest.mark.parametrize("name", ["pretrain", "pretrain_tp2"])
def test_a_recipe_need_not_write_what_mindformers_fills_in(tmp_path, name):
    """It takes its monitor of the losses, without which a run has no metrics, one sample, and a degree of one."""
    recipe = load_recipe(ROOT / f"recipes/mini/{name}.yaml")
    del recipe["runner_config"]["batch_size"], recipe["callbacks"], recipe["parallel_config"]["data_parallel"]
    dump_recipe(recipe, tmp_path / "recipe.yaml")
    base = strategies.one_worker(str(tmp_path / "recipe.yaml"))
    assert strategies.batch_of(base) == 1 and base["callbacks"] == [{"type": "MFLossMonitor"}]
    del base["runner_config"]["batch_size"]
    runs.make_corpus(tmp_path / "corpus", base, 2)
    assert len(IndexReader(tmp_path / "corpus" / "random").lengths)


def test_one_worker_trains_the_batch_of_accumulated_gradients(tmp_path):
    recipe = load_recipe(ROOT / "recipes/mini/pretrain_tp2.yaml")
    recipe["runner_config"]["gradient_accumulation_steps"] = 2
    for callback in recipe["callbacks"]:
        if callback["type"] == BIAS_CALLBACK:
            callback["gradient_accumulation_steps"] = 2
    dump_recipe(recipe, tmp_path / "recipe.yaml")
    base = strategies.one_worker(str(tmp_path / "recipe.yaml"))
    assert strategies.batch_of(base) == View(recipe).global_batch
    assert base["runner_config"]["gradient_accumulation_steps"] == 1
    assert {callback.get("gradient_accumulation_steps", 1) for callback in base["callbacks"]} == {1}


def test_names_are_unique_and_every_row_is_one_of_three_kinds():
    cases = strategies.CASES
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
    assert [case for case in choose(()) if not case.sharding] == [c for c in strategies.CASES if not c.sharding]
    assert choose(("baseline",)) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path in RECIPES for name in VARIANTS]
    + [(DENSE, name) for name, variant in VARIANTS.items() if not variant.mode],
)
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
    assert model_of(changed).items() <= reference["model"]["model_config"].items()


def test_the_corpus_is_the_same_each_time_and_long_enough(tmp_path):
    base = strategies.one_worker(MINI)
    first, again = (runs.make_corpus(tmp_path / name, base, 3) for name in "ab")
    for end in (".bin", ".idx"):
        assert (tmp_path / f"a/random{end}").read_bytes() == (tmp_path / f"b/random{end}").read_bytes()
    assert first != again
    (tmp_path / "a/random/cache").mkdir(parents=True)
    runs.make_corpus(tmp_path / "a", base, 2)
    assert not (tmp_path / "a/random/cache").exists(), "the order of the samples of the longer one"
    reader = IndexReader(first)
    assert reader.lengths.sum() > 3 * 8 * 129
    assert reader.lengths.sum() < 10 * 3 * 8 * 129


def test_the_made_up_corpus_is_read_whole():
    """The recipe's padding id and split belong to the recipe's own corpus, and are not used for a made-up corpus."""
    base = strategies.one_worker(MINI)
    base["train_dataset"]["data_loader"]["config"].update(pad=1, eod=3, split="969, 30, 1", test_data_path="a")
    parallel = strategies.derive(base, next(iter(VARIANTS.values())), 3, "corpus")
    for derived in (parallel, derive_sharded(base, Sharding(tp=2), 3, "corpus")):
        config = derived["train_dataset"]["data_loader"]["config"]
        assert [config[key] for key in ("data_path", "pad", "eod", "split")] == [["1", "corpus"], -1, 3, "1, 0, 0"]
        assert "test_data_path" not in config


SHARDED_RECIPES = [MINI, str(ROOT / "recipes/mini/pretrain_pp2.yaml"), RECIPES[2], DENSE]
SHARDINGS = {case.name: case.sharding for case in strategies.CASES if case.sharding}


@pytest.mark.slow
@pytest.mark.parametrize("path", SHARDED_RECIPES)
def test_every_executed_recipe_is_sound_and_has_the_same_data_and_weights(path, tmp_path):
    base = strategies.one_worker(path)
    batch, checked = strategies.batch_of(base), set()
    for name, sharding in [(case.name, case.sharding) for case in choose(("executed",), base)]:
        changed, alone = (derive_sharded(base, each, 3, "corpus") for each in (sharding, sharding.alone))
        assert chosen(changed) and chosen(alone)
        assert worker_count(changed) == sharding.workers and worker_count(alone) == 1
        for each, recipe in ((sharding, changed), (sharding.alone, alone)):
            parts = each.dp * each.micro * recipe["runner_config"]["gradient_accumulation_steps"]
            assert recipe["runner_config"]["batch_size"] * parts == batch
        for each, recipe in ((sharding, changed), (sharding.alone, alone)):
            if each not in checked:  # many layouts are compared with the same process
                dump_recipe(recipe, tmp_path / "recipe.yaml")
                assert check_recipe(load_recipe(tmp_path / "recipe.yaml")).errors == [], name
                checked.add(each)
        for key in ("seed", "optimizer", "lr_schedule", "train_dataset", "runner_wrapper", "checkpoint"):
            assert changed.get(key) == alone.get(key), (name, key)
        assert model_of(changed) == model_of(alone), name


def test_two_usual_ones_are_executed_unless_more_are_asked_for():
    executed = [case.name for case in choose(()) if case.how == strategies.EXECUTED]
    assert executed == list(USUAL) and set(USUAL) <= SHARDINGS.keys()
    assert [case.name for case in choose(("executed",))] == list(SHARDINGS)
    assert [case.name for case in choose(("executed_cp2",))] == ["executed_cp2"]


def test_an_auxiliary_loss_under_data_parallelism_is_taken_sample_by_sample_on_both_sides():
    sharding = SHARDINGS["executed_moe_ep2_aux"]
    base = strategies.one_worker(SHARDED_RECIPES[0])
    for each in (sharding, sharding.alone):
        recipe = derive_sharded(base, each, 3, "corpus")
        assert recipe["runner_config"]["batch_size"] == 1 and recipe["model"]["model_config"]["moe_aux_loss_coeff"] > 0
        (bias,) = (callback for callback in recipe["callbacks"] if callback["type"] == BIAS_CALLBACK)
        assert bias["gradient_accumulation_steps"] == recipe["runner_config"]["gradient_accumulation_steps"] > 1
    assert sharding.against == "one_process_moe_sample_by_sample"


@pytest.fixture(scope="module")
def dense():
    return strategies.one_worker(DENSE)


def test_what_a_dense_model_has_no_part_for_is_said_and_not_run(dense):
    lacking = [case for case in choose((), dense) if case.reason == strategies.NO_EXPERTS]
    assert [case.name for case in lacking if case.name in VARIANTS] == [n for n, each in VARIANTS.items() if each.mode]
    run = {case.name for case in choose(("executed",), dense)}
    assert run == {name for name, sharding in SHARDINGS.items() if not (sharding.moe or sharding.mtp)}
    with pytest.raises(RecipeError, match=r"can be compared on this machine .* the recipe's model has no experts"):
        choose(("executed_moe_ep2", "expert_parallel_4_global"), dense)
    with pytest.raises(RecipeError, match="takes no MTP layer"):
        choose(("executed_mtp_pp2",), dense)


def test_grouped_queries_are_executed_without_rounding_on_both_sides(dense):
    """MindFormers rounds them to float16; latent attention is not rounded."""
    sharding, latent = SHARDINGS["executed_tp2"], strategies.one_worker(SHARDED_RECIPES[0])
    for each in (sharding, sharding.alone):
        assert UNROUNDED in derive_sharded(dense, each, 3, "corpus")["callbacks"]
        assert UNROUNDED not in derive_sharded(latent, each, 3, "corpus")["callbacks"]


def test_no_layout_of_a_dense_model_is_drawn_that_it_cannot_have(dense):
    drawn = [case.sharding for case in draw_cases(dense, 50, 0, 8)]
    assert not any(each.moe or each.mtp or each.tp > 2 for each in drawn) and any(each.tp == 2 for each in drawn)
    assert misfit(Sharding(tp=4), dense) == "heads of keys and values cannot be cut"


MOST = 8


@pytest.fixture(scope="module")
def base():
    return strategies.one_worker(str(TINY))


@pytest.fixture(scope="module")
def by_three():
    return strategies.one_worker("tests/training/by_three.yaml")


def test_a_seed_draws_the_same_layouts_and_another_one_others(base):
    one, again, other = (draw_cases(base, 20, seed, MOST) for seed in (7, 7, 8))
    assert one == again and {case.sharding for case in one} != {case.sharding for case in other}
    assert len({case.sharding for case in one}) == 20
    assert [case.name for case in one[:2]] == ["draw_7_1", "draw_7_2"]
    assert draw_cases(base, 5, 7, MOST) == one[:5]


def test_what_is_drawn_varies(base):
    drawn = [case.sharding for case in draw_cases(base, 400, 0, MOST)]
    for name in ("tp", "dp", "cp", "pp", "ep", "vpp", "micro", "schedule", "zero", "recompute", "accumulate"):
        assert len({getattr(each, name) for each in drawn}) > 1, name
    for name in ("moe", "sparse", "mtp", "layers", "aux", "groups", "shared", "length", "sp", "moves", "streams"):
        assert len({getattr(each, name) for each in drawn}) > 1, name
    for name in ("lora", "averages"):
        assert any(getattr(each, name) and each.zero for each in drawn), name
        assert any(getattr(each, name) and each.pp > 1 for each in drawn), name
    assert {each.pp > 1 for each in drawn if each.ramp} == {True, False}
    assert any(each.lora and each.ramp for each in drawn) and any(each.together and each.tp > 1 for each in drawn)
    assert any(each.zero and each.tp > 1 and each.ep > 1 for each in drawn)
    assert any(each.zero and 1 < each.ep < each.dp for each in drawn)
    assert any(each.aux and each.dp > 1 and not each.accumulate for each in drawn)
    assert {each.mode for each in drawn} == {"", "global", "hierarchical", "deduplicated"}
    assert any(each.chunks > 1 and each.tp > 1 for each in drawn)
    assert any(each.uneven and each.vpp > 1 for each in drawn) and any(each.uneven and each.mtp for each in drawn)
    assert any(each.held_out and each.pp > 1 for each in drawn)
    assert any(each.moves and each.pp > 1 for each in drawn)


def test_degrees_of_three_are_drawn_where_the_model_has_them_and_there_are_processes(by_three):
    drawn = [case.sharding for case in draw_cases(by_three, 400, 0, 24)]
    for name in ("pp", "micro", "accumulate"):
        assert 3 in {getattr(each, name) for each in drawn}, name
    assert {each.workers for each in drawn} == {2, 4, 8, 16, 24}


@pytest.mark.parametrize("which", ["base", "by_three"])
def test_drawn_recipes_are_sound_and_both_sides_train_the_same_model(which, request, tmp_path):
    base = request.getfixturevalue(which)
    for case in draw_cases(base, 15, 3, MOST):
        each = case.sharding
        changed, alone = (derive_sharded(base, side, 3, "corpus") for side in (each, each.alone))
        assert worker_count(changed) == each.workers and worker_count(alone) == 1
        dump_recipe(changed, tmp_path / "recipe.yaml")
        assert check_recipe(load_recipe(tmp_path / "recipe.yaml")).errors == [], case.what
        assert model_of(changed) == model_of(alone), case.what
        assert changed["train_dataset"] == alone["train_dataset"], case.what


def test_names_of_baselines_tell_models_apart(base):
    assert len({sharding.against for sharding in SHARDINGS.values()}) == 21
    assert Sharding(tp=2).against == "one_process"
    seen = {}
    for sharding in [case.sharding for case in draw_cases(base, 200, 0, MOST)] + [*SHARDINGS.values()]:
        assert seen.setdefault(sharding.against, sharding.alone) == sharding.alone


@pytest.mark.parametrize(
    ("sharding", "why"),
    [
        (Sharding(tp=8), "attention heads"),
        (Sharding(tp=2, length=63), "sequence"),
        (Sharding(dp=2, ep=4, moe=True), "experts cannot be dealt"),
        (Sharding(pp=2, micro=2, layers=3), "layers"),
        (Sharding(pp=2, micro=2, uneven=True), "the last stage would have no layer"),
        (Sharding(moe=True, groups=16), "cannot give as many each"),
        (Sharding(pp=4, micro=2, layers=4), "too few micro-batches"),
        (Sharding(dp=2, moe=True, aux=True), "auxiliary loss"),
        (Sharding(cp=2, moe=True, aux=True, accumulate=0), "auxiliary loss"),
        (Sharding(dp=2, ep=2, moe=True, zero=True, accumulate=2), "accumulated gradients of weights"),
        (Sharding(dp=2, ep=2, moe=True, zero=True, accumulate=0), "accumulated gradients of weights"),
        (Sharding(dp=2, ep=2, moe=True, aux=True, together=True, accumulate=2), "auxiliary loss"),
        (Sharding(dp=4, ep=2, moe=True, aux=True, together=True), "auxiliary loss"),
        (Sharding(tp=2, lora=True, averages=True), "do not go with each other"),
        (Sharding(dp=2, ep=2, moe=True, moves=True, lora=True), "do not go with each other"),
        (Sharding(pp=2, micro=4, ramp=True, held_out=True), "does not go with the held-out loss"),
        (Sharding(tp=2, ramp=True), "half a growing batch"),
        (Sharding(pp=2, micro=2, ramp=True), "half a growing batch"),
        (Sharding(dp=8), "4 samples of a step cannot be cut into 8"),
        (Sharding(dp=3), "does not split a model over so many devices"),
        (Sharding(dp=3, tp=4, pp=2, micro=2), "refuses a group of ranks"),
    ],
)
def test_what_is_not_legal_is_not_drawn(base, sharding, why):
    assert why in misfit(sharding, base)


def test_more_layouts_than_there_are_is_an_error(base, monkeypatch):
    monkeypatch.setattr("tools.accuracy.equivalence.strategies.TRIES", 50)
    with pytest.raises(
        RecipeError, match=r"--draws 1000: only \d+ different layouts on at most 2 processes were found for this recipe"
    ):
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
    with pytest.raises(RecipeError, match="--only draw_5_4: this strategy is known only with the --draws"):
        choose(("draw_5_4",), base, (3, 5, 4))


def test_each_verdict_is_told_before_the_next_run_starts(monkeypatch, tmp_path):
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
