from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.search.space.reference import cheapest_mix, predicted
from tests.tools.search.space.test_candidates import MODEL, request
from tools.estimate.memory.model import all_stages
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.model.architecture import pattern_of
from tools.pipeline.schedules import check_schedule
from tools.pipeline.simulate import filling
from tools.recipe.load import load_recipe
from tools.search.ranking.rank import feasible, mix, rank
from tools.search.space.candidates import RECOMPUTE, configuration
from tools.search.space.limits import PLANNED, read_limit
from tools.search.space.request import request_of


def judge(asked, ranking, draws, seed=0):
    """Random candidates of the blocks, fitting or not, against the reference."""
    known = {(int(b), int(r), int(p)): index for index, (b, r, p) in enumerate(ranking.places)}
    rng, fits = np.random.default_rng(seed), 0
    for _ in range(draws):
        block = int(rng.integers(len(ranking.blocks)))
        row = int(rng.integers(len(ranking.blocks[block])))
        recompute = int(rng.integers(len(RECOMPUTE)))
        candidate = ranking.blocks[block].candidate(row, RECOMPUTE[recompute])
        expected, index = predicted(asked, candidate), known.get((block, row, recompute))
        assert (expected is None) == (index is None), candidate
        if index is not None:
            fits += 1
            assert ranking.at(index).candidate == candidate
            assert (ranking.seconds[index], ranking.peaks[index]) == pytest.approx(expected, rel=1e-9), candidate
    return fits


@pytest.mark.parametrize("schedule", ["zero_bubble_v", "v_half", "zb_h1", "seqpipe", "gpipe", "interleaved_1f1b_pairs"])
def test_another_schedule_is_ranked_by_its_own_memory_and_filling(schedule):
    asked = replace(request(), schedule=schedule)
    ranking, rng = rank(asked), np.random.default_rng(0)
    for index in rng.integers(len(ranking.seconds), size=25):
        one = ranking.at(int(index))
        config = configuration(asked, one.candidate)
        check_schedule(config.schedule, config.pp, config.chunks, config.micro_batches)
        assert config.schedule == schedule and config.pp > 1
        if one.candidate.recompute != PLANNED:
            assert one.peak == pytest.approx(max(memory.peak for memory in all_stages(config)))
            simulated = TimeModel(asked.hardware).step(replace(config, overlap_ep=False), simulated=True).total
            assert one.seconds == pytest.approx(simulated, rel=0.25)  # equal stages of equal passes stand for these


def test_what_a_stage_idles_is_what_the_papers_say():
    assert filling("1f1b", 8, 1, 32) == pytest.approx(7)
    assert filling("interleaved_1f1b", 8, 4, 32) == pytest.approx(7 / 4)
    assert filling("zb_h1", 8, 1, 32) == pytest.approx(7 / 3)  # (p - 1) (F + B - 2 W) of F + B = 3


DENSE = {"pattern": pattern_of(7), "experts": 0, "top_k": 0, "shared_ffn": 0, "kv_heads": 6}


@pytest.mark.parametrize(
    ("cap", "changes"),
    [
        (0.8, {}),
        (50, {"mtp": 1, "tied": True}),
        (1, {"pattern": pattern_of(7), "experts": 0, "top_k": 0, "shared_ffn": 0, "kv_heads": 6}),
    ],
)
def test_small_spaces_agree_with_the_reference(cap, changes):
    asked = request(devices=12, batch=24, cap=cap * GIB, model=replace(MODEL, **changes))
    ranking = rank(asked)
    assert judge(asked, ranking, 250) > 8
    assert ranking.funnel.left == len(ranking.seconds)


def test_a_space_with_shards_of_an_own_size_agrees_with_the_reference():
    asked = request(devices=12, batch=24, cap=GIB)
    asked = replace(asked, base=replace(asked.base, shard_size=2))
    assert judge(asked, rank(asked), 120) > 4


def test_the_438b_space_agrees_with_the_reference():
    recipe = load_recipe("recipes/telechat3_438b/pretrain_4k.yaml")
    asked = request_of(recipe, "atlas_800t_a2", limits=tuple(map(read_limit, ["pp=4,8", "ep=8,16", "tp>1", "mbs<=4"])))
    ranking = rank(asked)
    assert judge(asked, ranking, 120) > 10
    best = next(ranking.fastest())
    assert best.seconds == ranking.seconds.min() and best.peak <= asked.cap
    short = ranking.short_list(10)
    assert short[0] == best and len(short) == 10
    assert (
        len(
            {
                (one.candidate.tp, one.candidate.pp, one.candidate.vpp, one.candidate.mbs, one.candidate.ep)
                for one in short
            }
        )
        == 10
    )
    assert [one.seconds for one in short] == sorted(one.seconds for one in short)


def test_planned_is_never_slower_than_a_uniform_policy_that_fits():
    ranking = rank(request(cap=0.4 * GIB))
    planned = RECOMPUTE.index(PLANNED)
    best = {(b, r): t for (b, r, p), t in zip(map(tuple, ranking.places), ranking.seconds, strict=True) if p == planned}
    for (block, row, _), seconds in zip(map(tuple, ranking.places), ranking.seconds, strict=True):
        assert best[block, row] <= seconds * (1 + 1e-9)


def test_least_memory_is_known_when_nothing_fits():
    ranking = rank(request(cap=0.01 * GIB))
    assert len(ranking.seconds) == 0 and ranking.funnel.left == 0
    free = rank(request())
    assert ranking.least.peak == free.least.peak <= free.peaks.min()


def test_the_least_memory_is_of_what_limits_leave():
    asked = request(cap=0.01 * GIB, limits=["recompute=none"])
    least = rank(asked).least
    assert least.candidate.recompute == "none"
    assert not feasible(replace(asked, cap=0.99 * least.peak)) and feasible(replace(asked, cap=least.peak))


@given(st.lists(st.tuples(st.floats(1, 10), st.floats(1, 10)), min_size=4, max_size=4), st.floats(1, 10))
def test_mix(points, cap):
    peaks, works = np.array(points).T
    seconds, held = mix(peaks[None, :, None], works[None, :, None], cap)
    expected = cheapest_mix(peaks, works, cap)
    if expected is None:
        assert held[0, 0] == peaks.min()
    else:
        assert seconds[0, 0] == pytest.approx(expected[0]) and held[0, 0] <= cap


@pytest.mark.parametrize("cap", [0.01, 0.4, 0.5, 50])
def test_feasible_is_whether_something_is_ranked(cap):
    asked = request(cap=cap * GIB, limits=["pp<=3"])
    assert feasible(asked) == (len(rank(asked).seconds) > 0)
