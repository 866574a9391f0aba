import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plugins.expert_balance.plan import greedy, imbalance
from plugins.expert_balance.record import append, read
from plugins.expert_balance.replay import differences, eplb, eplb_ratios, replay, replay_policy
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


@pytest.mark.parametrize("method", ["swaps", "random"])
def test_a_replay_of_a_log_with_copies_has_those_of_the_run(tmp_path, method):
    settings = Settings(every=3, method=method, spare=2)
    records = live(settings, spread=2.0)
    for record in records:
        append(tmp_path / "log", record)
    found = replay(read(tmp_path / "log"), settings)
    assert differences(records, found) == [] and found.copies.shape == (13, 3, 2 * DEVICES)
    assert found.made.any() and not found.made[0].any()
    assert np.array_equal(found.ratios[5], records[5].on_devices.max(1) / records[5].on_devices.mean(1))
    assert differences(records, replay(records, replace(settings, spare=1)))[0] <= 3


def test_copies_bring_hot_experts_nearer_to_even_and_eplb_moves_everything_for_it():
    records = live(Settings(every=0), steps=40, spread=1.5)
    stay, copied = (replay(records, Settings(every=4, spare=spare)).ratios[4:].mean() for spare in (0, 1))
    assert 1 <= copied < 0.97 * stay
    assert eplb_ratios(records, 4, 0.8, 1)[4:].mean() == pytest.approx(copied, rel=0.15)


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

    def policy(predicted, old, step):
        asked.append((step, predicted.sum(1)))
        return old[:, ::-1]

    found = replay_policy(records, policy, every=5, decay=0.8)
    assert [step for step, _ in asked] == [5, 10]
    assert asked[0][1] == pytest.approx([4096] * 3)
    assert (found.slots[4] == np.arange(EXPERTS)[::-1]).all() and (found.slots[9] == np.arange(EXPERTS)).all()


def theirs():
    """`ExpertDynamicRelocation` of the installed MindFormers, without importing the whole of it."""
    root = Path(importlib.util.find_spec("mindformers").submodule_search_locations[0])
    file = root / "parallel_core/training_graph/transformer/moe/expert_mapping.py"
    spec = importlib.util.spec_from_file_location("expert_mapping", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ExpertDynamicRelocation


def cases():
    rng = np.random.default_rng(0)
    for experts, devices in ((16, 4), (64, 8), (24, 3)):
        yield rng.integers(0, 10**6, experts), devices
        yield rng.integers(0, 4, experts), devices  # many ties


def test_mindformers_greedy_packs_as_eplb_does():
    for loads, devices in cases():
        found, _ = theirs().expert_relocation_greedy(dict(enumerate(loads.tolist())), list(range(devices)))
        each = len(loads) // devices
        assert [device for (device,) in found.values()] == (eplb(loads, devices) // each).tolist()


def test_greedy_of_the_plugin_packs_alike():
    for loads, devices in cases():
        each = len(loads) // devices
        assert np.array_equal(greedy(loads, devices) // each, eplb(loads, devices) // each)


def test_packs_by_hand():
    assert (eplb(np.array([1, 8, 2, 7]), 2) // 2).tolist() == [0, 0, 1, 1]
