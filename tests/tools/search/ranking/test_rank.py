from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.search_regret import every_placement
from tests.tools.search.reference import cheapest_mix, predicted
from tests.tools.search.test_candidates import BASE, MODEL, request
from tools.estimate.efficiency import cluster
from tools.estimate.memory.model import all_stages
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.place import floor_seconds, place, screen
from tools.model import Latent, pattern_of
from tools.pipeline.schedules import check_schedule, pairs_up
from tools.pipeline.simulate import filling
from tools.recipe.load import load_recipe
from tools.search.candidates import RECOMPUTE, Funnel, blocks, configuration, schedule_of
from tools.search.command import _infeasible
from tools.search.ranking import workers
from tools.search.ranking.alternatives import OTHERS, search_schedules
from tools.search.ranking.predict import MemoryTable
from tools.search.ranking.rank import Chances, Ranking, explain_infeasible, feasible, mix, nearly_fitting, rank
from tools.search.ranking.run import Found, search
from tools.search.request import PLANNED, Request, read_limit, request_of


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cap", "changes"),
    [
        (0.8, {}),
        (50, {"mtp": 1, "tied": True}),
        (1, {"pattern": pattern_of(7), "experts": 0, "top_k": 0, "shared_ffn": 0, "kv_heads": 6}),
    ],
)
def test_small_spaces_agree_with_the_reference(cap, changes):
    asked = request(devices=24, batch=24, cap=cap * GIB, model=replace(MODEL, **changes))
    ranking = rank(asked)
    assert judge(asked, ranking, 250) > 8
    assert ranking.funnel.left == len(ranking.seconds)


@pytest.mark.slow
def test_a_space_with_shards_of_an_own_size_agrees_with_the_reference():
    asked = request(devices=24, batch=24, cap=GIB)
    asked = replace(asked, base=replace(asked.base, shard_size=2))
    assert judge(asked, rank(asked), 120) > 4


@pytest.mark.slow
def test_memory_does_not_depend_on_the_candidates_beside_one():
    """Of a pipeline only unsharded candidates copy weights; `feasible` looks at those whose weights fit."""
    asked = request(devices=24, batch=24)
    asked = replace(asked, base=replace(asked.base, training_graph=True))
    for block in blocks(asked, Funnel()):
        rows = np.arange(len(block))[::-1]
        every, turned = MemoryTable(asked).peaks(block), MemoryTable(asked).peaks(block.select(rows))
        assert turned == pytest.approx(every[rows], rel=1e-12), (block.pp, block.vpp)


@pytest.mark.slow
def test_a_space_under_loads_agrees_with_the_reference():
    asked = request(devices=24, batch=24, cap=GIB)
    base = replace(asked.base, overlap_dp=False)
    asked = replace(asked, base=base, skews=tuple((ep, 1 + 0.3 * (ep - 1)) for ep in range(1, 13)))
    assert configuration(asked, rank(asked).at(0).candidate._replace(ep=4)).skew == pytest.approx(1.9)
    assert judge(asked, rank(asked), 150) > 5


@pytest.mark.slow
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


def test_every_candidate_that_may_fit_if_layers_move_is_kept():
    """The bound that a search tells holds for all of them, however many there are."""
    asked = request(model=replace(MODEL, vocab=64000), cap=1.27 * GIB)
    ranking, table = rank(asked), MemoryTable(asked)
    tables = [(table.peaks(block), table.static(block), asked.room, block.recompute) for block in ranking.blocks]
    near = [nearly_fitting(*each).sum() for each in tables]
    assert len(ranking.near.seconds) == sum(near) > 256


def test_what_fits_only_far_from_balanced_layers_is_ranked_proposed_and_found_for_other_schedules(monkeypatch):
    """The first of 16 stages keeps 16 micro-batches and the last one: they hold 2 and 9 layers where balanced layers
    would not even fit on average.
    """
    model = replace(MODEL, pattern=pattern_of(64), experts=0, top_k=0, shared_ffn=0, hidden=384, heads=6, kv_heads=6)
    limits = ["pp=16", "vpp=1", "mbs=4", "recompute=planned", "shard=none"]
    asked = request(16, 256, limits, replace(model, ffn=768, vocab=480), cap=1.8 * GIB)
    asked = replace(asked, base=replace(asked.base, sequence=12288))
    ranking = rank(asked)
    (block,) = ranking.blocks
    assert MemoryTable(asked).peaks(block).min(axis=1).mean() > asked.room
    assert len(ranking.seconds) == 0 and len(ranking.near.seconds) == 1
    assert feasible(asked) and not feasible(replace(asked, cap=1.5 * GIB))
    monkeypatch.setattr(workers, "processes", lambda: 1)
    times = TimeModel(asked.hardware)
    (found,) = search_schedules(asked, ("seqpipe",), Budget(0.1), times, lambda *_: None).every
    assert found.entry and found.entry.peak <= asked.room and found.entry.candidate.pp == 16


