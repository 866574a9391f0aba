"""These tests check which hosts take part in the next attempt."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import launch.train
from launch.agent import planning
from launch.agent.cli import Start
from launch.agent.decide import Smaller
from launch.agent.part import Part, command_of
from launch.agent.phases import Limits
from launch.agent.planning import Job, Planning, first_number, follow
from launch.resume import data
from launch.resume.checkpoints import take_stock
from launch.run.supervise import Outcome
from launch.train import build_config
from plugins.errors import CheckpointError
from plugins.lines import ATTEMPT
from plugins.sealed_checkpoint.plan import SAVING, TRACKER, fault, iteration, iterations, made, write_seal
from plugins.spike_guard.ledger import Entry, read_ledger, write_ledger
from tests.crashes import deaths, meetings
from tests.launch.agent.ends import A, B, attempt, end, judge, told
from tools.recipe.load import Recipe, load_recipe
from tools.runs.attempts import Verdict, folder_of, recipe_file, write
from tools.runs.readings import read_parts


class Standing:
    """A meeting in which anybody plans; `mine`: whether this agent still does when it has made its plan."""

    def __init__(self, mine=True):
        self.mine = mine

    def now(self):
        return 100.0

    def plans(self, number):
        return self.mine

    def beat(self, number, beat):
        pass


GUARDED = """\
use_parallel: True
parallel_config: {data_parallel: 2}
runner_config: {batch_size: 4}
train_dataset:
  data_loader: {type: BlendedMegatronDatasetDataLoader, sizes: [800, 0, 0], config: {data_path: ['1', nowhere]}}
checkpoint: {save_path: ''}
plugins: {spike_guard: {}}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A guarded run on hosts a and b, of 8 samples a step: `agent(host)`, `plan(agent, n)`, `save(plan, step)`. Nothing
    waits until it is on the disk, because processes die in these tests, but no power is cut.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    class Run:
        folder, saves = tmp_path / "run", tmp_path / "run" / "checkpoint"

        def agent(self, host):
            (tmp_path / "r.yaml").write_text(GUARDED)
            recipe = load_recipe(tmp_path / "r.yaml")
            recipe["checkpoint"]["save_path"] = str(self.saves)
            start = Start(recipe, self.folder, None)
            return SimpleNamespace(start=start, job=Job(recipe, self.folder, host, (A, B), 2, choose=start.choose))

        def plan(self, agent, number, follows=(A, B)):
            wanted = Planning(agent.job, number, lambda hosts: "none", Standing(), agent.start.prepare).wanted
            plan = wanted([A, B])
            write(folder_of(self.folder, number) / "plan.json", plan)
            for host in follows:
                follow(replace(agent.job, host=host), plan)
            return plan

        def fail(self, plan, cause):
            folder = folder_of(self.folder, plan.attempt)
            write(folder / "verdict.json", Verdict(3.0, "restart", "x", A, cause=cause))

        def save(self, plan, step, **made):
            folder = self.saves / f"iteration_{step:08d}"
            folder.mkdir(parents=True)
            left_out = data.left_out(load_recipe(recipe_file(self.folder, plan)))
            made = made if made else {"attempt": plan.name, "skipped": left_out}
            for rank in (0, 1):
                (folder / f"m-model-{rank:07d}-0000002.safetensors").write_bytes(b"w")
                write_seal(folder, rank, 2, step, made={} if "old" in made else made)
            (self.saves / TRACKER).write_text(str(step))
            return folder

        def spiked(self, plan, step):
            write_ledger(self.folder, [*read_ledger(self.folder), Entry(step, step, "", ((8 * step - 8, 8 * step),))])
            self.fail(plan, "spike")

        def everything(self):
            return {path for path in self.folder.rglob("*") if "attempts" not in path.parts}

    (tmp_path / "run").mkdir()
    return Run()


