"""Lines that a run appends, a record a step: after a kill, after a resume; and for how long training stood still."""

import errno
import json
import re
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.run.msrun import ROOT
from launch.workers.metrics import RecordingLossMonitor, metrics_file
from plugins.batch_ramp.plan import Ramp
from plugins.finite_loss.plan import NORM
from plugins.held_out_loss.plan import held_out_file
from plugins.lines import ATTEMPT, Newest, Span, append_line, as_span, note, read_steps, spans_file, write_whole
from plugins.sealed_checkpoint.adapter import SealingCheckpointMonitor
from plugins.spike_guard.plan import Window, good_steps
from tests.crashes import dies_at
from tests.plugins.held_out_loss.evaluation import Evaluated
from tests.plugins.sealed_checkpoint.test_deaths import Run
from tools.accuracy.diagnose import evidence
from tools.runs.readings import read_held_out, read_metrics, read_parts


@dataclass(frozen=True)
class Record:
    step: int
    kind: str


def parse(content, place):
    return Record(content["step"], content["kind"])


def same_kind(before, record, place):
    if before.kind != record.kind:
        raise ValueError(f"{place}: {record.kind} behind {before.kind}")


def test_half_a_line_is_left_out_and_the_next_one_stands_alone(tmp_path):
    path = tmp_path / "metrics" / "x.jsonl"
    append_line(path, {"step": 1, "kind": "a"})
    with path.open("a") as file:
        file.write('{"step": 2, "ki')
    append_line(path, {"step": 2, "kind": "a"})
    assert read_steps(path, parse) == [Record(1, "a"), Record(2, "a")]


def test_a_resumed_run_replaces_what_it_repeats_and_is_held_to_what_stands(tmp_path):
    path = tmp_path / "x.jsonl"
    for step, kind in ((1, "a"), (2, "b"), (3, "b"), (2, "a")):
        append_line(path, {"step": step, "kind": kind})
    assert read_steps(path, parse) == [Record(1, "a"), Record(2, "a")]
    with pytest.raises(ValueError, match=r"x.jsonl:2: b behind a"):
        read_steps(path, parse, same_kind)


def test_a_full_disk_leaves_nothing_of_a_file_that_is_written_whole(tmp_path):
    """A checkpoint kept the beginnings of seals under names that nothing removes."""
    (tmp_path / "seal.json").write_text("1")
    full = OSError(errno.ENOSPC, "No space left on device")
    for number, name in enumerate(("open", "write", "fsync", "replace")):
        with dies_at(number, full) as made, pytest.raises(OSError, match="No space"):
            write_whole(tmp_path / "seal.json", {"step": 2})
        assert made[number].startswith(name) and [path.name for path in tmp_path.iterdir()] == ["seal.json"]
    assert (tmp_path / "seal.json").read_text() == "1"


def two_attempts(path, monkeypatch):
    """A file to which a worker of the first attempt still appends when the second one has gone back to step 2."""
    old, new = "0000-a", "0001-b"
    for attempt, record in (
        (old, {"total_steps": 9, "start_step": 0}), (old, {"step": 1, "loss": 1.0}), (old, {"step": 2, "loss": 1.0}),
        (new, {"total_steps": 9, "start_step": 1}), (new, {"step": 2, "loss": 2.0}), (old, {"step": 3, "loss": 1.0}),
        (new, {"step": 3, "loss": 2.0}), (old, {"total_steps": 9, "start_step": 0}), (old, {"step": 4, "loss": 1.0}),
    ):  # fmt: skip
        monkeypatch.setenv(ATTEMPT, attempt)
        append_line(path, record)
    monkeypatch.delenv(ATTEMPT)


def test_what_a_worker_of_an_earlier_attempt_appends_late_is_left_out(tmp_path, monkeypatch):
    path = metrics_file(tmp_path, 0)
    two_attempts(path, monkeypatch)
    found = read_metrics(path)
    assert {step: each["loss"] for step, each in found.steps.items()} == {1: 1.0, 2: 2.0, 3: 2.0}
    assert found.start_step == 1 and [len(part) for part in read_parts(path)] == [2, 2]
    lines = path.read_text().splitlines()
    assert [each["loss"] for each in good_steps(lines, 9, 9, Ramp((), 8), 1)] == [1.0, 2.0, 2.0]
    assert [(line["step"], line.get("loss")) for _, line in evidence._lines(path) if "step" in line][-1] == (3, 2.0)


@given(st.integers(1, 40), st.integers(0, 30), st.integers(0, 12), st.sets(st.integers(1, 90)))
def test_a_rank_that_was_missing_compares_with_no_step_from_before(before, missing, after, overflowed):
    """A run went on with fewer hosts, so that this rank has no lines of these steps."""
    steps = [*range(1, before + 1), *range(before + missing + 1, before + missing + after + 1)]
    lines = [{"step": n, "loss": float(n), "global_norm": 1.0, "overflow": n in overflowed} for n in steps]
    found = good_steps(map(json.dumps, lines), before + missing + after, 4, Ramp((), 4), 1)
    near = steps[before:] if missing > 4 else steps
    assert [each["loss"] for each in found] == [n for n in near if n not in overflowed][-4:]


