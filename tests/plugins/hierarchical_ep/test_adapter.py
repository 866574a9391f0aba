"""These tests check what the adapters refuse, and that the dispatcher on CPU returns every token in each mode on four
workers; other tests show what the adapters do by training (tests/training) and by compiling (test_ascend.py).
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindformers import MindFormerConfig
from mindformers.parallel_core.transformer_config import TransformerConfig
from mindspore import Tensor, nn

from plugins import telechat3_moe
from plugins.cpu_backend import transport
from plugins.cpu_backend.expert_parallel import Net, Rows
from plugins.cpu_backend.transport import Mesh
from plugins.ep_overlap import adapter as overlap
from plugins.errors import RecipeError
from plugins.hierarchical_ep import adapter, settings
from plugins.hierarchical_ep.dispatcher import Dispatcher, first_turn, pack
from plugins.hierarchical_ep.experts import RoutedExperts
from plugins.hierarchical_ep.plan import MODES, make_plan
from plugins.hierarchical_ep.settings import check_room, largest_sorts
from plugins.hierarchical_ep.topology import Topology
from tools.schema.values import MODEL


def config(target="CPU", use_parallel=True, **changes):
    model = {
        "architectures": ["TeleChat3MoeForCausalLM"],
        "moe_token_dispatcher_type": "alltoall",
        "npu_nums_per_device": 2,
        "n_routed_experts": 16,
        **changes,
    }
    return MindFormerConfig(
        use_parallel=use_parallel,
        context={"device_target": target},
        parallel_config={"expert_parallel": 4},
        runner_config={"batch_size": 2},
        model={"model_config": model},
        plugins={"hierarchical_ep": {"mode": "global"}},
    )


@pytest.fixture(autouse=True)
def first_rank(monkeypatch):
    """No test has workers to ask for their rank."""
    monkeypatch.setattr(adapter, "get_rank", lambda: 0)


def test_a_process_alone_has_all_experts(enable):
    """The degree of a recipe whose `use_parallel` is off is the one of another run of it."""
    enable(config(use_parallel=False), {"mode": "global"})
    assert adapter.current().topology == Topology(1, 1, 16) and adapter.current().ranks == (0,)


@pytest.fixture
def enable(monkeypatch):
    """`adapter.enable` without workers to connect to; no trace of it for other tests."""
    monkeypatch.setattr(transport, "connect", lambda: None)
    monkeypatch.setattr(telechat3_moe, "_experts", [])
    monkeypatch.setattr(adapter, "_current", [])
    return adapter.enable


@pytest.mark.parametrize(("written", "nodes"), [({"npu_nums_per_device": 2}, 2), ({"npu_nums_per_device": None}, 1)])
def test_a_node_that_no_key_describes_has_eight_devices(enable, written, nodes):
    enable(config(**written), {"mode": "global"})
    assert adapter.current().topology == Topology(nodes, 4 // nodes, 16)
    without = config()
    del without.model.model_config["npu_nums_per_device"]
    enable(without, {"mode": "global"})
    assert adapter.current().topology == Topology(1, 4, 16)


def test_more_tokens_than_can_be_sorted_are_refused_when_the_model_is_built(enable):
    enable(config(), {"mode": "deduplicated"})
    ours = adapter.current()
    model = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=16,
        moe_ffn_hidden_size=8,
        moe_router_topk=4,
        seq_length=2**24,
        add_bias_linear=False,
        gated_linear_unit=True,
    )
    assert len(ours.slices(model)[0]) == 2 * 2**24
    with pytest.raises(RecipeError, match=r"33,554,432 tokens on each rank and 4 experts per token"):
        RoutedExperts(model, ours, None, Rows(), streams=1)


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"moe_token_dispatcher_type": "alltoall_deredundency"}, {"mode": "global"}, "sets this key itself"),
        ({"n_routed_experts": 18}, {"mode": "global"}, "does not divide the 18"),
        ({}, {"mode": "auto"}, "auto has not been replaced by a value yet"),
        (
            {"target": "Ascend", "architectures": ["DeepseekV3ForCausalLM"]},
            {"mode": "global"},
            "'DeepseekV3ForCausalLM'",
        ),
    ],
)
def test_what_cannot_be_is_refused(changed, settings, message):
    with pytest.raises(RecipeError, match=message):
        adapter.enable(config(**changed), settings)


def test_overlap_needs_a_dispatch_and_resolved_chunks():
    alone = config()
    alone.plugins = {"ep_overlap": {"chunks": [1, 2]}}
    with pytest.raises(RecipeError, match=r"switch on plugins.hierarchical_ep, too"):
        overlap.enable(alone, {"chunks": [1, 2]})
    with pytest.raises(RecipeError, match=r"auto has not been replaced by a value yet"):
        overlap.enable(config(), {"chunks": "auto"})


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
        ({"mode": "global"}, 12, 32, "write 8 or 16"),
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
    assert named == {"settings.py", "values.py"}, "a third one, which no tool knows more of"


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
    with pytest.raises(RecipeError, match=r"needs 2,147,483,7\d\d different keys, .* can use at most 2,147,483,648"):
        check_room(mode, two_nodes, 22_369_622, 4, Int32)


EXPERTS, TOP_K, HIDDEN = 4, 4, 2


class Alone(nn.Cell):
    """There and back on one rank, with experts that change nothing."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.dispatcher = Dispatcher("global", Topology(1, 1, EXPERTS), 0, HIDDEN, TOP_K, Net([0]), Rows())

    def construct(self, tokens, probs, ids):
        copies, ends, route, turn = self.dispatcher.to_experts(tokens, pack(probs, ids), first_turn(tokens))
        out, turn = self.dispatcher.from_experts(copies, route, turn)
        return out, ends


@pytest.mark.slow
@pytest.mark.usefixtures("graph_mode")
def test_more_rows_than_the_root_of_what_int32_holds(monkeypatch):
    monkeypatch.setattr(transport, "_open", [Mesh(0, 1)])
    rng, count = np.random.default_rng(3), 16_000
    tokens = rng.standard_normal((count, HIDDEN)).astype(np.float32)
    probs = rng.random((count, TOP_K)).astype(np.float32)
    ids = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (count, 1)), axis=1)
    assert (count * TOP_K) ** 2 > 2**31
    out, ends = Alone()(Tensor(tokens), Tensor(probs), Tensor(ids))
    np.testing.assert_allclose(out.asnumpy(), tokens * probs.sum(1, keepdims=True), atol=1e-5)
    np.testing.assert_array_equal(ends.asnumpy(), count * np.arange(1, EXPERTS + 1))


WORKER = Path(__file__).with_name("exchange_worker.py")


@pytest.mark.slow
def test_every_mode_on_four_workers(workers, tmp_path):
    codes, logs = workers.cluster(4, [WORKER], tmp_path)
    for log in logs[1:]:
        assert "all modes agree" in log, log[-3000:]
    assert not any(codes), codes
