"""These tests execute a layout that splits the model on two processes, and compare it with one process: without a
fault, and with faults that are put in, which must be found and placed.

One fault is in the forward pass, and only the gradients show the other one; further faults are in
benchmarks/executed_faults.py, and tests/tools/accuracy/equivalence/test_executed.py checks where each one is placed.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.executed_faults import FAULTS, Bench, errors_of
from plugins.semi_auto_cpu.collectives import VARIABLE
from tests.training import forked, runs
from tools.accuracy.cli import accuracy
from tools.accuracy.equivalence.strategies import one_worker
from tools.recipe.dump import dump_recipe

NAME = "executed_tp2_sp"
WORDS = ["equivalence", str(runs.TINY), "--only", NAME, "--steps", "3", "--json"]


@pytest.mark.slow
def test_tensor_and_sequence_parallelism_equal_one_process(workers, tmp_path):
    with forked.launches(workers):
        done = CliRunner(catch_exceptions=False).invoke(accuracy, [*WORDS, "--work", str(tmp_path)])
    assert done.exit_code == 0, done.output[-4000:]
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["how"], row["status"]) == ("executed", "pass"), row
    assert row["tensors"] > 100 and row["used"] < 1 and row["findings"] == []
    assert not list(tmp_path.rglob("*.safetensors")), "checkpoints are deleted when they were read"


STEPS = 2


@dataclass
class Forked(Bench):
    """As its base, with workers that are forks."""

    workers: Any = None

    def _train(self, name, recipe, words=""):
        file, run_dir = self.work / f"{name}.yaml", self.work / name
        dump_recipe(recipe, file)
        environment = {"REGISTER_PATH": str(runs.ROOT / "benchmarks"), VARIABLE: words}
        forked.train(self.workers, file, run_dir, None, **environment)
        return 0, run_dir


@pytest.fixture(scope="module")
def bench(workers, tmp_path_factory):
    """Of one dense layer, which has all that the faults disturb: five processes compile it."""
    folder = tmp_path_factory.mktemp("faults")
    return Forked(one_worker(str(runs.TINY)), STEPS, folder, layers=1, workers=workers)


@pytest.mark.slow
def test_a_reduction_that_is_left_out_is_caught_in_the_forward(bench):
    outcome = bench.outcome("missing_all_reduce", FAULTS["missing_all_reduce"])
    first = outcome.findings[0]
    assert (outcome.code, first.phase, first.step, first.module) == (0, "forward", 1, "loss"), outcome
    assert any(finding.detail == "copies differ" for finding in outcome.findings)


@pytest.mark.slow
def test_positions_of_another_part_of_the_sequence_are_placed_in_attention(bench):
    """At the start of training attention hardly knows positions: the loss itself is right to 1e-5."""
    outcome = bench.outcome("rope_offset", FAULTS["rope_offset"])
    first = outcome.findings[0]
    assert (outcome.code, first.phase, first.step) == (0, "backward", 1), outcome
    assert first.module.endswith("attention") and first.error > 0.1


def test_errors_of_ranks_are_read_once(tmp_path):
    for rank in range(2):
        log = tmp_path / f"logs/worker_{rank}.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text(f"plugins.errors.ClusterError: rank {rank} waits\nClusterError: both\n")
    assert list(errors_of(tmp_path)) == ["rank 0 waits", "both", "rank 1 waits"]
