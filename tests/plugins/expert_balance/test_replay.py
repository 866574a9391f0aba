from dataclasses import replace

import numpy as np
import pytest

from plugins.expert_balance.plan import imbalance
from plugins.expert_balance.record import append, read
from plugins.expert_balance.replay import differences, replay, replay_policy
from plugins.expert_balance.settings import Settings
from tests.plugins.expert_balance.drifting import live

DEVICES, EXPERTS = 4, 32


@pytest.mark.parametrize("method", ["swaps", "aligned", "greedy", "random"])
def test_a_replay_of_a_log_has_the_placements_of_the_run(tmp_path, method):
    settings = Settings(every=3, method=method)
    records = live(settings)
    for record in records:
        append(tmp_path / "log", record)
    found = replay(read(tmp_path / "log"), settings)
    assert differences(records, found) == []
    assert found.plans == 4
    assert found.moves.sum() == sum(record.moved.experts for record in records if record.moved) > 0
    assert found.ratios[5, 1] == imbalance(records[5].tokens[1], records[5].slots[1], DEVICES)


def test_a_replay_balances_nodes_first_where_the_run_did(tmp_path):
    settings = Settings(every=3)
    records = live(settings, nodes=2)
    for record in records:
        append(tmp_path / "log", record)
    assert differences(records, replay(read(tmp_path / "log"), settings)) == []
    apart = [replace(record, nodes=1) for record in records]
    assert differences(records, replay(apart, settings)) != [], "nodes make a difference here"


def test_another_policy_differs_and_is_told():
    records = live(Settings(every=3))
    assert differences(records, replay(records, Settings(every=3, memory=0.2))) != []
    assert differences(records, replay(records, Settings(every=4)))[0] == 3


def test_without_plans_experts_stay_where_the_log_begins():
    records = live(Settings(every=3))[4:]
    found = replay(records, Settings(every=0))
    assert (found.slots == records[0].slots).all() and found.moves.sum() == 0 and found.plans == 0


def test_a_policy_is_asked_with_the_prediction_and_the_placement_there_is():
    records, asked = live(Settings(every=0)), []

    def policy(predicted, old, step, layer):
        asked.append((step, layer, predicted.sum()))
        return old[::-1]

    found = replay_policy(records, policy, every=5, memory=0.8)
    assert [(step, layer) for step, layer, _ in asked] == [(5, 0), (5, 1), (5, 2), (10, 0), (10, 1), (10, 2)]
    assert asked[0][2] == pytest.approx(4096)
    assert (found.slots[4] == np.arange(EXPERTS)[::-1]).all() and (found.slots[9] == np.arange(EXPERTS)).all()
