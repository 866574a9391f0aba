"""Adapters beside frozen weights in MindSpore's sharded graph: each layout begins with the weights of a run without
adapters, which one process saved, and trains as one process does.
"""

from pathlib import Path

import pytest

from tests.training import forked, runs
from tests.training.conftest import shared
from tests.training.test_other_layout import follows, saved
from tests.training.test_sharded import STEPS
from tests.training.test_sharded import run as sharded
from tools.checkpoint.stored import kind_of
from tools.weights.inventory import compare
from tools.weights.source import open_source

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def base(workers, corpus, tmp_path_factory):
    """A run without adapters."""
    return sharded("", workers, corpus, tmp_path_factory)


@pytest.fixture(scope="session")
def one_process(base, workers, corpus, tmp_path_factory):
    """Adapters on one process."""

    def make(folder):
        forked.train(workers, runs.HERE / "sharded_lora.yaml", folder / "run", corpus, path(base))

    return shared(tmp_path_factory, "sharded_lora", make) / "run"


def path(base):
    return f"checkpoint.load_path={saved(base, 6)}"


def keeps_frozen(run_dir, base):
    """Assert that a run's last checkpoint has the weights of `base` to the bit, and adapters beside them."""
    before, after = (open_source(Path(saved(each, 6))) for each in (base, run_dir))
    found = compare(before, after)
    weights = [name for name in before.headers if kind_of(name) == "weights"]
    assert len(weights) > 20 and set(weights) <= set(found.same)
    assert len([name for name in found.only[1] if kind_of(name) == "weights"]) == 2 * (5 + 2 + 5)


def test_losses_are_those_of_the_loaded_weights_and_the_adapters_learn(one_process, base):
    before, found = runs.steps(base), runs.steps(one_process)
    assert sorted(found) == STEPS
    assert found[1]["loss"] < before[1]["loss"] - 0.05, "trained weights were loaded"
    assert found[6]["loss"] < found[1]["loss"] - 0.02
    keeps_frozen(one_process, base)


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_layouts_train_as_one_process_does(layout, one_process, base, workers, corpus, tmp_path):
    forked.train(workers, runs.HERE / f"sharded_lora_{layout}.yaml", tmp_path / "run", corpus, path(base))
    follows(tmp_path / "run", one_process, STEPS)
    keeps_frozen(tmp_path / "run", base)


def test_a_pipeline_of_several_devices_goes_on_with_the_run_of_one_process(
    one_process, base, workers, corpus, tmp_path
):
    """Data and expert parallel, the frozen weights and the optimizer's moments sharded."""
    recipe = runs.HERE / "sharded_lora_pp2_ep2.yaml"
    forked.train(workers, recipe, tmp_path / "run", corpus, resume=saved(one_process, 3))
    follows(tmp_path / "run", one_process, [4, 5, 6], rank=3)  # only the ranks of the last stage compute the loss
    keeps_frozen(tmp_path / "run", base)
