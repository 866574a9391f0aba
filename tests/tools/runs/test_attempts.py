"""What a launch writes of an attempt, and what a reader makes of it."""

import json

import pytest

from tools.runs import attempts
from tools.runs.attempts import Beat, End, Plan, Verdict, folder_of, read, read_attempts, write

PLAN = Plan(1, 5.0, ["node0", "node1"], 8, "node0", 8118, ["node2"], "/disk/iteration_10", 10, ["a.b=1"], "/cache")
FORMS = [
    PLAN,
    Beat("node0", 6.0, "compile", 5.5),
    End("node1", 9.0, "failed", "step", 12, "signal", 9, -9, "was killed", "/log", "node0"),
    Verdict(10.0, "spare", "node1 failed", "node1", 9, "signal", ["node0"], 1.0),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
def test_what_is_written_is_read(tmp_path, form):
    write(tmp_path / "new" / "form.json", form)
    assert read(tmp_path / "new" / "form.json", type(form)) == form


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"plan"', "null"])
def test_what_is_broken_or_missing_is_nothing(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    assert read(tmp_path / "plan.json", Plan) is None
    assert read(tmp_path / "no.json", Plan) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("time", "noon"), ("time", None), ("time", float("nan")), ("attempt", True), ("hosts", "node0"), ("hosts", [1])]
    + [("master", 3), ("resume", 3), ("step", []), ("slots", {})],
)
def test_values_of_another_type_are_another_form(tmp_path, key, value):
    write(tmp_path / "plan.json", PLAN)
    changed = {**json.loads((tmp_path / "plan.json").read_text()), key: value}
    (tmp_path / "plan.json").write_text(json.dumps(changed))
    assert read(tmp_path / "plan.json", Plan) is None


def test_keys_of_a_later_version_are_left_out(tmp_path):
    write(tmp_path / "plan.json", PLAN)
    later = {**json.loads((tmp_path / "plan.json").read_text()), "colour": "blue"}
    (tmp_path / "plan.json").write_text(json.dumps(later))
    assert read(tmp_path / "plan.json", Plan) == PLAN


def test_the_attempts_of_a_run_in_order(tmp_path):
    assert read_attempts(tmp_path) == []
    for number in (10, 2, 0):
        write(folder_of(tmp_path, number) / attempts.PLAN, PLAN)
    write(folder_of(tmp_path, 2) / f"{attempts.END}node1.json", FORMS[2])
    write(folder_of(tmp_path, 2) / f"{attempts.BEAT}node-0.example.json", FORMS[1])
    write(folder_of(tmp_path, 2) / attempts.VERDICT, FORMS[3])
    (tmp_path / attempts.FOLDER / "notes").mkdir()
    found = read_attempts(tmp_path)
    assert [one.number for one in found] == [0, 2, 10]
    assert found[1].ends == {"node1": FORMS[2]} and found[1].beats == {"node-0.example": FORMS[1]}
    assert (found[0].verdict, found[1].verdict) == (None, FORMS[3])
