"""Start training runs as a user does, and read what they wrote."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file, save_file

from launch.run.readings import read_metrics
from plugins.sealed_checkpoint.plan import fault, write_seal
from tools.checkpoint.scan import iteration

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY, TINY_DP2 = HERE / "tiny.yaml", HERE / "tiny_dp2.yaml"
TC3 = str(Path(sys.executable).with_name("tc3"))


def arguments(recipe, run_dir, corpus, *more):
    """argv of `tc3 train`."""
    data = f"train_dataset.data_loader.config.data_path.1={corpus}"
    return [TC3, "train", str(recipe), "--run-dir", str(run_dir), "--set", data, *more]


def compiled_once(folder):
    """Environment for runs of the very same graph: the first compiles it (most of a short run), the others load it.

    Not for graphs that call host functions (attention within documents, experts over several workers): MindSpore knows
    these by their address in the process that compiled.
    """
    return {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(folder)}


def dying(**when):
    """Environment of a run that is killed in a save, see kill_in_save/sitecustomize.py."""
    return {"PYTHONPATH": os.pathsep.join([str(HERE / "kill_in_save"), str(ROOT)]), **when}


def start(recipe, run_dir, corpus, *more, **environment):
    """Popen of `tc3 train` with its output captured."""
    env = {**os.environ, **environment}
    return subprocess.Popen(
        arguments(recipe, run_dir, corpus, *more),
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(recipe, run_dir, corpus, *more, expect=0, **environment):
    """Train to the end; returns the printed text."""
    run = start(recipe, run_dir, corpus, *more, **environment)
    text, _ = run.communicate(timeout=600)
    assert run.returncode == expect, f"exit code {run.returncode}\n{text}"
    return text


def steps(run_dir, rank=0):
    """step -> record, as the run wrote it; a resumed part replaces what it repeats."""
    return read_metrics(Path(run_dir) / "metrics" / f"rank_{rank}.jsonl").steps


def wait_for_step(run, run_dir, step):
    """Return when `step` is on record; fails when the run ends before."""
    while step not in steps(run_dir):
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.02)


def processes_of(run_dir):
    """Every process that names the run's folder on its command line."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if process.pid != os.getpid() and any(str(run_dir) in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


def kill_all(run_dir):
    """SIGKILL to every process of a run at once, as a machine that goes down."""
    for process in processes_of(run_dir):
        process.kill()
    psutil.wait_procs(processes_of(run_dir), timeout=10)


def train_and_kill(recipe, run_dir, corpus, step, **environment):
    """A run that is killed once `step` is on record."""
    run = start(recipe, run_dir, corpus, **environment)
    wait_for_step(run, run_dir, step)
    kill_all(run_dir)
    run.wait(timeout=30)
    run.stdout.close()


def poisoned(whole, run_dir, step, weight):
    """A copy of a run that ended with `step`, whose checkpoint has one NaN, in the first weight of that name."""
    shutil.copytree(whole, run_dir)
    folder = run_dir / "checkpoint" / f"iteration_{step:08d}"
    for later in [each for each in folder.parent.glob("iteration_*") if each.name > folder.name]:
        shutil.rmtree(later)
    for file in folder.glob("*-model-*.safetensors"):
        weights = load_file(file)
        name = next(name for name in sorted(weights) if weight in name)
        weights[name].reshape(-1)[0] = np.nan
        save_file(weights, file)
    for seal in list(folder.glob("seal_rank_*.json")):
        write_seal(folder, int(seal.stem.split("_")[-1]), json.loads(seal.read_text())["world_size"], step)


def checkpoints(run_dir):
    """The steps whose checkpoints are whole."""
    return [iteration(path) for path in sorted((run_dir / "checkpoint").glob("iteration_*")) if fault(path) is None]


def same(first, second, keys=("loss", "lm_loss", "mtp_loss", "load_balancing_loss", "global_norm")):
    """Assert that two records agree to the last bit on what training computes."""
    assert first["step"] == second["step"]
    for key in keys:
        undefined = first[key] != first[key] and second[key] != second[key]  # NaN: 0/0 of MindFormers in a pipeline
        assert first[key] == second[key] or undefined, f"step {first['step']}: {key} {first[key]} is not {second[key]}"
