import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance import plan as planner
from plugins.attention_balance.plan import Layout, Objective, balance, delivery_order, epoch_plan, step_plan
from plugins.errors import DataError

many = settings(max_examples=60)

LAYOUTS = [
    Layout(4, 3, 1, Objective(4)),
    Layout(4, 3, 2, Objective(2)),
    Layout(4, 3, 1, Objective(1)),
    Layout(2, 6, 1, Objective(2, 4)),
    Layout(4, 3, 1, Objective(4), window=3),
    Layout(4, 3, 2, Objective(2), window=2),
]


@pytest.fixture
def costs():
    return np.random.default_rng(3).lognormal(0, 1.3, 12 * 16 + 5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_from_scratch_and_in_sequence_agree(costs, layout, monkeypatch):
    whole = epoch_plan(costs, layout)
    assert len(whole) == layout.steps(len(costs))
    for step, plan in enumerate(whole):
        np.testing.assert_array_equal(step_plan(costs, step, layout), plan)
    np.testing.assert_array_equal(epoch_plan(costs, layout, 5), whole[5:])
    np.testing.assert_array_equal(epoch_plan(costs, layout, 2, 0), whole[:0])
    monkeypatch.setattr(planner, "_SAMPLES", 1)
    np.testing.assert_array_equal(epoch_plan(costs, layout), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_the_samples_of_its_window(costs, layout):
    whole = epoch_plan(costs, layout)
    size = layout.batch * layout.window
    for at in range(0, len(whole), layout.window):
        items = np.sort(whole[at : at + layout.window].ravel())
        np.testing.assert_array_equal(items, at * layout.batch + np.arange(min(size, len(items))))


@many
@given(st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2]))
def test_another_number_of_ranks_keeps_the_global_batches(step, ranks, slots):
    costs = np.random.default_rng(step).lognormal(0, 1, 24 * 10)
    plan = step_plan(costs, step, Layout(ranks, 24 // ranks // slots, slots, Objective(ranks)))
    assert plan.shape[0] == ranks
    assert sorted(plan.ravel()) == list(range(24 * step, 24 * (step + 1)))


def test_what_comes_after_a_step_does_not_change_it(costs):
    for layout in LAYOUTS:
        shorter = costs[: 6 * layout.batch]
        np.testing.assert_array_equal(epoch_plan(costs, layout, 0, 6), epoch_plan(shorter, layout))


def test_a_step_behind_the_end_is_named(costs):
    with pytest.raises(DataError, match=r"steps 16 to 16: the dataset of 197 samples has 16 steps"):
        step_plan(costs, 16, LAYOUTS[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loader_hands_each_rank_its_samples(costs, layout):
    whole = epoch_plan(costs, layout)
    order = delivery_order(whole)
    for rank in range(layout.ranks):
        np.testing.assert_array_equal(order[rank :: layout.ranks], whole[:, rank].ravel())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_balance(costs, layout):
    whole = epoch_plan(costs, layout, 2, 6)
    found = balance(costs, whole, layout, 2)
    assert found.before.shape == found.after.shape == found.bound.shape == (6,)
    assert found.after.mean() <= found.before.mean()
    if layout.window == 1:
        assert (found.bound <= found.after * (1 + 1e-8)).all()


# a plan that changes with a release breaks the resume of every run that began before it
GOLDEN = [
    (Layout(4, 3, 1, Objective(4)), [[14, 18, 23], [20, 19, 16], [15, 12, 13], [21, 17, 22]]),
    (Layout(4, 3, 1, Objective(2, 2)), [[18, 14, 13], [19, 20, 22], [23, 15, 12], [16, 21, 17]]),
    (Layout(3, 4, 1, Objective(1)), [[14, 12, 18, 13], [20, 17, 19, 16], [15, 21, 23, 22]]),
    (Layout(2, 3, 2, Objective(2)), [[14, 21, 12, 19, 23, 22], [20, 15, 17, 18, 16, 13]]),
]


@pytest.mark.parametrize(("layout", "items"), GOLDEN)
def test_plans_stay_what_they_are(layout, items):
    costs = (np.arange(1, 25) ** 7 % 101).astype(float)
    assert step_plan(costs, 1, layout).reshape(layout.ranks, -1).tolist() == items


def test_looking_ahead_shortens_the_run(costs):
    def total(window):
        layout = Layout(4, 3, 1, Objective(4), window)
        return Objective(4).step_time(costs[epoch_plan(costs, layout)].sum(-1)).sum()

    assert total(8) < 0.95 * total(1)
