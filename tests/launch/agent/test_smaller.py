"""Every recipe on fewer hosts: the same global batch and steps, the same order of data; or rightly refused.

That `smaller` gives nothing that the check refuses is shown by a recipe that it does refuse.
"""

from pathlib import Path

import pytest

from launch.agent.decide import Smaller
from launch.agent.smaller import smaller
from launch.resume.data import all_steps, differences
from tools.layout.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(
    path for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name != "base" and path.name != "card.yaml"
)


def effective(path, overrides=()):
    return resolve(apply_overrides(load_recipe(path), overrides), lambda line: None, "file")


def possible(view, slots):
    """Hosts, the most first, that hold whole copies and expert groups, and divide the samples of a step: by hand."""
    copy = view.tp * view.pp * view.cp
    for dp in range(view.dp - 1, 0, -1):
        whole = dp * copy % slots == 0 and dp * view.tp % view.ep == 0
        if whole and view.global_batch % (dp * (view.batch if view.parallel else 1)) == 0:
            yield dp * copy // slots


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_one_host_less(path):
    recipe = effective(path)
    before = View(recipe)
    slots = 8 if before.devices > 8 else 1
    hosts = before.devices // slots - 1
    found = smaller(recipe, hosts, slots, step=8)
    wanted = next(possible(before, slots), None)
    assert isinstance(found, Smaller) == (wanted is not None), found
    if isinstance(found, str):
        return
    assert found.hosts == wanted <= hosts
    after = apply_overrides(recipe, found.overrides)
    now = View(after)
    assert now.devices == found.hosts * slots
    assert now.global_batch == before.global_batch
    assert all_steps(after) == all_steps(recipe)
    assert differences(recipe, after, 8) == []
    counts = {each["micro_batch_num"] for each in after["callbacks"] if "micro_batch_num" in each}
    assert counts <= {now.micro_batches}


def test_values_without_anchors_are_all_set():
    """A run's own recipe.yaml has no anchors: keys that share a value there are set one by one."""
    plain = Recipe(dict(effective(ROOT / "recipes/mini/pretrain_dp2.yaml")))
    found = smaller(plain, 1, 1, 8)
    assert found.hosts == 1
    assert apply_overrides(plain, found.overrides)["model"]["model_config"]["batch_size"] == 8


def test_it_is_the_recipe_of_one_worker():
    """pretrain_dp2 on one host is pretrain, but for its folder."""
    found = smaller(effective(ROOT / "recipes/mini/pretrain_dp2.yaml"), 1, 1, 8)
    one = effective(ROOT / "recipes/mini/pretrain.yaml")
    two = apply_overrides(effective(ROOT / "recipes/mini/pretrain_dp2.yaml"), found.overrides)
    assert {key: two[key] for key in two if key != "output_dir"} == {
        key: one[key] for key in one if key != "output_dir"
    }
    assert "memory" in found.why


def test_gradients_are_accumulated_where_the_recipe_can():
    path = ROOT / "recipes/mini/pretrain_tp2.yaml"
    rows = [[2, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)]
    recipe = effective(path, ["parallel_config.data_parallel=2", f"parallel.dataset_strategy={rows}"])
    recipe["runner_config"]["gradient_accumulation_steps"] = 1
    for _ in range(2):  # the callback does not say that one micro-batch is accumulated, and then it does
        found = smaller(recipe, 3, 1, 8)
        now = View(apply_overrides(recipe, found.overrides))
        assert (found.hosts, now.dp, now.accumulation, now.batch) == (2, 1, 2, 8)
        assert now.global_batch == View(recipe).global_batch and "memory" not in found.why
        assert now.recipe["callbacks"][1] == {**recipe["callbacks"][1], "gradient_accumulation_steps": 2}
        assert now.recipe["callbacks"][::2] == recipe["callbacks"][::2]
        recipe["callbacks"][1]["gradient_accumulation_steps"] = 1


@pytest.mark.parametrize(
    ("name", "hosts", "why"),
    [
        ("pretrain_pp2", 1, "whole number of copies"),
        ("pretrain_ep4", 3, "expert group of 4"),
        ("pretrain_dp2", 0, "no host"),
    ],
)
def test_why_not(name, hosts, why):
    assert why in smaller(effective(ROOT / f"recipes/mini/{name}.yaml"), hosts, 1, 8)


