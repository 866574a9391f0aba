"""This program kills random processes of one run at random moments (SIGKILL), and checks that the run ends and that the
records of its attempts are consistent.

    python benchmarks/cluster/restarts.py [--kills 50] [--seed 0] [--mini] [--keep FOLDER]

The run has one agent on one host and two small workers without MindSpore (tests/launch/agent/small): a step takes about
20 ms, and every tenth step is saved. Each kill ends a worker, msrun's scheduler or msrun itself, at a random time: one
kill in three after the start of an attempt, the other kills after its first step. With `--mini` the program kills
processes of `tc3 train --restarts 20` with recipes/mini/pretrain.yaml instead. The exit code is 1 unless all of these
statements hold for the run:

* it ends, with every step's loss the very one of a run without kills, and no process is left;
* each attempt went on from the newest checkpoint that was whole when the attempt before it had ended;
* the steps that attempts made are the steps of the run and those that kills cost, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.agent.decide import Rules
from launch.agent.loop import Agent
from launch.agent.planning import Job, first_number
from launch.run import msrun
from launch.run.msrun import ROOT
from tests.launch.agent.small.worker import losses
from tools.checkpoint.scan import newest_saved
from tools.recipe.load import load_recipe
from tools.recipe.view import View
from tools.runs.attempts import VERDICT, folder_of, numbers, read_attempts
from tools.runs.readings import Follower, read_metrics

SCRIPTS = ROOT / "tests/launch/agent/small"
MINI = ROOT / "recipes/mini/pretrain.yaml"


@dataclass(frozen=True)
class Kind:
    """A `Kind` describes a run to kill: its number of steps, the steps between saves, and the mean seconds until a kill
    after a start and after a first step.
    """

    steps: int
    every: int
    at_start: float
    in_training: float

    def command(self, run_dir: Path) -> list[str]:
        """Return the command that trains the run and restarts it after failures."""
        if self is SMALL:
            return [sys.executable, __file__, "--agent", str(run_dir)]
        saves = ("--set", f"checkpoint.save_interleaved_steps={self.every}", "--steps", str(self.steps))
        tc3 = str(Path(sys.executable).with_name("tc3"))
        return [tc3, "train", str(MINI), "--run-dir", str(run_dir), *saves, "--restarts", "20"]

    def expected(self, folder: Path) -> list[float]:
        """Return the losses of a run that is not killed."""
        if self is SMALL:
            return losses(self.steps, 2)
        with (folder / "whole.txt").open("w") as out:
            subprocess.run(self.command(folder / "whole"), stdout=out, stderr=out, check=True)
        return [each["loss"] for each in read_metrics(folder / "whole/metrics/rank_0.jsonl").steps.values()]


SMALL, REAL = Kind(8000, 10, 0.8, 3.0), Kind(24, 4, 30.0, 5.0)


def train_small(run_dir: Path) -> int:
    """Run the agent of the small run in this process, and return its exit code."""
    launcher = run_dir / "msrun"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {SCRIPTS / "msrun.py"} "$@"\n')
    launcher.chmod(0o755)
    msrun.msrun_of = lambda: launcher  # type: ignore[attr-defined]
    recipe = load_recipe(ROOT / "recipes/mini/pretrain_dp2.yaml")
    recipe["checkpoint"] = {**recipe["checkpoint"], "save_path": str(run_dir / "checkpoint")}
    recipe["train_dataset"]["data_loader"]["sizes"] = [SMALL.steps * View(recipe).global_batch, 0, 0]
    rules = Rules(restarts=20, first=0.1, most=1.0, hosts=["here"])
    job = Job(recipe, run_dir, "here", ("here",), 1, bind=False, rules=rules, worker=SCRIPTS / "worker.py")
    return Agent(job).run(first_number(run_dir, job.saves)).code


@dataclass
class Killer:
    """A `Killer` kills processes of the run below `root`; it records the role of each killed process, and the step of
    the newest complete checkpoint at that time.
    """

    kind: Kind
    run_dir: Path
    root: psutil.Popen
    rng: random.Random
    kills: list[str] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    targets: list[tuple[str, psutil.Process]] = field(default_factory=list)

    def strike(self) -> bool:
        """Wait, kill a process, and wait for the attempt's verdict; return False if the run has ended instead."""
        at_start = self.rng.random() < 1 / 3
        metrics = Follower(self.run_dir / "metrics/rank_0.jsonl", newest=0)
        if not (at_start or self._until(lambda: any("step" in each for each in metrics.new_records()))):
            return False
        after = time.monotonic() + self.rng.expovariate(1 / (self.kind.at_start if at_start else self.kind.in_training))
        if not self._until(lambda: time.monotonic() >= after and self._running()):
            return False
        role, process = self.rng.choice(self.targets)
        number = numbers(self.run_dir)[-1]
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        if not self._until((folder_of(self.run_dir, number) / VERDICT).exists):
            return False
        self.kills.append(role)
        self.whole.append(newest_saved(self.run_dir / "checkpoint") or 0)
        return True

    def _until(self, holds: Callable[[], bool]) -> bool:
        """Wait until a condition holds; return False if the run ends before."""
        while not holds():
            if self.root.poll() is not None:
                return False
            time.sleep(0.01)
        return True

    def _running(self) -> bool:
        """Return whether msrun and its child processes run; store the processes with their roles in `targets`."""
        found = []
        for process in self.root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                role = process.environ().get("MS_ROLE", "msrun" if "msrun" in " ".join(process.cmdline()) else "")
                if role and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((role.removeprefix("MS_").lower(), process))
        self.targets = found
        return bool(found)


