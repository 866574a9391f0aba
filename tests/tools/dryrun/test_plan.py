"""These tests check the ranks that stand for each kind of stage, and the recipe of a single stage: its layers and
sizes are those of the whole recipe, and tc3 check finds nothing wrong with it.
"""

from pathlib import Path

import pytest

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.dryrun.one_stage import one_stage
from tools.dryrun.plan import plan_jobs, stages_of
from tools.layout.resolve import resolve
from tools.model import DENSE, MOE
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


def recipe(name, *changes):
    return apply_overrides(load_recipe(RECIPES / name), changes)


def test_stages_of_105b():
    stages = stages_of(View(recipe("telechat3_105b/pretrain_4k.yaml")))
    assert [len(stage.kinds) for stage in stages] == [6, 6, 6, 6, 6, 7, 7, 1]
    assert stages[0].chunks == ((0, (DENSE,) + (MOE,) * 5),)
    assert [stage.ends for stage in stages] == [("embedding",), *[()] * 6, ("head",)]
    assert [stage.chunks[0][0] for stage in stages] == [0, 6, 12, 18, 24, 30, 37, 44]


def test_one_rank_for_each_kind_of_stage():
    plan = plan_jobs(recipe("telechat3_105b/pretrain_4k.yaml"))
    assert plan.job_of == [0, 1, 1, 1, 1, 2, 2, 3]
    assert [job.rank for job in plan.jobs] == [0, 32, 160, 224]
    assert plan.micro_batches == 16
    assert all(job.recipe["parallel_config"]["micro_batch_num"] == 16 for job in plan.jobs)


def test_recompute_of_a_stage_sets_it_apart():
    lists = "recompute_config.recompute=[6, 6, 3, 6, 6, 7, 7, 1]"
    plan = plan_jobs(recipe("telechat3_105b/pretrain_4k.yaml", lists))
    assert plan.job_of == [0, 1, 2, 1, 1, 3, 3, 4]


@pytest.mark.parametrize("key", ["select_recompute_exclude", "select_comm_recompute_exclude"])
def test_what_a_stage_excludes_sets_it_apart(key):
    loaded = recipe("telechat3_105b/pretrain_4k.yaml")
    loaded["recompute_config"][key] = {r"mlp\.mul": [0, 0, 0, 6, 0, 0, 0, 0]}
    assert plan_jobs(loaded).job_of == [0, 1, 1, 2, 1, 3, 3, 4]


def test_swapped_layers_are_named_and_set_their_stage_apart():
    loaded = recipe("telechat3_105b/pretrain_4k.yaml")
    loaded["recompute_config"]["recompute"] = [7, 13]  # with swapping, numbers of layers: the second of stages 1 and 2
    swapped = [{"backward_prefetch": 1, "layers": [8, 14, 26]}]  # the third of stages 1 and 2
    model = loaded["model"]["model_config"]
    operators = [{"op_name": r"mlp\.mul", **swapped[0]}]
    model |= {"swap": True, "layer_swap": swapped, "op_swap": operators}
    assert plan_jobs(loaded).job_of == [0, 1, 1, 2, 3, 4, 4, 5]
    model["swap"] = False
    loaded["recompute_config"]["recompute"] = True
    assert plan_jobs(loaded).job_of == [0, 1, 1, 1, 1, 2, 2, 3]


def test_a_chunk_that_is_recomputed_whole_stands_beside_one_that_is_counted():
    loaded = recipe("telechat3_438b/pretrain_4k.yaml")
    loaded["recompute_config"]["recompute"] = [True, [1, 2, 2, 2, 3, 2, 2, 1]]
    assert plan_jobs(loaded).job_of == [0, 1, 1, 1, 2, 1, 1, 3]


def test_interleaved_chunks_follow_each_other_through_all_stages():
    stages = stages_of(View(recipe("telechat3_438b/pretrain_4k.yaml")))
    assert [stage.chunks[0][0] for stage in stages] == [0, 4, 8, 12, 16, 20, 24, 28]
    assert [stage.chunks[1][0] for stage in stages] == [32, 35, 38, 41, 44, 47, 50, 53]
    assert plan_jobs(recipe("telechat3_438b/pretrain_4k.yaml")).job_of == [0, 1, 1, 1, 1, 1, 1, 2]


def test_zero_bubble_v_comes_back_to_the_first_stage():
    changes = ("parallel.pipeline_config.pipeline_scheduler=zero_bubble_v",)
    changes += ("model.model_config.offset=[[1, 1, 1, 1, 1, 1, 1, 1], [-2, 0, 0, 0, 0, 0, 0, 0]]",)
    stages = stages_of(View(recipe("telechat3_438b/pretrain_4k.yaml", *changes)))
    assert [stage.ends for stage in stages] == [("embedding", "head"), *[()] * 7]
    layers = [layer for stage in stages for first, kinds in stage.chunks for layer in range(first, first + len(kinds))]
    assert sorted(layers) == list(range(54))
    firsts = [stage.chunks[1][0] for stage in stages]
    assert firsts == sorted(firsts, reverse=True)


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(RECIPES)) for path in RECIPES.glob("telechat3_*/*4k.yaml"))
)
def test_every_layer_is_on_one_stage(name):
    loaded = recipe(name)
    stages = stages_of(View(loaded))
    layers = [layer for stage in stages for first, kinds in stage.chunks for layer in range(first, first + len(kinds))]
    assert sorted(layers) == list(range(loaded["model"]["model_config"]["num_hidden_layers"]))


