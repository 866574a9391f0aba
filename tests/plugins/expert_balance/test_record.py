import json

import numpy as np
import pytest

from plugins.errors import DataError
from plugins.expert_balance.copies import NOTHING
from plugins.expert_balance.plan import Prediction
from plugins.expert_balance.record import Moved, Record, append, as_json, carry_over, file_of, load_file, loads, read

SLOTS = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])


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
        ({"slots": [[0, 1, 2, 2], [3, 2, 1, 0]]}, "the slots are not a placement"),
        ({"slots": [[0, 1, 2, 3]]}, "the slots are not a placement"),
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
        ({"micro_batch": []}, "for 2 layers"),
        ({"step": None}, "not a record"),
        ({"moved": {"slots": SLOTS.tolist()}}, "not a record"),
        ({"moved": {}}, "the key slots is missing"),
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
    with pytest.raises(DataError, match=r"log:2.*each layout"):
        read(tmp_path / "log")


def test_no_file_and_an_empty_one_are_refused(tmp_path):
    with pytest.raises(DataError, match="record: True writes it"):
        read(tmp_path / "log")
    (tmp_path / "log").write_text("")
    with pytest.raises(DataError, match="no step"):
        read(tmp_path / "log")


FORM = (2, 1, 4)  # devices, layers, experts


def of_step(step, experts=4):
    tokens = np.random.default_rng(step).integers(0, 99, (1, experts))
    return Record(step, 2, (1,), tokens, np.arange(experts)[None], (None,))


def recorded(run_dir, steps, experts=4):
    for step in steps:
        append(load_file(run_dir), of_step(step, experts))
    return load_file(run_dir)


def test_records_of_later_steps_are_cut_and_the_prediction_is_that_of_the_steps_before(tmp_path):
    file = recorded(tmp_path, range(1, 10))
    with file.open("a") as out:
        out.write('{"step": 10, "dev')  # as a killed run leaves it
    records, missing = carry_over(file, file, 6, FORM)
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
    _, missing = carry_over(source, load_file(tmp_path / "new"), 6, FORM)
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
    records, missing = carry_over(file, file, 6, FORM)
    assert words in missing and [each.step for each in records] == steps


def test_records_of_another_layout_are_put_aside(tmp_path):
    file = recorded(tmp_path, range(1, 7), experts=8)
    records, missing = carry_over(file, file, 6, FORM)
    assert records == [] and "other devices, layers or experts" in missing and not file.exists()
    assert len(read(file.with_name("expert_load_until_step_6.jsonl"))) == 6
    assert loads(records, FORM).shape == (0, 1, 4)


def test_records_that_cannot_be_read_are_put_aside_and_not_removed(tmp_path):
    file = recorded(tmp_path, range(1, 7))
    file.write_text(file.read_text().replace('"step": 2,', '"step": 2.5,'))
    written = file.read_text()
    records, missing = carry_over(file, file, 6, FORM)
    assert records == [] and "2.5 is not an integer" in missing and not file.exists()
    assert file.with_name("expert_load_until_step_6.jsonl").read_text() == written


def test_what_was_put_aside_stays_when_it_happens_again(tmp_path):
    """The second resume from the same step replaced the records that the first one had put aside."""
    written = []
    for _ in range(3):
        file = recorded(tmp_path, range(1, 7))
        file.write_text(file.read_text().replace('"step": 2,', f'"step": 2.{len(written) + 5},'))
        written.append(file.read_text())
        carry_over(file, file, 6, FORM)
    names = ["expert_load_until_step_6.jsonl", "expert_load_until_step_6_2.jsonl", "expert_load_until_step_6_3.jsonl"]
    assert [file.with_name(name).read_text() for name in names] == written


def test_a_run_from_the_beginning_begins_its_file(tmp_path):
    file = recorded(tmp_path, range(1, 4))
    assert carry_over(file, file, 0, FORM) == ([], "") and file.read_text() == ""
    assert carry_over(file, load_file(tmp_path / "new"), 0, FORM) == ([], "")
    assert not load_file(tmp_path / "new").exists()
