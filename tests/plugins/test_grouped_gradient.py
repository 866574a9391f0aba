"""These tests check in which recipes `plugins.grouped_gradient` can work.

The pass in MindSpore's own compiler, and what it makes of a gradient, executed on CPU.
"""

import json
from functools import cache
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from plugins.errors import RecipeError
from plugins.grouped_gradient import plan
from plugins.grouped_gradient.reference import summed
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

OVERLAP = "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml"  # cuts each micro-batch into chunks
SHIPPED = [*(f"recipes/telechat3_{size}/pretrain_4k.yaml" for size in ("438b", "1119b")), OVERLAP]


def of(recipe, *changes, settings=None, **others):
    recipe = apply_overrides(load_recipe(recipe), changes)
    recipe["plugins"] = {**(recipe.get("plugins") or {}), "grouped_gradient": settings or {}, **others}
    return recipe


@pytest.mark.parametrize("recipe", SHIPPED)
def test_off_unless_named(recipe):
    assert not plan.check(load_recipe(recipe))
    assert not plan.check(of(recipe) | {"plugins": {"grouped_gradient": False}})
    assert plan.check(of(recipe))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("parallel_config.pipeline_stage=1", "parallel_config.pipeline_stage: .* micro-batches"),
        ("parallel.parallel_optimizer_config.gradient_accumulation_shard=True", "shard: a ReduceScatter stands"),
        ("model.model_config.compute_dtype=float32", "compute_dtype: .* not float32"),
        ("model.model_config.params_dtype=bfloat16", "params_dtype: .* float32 sums, not to bfloat16"),
        ("context.jit_config.jit_level=O2", "jit_level: .* not with O2"),
        ("model.model_config.n_routed_experts=0", "the model has no experts"),
    ],
)
def test_what_has_no_such_gradient_is_refused(change, words):
    with pytest.raises(RecipeError, match=f"{words}.*plugins.grouped_gradient: False"):
        plan.check(of(SHIPPED[0], change))


@pytest.mark.parametrize("settings", [{"mode": 1}, True, [1]])
def test_there_is_nothing_to_set(settings):
    with pytest.raises(RecipeError, match=r"plugins\.grouped_gradient"):
        plan.check(of(SHIPPED[0], settings=settings))


def test_a_cpu_does_without():
    assert not plan.check(of("recipes/mini/pretrain.yaml"))


KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# of each number of chunks: where each expert's rows end in each chunk. Each has an expert without rows
ENDS = {
    1: ((3, 3, 8, 16),),
    2: ((3, 3, 8, 9), (2, 4, 4, 7)),
    3: ((3, 3, 5, 6), (1, 2, 4, 4), (0, 3, 4, 6)),
}
SUMS = [("float16", 1), *(("bfloat16", chunks) for chunks in ENDS)]
ADDED = "InplaceGroupedMatmulAdd"


@pytest.fixture(scope="module")
def run(forks, tmp_path_factory):
    """(switch, case, chunks) -> what the process found, run once."""

    @cache
    def run_once(switch, case, chunks=1):
        words = [tmp_path_factory.mktemp("graphs")] if case == "whole" else []
        done = forks.python("-m", "tests.plugins.grouped_gradient.one_process", switch, case, str(chunks), *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run_once


def given(found):
    """Of each step: rows, and the gradient of what came of them."""
    return [[np.array(each, np.float32) for each in pair] for pair in found["given"]]


def cut(x, dout, chunks):
    """The chunks of a micro-batch, the last first: the gradient of each needs that of the next."""
    at = np.cumsum([ends[-1] for ends in ENDS[chunks]])[:-1]
    return [*zip(np.split(x, at), np.split(dout, at), ENDS[chunks], strict=True)][::-1]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "chunks"), SUMS)
def test_one_operator_adds_what_three_did(run, case, chunks):
    with_pass, without = run("on", case, chunks), run("off", case, chunks)
    assert with_pass["asked"][ADDED] == chunks * len(with_pass["rows"])
    assert ADDED not in without["asked"]
    # one GroupedMatmul less a chunk: the gradient of the rows remains, bit by bit
    assert with_pass["asked"]["GroupedMatmul"] * 2 == without["asked"]["GroupedMatmul"]
    assert with_pass["rows"] == without["rows"] and with_pass["given"] == without["given"]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "chunks"), SUMS)
