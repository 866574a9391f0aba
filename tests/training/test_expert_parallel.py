"""Experts over CPU workers: the curve of fewer workers.

Four workers, two nodes of two, where the mode tells nodes apart: a MoE layer in deduplicated mode and in chunks,
against two workers in global mode. Global dispatch does not tell nodes apart, so two workers suffice there: they are
compared with one, steps and tensors, in test_expert_balance.py. Every mode on four workers is compared with a dense
reference, with gradients and bytes, in tests/plugins/hierarchical_ep/test_adapter.py.
"""

import json

import pytest
import yaml
from click.testing import CliRunner

from launch.cli import tc3
from tests.forks import forked_compiles
from tests.training import forked, runs
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow

TINY_EP4, MINI_EP4 = runs.HERE / "tiny_ep4.yaml", runs.ROOT / "recipes" / "mini" / "pretrain_ep4.yaml"
STEPS = 10
# the auxiliary loss counts tokens: one token at a tie that goes to another expert moves it by 2e-4
TOLERANCES = {"loss": 1e-4, "lm_loss": 1e-4, "mtp_loss": 1e-4, "load_balancing_loss": 2e-3, "global_norm": 1e-3}


def check_same_curve(one, several):
    one, several = runs.steps(one), runs.steps(several)
    assert sorted(several) == list(range(1, STEPS + 1))
    assert one[STEPS]["loss"] < one[1]["loss"] - 1, "the recipe must learn for this to mean something"
    assert any(record["global_norm"] > 1 for record in one.values()), "no step was clipped"
    for step in several:
        expected = one[step]
        for key, tolerance in TOLERANCES.items():
            assert several[step][key] == pytest.approx(expected[key], abs=tolerance), f"step {step}: {key}"


def test_global_dispatch_keeps_what_a_dry_run_says(whole_ep2, forks, tmp_path):
    """Each worker kept the tensors of which `tc3 dryrun` says that a rank keeps them."""
    with forked_compiles(forks, tmp_path):
        done = CliRunner(catch_exceptions=False).invoke(
            tc3, ["dryrun", str(whole_ep2 / "recipe.yaml"), "--ranks", "1", "--json"]
        )
    assert done.exit_code == 0, done.output
    (rank,) = json.loads(done.stdout)["ranks"]
    for worker in (0, 1):
        header = (whole_ep2 / "metrics" / f"rank_{worker}.jsonl").read_text().splitlines()[0]
        assert json.loads(header)["held_bytes"] == rank["held_bytes"], f"rank {worker}"


@pytest.mark.parametrize("section", ["parallel_config", "parallel"])
def test_the_mini_recipe_lays_its_experts_out_as_what_is_trained_here(section):
    assert load_recipe(TINY_EP4)[section] == load_recipe(MINI_EP4)[section]


def test_deduplicated_dispatch_in_chunks_has_the_curve_of_two_workers(whole_ep2, workers, corpus, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    plugins = {"hierarchical_ep": {"mode": "deduplicated"}, "ep_overlap": {"chunks": [1, 2], "stride": 2}}
    recipe.write_text(yaml.safe_dump({"base_config": str(TINY_EP4), "plugins": plugins}))
    forked.train(workers, recipe, tmp_path / "run", corpus, steps=STEPS)
    check_same_curve(whole_ep2, tmp_path / "run")
