"""`tc3 agent`: which node this is, which hosts train, what the agent is given, what Slurm and Volcano are."""

import fcntl
import json
import shutil
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from launch.agent import cli
from launch.agent.cli import unfit
from launch.agent.planning import checkpoint_of, follow, make_plan
from launch.run import preflight
from launch.run.supervise import Outcome
from plugins.errors import CheckpointError, ClusterError
from tools.doctor import probe as run
from tools.files.locks import LOCK
from tools.runs.attempts import Plan, Verdict, folder_of, write


def report(*rates):
    """A probe of workers that multiply at these rates."""
    workers = [
        {
            "rank": rank, "place": "", "kind": "Ascend 910B", "cores": "", "matmul": [rate] * 7, "memory": [10.0] * 7,
            "disk": [100.0] * 7, "waited": [0.0] * 7, "throttled": [0.0] * 7, "failed": "",
        }
        for rank, rate in enumerate(rates)
    ]  # fmt: skip
    return {"device": "Ascend", "rounds": 7, "folder": "/", "workers": workers, "links": [], "notes": []}


@pytest.mark.parametrize(
    ("rates", "count"),
    [((100.0, 100.0, 101.0, 99.0), 0), ((100.0, 100.0, 20.0, 99.0), 1), ((20.0,), 0)],
    ids=["alike", "one slow", "alone"],
)
def test_a_node_with_a_slow_worker_is_not_fit(monkeypatch, tmp_path, rates, count):
    monkeypatch.setattr(run, "probe", lambda recipe, workers, folder: report(*rates))
    reasons = unfit(len(rates), tmp_path)
    assert len(reasons) == count and all("worker 2" in reason for reason in reasons)


def test_a_node_that_cannot_be_probed_is_not_kept_out(monkeypatch, tmp_path):
    def probe(recipe, workers, folder):
        raise ClusterError("no cores can be told")

    monkeypatch.setattr(run, "probe", probe)
    assert unfit(8, tmp_path) == []


@pytest.fixture
def given(workplace, monkeypatch):
    """The jobs of the agents that `start` begins with; nothing is trained."""
    jobs = []

    class Agent:
        ends = Outcome(0)

        def __init__(self, job, fit, prepare):
            self.job, self.prepare = job, prepare

        def run(self, number):
            self.number = number
            jobs.append(self)
            return self.ends

    monkeypatch.setattr(cli, "Agent", Agent)
    return jobs


@pytest.fixture
def start(given, workplace):
    def start(*more, hosts="a 1\nb 1\nc 1\n", host="b", spares="1"):
        (workplace / "hosts.txt").write_text(hosts)
        words = ["mini/toy.yaml", "--nodes", "hosts.txt", "--host", host, "--spares", spares, *more]
        result = CliRunner().invoke(cli.agent, words)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == given[-1].ends.code, result.output
        given[-1].output = result.output
        return given[-1]

    return start


def test_the_agent_gets_its_place_and_the_rules(start, workplace):
    agent = start("--restarts", "5", "--lost-after", "7", "--no-bind")
    job = agent.job
    assert (job.host, job.hosts, job.nodes, job.slots) == ("b", ("a", "b", "c"), 2, 1)
    assert (job.rules.restarts, job.rules.hosts, job.lost_after) == (5, ["a", "b", "c"], 7.0)
    assert job.watchful and job.cached and not job.bind and job.resume is None and agent.number == 0
    assert job.run_dir == workplace / "output" / "mini-toy"


def test_who_plans_keeps_the_recipe_and_checks_the_order_of_the_data(start, workplace, save):
    agent = start()
    plan = Plan(0, 0.0, ["a", "b"], 1, "a", 5000)
    run_dir = workplace / "output" / "mini-toy"
    assert agent.prepare(plan) == agent.job.recipe
    assert not (run_dir / "recipe.yaml").exists() and not (run_dir / "data.json").exists(), "it does not count yet"
    follow(replace(agent.job, host="a"), plan)
    assert (run_dir / "recipe.yaml").exists() and (run_dir / "data.json").exists()
    saved = save(run_dir / "checkpoint", 2)
    write(folder_of(run_dir, 0) / "verdict.json", Verdict(0.0, "restart", "why"))
    agent = start("--set", "seed=2", "--set", "train_dataset.data_loader.config.seed=2")
    with pytest.raises(ValueError, match="the order of the samples differs from that of"):
        agent.prepare(Plan(1, 0.0, ["a", "b"], 1, "a", 5000, resume=str(saved), step=2))


