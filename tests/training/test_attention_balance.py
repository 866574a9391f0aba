"""Two workers with masks at the end of documents: the same training in another order, and the same after a kill."""

import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.training import runs

pytestmark = pytest.mark.slow
TINY_EOD, BALANCED = runs.HERE / "tiny_eod.yaml", runs.HERE / "tiny_eod_balanced.yaml"


@pytest.fixture(scope="module")
def balanced(corpus, tmp_path_factory):
    """A run with the plugin from beginning to end."""
    run_dir = tmp_path_factory.mktemp("balanced") / "run"
    runs.train(BALANCED, run_dir, corpus)
    return run_dir


@pytest.fixture(scope="module")
def stock(corpus, tmp_path_factory):
    """The same without the plugin."""
    run_dir = tmp_path_factory.mktemp("stock") / "run"
    runs.train(TINY_EOD, run_dir, corpus)
    return run_dir


def test_losses_and_norms_equal_those_without_the_plugin(balanced, stock):
    without, plugin = runs.steps(stock), runs.steps(balanced)
    assert sorted(without) == sorted(plugin) == list(range(1, 9))
    for step in without:
        assert without[step]["global_norm"] > 0.5, "clipping must happen for this comparison to mean something"
        for key in ("loss", "lm_loss", "mtp_loss", "load_balancing_loss", "global_norm"):
            assert plugin[step][key] == pytest.approx(without[step][key], abs=1e-5), f"step {step}: {key}"


def test_gradients_equal_those_without_the_plugin(balanced, stock):
    """Adam's first moments are sums of gradients, weight by weight."""
    without, plugin = moments(stock), moments(balanced)
    assert without.keys() == plugin.keys() and len(without) > 20
    for name, expected in without.items():
        np.testing.assert_allclose(
            plugin[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max() + 1e-9, err_msg=name
        )


def moments(run_dir):
    found = {}
    for file in sorted((run_dir / "checkpoint" / "iteration_00000004").glob("*.safetensors")):
        found |= {name: value for name, value in load_file(file).items() if re.search(r"adam_m|exp_avg(?!_sq)", name)}
    return found


def test_samples_have_changed_places(balanced):
    log = (balanced / "logs" / "worker_0.log").read_text()
    before, after = re.search(r"mean of 8 steps: ([\d.]+) without the plugin, ([\d.]+) with it", log).groups()
    assert 1 <= float(after) < float(before)


def test_killed_in_training_it_goes_on_to_the_same_losses(balanced, corpus, tmp_path):
    run_dir = tmp_path / "run"
    runs.train_and_kill(BALANCED, run_dir, corpus, step=5)
    text = runs.train(BALANCED, run_dir, corpus, "--resume", "auto")
    assert "going on from step 4" in text
    expected, resumed = runs.steps(balanced), runs.steps(run_dir)
    assert sorted(resumed) == list(range(1, 9))
    for step, record in resumed.items():
        runs.same(record, expected[step])
