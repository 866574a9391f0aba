"""MindFormers' router with the loss over a group of ranks, forward and backward, against NumPy, and NumPy itself."""

import mindspore as ms
import numpy as np
import pytest
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.parallel_core.transformer_config import TransformerConfig
from mindspore import Tensor, nn, ops

from plugins.cpu_backend.layers import TopK
from plugins.cpu_backend.model import set_rows
from plugins.group_aux_loss import adapter, reference

COEFFICIENT, RANKS, TOKENS, EXPERTS, TOP_K = 0.1, 4, 12, 8, 2


@pytest.fixture(scope="module")
def routed():
    """Skewed scores float32 [RANKS, TOKENS, EXPERTS] and the experts chosen, int32."""
    rng = np.random.default_rng(3)
    scores = rng.gamma(np.linspace(0.3, 3, EXPERTS), size=(RANKS, TOKENS, EXPERTS))
    scores = (scores / scores.sum(-1, keepdims=True)).astype(np.float32)
    return scores, np.argsort(-scores, -1)[..., :TOP_K].astype(np.int32)


def router(ranks):
    """MindFormers' own, as it is built for `ranks` data-parallel ranks."""
    config = TransformerConfig(
        num_attention_heads=2, num_layers=2, hidden_size=8, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=COEFFICIENT, seq_length=TOKENS,
        data_parallel_size=ranks, compute_dtype="float32", params_dtype="float32", add_bias_linear=False,
    )  # fmt: skip
    built = TopKRouter(config)
    built.topk = TopK()
    return built


class Shares(nn.Cell):
    """In the place of `GroupMean`: what the AllReduce of the group would return, checked by a training run."""

    def __init__(self, shares):
        super().__init__(auto_prefix=False)
        self.shares = Tensor(shares.reshape(1, 1, -1), ms.float32)

    def construct(self, f, axis):
        return ops.stop_gradient(self.shares + 0.0 * f)


class Loss(nn.Cell):
    def __init__(self, cell):
        super().__init__()
        self.router = cell

    def construct(self, scores, chosen):
        return self.router._expert_load_balancing(scores, chosen, COEFFICIENT)


def loss_and_gradient(cell, scores, chosen):
    """Of a router, for scores [1, N, E]."""
    function = ms.value_and_grad(Loss(cell), grad_position=0)
    loss, gradient = function(Tensor(scores[None]), Tensor(chosen[None]))
    return float(loss.asnumpy()), gradient.asnumpy()[0]


@pytest.mark.usefixtures("graph_mode")
def test_ranks_of_a_group_are_one_process_that_holds_their_tokens(routed):
    together = [array.reshape(RANKS * TOKENS, -1) for array in routed]
    shares = np.mean([reference.shares(rank, EXPERTS) for rank in routed[1]], 0)
    losses, gradients = [], []
    for scores, chosen in zip(*routed, strict=True):
        cell = router(1)
        cell.dp = 3  # sample by sample, as plugins/cpu_backend sets it
        adapter.over_workers(cell, mean=Shares(shares))
        loss, gradient = loss_and_gradient(cell, scores, chosen)
        losses.append(loss)
        gradients.append(gradient / RANKS)
    assert np.mean(losses) == pytest.approx(reference.loss(*together, COEFFICIENT), abs=1e-7)
    np.testing.assert_allclose(np.concatenate(gradients), reference.gradient(*together, COEFFICIENT), atol=1e-8)


@pytest.mark.usefixtures("graph_mode")
def test_a_batch_of_another_size_is_still_taken_whole(routed):
    """`plugins.batch_ramp` tells routers the samples of each of its stages."""
    scores, chosen = routed[0][0], routed[1][0]
    cell = router(1)
    adapter.over_workers(cell)
    set_rows(cell, 3)
    assert loss_and_gradient(cell, scores, chosen)[0] == pytest.approx(
        reference.loss(scores, chosen, COEFFICIENT), abs=1e-7
    )


@pytest.mark.usefixtures("graph_mode")
def test_one_worker_has_mindformers_own_formula_over_all_tokens(routed):
    together = [array.reshape(RANKS * TOKENS, -1) for array in routed]
    stock, ours = router(1), router(1)
    ours.dp = 3
    adapter.over_workers(ours)
    loss, gradient = loss_and_gradient(stock, *together)
    assert loss_and_gradient(ours, *together)[0] == loss
    assert loss == pytest.approx(reference.loss(*together, COEFFICIENT), abs=1e-7)
    np.testing.assert_allclose(gradient, reference.gradient(*together, COEFFICIENT), atol=1e-8)


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_sharded_graph_averages_over_each_group(ranks, routed):
    """All ranks' tokens in one tensor, as semi-auto parallel writes it: two groups of two are two losses."""
    scores, chosen = (array.reshape(RANKS * TOKENS, -1) for array in routed)
    cell = router(RANKS)
    adapter.over_ranks(cell, ranks)
    loss, gradient = loss_and_gradient(cell, scores, chosen)
    groups = RANKS // ranks
    cut = list(zip(np.split(scores, groups), np.split(chosen, groups), strict=True))
    assert loss == pytest.approx(np.mean([reference.loss(*group, COEFFICIENT) for group in cut]), abs=1e-7)
    expected = np.concatenate([reference.gradient(*group, COEFFICIENT) for group in cut]) / groups
    np.testing.assert_allclose(gradient, expected, atol=1e-8)


@pytest.fixture
def routed_in_float64():
    """Skewed scores [RANKS, TOKENS, EXPERTS] and the experts chosen."""
    rng = np.random.default_rng(3)
    scores = rng.gamma(np.linspace(0.3, 3, EXPERTS), size=(RANKS, TOKENS, EXPERTS))
    scores /= scores.sum(-1, keepdims=True)
    return scores, np.argsort(-scores, -1)[..., :TOP_K]


def test_the_gradient_is_that_of_differences(routed_in_float64):
    scores, chosen = (array.reshape(RANKS * TOKENS, -1) for array in routed_in_float64)
    found = reference.gradient(scores, chosen, COEFFICIENT)
    for token, expert in [(0, 0), (7, 3), (40, 7)]:
        moved = scores.copy()
        moved[token, expert] += 1e-6
        change = reference.loss(moved, chosen, COEFFICIENT) - reference.loss(scores, chosen, COEFFICIENT)
        assert change / 1e-6 == pytest.approx(found[token, expert], rel=1e-5)


def test_the_mean_over_ranks_with_the_groups_shares_is_the_loss_of_one_process(routed_in_float64):
    scores, chosen = routed_in_float64
    shares = np.mean([reference.shares(rank, EXPERTS) for rank in chosen], 0)
    by_rank = [COEFFICIENT * EXPERTS * np.sum(shares * rank.mean(0)) for rank in scores]
    together = [array.reshape(RANKS * TOKENS, -1) for array in routed_in_float64]
    assert np.mean(by_rank) == pytest.approx(reference.loss(*together, COEFFICIENT), abs=1e-15)
    alone = [reference.loss(*rank, COEFFICIENT) for rank in zip(scores, chosen, strict=True)]
    assert abs(np.mean(alone) - np.mean(by_rank)) > 1e-4, "ranks that balance by themselves have another loss"


def test_balanced_choices_cost_the_coefficient():
    chosen = np.arange(EXPERTS).reshape(-1, 1)
    assert reference.loss(np.full((EXPERTS, EXPERTS), 1 / EXPERTS), chosen, COEFFICIENT) == pytest.approx(COEFFICIENT)
