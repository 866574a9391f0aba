"""MindSpore's sharded graph on CPU workers: each layout trains as one process does, and goes on after a kill.

benchmarks/RESULTS.md has further layouts; `tc3 accuracy equivalence` compares gradients and optimizer state, too.
"""

import json
import shutil

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from plugins.expert_balance.record import load_file
from plugins.expert_balance.record import read as read_loads
from plugins.expert_balance.replay import differences, replay
from plugins.expert_balance.routers import Watcher, routers_file
from plugins.expert_balance.settings import Settings
from tests.forks import forked_compiles
from tests.training import forked, runs
from tests.training.conftest import shared
from tools.accuracy.cli import accuracy
from tools.accuracy.collectives import DIFFERS, compare_run
from tools.data.index import write_corpus
from tools.dryrun.executed import calls_file
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow
STEPS = [1, 2, 3, 4, 5, 6]
KILLED = "_tp2"  # the layout whose run is killed and goes on: all that is compared with it holds of a resumed run


def evaluating(layout, folder, corpus, only_second=False):
    """A recipe in `folder` of a layout that evaluates, before it and after steps 3 and 6.

    It evaluates one batch of each of two corpora, or with `only_second` of the second one.
    """
    flat = load_recipe(runs.HERE / f"sharded{layout}.yaml")
    lengths = np.random.default_rng(1).integers(20, 200, 40, dtype=np.int32)
    write_corpus(folder / "random", lengths, flat["model"]["model_config"]["vocab_size"], 0, 1)
    paths = str(corpus), str(folder / "random")
    flat["plugins"]["held_out_loss"] = {"data_path": paths[1] if only_second else list(paths), "every": 3}
    dump_recipe(flat, folder / "evaluating.yaml")
    return folder / "evaluating.yaml"


def run(layout, workers, corpus, tmp_path_factory):
    """The folder of a run of tests/training/sharded<layout>.yaml to its end; each is trained once."""
    recipe = runs.HERE / f"sharded{layout}.yaml"

    def make(folder):
        if layout == KILLED:
            killed_and_resumed(evaluating(layout, folder, corpus), folder, corpus)
        else:
            forked.train(workers, recipe, folder / "run", corpus)

    return shared(tmp_path_factory, f"sharded{layout}", make) / "run"


def killed_and_resumed(recipe, folder, corpus):
    """A run of which rank 1 is killed in the save of step 6; what it had computed and saved, what its resume printed.

    It evaluates: the resume loads both graphs that the killed run has compiled.

    It dies over its first file of the second checkpoint, and rank 0, which removes the old, has sealed its part: of the
    one that is kept, all is there until all ranks have sealed the next. A rank that dies while it writes a file:
    test_workers.py.
    """
    cache = runs.compiled_once(folder / "graph")
    hook = runs.dying(TC3_TEST_KILL_SEAL="1:3") | cache  # files 1 and 2 are the first checkpoint's
    runs.train(recipe, folder / "run", corpus, "--set", "checkpoint.save_max=1", expect=1, **hook)
    assert runs.processes_of(folder / "run") == []
    assert list((folder / "run" / "checkpoint").glob("saving_0000-*/iteration_00000006/seal_rank_0.json"))
    killed = {
        "steps": list(runs.steps(folder / "run").values()),
        "checkpoints": runs.checkpoints(folder / "run"),
        "calls": [calls_of(folder / "run", rank) for rank in (0, 1)],
    }
    (folder / "killed.json").write_text(json.dumps(killed))
    (folder / "resumed.txt").write_text(runs.train(recipe, folder / "run", corpus, "--resume", "auto", **cache))


def calls_of(run_dir, rank):
    """The collectives of a rank's step, in order; none where the run was killed before it wrote them."""
    file = calls_file(run_dir, rank)
    return json.loads(file.read_text())["calls"] if file.exists() else None


@pytest.fixture(scope="session")
def one_process(workers, corpus, tmp_path_factory):
    """Return the steps of the run in one process."""
    return runs.steps(run("", workers, corpus, tmp_path_factory))


def equal(sharded, one_process):
    """The steps of a layout, against those of one process."""
    assert sorted(sharded) == sorted(one_process) == STEPS
    assert one_process[6]["loss"] < one_process[1]["loss"] - 0.05, "it learns"
    for step, record in sharded.items():
        assert one_process[step]["global_norm"] > 0.5, "clipping must happen for this comparison to mean something"
        assert record["loss"] == pytest.approx(one_process[step]["loss"], abs=1e-5), f"step {step}"
        assert record["global_norm"] == pytest.approx(one_process[step]["global_norm"], rel=5e-5), f"step {step}"


def test_losses_and_norms_equal_those_of_one_process(one_process, workers, corpus, tmp_path_factory):
    """A pipeline goes on with half of this run, and is compared with it, in test_other_layout.py."""
    equal(runs.steps(run(KILLED, workers, corpus, tmp_path_factory)), one_process)


