"""Spikes of loss and global norm, against the obvious loop."""

import math
import random
from statistics import median

import pytest

from tools.runs.goodput import NEVER
from tools.runs.source import Part
from tools.runs.study import THRESHOLD, WINDOW, spikes


def part(losses, start=0, norms=None):
    made = Part(start)
    for at, loss in enumerate(losses):
        made.add({"step": start + at + 1, "loss": loss, "global_norm": norms[at] if norms else None})
    return made


def obvious(values, threshold=THRESHOLD):
    """(step, deviations) of all spikes of one series."""
    found = []
    for at, value in enumerate(values):
        before = [math.log(one) for one in values[max(0, at - WINDOW) : at]]
        if len(before) >= 8:
            middle = median(before)
            spread = max(1.4826 * median(abs(one - middle) for one in before), 0.01)
            if (above := (math.log(value) - middle) / spread) > threshold:
                found.append((at + 1, pytest.approx(above)))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_spikes_are_those_of_the_obvious_loop(seed):
    rng = random.Random(seed)
    losses = [math.exp(2 - step / 500 + rng.gauss(0, 0.03)) for step in range(400)]
    for at in rng.sample(range(10, 400), 6):
        losses[at] *= rng.choice([1.2, 1.5, 3.0, 0.2])
    found = [(one.step, one.above) for one in spikes([part(losses)], [NEVER])]
    assert found == obvious(losses) and found


def test_a_falling_noisy_curve_has_none():
    rng = random.Random(7)
    losses = [math.exp(2 - step / 500 + rng.gauss(0, 0.05)) for step in range(20_000)]
    assert spikes([part(losses)], [NEVER]) == []


def test_what_is_not_finite_is_a_spike_and_what_is_not_recorded_is_none():
    found = spikes([part([5.0, math.nan, 5.0, math.inf])], [NEVER])
    assert [(one.step, one.name, one.above) for one in found] == [(2, "loss", None), (4, "loss", None)]
    assert spikes([part([math.nan] * 4)], [NEVER]) == []


def test_a_part_is_compared_with_what_stood_before_it_and_knows_whether_it_stands():
    flat = [5.0 + 0.01 * (step % 3) for step in range(40)]
    first = part([*flat, 50.0, 5.0])  # steps 41 and 42 are made again
    again = part([5.0, 5.0, 60.0], start=40)
    found = spikes([first, again], [40, NEVER])
    assert [(one.step, one.value, one.stands) for one in found] == [(41, 50.0, False), (43, 60.0, True)]
    # a first step far above is seen, too, by the steps of the part before that still stand
    assert [one.step for one in spikes([part(flat), part([50.0], start=40)], [40, NEVER])] == [41]


def test_the_norm_is_judged_as_well():
    found = spikes([part([5.0] * 30, norms=[1.0] * 29 + [9.0])], [NEVER])
    assert [(one.step, one.name) for one in found] == [(30, "global_norm")]
