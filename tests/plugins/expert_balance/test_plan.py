import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.expert_balance.plan import (
    Prediction,
    bound,
    device_loads,
    greedy,
    imbalance,
    moved,
    next_placement,
    swaps,
)
from plugins.expert_balance.settings import METHODS, Settings
from plugins.expert_balance.swapping import improved


@st.composite
def cases(draw):
    """(loads [E], a placement, devices): few experts, many ties, zeros, one giant."""
    devices, each = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    some = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
    loads = draw(st.lists(some, min_size=devices * each, max_size=devices * each))
    old = draw(st.permutations(range(devices * each)))
    return np.array(loads), np.array(old), devices


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


def test_greedy_by_hand():
    slots = greedy(np.array([1, 8, 2, 7]), 2)  # 8 to device 0, 7 to 1, 2 to 1, 1 to 0
    assert (slots // 2).tolist() == [0, 0, 1, 1]


def test_swaps_by_hand():
    """[8, 7 | 1, 2]: 8 with 2 gives 9 and 9, 8 with 1 gives 8 and 10."""
    assert swaps(np.array([8, 7, 1, 2]), np.arange(4), 2).tolist() == [3, 1, 2, 0]


def test_a_giant_does_not_keep_the_others_unbalanced():
    loads = np.array([900, 0, 50, 40, 1, 2])
    assert device_loads(loads, swaps(loads, np.arange(6), 3, near=0.0), 3).tolist() == [900, 42, 51]


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
