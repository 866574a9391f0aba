"""These tests compare where the time of a run went with known answers, and with a slow reference that asks for every
moment.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import DataError
from tests.tools.runs import builders
from tests.tools.runs.builders import Builder, append, empty, header, random_run
from tests.tools.runs.reference import tenths
from tools.runs import goodput
from tools.runs.attempts import Attempt, End, Plan, Verdict, folder_of, write
from tools.runs.goodput import WORDS, ledger
from tools.runs.readings import Part, Run, load_run
from tools.runs.watch import Watch

TENTH = 100_000  # microseconds


def kinds(found):
    return {kind: value / TENTH for kind, value in found.totals().items() if value}


@pytest.mark.parametrize("seed", range(25))
def test_the_time_of_random_runs_is_as_built_and_as_the_reference_says(tmp_path, seed):
    built = random_run(tmp_path / "run", seed)
    found = ledger(load_run(tmp_path / "run"))
    assert kinds(found) == {kind: value for kind, value in built.truth.items() if value}
    assert kinds(found) == dict(tenths(tmp_path / "run"))
    assert found.wall == built.wall * TENTH
    assert (found.kept_steps, found.lost_steps) == (built.kept_steps, built.lost_steps) and built.kept_steps == 60
    assert found.goodput == pytest.approx(built.truth["kept"] / built.wall)
    assert [sum(found.totals(frame.number).values()) for frame in found.frames]


@pytest.mark.parametrize("skew", [-600.0, 0.0, 600.0])
def test_steps_belong_to_the_attempt_that_they_name_whatever_the_clocks_say(tmp_path, skew):
    """The clocks of hosts may differ from the disk's. Steps counted as those of the attempt before, so that none was
    trained again, or as those of a run without attempts; `watch` showed the checkpoint's step while the second trained.
    """

    def train(number, start, stop, time):
        name = f"{number:04d}-a"
        resume = {"resume": "/x/iteration_00000005", "step": start, "start": start} if start else {}
        write(folder_of(tmp_path, number) / "plan.json", Plan(number, time, ["a"], 1, "a", 9000, name=name, **resume))
        begun = watch.look().step
        append(metrics, {**header(20, start), "time": time + skew + 20, "attempt": name})
        for at in range(start + 1, stop + 1):
            clock = {"time": time + skew + 20 + 10 * (at - start), "seconds": 10.0}
            append(metrics, {**builders.step(at), **clock, "attempt": name})
        return begun, watch.look().step

    metrics = empty(tmp_path)
    watch = Watch(tmp_path)
    assert train(0, 0, 10, 1000.0) == (0, 10)
    write(folder_of(tmp_path, 0) / "end-a.json", End("a", 1125.0, "failed", "step", 10, "exit"))
    write(folder_of(tmp_path, 0) / "verdict.json", Verdict(1126.0, "restart", "why", "a"))
    assert train(1, 5, 12, 1130.0) == (5, 12)
    found = ledger(load_run(tmp_path))
    assert (found.kept_steps, found.lost_steps, len(found.frames)) == (12, 5, 2)
    assert any("clocks of a host and of the disk differ" in note for note in found.notes) == bool(skew)


def test_steps_after_the_end_of_another_host_say_nothing_of_clocks(tmp_path):
    """One of two hosts was preempted; the other one, which writes the steps, was killed later, and told no end."""
    write(folder_of(tmp_path, 0) / "plan.json", Plan(0, 1000.0, ["a", "b"], 1, "a", 9000, name="0000-a"))
    metrics = empty(tmp_path)
    append(metrics, {**header(20, 0), "time": 1001.0, "attempt": "0000-a"})
    for at in range(1, 13):
        append(metrics, {**builders.step(at), "time": 1000.0 + 10 * at, "seconds": 10.0, "attempt": "0000-a"})
    write(folder_of(tmp_path, 0) / "end-b.json", End("b", 1105.0, "preempted", "step", 10, "notice"))
    assert not any("clocks" in note for note in ledger(load_run(tmp_path)).notes)


numbers = st.floats(0, 2000, allow_nan=False)


@st.composite
def wild_runs(draw):
    """Anything that files could say, in any order: clocks that disagree, steps of no time, spans over each other."""
    attempts = []
    for number in range(draw(st.integers(0, 4))):
        plan = Plan(number, draw(numbers), ["a"], 1, "a", 1, step=draw(st.integers(0, 9)))
        ends = {"a": End("a", draw(numbers), "failed", "step")} if draw(st.booleans()) else {}
        attempts.append(Attempt(None, number, plan, {}, ends, None))
    parts = []
    for _ in range(draw(st.integers(0 if attempts else 1, 4))):
        part = Part(draw(st.integers(0, 9)), draw(st.none() | numbers))
        for step in range(draw(st.integers(1, 6))):
            part.add({"step": part.start_step + step + 1, "time": draw(numbers), "seconds": draw(numbers)})
        parts.append(part)
    spans = [
        goodput.Span(draw(st.sampled_from(["save", "evaluation"])), 1, begin, begin + draw(numbers))
        for begin in draw(st.lists(numbers, max_size=5))
    ]
    return Run(None, None, parts, spans, attempts)


@given(wild_runs())
def test_whatever_the_files_say_the_kinds_add_up_to_the_wall_time(run):
    found = ledger(run)
    assert sum(found.totals().values()) == found.wall
    assert sum(sum(found.totals(number).values()) for number in {piece.attempt for piece in found.pieces}) == found.wall
    assert all(value >= 0 for value in found.totals().values())
    for one, after in zip(found.pieces, found.pieces[1:], strict=False):
        assert one.end == after.begin and one.begin < one.end
    ends = {found.pieces[0].begin, found.pieces[-1].end} if found.pieces else {found.frames[0].begin}
    assert ends == {found.frames[0].begin, found.frames[-1].end}
    assert found.kept_steps + found.lost_steps == sum(map(len, run.parts))


def test_a_run_of_before_times_is_not_known(tmp_path):
    Builder(tmp_path / "run", 10).plan()
    for path in (tmp_path / "run" / "attempts").rglob("*.json"):
        path.unlink()
    (tmp_path / "run" / "metrics" / "rank_0.jsonl").write_text(
        json.dumps({"total_steps": 2, "start_step": 0}) + "\n" + json.dumps({"step": 1, "seconds": 2.0}) + "\n"
    )
    assert "no times" in ledger(load_run(tmp_path / "run"))


def test_of_a_run_without_attempts_gaps_are_not_known(tmp_path):
    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    builder.train(7, save=0)
    builder.spend(500, "stop")
    builder.saved = 5
    builder.plan(wait=100)
    builder.train(10, start=50)
    built = builder.done(0)
    for path in (tmp_path / "run" / "attempts").rglob("*.json"):
        path.unlink()
    found = ledger(load_run(tmp_path / "run"))
    truth = built.truth
    assert kinds(found) == {
        "kept": truth["kept"], "lost": truth["lost"], "compile": truth["compile"], "between": truth["between"],
        "save": 7, "unknown": 500 + 100 + 50,
    }  # fmt: skip
    assert "has no attempts/" in " ".join(found.notes)


def test_steps_of_before_times_are_left_out_and_said(tmp_path):
    builder = Builder(tmp_path / "run", 10)
    for step in (1, 2):
        builder.metrics({"step": step, "seconds": 2.0})
    builder.saved = 2
    builder.plan()
    builder.train(10)
    built = builder.done()
    found = ledger(load_run(tmp_path / "run"))
    assert found.wall == built.wall * TENTH and found.kept_steps == 8
    assert "2 records of steps" in " ".join(found.notes)


def without_times(path, steps):
    """The first lines of a metrics file as they were written before."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for record in lines[: steps + 1]:
        del record["time"]
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))


