"""Two workers with masks at the end of documents: the same training in another order, and the same after a kill."""

import re

import pytest

from tests.training import runs

pytestmark = pytest.mark.slow
TINY_EOD, BALANCED = runs.HERE / "tiny_eod.yaml", runs.HERE / "tiny_eod_balanced.yaml"


@pytest.fixture(scope="module")
def balanced(corpus, tmp_path_factory):
    """A run with the plugin from beginning to end."""
    run_dir = tmp_path_factory.mktemp("balanced") / "run"
    runs.train(BALANCED, run_dir, corpus)
    return run_dir


def test_losses_and_norms_equal_those_without_the_plugin(balanced, corpus, tmp_path):
    runs.train(TINY_EOD, tmp_path / "run", corpus)
    without, plugin = runs.steps(tmp_path / "run"), runs.steps(balanced)
    assert sorted(without) == sorted(plugin) == list(range(1, 9))
    for step in without:
        assert without[step]["global_norm"] > 0.5, "clipping must happen for this comparison to mean something"
        for key in ("loss", "lm_loss", "mtp_loss", "load_balancing_loss", "global_norm"):
            assert plugin[step][key] == pytest.approx(without[step][key], abs=1e-5), f"step {step}: {key}"


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
