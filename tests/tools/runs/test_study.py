"""`tc3 runs report` on built runs whose answers are known."""

import json
import math
import random
from dataclasses import asdict
from statistics import median
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import chi2

from plugins.errors import DataError
from plugins.lines import Span
from plugins.sealed_checkpoint.plan import seal_file, write_refusal, write_seal
from plugins.straggler_probe.record import append, probe_file
from tests.plugins.straggler_probe.histories import history
from tests.tools.runs.builders import Builder
from tests.tools.runs.builders import append as write
from tools.recipe.load import Recipe
from tools.runs import slow
from tools.runs.cli import runs
from tools.runs.goodput import NEVER, WORDS, Ledger, Piece
from tools.runs.readings import Part
from tools.runs.render import _FINE, _coarse
from tools.runs.slow import Probes, slow_of
from tools.runs.study import THRESHOLD, WINDOW, _saves, daly, mtbf, overhead, saving, spikes, studies, young


def run_report(*arguments):
    return CliRunner().invoke(runs, ["report", *map(str, arguments)])


def told(*arguments):
    result = run_report(*arguments, "--json")
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
    assert found["held_out"] is None, "it was never evaluated"


def test_the_interval_between_saves_is_judged_by_what_was_measured(done):
    (found,) = told(done.folder)
    saves = found["checkpoints"]
    assert (saves["saves"], saves["seconds"], saves["steps"], saves["every"]) == (12, pytest.approx(0.7), 10, 20.0)
    assert saves["best"]["low"] < saves["best"]["best"] < saves["best"]["high"]
    assert saves["best"]["cost_used"] >= saves["best"]["cost_best"] and saves["why"] == ""


def test_the_newest_checkpoint_is_one_that_a_resume_would_take(tmp_path):
    """One that a rank had refused, because its weights are not finite, counted, and so did one that is not whole."""
    builder = Builder(tmp_path / "run", 20)
    builder.plan()
    builder.train(12)
    saves = tmp_path / "saves"
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps({"checkpoint": {"save_path": str(saves)}}))
    for step in (4, 8, 12):
        folder = saves / f"iteration_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "mini-model-0000000-0000001.safetensors").write_bytes(b"weights")
        if step < 12:
            write_seal(folder, 0, world_size=1, step=step)
    write_refusal(saves / "iteration_00000008", 0, "weights are not finite")
    (found,) = told(tmp_path / "run")
    assert (found["checkpoints"]["newest"], found["checkpoints"]["at_risk"]) == (4, 8)
    write_refusal(saves / "iteration_00000004", 0, "weights are not finite")
    (found,) = told(tmp_path / "run")
    assert found["checkpoints"]["newest"] is None, "what was sealed once is refused now"
    seal_file(saves / "iteration_00000004", 0).unlink()
    seal_file(saves / "iteration_00000004", 0).mkdir()  # it cannot be read, and is not missing
    (found,) = told(tmp_path / "run")
    assert found["checkpoints"]["newest"] is None


def test_the_text_says_what_the_json_does(done):
    text = " ".join(run_report(done.folder).output.split())
    for words in (
        f"goodput {100 * done.truth['kept'] / done.wall:.1f} %",
        "120, 8 trained again",
        "Attempt 0 failed (step 43): node1, worker 1 began it. a disk was full: OSError: [Errno 28]",
        "No space left on device (disk full).",
        "With it fell node0 (told to end).",
        "Mean time between failures:",
        "with 90 % confidence",
        "Best interval by Daly's formula: every",
        "Spike at step 30: loss 100",
        "Make room where the checkpoints go",
    ):
        assert words in text


def test_held_out_losses_are_reported_by_corpus_with_their_perplexities(tmp_path):
    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    builder.train(10)
    corpora = {"code": 4.0, "prose": 800.0}
    write(
        tmp_path / "run" / "metrics" / "held_out.jsonl",
        {"step": 0, "held_out_loss": 7.0, "corpora": {"code": 6.0, "prose": 8.0}},
        {"step": 10, "held_out_loss": 4.5, "corpora": corpora},
        {"step": "x", "held_out_loss": 1.0},
    )
    (found,) = told(tmp_path / "run")
    assert found["held_out"] == {
        "step": 10, "loss": 4.5, "perplexity": pytest.approx(math.exp(4.5)),
        "corpora": {"code": {"loss": 4.0, "perplexity": pytest.approx(math.exp(4.0))},
                    "prose": {"loss": 800.0, "perplexity": None}},
    }  # fmt: skip
    text = " ".join(run_report(tmp_path / "run").output.split())
    assert "held-out loss 4.5000, perplexity 90.02 (step 10)" in text
    assert "held-out loss, code 4.0000, perplexity 54.6" in text
    assert "held-out loss, prose 800.0000, perplexity huge" in text


