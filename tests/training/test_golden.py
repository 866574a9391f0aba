"""Runs that the other tests train against the golden numbers of tests/golden/training-tiny.json.

To renew what moved for a good reason: TC3_RENEW_GOLDEN=1 tests/run tests/training/test_golden.py
"""

import os

import pytest

from tests.training import runs
from tools.accuracy.equivalence import golden_gate

pytestmark = pytest.mark.slow
TINY = str(runs.TINY.relative_to(runs.ROOT))
FILE = golden_gate.golden_file(golden_gate.GOLDEN, TINY)


def numbers(run_dir):
    return {"whole": runs.numbers(run_dir)}


def test_one_worker_reaches_its_golden_numbers(whole):
    if os.environ.get("TC3_RENEW_GOLDEN"):
        golden_gate.write_golden(FILE, TINY, numbers(whole))
    golden = golden_gate.read_golden(FILE)
    assert golden_gate.unknown(golden, ["whole"]) == golden_gate.differences(golden, numbers(whole)) == []


def test_two_workers_reach_the_same_golden_numbers(whole_dp2):
    assert golden_gate.differences(golden_gate.read_golden(FILE), numbers(whole_dp2)) == []
