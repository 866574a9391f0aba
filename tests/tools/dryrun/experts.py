"""An experts class as a plugin would bring one: a collective with a gradient of its own inside the Morph."""

from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM
from mindspore import nn, ops


class GroupSum(nn.Cell):
    """AllReduce whose gradient is AllGather + sum, so that one can tell whose gradient was compiled."""

    def __init__(self, group, branch):
        super().__init__()
        self.reduce = ops.AllReduce(group=group).add_prim_attr("parallel_branch", branch)
        self.gather = ops.AllGather(group=group)

    def construct(self, x):
        return self.reduce(x)

    def bprop(self, x, out, dout):
        return (ops.reshape(self.gather(dout), (-1,) + x.shape).sum(axis=0),)


class SummingExperts(FFNGroupedGEMM):
    """FFNGroupedGEMM of tokens that are summed over the EP group first (nonsense, but compiled)."""

    def __init__(self, config, branch):
        super().__init__(config)
        self.group_sum = GroupSum(self.token_dispatcher.ep_group, branch)

    def forward_func(self, tokens, probs, routing_map, w1, w2, num_tokens_per_expert=None):
        w1 = self.reshape(w1, (-1, self.hidden_size, self.moe_ffn_hidden_size * 2))
        w2 = self.reshape(w2, (-1, self.moe_ffn_hidden_size, self.hidden_size))
        dispatched, ends, ctx = self.token_dispatcher.token_permutation(
            self.group_sum(tokens), probs, routing_map, num_tokens_per_expert
        )
        return self.token_dispatcher.token_unpermutation(self.experts_forward(dispatched, ends, w1, w2), ctx)
