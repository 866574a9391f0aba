"""Experts exchanged by MindSpore's AlltoAllV: its counts, the form of what travels, and that it compiles for Ascend.

Four ranks as threads; what stands for AlltoAllV refuses what Ascend would: counts that do not fit, and sending nothing.
"""

import json
from itertools import pairwise
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from mindformers import MindFormerConfig
from mindspore import Tensor

from plugins.errors import ClusterError
from plugins.expert_balance import adapter, executor, graph
from plugins.expert_balance import callback as callbacks
from plugins.expert_balance.callback import Alone, Experts
from plugins.expert_balance.graph import CollectiveRanks, ShardedExpertBalance
from plugins.expert_balance.settings import Settings
from tests.plugins.cpu_backend.ranks import meshes, on_ranks
from tests.plugins.expert_balance.compile_exchange import RANKS as VIRTUAL
from tests.plugins.expert_balance.test_executor import HERE, RANKS, check_in_place, layers_of, shuffled, write


class AlltoAllV:
    """As `plugins.expert_balance.graph.Exchange`, over a mesh of threads."""

    def __init__(self, mesh):
        self.mesh = mesh

    def set_inputs(self, *inputs):
        assert [each.shape for each in inputs[1:]] == [(RANKS,)] * 2

    def __call__(self, words, send, receive):
        words, send, receive = (each.asnumpy() for each in (words, send, receive))
        assert words.dtype == np.int32 and send.sum() == words.size and receive.sum() > 0
        parts = np.split(words, np.cumsum(send)[:-1])
        arrived = self.mesh.all_to_all_v(range(RANKS), 7, parts)
        assert [part.size for part in arrived] == receive.tolist()
        return Tensor(np.concatenate(arrived))


@pytest.fixture(scope="module")
def ranks():
    with meshes(RANKS) as every:
        yield [CollectiveRanks(range(RANKS), mesh.rank, AlltoAllV(mesh)) for mesh in every]


def test_members_in_any_order_are_told_apart():
    """The group that MindSpore makes of them is in ascending order."""
    members = [2, 0, 3, 1]

    def work(rank):
        ours = CollectiveRanks(members, rank, AlltoAllV(every[rank]))
        assert members[ours.rank] == rank
        parts = [np.full((peer + 1, 2), 10 * rank + peer) for peer in members]
        arrived = ours.all_to_all_v(range(RANKS), 0, parts)
        for peer, part in zip(members, arrived, strict=True):
            assert np.array_equal(part, np.full((rank + 1, 2), 10 * peer + rank))

    with meshes(RANKS) as every:
        on_ranks(RANKS, work)


def test_experts_are_where_each_of_four_placements_says(ranks):
    plans = [HERE, *map(shuffled, range(4))]

    def work(rank):
        layers = layers_of(ranks[rank])
        for old, new in pairwise(plans):
            executor.move(ranks[rank], layers, old, new, write)
            check_in_place(layers, new, rank)

    on_ranks(RANKS, work)


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16, np.float16, np.float32, np.int64])
@pytest.mark.parametrize("shape", [(5,), (3, 1), ()])
def test_any_type_and_number_of_rows(dtype, shape, ranks):
    """Rank r sends r x p rows to rank p; with and without being told before how many arrive."""

    def rows(sender, receiver):
        rng = np.random.default_rng([sender, receiver])
        return rng.integers(0, 200, (sender * receiver, *shape)).astype(dtype)

    def work(rank):
        parts = [rows(rank, peer) for peer in range(RANKS)]
        for told in (None, [peer * rank for peer in range(RANKS)]):
            arrived = ranks[rank].all_to_all_v(range(RANKS), 0, parts, rows=told)
            for peer, part in enumerate(arrived):
                assert part.dtype == dtype and np.array_equal(part, rows(peer, rank))

    on_ranks(RANKS, work)


def test_ranks_that_disagree_are_told(ranks):
    def work(rank):
        with pytest.raises(ClusterError, match=r"ranks \[2\] do not have the same plan"):
            executor.agree(ranks[rank], "plan", b"other" if rank == 2 else b"plan")

    on_ranks(RANKS, work)


def callback(mesh, stage, held):
    """Of a rank of one of two stages, over a mesh of one rank from each; layers 1 and 2, of which it has `held`."""
    found = object.__new__(ShardedExpertBalance)
    found.pipeline, found.copies, found.devices = mesh[stage], 1000, 2
    found.stage = SimpleNamespace(size=2)
    found.compiled = SimpleNamespace(parameter_layout_dict={f"{held}.w1": ()})
    found.layers = [Experts(i, None, None, [SimpleNamespace(name=f"{i}.w1")]) for i in (1, 2)]
    return found