def test_experts_of_a_pipeline_that_change_places_leave_the_losses_unchanged(one_process, workers, corpus, tmp_path):
    """Two ranks of the last stage shuffle their experts after each other step, by the graph's own AlltoAllV.

    All four ranks plan for the last stage's layer, and rank 0, which has no experts, records it.
    """
    recipe = tmp_path / "recipe.yaml"
    ours = Settings(every=2, method="random")
    plugins = {"expert_balance": {"every": ours.every, "method": ours.method}}
    recipe.write_text(yaml.safe_dump({"base_config": str(runs.HERE / "sharded_pp2_ep2.yaml"), "plugins": plugins}))
    forked.train(workers, recipe, tmp_path / "run", corpus)
    found = runs.steps(tmp_path / "run", rank=3)  # only the ranks of the last stage compute the loss
    equal(found, one_process)
    assert [found[n]["loss"] for n in STEPS] == pytest.approx([one_process[n]["loss"] for n in STEPS], rel=1e-6)
    loads = read_loads(load_file(tmp_path / "run"))
    config = load_recipe(recipe)["model"]["model_config"]
    choices = 4 * config["seq_length"] * config["num_experts_per_tok"]
    assert [(load.step, load.layers) for load in loads] == [(step, (1,)) for step in STEPS]
    assert all(load.tokens.sum() == choices for load in loads), "of the whole batch"
    assert all(load.micro_batch == (None,) for load in loads), "two were counted together"
    assert [load.moved is not None for load in loads] == [False, True] * 3
    assert all(load.moved.experts > 0 for load in loads if load.moved)
    assert differences(loads, replay(loads, ours)) == []
    watcher = Watcher((1,), config["moe_router_bias_update_rate"])
    measured = [json.loads(line) for line in routers_file(tmp_path / "run").read_text().splitlines()]
    assert measured == [
        watcher.see(load.step, load.tokens).as_json(line["time"]) for load, line in zip(loads, measured, strict=True)
    ]


def test_the_collectives_of_a_run_are_those_of_its_dry_run(workers, forks, corpus, tmp_path_factory, tmp_path):
    """And where a rank's record lacks one, it is named: the compiles are not repeated for that."""
    run_dir = tmp_path / "run"
    whole = run(KILLED, workers, corpus, tmp_path_factory)
    shutil.copytree(whole, run_dir, ignore=shutil.ignore_patterns("checkpoint"))
    with forked_compiles(forks, tmp_path / "cache"):
        done = CliRunner(catch_exceptions=False).invoke(accuracy, ["collectives", str(run_dir), "--json"])
    assert done.exit_code == 0, done.output
    for rank in json.loads(done.stdout)["ranks"]:
        assert rank["calls"] > 50 and {"AllReduce", "AllGather", "ReduceScatter"} <= rank["by_name"].keys()
    file = calls_file(run_dir, 1)
    record = json.loads(file.read_text())
    lost = record["calls"].pop(len(record["calls"]) // 2)
    file.write_text(json.dumps(record))
    with forked_compiles(forks, tmp_path / "cache"):
        verdict = compare_run(run_dir)
    one, other = (rank["differences"] for rank in verdict.ranks)
    assert verdict.word == DIFFERS and one == [] and len(other) == 1
    assert other[0].startswith(f"reported, not executed: {lost[0]} of "), other


def test_a_killed_run_goes_on_to_the_same_bits(workers, corpus, tmp_path_factory):
    """Steps 4 and 5 were made before the kill by the graph as it was compiled, and after it by the loaded one."""
    run_dir = run(KILLED, workers, corpus, tmp_path_factory)
    before = json.loads((run_dir.parent / "killed.json").read_text())
    assert before["checkpoints"] == [3]
    killed = {record["step"]: record for record in before["steps"]}
    text = (run_dir.parent / "resumed.txt").read_text()
    assert "seal_rank_1.json is missing: the save did not finish" in text and "going on from step 3" in text
    resumed = runs.steps(run_dir)
    assert sorted(resumed) == STEPS and {4, 5} <= killed.keys()
    for step in sorted(killed):
        runs.same(resumed[step], killed[step])
        assert step <= 3 or resumed[step]["seconds"] != killed[step]["seconds"], f"step {step} is of the run before"
    assert "compile cache: loads the graph" in text
    for calls in (before["calls"], loaded := [calls_of(run_dir, rank) for rank in (0, 1)]):
        first, second = ([call for call in own if len(call[1]) > 1] for own in calls)
        assert first == second and len(first) > 20, "ranks call collectives in one order"
    assert [sorted(own, key=str) for own in loaded] == [sorted(own, key=str) for own in before["calls"]]
    compiled, loaded = (run_dir / "checkpoint" / f"iteration_{step:08d}" / "metadata.json" for step in (3, 6))
    assert loaded.read_bytes() == compiled.read_bytes(), "layouts and slices of every tensor"
