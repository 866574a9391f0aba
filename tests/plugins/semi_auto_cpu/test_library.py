"""These tests check what the launch of an operator reports, and run the C++ library in real processes.

There two lines of a model run on one process and on two, and one graph for each rule.
"""

import ctypes
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from plugins.semi_auto_cpu import library


def text(inputs, outputs=(), arguments=None, **attrs):
    told = {"name": "Some", "attrs": attrs, "inputs": list(inputs), "outputs": list(outputs)}
    return json.dumps(told | ({} if arguments is None else {"arguments": arguments})).encode()


def tensor(array, kind):
    return {"type": kind, "bytes": array.nbytes, "shape": list(array.shape)}


def addresses(*arrays):
    return (ctypes.c_void_p * len(arrays))(*(None if a is None else a.ctypes.data for a in arrays))


@pytest.mark.parametrize("kind", library.DTYPES)
def test_every_dtype_is_a_view_of_the_memory(kind):
    memory = np.arange(6).reshape(2, 3).astype(library.DTYPES[kind])
    (view,) = library.parse(text([tensor(memory, kind)])).take(addresses(memory))
    assert view.dtype == memory.dtype and view.shape == (2, 3) and np.shares_memory(view, memory)
    view[0, 0] = 1
    assert memory[0, 0] == 1


def test_names_of_dtypes_are_numpys():
    own = {"BFloat16": np.dtype(ml_dtypes.bfloat16)}
    assert {kind: np.dtype(kind.lower()) for kind in library.DTYPES if kind not in own} | own == library.DTYPES


def test_a_scalar_and_an_empty_tensor():
    memory = np.array(3, np.float32)
    none = np.empty((0, 4), np.float32)
    got = library.parse(text([tensor(memory, "Float32"), tensor(none, "Float32")])).take(addresses(memory, None))
    assert got[0] == 3 and got[0].shape == () and got[1].shape == (0, 4)


def test_a_type_that_numpy_does_not_have_is_named():
    with pytest.raises(TypeError, match="Int4 has no counterpart in NumPy"):
        library.parse(text([{"type": "Int4", "bytes": 1, "shape": [2]}]))


def test_arguments_in_the_operators_own_order():
    a, b, c = (np.full(2, n, np.float32) for n in range(3))
    arguments = [{"value": 7}, {"list": 2}, {"value": None}, {}, {"value": [1, [2, 3]]}, {"list": 0}]
    one = library.parse(text([tensor(x, "Float32") for x in (a, b, c)], arguments=arguments))
    number, items, none, last, nested, nothing = one.take(addresses(a, b, c))
    assert (number, none, nested, nothing) == (7, None, (1, (2, 3)), [])
    assert [item[0] for item in items] == [0, 1] and last[0] == 2


def test_without_arguments_the_inputs_are_taken_as_they_are():
    a = np.zeros(2, np.int64)
    got = library.parse(text([tensor(a, "Int64"), {"value": "sum"}])).take(addresses(a, None))
    assert np.shares_memory(got[0], a) and got[1] == "sum"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("true", True),
        ("null", None),
        ("-3", -3),
        ("1e-06", 1e-6),
        ("9.9999999747524271e-07", float(np.float32(1e-6))),
        ("2.0", 2.0),
        ("-Infinity", -math.inf),
        ('"a|b=\\"c\\";d"', 'a|b="c";d'),
        ('["x", [1, 2.5]]', ("x", (1, 2.5))),
        ('"true"', "true"),
    ],
)
def test_constants_keep_their_kind(words, value):
    told = text([], arguments=[{"value": "#"}]).decode().replace('"#"', words).encode()
    (got,) = library.parse(told).take(addresses())
    assert got == value and type(got) is type(value)


def test_attributes_are_text():
    assert library.parse(text([], group="2-0|1", op="sum")).attrs == {"group": "2-0|1", "op": "sum"}


def test_a_text_is_parsed_once():
    told = text([], op="only here")
    assert library.parse(told) is library.parse(bytes(bytearray(told)))


def test_store_rounds_reshapes_and_leaves_alone():
    outputs = [np.zeros((2, 2), ml_dtypes.bfloat16), np.full(1, 5, np.int32), np.zeros(2, np.float32)]
    library.store((np.full(4, 1.003, np.float32), None), outputs)
    assert outputs[0].astype(float).tolist() == [[1.0, 1.0]] * 2 and outputs[1][0] == 5
    library.store(np.float64(2), outputs[1:2])
    assert outputs[1][0] == 2


def test_store_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"result 0 has shape \(3,\), but MindSpore expects \(2,\)"):
        library.store(np.zeros(3), [np.zeros(2)])
    with pytest.raises(ValueError, match="2 results, but MindSpore expects 1"):
        library.store((np.zeros(2), np.zeros(2)), [np.zeros(2)])


HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STEPS = 3