def test_attempts_whose_steps_have_no_times_are_not_known_and_not_of_no_use(tmp_path):
    builder = Builder(tmp_path / "run", 12)
    builder.plan()
    builder.train(7)
    builder.kill()
    builder.plan(wait=30)
    builder.train(12)
    built = builder.done()
    metrics = tmp_path / "run" / "metrics" / "rank_0.jsonl"
    without_times(metrics, 7)
    found = ledger(load_run(tmp_path / "run"))
    first, second = (found.totals(number) for number in (0, 1))
    assert {kind for kind, value in first.items() if value} == {"unknown"} and second["unknown"] == 0
    assert sum(found.totals().values()) == found.wall == built.wall * TENTH
    metrics.write_text(metrics.read_text().replace('"time"', '"then"'))
    assert "no times" in ledger(load_run(tmp_path / "run"))


def test_a_run_that_goes_on_ends_at_its_last_sign(tmp_path):
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(7)
    builder.spend(25, "stop")
    builder.beat()
    built = builder.sum_up()
    assert ledger(load_run(tmp_path / "run")).wall == built.wall * TENTH


def test_an_attempt_that_never_trained_makes_earlier_steps_lost(tmp_path):
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(7)
    builder.kill()
    builder.plan()  # from step 5
    builder.kill()
    found = ledger(load_run(tmp_path / "run"))
    assert (found.kept_steps, found.lost_steps) == (5, 2)


def test_one_step_in_all_counts_as_compiling(tmp_path):
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(1)
    found = ledger(load_run(tmp_path / "run"))
    assert kinds(found) == {"start": 100, "compile": 320}
    assert "whole first step counts as compiling" in " ".join(found.notes)


def test_nothing_yet(tmp_path):
    (tmp_path / "metrics").mkdir()
    assert ledger(load_run(tmp_path)) == "no step"
    for folder in ("none", "metrics"):
        with pytest.raises(DataError, match=folder):
            load_run(tmp_path / folder)


def test_every_kind_has_its_words():
    assert set(WORDS) == set(goodput.Kind.__args__)


def test_steps_behind_a_start_that_has_made_no_step_yet_are_lost(tmp_path):
    """The header of a start stands in the metrics long before its first step, which compiles."""
    (tmp_path / "metrics").mkdir()
    steps = [{"step": step, "time": 1.7e9 + 2 * step, "seconds": 2.0, "loss": 5.0} for step in range(1, 9)]
    lines = [{"total_steps": 40, "time": 1.7e9}, *steps, {"total_steps": 40, "start_step": 5, "time": 1.7e9 + 60}]
    (tmp_path / "metrics" / "rank_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ledger(load_run(tmp_path))
    assert (found.kept_steps, found.lost_steps) == (5, 3)


@pytest.mark.parametrize("jump", [-3600, -0.25, 0])
def test_times_that_go_back_are_noted(tmp_path, jump):
    """Of a clock that was set back an hour, goodput was given without a word."""
    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    builder.train(10)
    builder.done()
    file = tmp_path / "run" / "metrics" / "rank_0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    for line in steps[5:]:
        line["time"] += jump - (steps[5]["time"] - steps[4]["time"]) * (jump == -0.25)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes = ledger(load_run(tmp_path / "run")).notes
    assert [note for note in notes if "go back at step 6" in note] == notes[: jump < 0]
