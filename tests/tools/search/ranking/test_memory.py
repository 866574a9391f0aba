"""Blocks of candidates of MindFormers' compiled graphs, against one candidate at a time."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tools.search.space.reference import predicted
from tests.tools.search.space.test_candidates import BASE, MODEL
from tools.estimate.efficiency import cluster
from tools.hardware.units import GIB
from tools.model.architecture import Latent, pattern_of
from tools.search.ranking.rank import rank
from tools.search.space.candidates import RECOMPUTE, schedule_of
from tools.search.space.limits import read_limit
from tools.search.space.request import Request

LATENT = Latent(query_rank=48, kv_rank=32, nope=16, rope=8, value=16)


@pytest.mark.parametrize(
    ("changes", "limits", "seen"),
    [
        # logits are exchanged among dp and cp, with a base that depends on both; gathered keys
        ({}, ["cp>1", "tp<=2"], lambda c: c.cp > 1 and c.dp > 1),
        ({"shard_size": 2}, [], lambda c: c.shard != "none" and c.dp * c.cp > 2),
        ({"shard_size": 3, "overlap_dp": False}, [], lambda c: c.shard != "none"),
        # passes copy or cast weights: what is kept depends on ep and on sharding, too
        ({"dtype": "fp32"}, [], lambda c: c.shard == "none" and c.pp > 1),
        ({"dtype": "fp32", "weight_item": 2}, [], lambda c: c.ep > 1),
        ({"weight_item": 2, "shard_size": 2}, [], lambda c: c.pp == 1),
        # 22 micro-batches on 4 stages: two rounds of 5, three of 4
        ({"schedule": "seqsmartvpp"}, ["pp=2,4", "vpp>1"], lambda c: c.m % c.pp and c.m > 4 * c.pp),
    ],
)
def test_training_graphs_agree_with_the_reference(changes, limits, seen):
    model = replace(MODEL, pattern=pattern_of(9, 48, 1), mtp=1, latent=LATENT)
    base = replace(BASE, model=model, layers=((9,),), training_graph=True, fp32_residual=True, **changes)
    devices, batch = (16, 88) if base.schedule == "seqsmartvpp" else (12, 48) if base.shard_size == 3 else (16, 48)
    asked = Request(
        base, cluster("atlas_800t_a2"), devices, batch, 2 * GIB, "test", limits=tuple(map(read_limit, limits))
    )
    ranking = rank(asked)
    known = {tuple(map(int, place)): index for index, place in enumerate(ranking.places)}
    rng, met = np.random.default_rng(1), 0
    for _ in range(400):
        block = int(rng.integers(len(ranking.blocks)))
        row, recompute = int(rng.integers(len(ranking.blocks[block]))), int(rng.integers(len(RECOMPUTE)))
        candidate = ranking.blocks[block].candidate(row, RECOMPUTE[recompute])
        expected, index = predicted(asked, candidate), known.get((block, row, recompute))
        assert (expected is None) == (index is None), candidate
        if index is not None:
            assert (ranking.seconds[index], ranking.peaks[index]) == pytest.approx(expected, rel=1e-9), candidate
            assert base.schedule == "1f1b" or schedule_of(asked, candidate.pp, candidate.vpp) == base.schedule
            met += bool(seen(candidate))
    assert met > 10
