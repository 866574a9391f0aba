"""These tests search for layouts of recipes whose plugins ask something of a layout, or of a step's samples: what a
search writes is a recipe that `tc3 check` accepts.
"""

import os
from dataclasses import replace

from tests.tools.search.test_candidates import enumerated
from tools.check.check import check_recipe
from tools.estimate.configuration import Recompute
from tools.estimate.from_recipe import from_recipe
from tools.recipe.load import load_recipe
from tools.search.candidates import configuration
from tools.search.overlay import changed, write_overlay
from tools.search.request import read_limit, request_of

LARGE = "recipes/telechat3_438b/pretrain_4k.yaml"
HELD_OUT = "plugins.held_out_loss.samples"


def read_back(recipe, config, folder):
    """Return the child recipe that a search writes for `config`."""
    write_overlay(recipe, config, folder / "child.yaml", [])
    return load_recipe(folder / "child.yaml")


def test_experts_that_neither_move_nor_are_recorded_leave_the_plugin_off(tmp_path):
    """`tc3 check` refuses a plugin that does nothing; a section that also records keeps its record."""
    sections = {"{record: False, routers: False}": False, "{record: False, every: 7}": {"record": False, "every": 0}}
    for section, wanted in sections.items():
        (tmp_path / "recipe.yaml").write_text(
            f"base_config: {os.path.abspath(LARGE)}\nplugins: {{expert_balance: {section}}}\n"
        )
        recipe = load_recipe(tmp_path / "recipe.yaml")
        now = from_recipe(recipe)
        child = read_back(recipe, replace(now, ep=1, dp=now.dp, recompute=Recompute()), tmp_path)
        assert child["plugins"]["expert_balance"] == wanted
        assert not [finding for finding in check_recipe(child).errors if "expert_balance" in finding.key]


def test_a_larger_batch_has_as_many_held_out_samples(tmp_path):
    """`tc3 check` refuses fewer held-out samples than a step has, and with micro-batches a loss that is not apart."""
    (tmp_path / "recipe.yaml").write_text(
        f"base_config: {os.path.abspath(LARGE)}\nprint_separate_loss: False\n"
        "plugins: {held_out_loss: {data_path: held, every: 5, samples: 4096}}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    now = from_recipe(recipe)
    one = replace(now, pp=1, dp=now.dp * now.pp, layers=((now.model.layers,),), schedule="1f1b", recompute=Recompute())
    for config, changes in (
        (replace(one, micro_batches=1), {}),
        (replace(now, micro_batches=4096 // now.dp), {"print_separate_loss": True}),
        (replace(now, micro_batches=8192 // now.dp), {"print_separate_loss": True, "samples": 8192}),
    ):
        child = read_back(recipe, config, tmp_path)
        assert child["print_separate_loss"] == changes.get("print_separate_loss", False)
        assert child["plugins"]["held_out_loss"]["samples"] == changes.get("samples", 4096)
        assert not [each for each in check_recipe(child).errors if each.key in ("print_separate_loss", HELD_OUT)]


def test_an_expert_group_is_whole_ranks_where_their_samples_are_balanced(tmp_path):
    """A strategy is in the space if, and only if, plugins.attention_balance accepts its expert groups."""
    path = tmp_path / "recipe.yaml"
    balanced = "attention_balance: {window: 1}, held_out_loss: False"
    base = os.path.abspath("recipes/telechat3_105b/context_32k.yaml")
    path.write_text(f"base_config: {base}\nplugins: {{{balanced}}}\n")
    recipe = load_recipe(path)
    limits = tuple(map(read_limit, ("recompute=none", "shard=none", "mode=global", "pp=2", "vpp=1")))
    asked = request_of(recipe, "atlas_800t_a2", devices=96, global_batch=96, limits=limits)
    kept, every = set(enumerated(asked)[0]), enumerated(replace(asked, whole_ranks=False))[0]
    for candidate in every[:: max(1, len(every) // 40)]:
        child = changed(recipe, configuration(asked, candidate), asked.site)
        refused = [each for each in check_recipe(child).errors if "an EP group must consist of" in each.wrong]
        assert (candidate in kept) == (not refused), candidate
    assert 0 < len(kept) < len(every)
