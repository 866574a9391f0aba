"""The section of a recipe as flags of MindSpore's graph kernels."""

import re

import pytest

from plugins.errors import ClusterError, RecipeError
from plugins.operator_fusion import plan
from plugins.operator_fusion.adapter import before_mindspore
from plugins.operator_fusion.plan import CUBE, EXPANDED, VECTOR

ASCEND = {"device_target": "Ascend", "jit_config": {"jit_level": "O1"}}


def recipe(settings, **context):
    return {"context": {**ASCEND, **context}, "plugins": {"operator_fusion": settings}}


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"level": "off"}, "--opt_level=0"),
        ({"level": False}, "--opt_level=0"),  # a bare off in YAML
        ({"level": "vector"}, "--opt_level=2 --fusion_ops_level=0"),
        ({"level": "cube"}, "--opt_level=2 --fusion_ops_level=1"),
        (
            {"level": "vector", "disable": ["Exp", "SiLU", "Pow", "Exp"]},
            "--opt_level=2 --fusion_ops_level=0 --disable_cluster_ops=Exp,Pow --disable_expand_ops=SiLU",
        ),
        (
            {"level": "cube", "disable": ["GroupedMatmul"]},
            "--opt_level=2 --fusion_ops_level=1 --disable_cluster_ops=GroupedMatmul",
        ),
    ],
)
def test_a_level_is_written_out_as_flags(settings, flags):
    assert plan.environment(recipe(settings), {}) == {plan.VARIABLE: flags}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, "operator_fusion: write level: off, vector, cube"),
        (True, "operator_fusion: write level: off, vector, cube"),
        ({}, "write level: off, vector, cube under it"),
        ({"levl": "cube", "level": "cube"}, "operator_fusion.levl: no such setting (did you mean 'level'?)"),
        ({"level": "vektor"}, "level: 'vektor' is none of off, vector, cube (did you mean 'vector'?)"),
        ({"level": True}, "level: True is none of"),
        ({"level": None}, "level: None is none of"),
        ({"level": "vector", "disable": "Exp"}, "disable: 'Exp' is not a list; write a list of operators"),
        ({"level": "vector", "disable": ["Exq"]}, "does not fuse operator 'Exq' (did you mean 'Exp'?)"),
        (
            {"level": "vector", "disable": ["reducesum"]},
            "does not fuse operator 'reducesum' (did you mean 'ReduceSum'?)",
        ),
        ({"level": "vector", "disable": ["RmsNorm"]}, "does not fuse operator 'RmsNorm'"),
        ({"level": "vector", "disable": [3]}, "does not fuse operator 3"),
        ({"level": "vector", "disable": ["MatMul"]}, "MatMul is fused only with level: cube"),
        ({"level": "off", "disable": ["Exp"]}, "level: off fuses nothing"),
    ],
)
def test_what_cannot_be_read_is_refused(settings, words):
    with pytest.raises(RecipeError, match=re.escape(words)):
        plan.environment(recipe(settings), {})


@pytest.mark.parametrize("level", ["O0", "O2", None])
def test_ascend_fuses_at_o1_alone(level):
    other = recipe({"level": "vector"}, jit_config={"jit_level": level} if level else {})
    with pytest.raises(RecipeError, match=r"^context\.jit_config\.jit_level: .*only the level 'O1' fuses"):
        plan.environment(other, {})
    other["plugins"]["operator_fusion"] = {"level": "off"}
    assert plan.environment(other, {}) == {plan.VARIABLE: "--opt_level=0"}


def test_no_device_target_is_ascend_as_in_mindformers():
    with pytest.raises(RecipeError, match="the key is missing"):
        plan.environment({"plugins": {"operator_fusion": {"level": "vector"}}}, {})


@pytest.mark.parametrize("key", plan.OWN_KEYS)
def test_switches_of_mindspore_that_it_would_overrule_are_refused(key):
    with pytest.raises(RecipeError, match=rf"^context\.{key}: .*MindSpore ignores"):
        plan.environment(recipe({"level": "vector"}, **{key: "--opt_level=1"}), {})


def test_a_cpu_gets_no_flags_and_so_no_kernels_of_akg():
    assert plan.environment(recipe({"level": "cube"}, device_target="CPU", jit_config={"jit_level": "O0"}), {}) == {}


@pytest.mark.parametrize("without", [{}, {"plugins": None}, {"plugins": {"operator_fusion": False}}])
def test_a_recipe_without_it_leaves_the_defaults_and_the_users_flags(without):
    assert plan.environment({"context": ASCEND, **without}, {plan.VARIABLE: "--opt_level=3"}) == {}


def test_an_exported_variable_must_say_the_same():
    wanted = "--opt_level=2 --fusion_ops_level=0"
    same = {plan.VARIABLE: f" {wanted.replace(' ', '  ')}"}
    assert plan.environment(recipe({"level": "vector"}), same) == {plan.VARIABLE: wanted}
    assert plan.environment(recipe({"level": "vector"}), {plan.VARIABLE: ""}) == {plan.VARIABLE: wanted}
    with pytest.raises(ClusterError, match=r"MS_DEV_GRAPH_KERNEL_FLAGS='--opt_level=0', but .*asks for '--opt_level=2"):
        plan.environment(recipe({"level": "vector"}), {plan.VARIABLE: "--opt_level=0"})


def test_a_worker_sets_it_before_mindspore_is_imported():
    worker = {"HOME": "x"}
    before_mindspore(recipe({"level": "off"}), worker)
    assert worker == {"HOME": "x", plan.VARIABLE: "--opt_level=0"}
    with pytest.raises(ClusterError):
        before_mindspore(recipe({"level": "vector"}), worker)


def test_no_operator_is_of_two_kinds():
    names = [*VECTOR, *CUBE, *EXPANDED]
    assert len(names) == len(set(names))
    assert all(list(group) == sorted(group) for group in (VECTOR, CUBE, EXPANDED))
