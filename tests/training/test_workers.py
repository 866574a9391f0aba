"""The mini recipe really trains, the same way each time, and survives being killed. Two data-parallel workers have the
curve of one, and save both at a preemption notice.

A worker killed in training, and what goes on with its graph, is in test_attention_balance.py; one of two workers killed
in a save, in test_sharded.py.
"""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.run.compile_cache import prepare
from launch.run.effective import effective_recipe
from launch.run.msrun import free_port
from launch.workers import leave_request
from tests.training import runs
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side
from tools.affinity.plan import make_plan
from tools.affinity.topology import read_host
from tools.process.host import Root, compress
from tools.recipe.load import load_recipe
from tools.runs.attempts import folder_of, read_attempt, read_attempts

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).parent / "golden" / "tiny.txt"


def test_losses_follow_the_golden_file(whole):
    """Golden losses are plain text, one step a line; a change that moves them has to explain itself.

    To renew: `TC3_RENEW_GOLDEN=1 tests/run tests/training/test_workers.py -k golden`, then read the diff.
    """
    steps = runs.steps(whole)
    if os.environ.get("TC3_RENEW_GOLDEN"):
        lines = [f"{n} {step['loss']:.6f} {step['global_norm']:.6f}" for n, step in sorted(steps.items())]
        GOLDEN.write_text("# step loss global_norm\n" + "\n".join(lines) + "\n")
    golden = np.loadtxt(GOLDEN)
    got = np.array([[n, step["loss"], step["global_norm"]] for n, step in sorted(steps.items())])
    assert got.shape == golden.shape
    np.testing.assert_allclose(got, golden, rtol=2e-4)


def test_it_learns_and_what_it_prints_is_there(whole):
    steps = runs.steps(whole)
    assert sorted(steps) == list(range(1, 13))
    assert steps[12]["lm_loss"] < steps[1]["lm_loss"] - 0.5
    assert all(step["global_norm"] > 0.5 for step in steps.values()), "clipping must happen in every step"
    for name in ("recipe.yaml", "loss.png", "logs/worker_0.log", "checkpoint/iteration_00000012/seal_rank_0.json"):
        assert (whole / name).stat().st_size > 0, name


def test_mindformers_own_log_shows_the_parts_of_the_loss(whole):
    """On CPU MindFormers 1.9.0 by itself prints 0.000000 for each part."""
    log = (whole / "logs" / "worker_0.log").read_text()
    first = runs.steps(whole)[1]
    assert f"lm_loss: {first['lm_loss']:.6f}" in log and f"mtp_loss: {first['mtp_loss']:.6f}" in log
    assert first["lm_loss"] + first["mtp_loss"] == pytest.approx(first["loss"], abs=0.01)


def test_a_worker_killed_in_a_save_is_started_again_and_comes_to_the_same_losses(whole, graph, corpus, tmp_path):
    """From the checkpoint before. Killed in a step, and gone on with by hand: test_attention_balance.py."""
    run_dir = tmp_path / "run"
    # two files a checkpoint: the sixth is the optimizer of step 12, and the second attempt writes two
    hook = runs.dying(TC3_TEST_KILL="0:6")
    text = runs.train(runs.TINY, run_dir, corpus, "--restarts", "1", *runs.RECORDED, **hook, **graph)
    assert runs.processes_of(run_dir) == []
    assert "worker 0 was killed (SIGKILL)" in text and "attempt 1 goes on from step 8" in text
    assert text.count("compile cache: loads") == 2
    expected, got = runs.steps(whole), runs.steps(run_dir)
    assert sorted(got) == list(range(1, 13)) and runs.checkpoints(run_dir) == [4, 8, 12]
    for step, record in got.items():
        runs.same(record, expected[step])
    sides = read_side(whole), read_side(run_dir)
    assert [each.step for each in sides[1].starts] == [0, 8] and len(sides[1].states) == len(sides[1].samples) == 12
    assert diagnose(*sides).word == "equal", diagnose(*sides).first
    assert "forward" in diagnose(sides[1]).compared and sides[1].modules(9), "against NumPy, from the resume on"
    first, second = read_attempts(run_dir)
    assert (first.verdict.decision, second.verdict.decision) == ("restart", "done")
    (end,) = first.ends.values()
    assert (end.cause, end.rank, end.phase, end.step, second.plan.step) == ("signal", 0, "save", 12, 8)


def test_a_corrupted_checkpoint_is_named_and_skipped(whole, corpus, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    newest = run_dir / "checkpoint" / "iteration_00000012" / "mini-opt-0000000-0000001.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    newest.write_bytes(data)
    truncated = run_dir / "checkpoint" / "iteration_00000008" / "mini-model-0000000-0000001.safetensors"
    os.truncate(truncated, truncated.stat().st_size - 1)
    command = runs.arguments(runs.TINY, run_dir, corpus, "--resume", "auto", "--dry-run")
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=True)
    assert f"{newest.name} does not match its checksum" in done.stderr
    assert f"{truncated.name} has {truncated.stat().st_size} bytes instead of" in done.stderr
    assert str(run_dir / "checkpoint" / "iteration_00000004") in done.stdout


@pytest.mark.usefixtures("whole")
def test_ctrl_c_leaves_no_process(graph, corpus, tmp_path):
    run_dir = tmp_path / "run"
    run = runs.start(runs.TINY, run_dir, corpus, **graph)
    runs.wait_for_step(run, run_dir, 2)
    assert runs.processes_of(run_dir)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=300)
    assert run.returncode == 130
    assert runs.processes_of(run_dir) == []


def test_msrun_by_hand_trains_the_same(whole, graph, corpus, tmp_path):
    data = f"train_dataset.data_loader.config.data_path.1={corpus}"
    command = ["msrun", "--worker_num=1", "--local_worker_num=1", f"--master_port={free_port()}", "--join=True"]
    command += [f"--log_dir={tmp_path}/logs", "launch/train.py", "--config", str(runs.TINY)]
    command += ["--run-dir", str(tmp_path / "run"), "--set", data]
    flat = effective_recipe(runs.TINY, (data,), None, tmp_path / "run")
    cache = prepare(flat, tmp_path / "run", tmp_path, 1, [0], {**os.environ, **graph})
    assert cache.loaded
    env = {**os.environ, "PATH": f"{Path(runs.TC3).parent}:{os.environ['PATH']}", **cache.environment}
    done = subprocess.run(command, cwd=runs.ROOT, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, (tmp_path / "logs" / "worker_0.log").read_text()[-2000:]
    expected, got = runs.steps(whole), runs.steps(tmp_path / "run")
    assert sorted(got) == sorted(expected)
    for step, record in got.items():
        runs.same(record, expected[step])
    assert load_recipe(tmp_path / "run" / "recipe.yaml")["lr_schedule"] == load_recipe(runs.TINY)["lr_schedule"]


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
