import importlib.util
from pathlib import Path

import numpy as np

from plugins.expert_balance.baselines import eplb, mindformers, pack
from plugins.expert_balance.plan import device_loads, greedy


def theirs():
    """`ExpertDynamicRelocation` of the installed MindFormers, without importing the whole of it."""
    root = Path(importlib.util.find_spec("mindformers").submodule_search_locations[0])
    file = root / "parallel_core/training_graph/transformer/moe/expert_mapping.py"
    spec = importlib.util.spec_from_file_location("expert_mapping", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ExpertDynamicRelocation


def cases():
    rng = np.random.default_rng(0)
    for experts, devices in ((16, 4), (64, 8), (24, 3)):
        yield rng.integers(0, 10**6, experts), devices
        yield rng.integers(0, 4, experts), devices  # many ties


def test_mindformers_greedy_is_the_installed_one():
    for loads, devices in cases():
        found, _ = theirs().expert_relocation_greedy(dict(enumerate(loads.tolist())), list(range(devices)))
        each = len(loads) // devices
        assert [device for (device,) in found.values()] == (mindformers(loads, devices) // each).tolist()


def test_greedy_of_the_plugin_packs_alike():
    for loads, devices in cases():
        each = len(loads) // devices
        assert np.array_equal(greedy(loads, devices) // each, eplb(loads, devices) // each)


def test_packs_by_hand():
    assert pack(np.array([1, 8, 2, 7]), 2).tolist() == [0, 0, 1, 1]


def test_hierarchical_eplb_packs_groups_to_nodes_first():
    """Groups of two: 10, 9, 2, 1 go as [10, 1] and [9, 2]; then the experts of each node go to its two devices."""
    loads = np.array([6, 4, 5, 4, 1, 1, 1, 0])
    slots = eplb(loads, 4, nodes=2, groups=4)
    assert (slots // 4).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert device_loads(loads, slots, 4).tolist() == [6, 5, 6, 5]
    assert np.array_equal(eplb(loads, 4, nodes=2, groups=3), eplb(loads, 4))  # nodes do not divide groups: global
