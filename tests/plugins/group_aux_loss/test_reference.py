"""The loss over a group's tokens in NumPy: from shares of the whole group and scores of one rank."""

import numpy as np
import pytest

from plugins.group_aux_loss import reference

COEFFICIENT, RANKS, TOKENS, EXPERTS, TOP_K = 0.1, 4, 12, 8, 2


@pytest.fixture
def routed():
    """Skewed scores [RANKS, TOKENS, EXPERTS] and the experts chosen."""
    rng = np.random.default_rng(3)
    scores = rng.gamma(np.linspace(0.3, 3, EXPERTS), size=(RANKS, TOKENS, EXPERTS))
    scores /= scores.sum(-1, keepdims=True)
    return scores, np.argsort(-scores, -1)[..., :TOP_K]


def test_the_gradient_is_that_of_differences(routed):
    scores, chosen = (array.reshape(RANKS * TOKENS, -1) for array in routed)
    found = reference.gradient(scores, chosen, COEFFICIENT)
    for token, expert in [(0, 0), (7, 3), (40, 7)]:
        moved = scores.copy()
        moved[token, expert] += 1e-6
        change = reference.loss(moved, chosen, COEFFICIENT) - reference.loss(scores, chosen, COEFFICIENT)
        assert change / 1e-6 == pytest.approx(found[token, expert], rel=1e-5)


def test_the_mean_over_ranks_with_the_groups_shares_is_the_loss_of_one_process(routed):
    scores, chosen = routed
    shares = np.mean([reference.shares(rank, EXPERTS) for rank in chosen], 0)
    by_rank = [COEFFICIENT * EXPERTS * np.sum(shares * rank.mean(0)) for rank in scores]
    together = [array.reshape(RANKS * TOKENS, -1) for array in routed]
    assert np.mean(by_rank) == pytest.approx(reference.loss(*together, COEFFICIENT), abs=1e-15)
    alone = [reference.loss(*rank, COEFFICIENT) for rank in zip(scores, chosen, strict=True)]
    assert abs(np.mean(alone) - np.mean(by_rank)) > 1e-4, "ranks that balance by themselves have another loss"


def test_balanced_choices_cost_the_coefficient():
    chosen = np.arange(EXPERTS).reshape(-1, 1)
    assert reference.loss(np.full((EXPERTS, EXPERTS), 1 / EXPERTS), chosen, COEFFICIENT) == pytest.approx(COEFFICIENT)
