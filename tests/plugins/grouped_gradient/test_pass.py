"""The pass in MindSpore's own compiler, and what it makes of a gradient, executed on CPU."""

import json
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from plugins.grouped_gradient.reference import summed

KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ENDS = (3, 3, 8, 16)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(forks, tmp_path_factory):
    """(switch, case) -> what the process found, run once."""

    @cache
    def run_once(switch, case):
        words = [tmp_path_factory.mktemp("graphs")] if case == "whole" else []
        done = forks.python("-m", "tests.plugins.grouped_gradient.one_process", switch, case, *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run_once


@pytest.mark.parametrize("case", KINDS)
def test_one_operator_adds_what_three_did(run, case):
    with_pass, without = run("on", case), run("off", case)
    assert with_pass["asked"]["InplaceGroupedMatmulAdd"] == len(with_pass["rows"])
    assert "InplaceGroupedMatmulAdd" not in without["asked"]
    # one GroupedMatmul less a step: the gradient of the rows remains, bit by bit
    assert with_pass["asked"]["GroupedMatmul"] * 2 == without["asked"]["GroupedMatmul"]
    assert with_pass["rows"] == without["rows"] and with_pass["given"] == without["given"]


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize(("switch", "rounded"), [("on", False), ("off", True)])
def test_the_sums_differ_by_the_rounding_of_each_gradient_alone(run, case, switch, rounded):
    found = run(switch, case)
    batches = [[np.array(each, np.float32) for each in given] for given in found["given"]]
    wanted, other = (summed(batches, ENDS, KINDS[case], each) for each in (rounded, not rounded))
    sums = np.array(found["accumulator"], np.float32)
    np.testing.assert_array_equal(sums, wanted)
    assert not np.array_equal(sums, other)


@pytest.mark.parametrize(("switch", "rounded"), [("on", False), ("off", True)])
def test_a_sum_is_read_after_both_were_added_and_before_it_is_zero(run, switch, rounded):
    """In another order a step would read a sum that is not finished, or one that has lost what was added."""
    found = run(switch, "whole")
    assert found["asked"].get("InplaceGroupedMatmulAdd", 0) == (0 if rounded else 2 * len(found["rows"]))
    for given, read in zip(found["given"], found["rows"], strict=True):
        x, dout = (np.array(each, np.float32) for each in given)
        wanted = summed([(x, dout), (x + x, dout)], ENDS, KINDS["bfloat16"], rounded)
        np.testing.assert_array_equal(np.array(read, np.float32), wanted)
    assert not np.any(found["accumulator"])


def test_both_additions_stand_where_the_additions_stood(run):
    """MindSpore orders what writes and what reads by states: each takes the last and is waited for by the next."""
    graph = {name: (op, words.split(", ")) for name, op, words in run("on", "whole")["graph"]}
    first, second = (name for name, (op, _) in graph.items() if op == "TC3_InplaceGroupedMatmulAdd")
    (read,) = (words for op, words in graph.values() if op == "Load")
    states = [graph[first][1][-1], graph[second][1][-1], read[-1]]
    assert states[0] == "UMonad[U]"
    assert graph[states[1]] == ("UpdateState", [states[0], first])
    assert graph[states[2]] == ("UpdateState", [states[1], second])
    assert graph[first][1][3] == graph[second][1][3] == read[0]  # the sum


@pytest.mark.parametrize(
    ("case", "words"), [("float32", "rows that are not bfloat16 or float16"), ("twice", "no AssignAdd of it")]
)
def test_what_it_cannot_replace_ends_the_compile(run, case, words):
    error = run("on", case)["error"]
    assert error.startswith("plugins.grouped_gradient: ") and words in error
    assert error.endswith("write plugins.grouped_gradient: False")


def test_without_the_pass_float32_is_added(run):
    assert "error" not in run("off", "float32")
