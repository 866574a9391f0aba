"""The example files: each does what its head says."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.placement.instance_file import judge, read_instance
from tools.search.cli import search

EXAMPLES = Path(__file__).parents[3] / "tools" / "search" / "examples"


def run(*words):
    return CliRunner().invoke(search, [str(word) for word in words], catch_exceptions=False)


def test_measurements_are_predicted_and_calibrated_against(tmp_path):
    rows = json.loads(run("validate", EXAMPLES / "measurements.yaml", "--json").stdout)
    assert all(abs(row["step_error"]) < 0.1 and row["reason"] is None for row in rows) and len(rows) == 3
    out = tmp_path / "my_cluster.yaml"
    result = run("calibrate", EXAMPLES / "measurements.yaml", "--cluster", "atlas_800t_a2", "--out", out, "--json")
    found = json.loads(result.stdout)
    assert found["fitted"] and set(found["errors"]) == {row["id"] for row in rows} and not found["skipped"]
    assert out.read_text("utf-8").startswith("# my_cluster: atlas_800t_a2 with efficiencies fitted to 3 measured steps")


def test_the_instance_is_solved(tmp_path):
    instance, out = EXAMPLES / "pipeline.json", tmp_path / "plan.json"
    assert run("pipeline", instance, "--effort", 4, "--out", out).exit_code == 0
    problem = read_instance(instance)
    assert judge(problem, json.loads(out.read_text("utf-8"))["solution"]).over == {}


@pytest.mark.parametrize("command", ["validate", "calibrate", "pipeline"])
def test_the_help_names_them(command):
    assert "examples" in run(command, "--help").stdout