def parts(file: Path) -> Iterator[tuple[int, int]]:
    """Yield for each attempt that trained on a rank the number of steps done before it and the number of steps that it
    trained.
    """
    start, made = -1, 0
    for record in Follower(file).new_records():
        if "total_steps" in record:
            if start >= 0:
                yield start, made
            start, made = record["start_step"], 0
        elif "step" in record:
            made += 1
    yield start, made


def wrong(killer: Killer, code: int, expected: list[float]) -> list[str]:
    """Return what contradicts a correct run in the records of the attempts, and print what agrees."""
    attempts = read_attempts(killer.run_dir)
    plans = [each.plan for each in attempts if each.plan]
    verdicts = [each.verdict for each in attempts if each.verdict]
    made = list(parts(killer.run_dir / "metrics/rank_0.jsonl"))
    kept = {step: each["loss"] for step, each in read_metrics(killer.run_dir / "metrics/rank_0.jsonl").steps.items()}
    ends = [start + count for start, count in made]
    lost = [end - start for end, (start, _) in zip(ends, made[1:], strict=False)]
    left = [each.pid for each in psutil.process_iter() if _names(each, killer.run_dir)]
    causes = Counter(each.cause for each in verdicts if each.decision != "done")
    print(f"{len(killer.kills)} kills ({dict(Counter(killer.kills))}), {len(attempts)} attempts, causes {dict(causes)}")
    print(f"{sum(count for _, count in made):,} steps made, {len(kept):,} kept, {sum(lost):,} made again")
    print(f"at most {max(lost, default=0)} made again after a kill; {len(attempts) - len(made)} died before training")
    waits = [after.time - before.time for before, after in zip(verdicts, plans[1:], strict=False)]
    print(
        f"from a verdict to the next plan: median {median(waits or [0]):.2f} s, at most {max(waits, default=0):.2f} s"
    )
    checks = {
        f"exit code {code}": code == 0,
        "losses differ from those of a run without kills": kept == dict(enumerate(expected, 1)),
        f"processes left: {left}": not left,
        f"{len(attempts)} attempts of {len(killer.kills)} kills": len(plans) == len(verdicts) == len(killer.kills) + 1,
        "an attempt began from another checkpoint than the newest": [each.step for each in plans[1:]] == killer.whole,
        "a part of the metrics is of no attempt": {start for start, _ in made} <= {each.step for each in plans},
        "more was lost than a kill costs": max(lost, default=0) <= 2 * killer.kind.every,
        "steps do not add up": sum(count for _, count in made) == killer.kind.steps + sum(lost),
        "somebody else is named": all(each.initiator for each in verdicts if each.decision != "done"),
    }
    return [words for words, holds in checks.items() if not holds]


def _names(process: psutil.Process, run_dir: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return str(run_dir) in " ".join(process.cmdline()) and process.pid != os.getpid()
    return False


def main() -> int:
    """Kill processes of a run at random; return exit code 0 if the run's records are consistent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mini", action="store_true")
    parser.add_argument("--keep", type=Path, help="keep the run in this folder")
    parser.add_argument("--agent", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        return train_small(args.agent)
    kind, began = REAL if args.mini else SMALL, time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "run").mkdir(parents=True)
        expected = kind.expected(folder)
        given = {"STEPS": kind.steps, "EVERY": kind.every, "PAUSE": 0.02, "COMPLAIN": 5}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **{f"SMALL_{k}": str(v) for k, v in given.items()}}
        with (folder / "out.txt").open("w") as out:
            root = psutil.Popen(kind.command(folder / "run"), env=environment, stdout=out, stderr=out, cwd=ROOT)
        killer = Killer(kind, folder / "run", root, random.Random(args.seed))
        while len(killer.kills) < args.kills and killer.strike():
            pass
        code = root.wait()
        found = wrong(killer, code, expected)
        print(f"{time.monotonic() - began:.0f} s; {'; '.join(found) if found else 'everything adds up'}")
        if found:
            print((folder / "out.txt").read_text()[-3000:])
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