@pytest.mark.parametrize(("switch", "rounded"), [("on", False), ("off", True)])
def test_the_sums_differ_by_the_rounding_of_each_gradient_alone(run, case, switch, rounded, chunks):
    found = run(switch, case, chunks)
    batches = [cut(*pair, chunks) for pair in given(found)]
    wanted, other = (summed(batches, KINDS[case], each) for each in (rounded, not rounded))
    sums = np.array(found["accumulator"], np.float32)
    np.testing.assert_array_equal(sums, wanted)
    assert not np.array_equal(sums, other)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_are_added_in_the_order_in_which_their_gradients_are_computed(run, chunks):
    """The last chunk's is there first; the other order has other bits."""
    found = run("on", "bfloat16", chunks)
    batches = [cut(*pair, chunks)[::-1] for pair in given(found)]
    assert not np.array_equal(found["accumulator"], summed(batches, KINDS["bfloat16"], False))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("switch", "rounded"), [("on", False), ("off", True)])
def test_a_sum_is_read_after_all_were_added_and_before_it_is_zero(run, switch, rounded, chunks):
    """In another order a step would read a sum that is not finished, or one that has lost what was added."""
    found = run(switch, "whole", chunks)
    assert found["asked"].get(ADDED, 0) == (0 if rounded else 2 * chunks * len(found["rows"]))
    for (x, dout), read in zip(given(found), found["rows"], strict=True):
        batches = [cut(x, dout, chunks), cut(x + x, dout, chunks)]
        wanted = summed(batches, KINDS["bfloat16"], rounded)
        np.testing.assert_array_equal(np.array(read, np.float32), wanted)
    assert not np.any(found["accumulator"])


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_all_additions_stand_where_the_additions_stood(run, chunks):
    """MindSpore orders what writes and what reads by states: each takes the last and is waited for by the next."""
    graph = {name: (op, words.split(", ")) for name, op, words in run("on", "whole", chunks)["graph"]}
    added = [name for name, (op, _) in graph.items() if op == f"TC3_{ADDED}"]
    batches = [added[:chunks], added[chunks:]]
    (read,) = (words for op, words in graph.values() if op == "Load")
    assert len(added) == 2 * chunks
    states = [graph[names[0]][1][-1] for names in batches] + [read[-1]]
    assert states[0] == "UMonad[U]"
    for names, (state, following) in zip(batches, pairwise(states), strict=True):
        assert {graph[name][1][-1] for name in names} == {state}
        assert graph[following] == ("UpdateState", [state, names[-1]])
        assert graph[names[0]][1][3] == read[0]  # the sum
        for last, name in pairwise(names):
            assert graph[graph[name][1][3]] == ("Depend", [read[0], last])


@pytest.mark.slow
def test_what_waits_for_one_gradient_waits_for_its_addition(run):
    """Otherwise it would wait for the sum of all, which waits for what waits."""
    found = run("on", "waits")
    assert found["asked"][ADDED] == 2 * len(found["rows"])
    batches = [[(x, dout, ENDS[1][0]), (x + x, dout, ENDS[1][0])] for x, dout in given(found)]
    sums = np.array(found["accumulator"], np.float32)
    np.testing.assert_array_equal(sums, summed(batches, KINDS["bfloat16"], False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("float32", "rows that are not bfloat16 or float16"),
        ("used", "another user of Reshape"),
        ("other", "a sum with Mul"),
    ],
)
def test_what_it_cannot_replace_ends_the_compile(run, case, words):
    error = run("on", case)["error"]
    assert error.startswith("plugins.grouped_gradient: ") and words in error
    assert error.endswith("write plugins.grouped_gradient: False")


@pytest.mark.slow
def test_without_the_pass_float32_is_added(run):
    assert "error" not in run("off", "float32")
