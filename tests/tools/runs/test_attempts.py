"""These tests check what a launch writes about an attempt, and what a reader makes of it.

What a run writes is read: across resumes, while it is written, with broken lines.

A run's usual step beside the step that is predicted for a measured cluster.
"""

import json
import math
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from launch.agent.meeting import Meeting
from plugins.sealed_checkpoint.plan import write_seal
from plugins.straggler_probe.record import append as add_probe
from plugins.straggler_probe.record import probe_file
from tests.plugins.straggler_probe.histories import history
from tests.tools.runs.builders import Builder, append, empty, header, step
from tools.estimate.efficiency import cluster, cluster_file
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.files.locks import LOCK
from tools.hardware import DEFAULT_HARDWARE
from tools.layout.resolve import resolve
from tools.measured import CLUSTER, FORMAT, Manifest, recipe_digest, software, write_bundle
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.runs import attempts, cli
from tools.runs.attempts import Beat, End, Plan, Verdict, folder_of, read, read_attempts, write
from tools.runs.cli import runs
from tools.runs.measured import SLOWER, beside
from tools.runs.places import tokens_of
from tools.runs.readings import Follower, loss_in_words, perplexity, read_held_out, read_metrics
from tools.runs.slow import slow_of
from tools.runs.study import content, study
from tools.runs.watch import Watch
from tools.schema.stages import loss_rank

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


@pytest.mark.parametrize(
    ("decision", "state"), [("done", "done"), ("restart", "given up")], ids=["after the end", "of a restart"]
)
def test_a_refused_launch_is_no_part_of_an_ended_run(tmp_path, decision, state):
    run_dir = tmp_path / "run"
    write(folder_of(run_dir, 0) / "plan.json", Plan(0, 1.0, ["a", "b"], 1, "a", 9000))
    write(folder_of(run_dir, 0) / "verdict.json", Verdict(2.0, decision, "why"))
    write(folder_of(run_dir, 1) / "verdict.json", Verdict(3.0, "give up", "another model", "a", cause="user error"))
    append(empty(run_dir), header(2), step(1), step(2))
    assert study(run_dir).state == state
    assert Watch(run_dir).look().state == state


def test_an_attempt_that_all_agents_have_left_is_no_part_of_an_ended_run(tmp_path):
    """An agent that was started once more after the end, and waited for the others in vain, left a run unfinished."""
    run_dir = tmp_path / "run"
    write(folder_of(run_dir, 0) / "plan.json", Plan(0, 1.0, ["a", "b"], 1, "a", 9000))
    write(folder_of(run_dir, 0) / "verdict.json", Verdict(2.0, "done", "why"))
    append(empty(run_dir), header(2), step(1), step(2))
    agent, watch = Meeting(run_dir, "a"), Watch(run_dir)
    agent.come(1)
    assert (watch.look().state, study(run_dir).state) == ("running", "unfinished")
    agent.gone(1)
    assert (watch.look().state, study(run_dir).state) == ("done", "done")
    Meeting(run_dir, "b").come(1)
    assert (watch.look().state, study(run_dir).state) == ("running", "unfinished")


def test_a_launch_that_is_refused_while_it_is_watched_is_no_part_of_an_ended_run(tmp_path):
    """Its folder is there before its verdict: the finished run became one that was given up."""
    run_dir = tmp_path / "run"
    write(folder_of(run_dir, 0) / "plan.json", Plan(0, 1.0, ["a", "b"], 1, "a", 9000))
    write(folder_of(run_dir, 0) / "verdict.json", Verdict(2.0, "done", "why"))
    append(empty(run_dir), header(2), step(1), step(2))
    watch = None
    for number in (1, 2):
        folder_of(run_dir, number).mkdir()
        watch = watch or Watch(run_dir)
        assert watch.look().state == "running"
        refused = Verdict(3.0, "give up", "another model", "a", cause="user error")
        write(folder_of(run_dir, number) / "verdict.json", refused)
        for _ in range(2):
            now = watch.look()
            assert (now.state, now.attempt, now.failures) == ("done", 0, 0)