def test_nothing_fits_is_not_all_that_a_search_says_which_the_time_limit_ended(monkeypatch, capsys):
    monkeypatch.setattr("tools.search.ranking.rank.explain_infeasible", lambda *_: ["nothing fits"])
    with pytest.raises(SystemExit):
        _infeasible(Found(request(), Ranking([], Funnel()), unplaced=3), as_json=False)
    first, second = capsys.readouterr().out.splitlines()
    assert "before it placed 3 strategies" in first and "--time-limit" in first and second == "nothing fits"


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_nearest_numbers_of_devices_are_those_on_which_something_fits():
    asked = request(20)  # over so many devices MindSpore splits no model
    every = {number: rank(replace(asked, devices=number)).least for number in range(8, 33)}
    peaks = {number: least.peak for number, least in every.items() if least}
    assert set(peaks) == {8, 16, 24, 32}
    cap = 1.01 * peaks[16]
    fits = [number for number, peak in peaks.items() if peak <= cap]
    below, above = max(n for n in fits if n < 20), min(n for n in fits if n > 20)
    asked = replace(asked, cap=cap, hardware=replace(asked.hardware, hbm_bytes=int(cap)))
    lines = explain_infeasible(asked, rank(asked))
    assert lines[-2:] == [f"nearest with fewer: --devices {below}", f"nearest with more: --devices {above}"]


SMALL = replace(MODEL, pattern=pattern_of(5, 8, 1), experts=8)


def planned(asked):
    ranking = rank(asked)
    found = [(ranking.at(index), ranking.bounds[index]) for index in range(len(ranking.seconds))]
    return ranking, [(one, bound) for one, bound in found if one.candidate.recompute == PLANNED]


@pytest.mark.slow
@given(
    st.sampled_from([{}, {"mtp": 1}, {"pattern": pattern_of(5), "experts": 0, "top_k": 0, "shared_ffn": 0}]),
    st.sampled_from([0.6, 0.9, 50]),
    st.integers(0, 10**6),
)
@settings(max_examples=6, derandomize=True)
def test_no_placement_is_under_its_bounds(changes, cap, draw):
    """Of both bounds, whatever is placed: also where memory is tight."""
    asked = request(4, 8, limits=["pp>1", "cp=1"], model=replace(SMALL, **changes), cap=cap * GIB)
    times, (_, every) = TimeModel(asked.hardware), planned(asked)
    if not every:
        return
    for index in np.random.default_rng(draw).integers(len(every), size=2):
        one, plain = every[index]
        config = configuration(asked, one.candidate)
        found = place(config, times, asked.room, Budget(1))
        quick = screen(config, times, asked.room)
        floor = floor_seconds(config, times, asked.room)
        under = screen(config, times, asked.room, 1.001 * found.step_s)
        assert plain <= found.step_s * (1 + 1e-9)
        assert max(floor, quick.least_s, under.least_s) <= found.step_s * (1 + 1e-6)
        assert found.least_s <= found.step_s
        if quick.configuration:
            assert max(quick.peak_bytes) <= asked.room
            assert quick.step_s == times.step(quick.configuration, simulated=True).total
            again = place(config, times, asked.room, Budget(0.05), start=quick)
            assert again.step_s <= quick.step_s and again.least_s <= found.step_s * (1 + 1e-6)


@pytest.mark.slow
def test_the_bound_of_a_space_is_under_all_its_placements(monkeypatch):
    """Everything placed: none is under the bound that a search of two placements tells, and it is not far away."""
    monkeypatch.setattr(workers, "processes", lambda: 1)
    asked = request(4, 8, limits=["pp=2", "cp=1", "shard=optimizer", "mode=global"], model=SMALL, cap=0.9 * GIB)
    times, (_, every) = TimeModel(asked.hardware), planned(asked)
    best = min(place(configuration(asked, one.candidate), times, asked.room, Budget(1)).step_s for one, _ in every)
    found = search(asked, 2, Budget(1), times, lambda *_: None)
    assert 0 < found.placed < len(every)
    assert 0.9 * best < found.least <= best <= found.entries[0].seconds <= 1.005 * best
    assert found.gap == 1 - found.least / found.entries[0].seconds
    assert not found.cut and found.effort == 1


