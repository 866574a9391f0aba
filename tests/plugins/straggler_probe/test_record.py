"""The form of a rank's probes, written and read."""

import json

import numpy as np
import pytest

from plugins.errors import DataError, RecipeError
from plugins.straggler_probe import watch
from plugins.straggler_probe.record import append, probe_file, read, read_run
from tests.plugins.straggler_probe.histories import history


def write(run, records):
    for record in records:
        append(probe_file(run, record.rank), record)


def test_what_was_written_is_read(tmp_path):
    records = sorted(history(np.random.default_rng(0), 12, probes=3), key=lambda one: (one.rank, one.step))
    write(tmp_path, records)
    got = read_run(tmp_path)
    assert [(one.rank, one.step, one.host) for one in got] == [(one.rank, one.step, one.host) for one in records]
    assert [one.probe for one in got] == pytest.approx([one.probe for one in records], abs=1e-7)


def test_a_run_without_probes_has_none(tmp_path):
    assert read_run(tmp_path) == []


def test_a_resumed_run_replaces_what_it_repeats_and_half_a_line_is_left_out(tmp_path):
    records = history(np.random.default_rng(0), 1, probes=4)
    write(tmp_path, records)
    with probe_file(tmp_path, 0).open("a") as file:
        file.write('{"step": 25, "ra')
    write(tmp_path, records[2:3])
    assert [one.step for one in read(probe_file(tmp_path, 0))] == [5, 10, 15]


@pytest.mark.parametrize(
    ("name", "value"),
    [("probe", 0.0), ("probe", float("nan")), ("seconds", -1.0), ("step", 1.5), ("host", None), ("cpu", "x")],
)
def test_what_no_run_writes_is_refused_with_its_line(tmp_path, name, value):
    (record,) = history(np.random.default_rng(0), 1, probes=1)
    write(tmp_path, [record])
    path = probe_file(tmp_path, 0)
    path.write_text(path.read_text() + json.dumps({**json.loads(path.read_text()), name: value}) + "\n")
    with pytest.raises(DataError, match=r"probe_0\.jsonl:2: this is not a record of a probe"):
        read(path)


def test_a_line_of_something_else_is_refused(tmp_path):
    path = tmp_path / "probe_0.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="not a record of a probe"):
        read(path)


def test_settings_have_defaults_and_say_what_is_wrong():
    assert watch.Settings.read({}) == watch.Settings(every=5, work=1)
    assert watch.Settings.read({"every": 20, "work": 3}) == watch.Settings(20, 3)
    for wrong, says in (
        ({"every": 0}, "straggler_probe.every: 0"),
        ({"work": 0.5}, "straggler_probe.work: 0.5"),
        ({"evry": 5}, "did you mean 'every'"),
        (True, "straggler_probe: write every, work"),
    ):
        with pytest.raises(RecipeError, match=says):
            watch.Settings.read(wrong)