def test_agents_that_join_after_a_kill_do_not_go_on_with_another_model(start, workplace, save, monkeypatch):
    """The attempt had no verdict, so nothing compared the checkpoint with the model: new layers began at random."""
    run_dir = workplace / "output" / "mini-toy"
    agent = start()
    follow(replace(agent.job, host="a"), Plan(3, 0.0, ["a", "b"], 1, "a", 5000))
    write(folder_of(run_dir, 3) / "plan.json", Plan(3, 0.0, ["a", "b"], 1, "a", 5000))
    saved = str(save(run_dir / "checkpoint", 2))
    compared = []
    monkeypatch.setattr(cli, "check_model", lambda recipe, folder: compared.append(folder))
    agent = start()
    for number, times in ((4, 1), (5, 1)):
        agent.prepare(Plan(number, 0.0, ["a", "b"], 1, "a", 5000, resume=saved, step=2))
        assert len(compared) == times, number


def test_the_digests_of_the_data_are_those_of_the_begin_of_a_launch(start, workplace):
    """They were written with every plan, also with one that is not followed: before its branch's checkpoints go."""
    run_dir, agent = workplace / "output" / "mini-toy", start()
    digests, job = run_dir / "data.json", replace(agent.job, host="a")

    def rewritten(number, **more):
        digests.write_text("old")
        plan = Plan(number, 0.0, ["a", "b"], 1, "a", 5000, **more)
        write(folder_of(run_dir, number) / "plan.json", plan)
        agent.prepare(plan)
        assert digests.read_text() == "old"
        follow(job, plan)
        return digests.read_text() != "old"

    assert rewritten(0)
    write(folder_of(run_dir, 0) / "verdict.json", Verdict(0.0, "restart", "why"))
    assert not rewritten(1), "a restart trains on what the launch has begun with"
    write(folder_of(run_dir, 1) / "verdict.json", Verdict(0.0, "give up", "why"))
    assert rewritten(2), "of the next launch"
    write(folder_of(run_dir, 2) / "verdict.json", Verdict(0.0, "restart", "why"))
    assert rewritten(3, branch=True)


def test_an_agent_that_is_started_again_joins_what_is_under_way(start, workplace):
    run_dir = workplace / "output" / "mini-toy"
    agent, plan = start(), Plan(0, 0.0, ["a", "b"], 1, "a", 5000)
    agent.prepare(plan)
    follow(replace(agent.job, host="a"), plan)
    write(folder_of(run_dir, 0) / "verdict.json", Verdict(0.0, "restart", "why"))
    assert start().number == 1
    write(folder_of(run_dir, 1) / "plan.json", Plan(1, 0.0, ["a", "b"], 1, "a", 5000))
    assert start().number == 1
    write(folder_of(run_dir, 1) / "verdict.json", Verdict(0.0, "done", "why"))
    with pytest.raises(ValueError, match="already holds a run, which has no complete checkpoint; choose"):
        start()
    assert start("--resume", "auto").number == 2


