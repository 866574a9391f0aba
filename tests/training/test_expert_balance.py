"""Experts that change ranks while they train: the same training, also after a kill in the middle of a move.

Two workers move experts after steps 3, 6 and 9, copy hot ones, and save after step 6. In the move of step 9 one worker
is killed with two of a layer's six tensors written. The run goes on from step 6 with the copies that there were, loads
the graph that it had compiled, and computes steps 7 to 9 once more.
"""

import subprocess

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from plugins.expert_balance import record, settings
from plugins.expert_balance.copies import NOTHING
from plugins.expert_balance.replay import differences, replay
from tests.training import forked, runs
from tests.training.test_other_layout import follows
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow
BALANCED = runs.HERE / "tiny_ep2_balanced.yaml"
TENSORS = 2 * 3 + 1  # two weights with two moments each, and the placement
STEPS, SAVED, MOVES = 10, 6, (3, 6, 9)
# the order in which a rank adds up squares of its experts' gradients, and rows of an expert with a copy, is all that
# changes
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def killed(corpus, tmp_path_factory):
    """(folder, steps, records of loads) of a run when it had been killed in the third move."""
    run_dir = tmp_path_factory.mktemp("balanced") / "run"
    inside = runs.dying(TC3_TEST_KILL_MOVE=f"1:{2 * TENSORS + 3}") | runs.compiled_once(run_dir.parent / "graph")
    runs.train(BALANCED, run_dir, corpus, "--steps", str(STEPS), expect=1, **inside)
    return run_dir, runs.steps(run_dir), record.read(record.load_file(run_dir))


@pytest.fixture(scope="module")
def resumed(killed, corpus):
    """The same run at its end; the functions that bring tokens to experts are those of another process."""
    graph = runs.compiled_once(killed[0].parent / "graph")
    said = runs.train(BALANCED, killed[0], corpus, "--steps", str(STEPS), "--resume", "auto", **graph)
    assert "loads the graph of an earlier start" in said
    return killed[0]


def test_a_kill_inside_a_move_leaves_the_checkpoint_before_it_and_the_same_numbers_follow(killed, resumed):
    run_dir, before, records = killed
    assert max(before) == 9 and records[-1].step == 8, "the move of step 9 was not finished"
    assert runs.checkpoints(run_dir)[0] == SAVED
    after = runs.steps(run_dir)
    for step in range(SAVED + 1, 10):
        runs.same(after[step], before[step])


def test_the_losses_are_those_of_experts_that_stay(resumed, whole_ep2):
    stay, move = runs.steps(whole_ep2), runs.steps(resumed)
    assert sorted(move) == sorted(stay) == list(range(1, STEPS + 1))
    for step, expected in stay.items():
        for key in ("loss", "lm_loss", "load_balancing_loss", "global_norm"):
            assert move[step][key] == pytest.approx(expected[key], rel=TOLERANCE), f"step {step}: {key}"


def test_put_back_in_order_the_experts_of_two_workers_come_together_on_one(
    killed, whole_ep2, workers, corpus, tmp_path
):
    """Without the plugin, and with another layout: both as if the experts had never moved.

    `plugins.group_aux_loss` takes the auxiliary loss over the tokens of all workers, be they two or one.
    """
    moved = killed[0] / "checkpoint" / f"iteration_{SAVED:08d}"
    restored, more = tmp_path / "in_order" / moved.name, ("--steps", str(STEPS), "--resume", str(moved))
    refused = runs.train(runs.HERE / "tiny_ep2.yaml", tmp_path / "run", corpus, *more, expect=2)
    assert "tc3 experts restore-order" in refused
    subprocess.run([runs.TC3, "experts", "restore-order", moved, "--to", restored], check=True)
    split = load_recipe(runs.HERE / "tiny_ep2.yaml")["model"]["model_config"]
    sizes = ("num_hidden_layers", "first_k_dense_replace", "num_nextn_predict_layers", "moe_aux_loss_coeff")
    one = {"base_config": str(runs.TINY), "model": {"model_config": {key: split[key] for key in sizes}}}
    recipe = tmp_path / "one_worker.yaml"
    recipe.write_text(yaml.safe_dump(one | {"plugins": {"group_aux_loss": True}}))
    forked.train(workers, recipe, tmp_path / "run", corpus, steps=STEPS, resume=restored)
    follows(tmp_path / "run", whole_ep2, list(range(SAVED + 1, STEPS + 1)))


def test_the_record_replays_to_the_placements_of_the_run_and_of_its_checkpoints(killed, resumed):
    records = record.read(record.load_file(resumed))
    assert [each.step for each in records] == list(range(1, STEPS + 1))
    assert [each.step for each in records if each.moved] == list(MOVES)
    assert all(each.moved.experts and each.moved.sent_bytes for each in records if each.moved)
    for old, new in zip(killed[2], records, strict=False):  # the resumed part repeats steps 7 and 8
        assert np.array_equal(old.tokens, new.tokens) and np.array_equal(old.slots, new.slots)
        assert np.array_equal(old.held, new.held)
    assert any((each.held != NOTHING).any() for each in records[SAVED : MOVES[-1]]), "no copy trained after the resume"
    ours = settings.read(load_recipe(BALANCED)["plugins"]["expert_balance"])
    assert differences(records, replay(records, ours)) == []
    for step in runs.checkpoints(resumed):
        moved = [each.moved.slots for each in records if each.moved and each.step <= step]
        for held in placements(resumed, step):
            assert np.array_equal(held, moved[-1])


def placements(run_dir, step):
    """[layers, E] as each rank's part of the checkpoint holds them."""
    for file in (run_dir / "checkpoint" / f"iteration_{step:08d}").glob("*-model-*.safetensors"):
        tensors = load_file(file)
        yield np.stack([tensors[name] for name in sorted(tensors) if name.endswith("experts.placement")])
