"""The two sides as processes: MindFormers' trainer with the recorder, and the reference. They exchange .npz files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import ClusterError, RecipeError
from tools.accuracy.align import record as align_record
from tools.accuracy.align.recipe import write
from tools.accuracy.align.record import Arrays, Record
from tools.accuracy.reference.hyper import Hyper
from tools.accuracy.reference.run import MISSING
from tools.accuracy.reference.weights import nudged
from tools.process import child
from tools.weights.hugging_face.names import to_mindformers
from tools.weights.hugging_face.sizes import Sizes

ROOT = Path(__file__).resolve().parents[3]
REFUSED = 2  # exit code of what has printed `tc3: message` because it was given something wrong
_FIND = "import importlib.util as u, sys; sys.exit(0 if all(map(u.find_spec, ('torch', 'transformers'))) else 3)"


class SideFailedError(Exception):
    """A side did not come to its end; the message holds its last words and names its log."""


def find_torch(python: str) -> None:
    """Raise ClusterError when `python` cannot run the reference; it imports nothing, so it is quick."""
    try:
        done = subprocess.run([python, "-c", _FIND], capture_output=True, check=False)
    except OSError as error:
        raise ClusterError(f"--reference-python {python}: cannot be started: {error.strerror}") from None
    if done.returncode:
        raise ClusterError(_no_torch(python))


def _no_torch(python: str) -> str:
    return (
        f"the reference needs torch and transformers, which {python} cannot import: install the extra `align` "
        "(pip install -e '.[align]'), or name a Python that has them by --reference-python"
    )


def run_mindformers(recipe: Mapping[str, Any], folder: Path, hyper: Hyper, weights: Arrays | None) -> Record:
    """Train `recipe` (of one worker) in `folder` and return the record, under MindFormers' names.

    Args:
        weights: to start from, by MindFormers' names; None for the recipe's own.

    Raises:
        RecipeError: the recipe is refused. SideFailedError: the run failed; the end of its log is in the message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recorder: dict[str, Any] = {"record": str(folder / "record.npz"), "weights": None}
    if weights is not None:
        recorder["weights"] = str(folder / "weights.npz")
        np.savez(recorder["weights"], **weights)
    write(recipe, folder / "recipe.yaml", recorder)
    command = [sys.executable, "-m", "tools.accuracy.align.worker"]
    run = folder / "run"
    start([*command, "--config", str(folder / "recipe.yaml"), "--run-dir", str(run)], folder / "mindformers.log", run)
    return align_record.of_mindformers(align_record.read(folder / "record.npz"), align_record.read_metrics(run), hyper)


def run_reference(
    python: str, folder: Path, sizes: Sizes, hyper: Hyper, weights: Arrays, batch: Arrays, other: Record | None = None
) -> Record:
    """Run the reference on the other side's batches.

    Args:
        weights: Hugging Face name -> array. batch: as a record's.
        other: the other side, in Hugging Face's names: the reference also takes each of its steps by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = json.dumps({"sizes": sizes.as_json(), "hyper": hyper.as_json()})
    inputs = {**{f"weights/{name}": array for name, array in weights.items()},
              **{f"batch/{name}": array for name, array in batch.items()},
              **(_states(other) if other else {})}  # fmt: skip
    np.savez(folder / "job.npz", job=np.array(job), **inputs)
    command = [python, "-m", "tools.accuracy.reference.run", str(folder / "job.npz"), str(folder / "record.npz")]
    start(command, folder / "reference.log", folder)
    return align_record.of_reference(align_record.read(folder / "record.npz"), weights, batch)


def reference_and_floor(
    python: str, folder: Path, sizes: Sizes, hyper: Hyper, weights: Arrays, other: Record
) -> tuple[Record, Record]:
    """The reference, and the same from weights that differ in their last place: what rounding alone does."""
    exact = run_reference(python, folder / "reference", sizes, hyper, weights, other.batch, other)
    return exact, run_reference(python, folder / "rounding", sizes, hyper, nudged(weights), other.batch)


def _states(record: Record) -> Arrays:
    """A record's states and loads, flat."""
    out = {f"load/{step}/{layer}": load for step, loads in enumerate(record.loads) for layer, load in loads.items()}
    for step, state in enumerate(record.states):
        for kind, arrays in state.items():
            out.update({f"state/{step}/{kind}/{name}": array for name, array in arrays.items()})
    return out


def weights_for_mindformers(weights: Arrays, sizes: Sizes) -> Arrays:
    """The starting weights under MindFormers' names."""
    return to_mindformers(weights, sizes)


def environment() -> dict[str, str]:
    """Of this process, with the repository on the children's path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


def start(command: list[str], log: Path, run: Path) -> None:
    """Run one side to its end, its output in `log`.

    Raises:
        RecipeError: it refused what it was given. ClusterError: torch is missing. SideFailedError: it failed.
    """
    threads = str(len(os.sched_getaffinity(0)))
    quiet = {"GLOG_v": "3", "OMP_NUM_THREADS": threads, "LOG_MF_PATH": str(run / "logs"), **environment()}
    with log.open("w", encoding="utf-8") as out:
        code = child.run(command, env=quiet, stdout=out, stderr=subprocess.STDOUT).returncode
    if code == 0:
        return
    if code == MISSING:
        raise ClusterError(_no_torch(command[0]))
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix("tc3: ") for line in lines if line.startswith("tc3: ")]
    if code == REFUSED and told:
        raise RecipeError(told[-1])
    last = (told or lines or [""])[-1]
    raise SideFailedError(f"{log.stem} ended with exit code {code}: {last[-300:]} (all of it: {log})")
