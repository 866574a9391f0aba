from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import RecipeError
from plugins.hierarchical_ep import settings
from plugins.hierarchical_ep.plan import MODES, make_plan
from plugins.hierarchical_ep.settings import check_room, largest_sorts
from plugins.hierarchical_ep.topology import Topology
from tools.schema.values import MODEL


@pytest.mark.parametrize("rank", [0, 5, 15, 16, 31])
def test_a_rank_knows_its_group_and_its_place(rank):
    ours = settings.read({"mode": "hierarchical"}, expert_parallel=16, devices_per_node=8, experts=32, rank=rank)
    assert ours.ranks == tuple(range(rank // 16 * 16, rank // 16 * 16 + 16))
    assert ours.ranks[ours.rank] == rank
    assert (ours.topology.nodes, ours.topology.devices_per_node) == (2, 8)


@pytest.mark.parametrize(
    ("written", "expert_parallel", "experts", "message"),
    [
        ({"mode": "hierachical"}, 16, 32, "did you mean 'hierarchical'"),
        ({"mode": "auto", "hardwere": "x"}, 16, 32, "did you mean 'hardware'"),
        ({}, 16, 32, "write `mode:`"),
        (True, 16, 32, "write `mode:`"),
        ({"mode": "global"}, 12, 32, "use 8 or 16"),
        ({"mode": "global"}, 16, 40, "does not divide the 40 routed experts"),
    ],
)
def test_wrong_settings_are_refused(written, expert_parallel, experts, message):
    with pytest.raises(RecipeError, match=message):
        settings.read(written, expert_parallel, 8, experts, rank=0)


def test_the_dispatchers_of_mindformers_stand_once():
    """Their modes are this plugin's, and their names are known to the schema."""
    assert set(settings.DISPATCHERS.values()) < set(MODES)
    assert {settings.DISPATCHER_OF[mode]: mode for mode in settings.DISPATCHER_OF} == settings.DISPATCHERS
    assert set(settings.DISPATCHERS) < set(MODEL["moe_token_dispatcher_type"]["enum"])
    root = Path(__file__).resolve().parents[3]
    sources = [path for folder in ("plugins", "tools") for path in (root / folder).rglob("*.py")]
    named = {path.name for path in sources if '"alltoall' in path.read_text()}
    assert named == {"settings.py", "values.py", "extract.py"}, "a third one, which no tool knows more of; a quotation"


class Int32:
    limit = 2**31
    spare = 0

    @staticmethod
    def numbers(kinds, count):
        return kinds * count


class Float32:
    limit = 2**24
    spare = 1

    @staticmethod
    def numbers(kinds, count):
        return max(kinds, count)


@given(
    mode=st.sampled_from(MODES),
    nodes=st.integers(1, 3),
    devices=st.integers(1, 3),
    local=st.integers(1, 3),
    top_k=st.integers(1, 3),
    tokens=st.integers(1, 5),
    data=st.data(),
)
def test_no_routing_brings_more_rows_and_one_brings_as_many(mode, nodes, devices, local, top_k, tokens, data):
    topology = Topology(nodes, devices, nodes * devices * local)
    top_k = min(top_k, topology.experts)
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    drawn = rng.permuted(np.tile(np.arange(topology.experts), (topology.ep, tokens, 1)), axis=2)[..., :top_k]
    to_first = np.broadcast_to(np.arange(top_k), drawn.shape)
    *_, (_, pairs), (_, room) = largest_sorts(mode, topology, tokens, top_k)
    for ids in (drawn, to_first):
        ranks = make_plan(mode, topology, list(ids)).ranks
        assert max(len(rank.order) for rank in ranks) <= room - local
        assert max(len(rank.row_token) for rank in ranks) * top_k <= pairs
    assert len(ranks[0].order) == room - local, "all choose the experts of rank 0"


@pytest.mark.parametrize("mode", MODES)
def test_what_cannot_be_sorted_is_refused(mode):
    two_nodes = Topology(2, 2, 16)
    # 4 ranks x 4 choices x 1,048,576 tokens, 4 local experts and the row to oneself
    check_room(mode, two_nodes, 2**20 - 1, 4, Float32)
    with pytest.raises(
        RecipeError, match=r"runner_config\.batch_size.*one of the 4 ranks .* 16,777,221 rows.*16,777,216"
    ):
        check_room(mode, two_nodes, 2**20, 4, Float32)
    # 6 kinds of 16 n + 4 rows
    check_room(mode, two_nodes, 22_369_621, 4, Int32)
    with pytest.raises(RecipeError, match=r"needs 2,147,483,7\d\d different keys, .* sorts at most 2,147,483,648"):
        check_room(mode, two_nodes, 22_369_622, 4, Int32)
