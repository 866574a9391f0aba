"""`tc3 agent`: which node this is, which hosts train, what the agent is given, what Slurm and Volcano are."""

import json
import socket

import pytest
from click.testing import CliRunner

from launch.agent import cli
from launch.run import preflight
from launch.run.supervise import Outcome
from plugins.errors import ClusterError
from tools.runs.attempts import Plan, Verdict, folder_of, write


@pytest.fixture
def given(workplace, monkeypatch):
    """The jobs of the agents that `start` begins with; nothing is trained."""
    jobs = []

    class Agent:
        def __init__(self, job, fit, prepare):
            self.job, self.prepare = job, prepare

        def run(self, number):
            self.number = number
            jobs.append(self)
            return Outcome(0)

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
        assert result.exit_code == 0, result.output
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
    agent.prepare(plan)
    run_dir = workplace / "output" / "mini-toy"
    assert (run_dir / "recipe.yaml").exists() and (run_dir / "data.json").exists()
    saved = save(run_dir / "checkpoint", 2)
    write(folder_of(run_dir, 0) / "verdict.json", Verdict(0.0, "restart", "why"))
    agent = start("--set", "seed=2", "--set", "train_dataset.data_loader.config.seed=2")
    with pytest.raises(ValueError, match="order changes"):
        agent.prepare(Plan(1, 0.0, ["a", "b"], 1, "a", 5000, resume=str(saved), step=2))


def test_an_agent_that_is_started_again_joins_what_is_under_way(start, workplace):
    run_dir = workplace / "output" / "mini-toy"
    start().prepare(Plan(0, 0.0, ["a", "b"], 1, "a", 5000))
    write(folder_of(run_dir, 0) / "verdict.json", Verdict(0.0, "restart", "why"))
    assert start().number == 1
    write(folder_of(run_dir, 1) / "plan.json", Plan(1, 0.0, ["a", "b"], 1, "a", 5000))
    assert start().number == 1
    write(folder_of(run_dir, 1) / "verdict.json", Verdict(0.0, "done", "why"))
    with pytest.raises(ValueError, match="holds a run already, which has saved nothing to go on from; choose"):
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
        with pytest.raises(ClusterError, match=r"in progress there .agents of tc3 agent"), alone():
            pass
    with alone(), pytest.raises(ClusterError, match=r"in progress there .pid \d+"), together():
        pass


@pytest.mark.parametrize("name", ["node7", "node7.cluster.example", "10.1.2.3"])
def test_a_node_finds_its_line_by_its_name_or_address(monkeypatch, tmp_path, name):
    class Address:
        address = "10.1.2.3"

    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster.example")
    monkeypatch.setattr(cli.psutil, "net_if_addrs", lambda: {"eth0": [Address()]})
    assert cli.own_host(["node6", name], None, tmp_path) == name
