"""Faults by an author who had not read the rules are planted in the compiled steps that the tests keep."""

import pytest

from benchmarks.blind_spreads import FAULTS, Compiled, Steps, load_undivided, said
from benchmarks.planted_spreads import DOUBTED, ELSEWHERE, NAMED, SILENT, copied
from tests.tools.prove.renew import read
from tests.tools.prove.test_spread import SIZES
from tools.dryrun.graph_text import Node
from tools.prove.call import Call
from tools.prove.spread import Certain, NotKnown
from tools.prove.typing import Peers

STEPS = {name: Steps([Compiled(*read(name))], 1) for name in ("dense", "experts", "ring")}
SAID = {  # what is said of a fault, where it is not named
    "whole_gradient_summed": ELSEWHERE,
    "rows_stay_in_backward": ELSEWHERE,
    "mean_of_own_tokens": ELSEWHERE,
    "balance_not_summed_back": DOUBTED,
    "load_undivided": SILENT,  # it decides the experts' bias and changes no gradient
}
PLACES = {"dense": 14, "experts": 9, "ring": 8}  # faults for which a step has a place


@pytest.mark.parametrize("step", STEPS)
def test_faults_by_somebody_who_did_not_know_the_rules(step):
    assert STEPS[step].report()["problems"] == []
    found = {}
    for fault in FAULTS:
        if step == "experts" and next(STEPS["dense"].faulty(fault), None):  # planted there
            continue
        for operator, faulty in STEPS[step].faulty(fault):
            found[fault.__name__] = said(faulty.report(), operator)
    wanted = {**SAID, "mean_of_own_tokens": NAMED} if step == "ring" else SAID
    assert found == {name: wanted.get(name, NAMED) for name in found}
    assert len(found) == PLACES[step]


def test_only_a_fault_without_a_gradient_is_silent():
    assert [name for name, word in SAID.items() if word == SILENT] == [load_undivided.__name__]


def call_of(first, steps):
    """An operator whose constant (1, 0) differs along axes a (outer, 2 ranks) and b (3 ranks)."""
    node = Node("Sub", "Sub(%0, I64(0))", "", [], types=("()", "()"))
    return Call(node, 0, (), SIZES, {(1, 0): frozenset(steps)}, offsets={(1, 0): (first, steps)})


def test_a_rank_starts_where_its_own_piece_starts():
    """Of six pieces of four elements, for every order of the ranks: only their own is right."""
    assert call_of(0, {"a": 12, "b": 4}).own_pieces((1, 0), 4) == ("a", "b")
    assert call_of(0, {"b": 8, "a": 4}).own_pieces((1, 0), 4) == ("b", "a")
    assert call_of(0, {"b": 4}).own_pieces((1, 0)) == ("b",)
    for first, steps in ((4, {"b": -4}), (0, {"b": 8}), (4, {"b": 4}), (0, {"a": 4, "b": 4}), (0, {"a": 8, "b": 4})):
        with pytest.raises(Certain, match="its own piece"):
            call_of(first, steps).own_pieces((1, 0), 4)
    with pytest.raises(NotKnown, match="no pieces of 4"):
        call_of(1, {"b": 4}).own_pieces((1, 0), 4)
    with pytest.raises(NotKnown, match="not whole numbers"):
        call_of(0, {"b": 4}).own_pieces((2, 0), 4)


def test_a_shift_of_indices_follows_the_order_of_the_ranks():
    """Only the axes of a shifted index are kept, so that pieces in another order than the ranks are not known."""
    assert call_of(0, {"a": 12, "b": 4}).pieces_in_rank_order((1, 0), 4) == {"a", "b"}
    with pytest.raises(NotKnown, match="not the order of the ranks"):
        call_of(0, {"b": 8, "a": 4}).pieces_in_rank_order((1, 0), 4)


def test_where_the_compiled_rank_lies_is_taken_off():
    """The second rank along tp has 1024 and the third 2048: the first one has 0."""
    _, graph, _, peers = read("dense")
    graph, peers = copied(graph), {"tp": copied(peers["tp"])}
    number = next(n for n, node in enumerate(graph.graphs[graph.root]) if node.op == "Sub")
    third = peers["tp"].graphs[graph.root][number]
    graph.graphs[graph.root][number].head, third.head = third.head, third.head.replace("1024", "2048")
    at_second = Peers(graph, {"tp": peers["tp"]}, {"tp": 1})
    assert at_second.offsets(graph.root, number) == {(1, 0): (0, {"tp": 1024})}