def test_several_runs_stand_side_by_side(done, tmp_path):
    other = Builder(tmp_path / "other", 120)
    other.plan()
    other.train(17)
    other.beat()
    lines = run_report(done.folder, tmp_path / "other").output.splitlines()
    assert lines[0].split() == ["a<b", "other"]
    assert ["state", "done", "unfinished"] in [line.split() for line in lines]
    assert any("There was no failure in" in line and "is above" in line for line in lines)


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
    text = " ".join(run_report(tmp_path / "old", "--picture", tmp_path / "old.svg").output.split())
    assert "goodput not known" in text and " 0 s" not in text and "0.0 %" not in text
    assert "the times of the steps are unknown" in (tmp_path / "old.svg").read_text()


def test_of_two_starts_without_attempts_the_failures_are_not_known(tmp_path):
    builder = survivor(tmp_path / "run")
    for path in (tmp_path / "run" / "attempts").rglob("*.json"):
        path.unlink()
    (tmp_path / "run" / "attempts").rename(tmp_path / "gone")
    (found,) = told(builder.folder)
    assert found["mtbf"] is None and found["state"] == "done"
    assert found["goodput"] is not None and found["seconds"]["unknown"] > 0 and found["seconds"]["waiting"] == 0
    assert "the run has no record of how its attempts ended" in run_report(builder.folder).output


def test_the_ledger_of_the_spike_guard_is_shown(tmp_path):
    builder = survivor(tmp_path / "run")
    entry = {"step": 30, "first": 29, "why": "step 30: loss is NaN", "samples": [[1, 3]]}
    (tmp_path / "run" / "skipped.json").write_text(json.dumps({"skipped": [entry]}))
    assert told(builder.folder)[0]["skipped"] == [{"step": 30, "first": 29, "why": "step 30: loss is NaN"}]
    assert "Samples of steps 29 to 30 were left out" in run_report(builder.folder).output
    (tmp_path / "run" / "skipped.json").write_text("{")
    assert "he samples that were left out are unknown" in run_report(builder.folder).output


def test_pictures_and_page(done, tmp_path):
    for name in ("time.svg", "time.png"):
        result = run_report(done.folder, "--picture", tmp_path / name)
        assert result.exit_code == 0 and f"drawn: {tmp_path / name}" in result.stderr
    drawing = ElementTree.parse(tmp_path / "time.svg").getroot()
    words = " ".join(element.text or "" for element in drawing.iter() if element.tag.endswith("text"))
    for word in (WORDS["kept"], WORDS["lost"], WORDS["waiting"], "failed", "minutes since the run began", "attempt 2"):
        assert word in words
    assert WORDS["unknown"] not in words
    assert run_report(done.folder, "--html", tmp_path / "time.html").exit_code == 0
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
            raise run_report(*arguments).exception


def part(losses, start=0, norms=None):
    made = Part(start)
    for at, loss in enumerate(losses):
        made.add({"step": start + at + 1, "loss": loss, "global_norm": norms[at] if norms else None})
    return made


def obvious(values, threshold=THRESHOLD):
    """(step, deviations) of all spikes of one series."""
    found = []
    for at, value in enumerate(values):
        before = [math.log(one) for one in values[max(0, at - WINDOW) : at]]
        if len(before) >= 8:
            middle = median(before)
            spread = max(1.4826 * median(abs(one - middle) for one in before), 0.01)
            if (above := (math.log(value) - middle) / spread) > threshold:
                found.append((at + 1, pytest.approx(above)))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_spikes_are_those_of_the_obvious_loop(seed):
    rng = random.Random(seed)
    losses = [math.exp(2 - step / 500 + rng.gauss(0, 0.03)) for step in range(400)]
    for at in rng.sample(range(10, 400), 6):
        losses[at] *= rng.choice([1.2, 1.5, 3.0, 0.2])
    found = [(one.step, one.above) for one in spikes([part(losses)], [NEVER])]
    assert found == obvious(losses) and found


def test_a_falling_noisy_curve_has_none():
    rng = random.Random(7)
    losses = [math.exp(2 - step / 500 + rng.gauss(0, 0.05)) for step in range(20_000)]
    assert spikes([part(losses)], [NEVER]) == []


def test_what_is_not_finite_is_a_spike_and_what_is_not_recorded_is_none():
    found = spikes([part([5.0, math.nan, 5.0, math.inf])], [NEVER])
    assert [(one.step, one.name, one.above) for one in found] == [(2, "loss", None), (4, "loss", None)]
    assert spikes([part([None] * 4)], [NEVER]) == []
    assert [one.step for one in spikes([part([5.0] * 4), part([math.nan] * 2, start=4)], [NEVER, NEVER])] == [5, 6]


