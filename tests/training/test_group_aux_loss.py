"""`plugins.group_aux_loss`: two workers that share the experts train as one process with MindFormers' own formula.

That the one process has that formula, and its gradient: tests/plugins/group_aux_loss. A sharded graph:
benchmarks/RESULTS.md.
"""

import pytest
import yaml

from tests.training import runs

pytestmark = pytest.mark.slow
STEPS = 4
# one layer, with experts; the auxiliary loss counts as much as it can
MODEL = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "moe_aux_loss_coeff": 1.0,
}


def train(base, folder, corpus, group):
    """step -> record."""
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    plugins = {"held_out_loss": False, "group_aux_loss": group}
    recipe.write_text(yaml.safe_dump({"base_config": str(base), "model": {"model_config": MODEL}, "plugins": plugins}))
    runs.train(recipe, folder / "run", corpus, "--steps", str(STEPS))
    return runs.steps(folder / "run")


def test_two_workers_have_the_losses_of_one_process_that_holds_all_tokens(corpus, tmp_path):
    one = train(runs.TINY, tmp_path / "one", corpus, group=True)
    two = train(runs.HERE / "tiny_ep2.yaml", tmp_path / "two", corpus, group=True)
    assert sorted(one) == sorted(two) == list(range(1, STEPS + 1))
    for step, expected in one.items():
        for key in ("loss", "load_balancing_loss"):
            assert two[step][key] == pytest.approx(expected[key], abs=1e-6), f"step {step}: {key}"
        assert two[step]["global_norm"] == pytest.approx(expected["global_norm"], rel=1e-6), f"step {step}"
