"""Copies of hot experts: what a plan promises, beside slow planners and the best there is; where tokens go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.expert_balance.copies import (
    NOTHING,
    Table,
    added_up,
    divided,
    fullest,
    imbalance_with,
    loads_with,
    next_copies,
    next_state,
    none,
    planned,
    with_copies,
)
from plugins.expert_balance.plan import PARTS, device_loads, imbalance, next_placements
from plugins.expert_balance.reference import chosen_slowly, divided_slowly, least_with_copies, planned_slowly
from plugins.expert_balance.replay import eplb_with_copies
from plugins.expert_balance.settings import Settings
from tests.plugins.cpu_backend.ranks import meshes, on_ranks


@st.composite
def cases(draw, most=5):
    """(loads [E], a placement, devices, spare slots of a device): many ties, zeros, giants."""
    devices, each, spare = draw(st.integers(2, most)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    some = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
    loads = draw(st.lists(some, min_size=devices * each, max_size=devices * each))
    slots = draw(st.permutations(range(devices * each)))
    return np.array(loads), np.array(slots), devices, spare


@given(cases(), st.sampled_from([0.0, 0.01, 0.2]))
@settings(max_examples=100)
def test_a_plan_is_that_of_the_slow_planner(case, least):
    loads, slots, devices, spare = case
    expected = planned_slowly(loads.tolist(), slots.tolist(), devices, spare, least)
    assert planned(loads, slots, devices, spare, least).tolist() == expected


@given(cases())
@settings(max_examples=100)
def test_no_device_is_fuller_than_without_copies_and_every_slot_holds_one_thing(case):
    loads, slots, devices, spare = case
    copies, each = planned(loads, slots, devices, spare), len(loads) // devices
    assert copies.shape == (devices * spare,)
    before, after = (
        loads_with(loads[None], slots[None], one[None], devices)[0] for one in (none(1, devices, spare)[0], copies)
    )
    assert np.array_equal(before, device_loads(loads, slots, devices))
    assert after.max() <= before.max() + 1e-9 and after.sum() == pytest.approx(before.sum())
    assert after.max() <= fullest(loads, slots, copies, devices) <= before.max()
    table = Table(slots, copies, devices)
    used = [slot for row, count in zip(table.instances, table.count, strict=True) for slot in row[:count]]
    assert len(used) == len(set(used)) == len(loads) + (copies != NOTHING).sum(), "a slot of two experts, or none"
    assert (table.count >= 1).all() and max(used) < devices * (each + spare)
    for row, count in zip(table.instances, table.count, strict=True):
        assert len(set(row[:count] // (each + spare))) == count, "an expert twice on a device"


@given(cases(most=3).filter(lambda case: (len(case[0]) + 1) ** (case[2] * case[3]) < 20000))
@settings(max_examples=30)
def test_a_plan_never_beats_the_best_of_all(case):
    loads, slots, devices, spare = case
    best = least_with_copies(loads.tolist(), slots.tolist(), devices, spare)
    assert fullest(loads, slots, planned(loads, slots, devices, spare), devices) >= best


def test_plans_are_near_the_best_of_all():
    """Random skewed loads: the worst of 40 cases and the mean."""
    rng, over = np.random.default_rng(0), []
    for _ in range(40):
        loads, slots = rng.integers(1, 1000, 6) ** 2, rng.permutation(6)
        best = least_with_copies(loads.tolist(), slots.tolist(), 3, 1)
        over.append(fullest(loads, slots, planned(loads, slots, 3, 1), 3) / best - 1)
    assert np.mean(over) < 0.04 and max(over) < 0.2


def test_copies_by_hand():
    """Device 0 has experts of 90 and 10 tokens, device 1 of 20 and 20: a copy of the first halves its 90."""
    loads, slots = np.array([90, 10, 20, 20]), np.arange(4)
    copies = planned(loads, slots, 2, 1)
    assert copies.tolist() == [NOTHING, 0] or copies.tolist() == [2, 0]
    assert loads_with(loads[None], slots[None], np.array([[NOTHING, 0]]), 2).tolist() == [[55, 85]]
    assert imbalance_with(loads[None], slots[None], np.array([[NOTHING, 0]]), 2)[0] == 85 / 70
    assert imbalance_with(loads[None], slots[None], none(1, 2, 1), 2)[0] == imbalance(loads, slots, 2)


@given(cases(), st.integers(0, 4), st.integers(0, 2**32))
@settings(max_examples=100)
def test_tokens_go_in_turn_to_all_slots_of_their_expert(case, rank, seed):
    loads, slots, devices, spare = case
    copies, rng = planned(loads, slots, devices, spare), np.random.default_rng(seed)
    table = Table(slots, copies, devices)
    homes = rng.integers(0, len(loads), (1, 7, 3)).astype(np.int32)
    chosen = table.choose(homes, rank)
    assert chosen.shape == homes.shape and chosen.dtype == np.int32
    expected = chosen_slowly(homes.reshape(-1).tolist(), slots.tolist(), copies.tolist(), devices, rank)
    assert chosen.reshape(-1).tolist() == expected
    for home in np.unique(homes):
        there = chosen[homes == home]
        counts = [(there == slot).sum() for slot in table.instances[home, : table.count[home]]]
        assert sum(counts) == len(there) and max(counts) - min(counts) <= 1


@given(cases())
@settings(max_examples=100)
def test_what_ranks_send_and_take_are_the_same_experts(case):
    loads, slots, devices, spare = case
    copies, each = planned(loads, slots, devices, spare), len(loads) // devices
    table, at = Table(slots, copies, devices), np.argsort(slots)
    filled = np.full((devices, spare), NOTHING)
    for rank in range(devices):
        taken = table.taken(rank)
        for peer in range(devices):
            sent = table.sent(peer)[rank]
            assert len(sent) == len(taken[peer])
            filled[rank, taken[peer]] = at[peer * each + sent]
    assert np.array_equal(filled.reshape(-1), copies)


SKEWED = np.array([[900, 100, 200, 200, 100, 100, 200, 200]])
HOME = np.arange(8)[None]


def decided(loads, old, stayed=True, **changes):
    wanted = Settings(**{"spare": 1, **changes})
    given_ = {"stayed": np.array([stayed]), "step": 7}
    return next_copies(wanted, np.asarray(loads, float), HOME, old, 4, **given_)


def test_copies_are_kept_until_others_are_better_by_the_gate():
    first = decided(SKEWED, none(1, 4, 1))
    assert (first != NOTHING).any()
    wobbled = SKEWED + np.array([[1, -1, 2, -2, 0, 1, -1, 1]])
    assert np.array_equal(decided(wobbled, first), first)
    other = SKEWED[:, ::-1]
    assert not np.array_equal(decided(other, first), first)


def test_fewer_copies_that_leave_a_device_fuller_do_not_take_their_place():
    """The planner finds one copy, with which the fullest device has 66 tokens; the two that are there leave it 57."""
    loads, there = np.array([27, 13, 60, 12]), np.array([2, 0])
    found = planned(loads, np.arange(4), 2, 1, 0.01)
    assert (found != NOTHING).sum() == 1
    assert [fullest(loads, np.arange(4), each, 2) for each in (there, found)] == [57, 66]
    now = {"stayed": np.array([True]), "step": 7}
    kept = next_copies(Settings(spare=1), loads[None].astype(float), np.arange(4)[None], there[None], 2, **now)
    assert kept.tolist() == [[2, 0]]


@given(cases(), st.sampled_from([0.0, 0.01, 0.2]), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_copies_are_exchanged_only_by_the_gate(case, gate, random):
    """What is there stays, unless more copies are better by the gate, or fewer are not worse by it."""
    loads, slots, devices, spare = case
    before = loads.copy() if random.random() < 0.3 else loads + np.array([random.randrange(200) for _ in loads])
    there, nothing = planned(before, slots, devices, spare), none(1, devices, spare)[0]
    wanted = planned(loads * PARTS, slots, devices, spare, gate)
    now, best, without = (fullest(loads * PARTS, slots, each, devices) for each in (there, wanted, nothing))
    if best == without or without - best < gate * without:
        wanted, best = nothing, without
    least = gate * max(now, best)
    if (wanted != NOTHING).sum() < (there != NOTHING).sum():
        stays = best > now and best - now >= least
    else:
        stays = not (best < now and now - best >= least)
    given_ = {"stayed": np.array([True]), "step": 1}
    found = next_copies(
        Settings(spare=spare, gate=gate), loads[None].astype(float), slots[None], there[None], devices, **given_
    )
    assert np.array_equal(found[0], there if stays else wanted)


def test_even_loads_need_no_copies_and_lose_those_there_are():
    even = np.full((1, 8), 100)
    assert (decided(even, decided(SKEWED, none(1, 4, 1))) == NOTHING).all()


def test_experts_that_moved_get_new_copies():
    stale = np.array([[2, 0, NOTHING, NOTHING]])
    assert np.array_equal(decided(SKEWED, stale, stayed=False), decided(SKEWED, none(1, 4, 1)))


@given(cases())
@settings(max_examples=50)
def test_homes_keep_what_the_slow_planner_leaves_them(case):
    loads, _, devices, spare = case
    assert divided(loads, devices, spare).tolist() == divided_slowly(loads.tolist(), devices, spare)


@given(cases(), st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from(["swaps", "aligned", "greedy"]))
@settings(max_examples=100)
def test_a_state_is_no_worse_than_moves_alone_but_for_the_gate_and_the_next_one_is_the_same(case, gate, method):
    loads, slots, devices, spare = case
    wanted, start = Settings(spare=spare, gate=gate, method=method), none(1, devices, spare)
    predicted = loads[None].astype(float)
    homes, copies = next_state(wanted, predicted, slots[None], start, devices, step=3)
    assert sorted(homes[0]) == list(range(len(loads)))
    Table(homes[0], copies[0], devices)  # no copy beside its own expert
    moves = next_placements(wanted, predicted, slots[None], devices, step=3)
    after, without = (fullest(loads * PARTS, *each, devices) for each in ((homes[0], copies[0]), (moves[0], start[0])))
    assert after * (1 - gate) <= without
    again = next_state(wanted, predicted, homes, copies, devices, step=6)
    assert fullest(loads * PARTS, again[0][0], again[1][0], devices) <= after
    if gate:
        assert (np.array_equal(again[0], homes) and np.array_equal(again[1], copies)) or fullest(
            loads * PARTS, again[0][0], again[1][0], devices
        ) <= (1 - gate) * after


@given(cases(), st.sampled_from([0.0, 0.01, 0.2]))
@settings(max_examples=40)
def test_homes_stay_unless_other_homes_are_better_by_the_gate(case, gate):
    loads, slots, devices, spare = case
    wanted, start, predicted = Settings(spare=spare, gate=gate), none(1, devices, spare), loads[None].astype(float)
    parts = divided(loads * PARTS, devices, spare)[None] / PARTS
    homes = [slots[None], *(next_placements(wanted, each, slots[None], devices, step=3) for each in (predicted, parts))]
    stayed = [np.array([np.array_equal(each[0], slots)]) for each in homes]
    plans = [
        (each, next_copies(wanted, predicted, each, start, devices, stayed=same, step=3))
        for each, same in zip(homes, stayed, strict=True)
    ]
    after = [fullest(loads * PARTS, each[0], copies[0], devices) for each, copies in plans]
    expected = plans[after.index(min(after)) if after[0] - min(after) >= gate * after[0] else 0]
    found = next_state(wanted, predicted, slots[None], start, devices, step=3)
    assert all(map(np.array_equal, found, expected))


def test_homes_are_planned_with_their_copies_in_mind():
    """One expert has half of all tokens: moves leave max/mean above 2, but copies of this expert together with swaps
    bring it near 1.
    """
    loads = np.array([[800, 150, 120, 110, 100, 90, 80, 150]], float)
    wanted, start = Settings(spare=1), none(1, 4, 1)
    moves = next_placements(wanted, loads, HOME, 4, step=3)
    homes, copies = next_state(wanted, loads, HOME, start, 4, step=3)
    first = next_copies(wanted, loads, moves, start, 4, stayed=np.array([False]), step=3)
    assert imbalance(loads, moves, 4)[0] > 2
    assert imbalance_with(loads, homes, copies, 4)[0] < 1.2
    assert imbalance_with(loads, homes, copies, 4)[0] <= imbalance_with(loads, moves, first, 4)[0]


def test_random_copies_are_of_other_devices():
    found = decided(SKEWED, none(1, 4, 2), method="random", spare=2).reshape(4, 2)
    for device, row in enumerate(found):
        assert len(set(row)) == 2 and all(expert // 2 != device for expert in row)


@given(cases())
@settings(max_examples=100)
def test_eplb_fills_every_slot_and_leaves_no_expert_out(case):
    loads, _, devices, spare = case
    held = eplb_with_copies(loads, devices, spare)
    assert held.shape == (devices, len(loads) // devices + spare)
    assert set(held.reshape(-1)) == set(range(len(loads)))


def test_eplb_copies_the_hottest_part_by_hand():
    """90 tokens are halved and halved again, then go with the smallest."""
    held = eplb_with_copies(np.array([90, 10, 20, 20]), 2, 1)
    assert sorted(held.reshape(-1).tolist()) == [0, 0, 0, 1, 2, 3]
    assert all(0 in row for row in held)


RANKS, EACH, ROWS, WIDTH, PAIRS = 3, 2, 4, 5, 24


@pytest.mark.parametrize("seed", range(4))
def test_copies_compute_and_learn_as_their_homes_alone(seed):
    """Three ranks, forward and backward, against one process without copies: outputs and the homes' gradients.

    Integers, so that sums are the same in any order.
    """
    rng, experts = np.random.default_rng(seed), RANKS * EACH
    slots, spare = rng.permutation(experts), 2
    copies = np.array([rng.permutation(np.flatnonzero(slots // EACH != device))[:spare] for device in range(RANKS)])
    copies[0, seed % spare] = NOTHING
    table = Table(slots, copies.reshape(-1), RANKS)
    weights = rng.integers(-9, 9, (experts, ROWS, WIDTH)).astype(np.float64)  # by home
    rows, dout = (rng.integers(-9, 9, (RANKS, PAIRS, wide)).astype(np.float64) for wide in (ROWS, WIDTH))
    homes = rng.integers(0, experts, (RANKS, PAIRS))
    expected = np.einsum("rpi,rpio->rpo", rows, weights[homes])
    gradient = np.zeros_like(weights)
    np.add.at(gradient, homes, np.einsum("rpi,rpo->rpio", rows, dout))

    wide = EACH + spare
    chosen = np.stack([table.choose(homes[rank], rank) for rank in range(RANKS)])
    assert (chosen % wide >= EACH).any(), "some pairs go to copies"
    with meshes(RANKS) as mesh:

        def work(rank):
            own = weights[rank * EACH : (rank + 1) * EACH].reshape(-1, WIDTH)
            here = with_copies(own, table, mesh[rank], range(RANKS), 0).reshape(wide, ROWS, WIDTH)
            mine = chosen // wide == rank  # what the dispatch brings here, from all ranks
            out = np.einsum("pi,pio->po", rows[mine], here[chosen[mine] % wide])
            parts = np.zeros_like(here)
            np.add.at(parts, chosen[mine] % wide, np.einsum("pi,po->pio", rows[mine], dout[mine]))
            return mine, out, added_up(parts.reshape(-1, WIDTH), table, mesh[rank], range(RANKS), 1)

        found = on_ranks(RANKS, work)
    for rank, (mine, out, total) in enumerate(found):
        assert np.array_equal(out, expected[mine])
        assert np.array_equal(total.reshape(EACH, ROWS, WIDTH), gradient[rank * EACH : (rank + 1) * EACH])
    assert sum(mine.sum() for mine, _, _ in found) == RANKS * PAIRS


def test_without_copies_nothing_is_sent():
    table, own = Table(np.arange(4), none(1, 2, 1)[0], 2), np.arange(8.0).reshape(4, 2)

    class Silent:
        rank, size = 1, 2

    filled = with_copies(own, table, Silent(), range(2), 0)
    assert np.array_equal(filled, np.concatenate([own, np.zeros((2, 2))]))
    assert np.array_equal(added_up(filled + 1, table, Silent(), range(2), 0), own + 1)
