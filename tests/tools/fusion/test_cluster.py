"""These tests check properties of clusters and kernels that hold for every graph, and compare the model with the
passes of MindSpore.

Graphs and answers of the passes are committed; a slow test asks for a few anew.
"""

from dataclasses import replace
from functools import cache
from graphlib import TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.operator_fusion.plan import VECTOR
from tests.tools.fusion import answers, random_graphs, renew
from tools.dryrun.graph_text import TensorType, read_graph
from tools.fusion.cluster import CPU, DVM, Operator, Rules, clusters, operators, refusal
from tools.fusion.split import kernels

FULL, ROWS = TensorType("Float32", (4, 8)), TensorType("Float32", (4, 1))


@st.composite
def graphs(draw, least=1):
    """Operators of two shapes, each of which takes from up to three before it; Cos is none of DVM's."""
    found = []
    for place in range(draw(st.integers(least, 24))):
        inputs = tuple(sorted(draw(st.sets(st.integers(0, place - 1), max_size=3)))) if place else ()
        takes = tuple(found[each].output for each in inputs)
        if takes and draw(st.integers(0, 5)) == 0:
            found.append(Operator("ReduceSum", ROWS, inputs[:1], takes[:1]))
        else:
            output = FULL if FULL in takes or not takes else ROWS
            found.append(Operator(draw(st.sampled_from(["Add", "Exp", "Transpose", "Cos"])), output, inputs, takes))
    return found


def in_circles(operators, groups):
    """Raises CycleError where groups, each run as one, would wait for each other."""
    owner = {place: number for number, group in enumerate(groups) for place in group}
    owner = {place: owner.get(place, ("alone", place)) for place in range(len(operators))}
    edges = {group: set() for group in owner.values()}
    for place, operator in enumerate(operators):
        edges[owner[place]] |= {owner[each] for each in operator.inputs} - {owner[place]}
    TopologicalSorter(edges).prepare()


@settings(max_examples=60)
@given(graphs())
def test_clusters_hold_each_operator_that_is_taken_once_and_can_run(found):
    taken = [not refusal(operator) for operator in found]
    groups = clusters(found, taken)
    assert sorted(place for group in groups for place in group) == [place for place, good in enumerate(taken) if good]
    in_circles(found, groups)


@settings(max_examples=60)
@given(graphs(), st.sampled_from([CPU, DVM]), st.integers(1, 30), st.data())
def test_kernels_hold_each_operator_once_and_can_run(found, rules, largest, data):
    used = {each for operator in found for each in operator.inputs}
    kept = set(range(len(found))) - used
    kept |= data.draw(st.sets(st.integers(0, len(found) - 1), max_size=3))
    groups = kernels(found, kept, Rules(**{**vars(rules), "largest": largest}))
    assert sorted(place for group in groups for place in group) == list(range(len(found)))
    assert max(map(len, groups)) <= largest
    in_circles(found, groups)


def test_a_path_through_another_operator_parts_two():
    """exp -> cos -> add and exp -> add: the sum waits for cos, which waits for exp."""
    found = [
        Operator("Exp", FULL, (), (FULL,)),
        Operator("Cos", FULL, (0,), (FULL,)),
        Operator("Add", FULL, (0, 1), (FULL, FULL)),
    ]
    taken = [True, False, True]
    assert clusters(found, taken) == [[0], [2]]
    assert clusters(found, taken, Rules(convex=False)) == [[0, 2]]


def test_a_reduction_ends_a_kernel_and_takes_in_what_it_sums():
    """exp -> sum -> div, and exp -> div: the division runs over what the reduction gives, in a kernel of its own."""
    found = [
        Operator("Exp", FULL, (), (FULL,)),
        Operator("ReduceSum", ROWS, (0,), (FULL,)),
        Operator("Div", FULL, (0, 1), (FULL, ROWS)),
    ]
    assert clusters(found, [True] * 3) == [[0, 1, 2]]
    assert kernels(found, {2}) == [[0, 1], [2]]


BF16, INT64, BOOL = (TensorType(dtype, (4, 8)) for dtype in ("BFloat16", "Int64", "Bool"))


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        (Operator("Add", FULL, (), (FULL, FULL)), ""),
        (Operator("Add", BF16, (), (BF16, BF16)), ""),
        (Operator("Exp", FULL, (), (FULL,)), ""),
        (Operator("", FULL, opened=True), ""),
        (Operator("Cos", FULL, (), (FULL,)), "Cos is not fused at this level"),
        (Operator("MatMul", BF16, (), (BF16, BF16)), "MatMul is not fused at this level"),
        (Operator("Add", INT64, (), (INT64, INT64)), "gives Int64"),
        (Operator("Cast", FULL, (), (INT64,)), "takes Int64"),
        (Operator("Cast", INT64, (), (FULL,)), "gives Int64"),
        (Operator("LogicalAnd", BOOL, (), (BOOL, BOOL)), "gives Bool"),
        (Operator("Greater", BOOL, (), (INT64, INT64)), "takes Int64"),
        (Operator("Transpose", BF16, (), (BF16,)), "gives BFloat16"),
        (Operator("Select", FULL, (), (BOOL, FULL, BF16)), "mixes BFloat16 and Float32"),
        (Operator("ReduceSum", FULL, (), (BF16,)), "takes BFloat16 and gives Float32"),
    ],
    ids=str,
)
def test_what_dvm_refuses_and_why(operator, words):
    assert refusal(operator) == words
    assert refusal(operator, rules=Rules(types=False)) == (words if "level" in words else "")


