"""Data parallel on two CPU workers: the same curve as one worker, and what both save at a preemption notice.

Two workers killed in training, and compiled anew when they go on, are in test_attention_balance.py; killed in a save,
in test_sharded.py.
"""

import json
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.workers import leave_request
from tests.training import runs
from tools.affinity.plan import make_plan
from tools.affinity.topology import read_host
from tools.process.host import Root, compress
from tools.runs.attempts import folder_of, read_attempt

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


def test_every_thread_of_a_worker_stays_on_its_cores(tiny_dp2):
    """As /proc said while they trained: the plan's cores, of all threads that MindSpore, NumPy and we start."""
    plan = make_plan(read_host(Root()), 2, None)
    if not plan.binds:
        pytest.skip("one core cannot be divided")
    seen = json.loads((tiny_dp2 / "cores.json").read_text())
    assert {rank: set(threads.values()) for rank, threads in seen.items()} == {
        str(worker.rank): {compress(worker.cores)} for worker in plan.workers
    }
    assert all(len(threads) > 10 for threads in seen.values()), "it looked while they trained"


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


def test_at_a_preemption_notice_both_save_at_the_step_asked_for_and_leave(whole_dp2, graph_dp2, corpus, tmp_path):
    """Another node has asked for step 8 already. What is saved equals, file by file, what a run saves that goes on."""
    run_dir = tmp_path / "run"
    seldom = ("--set", "checkpoint.save_interleaved_steps=100", "--restarts", "1")
    run = runs.start(runs.TINY_DP2, run_dir, corpus, *seldom, **graph_dp2)
    runs.wait_for_step(run, run_dir, 1)
    attempt = folder_of(run_dir, 0)
    (attempt / leave_request.CLAIM).touch()
    (attempt / leave_request.FILE).write_text('{"step": 8}')
    run.send_signal(signal.SIGTERM)
    text, _ = run.communicate(timeout=800)
    assert run.returncode == 143 and "compile cache: loads" in text
    assert read_attempt(run_dir, 0).ends.popitem()[1].outcome == "preempted"
    assert sorted(runs.steps(run_dir)) == sorted(runs.steps(run_dir, 1)) == list(range(1, 9))
    assert runs.checkpoints(run_dir) == [8] and runs.processes_of(run_dir) == []
    saved, expected = (folder / "checkpoint" / "iteration_00000008" for folder in (run_dir, whole_dp2))
    files = sorted(path.name for path in expected.glob("*.safetensors"))
    assert files == sorted(path.name for path in saved.glob("*.safetensors"))
    for name in files:
        left, right = load_file(saved / name), load_file(expected / name)
        assert left.keys() == right.keys()
        assert all(np.array_equal(left[key], right[key], equal_nan=True) for key in left)
