"""A run goes on with another layout, or with one worker of two. Its losses equal those of a run that never changed,
except for rounding, because sums are added up in another order.

Whole chains of layouts, with more workers, are in benchmarks/weights/resume_layouts.py. test_expert_balance.py has the
case in which the experts of two workers come together on one.
"""

import shutil

import pytest

from launch.agent.smaller import smaller
from tests.training import forked, runs
from tests.training.test_sharded import evaluating
from tests.training.test_sharded import run as sharded
from tools.recipe.load import load_recipe
from tools.runs.readings import read_evaluations

pytestmark = pytest.mark.slow
LOSS, NORM, TENSOR = 1e-6, 1e-5, 1e-5  # relative


def follows(run_dir, never, steps, rank=0):
    """Compare the steps of a run that went on with those of one that never changed, and what both saved at the last."""
    expected, found = runs.steps(never), runs.steps(run_dir, rank)
    assert sorted(found) == steps
    for step, record in found.items():
        assert record["loss"] == pytest.approx(expected[step]["loss"], rel=LOSS), f"step {step}"
        assert record["global_norm"] == pytest.approx(expected[step]["global_norm"], rel=NORM), f"step {step}"
    kinds = runs.apart(*(each / "checkpoint" / f"iteration_{steps[-1]:08d}" for each in (never, run_dir)))
    assert kinds.pop("expert_bias") == 0.0
    assert max(kinds.values()) <= TENSOR, kinds


def saved(run_dir, step):
    return str(run_dir / "checkpoint" / f"iteration_{step:08d}")


def test_tensor_parallelism_becomes_a_pipeline(workers, corpus, tmp_path_factory, tmp_path):
    whole = sharded("_tp2", workers, corpus, tmp_path_factory)
    recipe = evaluating("_pp2", tmp_path, corpus, only_second=True)
    forked.train(workers, recipe, tmp_path / "run", corpus, resume=saved(whole, 3))
    follows(tmp_path / "run", whole, [4, 5, 6], rank=1)  # the last stage knows the loss
    held_out, expected = read_evaluations(tmp_path / "run"), read_evaluations(whole)
    assert sorted(held_out) == [3, 6] and sorted(expected) == [0, 3, 6]
    for step, found in held_out.items():  # a whole step without its update, against a forward pass; one corpus of two
        assert found.loss == pytest.approx(expected[step].corpora["random"], rel=LOSS), f"step {step}"
    for step, found in expected.items():  # every token of a batch counts
        tiny, random = found.corpora["tiny"], found.corpora["random"]
        assert found.loss == pytest.approx((tiny + random) / 2, rel=1e-12), f"step {step}"


SAVED = 4


def test_losses_follow_the_uninterrupted_run(whole_dp2, graph, corpus, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole_dp2, run_dir)
    for later in runs.checkpoints(run_dir)[1:]:
        shutil.rmtree(run_dir / "checkpoint" / f"iteration_{later:08d}")
    recipe = load_recipe(run_dir / "recipe.yaml")
    how = smaller(recipe, 1, 1, SAVED)
    settings = [word for override in how.overrides for word in ("--set", override)]
    text = runs.train(runs.TINY_DP2, run_dir, corpus, "--resume", "auto", *settings, **graph)
    assert f"going on from step {SAVED}" in text
    expected, found = runs.steps(whole_dp2), runs.steps(run_dir)
    assert sorted(found) == list(range(1, 13))
    for step in range(SAVED + 1, 13):
        for key in ("loss", "lm_loss", "mtp_loss", "load_balancing_loss"):
            assert found[step][key] == pytest.approx(expected[step][key], abs=1e-6), f"step {step}: {key}"
        assert found[step]["global_norm"] == pytest.approx(expected[step]["global_norm"], rel=1e-5), f"step {step}"
    kinds = runs.apart(*(each / "checkpoint" / "iteration_00000012" for each in (whole_dp2, run_dir)))
    assert kinds.pop("expert_bias") == 0 and max(kinds.values()) <= 1e-5, kinds
    again = [step for step in found if step > SAVED and found[step]["seconds"] == expected[step]["seconds"]]
    assert again == [], "these steps are of the run before"