@pytest.mark.parametrize("norm", [math.inf, math.nan, 1e30])
def test_the_norm_of_a_step_that_the_loss_scale_skipped_is_no_spike(norm):
    made = part([5.0] * 20, norms=[1.0] * 20)
    made.add({"step": 21, "loss": 5.0, "global_norm": norm, "overflow": True})
    made.add({"step": 22, "loss": math.nan, "global_norm": math.nan, "overflow": False})
    assert [(one.step, one.name) for one in spikes([made], [NEVER])] == [(22, "loss"), (22, "global_norm")]


def test_a_part_is_compared_with_what_stood_before_it_and_knows_whether_it_stands():
    flat = [5.0 + 0.01 * (step % 3) for step in range(40)]
    first = part([*flat, 50.0, 5.0])  # steps 41 and 42 are made again
    again = part([5.0, 5.0, 60.0], start=40)
    found = spikes([first, again], [40, NEVER])
    assert [(one.step, one.value, one.stands) for one in found] == [(41, 50.0, False), (43, 60.0, True)]
    # a first step far above is seen, too, by the steps of the part before that still stand
    assert [one.step for one in spikes([part(flat), part([50.0], start=40)], [40, NEVER])] == [41]


def test_steps_that_were_lost_before_are_no_measure_of_a_later_part():
    flat = [5.0 + 0.01 * (step % 3) for step in range(90)]
    kept = [part(flat[:60]), part([5.0, 6.5, 5.0], start=60)]
    rolled_back = [part([*flat[:30], *[50.0] * 60]), part(flat[30:60], start=30), kept[1]]
    found = [one for one in spikes(rolled_back, [30, 60, NEVER]) if one.stands]
    assert [(one.step, one.above) for one in found] == [(62, spikes(kept, [60, NEVER])[0].above)]


def test_the_norm_is_judged_as_well():
    found = spikes([part([5.0] * 30, norms=[1.0] * 29 + [9.0])], [NEVER])
    assert [(one.step, one.name) for one in found] == [(30, "global_norm")]


@pytest.mark.parametrize("failures", [0, 1, 2, 7, 50, 400])
def test_the_interval_is_that_of_the_chi_square_form(failures):
    found = mtbf(failures, 1000.0)
    assert found.low == pytest.approx(2000 / chi2.ppf(0.95, 2 * failures + 2), rel=1e-9)
    if failures:
        assert found.high == pytest.approx(2000 / chi2.ppf(0.05, 2 * failures), rel=1e-9)
        assert found.estimate == 1000 / failures and found.low < found.estimate < found.high
    else:
        assert (found.estimate, found.high) == (None, None)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng, inside, tries = random.Random(1), 0, 500
    for _ in range(tries):
        now, failures = rng.expovariate(1 / 10.0), 0
        while now < 45:
            now, failures = now + rng.expovariate(1 / 10.0), failures + 1
        found = mtbf(failures, 45.0)
        inside += found.low <= 10 and (found.high is None or found.high >= 10)
    assert 0.89 <= inside / tries <= 0.99  # of counts: at least 0.9, and more where they are few


def test_nothing_is_known_of_no_time():
    assert mtbf(0, 0.0) is None


def test_the_intervals_of_young_and_daly():
    assert young(60, 8 * 3600) == pytest.approx(1859.03, abs=0.01)
    # Daly 2006: the higher order lies a little below Young's, by about two thirds of the cost
    assert daly(60, 8 * 3600) == pytest.approx(young(60, 8 * 3600) - 60 * 2 / 3, abs=0.3)
    assert daly(100, 40) == 40


def simulate(between, cost, interval, rng, failures=3000):
    """Share of the time that is not kept work, failure by failure; a restart costs nothing here."""
    kept = total = 0.0
    for _ in range(failures):
        life = rng.expovariate(1 / between)
        kept += int(life / (interval + cost)) * interval
        total += life
    return 1 - kept / total


def test_what_an_interval_costs_is_what_a_simulation_sees():
    for interval in (600, 1800, 7200):
        seen = simulate(8 * 3600, 60, interval, random.Random(2))
        assert overhead(60, interval, 8 * 3600) == pytest.approx(seen, abs=0.012)


def test_the_best_interval_costs_least():
    found = saving(60, 7200, mtbf(10, 80 * 3600.0))
    assert found.cost_best < found.cost_used
    assert found.low < found.best < found.high
    for other in (0.5, 2):
        assert overhead(60, other * found.best, 8 * 3600) > found.cost_best


def test_a_step_that_is_saved_again_is_another_save():
    spans = [Span("save", 50, at, at + 2.0, sealed=True) for at in (10.0, 110.0)]
    background = [Span("save", 60, 200.0, 201.0), Span("save", 60, 230.0, 231.0, sealed=True)]
    assert _saves([*spans, *background, *background]) == [(50, 2.0), (50, 2.0), (60, 2.0), (60, 2.0)]


