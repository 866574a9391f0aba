"""The record of experts' loads and moves: what is written and read, and what a replay of it says."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plugins.batch_ramp.plan import Ramp
from plugins.errors import DataError
from plugins.expert_balance.copies import NOTHING
from plugins.expert_balance.plan import Prediction, greedy, imbalance
from plugins.expert_balance.record import Moved, Record, append, as_json, carry_over, file_of, load_file, loads, read
from plugins.expert_balance.replay import differences, eplb, eplb_ratios, replay, replay_policy
from plugins.expert_balance.settings import Settings
from tests.plugins.expert_balance.drifting import live

SLOTS = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])
MOVED = {"slots": SLOTS.tolist(), "experts": 0, "bytes": 0, "plan_s": 0.5, "move_s": 0.25}


def record(step: int, moved: Moved | None = None, devices: int = 2) -> Record:
    return Record(step, devices, (1, 2), np.arange(8).reshape(2, 4) + step, SLOTS, (1.5, None), moved)


def same(one: Record, other: Record) -> bool:
    return as_json(one) == as_json(other)


def test_what_is_appended_is_read(tmp_path):
    written = [record(1), record(2, Moved(SLOTS[::-1], 4, 1024, 0.5, 0.25))]
    for one in written:
        append(load_file(tmp_path), one)
    back = read(load_file(tmp_path))
    assert [same(*pair) for pair in zip(back, written, strict=True)] == [True, True]
    assert back[1].moved.slots.dtype == np.int64 and back[0].micro_batch == (1.5, None)


def test_copies_are_read_as_they_were_written(tmp_path):
    copies, later = np.array([[2, NOTHING], [NOTHING, 2]]), np.array([[NOTHING, NOTHING], [0, 2]])
    moved = Moved(SLOTS, 0, 0, 0.5, 0.25, later)
    append(tmp_path / "log", Record(1, 2, (1, 2), np.full((2, 4), 10), SLOTS, (None, None), moved, copies=copies))
    (found,) = read(tmp_path / "log")
    assert np.array_equal(found.held, copies) and np.array_equal(found.after[1], later)
    assert found.on_devices.tolist() == [[25, 15], [15, 25]]
    assert record(1).held.shape == (2, 0) and record(1).after[1].shape == (2, 0)


def test_the_form_is_the_documented_one():
    assert as_json(record(12, Moved(SLOTS, 4, 1024, 0.5, 0.25))) == {
        "step": 12,
        "devices": 2,
        "nodes": 1,
        "layers": [1, 2],
        "tokens": [[12, 13, 14, 15], [16, 17, 18, 19]],
        "slots": SLOTS.tolist(),
        "micro_batch": [1.5, None],
        "moved": {"slots": SLOTS.tolist(), "experts": 4, "bytes": 1024, "plan_s": 0.5, "move_s": 0.25},
    }


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    for step in (1, 2, 3, 4, 3):
        append(tmp_path / "log", record(step))
    assert [one.step for one in read(tmp_path / "log")] == [1, 2, 3]
    assert [one.step for one in read(tmp_path / "log", until=2)] == [1, 2]


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path):
    log = tmp_path / "log"
    append(log, record(1))
    with log.open("a") as out:
        out.write(json.dumps(as_json(record(2)))[:40])
    said = []
    assert [one.step for one in read(log)] == [one.step for one in read(log, say=said.append)] == [1]
    assert said == [f"{log}:2: this line is not finished, as a run writes it or was killed: it is left out"]
    append(log, record(2))
    append(log, record(3))
    assert [one.step for one in read(log)] == [1, 2, 3], "a run that resumes goes on"
    with pytest.raises(DataError, match="log:2: this line is not JSON"):
        read(log, say=said.append)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [[0, 1, 2, 2], [3, 2, 1, 0]]}, "slots is not a placement"),
        ({"slots": [[0, 1, 2, 3]]}, "slots is not a placement"),
        ({"copies": [[2, -1]]}, "copies of shape"),
        ({"copies": [[2], [2]]}, "copies of shape"),
        ({"copies": [[2, -1], [4, -1]]}, "0 to 3"),
        ({"copies": [[2, -1], [2, -1]]}, "device 0 has an expert twice"),
        ({"copies": [[2, 2, -1, -1], [0, -1, -1, -1]]}, "device 0 has an expert twice"),
        ({"copies": "all"}, "not a record"),
        ({"tokens": [[1, 2, 3], [1, 2, 3]]}, "do not divide"),
        ({"tokens": [[1, 2, 3, 4]]}, "for 2 layers"),
        ({"tokens": [[1, 2, 3, -4], [1, 2, 3, 4]]}, "negative"),
        ({"tokens": [[1, 2], [1, 2, 3, 4]]}, "not a record"),
        ({"tokens": [[1, 2, 3, 10**30], [1, 2, 3, 4]]}, "not a record"),
        ({"devices": 3}, "do not divide"),
        ({"nodes": 0}, "0 nodes do not divide 2 devices"),
        ({"nodes": 4}, "4 nodes do not divide 2 devices"),
        ({"micro_batch": []}, "for 2 layers"),
        ({"step": 2**63}, "not an integer of 64 bits"),
        ({"step": None}, "not a record"),
        ({"moved": {"slots": SLOTS.tolist()}}, "not a record"),
        ({"moved": {}}, "the key slots is missing"),
        ({"moved": {**MOVED, "copies": [[2, -1], [3, -1]]}}, "device 0 has an expert twice"),
        ({"moved": False}, "not a record"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, change, message):
    log = tmp_path / "log"
    append(log, record(1))
    with log.open("a") as out:
        out.write(json.dumps({**as_json(record(2)), **change}) + "\n")
    with pytest.raises(DataError, match=rf"log:2.*{message}"):
        read(log)


def test_a_file_is_of_one_layout(tmp_path):
    append(tmp_path / "log", record(1))
    append(tmp_path / "log", record(2, devices=4))
    with pytest.raises(DataError, match=r"log:2.*each parallel layout"):
        read(tmp_path / "log")


def test_no_file_and_an_empty_one_are_refused(tmp_path):
    with pytest.raises(DataError, match="record: True writes it"):
        read(tmp_path / "log")
    (tmp_path / "log").write_text("")
    with pytest.raises(DataError, match="no loads yet"):
        read(tmp_path / "log")


FORM = (2, 1, 4)  # devices, layers, experts
PAIRS = 200


def pairs(step):
    return PAIRS


def of_step(step, experts=4):
    tokens = np.random.default_rng(step).multinomial(PAIRS, np.ones(experts) / experts, 1)
    return Record(step, 2, (1,), tokens, np.arange(experts)[None], (None,))


def recorded(run_dir, steps, experts=4):
    for step in steps:
        append(load_file(run_dir), of_step(step, experts))
    return load_file(run_dir)


def test_records_of_later_steps_are_cut_and_the_prediction_is_that_of_the_steps_before(tmp_path):
    file = recorded(tmp_path, range(1, 10))
    with file.open("a") as out:
        out.write('{"step": 10, "dev')  # as a killed run leaves it
    records, missing = carry_over(file, file, 6, FORM, pairs)
    assert missing == "" and [each.step for each in records] == [1, 2, 3, 4, 5, 6]
    assert [each.step for each in read(file)] == [1, 2, 3, 4, 5, 6] and file.read_text().endswith("}\n")
    went, resumed = Prediction(0.8), Prediction(0.8)
    for step in range(1, 7):
        went.see(of_step(step).tokens)
    for each in loads(records, FORM):
        resumed.see(each)
    assert np.array_equal(went.loads, resumed.loads)


def test_a_run_in_another_folder_takes_the_records_along(tmp_path):
    recorded(tmp_path / "old", range(1, 10))
    checkpoint = tmp_path / "old" / "checkpoint" / "iteration_00000006"
    source = file_of(checkpoint, tmp_path / "new" / "checkpoint", tmp_path / "new")
    assert source == load_file(tmp_path / "old")
    _, missing = carry_over(source, load_file(tmp_path / "new"), 6, FORM, pairs)
    assert missing == "" and [each.step for each in read(load_file(tmp_path / "new"))] == [1, 2, 3, 4, 5, 6]
    assert len(read(source)) == 9, "the other run's file is its own"


def test_a_run_that_goes_on_in_its_folder_reads_its_own(tmp_path):
    checkpoint = tmp_path / "checkpoint" / "iteration_00000006"
    assert file_of(checkpoint, tmp_path / "checkpoint", tmp_path) == load_file(tmp_path)
    assert file_of(None, tmp_path / "checkpoint", tmp_path) == load_file(tmp_path)


@pytest.mark.parametrize(
    ("steps", "words"), [([], "no such file"), ([1, 2, 4, 5, 6], "no record of 1 of the steps up to 6, such as 3")]
)
def test_what_is_not_known_is_said(tmp_path, steps, words):
    file = recorded(tmp_path, steps)
    records, missing = carry_over(file, file, 6, FORM, pairs)
    assert words in missing and [each.step for each in records] == steps


def test_records_of_another_layout_are_put_aside(tmp_path):
    file = recorded(tmp_path, range(1, 7), experts=8)
    records, missing = carry_over(file, file, 6, FORM, pairs)
    assert records == [] and "other devices, layers or experts" in missing and not file.exists()
    assert len(read(file.with_name("expert_load_until_step_6.jsonl"))) == 6
    assert loads(records, FORM).shape == (0, 1, 4)


def test_records_of_another_global_batch_are_put_aside(tmp_path):
    """With twice the samples, step 6 is where step 12 was: the records until step 6 are of another place."""
    file = recorded(tmp_path, range(1, 13))
    ramped = carry_over(file, tmp_path / "ramped", 12, FORM, Ramp(((20, PAIRS),), 2 * PAIRS).batch_at)
    assert len(ramped[0]) == 12 and ramped[1] == ""
    records, missing = carry_over(file, file, 6, FORM, lambda step: 2 * PAIRS)
    assert records == [] and "the steps have another global batch than those of this run" in missing
    assert not file.exists() and len(read(file.with_name("expert_load_until_step_6.jsonl"))) == 12
    other = recorded(tmp_path / "other", range(1, 7))
    rounded = carry_over(other, tmp_path / "rounded", 6, FORM, lambda step: PAIRS * (1 + 1e-6))
    assert len(rounded[0]) == 6 and rounded[1] == "", "the loads are counted in float32"
    file = recorded(tmp_path, range(7, 10))
    records, missing = carry_over(file, file, 8, FORM, pairs)
    assert [each.step for each in records] == [7, 8] and missing == "", "the run before knew no more than these"


def test_records_that_cannot_be_read_are_put_aside_and_not_removed(tmp_path):
    file = recorded(tmp_path, range(1, 7))
    file.write_text(file.read_text().replace('"step": 2,', '"step": 2.5,'))
    written = file.read_text()
    records, missing = carry_over(file, file, 6, FORM, pairs)
    assert records == [] and "2.5 is not an integer" in missing and not file.exists()
    assert file.with_name("expert_load_until_step_6.jsonl").read_text() == written


def test_what_was_put_aside_stays_when_it_happens_again(tmp_path):
    """The second resume from the same step replaced the records that the first one had put aside."""
    written = []
    for _ in range(3):
        file = recorded(tmp_path, range(1, 7))
        file.write_text(file.read_text().replace('"step": 2,', f'"step": 2.{len(written) + 5},'))
        written.append(file.read_text())
        carry_over(file, file, 6, FORM, pairs)
    names = ["expert_load_until_step_6.jsonl", "expert_load_until_step_6_2.jsonl", "expert_load_until_step_6_3.jsonl"]
    assert [file.with_name(name).read_text() for name in names] == written


def test_a_run_from_the_beginning_begins_its_file(tmp_path):
    file = recorded(tmp_path, range(1, 4))
    assert carry_over(file, file, 0, FORM, pairs) == ([], "") and file.read_text() == ""
    assert carry_over(file, load_file(tmp_path / "new"), 0, FORM, pairs) == ([], "")
    assert not load_file(tmp_path / "new").exists()


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
    for tokens, devices in cases():
        found, _ = theirs().expert_relocation_greedy(dict(enumerate(tokens.tolist())), list(range(devices)))
        each = len(tokens) // devices
        assert [device for (device,) in found.values()] == (eplb(tokens, devices) // each).tolist()


def test_greedy_of_the_plugin_packs_alike():
    for tokens, devices in cases():
        each = len(tokens) // devices
        assert np.array_equal(greedy(tokens, devices) // each, eplb(tokens, devices) // each)


def test_packs_by_hand():
    assert (eplb(np.array([1, 8, 2, 7]), 2) // 2).tolist() == [0, 0, 1, 1]
