"""Faults of a layout, each in an executed run of two processes: caught, and placed."""

import pytest

from benchmarks.executed_faults import FAULTS, Bench, errors_of
from tests.training import runs
from tools.accuracy.equivalence.strategies import one_worker

STEPS = 2


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Of one dense layer, which has all that the faults disturb: six processes compile it."""
    folder = tmp_path_factory.mktemp("faults")
    return Bench(one_worker(str(runs.TINY)), STEPS, folder, layers=1)


@pytest.mark.slow
def test_a_reduction_that_is_left_out_is_caught_in_the_forward(bench):
    outcome = bench.outcome("missing_all_reduce", FAULTS["missing_all_reduce"])
    first = outcome.findings[0]
    assert (outcome.code, first.phase, first.step, first.module) == (0, "forward", 1, "loss"), outcome
    assert any(finding.detail == "copies differ" for finding in outcome.findings)


@pytest.mark.slow
def test_a_loss_that_is_not_divided_by_tensor_parallel_ranks_is_placed_at_the_loss(bench):
    outcome = bench.outcome("undivided_loss", FAULTS["undivided_loss"])
    first = outcome.findings[0]
    assert (outcome.code, first.phase, first.step, first.module) == (0, "backward", 1, "loss"), outcome
    assert first.tensor == "gradient of the loss" and first.error == pytest.approx(1, rel=1e-4)
    assert first.meaning == "loss scaling: the seed is not divided by the ranks that share it"


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