def test_the_first_host_of_the_newest_attempt_leaves_numbers_and_a_loss_curve(
    start, workplace, save, capsys, monkeypatch
):
    run_dir = workplace / "output" / "mini-toy"
    agent = start("--steps", "3")
    assert not (run_dir / "loss.png").exists(), "it did not take part"
    agent.prepare(Plan(0, 0.0, ["b", "a"], 1, "b", 5000))
    write(folder_of(run_dir, 0) / "plan.json", Plan(0, 0.0, ["b", "a"], 1, "b", 5000))
    save(run_dir / "checkpoint", 3)
    (run_dir / "metrics").mkdir()
    lines = [{"start_step": 0, "total_steps": 3}]
    lines += [{"step": step, "loss": 6.0 - step, "tokens": 100, "seconds": 0.5} for step in (1, 2, 3)]
    (run_dir / "metrics" / "rank_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("plugins.sealed_checkpoint.plan.checksum", lambda file: pytest.fail("it may be terabytes"))
    capsys.readouterr()
    start("--steps", "3", host="a")
    assert not (run_dir / "loss.png").exists(), "one host is enough"
    with monkeypatch.context() as patch:
        patch.setattr(cli.Agent, "ends", Outcome(143))
        said = start("--steps", "4").output
    assert f"Checkpoint of step 3: {run_dir}/checkpoint/iteration_00000003" in said, "it named neither"
    assert "Go on with: tc3 agent mini/toy.yaml --nodes hosts.txt --spares 1 --resume auto --steps 4" in said
    said = start("--steps", "3").output
    assert f"follow the run with: tc3 runs watch {run_dir}" in said
    assert (run_dir / "loss.png").exists() and "training loss: 5.0000 -> 3.0000" in said
    assert "go on with:    tc3 agent mini/toy.yaml --nodes hosts.txt --spares 1 --resume auto --steps 6" in said


def test_agents_share_the_run_and_tc3_train_is_kept_out(tmp_path):
    def alone():
        return preflight.only_run_in(tmp_path)

    def together():
        return preflight.only_run_in(tmp_path, together=True)

    with together():
        with together():
            pass
        with pytest.raises(ClusterError, match=r"in progress in this folder .agents of tc3 agent"), alone():
            pass
    with alone(), pytest.raises(ClusterError, match=r"in progress in this folder .pid \d+"), together():
        pass


def test_an_agent_waits_while_one_that_was_refused_removes_the_lock(tmp_path):
    """It said that a run is in progress, and left."""
    held = (tmp_path / LOCK).open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    timer = threading.Timer(0.1, held.close)
    timer.start()
    with preflight.only_run_in(tmp_path, together=True):
        assert held.closed
    timer.join()


@pytest.mark.parametrize(
    "name", ["node7", "node7.cluster.example", "10.1.2.3", "Node7", "[2001:DB8::7]", "2001:db8:0:0::7"]
)
def test_a_node_finds_its_line_by_its_name_or_address(monkeypatch, tmp_path, name):
    addresses = [SimpleNamespace(address=address) for address in ("10.1.2.3", "2001:db8::7")]
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster.example")
    monkeypatch.setattr(cli.psutil, "net_if_addrs", lambda: {"eth0": addresses})
    assert cli.own_host(["node6", name], None, tmp_path) == name
    assert cli.own_host(["node6", name], name.upper(), tmp_path) == name


@pytest.mark.parametrize("words", [("auto",), ("D",), ("D", "auto"), ("auto", "D", "D")])
def test_resume_may_be_given_auto_and_a_folder(words):
    assert cli.resumed(words) == (("auto" if "auto" in words else "D"), "D" if {"auto", "D"} <= {*words} else None)


def test_resume_names_one_folder_at_most_and_is_not_empty():
    assert cli.resumed(()) == (None, None)
    for words in (("D", "E"), ("auto", "")):
        with pytest.raises(click.UsageError):
            cli.resumed(words)


@pytest.fixture
def requeued(start, workplace, save):
    """A job that begins from another run's checkpoint, as its nodes start it for the second time."""
    old = save(workplace / "old" / "checkpoint", 50)
    run_dir = workplace / "output" / "mini-toy"

    def plan(*resume, number=1, again=True):
        agent = start(*(word for each in resume for word in ("--resume", each)))
        found = make_plan(agent.job, number, ["a", "b"], again=again)
        write(folder_of(run_dir, number) / "plan.json", found)
        return checkpoint_of(found)

    return plan, old, run_dir


@pytest.mark.parametrize("again", [True, False], ids=["under way", "before the first plan"])
def test_a_requeue_before_the_first_save_goes_on_from_the_given_checkpoint(requeued, again):
    """`--resume DIR` of the user, `--resume auto` of the sbatch file or the pod."""
    plan, old, run_dir = requeued
    if again:
        assert plan(str(old), number=0, again=False).path == old
    else:
        (run_dir / "attempts" / "0000").mkdir(parents=True)  # the first pod waits there for the others
    assert plan(str(old), "auto", again=again).path == old


def test_a_requeue_after_the_first_save_goes_on_from_that(requeued, save):
    plan, old, run_dir = requeued
    plan(str(old), number=0, again=False)
    own = save(run_dir / "checkpoint", 60)
    shutil.rmtree(old)
    assert plan(str(old), "auto").path == own, "the one that it began from is not needed any more"


def test_a_job_that_leaves_a_branch_does_not_take_it_for_its_own(requeued, save):
    """It was to begin from step 50 of another run, in a folder that holds step 60; nothing is planned yet."""
    plan, old, run_dir = requeued
    save(run_dir / "checkpoint", 60)
    assert plan(str(old), "auto", number=0, again=False).path == old


def test_a_checkpoint_that_is_named_after_all_agents_were_killed_is_taken(requeued, save):
    """The last attempt had no verdict, so the run continued from the newest checkpoint and ignored --resume."""
    plan, old, run_dir = requeued
    assert plan(str(old), number=0, again=False).path == old
    own, newer = save(run_dir / "checkpoint", 60), save(run_dir / "checkpoint", 70)
    assert plan(str(old)).path == newer, "the same command as before goes on"
    assert plan(str(own), "auto").path == newer, "with auto, a folder is used until the run has a checkpoint"
    file = folder_of(run_dir, 0) / "plan.json"
    known = file.read_text()
    file.write_text("{")
    assert plan(str(own), number=2).path == newer, "it is unknown whether an attempt has gone on from it"
    file.write_text(known)
    assert plan(str(own), number=2).path == own
    assert plan(str(own), number=3).path == newer, "once"
    assert plan(str(newer), number=4).path == newer
    assert plan(str(newer), number=5).path == newer
    last = save(run_dir / "checkpoint", 80)
    assert plan("auto", number=6).path == last
    save(run_dir / "checkpoint", 90)
    assert plan(str(last), number=7).path == last, "attempt 6 went on from it, but nobody had named it"
    link, last = run_dir.with_name("best"), save(run_dir / "checkpoint", 100)
    link.symlink_to(last)
    assert plan("auto", number=8).path == last
    save(run_dir / "checkpoint", 110)
    assert plan(str(link), number=9).path == link, "nor is it another run's"


def test_auto_alone_finds_what_the_run_began_from(requeued, capsys):
    plan, old, _ = requeued
    plan(str(old), number=0, again=False)
    for again in (True, False):
        assert plan("auto", again=again).path == old
        assert f"going on from {old}, as the run began" in capsys.readouterr().err


def test_a_run_that_has_gone_on_from_a_checkpoint_never_begins_with_random_weights(requeued, save, capsys):
    plan, old, run_dir = requeued
    plan(str(old), number=0, again=False)
    shutil.rmtree(old)
    with pytest.raises(CheckpointError, match="no such folder"):
        plan("auto")
    save(old.parent, 50)
    own = save(run_dir / "checkpoint", 60)
    assert plan("auto").path == own
    (own / "mini-model-0000000-0000001.safetensors").unlink()
    assert plan("auto").path == old, "rather than nothing"
    run_dir.rename(run_dir.with_name("other"))
    own = save(run_dir / "checkpoint", 60)
    assert plan("auto").path == own
    (own / "mini-model-0000000-0000001.safetensors").unlink()
    for again in (True, False):
        with pytest.raises(
            CheckpointError, match=r"attempt 1 of this run continued from step 60 \(.*0060\): restore that"
        ):
            plan("auto", number=2, again=again)


def test_a_new_run_may_begin_with_auto(requeued, capsys):
    plan, _, _ = requeued
    assert plan("auto", again=False) is None and "starting from the beginning" in capsys.readouterr().err
