"""The same effort gives the same plan on a slow and on a busy machine; a deadline that ends a search is said."""

import itertools
import json
import threading

import pytest
from click.testing import CliRunner

from tests.tools.placement.pipeline_instances import CASE_438B
from tools.placement.budget import LATE, Budget
from tools.placement.instance_file import read_instance
from tools.placement.optimise import optimise
from tools.search.cli import search


def slow():
    """A clock on which every look takes ten seconds."""
    ticks = itertools.count(step=10.0)
    return lambda: next(ticks)


EFFORT = 0.3


def answer(budget):
    outcome = optimise(read_instance(CASE_438B), budget)
    assert not outcome.finished
    return outcome.plan.tolist(), outcome.time, outcome.bound, budget.spent


@pytest.fixture(scope="module")
def quiet():
    return answer(Budget(EFFORT))


def test_a_slow_clock_changes_nothing(quiet):
    budget = Budget(EFFORT, 1e9, slow())
    assert answer(budget) == quiet and not budget.cut
    assert budget.elapsed > 1000


def test_a_busy_machine_changes_nothing(quiet):
    stop = threading.Event()
    busy = [threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(stop.is_set, True)]) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        assert answer(Budget(EFFORT, 1e9)) == quiet
    finally:
        stop.set()
        for thread in busy:
            thread.join()


def test_effort_is_spent_and_hardly_more(quiet):
    assert EFFORT <= quiet[3] < 1.3 * EFFORT


def test_a_deadline_that_bites_is_noted():
    budget = Budget(1.0, 500, slow())
    outcome = optimise(read_instance(CASE_438B), budget)
    assert outcome.cut and budget.cut and budget.spent < 1.0 and outcome.plan is not None


def test_a_part_is_cut_alone_but_the_whole_says_so():
    clock = [0.0]
    budget = Budget(10, 100, lambda: clock[0])
    part = budget.part(0.3, 20)
    part.spend(1)
    clock[0] = 30.0
    assert part.over and budget.cut and budget.left == 9
    assert budget.part(0.3).left == 3


def test_spent_effort_is_not_cut():
    clock = [0.0]
    budget = Budget(2, 100, lambda: clock[0])
    budget.spend(2)
    clock[0] = 200.0
    assert budget.over and not budget.cut


def test_the_command_says_it(tmp_path):
    words = ["pipeline", str(CASE_438B), "--json", "--out", str(tmp_path / "o.json")]
    late = CliRunner().invoke(search, [*words, "--effort", "high", "--time-limit", "0.6"], catch_exceptions=False)
    assert late.exit_code == 0 and LATE in late.stderr
    assert json.loads(late.stdout)["ended_by_time_limit"]
    whole = CliRunner().invoke(search, [*words, "--effort", "1", "--force"], catch_exceptions=False)
    assert LATE not in whole.stderr and not json.loads(whole.stdout)["ended_by_time_limit"]


@pytest.mark.parametrize("effort", ["0", "nan", "much", "-1"])
def test_an_effort_that_is_none(tmp_path, effort):
    result = CliRunner().invoke(search, ["pipeline", str(CASE_438B), "--out", "o.json", "--effort", effort])
    assert result.exit_code == 2 and "low (3)" in result.stderr
