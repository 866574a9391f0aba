"""Data parallel on two CPU workers: the same curve as one worker, and the same after a kill in a save as without.

Two workers killed in training, and compiled anew when they go on, are in test_attention_balance.py.
"""

import json

import pytest

from tests.training import runs

pytestmark = pytest.mark.slow


def test_losses_and_norms_equal_those_of_one_worker(whole, whole_dp2):
    one, two = runs.steps(whole), runs.steps(whole_dp2)
    assert sorted(one) == sorted(two) == list(range(1, 13))
    for step in one:
        assert one[step]["global_norm"] > 0.5, "clipping must happen for this comparison to mean something"
        for key in ("loss", "lm_loss", "mtp_loss", "load_balancing_loss", "global_norm"):
            assert two[step][key] == pytest.approx(one[step][key], abs=1e-5), f"step {step}: {key}"


def test_ranks_report_the_same_numbers(whole_dp2):
    first, second = runs.steps(whole_dp2, rank=0), runs.steps(whole_dp2, rank=1)
    assert sorted(first) == sorted(second)
    for step in first:
        runs.same(first[step], second[step])


def test_the_scheduler_starts_no_mindformers(whole_dp2):
    """Its import logs a dozen lines."""
    assert "mindformers" in (whole_dp2 / "logs" / "worker_0.log").read_text()
    assert "mindformers" not in (whole_dp2 / "logs" / "scheduler.log").read_text()


def test_the_checkpoint_describes_every_parameter_of_both_ranks(whole_dp2):
    folder = whole_dp2 / "checkpoint" / "iteration_00000012"
    metadata = json.loads((folder / "metadata.json").read_text())
    names = metadata["state_dict_metadata"]
    assert any("adam_m" in name or "exp_avg" in name for name in names), sorted(names)[:5]
    for stored in metadata["storage_data"].values():
        assert {entry["storage_rank"] for entry in stored} == {0, 1}


def test_killed_in_a_save_of_one_rank_both_go_on_from_the_checkpoint_before(whole_dp2, graph_dp2, corpus, tmp_path):
    run_dir = tmp_path / "run"
    hook = runs.dying(TC3_TEST_KILL="1:4")
    runs.train(runs.TINY_DP2, run_dir, corpus, expect=1, **hook, **graph_dp2)
    assert runs.processes_of(run_dir) == []
    text = runs.train(runs.TINY_DP2, run_dir, corpus, "--resume", "auto", **graph_dp2)
    assert "seal_rank_" in text and "the save did not finish" in text
    assert "going on from step 4" in text
    expected, resumed = runs.steps(whole_dp2), runs.steps(run_dir)
    assert sorted(resumed) == list(range(1, 13))
    for step, record in resumed.items():
        runs.same(record, expected[step])


@pytest.mark.usefixtures("whole_dp2")
def test_the_only_checkpoint_kept_is_there_until_all_ranks_have_sealed_the_next(graph_dp2, corpus, tmp_path):
    """Rank 1 dies over its first file of the second checkpoint; rank 0, which removes the old, has sealed its part."""
    run_dir = tmp_path / "run"
    hook = runs.dying(TC3_TEST_KILL_SEAL="1:3")
    one = ("--set", "checkpoint.save_max=1")
    runs.train(runs.TINY_DP2, run_dir, corpus, *one, expect=1, **hook, **graph_dp2)
    assert (run_dir / "checkpoint" / "iteration_00000008").is_dir()
    assert runs.checkpoints(run_dir) == [4]