def test_a_run_that_was_renamed_is_not_told_by_the_run_that_has_its_name_now(tmp_path):
    """Its report quoted the log of the other run, and named the other run's checkpoint."""
    place = tmp_path / "run"

    def train(step, words):
        builder = Builder(place, 20)
        builder.plan()
        builder.train(step, save=0)
        builder.kill(lines=(words,))
        recipe = {"output_dir": str(place), "checkpoint": {"save_path": str(place / "checkpoint")}}
        (place / "recipe.yaml").write_text(json.dumps(recipe))
        saved = place / "checkpoint" / f"iteration_{step:08d}"
        saved.mkdir(parents=True)
        (saved / "mini-model-0000000-0000001.safetensors").write_bytes(b"weights")
        write_seal(saved, 0, world_size=1, step=step)
        [end] = place.glob("attempts/0000/end-node1.json")
        log = place / "attempts" / "0000" / "logs" / "worker_1.log"
        end.write_text(json.dumps({**json.loads(end.read_text()), "log": str(log)}))

    train(4, "OSError: [Errno 28] No space left on device")
    place.rename(tmp_path / "old")
    train(8, "Segmentation fault")
    found = content(study(tmp_path / "old"))
    assert found["checkpoints"]["newest"] == 4
    assert found["failures"][0]["log"] == str(tmp_path / "old/attempts/0000/logs/worker_1.log")
    found = content(study(place))
    assert found["checkpoints"]["newest"] == 8


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


@pytest.fixture
def metrics(tmp_path):
    return empty(tmp_path)


def test_a_resumed_part_replaces_what_it_repeats(metrics):
    append(metrics, header(10), *(step(n, loss=n) for n in range(1, 8)))
    append(metrics, header(20, start=5), step(6, loss=60))
    readings = read_metrics(metrics)
    assert [(n, record["loss"]) for n, record in sorted(readings.steps.items())] == [
        *((n, n) for n in range(1, 6)),
        (6, 60),
    ]
    assert (readings.total_steps, readings.start_step, readings.last["loss"]) == (20, 5, 60)


def test_speed_is_the_median_without_the_compiling_step(metrics):
    append(metrics, header(9, start=4), step(5, seconds=50), step(6, seconds=1), step(7, seconds=2), step(8, seconds=9))
    assert read_metrics(metrics).tokens_per_second() == 50.0
    append(metrics, {**step(9), "samples": ["0" * 64] * 8})
    assert "samples" not in read_metrics(metrics).last, "a summary of months of steps needs no digests in memory"


def test_the_speed_of_one_step_is_not_known(metrics):
    append(metrics, header(9), step(1))
    assert read_metrics(metrics).tokens_per_second() is None


def test_a_follower_waits_for_whole_lines_and_leaves_out_broken_ones(tmp_path):
    file = tmp_path / "x.jsonl"
    follower = Follower(file)
    assert follower.new_records() == []
    file.write_bytes(b'{"step": 1}\n{"st')
    assert follower.new_records() == [{"step": 1}]
    with file.open("ab") as out:
        out.write(b'ep": 2}\n{"step": {"step": 3}\n7\n')
    assert follower.new_records() == [{"step": 2}]
    assert Follower(file, newest=0).new_records() == []


def test_held_out_losses_count_as_last_written(tmp_path, metrics):
    append(tmp_path / "metrics" / "held_out.jsonl", *({"step": 0, "held_out_loss": loss} for loss in (7.0, 6.5)))
    assert read_held_out(tmp_path) == {0: 6.5}


def test_held_out_losses_of_steps_that_a_run_has_left_behind_do_not_count(tmp_path, metrics):
    """A resumed part evaluates the step from which it goes on first."""
    written = [(0, 7.0), (4, 6.0), (8, 5.0), (4, 6.0), (6, 5.5)]
    lines = ({"step": number, "held_out_loss": loss} for number, loss in written)
    append(tmp_path / "metrics" / "held_out.jsonl", *lines)
    assert read_held_out(tmp_path) == {0: 7.0, 4: 6.0, 6: 5.5}


def test_a_perplexity_is_the_exponential_of_a_loss():
    assert perplexity(0.0) == 1.0 and perplexity(4.0) == pytest.approx(54.59815, rel=1e-6)
    assert perplexity(1e4) == perplexity(math.inf) == math.inf
    assert perplexity(None) is None and perplexity(math.nan) is None
    assert loss_in_words(4.0) == "4.0000, perplexity 54.6" and loss_in_words(8.0) == "8.0000, perplexity 2,981"
    assert loss_in_words(math.nan) == loss_in_words(None) == loss_in_words(math.inf) == "not finite"


