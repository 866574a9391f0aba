"""The page of pairs says what `tc3 check` says, and claims nothing that was not shown."""

import functools

import pytest

from plugins import ADAPTERS
from tools.accuracy import together
from tools.accuracy.equivalence.sharding import Sharding
from tools.check.check import check_recipe
from tools.recipe.view import View


@functools.cache
def cells():
    """Return what is said of each pair; both tests below read it, and nobody changes it."""
    return together.cells()


@pytest.mark.slow
def test_the_page_is_what_check_says_of_every_pair():
    assert together.PAGE.read_text("utf-8") == together.page(cells()), "run `python -m tools.accuracy.together`"


def test_every_plugin_is_tried():
    assert together.PLUGINS.keys() == ADAPTERS.keys()


@pytest.mark.parametrize("name", [*together.PLUGINS, *together.KINDS])
def test_by_itself_each_is_accepted_so_that_a_refusal_is_of_the_pair(name):
    assert check_recipe(together.recipe_of(name)).errors == []


@pytest.mark.parametrize("pair", list(together.pairs()), ids="+".join)
def test_the_recipe_of_a_pair_has_both(pair):
    recipe = together.recipe_of(*pair)
    plugins, view = recipe["plugins"], View(recipe)
    degrees = {"dp": view.dp, "tp": view.tp, "cp": view.cp, "pp": view.pp, "ep": view.ep, "vpp": view.chunks,
               "accumulate": recipe["runner_config"]["gradient_accumulation_steps"]}  # fmt: skip
    for name in pair:
        if name in together.PLUGINS:
            assert plugins[name] == together.PLUGINS[name].settings
        else:
            wanted = together.KINDS[name].items()
            assert all(degrees[degree] >= value for degree, value in wanted if degree in degrees)


def test_a_reason_names_the_key():
    refused = [cell for cell in cells() if cell.how == together.REFUSED]
    assert refused and all(cell.by.split(":")[0].count(".") >= 1 for cell in refused)


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        (Sharding(), set()),
        (Sharding(dp=4, ep=4, moe=True), {"data parallel", "expert parallel"}),
        (Sharding(dp=4, ep=2, moe=True), {"data parallel", "expert parallel", "several expert groups"}),
        (Sharding(tp=2, pp=2, micro=2), {"pipeline"}),
        (Sharding(tp=2, sp=True, pp=2, vpp=2, zero=True, dp=2),
         {"data parallel", "tensor and sequence parallel", "pipeline", "interleaved pipeline", "sharded optimizer"}),
    ],
)  # fmt: skip
def test_kinds_of_a_layout(layout, kinds):
    assert together.kinds_of(layout) == kinds