def test_chosen_ranks_stand_for_their_kind_only():
    plan = plan_jobs(recipe("telechat3_105b/pretrain_4k.yaml"), ranks=(40, 33))
    assert plan.job_of == [-1, 0, 0, 0, 0, -1, -1, -1]
    assert [job.stage for job in plan.jobs] == [1, 1]


def test_a_rank_that_is_not_there():
    with pytest.raises(RecipeError, match="--ranks 256: this rank does not exist; the recipe has ranks 0 to 255"):
        plan_jobs(recipe("telechat3_105b/pretrain_4k.yaml"), ranks=(0, 256))


def test_an_offset_that_does_not_fit():
    with pytest.raises(RecipeError, match="offset"):
        stages_of(
            View(recipe("telechat3_105b/pretrain_4k.yaml", "model.model_config.offset=[1, 1, 1, 1, 1, 2, 2, -5]"))
        )


ROOT = Path(__file__).parents[3]
SIZES = ("hidden_size", "n_routed_experts", "vocab_size", "seq_length", "num_attention_heads", "moe_intermediate_size")


def own(name):
    return resolve(load_recipe(ROOT / "recipes" / f"{name}.yaml"), layout="file")


@pytest.mark.parametrize(
    "name",
    ["telechat3_105b/pretrain_4k", "telechat3_438b/pretrain_4k_report", "telechat3_1119b/context_128k",
     "telechat3_36b/context_32k"],
)  # fmt: skip
def test_a_stage_has_the_fullest_stages_layers_and_all_its_devices(tmp_path, name):
    recipe = own(name)
    view = View(recipe)
    dump_recipe(one_stage(recipe, view.devices), tmp_path / "stage.yaml")
    stage = load_recipe(tmp_path / "stage.yaml")
    cut = View(stage)
    assert [str(one) for one in check_recipe(stage).errors] == []
    assert (cut.pp, cut.devices, cut.tp, cut.cp, cut.ep) == (1, view.devices // view.pp, view.tp, view.cp, view.ep)
    model, whole = stage["model"]["model_config"], recipe["model"]["model_config"]
    assert {key: model.get(key) for key in SIZES} == {key: whole.get(key) for key in SIZES}
    assert model["num_hidden_layers"] == max(len(one.kinds) for one in stages_of(view))
    assert recipe == own(name)  # it is not changed


def test_fewer_devices_are_fewer_data_parallel_ranks():
    cut = View(one_stage(own("telechat3_438b/pretrain_4k"), 64))
    assert (cut.devices, cut.dp, cut.tp, cut.ep) == (64, 32, 2, 16)
    assert cut.get(("parallel", "dataset_strategy"))[0][0] == 32
    with pytest.raises(RecipeError, match="one stage needs at least 16 devices, but only 8 are available"):
        one_stage(own("telechat3_438b/pretrain_4k"), 8)


@pytest.mark.parametrize(
    "dense, frequency", [(0, 2), (0, [0] + [1] * 53), (3, 1), (0, [0] * 8 + [1] * 46)], ids=["2", "list", "first", "8"]
)
def test_kinds_of_layers_are_those_of_the_stage(dense, frequency):
    recipe = own("telechat3_438b/pretrain_4k")
    recipe["model"]["model_config"] |= {"first_k_dense_replace": dense, "moe_layer_freq": frequency}
    assert [str(one) for one in check_recipe(recipe).errors] == []
    cut = one_stage(recipe, 512)
    assert stages_of(View(cut))[0].kinds == stages_of(View(recipe))[0].kinds
    assert [str(one) for one in check_recipe(cut).errors] == []


def test_data_parallel_ranks_that_the_experts_do_not_go_with_are_left_out():
    cut = one_stage(own("telechat3_438b/pretrain_4k"), 40)  # 20 x 2 ranks are no whole number of 16 experts' ranks
    assert (View(cut).devices, View(cut).dp, View(cut).ep) == (32, 16, 16)
    assert [str(one) for one in check_recipe(cut).errors] == []


def test_counts_of_recomputed_layers_are_those_of_the_stage():
    recipe = own("telechat3_438b/pretrain_4k")
    recipe["recompute_config"]["recompute"] = [[1, 2, 3, 4, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0]]
    recipe["recompute_config"]["select_recompute"] = {r"mlp\.linear": [[1] * 8, [1] * 8]}
    cut = one_stage(recipe, 512)
    assert cut["recompute_config"]["recompute"] == [3]
    assert cut["recompute_config"]["select_recompute"] == {r"mlp\.linear": [2]}


@pytest.mark.parametrize(
    "written, count",
    [([True, [1] * 8], 5), ([[2] * 8, False], 2), ([[True] * 8, [False] * 8], 4), ([[9] * 8, [0] * 8], 4)],
)
def test_flags_of_recomputed_chunks_are_all_layers_of_the_stages_chunk(written, count):
    """Stage 0 has chunks of 4 and 3 layers."""
    recipe = own("telechat3_438b/pretrain_4k")
    recipe["recompute_config"]["recompute"] = written
    assert [len(kinds) for _, kinds in stages_of(View(recipe))[0].chunks] == [4, 3]
    assert one_stage(recipe, 512)["recompute_config"]["recompute"] == [count]
