import json

import numpy as np
import pytest

from plugins.errors import DataError
from plugins.expert_balance.record import Moved, Record, append, line, load_file, read

SLOTS = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])


def record(step: int, moved: Moved | None = None, devices: int = 2) -> Record:
    return Record(step, devices, (1, 2), np.arange(8).reshape(2, 4) + step, SLOTS, (1.5, None), moved)


def same(one: Record, other: Record) -> bool:
    return line(one) == line(other)


def test_what_is_appended_is_read(tmp_path):
    written = [record(1), record(2, Moved(SLOTS[::-1], 4, 1024, 0.5, 0.25))]
    for one in written:
        append(load_file(tmp_path), one)
    back = read(load_file(tmp_path))
    assert [same(*pair) for pair in zip(back, written, strict=True)] == [True, True]
    assert back[1].moved.slots.dtype == np.int64 and back[0].micro_batch == (1.5, None)


def test_the_form_is_the_documented_one():
    assert json.loads(line(record(12, Moved(SLOTS, 4, 1024, 0.5, 0.25)))) == {
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
        out.write(line(record(2))[:40])
    assert [one.step for one in read(log)] == [1]
    append(log, record(2))
    append(log, record(3))
    assert [one.step for one in read(log)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [[0, 1, 2, 2], [3, 2, 1, 0]]}, "no placement"),
        ({"slots": [[0, 1, 2, 3]]}, "no placement"),
        ({"tokens": [[1, 2, 3], [1, 2, 3]]}, "do not divide"),
        ({"tokens": [[1, 2, 3, 4]]}, "for 2 layers"),
        ({"tokens": [[1, 2, 3, -4], [1, 2, 3, 4]]}, "negative"),
        ({"tokens": [[1, 2], [1, 2, 3, 4]]}, "no record"),
        ({"tokens": [[1, 2, 3, 10**30], [1, 2, 3, 4]]}, "no record"),
        ({"devices": 3}, "do not divide"),
        ({"micro_batch": []}, "for 2 layers"),
        ({"step": None}, "no record"),
        ({"moved": {"slots": SLOTS.tolist()}}, "no record"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, change, message):
    log = tmp_path / "log"
    append(log, record(1))
    with log.open("a") as out:
        out.write(json.dumps({**json.loads(line(record(2))), **change}) + "\n")
    with pytest.raises(DataError, match=rf"log:2.*{message}"):
        read(log)


def test_a_file_is_of_one_layout(tmp_path):
    append(tmp_path / "log", record(1))
    append(tmp_path / "log", record(2, devices=4))
    with pytest.raises(DataError, match=r"log:2.*one layout"):
        read(tmp_path / "log")


def test_no_file_and_an_empty_one_are_refused(tmp_path):
    with pytest.raises(DataError, match="record: True writes it"):
        read(tmp_path / "log")
    (tmp_path / "log").write_text("")
    with pytest.raises(DataError, match="no step"):
        read(tmp_path / "log")
