import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.expert_balance.plan import device_loads, moved, next_placement, node_limited
from plugins.expert_balance.settings import Settings


@given(st.integers(0, 10**6), st.sampled_from([None, 4, 16]), st.booleans())
@settings(max_examples=100)
def test_groups_stay_whole_and_the_budget_is_kept(seed, moves, aligned):
    rng = np.random.default_rng(seed)
    loads, nodes, devices, groups = rng.integers(0, 1000, 48), 2, 4, 6
    wanted = Settings(moves=moves, gate=0, method="aligned" if aligned else "swaps")
    slots = np.arange(48)
    for step in range(3):
        new = next_placement(wanted, loads, slots, devices, step=step, layer=0, nodes=nodes, groups=groups)
        assert sorted(new.tolist()) == list(range(48))
        assert device_loads(loads, new, devices).max() <= device_loads(loads, slots, devices).max()
        node = (new // 24).reshape(groups, 8)
        assert (node == node[:, :1]).all()
        assert moves is None or moved(new, slots, devices) <= moves
        slots, loads = new, rng.integers(0, 1000, 48)


def test_groups_change_nodes():
    """Nodes of groups [9 + 9 | 1 + 1]: one group each way."""
    loads = np.repeat([9, 9, 1, 1], 4)
    new = node_limited(loads, np.arange(16), devices=4, nodes=2, groups=4)
    assert device_loads(loads, new, 2).tolist() == [40, 40]
    assert device_loads(loads, new, 4).tolist() == [20, 20, 20, 20]


@pytest.mark.parametrize("seed", range(5))
def test_nodes_are_balanced_expert_by_expert_where_there_are_no_groups(seed):
    rng = np.random.default_rng(seed)
    loads = np.sort(rng.integers(0, 1000, 64))  # the last node has most
    new = node_limited(loads, np.arange(64), devices=8, nodes=4)
    on = device_loads(loads, new, 4)
    assert on.max() < 1.025 * on.mean()
    assert device_loads(loads, new, 8).max() < 1.04 * loads.sum() / 8
