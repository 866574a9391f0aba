"""Experts on four CPU workers, two nodes of two: the curve of one worker, in every mode, and the same after a resume.

The EP-4 mini recipe itself is run in hierarchical mode; the others on a smaller model, for the time that it takes.
"""

import pytest
import yaml

from tests.training import runs
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow

MINI = runs.ROOT / "recipes" / "mini"
TINY_EP4 = runs.HERE / "tiny_ep4.yaml"
STEPS = 50
# the auxiliary loss counts tokens: one token at a tie that goes to another expert moves it by 2e-4
TOLERANCES = {"loss": 1e-4, "lm_loss": 1e-4, "mtp_loss": 1e-4, "load_balancing_loss": 2e-3}


def train(recipe, folder, corpus, *more, **plugins):
    """The run folder of 50 steps of a recipe, with other settings of its plugins."""
    changed = folder / "recipe.yaml"
    changed.write_text(yaml.safe_dump({"base_config": str(recipe), "plugins": {"held_out_loss": False, **plugins}}))
    runs.train(changed, folder / "run", corpus, "--steps", str(STEPS), *more)
    return folder / "run"


def check_same_curve(one, four):
    one, four = runs.steps(one), runs.steps(four)
    assert sorted(four) == sorted(one) == list(range(1, STEPS + 1))
    assert one[STEPS]["loss"] < one[1]["loss"] - 1, "the recipe must learn for this to mean something"
    assert any(record["global_norm"] > 1 for record in one.values()), "no step was clipped"
    for step, expected in one.items():
        for key, tolerance in TOLERANCES.items():
            assert four[step][key] == pytest.approx(expected[key], abs=tolerance), f"step {step}: {key}"


@pytest.fixture(scope="module")
def one_worker(corpus, tmp_path_factory):
    return train(runs.TINY, tmp_path_factory.mktemp("one"), corpus)


def test_the_mini_recipe_has_the_curve_of_one_worker(corpus, tmp_path_factory):
    rate = f"lr_schedule.learning_rate={load_recipe(MINI / 'pretrain_ep4.yaml')['lr_schedule']['learning_rate']}"
    one = train(MINI / "pretrain.yaml", tmp_path_factory.mktemp("mini"), corpus, "--set", rate)
    four = train(MINI / "pretrain_ep4.yaml", tmp_path_factory.mktemp("mini_ep4"), corpus)
    check_same_curve(one, four)


def test_global_dispatch_has_the_curve_of_one_worker_and_resumes_to_the_bit(one_worker, corpus, tmp_path):
    four = train(TINY_EP4, tmp_path, corpus)
    check_same_curve(one_worker, four)
    checkpoint = four / "checkpoint" / "iteration_00000048"
    again = tmp_path / "again"
    again.mkdir()
    resumed = runs.steps(train(TINY_EP4, again, corpus, "--resume", str(checkpoint)))
    assert sorted(resumed) == [49, 50]
    for step, record in resumed.items():
        runs.same(record, runs.steps(four)[step])


def test_deduplicated_dispatch_in_chunks_has_the_curve_of_one_worker(one_worker, corpus, tmp_path):
    four = train(
        TINY_EP4, tmp_path, corpus, hierarchical_ep={"mode": "deduplicated"}, ep_overlap={"chunks": [1, 2], "stride": 2}
    )
    check_same_curve(one_worker, four)
