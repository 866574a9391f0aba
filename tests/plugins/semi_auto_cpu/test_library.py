"""The C++ library in real processes: two lines of a model on one and on two of them, and one graph for each rule."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STEPS = 3

pytestmark = pytest.mark.slow


def start(name, *arguments, **environment):
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*processes):
    """What each printed last, and its stderr; where one fails, the stderr of all: the first is seldom the cause."""
    try:
        texts = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(words for _, words in texts)
    return [(json.loads(out.splitlines()[-1]), words) for out, words in texts]


def two_line(dp, tp, folder, cache=None):
    """What each rank printed; `cache`: the folder of MindSpore's compile cache, a folder in it for each rank."""
    folder.mkdir()
    ranks = []
    for rank in range(dp * tp):
        environment = {}
        if cache:
            environment = {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(cache / str(rank))}
            # MindSpore's: without a cluster it knows no other rank
            (cache / str(rank) / "rank_0").mkdir(parents=True, exist_ok=True)
            if rank and not (cache / str(rank) / f"rank_{rank}").exists():
                (cache / str(rank) / f"rank_{rank}").symlink_to("rank_0")
        ranks.append(start("two_line.py", rank, dp, tp, folder, **environment))
    return [told for told, _ in finish(*ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (told,) = two_line(1, 1, tmp_path_factory.mktemp("alone") / "one")
    assert len(told["losses"]) == STEPS and "AllReduce" not in told["asked"]
    return told


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two processes that keep their graph; the folder that they share and that the graph is in."""
    folder = tmp_path_factory.mktemp("two")
    return two_line(1, 2, folder / "first", folder / "cache"), folder


def test_two_processes_train_as_one_does(alone, two):
    for told in two[0]:
        assert told["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        # forward of the second product, backward of the first
        assert told["asked"].count("AllReduce") == STEPS * 2


def test_a_graph_of_the_compile_cache_is_loaded_and_trains_to_the_same_bits(two):
    first, folder = two
    second = two_line(1, 2, folder / "second", folder / "cache")
    for told, again in zip(first, second, strict=True):
        assert (told.pop("compiled"), again.pop("compiled")) == (1, 0)
        assert again == told


def test_weights_cut_over_copies_that_are_not_consecutive_ranks(alone, tmp_path):
    """Optimizer sharding over ranks 0 and 2, 1 and 3: each starts with its own part of its half of a weight."""
    for told in two_line(2, 2, tmp_path / "four"):
        assert told["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert told["asked"].count("AllGather") >= 2, "the weights are cut"


@pytest.fixture(scope="module")
def graphs():
    (found,) = finish(start("one_process.py"))
    return found


def test_a_rank_without_rows_gets_rows_of_the_right_width(graphs):
    told, _ = graphs
    assert [told[f"rows {count}"] for count in (2, 0, 1)] == [[[1, 2], [3, 4]], [], [[1, 2]]]
    assert told["shape 0"] == [0, 2]


def test_a_kernel_gets_the_operators_own_arguments(graphs):
    told, _ = graphs
    four = [[4], "float32"]
    assert told["call 2"] == [[four, [[1], "int64"], [[1], "int64"]], "2"]
    assert told["concat"] == [[0, 1, 2, 3, 0, 2, 4, 6], [[[four, four], -1], None]]
    assert told["topk"] == [[3, 2], [[four, 2, -1, True, True], None]]


def test_a_sum_in_bfloat16_over_axes_that_show_in_the_step_is_taken_in_float32(graphs):
    """Its axes are no constants, and Python gets constants only."""
    assert graphs[0]["weighted"] == [[1, 5], [1]]


def test_lazily_inlined_blocks_give_the_gradients_of_their_formula(graphs):
    x = np.arange(4) / 8

    def first(x, weights):
        return (weights[1] * (x * weights[0]) ** 2) ** 2 + x

    def stack(weights):
        return first((first(x, weights) * weights[2]) ** 2, weights).sum()

    steps = 1e-5 * np.eye(3)
    gradients = [(stack([1, 2, 3] + step) - stack([1, 2, 3] - step)) / 2e-5 for step in steps]
    assert graphs[0]["blocks"] == pytest.approx([stack([1, 2, 3]), *gradients], rel=1e-5)


def test_an_operator_may_be_replaced_for_16_bits_only(graphs):
    assert graphs[0]["cosines"] == [[1, False], [1, True]]


def test_a_value_that_is_not_known_is_refused(graphs):
    assert graphs[0]["unknown"].startswith("semi_auto_cpu: SumExt, input 2")
    assert graphs[0]["unknown"].endswith("the front end does not know this value yet")


def test_what_nothing_computes_is_counted(graphs):
    assert graphs[0]["missing"][:2] == [{"RmsNorm": 2}, {"Tan of BFloat16": 1}]


def test_a_failing_kernel_stops_mindspore_with_its_name_and_traceback(graphs):
    told, words = graphs
    assert told["fault"] == "semi_auto_cpu: rank 3, Sin: ArithmeticError: no such luck"
    assert told["failure"] == "ArithmeticError('no such luck')"
    assert "semi_auto_cpu: rank 3, Sin failed\nTraceback" in words and "in compute\n" in words


def test_what_the_pass_refuses_stops_the_compilation(graphs):
    assert graphs[0]["refused"] == "semi_auto_cpu: rank 3, compiler pass, missing: LookupError: not here"
