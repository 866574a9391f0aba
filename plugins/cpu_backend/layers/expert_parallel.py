"""Routed experts split over CPU workers: each holds its own experts' weights, and only routed tokens move."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from plugins.cpu_backend.network.exchange import Net, Rows, SparseGroupedMatmul
from plugins.hierarchical_ep.graph.experts import RoutedExperts


class _Share(nn.Cell):
    """A weight whose gradient is divided by the number of workers.

    Each worker's loss is the mean over its own tokens. The reducer averages the gradients of shared weights over the
    workers; an expert's gradient has been added up over all workers' tokens already, and nothing divides it.
    """

    def __init__(self, workers):
        super().__init__(auto_prefix=False)
        self.workers = workers

    def construct(self, weight):
        return weight + 0.0

    def bprop(self, weight, out, dout):
        return (dout / self.workers,)


class CpuRoutedExperts(RoutedExperts):
    """`RoutedExperts` on CPU, data parallel: expert weights are local, and the gradient reducer leaves them alone."""

    def __init__(self, config, settings):
        super().__init__(config, settings, Net(settings.ranks), Rows(), streams=1)
        self.matmul = SparseGroupedMatmul()
        self.share = _Share(settings.topology.ep)
        first, end = settings.topology.expert_bounds[settings.rank : settings.rank + 2]
        # all experts are built first: the same random numbers as in one process
        for name in ("weight1", "weight2"):
            setattr(self, name, _part(getattr(self, name), first, end, self.num_local_experts))

    def forward_func(self, tokens, probs, routing_map, w1, w2, num_tokens_per_expert=None):
        """As the parent's."""
        return self.routed(tokens, probs, routing_map, self.share(w1), self.share(w2))

    def experts_forward(self, permuted_local_hidden_states, tokens_per_expert, w1, w2):
        """SwiGLU: rows [R, h] sorted by expert, cumulative counts [E], w1 [E, h, 2H], w2 [E, H, h] -> [R, h]."""
        gate, up = ops.chunk(self.matmul(permuted_local_hidden_states, w1, tokens_per_expert), 2, -1)
        return self.matmul(gate * ops.sigmoid(gate) * up, w2, tokens_per_expert)


def _part(weight, first, end, experts):
    """Experts first .. end - 1 of a weight [experts * n, ...], as a parameter of this worker alone."""
    value = weight.asnumpy().reshape(experts, -1, weight.shape[-1])[first:end]
    value = np.ascontiguousarray(value.reshape(-1, weight.shape[-1]))
    return Parameter(Tensor(value, ms.float32), name=weight.name, layerwise_parallel=True)
