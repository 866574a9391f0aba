"""What a resumed run knows of the loads before it."""

import numpy as np
import pytest

from plugins.expert_balance.history import carry_over, file_of, loads
from plugins.expert_balance.plan import Prediction
from plugins.expert_balance.record import Record, append, load_file, read

FORM = (2, 1, 4)  # devices, layers, experts


def record(step, experts=4):
    tokens = np.random.default_rng(step).integers(0, 99, (1, experts))
    return Record(step, 2, (1,), tokens, np.arange(experts)[None], (None,))


def recorded(run_dir, steps, experts=4):
    for step in steps:
        append(load_file(run_dir), record(step, experts))
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
        went.see(record(step).tokens)
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


def test_a_run_from_the_beginning_begins_its_file(tmp_path):
    file = recorded(tmp_path, range(1, 4))
    assert carry_over(file, file, 0, FORM) == ([], "") and file.read_text() == ""
    assert carry_over(file, load_file(tmp_path / "new"), 0, FORM) == ([], "")
    assert not load_file(tmp_path / "new").exists()
