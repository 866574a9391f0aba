"""`tc3 agent --slurm` and `--volcano`: what of the command line is in the file."""

import pytest
import yaml
from click.testing import CliRunner

from launch.agent.cli import agent
from launch.run.msrun import ROOT

MINI = str(ROOT / "recipes/mini/pretrain_dp2.yaml")


def printed(*words):
    done = CliRunner().invoke(agent, [MINI, *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_agents_get_what_the_command_line_says(tmp_path):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a 1\nb 1\nc 1\n")
    words = ["--nodes", str(hosts), "--spares", "1", "--set", "optimizer.weight_decay=0.2", "--steps", "30"]
    text = printed("--slurm", *words, "--no-bind", "--lost-after", "6", "--resume", "output/a/iteration_5")
    assert "\n#SBATCH --nodes=3\n" in text and "\nSLOTS=1 " in text
    assert "|| RUN_DIR=output/mini-pretrain_dp2\n" in text
    options = "--set optimizer.weight_decay=0.2 --steps 30 --no-bind --lost-after 6.0 --resume output/a/iteration_5"
    assert f"\nOPTIONS=({options} --spares 1)\n" in text
    recipe = "recipes/mini/pretrain_dp2.yaml"
    assert text.splitlines()[1].endswith(f": tc3 agent {recipe} --slurm --nodes {hosts} --spares 1 {options}")


def test_the_same_for_volcano():
    job = yaml.safe_load(printed("--volcano", "--restarts", "7", "--run-dir", str(ROOT / "output/my_run")))
    script = job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["args"][0]
    assert job["metadata"]["name"] == "my-run" and "\nOPTIONS=(--restarts 7)\n" in script
    assert "\nRUN_DIR=output/my_run\n" in script


@pytest.mark.parametrize("words", [["--slurm", "--volcano"], []])
def test_one_of_them_or_hosts(words):
    assert CliRunner().invoke(agent, [MINI, *words]).exit_code == 2