def test_products_are_taken_where_the_level_lists_them():
    assert refusal(Operator("MatMul", BF16, (), (BF16, BF16)), ["MatMul"]) == ""
    assert refusal(Operator("MatMul", FULL, (), (FULL, FULL)), ["MatMul"]) == "gives Float32"


def test_the_text_of_a_graph_is_read_with_its_edges(tmp_path):
    file = tmp_path / "graph.ir"
    file.write_text(
        "# IR entry: @main\nsubgraph @main() {\n"
        "  %0(a) = PrimFunc_Mul(%para1_x, %para1_x)\n      : (<Tensor[Float32], (4, 8)>, <Tensor[Float32], (4, 8)>) -> "
        "(<Tensor[Float32], (4, 8)>)\n"
        "  %1(b) = call @f(%0)\n      : (<Tensor[Float32], (4, 8)>) -> (<Tensor[Float32], (4, 8)>)\n}\n"
        "subgraph @f(%para2_y) {\n  %0(c) = PrimFunc_Exp(%para2_y)\n"
        "      : (<Tensor[Float32], (4, 8)>) -> (<Tensor[Float32], (4, 8)>)\n}\n"
    )
    text = read_graph(file)
    assert operators(text.graphs["main"]) == [
        Operator("Mul", FULL, (), (FULL, FULL)),
        Operator("", FULL, (0,), (FULL,), opened=True),
    ]


read = cache(answers.read)


def of_model(operators, rules=CPU):
    """The clusters of a graph as the oracle tells them: without virtual operators and opened composites."""
    taken = [not refusal(operator, VECTOR, rules) for operator in operators]
    named = [not operator.virtual and not operator.opened for operator in operators]
    found = [[place for place in group if named[place]] for group in clusters(operators, taken, rules)]
    return sorted(filter(None, found))


def differing(found, rules=CPU):
    """(labels of graphs whose clusters differ, labels of those whose kernels do)."""
    wrong = [label for label, answer in found.items() if of_model(answer.before, rules) != answer.clusters]
    cut = [
        label
        for label, answer in found.items()
        if any(kernels(body, outputs, rules) != known for body, outputs, known in answer.bodies)
    ]
    return wrong, cut


def test_random_graphs_are_clustered_and_split_as_by_mindspore():
    found = read("random.jsonl.gz")
    assert tuple(found) == random_graphs.SEEDS and len(found) > 300
    assert sum(len(answer.clusters) for answer in found.values()) > 400
    assert differing(found) == ([], [])


@pytest.mark.parametrize("name", ["mini", "mini_1119b", "unseen"])
def test_training_graphs_are_clustered_and_split_as_by_mindspore(name):
    found = read(f"{name}.jsonl.gz")
    assert sum(len(answer.clusters) for answer in found.values()) > 20
    assert differing(found) == ([], [])


@pytest.mark.parametrize(
    ("change", "clusters_change"),
    [
        ({"convex": False}, True),
        ({"types": False}, True),
        ({"reduce_depth": 3}, False),
        ({"broadcast_depth": 2}, False),
        ({"broadcast_into_reduce": True}, False),
        ({"largest": 150}, False),
        ({"largest": 100_000}, False),
        ({"chains_of_a_size": False}, False),
        ({"chains_of_users": False}, False),
    ],
    ids=str,
)
def test_every_rule_is_needed(change, clusters_change):
    """With a rule left out, or another number, the same graphs come out otherwise."""
    wrong, cut = differing(read("random.jsonl.gz"), replace(CPU, **change))
    assert bool(wrong) == clusters_change and bool(cut) != clusters_change


@pytest.mark.slow
def test_the_installed_passes_still_answer_so(tmp_path):
    """The stored answers are those of the installed MindSpore; if not, renew them with python -m
    tests.tools.fusion.renew
    """
    committed = read("random.jsonl.gz")
    seeds = (0, 1, 2, 39, 118, random_graphs.LONG, random_graphs.KNOTS, random_graphs.CHAINS)
    assert renew.of_seeds(seeds, tmp_path) == {seed: committed[seed] for seed in seeds}
