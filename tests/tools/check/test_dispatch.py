"""The static check of collective programs, on recipes, with faults put in."""

import pytest

from plugins.errors import ClusterError
from tools.check import dispatch
from tools.recipe.load import load_recipe

EP4, OVERLAP = "recipes/mini/pretrain_ep4.yaml", "recipes/mini/pretrain_ep4_overlap.yaml"


@pytest.mark.parametrize("mode", ["global", "hierarchical", "deduplicated"])
@pytest.mark.parametrize("stride", [0, 1, 2, 5])
def test_shipped_orders_come_to_an_end(mode, stride):
    recipe = load_recipe(OVERLAP)
    recipe["plugins"]["hierarchical_ep"]["mode"] = mode
    recipe["plugins"]["ep_overlap"]["stride"] = stride
    dispatch.check_dispatch(recipe)


def test_recipes_without_the_plugin_have_nothing_to_check(monkeypatch):
    monkeypatch.setattr(dispatch, "make_plan", None)
    dispatch.check_dispatch(load_recipe("recipes/mini/pretrain_dp2.yaml"))


def test_a_rank_that_creates_its_groups_in_another_order_is_named(monkeypatch):
    right = dispatch.creation_orders

    def wrong(topology):
        orders = right(topology)
        orders[2] = orders[2][::-1]
        return orders

    monkeypatch.setattr(dispatch, "creation_orders", wrong)
    with pytest.raises(ClusterError, match="rank"):
        dispatch.check_dispatch(load_recipe(EP4))


def test_a_wrong_split_list_is_named(monkeypatch):
    right = dispatch.programs_of

    def wrong(*plans, order):
        programs = right(*plans, order=order)
        index = next(i for i, call in enumerate(programs[1]) if call.op == "all_to_all_v")
        call = programs[1][index]
        programs[1][index] = type(call)(call.op, call.group, (call.send[0] + 1, *call.send[1:]), call.recv, call.tag)
        return programs

    monkeypatch.setattr(dispatch, "programs_of", wrong)
    with pytest.raises(ClusterError, match="rank 1"):
        dispatch.check_dispatch(load_recipe(EP4))


def test_a_rank_with_another_order_of_chunks_is_named(monkeypatch):
    right = dispatch.programs_of

    def wrong(*plans, order):
        programs = right(*plans, order=order)
        programs[3] = right(*plans, order=[(1 - chunk, step) for chunk, step in order])[3]
        return programs

    recipe = load_recipe(OVERLAP)
    recipe["plugins"]["ep_overlap"]["chunks"] = [2, 1]
    monkeypatch.setattr(dispatch, "programs_of", wrong)
    with pytest.raises(ClusterError, match="chunk"):
        dispatch.check_dispatch(recipe)
