"""`tc3 runs report` on built runs whose answers are known."""

import json
import math
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from plugins.errors import DataError
from tests.tools.runs.builders import Builder
from tools.runs.cli import runs
from tools.runs.goodput import WORDS, Ledger, Piece
from tools.runs.picture import _FINE, _coarse
from tools.runs.study import studies


def run(*arguments):
    return CliRunner().invoke(runs, ["report", *map(str, arguments)])


def told(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["runs"]


def survivor(folder):
    """Two failures and a spike; done."""
    builder = Builder(folder, 120)
    builder.plan()
    builder.train(43, every=10, evaluation=60, loss=lambda step: 100.0 if step == 30 else 5 - step / 1000)
    builder.kill(40, host=1, lines=("OSError: [Errno 28] No space left on device",))
    builder.plan(wait=60)
    builder.train(85, every=10)
    builder.kill(10, host=0, lines=("EI0002: The wait execution of the Notify register times out",), cause="hang")
    builder.plan(wait=30)
    builder.train(120, every=10)
    return builder.done()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return survivor(tmp_path_factory.mktemp("runs") / "a<b")


def test_the_numbers_are_those_of_the_built_run(done):
    (found,) = told(done.folder)
    assert found["goodput"] == pytest.approx(done.truth["kept"] / done.wall)
    assert {kind: pytest.approx(value / 10) for kind, value in done.truth.items()} == {
        kind: value for kind, value in found["seconds"].items() if value
    }
    assert math.fsum(found["seconds"].values()) == pytest.approx(found["wall_seconds"], abs=1e-6)
    assert (found["state"], found["kept_steps"], found["lost_steps"]) == ("done", 120, 3 + 5)
    assert [one["state"] for one in found["attempts"]] == ["failed", "failed", "done"]
    assert [(one["first_step"], one["last_step"]) for one in found["attempts"]] == [(1, 43), (41, 85), (81, 120)]
    assert [(one["host"], one["name"], one["victims"]) for one in found["failures"]] == [
        ("node1", "disk full", {"node0": "told to end"}),
        ("node0", "hang", {"node1": "told to end"}),
    ]
    assert [(one["step"], one["name"]) for one in found["spikes"]] == [(30, "loss")]
    running = (done.wall - done.truth["waiting"]) / 10
    assert found["mtbf"]["estimate"] == pytest.approx(running / 2)


def test_the_interval_between_saves_is_judged_by_what_was_measured(done):
    (found,) = told(done.folder)
    saves = found["checkpoints"]
    assert (saves["saves"], saves["seconds"], saves["steps"], saves["every"]) == (12, pytest.approx(0.7), 10, 20.0)
    assert saves["best"]["low"] < saves["best"]["best"] < saves["best"]["high"]
    assert saves["best"]["cost_used"] >= saves["best"]["cost_best"] and saves["why"] == ""


def test_the_text_says_what_the_json_does(done):
    text = " ".join(run(done.folder).output.split())
    for words in (
        f"goodput {100 * done.truth['kept'] / done.wall:.1f} %",
        "120, 8 made again",
        "Attempt 0 failed (step 43): node1, worker 1 began it. a disk was full: OSError: [Errno 28]",
        "No space left on device (disk full).",
        "With it fell node0 (told to end).",
        "Mean time between failures:",
        "with 90 % confidence",
        "Best by Daly: every",
        "Spike at step 30: loss 100",
        "Make room where the checkpoints go",
    ):
        assert words in text


def test_several_runs_stand_side_by_side(done, tmp_path):
    other = Builder(tmp_path / "other", 120)
    other.plan()
    other.train(17)
    other.beat()
    lines = run(done.folder, tmp_path / "other").output.splitlines()
    assert lines[0].split() == ["a<b", "other"]
    assert ["state", "done", "unfinished"] in [line.split() for line in lines]
    assert any("No failure in" in line and "is above" in line for line in lines)


def test_runs_of_one_name_are_told_apart_by_their_paths(done, tmp_path):
    Builder(tmp_path / "a<b", 120).plan()
    found = studies([done.folder, tmp_path / "a<b"])
    assert [one.name for one in found] == [str(done.folder), str(tmp_path / "a<b")]


def test_of_a_run_without_times_nothing_is_made_up(tmp_path):
    (tmp_path / "old" / "metrics").mkdir(parents=True)
    records = [{"total_steps": 9, "start_step": 0}, *({"step": n, "loss": 5.0, "seconds": 2.0} for n in range(1, 8))]
    (tmp_path / "old" / "metrics" / "rank_0.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    (found,) = told(tmp_path / "old")
    for name in ("goodput", "wall_seconds", "seconds", "kept_steps", "lost_steps", "mtbf"):
        assert found[name] is None
    assert "no times" in found["unknown"] and found["usual_step_seconds"] == 2.0
    assert found["checkpoints"]["why"] == "no save was measured"
    text = " ".join(run(tmp_path / "old", "--picture", tmp_path / "old.svg").output.split())
    assert "goodput not known" in text and " 0 s" not in text and "0.0 %" not in text
    assert "when the steps were made is not known" in (tmp_path / "old.svg").read_text()


def test_of_two_starts_without_attempts_the_failures_are_not_known(tmp_path):
    builder = survivor(tmp_path / "run")
    for path in (tmp_path / "run" / "attempts").rglob("*.json"):
        path.unlink()
    (tmp_path / "run" / "attempts").rename(tmp_path / "gone")
    (found,) = told(builder.folder)
    assert found["mtbf"] is None and found["state"] == "done"
    assert found["goodput"] is not None and found["seconds"]["unknown"] > 0 and found["seconds"]["waiting"] == 0
    assert "nothing says how the starts of the run ended" in run(builder.folder).output


def test_the_ledger_of_the_spike_guard_is_shown(tmp_path):
    builder = survivor(tmp_path / "run")
    entry = {"step": 30, "first": 29, "why": "step 30: loss is NaN", "samples": [[1, 2]]}
    (tmp_path / "run" / "skipped.json").write_text(json.dumps({"skipped": [entry]}))
    assert told(builder.folder)[0]["skipped"] == [{"step": 30, "first": 29, "why": "step 30: loss is NaN"}]
    assert "Samples of steps 29 to 30 were left out" in run(builder.folder).output
    (tmp_path / "run" / "skipped.json").write_text("{")
    assert "hich samples were left out is not known" in run(builder.folder).output


def test_pictures_and_page(done, tmp_path):
    for name in ("time.svg", "time.png"):
        result = run(done.folder, "--picture", tmp_path / name)
        assert result.exit_code == 0 and f"drawn: {tmp_path / name}" in result.stderr
    drawing = ElementTree.parse(tmp_path / "time.svg").getroot()
    words = " ".join(element.text or "" for element in drawing.iter() if element.tag.endswith("text"))
    for word in (WORDS["kept"], WORDS["lost"], WORDS["waiting"], "failed", "minutes since the run began", "attempt 2"):
        assert word in words
    assert WORDS["unknown"] not in words
    assert run(done.folder, "--html", tmp_path / "time.html").exit_code == 0
    page = (tmp_path / "time.html").read_text()
    assert page.count("<svg") == 1 and page.count("<table") == 4
    assert "a&lt;b" in page and "a<b" not in page and "disk full" in page


def test_of_many_pieces_only_those_are_drawn_that_can_be_seen():
    kinds = ["kept", "save"] * 20_000
    pieces = [Piece(at * 10, at * 10 + 10, kind, 0) for at, kind in enumerate(kinds)]
    pieces.append(Piece(400_000, 500_000, "waiting", 1))
    found = _coarse(Ledger([_frame(0, 500_000)], pieces, 0, 0, []))
    assert len(found) <= _FINE + 2 and found[-1] == pieces[-1]
    assert [one.end for one in found[:-1]] == [one.begin for one in found[1:]] and found[0].begin == 0


def _frame(begin, end):
    from tools.runs.goodput import Frame

    return Frame(0, begin, end)


def test_wrong_places_are_refused(done, tmp_path):
    for arguments, message in (
        ([tmp_path / "none"], "no such run"),
        ([tmp_path], "not a run's folder"),
        ([done.folder, "--picture", "a.txt"], "--picture a.txt"),
        ([done.folder, "--html", "a.txt"], "--html a.txt"),
    ):
        with pytest.raises(DataError, match=message):
            raise run(*arguments).exception
