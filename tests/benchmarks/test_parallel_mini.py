"""The one process that a mini with its parallel strategy is compared with."""

import pytest
from click.testing import CliRunner

from benchmarks.parallel_mini import in_float32, main, one_process, sharded
from tests.tools.recipe.test_mini import ROOT, large_family
from tools.check.check import check_recipe
from tools.layout.resolve import resolve
from tools.recipe.diff import compare
from tools.recipe.load import Recipe
from tools.recipe.mini import load_mini
from tools.recipe.view import View


@pytest.mark.parametrize("path", list(large_family()), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_takes_the_same_samples_in_the_same_small_steps(path):
    mini = load_mini(path, workers=8)
    in_float32(mini)
    one = Recipe(one_process(mini))
    assert View(one).devices == 1 and View(one).sharded_on_cpu
    assert [str(error) for error in check_recipe(one).errors if "data_path" not in str(error)] == []
    sides = compare(resolve(mini), resolve(one))
    assert sides.before.samples == sides.after.samples
    together = View(mini).dp if mini.get("plugins", {}).get("group_aux_loss") else 1
    assert one["runner_config"]["batch_size"] == mini["runner_config"]["batch_size"] * together
    for key in ("num_hidden_layers", "hidden_size", "compute_dtype", "n_routed_experts", "moe_aux_loss_coeff"):
        assert one["model"]["model_config"][key] == mini["model"]["model_config"][key]


@pytest.mark.parametrize("name", ["telechat3_438b/pretrain_4k", "mini/pretrain_report"])
def test_both_sides_read_the_one_corpus_that_there_is(name):
    """Neither the recipe's own text nor a held-out part of it needs to be there."""
    mini = sharded(ROOT / "recipes" / f"{name}.yaml", "made/up", 3, 4)
    assert mini["train_dataset"]["data_loader"]["config"]["data_path"] == ["1", "made/up"]
    assert mini["plugins"]["held_out_loss"]["data_path"] == "made/up"
    assert "held_out_loss" not in one_process(mini)["plugins"]


@pytest.mark.parametrize("words", ["5", "x", "5:", "5:a", "-1:3"])
def test_a_kill_that_names_no_tensor_is_refused_before_a_training(words):
    result = CliRunner().invoke(main, ["recipes/mini/pretrain_report.yaml", f"--kill={words}"])
    assert result.exit_code == 2 and "is not RANK:TENSOR" in result.output
