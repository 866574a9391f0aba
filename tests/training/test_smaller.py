"""A run of two workers of which one is lost goes on with the other: the same curve, up to the order of sums."""

import shutil

import pytest

from launch.agent.smaller import smaller
from tests.training import runs
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow
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