def test_another_agent_plans_without_the_samples_that_spiked(run):
    a, b = run.agent(A), run.agent(B)
    first = run.plan(a, 0)
    run.save(first, 8)
    run.spiked(first, 12)
    second = run.plan(a, 1)
    assert second.step == 8
    run.save(second, 20)
    run.fail(second, "signal")
    third = run.plan(b, 2)
    assert (third.step, data.left_out(load_recipe(recipe_file(run.folder, third)))) == (20, ((88, 96),))
    run.fail(third, "signal")
    assert run.plan(run.agent(A), 3).step == 20, "an agent that was started anew, too"
    assert sorted(path.name for path in run.saves.glob("iter*")) == ["iteration_00000008", "iteration_00000020"]


def test_a_plan_says_after_which_step_its_own_workers_begin(run, monkeypatch):
    """Step 8 of 4 samples is step 4 of 8. Until the first step, signs of life said step 8, which step 5 came after."""
    a = run.agent(A)
    first = run.plan(a, 0)
    assert (first.step, first.start, first.before, first.batch) == (0, 0, 0, 8)
    saved = run.save(first, 8)
    (saved / "common.json").write_text('{"global_batch_size": 4}')
    (saved / "seal_rank_0.json").unlink()
    write_seal(saved, 0, 2, 8, made={"attempt": first.name, "skipped": ()})
    run.fail(first, "signal")
    second = run.plan(a, 1)
    assert (second.step, second.start, second.before, second.batch) == (8, 4, 4, 8)
    assert replace(second, start=None).before == 8, "a plan of an older version"
    part, given = Part(a.job, second, Standing(), Limits()), []
    assert part._end(Outcome(1), None).step == 4
    monkeypatch.setattr("launch.agent.part.Phases", lambda *arguments, **named: given.append(arguments[4]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        part.run()
    assert given == [4]


def test_the_compile_cache_is_asked_for_what_this_start_loads(run, monkeypatch):
    a, given = run.agent(A), []
    plan = replace(run.plan(a, 0), compile_cache="/caches")
    monkeypatch.setattr("launch.agent.part.prepare", lambda recipe, *_, **__: given.append(recipe["checkpoint"]))
    for resume in (None, "/run/checkpoint/iteration_00000008"):
        part = Part(a.job, replace(plan, resume=resume), Standing(), Limits(), lookout=SimpleNamespace(tick=None))
        part._cache(a.job.recipe, range(2))
    assert [each.get("load_path") or None for each in given] == [None, "/run/checkpoint/iteration_00000008"]


def test_a_late_rank_that_writes_an_older_ledger_makes_nothing_trained_again(run):
    a, b = run.agent(A), run.agent(B)
    first = run.plan(a, 0)
    run.spiked(first, 3)
    before = read_ledger(run.folder)
    second = run.plan(a, 1)
    run.save(second, 8)
    run.spiked(second, 12)
    third = run.plan(b, 2)
    write_ledger(run.folder, before)
    run.fail(third, "signal")
    run.save(third, 16)
    fourth = run.plan(run.agent(A), 3)
    left_out = data.left_out(load_recipe(recipe_file(run.folder, fourth)))
    assert fourth.step == 16 and left_out == ((16, 24), (88, 96))


def test_nothing_of_the_run_changes_before_a_plan_counts(run):
    a = run.agent(A)
    first = run.plan(a, 0)
    run.save(first, 8), run.save(first, 12)
    run.spiked(first, 12)
    before, recipe = run.everything(), (run.folder / "recipe.yaml").read_text()
    second = run.plan(run.agent(B), 1, follows=())
    assert second.step == 8 and second.name.startswith("0001-")
    assert run.everything() == before and (run.folder / "recipe.yaml").read_text() == recipe
    follow(a.job, second)
    assert {path.name for path in run.saves.glob("*iteration_*")} == {
        "iteration_00000008",
        "set_aside_iteration_00000012",
    }
    assert load_recipe(run.folder / "recipe.yaml")["plugins"]["spike_guard"]["skipped"] == [[88, 96]]


def test_a_host_that_was_held_up_renames_nothing_that_later_attempts_have_saved(run, monkeypatch):
    """It has looked at step 12 of the first attempt; when it renames, that of a later one has the name."""
    a, b = run.agent(A), run.agent(B)
    first = run.plan(a, 0)
    run.save(first, 8), run.save(first, 12)
    run.spiked(first, 12)
    second = run.plan(b, 1, follows=())
    real, asleep = data.set_aside, [True]

    def held_up(folder, sure):
        if asleep.pop() if asleep else False:
            follow(b.job, second)
            run.save(second, 12)
        return real(folder, sure)

    monkeypatch.setattr(data, "set_aside", held_up)
    follow(a.job, second)
    assert made(run.saves / "iteration_00000012")["attempt"] == second.name
    follow(a.job, first)  # long after
    assert fault(run.saves / "iteration_00000012") is None


def test_what_a_planner_finds_wrong_that_was_held_up_says_nothing_about_the_run(run, monkeypatch):
    """It has read the ledger; before it looks for a checkpoint, another agent plans, trains on, and meets a spike."""
    a, b = run.agent(A), run.agent(B)
    first = run.plan(a, 0)
    run.save(first, 8)
    run.fail(first, "signal")
    real, asleep = planning.make_plan, [True]

    def held_up(*arguments, **more):
        if asleep and asleep.pop():
            second = run.plan(b, 1)
            run.spiked(second, 12)
            run.save(run.plan(b, 2), 16)
        return real(*arguments, **more)

    def late(mine):
        agent = run.agent(A)
        return Planning(agent.job, 1, lambda hosts: "none", Standing(mine), agent.start.prepare).wanted([A, B])

    monkeypatch.setattr(planning, "make_plan", held_up)
    assert late(mine=False) is None and not asleep
    monkeypatch.setattr(planning, "read_skipped", lambda job: None)
    with pytest.raises(CheckpointError, match="going on from step 16 would repeat some samples"):
        late(mine=True)


def test_an_agent_joins_the_attempt_that_another_one_begins_while_it_looks(tmp_path, monkeypatch):
    """It joined the attempt after that one, in which it was alone."""
    real = planning.newest_attempt

    def held_up(folder):
        newest = real(folder)
        folder_of(tmp_path, 4).mkdir()
        return newest

    assert first_number(tmp_path, tmp_path) == 0
    folder_of(tmp_path, 3).mkdir(parents=True)
    assert first_number(tmp_path, tmp_path) == 3
    write(folder_of(tmp_path, 3) / planning.VERDICT, Verdict(1.0, "done", "trained"))
    monkeypatch.setattr(planning, "newest_attempt", held_up)
    assert first_number(tmp_path, tmp_path) == 4


def test_an_agent_that_reads_what_an_attempt_wrote_meanwhile_joins_that_attempt(tmp_path, monkeypatch):
    """The agent took the metrics of an attempt that another agent had just begun for metrics of an older attempt whose
    folder had been removed, and joined an attempt with a higher number.
    """
    written = planning._written

    def slow(*folders):
        folder_of(tmp_path, 0).mkdir(parents=True)
        monkeypatch.setattr(planning, "_written", written)
        return 0

    monkeypatch.setattr(planning, "_written", slow)
    assert first_number(tmp_path, tmp_path) == 0
    write(folder_of(tmp_path, 0) / planning.VERDICT, Verdict(1.0, "done", "trained"))
    metrics = tmp_path / "metrics" / "rank_0.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 1, "attempt": "0007-a", "digests": "' + "0" * 20_000 + '"}\n')
    assert first_number(tmp_path, tmp_path) == 8, "above those whose folders are not there, also after an end"


def test_a_launch_counts_on_from_attempts_whose_folders_were_removed(run, tmp_path):
    """Its metrics were taken for lines of a late worker, and a checkpoint of the same step for a later one."""
    run.save(run.plan(run.agent(A), 4), 8)
    assert first_number(tmp_path / "another", run.saves) == 5
    shutil.rmtree(run.folder / "attempts")
    assert first_number(run.folder, run.saves) == 5
    (run.saves / f"{SAVING}0005-a").mkdir()
    assert first_number(run.folder, run.saves) == 6
    metrics = run.folder / "metrics" / "rank_0.jsonl"
    metrics.parent.mkdir()
    header = '{"start_step": 0, "total_steps": 2, "attempt": "%04d-a"}\n{"step": 1, "attempt": "%04d-a"}\n'
    metrics.write_text(header % (7, 7))
    number = first_number(run.folder, run.saves)
    metrics.write_text(header % (7, 7) + header % (number, number))
    assert number == 8 and [each.attempt for each in read_parts(metrics)] == ["0007-a", "0008-a"]


def test_a_host_that_was_held_up_leaves_the_recipe_of_a_later_attempt(run):
    a, b = run.agent(A), run.agent(B)
    first = run.plan(a, 0)
    run.save(first, 8)
    run.spiked(first, 12)
    run.plan(b, 1)
    recipe = (run.folder / "recipe.yaml").read_text()
    follow(a.job, first)  # its own attempt has had a verdict long ago
    assert (run.folder / "recipe.yaml").read_text() == recipe and "88" in recipe


def test_a_branch_leaves_behind_what_was_saved_before_it_and_nothing_of_its_own(run):
    a = run.agent(A)
    first = run.plan(a, 0)
    named, later = run.save(first, 8), run.save(first, 12)
    run.fail(first, "signal")
    branch = replace(run.plan(a, 1), resume=str(named), step=8, branch=True)
    follow(a.job, branch)
    assert not later.exists() and named.exists()
    own = run.save(branch, 16)
    follow(replace(a.job, host=B), branch)  # who was held up
    assert own.exists()


def test_a_resume_that_nobody_named_leaves_nothing_behind(run):
    """The newest checkpoint was out of reach for a moment, and the attempt went on from the one before it."""
    first = run.plan(run.agent(A), 0)
    taken, later = run.save(first, 8), run.save(first, 12)
    run.fail(first, "signal")
    write(folder_of(run.folder, 1) / "plan.json", replace(run.plan(run.agent(A), 1), resume=str(taken), step=8))
    take_stock(run.folder, run.saves)
    assert iterations(run.saves) == [later, taken]


@pytest.fixture
def branched(run, tmp_path):
    """An agent, and the plan of a branch that goes on from step 8 and leaves steps 12 and 16 behind; nobody follows it
    yet. `fresh()` brings this state back, `sound(where)` checks what the attempt after it goes on from.
    """
    a, b = run.agent(A), run.agent(B)
    first = run.plan(a, 0)
    named, *_ = (run.save(first, step) for step in (8, 12, 16))
    run.fail(first, "signal")
    branch = replace(run.plan(a, 1, follows=()), resume=str(named), step=8, branch=True)
    write(folder_of(run.folder, 1) / "plan.json", branch)
    shutil.copytree(run.folder, tmp_path / "kept")

    def fresh():
        shutil.rmtree(run.folder)
        shutil.copytree(tmp_path / "kept", run.folder)
        return run.folder

    def sound(where):
        run.fail(branch, "signal")
        after = run.plan(b, 2, follows=(B,))
        assert (after.step, after.resume) == (8, str(named)), where
        assert [folder.name for folder in iterations(run.saves)] == [named.name], where
        assert len(list(run.saves.rglob("seal_rank_1.json"))) == 3, where
        assert (run.saves / TRACKER).read_text() == "8", where

    return SimpleNamespace(a=a, b=b, branch=branch, fresh=fresh, sound=sound)


def test_no_attempt_goes_on_from_what_a_host_was_leaving_behind_when_it_died(branched):
    """Its name was taken, and `adopt` of the next attempt gave it back: the run went on from the branch it had left."""
    met = 0
    for _, where in deaths(lambda _: follow(branched.a.job, branched.branch), branched.fresh):
        branched.sound(where)
        met += 1
    assert met > 12


def test_no_attempt_goes_on_from_what_a_host_is_leaving_behind_that_was_held_up(branched):
    """Another host plans the next attempt between any two of its operations; it goes on afterwards."""
    met = 0

    def planned(_):
        branched.sound("meanwhile")

    for _, results, where in meetings(lambda _: follow(branched.a.job, branched.branch), planned, branched.fresh):
        assert not any(isinstance(each, Exception) for each in results.values()), (where, results)
        assert [iteration(folder) for folder in iterations(branched.a.job.saves)] == [8], where
        met += "other" in results
    assert met > 12


def test_checkpoints_of_before_seals_said_what_they_leave_out_are_judged_by_the_recipe(run):
    a, b = run.agent(A), run.agent(B)
    first = run.plan(a, 0)
    run.save(first, 8, old=True), run.save(first, 12, old=True)
    run.spiked(first, 12)
    second = run.plan(b, 1)
    assert second.step == 8 and (run.saves / "set_aside_iteration_00000012").exists()
    run.save(second, 16, old=True)
    run.fail(second, "signal")
    assert run.plan(run.agent(A), 2).step == 16


def test_all_workers_leave_out_what_their_plan_says_whatever_is_written_since(run, monkeypatch):
    """A late rank may add to the ledger, a late planner may write a recipe, while the ranks start one by one."""
    a = run.agent(A)
    plan = run.plan(a, 0)
    command = command_of(replace(a.job, bind=False), plan)
    config = command.argv[command.argv.index("--config") + 1]
    assert command.environment[ATTEMPT] == plan.name and Path(config) == recipe_file(run.folder, plan)
    run.spiked(plan, 12)
    (run.folder / "recipe.yaml").unlink()
    assert build_config(Path(config), (), run.folder, None)["plugins"]["spike_guard"]["skipped"] == [[88, 96]]
    monkeypatch.setenv(ATTEMPT, plan.name)
    assert build_config(Path(config), (), run.folder, None)["plugins"]["spike_guard"] == {}
    trained = []
    monkeypatch.setattr(launch.train, "train", lambda *arguments: trained.append(arguments))
    monkeypatch.delenv("TC3_SUPERVISED", raising=False)
    result = CliRunner().invoke(launch.train.main, ["--config", config, "--run-dir", str(run.folder)])
    assert result.exit_code == 0 and len(trained) == len(trained[0]) == 1, "nothing is checked or written once more"


def planned(tmp_path, last, there, most=2):
    """(hosts, overrides) after `last`; the recipe runs on `most` hosts, or with an override on one."""

    def can(hosts):
        return Smaller(most, [], "all") if len(hosts) >= most else Smaller(1, ["a=1"], "one") if hosts else "none"

    recipe = Recipe({"use_parallel": True, "parallel_config": {"data_parallel": most}})
    job = Job(recipe, tmp_path, A, (A, B), most)
    return Planning(job, last.number + 1, can, None, lambda plan: None)._hosts(there, [last])


@pytest.mark.parametrize("before", [{"hosts": [A], "slots": 4}, {"hosts": [A, B, "c", "d"], "slots": 1}])
def test_agents_that_are_started_on_another_number_of_nodes_plan_for_these(tmp_path, before):
    """All agents were killed, and others started on two hosts. These train on both hosts and wait for no other host."""
    lost = judged(*(end(host, 100, "lost node") for host in before["hosts"]), hosts=before["hosts"])
    lost = replace(lost, plan=replace(lost.plan, **before), verdict=replace(lost.verdict, decision="restart"))
    assert planned(tmp_path, lost, [A, B]) == ([A, B], [])


def judged(*ends, overrides=(), **more):
    found = attempt(*ends, **more)
    found.plan.overrides.extend(overrides)
    smaller = Smaller(1, ["a=1"], "one")
    return replace(found, verdict=judge(found, can=lambda hosts: smaller))


def test_without_the_lost_host_it_is_smaller(tmp_path):
    lost = judged(told(A), end(B, 104, "lost node", by=A))
    assert planned(tmp_path, lost, [A]) == ([A], ["a=1"])


@pytest.mark.parametrize(("there", "hosts", "overrides"), [([A, B], [A, B], []), ([A], [A], ["a=1"])])
def test_a_host_that_came_back_takes_part_again(tmp_path, there, hosts, overrides):
    """After any end of an attempt of fewer hosts: nothing is ended for its sake."""
    alone = judged(end(A, 100, "signal", code=-9), hosts=[A], overrides=["a=1"])
    assert alone.verdict.decision == "restart"
    assert planned(tmp_path, alone, there) == (hosts, overrides)
