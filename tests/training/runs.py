"""Start training runs as a user does, and read what they wrote."""

import contextlib
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

from plugins.sealed_checkpoint.plan import fault, write_seal
from tools.accuracy.equivalence.golden_gate import step_numbers
from tools.checkpoint.scan import iteration
from tools.runs.readings import Follower, Readings
from tools.weights.inventory import compare
from tools.weights.source import open_source

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY, TINY_DP2 = HERE / "tiny.yaml", HERE / "tiny_dp2.yaml"
RECORDED = ("--set", "plugins.step_record.steps=12")  # all that `tc3 accuracy diagnose` compares
DATA = "train_dataset.data_loader.config.data_path.1"
PYTHON, TC3 = sys.executable, str(Path(sys.executable).with_name("tc3"))


def arguments(recipe, run_dir, corpus, *more):
    """argv of `tc3 train`; `corpus` None: the recipe names its data."""
    data = ["--set", f"{DATA}={corpus}"] if corpus else []
    return [TC3, "train", str(recipe), "--run-dir", str(run_dir), *data, *more]


def compiled_once(folder):
    """Environment for runs of the very same graph: the first compiles it (most of a short run), the others load it."""
    return {"TC3_COMPILE_CACHE": str(folder)}


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


def train(recipe, run_dir, corpus, *more, expect=0, within=800, **environment):
    """Train to the end, in at most `within` seconds; returns the printed text."""
    run = start(recipe, run_dir, corpus, *more, **environment)
    text, _ = run.communicate(timeout=within)
    assert run.returncode == expect, f"exit code {run.returncode}\n{text}"
    return text


def steps(run_dir, rank=0):
    """step -> record, as the run wrote it; a resumed part replaces what it repeats."""
    readings = Readings()
    for record in Follower(Path(run_dir) / "metrics" / f"rank_{rank}.jsonl").records():
        readings.add(record)  # with the digests of its samples, which `read_metrics` leaves out
    return readings.steps


def numbers(run_dir):
    """Return the numbers that a golden file keeps of a run that recorded only its metrics."""
    return {"steps": [step_numbers(record) for _, record in sorted(steps(run_dir).items())]}


def wait_for_step(run, run_dir, step):
    """Return when `step` is on record; fails when the run ends before."""
    metrics, seen = Path(run_dir) / "metrics" / "rank_0.jsonl", 0
    while True:
        size = metrics.stat().st_size if metrics.exists() else 0
        if size != seen and step in steps(run_dir):
            return
        seen = size
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.02)


def processes_of(run_dir):
    """Every process that names the run's folder on its command line."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if process.pid != os.getpid() and any(str(run_dir) in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


def kill_worker(run_dir, rank):
    """SIGKILL to one worker of a run."""
    for process in processes_of(run_dir):
        environ = process.environ()
        if environ.get("MS_ROLE") == "MS_WORKER" and environ["RANK_ID"] == str(rank):
            process.kill()


def kill_all(run_dir):
    """SIGKILL to every process of a run at once, as a machine that goes down."""
    for process in processes_of(run_dir):
        process.kill()
    psutil.wait_procs(processes_of(run_dir), timeout=300)


def train_and_watch(recipe, run_dir, corpus, **environment):
    """Train on two workers to the end; returns rank -> thread -> its allowed cores, as /proc last said of each."""
    run = start(recipe, run_dir, corpus, **environment)
    threads, workers = {}, {}
    while run.poll() is None:
        for process in [] if len(workers) == 2 else processes_of(run_dir):
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                if environ.get("MS_ROLE") == "MS_WORKER":
                    workers[process.pid] = environ["RANK_ID"]
        for pid, rank in workers.items():
            threads.setdefault(rank, {}).update(allowed_cores(pid))
        time.sleep(0.5)
    assert run.returncode == 0, run.communicate()[0]
    run.stdout.close()
    return threads


def allowed_cores(pid):
    """Thread -> Cpus_allowed_list, of every thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            found[task.name] = status["Cpus_allowed_list"]
    return found


def train_and_kill(recipe, run_dir, corpus, step, **environment):
    """A run that is killed once `step` is on record."""
    run = start(recipe, run_dir, corpus, **environment)
    wait_for_step(run, run_dir, step)
    kill_all(run_dir)
    run.wait(timeout=300)
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


def apart(first, second):
    """Kind of tensor -> by how much one differs at most between two checkpoints, in whatever layouts they are stored.

    Of weights and moments the L2 norm of the difference over that of the first; of the routers' biases the largest
    difference. Counters, which hold the last step's loads, are left out. AssertionError where either has a tensor that
    the other has not.
    """
    found = compare(open_source(first), open_source(second))
    kinds = dict.fromkeys(["weights", "adam_m", "adam_v", "expert_bias"], 0.0)
    counters = ("expert_load", "fi_accu")
    strange = [name for names in found.only for name in names if not name.endswith(counters)]
    assert not strange and not found.other, f"{strange[:3]} {found.other[:3]}"
    assert sum(name.startswith("adam_v.") for name in (*found.same, *(each.name for each in found.changes))) > 10
    for change in found.changes:
        beginning, end = change.name.split(".", 1)[0], change.name.rsplit(".", 1)[-1]
        if end not in counters:
            kind = end if end in kinds else beginning if beginning in kinds else "weights"
            value = change.largest if kind == "expert_bias" else change.relative
            assert value == value, f"{change.name} is not finite"
            kinds[kind] = max(kinds[kind], value)
    return kinds
