"""Planners keep their promises, and how good placements are: beside the best there is, and on loads that drift."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from plugins.expert_balance.plan import (
    Prediction,
    bound,
    device_loads,
    greedy,
    imbalance,
    improved,
    moved,
    near_enough,
    next_placement,
    node_limited,
    swaps,
)
from plugins.expert_balance.reference import least_by_program, least_by_trying
from plugins.expert_balance.replay import eplb
from plugins.expert_balance.settings import METHODS, Settings, read
from tests.plugins.expert_balance.drifting import MILD, drifting


@st.composite
def cases(draw):
    """(loads [E], a placement, devices): few experts, many ties, zeros, one giant."""
    devices, each = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    some = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
    loads = draw(st.lists(some, min_size=devices * each, max_size=devices * each))
    old = draw(st.permutations(range(devices * each)))
    return np.array(loads), np.array(old), devices


@pytest.mark.slow
@given(cases(), st.sampled_from(METHODS), st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from([None, 2, 5]))
@settings(max_examples=300)
def test_a_plan_is_a_placement_never_worse_and_within_its_budget(case, method, gate, moves):
    loads, old, devices = case
    wanted = Settings(method=method, gate=gate, moves=moves)
    new = next_placement(wanted, loads, old, devices, step=3, layer=1)
    assert sorted(new.tolist()) == list(range(len(loads)))  # a permutation: equally many on each device
    assert np.array_equal(new, next_placement(wanted, loads.copy(), old.copy(), devices, step=3, layer=1))
    if method == "random":
        return
    before, after = imbalance(loads, old, devices), imbalance(loads, new, devices)
    assert np.array_equal(new, old) or after <= before * (1 - gate) * (1 + 1e-12)
    assert after >= bound(loads, devices) / max(loads.mean() * len(loads) / devices, 1e-30) - 1e-12
    if moves is not None and method != "greedy":
        assert moved(new, old, devices) <= moves


@given(cases(), st.booleans())
@settings(max_examples=200)
def test_swaps_start_from_the_placement_there_is(case, aligned):
    loads, old, devices = case
    each = len(loads) // devices
    new = swaps(loads, old, devices, near=0.0, aligned=aligned)
    assert device_loads(loads, new, devices).max() <= device_loads(loads, old, devices).max()
    if aligned:
        assert np.array_equal(new % each, old % each)


def test_loads_of_devices_by_hand():
    loads, slots = np.array([5, 1, 2, 4]), np.array([2, 0, 3, 1])
    assert device_loads(loads, slots, 2).tolist() == [1 + 4, 5 + 2]
    assert imbalance(loads, slots, 2) == 7 / 6
    assert device_loads(np.stack([loads, loads]), np.stack([slots, np.arange(4)]), 2).tolist() == [[5, 7], [6, 6]]
    assert imbalance(np.zeros(4), slots, 2) == 1


def test_bound_is_the_mean_or_the_largest_expert_with_the_smallest():
    assert bound(np.array([3, 3, 3, 3]), 2) == 6
    assert bound(np.array([90, 1, 2, 3]), 2) == 91
    assert bound(np.array([1, 5, 5, 5]), 2) == 8


def test_greedy_by_hand():
    slots = greedy(np.array([1, 8, 2, 7]), 2)  # 8 to device 0, 7 to 1, 2 to 1, 1 to 0
    assert (slots // 2).tolist() == [0, 0, 1, 1]


def test_swaps_by_hand():
    """[8, 7 | 1, 2]: 8 with 2 gives 9 and 9, 8 with 1 gives 8 and 10."""
    assert swaps(np.array([8, 7, 1, 2]), np.arange(4), 2).tolist() == [3, 1, 2, 0]


def test_a_giant_does_not_keep_the_others_unbalanced():
    loads = np.array([900, 0, 50, 40, 1, 2])
    assert device_loads(loads, swaps(loads, np.arange(6), 3, near=0.0), 3).tolist() == [900, 42, 51]


def test_a_device_near_the_best_that_its_giant_allows_is_left_alone():
    loads, old = np.array([100, 3, 1, 49, 25, 26]), np.arange(6)  # 3 with 1 would make 101 of 103
    assert np.array_equal(improved(loads, old, 3), old)
    assert not np.array_equal(improved(loads, old, 3, near=0.01), old)


def test_experts_stay_in_their_node():
    rng = np.random.default_rng(0)
    for _ in range(20):
        loads, old = rng.integers(0, 100, 32), rng.permutation(32)
        new = improved(loads, old, 8, near=0.0, nodes=2)
        assert np.array_equal(new // 16, old // 16) and moved(new, old, 8) > 0


def test_a_layer_below_the_gate_stays():
    loads, old = np.array([10, 11, 10, 9]), np.arange(4)  # 21 and 19; a swap makes 20 and 20, 4.8 % less
    assert np.array_equal(next_placement(Settings(gate=0.05), loads, old, 2, step=1, layer=0), old)
    assert not np.array_equal(next_placement(Settings(gate=0.04), loads, old, 2, step=1, layer=0), old)


def test_a_balanced_layer_stays():
    for method in ("swaps", "aligned", "greedy"):
        for loads in (np.zeros(8), np.full(8, 7.0)):
            assert next_placement(
                Settings(method=method, gate=0), loads, np.arange(8), 4, step=1, layer=0
            ).tolist() == [*range(8)]


def test_random_shuffles_anew_at_each_step_and_layer():
    plans = {
        tuple(next_placement(Settings(method="random"), np.ones(16), np.arange(16), 4, step=step, layer=layer))
        for step in range(3)
        for layer in range(3)
    }
    assert len(plans) == 9


def test_prediction_is_an_average_that_forgets():
    prediction = Prediction(0.75)
    assert prediction.loads is None
    prediction.see([[4, 8]])
    prediction.see([[8, 8]])
    assert prediction.loads.tolist() == [[5, 8]]


def test_prediction_fed_again_is_the_same_to_the_bit():
    history = np.random.default_rng(0).integers(0, 10**6, (50, 3, 16))
    one, other = Prediction(0.8), Prediction(0.8)
    for loads in history:
        one.see(loads)
        other.see(loads.tolist())
    assert one.loads.tobytes() == other.loads.tobytes()


@given(st.integers(0, 10**6), st.sampled_from([None, 4, 16]), st.booleans(), st.sampled_from([(2, 4), (3, 6), (2, 12)]))
@settings(max_examples=100)
def test_plans_for_nodes_keep_the_budget_and_fill_no_device_more(seed, moves, aligned, sizes):
    rng = np.random.default_rng(seed)
    loads, (nodes, devices) = rng.integers(0, 1000, 48), sizes
    wanted = Settings(moves=moves, gate=0, method="aligned" if aligned else "swaps")
    slots = np.arange(48)
    for step in range(3):
        new = next_placement(wanted, loads, slots, devices, step=step, layer=0, nodes=nodes)
        assert sorted(new.tolist()) == list(range(48))
        assert device_loads(loads, new, devices).max() <= device_loads(loads, slots, devices).max()
        assert moves is None or moved(new, slots, devices) <= moves
        slots, loads = new, rng.integers(0, 1000, 48)


@pytest.mark.parametrize(("moves", "experts"), [(2, 64), (4, 64), (None, 16)])
def test_plans_for_nodes_come_to_an_end_only_where_no_swap_helps(moves, experts):
    """Plans that balance the nodes first, and thereby leave the fullest device as full, are not made for ever in
    vain.
    """
    for seed in range(10):
        loads = np.exp(np.random.default_rng(seed).normal(0, 0.6, experts)) * 1000
        wanted, slots = Settings(moves=moves), np.arange(experts)
        for step in range(40):
            slots = next_placement(wanted, loads, slots, 8, step=step, layer=0, nodes=4)
        by_devices = next_placement(wanted, loads, slots, 8, step=40, layer=0)
        assert np.array_equal(by_devices, slots)


@pytest.mark.parametrize("seed", range(5))
def test_nodes_are_balanced_expert_by_expert(seed):
    rng = np.random.default_rng(seed)
    loads = np.sort(rng.integers(0, 1000, 64))  # the last node has most
    new = node_limited(loads, np.arange(64), devices=8, nodes=4)
    on = device_loads(loads, new, 4)
    assert on.max() < 1.025 * on.mean()
    assert device_loads(loads, new, 8).max() < 1.04 * loads.sum() / 8


def fullest(loads, slots, devices):
    return device_loads(loads, slots, devices).max()


def skewed(seed, spread, experts):
    return drifting(seed, spread, 0.5, periods=6, layers=1, experts=experts, tokens=8 * 65536)[:, 0]


@pytest.mark.parametrize(("experts", "devices"), [(8, 4), (8, 2), (10, 2), (12, 3), (12, 4), (9, 3)])
def test_swaps_are_within_a_percent_of_the_best_of_all_placements(experts, devices):
    for spread in (0.3, 0.6, 1.0):
        for loads in skewed(1, spread, experts):
            found = fullest(loads, swaps(loads, np.arange(experts), devices, near=0.0), devices)
            assert found <= 1.01 * least_by_trying(loads, devices)


def test_nine_experts_on_three_devices_are_also_planned_from_shuffles():
    """Three of these ended up to 1.8 % above the best when greedy's was the only other start."""
    for seed in range(1, 13):
        for loads in (loads for spread in (0.3, 0.6, 1.0) for loads in skewed(seed, spread, 9)):
            found = fullest(loads, swaps(loads, np.arange(9), 3, near=0.0), 3)
            assert found <= 1.002 * least_by_trying(loads, 3)