def test_too_little_is_known_without_a_failure_or_a_save():
    assert saving(60, 7200, mtbf(0, 1000.0)) is None
    assert saving(0, 7200, mtbf(1, 1000.0)) is None


def probed(folder, **how):
    for record in history(np.random.default_rng(1), **how):
        append(probe_file(folder, record.rank), record)


@pytest.fixture
def run(tmp_path):
    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    builder.train(10)
    builder.done()
    return tmp_path / "run"


def report(folder, *options):
    return CliRunner().invoke(runs, ["report", str(folder), *options]).output


@pytest.mark.parametrize("failed", [0, 1])
def test_an_attempt_whose_end_nobody_recorded_may_have_failed(tmp_path, failed):
    """After a power cut the report said that there was no failure."""
    builder = Builder(tmp_path / "run", 20)
    for _ in range(failed):
        builder.plan()
        builder.train(5, every=5)
        builder.kill()
    builder.plan()
    builder.train(5, every=5)
    builder.plan()
    builder.train(5, every=5)
    builder.done()
    found, text = json.loads(report(tmp_path / "run", "--json"))["runs"][0], report(tmp_path / "run")
    assert f"No record says how attempt {failed} ended, so there may have been more failures." in text
    assert "There was no failure" not in text and (found["mtbf"] is None) is (not failed)


def test_a_run_that_was_not_probed_says_nothing(run):
    assert json.loads(report(run, "--json"))["runs"][0]["slow_ranks"] == {"compared": None, "slow": [], "unknown": []}
    assert "low rank" not in report(run)


def test_a_slow_rank_is_named_in_the_report_and_in_the_watch(run):
    probed(run, ranks=16, slow={11: ("device", 0.2, 5)})
    (found,) = json.loads(report(run, "--json"))["runs"][0]["slow_ranks"]["slow"]
    assert found.startswith("rank 11 on node1: ") and f"Slow: {found}." in report(run)
    status = json.loads(CliRunner().invoke(runs, ["watch", str(run), "--once", "--json"]).output)
    assert (status["slow_ranks"], status["probed_ranks"]) == ([found], 16)


def test_healthy_ranks_are_none(run):
    probed(run, ranks=16)
    assert "The probes found no slow rank among 16." in report(run)


def test_ranks_whose_probes_are_missing_are_named(tmp_path):
    probed(tmp_path, ranks=8)
    probe_file(tmp_path, 3).unlink()
    ended = probe_file(tmp_path, 5)
    ended.write_text("".join(ended.read_text().splitlines(keepends=True)[:30]))
    recipe = Recipe({"use_parallel": True, "parallel_config": {"data_parallel": 8}})
    found = slow_of(tmp_path, recipe)
    assert (found.slow, found.compared) == ([], 7)
    assert found.unknown == ["ranks 3: their probes are missing", "ranks 5: their probes after step 150 are missing"]
    assert slow_of(tmp_path, None).unknown == found.unknown[1:]


def test_probes_that_cannot_show_a_slow_rank_find_none(run):
    probed(run, ranks=16, probes=1)
    assert "no slow rank" not in report(run) and "fewer than 3 probes" in report(run)


def test_a_stage_that_has_more_to_do_is_not_slow(tmp_path):
    probed(tmp_path, ranks=8, slow={6: ("device", 0.5, 5), 7: ("device", 0.5, 5)})
    stages = Recipe({"use_parallel": True, "parallel_config": {"data_parallel": 2, "pipeline_stage": 4}})
    assert slow_of(tmp_path, stages).slow == [] and slow_of(tmp_path, None).slow != []


def test_broken_probes_are_said(run):
    probe_file(run, 0).write_text("{}\n")
    assert "its probes cannot be read" in report(run)


def test_a_run_that_goes_on_is_followed_by_its_newest_probes(tmp_path, monkeypatch):
    monkeypatch.setattr(slow, "LOOK", 0.0)
    probes = Probes(tmp_path, None)
    assert probes.look().compared is None
    records = history(np.random.default_rng(2), ranks=16, probes=300, slow={3: ("device", 0.2, 250)})
    for record in records[: 16 * 200]:
        append(probe_file(tmp_path, record.rank), record)
    assert probes.look().slow == []
    with probe_file(tmp_path, 3).open("a") as out:
        out.write('{"step": 3}\n[]\n' + json.dumps(asdict(records[0]) | {"probe": None}) + "\n")
    for record in records[16 * 200 :]:
        append(probe_file(tmp_path, record.rank), record)
    assert [one.split(":")[0] for one in probes.look().slow] == ["rank 3 on node0"]
    assert all(len(newest) == slow.NEWEST for _, newest in probes.files.values())


def test_probes_are_not_looked_at_more_often_than_need_be(tmp_path):
    probes = Probes(tmp_path, None)
    probes.look()
    probed(tmp_path)
    assert probes.look().compared is None
