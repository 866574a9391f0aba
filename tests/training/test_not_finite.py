"""Training whose numbers are no longer finite ends at once, on one worker and on two, with what it had before.

A NaN in one weight of a checkpoint stands for whatever makes one: the graph, and so its compilation, is that of the
other tests.
"""

import json

import pytest

from tests.training import runs
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow
MTP, EMBEDDING = "mtp.layers", "embedding.word_embeddings.weight"


def tolerant(tmp_path, recipe, steps):
    """The recipe with so many steps allowed: False for any number of them."""
    flat = load_recipe(recipe)
    flat["plugins"]["finite_loss"] = steps and {"stop_after": steps}
    dump_recipe(flat, tmp_path / "tolerant.yaml")
    return tmp_path / "tolerant.yaml"


def test_nan_ends_the_run_names_the_part_and_the_way_on_and_saves_nothing(whole, graph, corpus, tmp_path):
    run_dir = tmp_path / "run"
    runs.poisoned(whole, run_dir, 8, MTP)
    text = runs.train(runs.TINY, run_dir, corpus, "--resume", "auto", "--json", expect=1, **graph)
    summary = json.loads(text[text.index('{"exit_code"') :])
    assert summary["error"].startswith("step 9: load-balancing loss is NaN; resume from iteration 8 (")
    assert (summary["exit_code"], summary["final_loss"], summary["checkpoint_step"]) == (1, None, 8)
    assert summary["next_command"].endswith("--set lr_schedule.learning_rate=0.0015")
    assert max(runs.steps(run_dir)) == 9 and runs.checkpoints(run_dir) == [4, 8]
    assert "tc3: stopped: step 9: load-balancing loss is NaN" in text and "Traceback" not in text


def test_two_workers_end_together(whole_dp2, graph_dp2, corpus, tmp_path):
    run_dir = tmp_path / "run"
    runs.poisoned(whole_dp2, run_dir, 8, EMBEDDING)
    text = runs.train(runs.TINY_DP2, run_dir, corpus, "--resume", "auto", expect=1, **graph_dp2)
    assert "tc3: stopped: step 9: lm loss is NaN" in text and "Traceback" not in text
    for rank in (0, 1):
        assert max(runs.steps(run_dir, rank)) == 9
        assert "tc3: stopped: step 9: lm loss is NaN" in (run_dir / "logs" / f"worker_{rank}.log").read_text()
    assert runs.checkpoints(run_dir) == [4, 8] and runs.processes_of(run_dir) == []


def test_within_what_is_allowed_nothing_is_saved_either(whole, graph, corpus, tmp_path):
    run_dir = tmp_path / "run"
    runs.poisoned(whole, run_dir, 8, EMBEDDING)
    recipe = tolerant(tmp_path, runs.TINY, 10)
    text = runs.train(recipe, run_dir, corpus, "--resume", "auto", expect=1, **graph)
    words = "step 12: load-balancing loss is NaN, the step number 4 in a row that is not finite; the first was step 9, "
    assert words + "whose lm loss is NaN" in text
    assert max(runs.steps(run_dir)) == 12 and runs.checkpoints(run_dir) == [4, 8], "12 is a step of saving"


def test_who_wants_to_train_on_may(whole, graph, corpus, tmp_path):
    run_dir = tmp_path / "run"
    runs.poisoned(whole, run_dir, 8, MTP)
    runs.train(tolerant(tmp_path, runs.TINY, False), run_dir, corpus, "--resume", "auto", **graph)
    assert max(runs.steps(run_dir)) == 12 and runs.checkpoints(run_dir) == [4, 8, 12]