@pytest.mark.parametrize("hosts", [4, 5])
def test_with_enough_hosts_it_is_the_recipe_itself(hosts):
    found = smaller(effective(ROOT / "recipes/mini/pretrain_ep4.yaml"), hosts, 1, 8)
    assert (found.hosts, found.overrides) == (4, [])


def test_what_does_not_divide_is_refused():
    recipe = effective(ROOT / "recipes/mini/pretrain_ep4.yaml", ["parallel_config.expert_parallel=1"])
    assert "does not divide the 8 samples" in smaller(recipe, 1, 3, 8)


def test_an_anchor_that_would_change_another_size_is_refused(tmp_path):
    text = "base_config: {}\nparallel_config:\n  data_parallel: &d 2\n  expert_parallel: *d\n"
    (tmp_path / "shared.yaml").write_text(text.format(ROOT / "recipes/mini/pretrain_dp2.yaml"))
    assert "expert group" in smaller(load_recipe(tmp_path / "shared.yaml"), 1, 1, 8)


@pytest.mark.parametrize(
    ("copies", "hosts", "left", "shards"),
    [(4, 2, 2, 2), (8, 2, 2, 2), (8, 4, 4, 4), (4, 3, 2, 2), (8, 6, 4, 4)],  # MindSpore takes no 12 or 24 devices here
)
def test_a_sharded_optimizer_has_as_many_shards_as_still_divide_the_copies(copies, hosts, left, shards):
    path, key = ROOT / "recipes/mini/pretrain_3d.yaml", "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
    rows = [[copies, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)]
    micro = f"parallel_config.micro_batch_num={24 // copies * 2}"
    recipe = effective(path, [f"parallel_config.data_parallel={copies}", f"parallel.dataset_strategy={rows}", micro])
    recipe["parallel"]["parallel_optimizer_config"]["optimizer_weight_shard_size"] = 4
    recipe["plugins"]["held_out_loss"]["samples"] = View(recipe).global_batch
    for callback in recipe["callbacks"]:
        if "micro_batch_num" in callback:
            callback["micro_batch_num"] = 24 // copies * 2
    view = View(recipe)
    found = smaller(recipe, view.tp * view.pp * hosts, 1, 8)
    now = apply_overrides(recipe, found.overrides)
    assert View(now).dp == left and View(now).global_batch == view.global_batch
    assert now["parallel"]["parallel_optimizer_config"]["optimizer_weight_shard_size"] == shards
    assert (f"{key}={shards}" in found.overrides) == (shards != 4)


def test_what_the_check_refuses_is_refused():
    recipe = effective(ROOT / "recipes/mini/pretrain_3d.yaml")
    recipe["parallel"]["parallel_optimizer_config"]["optimizer_weight_shard_size"] = 2
    assert "optimizer_weight_shard_size" in smaller(recipe, 4, 1, 8)


@pytest.mark.parametrize(("limit", "fits"), [("30GB", True), ("22GB", False), ("18GB", False), (None, True)])
def test_what_would_not_fit_into_memory_is_refused(limit, fits):
    """Half of the copies share the optimizer's state in larger shards: 24.5 GiB on a device instead of 18.8."""
    recipe = effective(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml")
    if limit is None:
        del recipe["context"]["max_device_memory"]
    else:
        recipe["context"]["max_device_memory"] = limit
    found = smaller(recipe, 31, 8, 8)
    if fits:
        assert isinstance(found, Smaller) and found.hosts == 16
    else:
        assert found == (
            "with parallel_config.data_parallel 2: a device would need 24.5 GiB by the memory model, instead of 18.8 "
            f"at its own size, and context.max_device_memory is {float(limit[:-2]):.1f}"
        )


def test_the_memory_of_level3_and_of_a_run_that_needs_no_more_than_before_refuses_nothing():
    recipe = effective(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml")
    recipe["context"]["max_device_memory"] = "10GB"
    recipe["parallel"]["enable_parallel_optimizer"] = False
    assert isinstance(smaller(recipe, 31, 8, 8), Smaller)  # it trained, whatever the model says
    recipe["parallel"] |= {
        "enable_parallel_optimizer": True,
        "parallel_optimizer_config": {"optimizer_level": "level3"},
    }
    assert isinstance(smaller(recipe, 31, 8, 8), Smaller)