@pytest.mark.parametrize("spread", [0.6, 1.0])
def test_swaps_are_within_one_percent_of_the_program_of_16_experts_on_4_devices(spread):
    for loads in skewed(2, spread, 16):
        assert fullest(loads, swaps(loads, np.arange(16), 4, near=0.0), 4) <= 1.01 * least_by_program(loads, 4)


def test_the_program_and_trying_agree():
    for loads in skewed(3, 0.6, 8):
        assert least_by_program(loads, 4) == pytest.approx(least_by_trying(loads, 4), rel=1e-5)


def periods(loads, devices, planner):
    """(mean max/mean of the next period, mean moves of a layer after the first plan)."""
    old = np.tile(np.arange(loads.shape[2]), (loads.shape[1], 1))
    ratios, moves = [], []
    for now, later in pairwise(loads):
        new = np.stack([planner(*pair) for pair in zip(now, old, strict=True)])
        ratios.append(imbalance(later, new, devices).mean())
        moves.append(moved(new, old, devices) / len(old))
        old = new
    return np.mean(ratios), np.mean(moves[1:])


@pytest.mark.parametrize("devices", [8, 16, 32, 64])
@pytest.mark.parametrize(("spread", "keep"), MILD)
def test_swaps_are_no_worse_than_greedy_in_the_next_period_with_a_tenth_of_the_moves(devices, spread, keep):
    loads = drifting(5, spread, keep, periods=8, layers=6, experts=256)
    ours, few = periods(loads, devices, lambda now, old: swaps(now, old, devices))
    theirs, many = periods(loads, devices, lambda now, old: eplb(now, devices))
    assert ours <= theirs + 5e-4  # the third decimal: both plan below the noise of counting
    assert few * 10 <= many
    stay, _ = periods(loads, devices, lambda now, old: old)
    assert ours < stay