def test_a_rank_that_was_missing_twice_compares_with_steps_of_its_last_return():
    lines = [json.dumps({"step": n, "loss": float(n)}) for n in (*range(1, 9), *range(100, 109), 200, 201)]
    assert [each["loss"] for each in good_steps(lines, 201, 8, Ramp((), 4), 1)] == [200, 201]


def test_norms_from_before_a_rank_was_missing_make_no_false_spike():
    """Ranks of a host that left after step 8 and is back at step 5000, when the norms of all steps are larger."""
    lines = [json.dumps({"step": step, "loss": 9.0, "global_norm": 0.1 + step / 1e4}) for step in range(1, 9)]
    back = Window(8, 16.0)
    for readings in good_steps(lines, 5000, 8, Ramp((), 4), 1):
        back.see(readings)
    assert back.see({"loss": 4.0, NORM: 0.9}) is None


def test_late_lines_are_left_out_by_readers_of_steps_that_do_not_know_attempts(tmp_path, monkeypatch):
    path = tmp_path / "metrics" / "probe_0.jsonl"
    for attempt, step in (("0000-a", 1), ("0001-b", 2), ("0000-a", 1)):
        monkeypatch.setenv(ATTEMPT, attempt)
        append_line(path, {"step": step, "kind": attempt})
    assert read_steps(path, lambda content, place: Record(**content)) == [Record(1, "0000-a"), Record(2, "0001-b")]


def test_lines_without_an_attempt_are_never_late():
    newest = Newest()
    lines = [
        {},
        {"attempt": "0003-a"},
        {},
        {"attempt": None},
        {"attempt": 1},
        {"attempt": "0003-b"},
        {"attempt": "2-c"},
    ]
    assert [newest.is_late(line) for line in lines] == [False] * 6 + [True]


def torn(path):
    """A file whose last line a lost node has left half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header, *steps = [{"total_steps": 100, "start_step": 0}, *({"step": step, "loss": 50.0} for step in range(1, 65))]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *steps)) + json.dumps(steps[-1])[:20])


def test_the_header_of_a_resumed_part_stands_behind_a_torn_line(tmp_path):
    torn(metrics_file(tmp_path, 0))
    monitor = object.__new__(RecordingLossMonitor)
    monitor.run_dir = tmp_path
    monitor._write({"total_steps": 100, "start_step": 40})
    monitor._write({"step": 41, "loss": 1.0})
    found = read_metrics(metrics_file(tmp_path, 0))
    assert (max(found.steps), found.start_step, found.steps[41]["loss"]) == (41, 40, 1.0)


def test_a_held_out_loss_and_a_span_stand_behind_a_torn_line(tmp_path):
    torn(held_out_file(tmp_path)), torn(spans_file(tmp_path))
    Evaluated(tmp_path, done=50, every=10)
    assert read_held_out(tmp_path)[50] == 3.0
    assert json.loads(spans_file(tmp_path).read_text().splitlines()[-1])["step"] == 50


def test_nothing_else_in_the_product_appends_to_a_file():
    """A lock (tools/files/locks.py) is opened so and never written to line by line."""
    opened = re.compile(r"""open\([^)\n]*["']r?a[b+t]*["']|O_APPEND""")
    files = [path for top in ("plugins", "launch", "tools") for path in sorted((ROOT / top).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)) for path in files if opened.search(path.read_text(encoding="utf-8"))}
    assert found == {"plugins/lines.py", "tools/files/locks.py"}


def read(folder):
    return [as_span(json.loads(line)) for line in spans_file(folder).read_text().splitlines()]


def test_what_is_noted_is_read(tmp_path):
    spans = [Span("save", 3, 1.5, 2.5, True), Span("evaluation", 0, 2.0, 2.0)]
    for span in spans:
        note(tmp_path / "new", span)
    assert read(tmp_path / "new") == spans


@pytest.mark.parametrize(
    "change", [{"kind": "nap"}, {"kind": None}, {"step": None}, {"begin": "1"}, {"end": 0.5}, {"end": None}]
)
def test_another_form_is_nothing(change):
    assert as_span({"kind": "save", "step": 3, "begin": 1.0, "end": 2.0, "later": 1}) == Span("save", 3, 1.0, 2.0)
    assert as_span({"kind": "save", "step": 3, "begin": 1.0, "end": 2.0} | change) is None


@pytest.mark.parametrize("background", [False, True])
def test_saves_are_noted_with_their_time_and_whether_they_were_sealed(tmp_path, monkeypatch, background):
    monkeypatch.setattr(SealingCheckpointMonitor, "run_dir", str(tmp_path / "run"))
    before = time.time()
    run = Run(tmp_path / "saves", async_save=background, save_optimizer=False)
    for step in (1, 2):
        run.step(step)
        run.step(step)  # what is saved already is not saved again, and not noted
    run.end()
    found = read(tmp_path / "run")
    assert [span.kind for span in found] == ["save"] * len(found)
    assert {span.step for span in found} == {1, 2}
    assert all(before <= span.begin <= span.end <= time.time() for span in found)
    if background:
        assert found[0] == Span("save", 1, found[0].begin, found[0].end) and found[-1].sealed
    else:
        assert [(span.step, span.sealed) for span in found] == [(1, True), (2, True)]


def test_without_a_run_nothing_is_noted(tmp_path):
    run = Run(tmp_path, save_optimizer=False)
    run.step(1)
    run.end()
    assert not spans_file(tmp_path).exists()
