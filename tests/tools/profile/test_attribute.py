"""Every second of a step has a term, and the terms add up to it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.profile.test_fit import run_105b
from tools.profile.attribute import TERMS, attribute
from tools.profile.kernels import OTHER, Kernel, Profile, Step, communicates, term_of

CONFIG = run_105b()
LAYER = "Default/network/layers-CellList/3-TransformerLayer/"


def kernel(kind, start=0.0, seconds=1.0, name="", core="AI_VECTOR_CORE", ranks=()):
    return Kernel(name or kind, kind, core, start, seconds, ranks=ranks)


def profile_of(*kernels, seconds=0.0):
    return Profile("x", "Ascend", Step(kernels, seconds), 1)


@pytest.mark.parametrize(
    "wanted, found",
    [
        ("matmul", kernel("MatMulV3", core="AI_CORE")),
        ("matmul", kernel("GroupedMatmul", core="MIX_AIC")),
        ("matmul", kernel("N/A", name="aclnnMatmul_MatMulCommon_MatMulV2", core="N/A")),
        ("attention", kernel("FlashAttentionScoreGrad", core="MIX_AIC")),
        (
            "attention",
            kernel("BatchMatMul", name=LAYER + "self_attention/core_attention-X/BatchMatMul-op0", core="Host"),
        ),
        (
            "matmul",
            Kernel(LAYER + "core_attention-X/Grad/BatchMatMul-op1", "BatchMatMul", "Host", 0, 1, ((48, 8, 8),) * 2),
        ),
        ("attention", Kernel("Gradients/BatchMatMul-op1", "BatchMatMul", "Host", 0, 1, ((2, 4, 8, 8),) * 2)),
        ("elementwise", kernel("RmsNorm")),
        ("elementwise", kernel("Anything")),
        ("optimizer", kernel("Mul", name="Default/optimizer-AdamW/Mul-op3")),
        ("optimizer", kernel("IsFinite", name="Default/IsFinite-op0", core="Host")),
        ("elementwise", Kernel("Default/ReduceSum-op3", "ReduceSum", "Host", 0, 1, ((1, 1024, 4, 128),))),
        ("elementwise", Kernel("Default/Sort-op0", "Sort", "Host", 0, 1, ((4096,),))),
        ("optimizer", Kernel("Default/ReduceSum-op45", "ReduceSum", "Host", 0, 1, ((2048, 128),))),
        (OTHER, kernel("Mul", name="Mul", core="Host")),
        (OTHER, kernel("Unique", core="AI_CPU")),
        (OTHER, kernel("OddCube", core="AI_CORE")),
        ("ep", kernel("hcom_alltoallv_", core="HCCL")),
        ("pipeline", kernel("hcom_receive_", name="hcom_receive__101_0_1", core="HCCL")),
        ("tp", kernel("hcom_allGather_", core="HCCL", ranks=tuple(range(8, 16)))),
        ("data", kernel("hcom_reduceScatter_", core="HCCL", ranks=(3, 11, 19, 27))),
        (OTHER, kernel("hcom_allReduce_", core="HCCL")),
    ],
)
def test_a_kernel_has_its_term(wanted, found):
    assert term_of(found, CONFIG) == wanted


@pytest.mark.parametrize(
    ("wanted", "ranks", "change"),
    [
        ("ep", (19, 27), {}),
        ("data", (19, 27), {"ep_mode": "deduplicated"}),  # which sends rows by All-to-All only
        ("data", (11, 19), {}),  # of two EP groups
        ("data", (16, 20, 24, 28), {}),  # tp 4: copies of a weight may have the same ranks
        ("ep", (16, 20, 24, 28), {"name": LAYER + "mlp-MoELayer/experts-RoutedExperts/AllGather-op1"}),
    ],
)
def test_the_gather_between_the_nodes_of_an_ep_group_is_of_experts(wanted, ranks, change):
    config = replace(CONFIG, dp=16, tp=4, cp=1, ep=16, ep_mode=change.get("ep_mode", "hierarchical"))
    gather = kernel("hcom_allGather_", name=change.get("name", "hcom_allGather__123_0_1"), core="HCCL", ranks=ranks)
    assert term_of(gather, config) == wanted


@pytest.mark.parametrize(
    ("wanted", "kind"), [("data", "allReduce"), ("ep", "reduceScatter"), ("ep", "allGather"), ("data", "broadcast")]
)
def test_between_nodes_a_hierarchical_dispatch_only_gathers_and_scatters(wanted, kind):
    """With 4 shards of an optimizer and tp 2, the copies of a weight lie 8 ranks apart, too."""
    config = replace(CONFIG, dp=16, tp=2, cp=1, ep=32, ep_mode="hierarchical")
    assert term_of(kernel(f"hcom_{kind}_", core="HCCL", ranks=(0, 8, 16, 24)), config) == wanted


def test_a_group_that_only_one_kind_of_parallelism_makes_needs_no_ranks():
    alone = replace(CONFIG, dp=1, ep=1, pp=8)
    assert term_of(kernel("hcom_allGather_", core="HCCL"), alone) == "tp"


def test_communication_counts_where_nothing_is_computed():
    found = attribute(
        profile_of(
            kernel("Add", 0.0, 2.0),
            kernel("hcom_allGather_", 1.0, 3.0, core="HCCL", ranks=tuple(range(8))),
            kernel("MatMulV3", 3.0, 2.0, core="AI_CORE"),
            kernel("Unique", 6.0, 0.5, core="AI_CPU"),
            seconds=8.0,
        ),
        CONFIG,
    )
    assert found.terms["elementwise"] == 2.0 and found.terms["matmul"] == 2.0
    assert (found.terms["tp"], found.whole["tp"]) == (1.0, 3.0)
    assert found.unknown == {"Unique": 0.5}
    assert found.terms["host of the step"] == pytest.approx(1.0 + 1.5)
    assert sum(found.terms.values()) == pytest.approx(8.0)


def test_a_gap_belongs_to_what_comes_after_it():
    found = attribute(
        profile_of(
            kernel("Add", 0.0, 1.0, LAYER + "self_attention/Add-op0"),
            kernel("Mul", 3.0, 1.0, LAYER + "mlp-MoELayer/experts-E/Mul-op0"),
            kernel("Mul", 5.0, 1.0, "Mul"),
            kernel("Add", 10.0, 1.0, "Default/optimizer-AdamW/Add-op0"),
            seconds=12.0,
        ),
        CONFIG,
    )
    assert found.scoped
    assert [found.terms[f"host of {name}"] for name in ("layers", "experts", "the step")] == [0.0, 3.0, 5.0]


def test_on_a_cpu_the_optimizer_has_its_own_gaps_and_what_its_operators_were_taken_apart_into():
    def host(kind, start, name):
        return kernel(kind, start, 1.0, name, core="Host")

    kernels = (
        host("Mul", 0.0, "Expand/_SiLU/Mul-op0"),
        host("Add", 2.0, LAYER + "self_attention/Add-op0"),
        host("Square", 6.0, "Default/clip_grad_norm-ClipGradNorm/Square-op0"),
        host("ReduceSum", 8.0, "Expand/_SumExt/ReduceSum-op1"),
        host("Sort", 10.0, "Default/Sort-op0"),
        host("Mul", 12.0, LAYER + "self_attention/Mul-op9"),
        host("Mul", 13.0, "Expand/_SiLU/Mul-op1"),
        host("Mul", 15.0, "Default/network/loss-CrossEntropy/Mul-op0"),
    )
    found = attribute(Profile("x", "CPU", Step(kernels, 16.0), 1), CONFIG).terms
    assert (found["optimizer"], found["elementwise"]) == (2.0, 6.0)
    gaps = {name: found[f"host of {name}"] for name in ("layers", "experts", "the optimizer", "the step")}
    assert gaps == {"layers": 2.0, "experts": 0.0, "the optimizer": 5.0, "the step": 1.0}
    # a device's optimizer is few kernels: its gaps stand in the step's
    device = attribute(profile_of(*kernels, seconds=16.0), CONFIG).terms
    assert (device["host of the optimizer"], device["host of the step"]) == (0.0, 6.0)


def slow(kernels, length):
    """The same by walking over all instants: computing first, then communication; within each the first started."""
    edges = sorted({0.0, length, *(k.start for k in kernels), *(k.start + k.seconds for k in kernels)})
    terms = dict.fromkeys(TERMS, 0.0)
    gaps = 0.0
    for begin, end in pairwise(edges):
        running = [k for k in kernels if k.start <= begin and end <= k.start + k.seconds]
        if running:
            first = min(running, key=lambda k: (communicates(k), kernels.index(k)))
            terms[term_of(first, CONFIG)] += end - begin
        else:
            gaps += end - begin
    return terms, gaps


KINDS = [("Add", "AI_VECTOR_CORE"), ("MatMulV3", "AI_CORE"), ("hcom_alltoallv_", "HCCL"), ("hcom_receive_", "HCCL")]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(0, 60),
)
def test_terms_are_those_of_the_slow_walk(every, length):
    kernels = sorted(
        (kernel(kind, float(a), float(b), core=core) for (kind, core), a, b in every), key=lambda k: k.start
    )
    found = attribute(profile_of(*kernels, seconds=float(length)), CONFIG)
    terms, gaps = slow(kernels, found.seconds)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    assert found.terms["host of the step"] == pytest.approx(gaps)
    computed = ("matmul", "elementwise")
    assert sum(found.terms[t] for t in computed) == pytest.approx(sum(terms[t] for t in computed))
    assert np.isclose(found.terms["ep"] + found.terms["pipeline"], terms["ep"] + terms["pipeline"])
