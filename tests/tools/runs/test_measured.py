"""A run's usual step beside the step that is predicted for a measured cluster."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.tools.runs.builders import Builder
from tools.estimate.efficiency import cluster, cluster_file
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.hardware import DEFAULT_HARDWARE
from tools.layout.resolve import resolve
from tools.measured import CLUSTER, FORMAT, Manifest, recipe_digest, software, write_bundle
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.runs.cli import runs
from tools.runs.measured import SLOWER, beside
from tools.runs.readings import loss_rank
from tools.runs.study import study

ROOT = Path(__file__).parents[3]
MINI = ROOT / "recipes" / "mini" / "pretrain.yaml"
R36 = ROOT / "recipes" / "telechat3_36b" / "context_32k.yaml"
PREDICTED = TimeModel(cluster(DEFAULT_HARDWARE)).step(from_recipe(resolve(load_recipe(R36), layout="file"))).total


def trained(folder):
    """The folder of a run of the 36B."""
    builder = Builder(folder, 20)
    builder.plan()
    builder.train(20, every=10)
    builder.done()
    recipe = load_recipe(R36)
    dump_recipe(recipe, folder / "recipe.yaml")
    (folder / "metrics" / "rank_0.jsonl").rename(folder / "metrics" / f"rank_{loss_rank(recipe)}.jsonl")
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
