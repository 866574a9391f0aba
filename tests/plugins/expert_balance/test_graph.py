"""Experts exchanged by MindSpore's AlltoAllV: its counts, the form of what travels, and that it compiles for Ascend.

Four ranks as threads; what stands for AlltoAllV refuses what Ascend would: counts that do not fit, and sending nothing.
"""

import json
from itertools import pairwise

import numpy as np
import pytest
from mindspore import Tensor

from plugins.errors import ClusterError
from plugins.expert_balance import executor
from plugins.expert_balance.graph import CollectiveRanks
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
        yield [CollectiveRanks(mesh.rank, RANKS, AlltoAllV(mesh)) for mesh in every]


def test_experts_are_where_each_of_four_placements_says(ranks):
    plans = [HERE, *map(shuffled, range(4))]

    def work(rank):
        layers = layers_of(rank)
        for old, new in pairwise(plans):
            executor.move(ranks[rank], layers, old, new, write)
            check_in_place(layers, new, rank)

    on_ranks(RANKS, work)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.int64])
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
        with pytest.raises(ClusterError, match=r"ranks \[2\] do not have the plan"):
            executor.agree(ranks[rank], "plan", b"other" if rank == 2 else b"plan")

    on_ranks(RANKS, work)


@pytest.mark.slow
def test_it_compiles_for_virtual_devices(forks, tmp_path):
    out = tmp_path / "out.json"
    done = forks.python("-m", "tests.plugins.expert_balance.compile_exchange", out)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(out.read_text()) == [["AlltoAllV", list(range(VIRTUAL)), {"block_size": 1}]]
