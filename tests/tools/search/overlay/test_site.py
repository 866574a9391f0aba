from dataclasses import replace

from tests.tools.search.overlay.test_write import LARGE, PLUGGED, read_back
from tools.auto.resolve import resolve
from tools.check.check import check_recipe
from tools.estimate.from_recipe import from_recipe
from tools.hardware.units import GIB
from tools.recipe.load import load_recipe
from tools.search.overlay.site import Site
from tools.search.overlay.write import overlay


def test_the_machine_is_written():
    recipe = load_recipe(LARGE)
    config, a3 = from_recipe(recipe), Site(16, "atlas_900_a3", 54 * GIB)
    assert overlay(recipe, config, Site(8, "atlas_800t_a2")) == {}
    memory = {"max_device_memory": "54GB", "mempool_block_size": "54GB"}
    wide = replace(config, ep=32, ep_mode="hierarchical")
    assert overlay(recipe, wide, a3) == {
        "context": memory,
        "parallel_config": {"expert_parallel": 32},
        "model": {"model_config": {"npu_nums_per_device": 16}},
    }
    assert overlay(recipe, replace(config, ep=1, ep_mode="global"), a3)["context"] == memory
    recipe["context"]["mempool_block_size"] = "1GB"
    del memory["mempool_block_size"]
    assert overlay(recipe, wide, a3)["context"] == memory


def test_a_group_that_straddles_nodes_is_not_for_the_plugin(tmp_path):
    recipe = load_recipe(PLUGGED)
    recipe["model"]["model_config"]["n_routed_experts"] = 240
    config = replace(from_recipe(resolve(recipe)), dp=48, ep=12, ep_mode="global", ep_cut=None)
    path, child = read_back(recipe, config, tmp_path, site=Site(16, "atlas_900_a3"))
    assert child["plugins"] == {"hierarchical_ep": False, "ep_overlap": False}
    assert not [finding for finding in check_recipe(path).errors if "plugins" in finding.key]


def test_chunks_that_a_launch_resolves_are_for_the_same_machine(tmp_path):
    recipe = load_recipe(PLUGGED)
    config = replace(from_recipe(resolve(recipe)), ep=32, ep_mode="deduplicated")
    _, child = read_back(recipe, config, tmp_path, site=Site(16, "atlas_900_a3"))
    assert child["plugins"]["hierarchical_ep"] == {"mode": "deduplicated", "hardware": "atlas_900_a3"}
    said = []
    resolve(child, said.append)
    assert said[0].startswith("plugins.ep_overlap: auto -> ")
