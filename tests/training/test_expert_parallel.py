"""Experts over CPU workers: the curve of one worker in every mode. The same after a resume: test_expert_balance.py.

Four workers, two nodes of two, where the mode tells nodes apart: the EP-4 mini recipe with one of its two MoE layers in
hierarchical mode, and a smaller model in deduplicated mode. Global dispatch knows no nodes, so two workers do: the same
modes on four are compared with a dense reference in tests/plugins/hierarchical_ep/graph/test_exchange.py.
"""

import json
import subprocess

import pytest
import yaml

from tests.training import runs
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow

MINI = runs.ROOT / "recipes" / "mini"
TINY_EP4 = runs.HERE / "tiny_ep4.yaml"
MINI_STEPS, TINY_STEPS = 20, 10
# the auxiliary loss counts tokens: one token at a tie that goes to another expert moves it by 2e-4
TOLERANCES = {"loss": 1e-4, "lm_loss": 1e-4, "mtp_loss": 1e-4, "load_balancing_loss": 2e-3, "global_norm": 1e-3}


def train(recipe, folder, corpus, steps, *more, **plugins):
    """The run folder of some steps of a recipe, with other settings of its plugins."""
    changed = folder / "recipe.yaml"
    changed.write_text(yaml.safe_dump({"base_config": str(recipe), "plugins": {"held_out_loss": False, **plugins}}))
    runs.train(changed, folder / "run", corpus, "--steps", str(steps), *more)
    return folder / "run"


def check_same_curve(one, several, steps):
    one, several = runs.steps(one), runs.steps(several)
    assert sorted(several) == sorted(one) == list(range(1, steps + 1))
    assert one[steps]["loss"] < one[1]["loss"] - 1, "the recipe must learn for this to mean something"
    assert any(record["global_norm"] > 1 for record in one.values()), "no step was clipped"
    for step, expected in one.items():
        for key, tolerance in TOLERANCES.items():
            assert several[step][key] == pytest.approx(expected[key], abs=tolerance), f"step {step}: {key}"


@pytest.fixture(scope="module")
def one_worker(corpus, tmp_path_factory):
    config = load_recipe(TINY_EP4)["model"]["model_config"]
    layers = ("num_hidden_layers", "first_k_dense_replace", "num_nextn_predict_layers")
    alike = [word for name in layers for word in ("--set", f"model.model_config.{name}={config[name]}")]
    return train(runs.TINY, tmp_path_factory.mktemp("one"), corpus, TINY_STEPS, *alike)


def check_dry_run(run_dir):
    """What `tc3 dryrun` says that a rank keeps is what each of the workers kept."""
    done = subprocess.run(
        [runs.TC3, "dryrun", str(run_dir / "recipe.yaml"), "--ranks", "1", "--json", "--no-cache"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (rank,) = json.loads(done.stdout)["ranks"]
    for worker in (0, 1):
        header = (run_dir / "metrics" / f"rank_{worker}.jsonl").read_text().splitlines()[0]
        assert json.loads(header)["held_bytes"] == rank["held_bytes"], f"rank {worker}"


def test_the_mini_recipe_has_the_curve_of_one_worker(corpus, tmp_path_factory):
    layers = ("--set", "model.model_config.num_hidden_layers=2")  # dense and MoE; the MTP layer has experts, too
    rate = f"lr_schedule.learning_rate={load_recipe(MINI / 'pretrain_ep4.yaml')['lr_schedule']['learning_rate']}"
    one = train(MINI / "pretrain.yaml", tmp_path_factory.mktemp("mini"), corpus, MINI_STEPS, *layers, "--set", rate)
    four = train(MINI / "pretrain_ep4.yaml", tmp_path_factory.mktemp("mini_ep4"), corpus, MINI_STEPS, *layers)
    check_same_curve(one, four, MINI_STEPS)


def test_global_dispatch_has_the_curve_of_one_worker_and_keeps_what_a_dry_run_says(one_worker, whole_ep2):
    check_same_curve(one_worker, whole_ep2, TINY_STEPS)
    check_dry_run(whole_ep2)


def test_deduplicated_dispatch_in_chunks_has_the_curve_of_one_worker(one_worker, corpus, tmp_path):
    plugins = {"hierarchical_ep": {"mode": "deduplicated"}, "ep_overlap": {"chunks": [1, 2], "stride": 2}}
    check_same_curve(one_worker, train(TINY_EP4, tmp_path, corpus, TINY_STEPS, **plugins), TINY_STEPS)
