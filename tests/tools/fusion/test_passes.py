"""The model against the passes of MindSpore: graphs and answers that are committed, and a few asked for anew."""

from dataclasses import replace
from functools import cache

import pytest

from plugins.operator_fusion.operators import VECTOR
from tests.tools.fusion import answers, random_graphs, renew
from tools.fusion.cluster import clusters
from tools.fusion.rules import CPU
from tools.fusion.split import kernels
from tools.fusion.support import refusal

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
    """What is committed is not of another MindSpore; mend with python -m tests.tools.fusion.renew"""
    committed = read("random.jsonl.gz")
    seeds = (0, 1, 2, 39, 118, random_graphs.LONG, random_graphs.KNOTS, random_graphs.CHAINS)
    assert renew.of_seeds(seeds, tmp_path) == {seed: committed[seed] for seed in seeds}