@pytest.mark.parametrize(
    ("recipe", "rank"),
    [
        ({}, 0),
        ({"use_parallel": True, "parallel_config": {"data_parallel": 4}}, 0),
        ({"use_parallel": True, "parallel_config": {"data_parallel": 2, "pipeline_stage": 4}}, 7),
        ({"use_parallel": False, "parallel_config": {"pipeline_stage": 4}}, 0),
        (
            {
                "use_parallel": True,
                "parallel_config": {"pipeline_stage": 4},
                "parallel": {"pipeline_config": {"pipeline_scheduler": "zero_bubble_v", "pipeline_interleave": True}},
                "model": {"model_config": {"pp_interleave_num": 2}},
            },
            0,
        ),
    ],
)
def test_the_loss_is_that_of_the_rank_that_has_it(recipe, rank):
    assert loss_rank(View(Recipe(recipe))) == rank


ROOT = Path(__file__).parents[3]
MINI = ROOT / "recipes" / "mini" / "pretrain.yaml"
R36 = ROOT / "recipes" / "telechat3_36b" / "context_32k.yaml"
OF_36B = from_recipe(resolve(load_recipe(R36), layout="file"))
PREDICTED = TimeModel(cluster(DEFAULT_HARDWARE)).step(OF_36B, simulated=True).total


