"""The compiled step of `ring.yaml` (dense, dp2 x cp2): its proof, and faults that cut sequences make possible."""

from collections import Counter

import pytest

from benchmarks.planted_spreads import (
    DOUBTED,
    ELSEWHERE,
    NAMED,
    copied,
    other_group,
    outcome,
    root,
    same_everywhere,
    scoped,
)
from tests.tools.prove.renew import read
from tools.dryrun.collectives import generated_groups
from tools.prove.report import prove_rank, ranks_of, typing_of

STEP = read("ring")


def test_every_weight_of_a_step_with_cut_sequences_is_proven():
    found = prove_rank(STEP[0], typing_of(*STEP), {})
    assert not found.contradictions and not found.missing and found.typed == found.asked > 1200
    assert Counter(weight.verdict for weight in found.weights) == {"proven": 25}


def differing(op, scope):
    """Operators of a scope with a constant that differs along cp."""
    graph, cp = STEP[1], root(STEP[3]["cp"])
    return [place for place in scoped(graph, op, scope) if cp[place].head != root(graph)[place].head]


FAULTS = {
    "rotary positions start at 0 on every rank": (differing("StridedSlice", "ApplyRotaryPosEmb"), same_everywhere),
    "queries see as many tokens on every rank": (scoped(STEP[1], "FlashAttentionScore", ""), same_everywhere),
    "their gradient, too": (scoped(STEP[1], "FlashAttentionScoreGrad", ""), same_everywhere),
    "the mask starts at the first row on every rank": (differing("StridedSlice", "FlashAttention"), same_everywhere),
    "labels of the first part on every rank": (differing("StridedSlice", "PreprocessLabels"), same_everywhere),
    "keys gathered over another group": (scoped(STEP[1], "AllGather", "FlashAttention"), other_group),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_cut_sequences_are_found(fault):
    result, graph, mesh, peers = STEP
    places, plant = FAULTS[fault]
    assert places
    groups = generated_groups(graph)
    faulty, *others = (copied(each) for each in (graph, *peers.values()))
    plant([faulty, *others], places[0], lambda group: ranks_of(result, mesh.devices)(group) or groups.get(group))
    said = outcome(result, faulty, mesh, dict(zip(peers, others, strict=True)), places[0])
    assert said in ((DOUBTED,) if plant is other_group else (NAMED, ELSEWHERE)), said
