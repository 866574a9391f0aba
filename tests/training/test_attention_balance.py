"""Two workers with masks at the end of documents: the same training in another order, and the same after a kill.

The run with the plugin loses a worker at step 7 of 10 and goes on from the checkpoint of step 5, with the graph that it
had compiled: what it computed of steps 6 and 7 before is what it must compute after it, and the whole of it is compared
with a run of one worker without the plugin, whose samples are in the order of the corpus.
"""

import re

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from tests.training import forked, runs

pytestmark = pytest.mark.slow
TINY_EOD, BALANCED = runs.HERE / "tiny_eod.yaml", runs.HERE / "tiny_eod_balanced.yaml"
ALONE = {
    "use_parallel": False,
    "runner_config": {"batch_size": 4},
    "parallel_config": {"data_parallel": 1},
    "parallel": {"dataset_strategy": [[1, 1], [1, 1], [1, 1], [1, 1], [1, 1, 1, 1]]},
    "model": {"model_config": {"batch_size": 4}},
}


@pytest.fixture(scope="module")
def killed(corpus, tmp_path_factory):
    """(folder, steps) of a run with the plugin when it had been killed."""
    run_dir = tmp_path_factory.mktemp("balanced") / "run"
    run = runs.start(BALANCED, run_dir, corpus, **runs.compiled_once(run_dir.parent / "graph"))
    runs.wait_for_step(run, run_dir, 7)
    runs.kill_worker(run_dir, 1)
    said, _ = run.communicate(timeout=800)
    assert run.returncode == 1, said
    return run_dir, runs.steps(run_dir)


@pytest.fixture(scope="module")
def resumed(killed, corpus):
    """Return what `tc3 train --resume auto` printed after the run was killed."""
    return runs.train(BALANCED, killed[0], corpus, "--resume", "auto", **runs.compiled_once(killed[0].parent / "graph"))


@pytest.fixture(scope="module")
def balanced(killed, resumed):
    """The same run at its end."""
    return killed[0]


@pytest.fixture(scope="module")
def stock(workers, corpus, tmp_path_factory):
    """The same global batches on one worker, without the plugin."""
    run_dir = tmp_path_factory.mktemp("stock") / "run"
    recipe = run_dir.with_name("alone.yaml")
    recipe.write_text(yaml.safe_dump({"base_config": str(TINY_EOD), **ALONE}))
    forked.train(workers, recipe, run_dir, corpus)
    return run_dir


def test_losses_and_norms_equal_those_without_the_plugin(balanced, stock):
    without, plugin = runs.steps(stock), runs.steps(balanced)
    assert sorted(without) == sorted(plugin) == list(range(1, 11))
    for step in without:
        assert without[step]["global_norm"] > 0.5, "clipping must happen for this comparison to mean something"
        for key in ("loss", "lm_loss", "mtp_loss", "load_balancing_loss", "global_norm"):
            assert plugin[step][key] == pytest.approx(without[step][key], abs=1e-5), f"step {step}: {key}"


def test_gradients_equal_those_without_the_plugin(balanced, stock):
    """Adam's first moments are sums of gradients, weight by weight."""
    without, plugin = moments(stock), moments(balanced)
    assert without.keys() == plugin.keys() and len(without) > 15
    for name, expected in without.items():
        np.testing.assert_allclose(
            plugin[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max() + 1e-9, err_msg=name
        )


def moments(run_dir):
    found = {}
    for file in sorted((run_dir / "checkpoint" / "iteration_00000005").glob("*.safetensors")):
        found |= {name: value for name, value in load_file(file).items() if re.search(r"adam_m|exp_avg(?!_sq)", name)}
    return found


def test_samples_have_changed_places(balanced):
    log = (balanced / "logs" / "worker_0.log").read_text()
    before, after = re.search(r"mean of 10 steps: ([\d.]+) without the plugin, ([\d.]+) with it", log).groups()
    assert 1 <= float(after) < float(before)


def test_killed_in_training_it_goes_on_to_the_same_losses(killed, resumed):
    run_dir, before = killed
    assert "going on from step 5" in resumed and "loads the graph of an earlier start" in resumed
    after = runs.steps(run_dir)
    assert sorted(after) == list(range(1, 11))
    assert 7 <= max(before) < 10
    for step, record in before.items():
        runs.same(after[step], record)