def test_aligned_swaps_cost_little():
    loads = drifting(6, 0.3, 0.99, periods=6, layers=4, experts=256)
    for devices in (16, 64):
        free, _ = periods(loads, devices, lambda now, old, d=devices: swaps(now, old, d))
        aligned, _ = periods(loads, devices, lambda now, old, d=devices: swaps(now, old, d, aligned=True))
        assert aligned <= free + 0.02


def test_few_experts_are_also_planned_from_elsewhere():
    """Swaps from the placement there is end 1.6 % above the best of all placements (from `drifting`, spread 0.6)."""
    loads = np.array([19397, 68976, 53767, 37601, 46953, 19600, 57058, 20080, 86196, 22572, 23951, 68137])
    least = least_by_trying(loads, 3)
    assert fullest(loads, improved(loads, np.arange(12), 3, near=0.0), 3) > 1.015 * least
    assert fullest(loads, swaps(loads, np.arange(12), 3, near=0.0), 3) == least


def test_few_experts_are_planned_from_elsewhere_only_where_that_is_clearly_better():
    rng = np.random.default_rng(0)
    for _ in range(60):
        loads, old = rng.integers(0, 1000, 12), rng.permutation(12)
        here, found = (plan(loads, old, 3) for plan in (improved, swaps))
        better = fullest(loads, found, 3) * (1 + near_enough(4)) < fullest(loads, here, 3)
        assert better or np.array_equal(found, here)


def test_an_empty_section_has_the_defaults():
    assert read({}) == Settings(20, "swaps", None, 0.01, 0.8, True, True, 0)


def test_what_is_written_is_read():
    written = {"every": 3, "method": "aligned", "moves": 8, "gate": 0, "memory": 0.5, "record": True, "routers": False}
    written["spare"] = 2
    assert read(written) == Settings(**written)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (True, "expert_balance: False"),
        ({"evry": 2}, "did you mean 'every'"),
        ({"every": -1}, "0 to record only"),
        ({"every": 2.0}, "0 to record only"),
        ({"method": "swap"}, "did you mean 'swaps'"),
        ({"method": None}, "is none of"),
        ({"moves": 1}, "one swap moves two"),
        ({"moves": True}, "one swap moves two"),
        ({"moves": 8, "method": "greedy"}, "cannot obey a limit"),
        ({"gate": 1}, "share from 0 to below 1"),
        ({"gate": "1 %"}, "share from 0 to below 1"),
        ({"memory": -0.1}, "share from 0 to below 1"),
        ({"memory": float("nan")}, "share from 0 to below 1"),
        ({"memory": True}, "share from 0 to below 1"),
        ({"record": 1}, "write True or False"),
        ({"every": 0, "record": False, "routers": False}, "neither moves"),
        ({"spare": -1}, "slots of a device"),
        ({"spare": 1.0}, "slots of a device"),
        ({"spare": 1, "every": 0}, "planned together with moves"),
        ({"spare": 1, "record": False}, "reads from the record"),
    ],
)
def test_wrong_settings_are_refused(written, message):
    with pytest.raises(RecipeError, match=message):
        read(written)
