"""A run of 50 steps that ended, and workers of a launch script: what tests of going on start from."""

import pytest
from click.testing import CliRunner

from launch import train as worker
from tools.recipe.load import load_recipe

TOY = "mini/toy.yaml"  # 8 samples a step, 1,012 an epoch of its corpus


@pytest.fixture
def trained(train, runs, save, workplace):
    """A run of 50 steps with a checkpoint of the last one: the run's folder."""
    runs.steps = 50
    run_dir = workplace / "output" / "mini-toy"
    assert train(TOY, "--steps", "50")[0] == 0
    save(run_dir / "checkpoint", 50)
    return run_dir


def stored(run_dir):
    return load_recipe(run_dir / "recipe.yaml")


class Started(Exception):
    """The cluster of a launch script stands, on this rank."""


@pytest.fixture
def script(monkeypatch):
    """Start launch/train.py as a script does; a worker of `rank` then fails as it does, or ends with `Started`."""

    def start(run_dir, *more, rank=0, samples=480):
        def train(recipe, when_together=lambda rank: None):
            when_together(rank)
            raise Started

        monkeypatch.setattr(worker, "train", train)
        size = f"train_dataset.data_loader.sizes.0={samples}"
        arguments = ["--config", TOY, "--run-dir", str(run_dir), "--set", size, *map(str, more)]
        return CliRunner().invoke(worker.main, arguments)

    return start
