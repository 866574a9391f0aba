"""This module trains with copies of hot experts on data-parallel CPU workers; `copies.py` plans the copies.

A copy of an expert has no optimizer state. In the forward pass `Fetch` fills a worker's spare slots with the weights of
experts whose own slots (homes) are on other workers, and `choose` distributes the tokens of an expert over its slots.
In the backward pass the gradient of a copy is sent to the expert's home and added there, once, to the home's own
gradient; the sum is the gradient of all tokens, as if there were no copy. So the optimizer, the global norm,
checkpoints and `tc3 experts restore-order` use only homes: there is nothing to merge. Losses differ from the losses
without copies only by the order in which the rows of a gradient are added up.

Each process knows which copies exist (`take_copies`), but the graph does not, because its operators are host functions:
so copies change without a compilation, and a cached graph can be loaded. After a resume the callback reads the copies
from the record of the run's loads.
"""

from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from plugins.cpu_backend import host_functions, transport
from plugins.cpu_backend.expert_parallel import CpuRoutedExperts
from plugins.expert_balance.copies import Table, added_up, none, with_copies
from plugins.expert_balance.placed import placement

_TAG = 1 << 41  # above those of dispatches and of moves
# of layers and operators: each rank, and each start of a run, builds them in one order
_numbers, _tags = itertools.count(), itertools.count(_TAG)
_tables: dict[int, Table] = {}  # by layer


def _fetching(group, layer, each, spare):
    there, back = next(_tags), next(_tags)

    def fetch(own):
        return with_copies(own, _tables[layer], transport.mesh(), group, there)

    def give(gradient):
        return added_up(gradient, _tables[layer], transport.mesh(), group, back)

    def more(shape):
        return [shape[0] // each * (each + spare), shape[1]]

    def fewer(shape):
        return [shape[0] // (each + spare) * each, shape[1]]

    return host_functions.operator(fetch, more), host_functions.operator(give, fewer)


class Fetch(nn.Cell):
    """This operator fetches the expert weights of all slots of a worker, including slots of copies; its backward pass
    adds the gradients of copies to those of the originals.

    All workers must start the exchanges of a layer in the same order: weights before the tokens are dispatched,
    gradients after the dispatch has brought the gradients of the tokens back. So the tokens and their gradient pass
    through this operator and wait for the exchange.
    """

    def __init__(self, group, layer, each, spare):
        super().__init__(auto_prefix=False)
        self.there1, self.back1 = _fetching(group, layer, each, spare)
        self.there2, self.back2 = _fetching(group, layer, each, spare)

    def construct(self, tokens, w1, w2):
        """Return the tokens unchanged, and both weight tensors for all slots of this worker: a weight [E / D x rows,
        width] becomes [(E / D + spare) x rows, width].
        """
        w1 = self.there1(ops.depend(w1, tokens))
        w2 = self.there2(ops.depend(w2, w1))
        return ops.depend(tokens, w2), w1, w2

    def bprop(self, tokens, w1, w2, out, dout):
        """Return the gradients of the tokens and of the weights of this worker's own experts."""
        dtokens, dw1, dw2 = dout
        dw2 = self.back2(ops.depend(dw2, dtokens))
        dw1 = self.back1(ops.depend(dw1, dw2))
        return ops.depend(dtokens, dw1), dw1, dw2


class Choose(nn.Cell):
    """This operator chooses, for each token of an expert, the slot (the expert's own or a copy) that computes it."""

    def __init__(self, layer, rank):
        super().__init__(auto_prefix=False)

        def choose(homes):
            return _tables[layer].choose(homes, rank)

        def same(shape):
            return shape

        self.slots = host_functions.operator(choose, same)

    def construct(self, homes):
        """Return for each pair of a token and an expert the slot that computes the pair, as int32 in the shape of
        `homes`. `homes` (int32) holds the slot of each pair's expert that is not a copy.
        """
        return self.slots(homes)

    def bprop(self, homes, out, dout):
        """Return a zero gradient, because slot numbers have none."""
        return (ops.zeros_like(homes),)


class CopiedRoutedExperts(CpuRoutedExperts):
    """A `CopiedRoutedExperts` is MindFormers' `RoutedExperts` with experts on several workers, placed as the
    `placement` parameter says, and copies in `spare` additional slots of each worker.
    """

    def __init__(self, config, settings, spare):
        super().__init__(config, settings, spare)
        devices = settings.topology.ep
        self.placement = placement(config.num_moe_experts)
        self.slot_of = ops.Gather()
        self.layer_number, self.devices = next(_numbers), devices
        each, group = config.num_moe_experts // devices, tuple(map(int, settings.ranks))
        self.choose = Choose(self.layer_number, int(settings.rank))
        self.fetch = Fetch(group, self.layer_number, each, spare)
        self.take_copies(np.arange(config.num_moe_experts), none(1, devices, spare)[0])

    def take_copies(self, slots, copies):
        """Use the given placement and the given copies of experts from the next step on.

        Args:
            slots: int [E], the placement.
            copies: int [D x spare], as in `plugins.expert_balance.copies`.
        """
        _tables[self.layer_number] = Table(slots, copies, self.devices)

    def construct(self, tokens, probs, routing_map):
        """Return the experts' outputs [1, N, h] for tokens [1, N, h], probs [1, N, k] and routing_map int32 [1, N, k]
        of logical experts.
        """
        homes = ops.cast(self.slot_of(self.placement, routing_map, 0), ms.int32)
        return super().construct(tokens, probs, self.choose(homes))

    def forward_func(self, tokens, probs, routing_map, w1, w2, num_tokens_per_expert=None):
        """Compute the same output as the parent's `forward_func`, but with the weights of all slots, including
        copies.
        """
        tokens, w1, w2 = self.fetch(tokens, self.share(w1), self.share(w2))
        return self.routed(tokens, probs, routing_map, w1, w2)