def chances(best):
    asked = request(8, 16, limits=["pp>1"], model=SMALL)
    ranking = rank(asked)
    return ranking, Chances(ranking, best)


def test_only_candidates_under_the_best_are_open():
    ranking, some = chances(np.inf)
    best = float(np.median(ranking.bounds))
    _, few = chances(best)
    assert 0 < len(few.open) < len(some.open)
    assert all(few.bound(one.candidate) < best for one in few.open)
    assert few.least == min(few.bound(one.candidate) for one in few.open)


def test_tighter_bounds_close_the_space():
    _, found = chances(np.inf)
    first, second = found.left[:2]
    plain = found.bound(second.candidate)
    found.learn(first.candidate, 1e6)
    found.learn(second.candidate, 0.0)  # a looser one changes nothing
    assert found.bound(first.candidate) == 1e6 and found.bound(second.candidate) == plain
    assert found.left[0] == second and found.left[-1] == first
    found.best = 1e5
    assert first not in found.left
    for one in found.open:
        found.learn(one.candidate, 2e6)
    assert found.least == found.best and not found.left


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_plain_bound_is_near_for_equal_stages(chunks):
    """Within what the pipeline's filling and draining may be."""
    asked = request(8, 64, limits=["pp=2", f"vpp={chunks}", "cp=1"], model=replace(SMALL, pattern=pattern_of(6, 8)))
    _, every = planned(asked)
    assert every
    for one, bound in every:
        assert 0.5 * one.seconds < bound < one.seconds


@pytest.mark.parametrize("schedule", OTHERS)
def test_the_plain_bounds_of_other_schedules_are_under_steps_of_equal_stages(schedule):
    """Weight gradients of zero-bubble schedules fill what other stages wait for, and pairs hide parts of passes."""
    sizes = {"pattern": pattern_of(16), "vocab": 480, "kv_heads": 12, "hidden": 3072, "ffn": 12288}
    asked = request(8, 16, ["pp=8", "tp=1", "cp=1", "mbs=1", "vpp<=2"], replace(MODEL, **DENSE | sizes))
    asked = replace(asked, schedule=schedule)
    ranking, times = rank(asked), TimeModel(asked.hardware)
    for index, bound in enumerate(ranking.bounds.tolist()):
        config = configuration(asked, ranking.at(index).candidate._replace(recompute="none"))
        whole = times.step(config, simulated=True).total
        assert (0.2 * whole < bound < whole) if not pairs_up(schedule) else bound == 0


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h2", "interleaved_1f1b_pairs"])
def test_no_placement_is_under_the_bound_of_its_schedule(schedule, monkeypatch):
    monkeypatch.setattr(workers, "processes", lambda: 1)
    model = replace(MODEL, **DENSE | {"pattern": pattern_of(4), "kv_heads": 12})
    asked = request(4, 8, ["pp=2", "tp=1", "cp=1", "vpp=1", "shard=optimizer"], model)
    asked = replace(asked, cap=1.02 * rank(replace(asked, schedule=schedule)).least.peak)
    own, times = replace(asked, schedule=schedule), TimeModel(asked.hardware)
    (found,) = search_schedules(asked, (schedule,), Budget(0.1), times, lambda *_: None).every
    best = min(every_placement(own, one.candidate, times)[0] for one, _ in planned(own)[1])
    assert found.entry.seconds >= best
    assert 0.9 * best < found.least <= best if not pairs_up(schedule) else found.least == found.entry.bound == 0


def test_ctrl_c_while_a_schedule_is_ranked_leaves_what_was_found(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.search.ranking.alternatives.rank", interrupted)
    asked = request()
    found = search_schedules(asked, ("gpipe", "zb_h1"), Budget(1), TimeModel(asked.hardware), lambda *_: None)
    assert (found.every, found.whole) == ([], False)


LATENT = Latent(query_rank=48, kv_rank=32, nope=16, rope=8, value=16)


@pytest.mark.slow
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
    devices, batch = (16, 88) if base.schedule == "seqsmartvpp" else (24, 48) if base.shard_size == 3 else (16, 48)
    asked = Request(
        base, cluster("atlas_800t_a2"), devices, batch, 2 * GIB, "test", limits=tuple(map(read_limit, limits))
    )
    ranking = rank(asked)
    known = {tuple(map(int, place)): index for index, place in enumerate(ranking.places)}
    rng, met = np.random.default_rng(1), 0
    for number in range(400):
        if number > 120 and met > 10:
            break
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
