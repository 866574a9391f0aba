"""This program inserts each layout fault of the accuracy toolkit's list into an executed sharded run, and shows how it
is found.

    python benchmarks/executed_faults.py [--recipe tests/training/tiny.yaml] [--steps 2] [FAULT ...]

FAULT: names of `FAULTS`, all by default. Each fault is put into one of the executed strategies of `tc3 accuracy
equivalence --list`, on two CPU processes, and the run is compared with one process without a fault, by the tolerances
of that command. The program prints the exit code of the training, and what names the fault: the first finding, the
weight whose gradient has the largest error in step 1, and copies that differ; or the error of the ranks if they notice
the fault themselves. A Receive without its Send waits ten minutes; each other fault takes one or two minutes on a quiet
machine. Faults in communication are words of TC3_COLLECTIVES_TEST (plugins/semi_auto_cpu/collectives.py), the others
layout_fault.py's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from plugins.semi_auto_cpu.collectives import VARIABLE
from tools.accuracy.equivalence.executed import compare_executed, read_executed
from tools.accuracy.equivalence.runs import Trained, make_corpus
from tools.accuracy.equivalence.sharding import Sharding, derive_sharded
from tools.accuracy.equivalence.strategies import CASES, one_worker
from tools.accuracy.equivalence.trained import Finding, finding_text
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe

ROOT = Path(__file__).resolve().parents[1]
SHARDINGS = {case.name: case.sharding for case in CASES if case.sharding}


@dataclass(frozen=True)
class Fault:
    """A `Fault` is a fault in a strategy that is executed on CPU processes.

    Args:
        what: a description of the fault.
        strategy: the name of a strategy of `SHARDINGS`.
        words: the value of TC3_COLLECTIVES_TEST, for a fault in communication.
        kind: the kind of a fault of layout_fault.py.
    """

    what: str
    strategy: str
    words: str = ""
    kind: str = ""


FAULTS = {
    "missing_all_reduce": Fault("AllReduce left out", "executed_tp2", "skip:AllReduce"),
    "undivided_loss": Fault("loss not divided by TP", "executed_tp2_sp", kind="undivided_loss"),
    "rope_offset": Fault("RoPE: rank 1 has the positions of rank 0", "executed_cp2", kind="first_positions"),
    "group_order": Fault("AllGather in the reverse order of its group", "executed_tp2_sp", "reverse:AllGather"),
    "group_order_of_one": Fault("the same on rank 1 only", "executed_tp2_sp", "reverse:AllGather@1"),
    "send_without_receive": Fault("rank 1 leaves its first Receive out", "executed_pp2", "skip:Receive:0@1"),
    "receive_without_send": Fault("rank 0 leaves its first Send out", "executed_pp2", "drop:Send:0@0"),
}


@dataclass
class Outcome:
    """An `Outcome` holds the result of a run with a fault: exit code, findings in order or errors of the ranks, and
    seconds until the end.
    """

    code: int
    seconds: float
    findings: tuple[Finding, ...] = ()
    errors: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """A `Bench` runs one recipe with faults; the faultless run in one process is trained only once.

    Args:
        base: the recipe that `one_worker` returns.
        work: the folder for the runs.
        layers: the number of the model's layers; if it is None, the strategy's own number.
    """

    base: Recipe
    steps: int
    work: Path
    layers: int | None = None
    references: dict[str, Trained] = field(default_factory=dict)

    def outcome(self, name: str, fault: Fault) -> Outcome:
        """Train a run with a fault, compare it with one process, and return the outcome."""
        sharding = self.sharding(fault.strategy)
        reference = self._reference(sharding)
        recipe = self.recipe(sharding)
        if fault.kind:
            part = recipe["model"]["model_config"]["seq_length"] // sharding.cp
            callback = {"type": "LayoutFault", "auto_register": "layout_fault.LayoutFault", "kind": fault.kind}
            recipe["callbacks"] = [{**callback, "part": part}, *recipe["callbacks"]]
        begin = time.monotonic()
        code, run_dir = self._train(name, recipe, fault.words)
        seconds = time.monotonic() - begin
        if code:
            return Outcome(code, seconds, errors=list(errors_of(run_dir)))
        found = compare_executed(read_executed(run_dir, recipe), reference, sharding)
        return Outcome(code, seconds, found.findings)

    def sharding(self, strategy: str) -> Sharding:
        """Return a strategy with the number of layers of this bench."""
        found = SHARDINGS[strategy]
        return replace(found, layers=self.layers or found.layers)

    def _reference(self, sharding: Sharding) -> Trained:
        name = sharding.against
        if name not in self.references:
            recipe = self.recipe(sharding.alone)
            code, run_dir = self._train(name, recipe)
            if code:
                raise click.ClickException(f"{name}: {''.join(errors_of(run_dir))[-1500:]}")
            self.references[name] = read_executed(run_dir, recipe)
        return self.references[name]

    def recipe(self, sharding: Sharding) -> Recipe:
        """Return the recipe of a strategy, on a corpus that is made once."""
        corpus = self.work / "corpus"
        if not corpus.exists():
            make_corpus(corpus, self.base, self.steps)
        return derive_sharded(self.base, sharding, self.steps, str(corpus / "random"))

    def _train(self, name: str, recipe: Recipe, words: str = "") -> tuple[int, Path]:
        """Train a recipe; return the exit code and the folder of the run."""
        file, run_dir = self.work / f"{name}.yaml", self.work / name
        dump_recipe(recipe, file)
        command = [str(Path(sys.executable).with_name("tc3")), "train", str(file), "--run-dir", str(run_dir), "--force"]
        environment = {**os.environ, "REGISTER_PATH": str(ROOT / "benchmarks"), VARIABLE: words}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        (self.work / f"{name}.log").write_text(done.stdout + done.stderr)
        return done.returncode, run_dir


def errors_of(run_dir: Path) -> Iterator[str]:
    """Yield the ClusterErrors in the logs of all ranks, each message once."""
    seen: dict[str, Any] = {}
    for log in sorted((run_dir / "logs").rglob("worker_*.log")):
        seen |= dict.fromkeys(re.findall(r"ClusterError: (.+)", log.read_text(errors="replace")))
    yield from seen


def told(outcome: Outcome, sharding: Sharding) -> list[str]:
    """Return what names the fault: the first finding, the weight whose gradient has the largest error, and copies that
    differ; or the errors of the ranks.
    """
    weights = [found for found in outcome.findings if found.tensor.startswith("gradient of ")]
    copies = [found for found in outcome.findings if found.detail == "copies differ"]
    chosen = dict.fromkeys([*outcome.findings[:1], *weights[:1], *copies[:1]])
    return outcome.errors or [finding_text(finding, sharding) for finding in chosen] or ["NOT CAUGHT"]


@click.command()
@click.argument("faults", nargs=-1, type=click.Choice(list(FAULTS)))
@click.option(
    "--recipe",
    default="tests/training/tiny.yaml",
    show_default=True,
    help="Train this recipe; a run must take only seconds.",
)
@click.option(
    "--steps", default=2, type=click.IntRange(min=2), show_default=True, help="Train this many steps in each run."
)
@click.option(
    "--work", type=click.Path(path_type=Path), help="Keep the runs in this folder; by default in a temporary one."
)
def main(faults: tuple[str, ...], recipe: str, steps: int, work: Path | None) -> None:
    """Print a table of faults and what caught each; exit code 1 if one was not."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(one_worker(recipe), steps, (work or Path(folder)).absolute())
        bench.work.mkdir(parents=True, exist_ok=True)
        click.echo("| fault | strategy | exit code of the run | seconds | what names it |\n|---|---|---|---|---|")
        for name in faults or FAULTS:
            fault = FAULTS[name]
            outcome = bench.outcome(name, fault)
            lines = told(outcome, SHARDINGS[fault.strategy])
            missed += not (outcome.findings or outcome.errors)
            how = f"{fault.what} (`{fault.words or fault.kind}`)"
            click.echo(f"| {how} | {fault.strategy} | {outcome.code} | {outcome.seconds:.0f} | {'<br>'.join(lines)} |")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
