"""How good placements are: beside the best there is, and beside greedy on loads that drift."""

from itertools import pairwise

import numpy as np
import pytest

from plugins.expert_balance.baselines import eplb
from plugins.expert_balance.plan import device_loads, imbalance, moved, swaps
from plugins.expert_balance.reference import least_by_program, least_by_trying
from plugins.expert_balance.swapping import improved
from tests.plugins.expert_balance.drifting import MILD, drifting


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
