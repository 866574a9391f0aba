"""Slow ranks in the report and in the watch, by probes of runs that never were."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from click.testing import CliRunner

from plugins.straggler_probe.record import append, probe_file
from tests.plugins.straggler_probe.histories import history
from tests.tools.runs.builders import Builder
from tools.recipe.load import Recipe
from tools.runs import readings
from tools.runs.cli import runs
from tools.runs.readings import Probes, slow_of


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


def test_a_run_that_was_not_probed_says_nothing(run):
    assert json.loads(report(run, "--json"))["runs"][0]["slow_ranks"] == {"compared": None, "slow": [], "unknown": []}
    assert "low rank" not in report(run)


def test_a_slow_rank_is_named_in_the_report_and_in_the_watch(run):
    probed(run, ranks=16, slow={11: ("device", 0.2, 5)})
    (found,) = json.loads(report(run, "--json"))["runs"][0]["slow_ranks"]["slow"]
    assert found.startswith("rank 11 on node1: ") and f"Slow: {found}." in report(run)
    status = json.loads(CliRunner().invoke(runs, ["watch", str(run), "--once", "--json"]).output)
    assert status["slow_ranks"] == [found]


def test_healthy_ranks_are_none(run):
    probed(run, ranks=16)
    assert "No slow rank among 16 by its probes." in report(run)


def test_a_stage_that_has_more_to_do_is_not_slow(tmp_path):
    probed(tmp_path, ranks=8, slow={6: ("device", 0.5, 5), 7: ("device", 0.5, 5)})
    stages = Recipe({"use_parallel": True, "parallel_config": {"data_parallel": 2, "pipeline_stage": 4}})
    assert slow_of(tmp_path, stages).slow == [] and slow_of(tmp_path, None).slow != []


def test_broken_probes_are_said(run):
    probe_file(run, 0).write_text("{}\n")
    assert "its probes cannot be read" in report(run)


def test_a_run_that_goes_on_is_followed_by_its_newest_probes(tmp_path, monkeypatch):
    monkeypatch.setattr(readings, "LOOK", 0.0)
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
    assert all(len(newest) == readings.NEWEST for _, newest in probes.files.values())


def test_probes_are_not_looked_at_more_often_than_need_be(tmp_path):
    probes = Probes(tmp_path, None)
    probes.look()
    probed(tmp_path)
    assert probes.look().compared is None
