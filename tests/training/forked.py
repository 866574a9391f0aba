"""Trainings whose workers are forks of a process that has MindSpore imported, see tests/forks.py.

For tests of what a training computes: the workers run `launch/train.py` in the environment and with the arguments that
it has when a user starts msrun by hand, so that the recipe, the cluster, the graph and all that they write are those of
a run by `tc3 train`; test_workers.py says so of msrun by hand. How workers are started, watched and ended cannot be
tested this way: test_workers.py and others start `tc3 train` for that.
"""

import contextlib
import os
from pathlib import Path
from unittest import mock

from launch.run.command import checks
from launch.run.effective import Size, effective_recipe
from launch.run.msrun import TRAIN, worker_count, worker_environment
from tests.training import runs
from tools.accuracy.equivalence import executed
from tools.accuracy.equivalence import runs as compared
from tools.recipe.dump import dump_recipe


def train(forks, recipe, run_dir, corpus, *overrides, steps=None, mini=False, resume=None, **environment):
    """Train to the end; returns what the first worker printed.

    The arguments stand for the options of `tc3 train`; `environment` is the workers' own. There is no compile cache:
    MindSpore does not load in a run by `tc3 train` the graph that a fork has compiled.
    """
    overrides += (f"{runs.DATA}={corpus}",) if corpus else ()
    flat = effective_recipe(Path(recipe), overrides, steps, run_dir, Size(mini))
    for check in checks(flat, run_dir, bool(resume), None, False):
        check()
    workers, logs = worker_count(flat), run_dir / "logs"
    logs.mkdir(parents=True)
    dump_recipe(flat, run_dir / "given.yaml")
    environment = worker_environment(workers, run_dir, {**os.environ, **environment})
    arguments = [TRAIN, "--config", run_dir / "given.yaml", "--run-dir", run_dir]
    arguments += ["--resume", resume] if resume else []
    codes, said = forks.cluster(workers, arguments, logs, environment)
    failed = [text[-3000:] for text, code in zip(said, codes, strict=True) if code]
    assert not failed, "\n".join([f"exit codes {codes} of the scheduler and the workers", *failed])
    return said[1]


@contextlib.contextmanager
def launches(forks):
    """While the block runs, what `tc3 accuracy equivalence` in this process trains by `tc3 train` are forks."""

    def launch(recipe, run_dir):
        run_dir = run_dir.absolute()
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        file = run_dir.with_name(f"{run_dir.name}.yaml")
        dump_recipe(recipe, file)
        train(forks, file, run_dir, None, REGISTER_PATH=str(runs.ROOT / "launch" / "workers"))

    with mock.patch.object(executed, "launch", launch), mock.patch.object(compared, "launch", launch):
        yield
