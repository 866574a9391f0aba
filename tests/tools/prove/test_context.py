"""The compiled steps of `ring.yaml` (dense, dp2 x cp2) and `documents.yaml` (the same, but documents do not see each
other): their proofs, and faults that cut sequences make possible.
"""

import re
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
DOCUMENTS = read("documents")


@pytest.mark.parametrize("step", [STEP, DOCUMENTS], ids=["ring", "documents"])
def test_every_weight_of_a_step_with_cut_sequences_is_proven(step):
    found = prove_rank(step[0], typing_of(*step), {})
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


def edited(op, pattern, new):
    """A fault of every rank's graph: what the first operators of a kind have in their text is replaced."""

    def plant(graphs):
        for graph in graphs:
            found = [node for node in root(graph) if node.op == op and re.search(pattern, node.head)]
            assert found
            found[0].head = re.sub(pattern, new, found[0].head)

    return plant


def every_piece_is_the_first(graphs):
    """The next rank along cp counts the ends of documents from the first token, too."""
    place = next(n for n, node in enumerate(root(graphs[0])) if node.op == "Sub" and "dtype=Int64" in node.head)
    for graph in graphs[1:]:
        root(graph)[place].head = root(graphs[0])[place].head


def the_other_list(graphs):
    """Attention is given the ends among the queries for the keys, too."""
    for graph in graphs:
        node = next(node for node in root(graph) if node.op == "FlashAttentionScore")
        ends = re.findall(r"%\d+", node.head)
        node.head = node.head.replace(ends[-1], ends[-2])


ENDS = {
    "the same ends on every rank": (every_piece_is_the_first, "the ends of documents move along no axis"),
    "a shorter piece": (edited("ClipByValue", r"value=4096", "value=2048"), r"among the queries of piece 0, a document "
                        r"that ends at token 2049 ends at 2048 and not at 2049"),
    "the queries' ends for the keys": (the_other_list, r"among the keys of piece 1, a document that ends at token 1 "
                                       r"ends at 0 and not at 1"),
    "keys counted from the first one": (edited("FlashAttentionScore", r"I64\(3\)\)$", "I64(2))"), "from the last key"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ENDS)
def test_faults_of_the_ends_of_documents_are_named(fault):
    result, graph, mesh, peers = DOCUMENTS
    plant, said = ENDS[fault]
    faulty, *others = (copied(each) for each in (graph, *peers.values()))
    plant([faulty, *others])
    found = prove_rank(result, typing_of(result, faulty, mesh, dict(zip(peers, others, strict=True))), {})
    told = [*found.contradictions, *(weight.why for weight in found.weights)]
    assert any(re.search(said, each) for each in told), told[:3]
    assert bool(found.contradictions) == (fault != "keys counted from the first one")
    assert all(weight.verdict == "unknown" for weight in found.weights)