def start(name, *arguments, **environment):
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*processes):
    """Return the last output and the stderr of each process; if one fails, show the stderr of all, because the first
    to fail is seldom the cause.
    """
    try:
        texts = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(words for _, words in texts)
    return [(json.loads(out.splitlines()[-1]), words) for out, words in texts]


def two_line(dp, tp, folder, cache=None):
    """Return what each rank printed; `cache` is the folder of MindSpore's compile cache, which has a subfolder for
    each rank.
    """
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


@pytest.mark.slow
def test_two_processes_train_as_one_does(alone, two):
    for told in two[0]:
        assert told["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        # forward of the second product, backward of the first
        assert told["asked"].count("AllReduce") == STEPS * 2


@pytest.mark.slow
def test_a_graph_of_the_compile_cache_is_loaded_and_trains_to_the_same_bits(two):
    first, folder = two
    second = two_line(1, 2, folder / "second", folder / "cache")
    for told, again in zip(first, second, strict=True):
        assert (told.pop("compiled"), again.pop("compiled")) == (1, 0)
        assert again == told


@pytest.mark.slow
def test_weights_cut_over_copies_that_are_not_consecutive_ranks(alone, tmp_path):
    """Optimizer sharding over ranks 0 and 2, 1 and 3: each starts with its own part of its half of a weight."""
    for told in two_line(2, 2, tmp_path / "four"):
        assert told["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert told["asked"].count("AllGather") >= 2, "the weights are cut"


@pytest.fixture(scope="module")
def graphs():
    (found,) = finish(start("one_process.py"))
    return found


@pytest.mark.slow
def test_a_rank_without_rows_gets_rows_of_the_right_width(graphs):
    told, _ = graphs
    assert [told[f"rows {count}"] for count in (2, 0, 1)] == [[[1, 2], [3, 4]], [], [[1, 2]]]
    assert told["shape 0"] == [0, 2]


@pytest.mark.slow
def test_a_kernel_gets_the_operators_own_arguments(graphs):
    told, _ = graphs
    four = [[4], "float32"]
    assert told["call 2"] == [[four, [[1], "int64"], [[1], "int64"]], "2"]
    assert told["concat"] == [[0, 1, 2, 3, 0, 2, 4, 6], [[[four, four], -1], None]]
    assert told["topk"] == [[3, 2], [[four, 2, -1, True, True], None]]


@pytest.mark.slow
def test_a_sum_in_bfloat16_over_axes_that_show_in_the_step_is_taken_in_float32(graphs):
    """Its axes are no constants, and Python gets constants only."""
    assert graphs[0]["weighted"] == [[1, 5], [1]]


@pytest.mark.slow
def test_lazily_inlined_blocks_give_the_gradients_of_their_formula(graphs):
    x = np.arange(4) / 8

    def first(x, weights):
        return (weights[1] * (x * weights[0]) ** 2) ** 2 + x

    def stack(weights):
        return first((first(x, weights) * weights[2]) ** 2, weights).sum()

    steps = 1e-5 * np.eye(3)
    gradients = [(stack([1, 2, 3] + step) - stack([1, 2, 3] - step)) / 2e-5 for step in steps]
    assert graphs[0]["blocks"] == pytest.approx([stack([1, 2, 3]), *gradients], rel=1e-5)


@pytest.mark.slow
def test_independent_collectives_over_two_groups_run_in_one_order_whatever_the_order_of_the_graph(graphs):
    one, other = graphs[0]["orders"]
    assert one == other and sorted(one) == ["far", "near"]


@pytest.mark.slow
def test_an_operator_may_be_replaced_for_16_bits_only(graphs):
    assert graphs[0]["cosines"] == [[1, False], [1, True]]


@pytest.mark.slow
def test_a_value_that_is_not_known_is_refused(graphs):
    assert graphs[0]["unknown"].startswith("semi_auto_cpu: SumExt, input 2")
    assert graphs[0]["unknown"].endswith("the front end does not know this value yet")


@pytest.mark.slow
def test_what_nothing_computes_is_counted(graphs):
    assert graphs[0]["missing"][:2] == [{"RmsNorm": 2}, {"Tan of BFloat16": 1}]


@pytest.mark.slow
def test_a_failing_kernel_stops_mindspore_with_its_name_and_traceback(graphs):
    told, words = graphs
    assert told["fault"] == "semi_auto_cpu: rank 3, Sin: ArithmeticError: no such luck"
    assert told["failure"] == "ArithmeticError('no such luck')"
    assert "semi_auto_cpu: rank 3, Sin failed\nTraceback" in words and "in compute\n" in words


@pytest.mark.slow
def test_what_the_pass_refuses_stops_the_compilation(graphs):
    assert graphs[0]["refused"] == "semi_auto_cpu: rank 3, compiler pass, missing: LookupError: not here"
