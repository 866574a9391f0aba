"""Mean time between failures and the interval between saves, against SciPy, published numbers and a simulation."""

import random

import pytest
from scipy.stats import chi2

from tools.runs.study import daly, mtbf, overhead, saving, young


@pytest.mark.parametrize("failures", [0, 1, 2, 7, 50, 400])
def test_the_interval_is_that_of_the_chi_square_form(failures):
    found = mtbf(failures, 1000.0)
    assert found.low == pytest.approx(2000 / chi2.ppf(0.95, 2 * failures + 2), rel=1e-9)
    if failures:
        assert found.high == pytest.approx(2000 / chi2.ppf(0.05, 2 * failures), rel=1e-9)
        assert found.estimate == 1000 / failures and found.low < found.estimate < found.high
    else:
        assert (found.estimate, found.high) == (None, None)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng, inside, tries = random.Random(1), 0, 500
    for _ in range(tries):
        now, failures = rng.expovariate(1 / 10.0), 0
        while now < 45:
            now, failures = now + rng.expovariate(1 / 10.0), failures + 1
        found = mtbf(failures, 45.0)
        inside += found.low <= 10 and (found.high is None or found.high >= 10)
    assert 0.89 <= inside / tries <= 0.99  # of counts: at least 0.9, and more where they are few


def test_nothing_is_known_of_no_time():
    assert mtbf(0, 0.0) is None


def test_the_intervals_of_young_and_daly():
    assert young(60, 8 * 3600) == pytest.approx(1859.03, abs=0.01)
    # Daly 2006: the higher order lies a little below Young's, by about two thirds of the cost
    assert daly(60, 8 * 3600) == pytest.approx(young(60, 8 * 3600) - 60 * 2 / 3, abs=0.3)
    assert daly(100, 40) == 40


def simulate(between, cost, interval, rng, failures=3000):
    """Share of the time that is not kept work, failure by failure; a restart costs nothing here."""
    kept = total = 0.0
    for _ in range(failures):
        life = rng.expovariate(1 / between)
        kept += int(life / (interval + cost)) * interval
        total += life
    return 1 - kept / total


def test_what_an_interval_costs_is_what_a_simulation_sees():
    for interval in (600, 1800, 7200):
        seen = simulate(8 * 3600, 60, interval, random.Random(2))
        assert overhead(60, interval, 8 * 3600) == pytest.approx(seen, abs=0.012)


def test_the_best_interval_costs_least():
    found = saving(60, 7200, mtbf(10, 80 * 3600.0))
    assert found.cost_best < found.cost_used
    assert found.low < found.best < found.high
    for other in (0.5, 2):
        assert overhead(60, other * found.best, 8 * 3600) > found.cost_best


def test_too_little_is_known_without_a_failure_or_a_save():
    assert saving(60, 7200, mtbf(0, 1000.0)) is None
    assert saving(0, 7200, mtbf(1, 1000.0)) is None
