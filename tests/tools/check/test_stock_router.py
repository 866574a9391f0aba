"""MindFormers' router with groups of experts: the fault that `tc3 check` notes, by execution, against NumPy."""

import numpy as np
import pytest
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.parallel_core.transformer_config import TransformerConfig
from mindspore import Tensor, nn

from plugins.cpu_backend.layers import TopK

TOKENS, EXPERTS, GROUPS, TOP_K = 4096, 8, 2, 2


class Choices(nn.Cell):
    """The experts that a router chooses for its logits."""

    def __init__(self, router):
        super().__init__()
        self.router = router

    def construct(self, logits):
        return self.router.routing(logits)[1]


@pytest.fixture(scope="module")
def router():
    """MindFormers' router. A token chooses one group."""
    built = TopKRouter(TransformerConfig(
        num_attention_heads=2, num_layers=2, hidden_size=16, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_router_num_groups=GROUPS, moe_router_group_topk=1, moe_router_score_function="sigmoid", seq_length=TOKENS,
        moe_router_topk_scaling_factor=1.0, moe_router_enable_expert_bias=True, compute_dtype="float32",
        moe_router_load_balancing_type="seq_aux_loss", params_dtype="float32", add_bias_linear=False,
    ))  # fmt: skip
    built.topk = built.afb_topk = built.tc_topk = TopK()
    return built


def outside(router, bias):
    """The share of choices outside the token's group, as MindFormers executes it and as NumPy predicts it of a mask
    that is 0.

    The bias is that of all experts.
    """
    logits = np.random.default_rng(0).standard_normal((TOKENS, EXPERTS)).astype(np.float32)
    router.expert_bias.set_data(Tensor(np.full(EXPERTS, bias, np.float32)))
    chosen = Choices(router)(Tensor(logits[None])).asnumpy()[0]
    scores = 1 / (1 + np.exp(-logits)) + np.float32(bias)
    best = np.sort(scores.reshape(TOKENS, GROUPS, -1), -1)[..., -TOP_K:]
    group = np.arange(EXPERTS) // (EXPERTS // GROUPS)
    allowed = group == best.sum(-1).argmax(-1)[:, None]
    predicted = np.argsort(-np.where(allowed, scores, 0), -1, kind="stable")[:, :TOP_K]
    return tuple(float(np.mean(~np.take_along_axis(allowed, which, 1))) for which in (chosen, predicted))


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize(("bias", "share"), [(0.0, 0.0), (-0.25, 0.0004), (-0.5, 0.064), (-0.75, 0.588), (-1.0, 1.0)])
def test_a_low_bias_lets_forbidden_groups_in(router, bias, share):
    executed, predicted = outside(router, bias)
    assert executed == pytest.approx(predicted, abs=1e-4)
    assert executed == pytest.approx(share, abs=5e-4)