def trained(folder):
    """The folder of a run of the 36B."""
    builder = Builder(folder, 20)
    builder.plan()
    builder.train(20, every=10)
    builder.done()
    recipe = load_recipe(R36)
    dump_recipe(recipe, folder / "recipe.yaml")
    metrics = folder / "metrics" / "rank_0.jsonl"
    metrics.write_text(metrics.read_text().replace('"tokens": 1000', f'"tokens": {tokens_of(recipe)}'))
    metrics.rename(folder / "metrics" / f"rank_{loss_rank(View(recipe))}.jsonl")
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The study of a run with steps of some seconds, of the 36B."""
    return study(trained(tmp_path_factory.mktemp("runs") / "run"))


def with_step(found, seconds):
    """The study with usual steps of so many seconds."""
    parts = found.run.parts
    for part in parts:
        part["seconds"][:] = type(part["seconds"])("d", [seconds] * len(part["seconds"]))
    return found


@pytest.mark.parametrize(("factor", "look"), [(1.0, False), (SLOWER - 0.01, False), (SLOWER + 0.01, True)])
def test_the_usual_step_stands_beside_the_predicted_one(found, factor, look):
    one = beside(with_step(found, factor * PREDICTED), cluster(DEFAULT_HARDWARE))
    assert one.beside.ratio == pytest.approx(factor)
    assert one.beside.predicted == pytest.approx(PREDICTED)
    assert f"({factor - 1:+.0%})" in one.notes[-1]
    assert ("tc3 search explain" in one.notes[-1]) == look


def test_a_run_without_recipe_or_steps_says_so(found):
    hardware = cluster(DEFAULT_HARDWARE)
    none = beside(replace(found, run=replace(found.run, recipe=None)), hardware)
    assert none.beside is None and "the run has no recipe" in none.notes[-1]
    early = beside(replace(found, run=replace(found.run, parts=[])), hardware)
    assert early.beside is None and "the run has no usual step" in early.notes[-1]


def test_a_run_whose_losses_are_missing_is_not_said_to_have_made_no_step(tmp_path):
    """Its goodput was 0 %, and all of its time was spent on starting."""
    folder = trained(tmp_path / "run")
    (metrics,) = (folder / "metrics").glob("rank_*.jsonl")
    metrics.rename(folder / "metrics" / "rank_0.jsonl")
    (one,) = json.loads(CliRunner().invoke(runs, ["report", str(folder), "--json"]).stdout)["runs"]
    assert one["goodput"] is None and f"{metrics.name}, which holds the losses of the run, is missing" in one["unknown"]
    status = Watch(folder).look()
    assert status.goodput is None and "is missing" in status.left_out


def test_a_watch_does_not_call_a_run_running_whose_folder_is_gone(tmp_path):
    builder = Builder(tmp_path / "run", 20)
    builder.plan()
    builder.train(3)
    watch = Watch(tmp_path / "run")
    assert watch.look().state == "running"
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    status = watch.look()
    assert (status.state, status.over) == ("unknown", None) and "is no longer there" in status.left_out
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    assert watch.look().state == "running", "as after a disk that came back"


def test_a_watch_says_which_lines_of_the_steps_it_leaves_out(tmp_path):
    """The steps of a host whose clock is years ahead were left out without a word: step 0, for ever."""
    builder = Builder(tmp_path / "run", 20)
    builder.plan()
    builder.train(3)
    assert Watch(tmp_path / "run").look().left_out == ""
    metrics = tmp_path / "run" / "metrics" / "rank_0.jsonl"
    append(metrics, {**step(4), "time": 4e9}, {**step(5), "time": 4e9})
    status = Watch(tmp_path / "run").look()
    assert status.step == 3 and status.left_out.startswith("2 records left out (time is 4000000000.0, which is in the ")
    assert "2 records left out" in CliRunner().invoke(runs, ["watch", str(tmp_path / "run"), "--once"]).output


def test_steps_of_another_batch_than_the_recipes_are_not_compared(found):
    """In an early stage of a batch that grows, the report called such steps faster than predicted."""
    run = replace(found.run, parts=[replace(part, tokens=part.tokens // 2) for part in found.run.parts])
    one = beside(replace(found, run=run), cluster(DEFAULT_HARDWARE))
    assert one.beside is None and "cannot be compared" in one.notes[-1]


def bundle(path, texts):
    manifest = Manifest(
        format=FORMAT, made="2026-11-27T00:00:00Z", device="910B3", devices=16, simulated=False, names="plain",
        recipe="recipes/mini/pretrain.yaml", digest=recipe_digest(MINI), versions=software(), verdict="go",
    )  # fmt: skip
    write_bundle(path, manifest, texts)
    return str(path)


def test_the_command_says_it_in_text_and_json(tmp_path):
    text = cluster_file(DEFAULT_HARDWARE).read_text()
    words = ["report", str(trained(tmp_path / "run")), "--measured", bundle(tmp_path / "b.zip", {CLUSTER: text})]
    done = CliRunner().invoke(runs, [*words, "--json"])
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout)["runs"]
    assert one["measured"]["ratio"] == pytest.approx(one["usual_step_seconds"] / one["measured"]["predicted"])
    assert "16 x 910B3" in done.stderr
    assert "the prediction for the measured cluster" in CliRunner().invoke(runs, words).stdout
    refused = CliRunner().invoke(runs, [*words[:-1], bundle(tmp_path / "n.zip", {})])
    assert "the bundle has no cluster.yaml" in str(refused.exception)


@pytest.mark.parametrize("newest", [13, 40])
def test_a_run_that_went_on_with_fewer_ranks_misses_no_probes(tmp_path, newest):
    """The ranks that went on were said to lack their newest probes, and later those that are gone."""
    first, again = (
        list(history(np.random.default_rng(1), ranks=ranks, probes=probes)) for ranks, probes in ((16, 20), (8, newest))
    )
    from_step = sorted({record.step for record in first})[11]
    for record in [*first, *(record for record in again if record.step > from_step)]:
        add_probe(probe_file(tmp_path, record.rank), record)
    recipe = {"use_parallel": True, "parallel_config": {"data_parallel": 8}}
    for mode in (0, 1):  # data parallelism compares all ranks, also those of the past
        assert slow_of(tmp_path, Recipe(recipe | {"parallel": {"parallel_mode": mode}})).unknown == []


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_run_that_was_removed_is_not_watched_for_ever(tmp_path, monkeypatch, comes_back):
    """Nor does the watch make its folder again, in which a new run would be refused because it holds a strange file."""
    folder, clock = tmp_path / "run", SimpleNamespace(now=0.0)
    builder = Builder(folder, 7)
    builder.plan()
    builder.train(6)

    def sleep(seconds):
        clock.now += 50.0
        if clock.now == 50.0:
            folder.rename(tmp_path / "moved")
        elif comes_back and clock.now == 150.0:
            (tmp_path / "moved").rename(folder)
        elif clock.now == 450.0:
            builder.train(1)
            builder.done()
        assert clock.now < 999.0

    def write(status):
        folder.mkdir(exist_ok=True)
        (folder / "status.prom").touch()

    monkeypatch.setattr(cli, "Exporter", lambda path: SimpleNamespace(write=write))
    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    result = CliRunner().invoke(runs, ["watch", str(folder), "--prometheus", str(folder / "status.prom")])
    if comes_back:
        assert (result.exit_code, clock.now) == (0, 450.0), result.output
    else:
        words = f"{folder}: the run was removed, or its disk is gone: for 2 min this folder has held no file"
        assert words in str(result.exception) and clock.now == 150.0 and not folder.exists()


def test_a_launch_script_that_was_killed_is_not_said_to_be_running(tmp_path):
    """A launch script does not record attempts, so `tc3 runs watch` reported `running` although nothing ran."""
    append(empty(tmp_path), header(10), step(1))
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid, state in ((os.getpid(), "running"), (dead.pid, "unfinished")):
        (tmp_path / LOCK).write_text(f"{pid} {socket.gethostname()}")
        assert Watch(tmp_path).look().state == state
    append(tmp_path / "metrics" / "rank_0.jsonl", *map(step, range(2, 11)))
    assert Watch(tmp_path).look().state == "done"
