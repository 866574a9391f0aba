"""Who takes part in the attempt after the last one."""

from dataclasses import replace

import pytest

from launch.agent import planning
from launch.agent.decide import Smaller
from launch.agent.job import Job
from launch.agent.planning import Planning
from tests.launch.agent.ends import A, B, attempt, end, judge, told
from tools.recipe.load import Recipe


class Standing:
    """A meeting in which it is, or is not any more, this one's to plan."""

    def __init__(self, ours):
        self.ours = ours

    def now(self):
        return 100.0

    def beat(self, number, beat):
        pass

    def plans(self, number):
        return self.ours


@pytest.mark.parametrize("ours", [True, False])
def test_who_was_followed_by_another_planner_writes_nothing_into_the_run(tmp_path, monkeypatch, ours):
    monkeypatch.setattr(planning, "make_plan", lambda *_, **__: "plan")
    linked, prepared = [], []
    monkeypatch.setattr(planning, "link_logs", lambda folder, number: linked.append(number))
    job = Job(Recipe({}), tmp_path, A, (A,), 1)
    found = Planning(job, 0, lambda hosts: "none", Standing(ours), prepared.append).wanted([A])
    assert (found, prepared, linked) == (("plan", ["plan"], [0]) if ours else (None, [], []))


def planned(tmp_path, last, there, most=2):
    """(hosts, overrides) after `last`; the recipe runs on `most` hosts, or with an override on one."""

    def can(hosts):
        return Smaller(most, [], "all") if len(hosts) >= most else Smaller(1, ["a=1"], "one") if hosts else "none"

    job = Job(Recipe({}), tmp_path, A, (A, B), most)
    return Planning(job, last.number + 1, can, None, lambda plan: None)._hosts(there, [last])


def judged(*ends, overrides=(), **more):
    found = attempt(*ends, **more)
    found.plan.overrides.extend(overrides)
    smaller = Smaller(1, ["a=1"], "one")
    return replace(found, verdict=judge(found, can=lambda hosts: smaller))


def test_without_the_lost_host_it_is_smaller(tmp_path):
    lost = judged(told(A), end(B, 104, "lost node", by=A))
    assert planned(tmp_path, lost, [A]) == ([A], ["a=1"])


@pytest.mark.parametrize(("there", "hosts", "overrides"), [([A, B], [A, B], []), ([A], [A], ["a=1"])])
def test_a_host_that_came_back_takes_part_again(tmp_path, there, hosts, overrides):
    """After any end of an attempt of fewer hosts: nothing is ended for its sake."""
    alone = judged(end(A, 100, "signal", code=-9), hosts=[A], overrides=["a=1"])
    assert alone.verdict.decision == "restart"
    assert planned(tmp_path, alone, there) == (hosts, overrides)