def test_every_stage_has_the_loads_and_placements_of_all_layers_two_micro_batches_counted_together():
    shares = np.array([[0.5, 0.7, 0.3, 0.5], [1.25, 0.25, 0.25, 0.25]])
    slots = np.array([[3, 2, 1, 0], [0, 1, 3, 2]])

    def work(stage):
        mine = np.array([[stage == 0], [stage == 1]])  # the other's layer: nothing is counted, nothing was loaded
        ours = callback(pair, stage, stage + 1)
        return ours.of_all(shares * mine, np.where(mine, slots, np.arange(4)))

    with meshes(2) as pair:
        for tokens, places, batches in on_ranks(2, work):
            assert np.array_equal(tokens, shares * 1000) and np.array_equal(places, slots)
            assert batches.tolist() == [2, 2]


def test_groups_of_ranks_that_hold_the_same_experts_are_counted_together():
    ours = callback([Alone()], 0, 1)
    ours.layers, ours.stage = ours.layers[:1], SimpleNamespace(size=6)
    assert ours.of_all(np.array([[0.5, 0.5]]), np.array([[0, 1]]))[2].tolist() == [3]


@pytest.mark.parametrize(
    ("rank", "first", "pipeline", "group", "all_copies"),
    [(0, 0, (0, 4), (0, 1), (0, 2, 1, 3)), (6, 4, (2, 6), (6, 7), (4, 6, 5, 7))],
)
def test_whom_a_rank_of_two_stages_of_two_groups_of_two_exchanges_with(
    monkeypatch, rank, first, pipeline, group, all_copies
):
    monkeypatch.setattr(graph, "get_real_rank", lambda: rank)
    monkeypatch.setattr(graph, "get_real_group_size", lambda: 8)
    monkeypatch.setattr(graph.ms, "get_auto_parallel_context", {"pipeline_stages": 2}.get)
    monkeypatch.setattr(graph, "CollectiveRanks", lambda members, rank: members)
    ours = object.__new__(ShardedExpertBalance)
    assert ours.connect() == tuple(range(8))
    assert ours.stage == tuple(range(first, first + 4)) and ours.pipeline == pipeline
    layout = ((2, 2), (0, -1), None, None, None, "", (64, 8))
    ours.compiled = SimpleNamespace(parameter_layout_dict={"layer.w1": layout})
    assert ours._slice(SimpleNamespace(name="layer.w1", shape=(32, 8))).ranks == group
    for moment in ("adam_m", "muon_m", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert ours._slice(SimpleNamespace(name=f"{moment}.layer.w1", shape=(16, 8))).ranks == all_copies


@pytest.mark.parametrize("states", [["adam_m", "adam_v"], ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], ["muon_m"]])
def test_experts_take_all_moments_of_their_optimizer_along(states):
    """Those of the fused AdamW stayed where they were: experts trained on with the moments of others."""
    weight = SimpleNamespace(name="layer.w1", ndim=2)
    held = {f"{state}.layer.w1": SimpleNamespace(ndim=2) for state in states}
    others = {"adam_m.layer.w2": SimpleNamespace(ndim=2), "adam_v.layer.w1": SimpleNamespace(ndim=1)}
    assert callbacks._moments({**others, **held}, weight) == list(held.values())


@pytest.mark.slow
def test_it_compiles_for_virtual_devices(forks, tmp_path):
    out = tmp_path / "out.json"
    done = forks.python("-m", "tests.plugins.expert_balance.compile_exchange", out)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(out.read_text()) == [["AlltoAllV", list(range(VIRTUAL)), {"block_size": 1}]]


@pytest.mark.parametrize(("split", "counted"), [(False, [4, 8]), (True, [4, 4])])
def test_the_counted_samples_grow_with_the_batch_where_a_step_is_one_batch(monkeypatch, split, counted):
    """A sharded graph counts micro-batches, whose size does not grow."""
    monkeypatch.setattr(graph, "use_placed_experts", lambda config: None)
    recipe = {
        "use_parallel": split,
        "parallel": {"parallel_mode": 1},
        "parallel_config": {"data_parallel": 2, "expert_parallel": 2},
        "model": {"model_config": {"seq_length": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}},
        "callbacks": [],
        "runner_config": {"batch_size": 2 if split else 8, "gradient_accumulation_steps": 4 if split else 1},
        "plugins": {"batch_ramp": {"stages": [[3, 4]]}},
    }
    config = MindFormerConfig(**recipe)
    adapter._in_graph(config, Settings())
    samples = config.callbacks[0]["samples"]
    assert [samples.batch_at(step) for step in (3, 4)] == counted
