"""This module builds MindFormers' routed experts with this plugin's token dispatch (hook: `MoESubmodules.experts`)."""

from __future__ import annotations

from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM
from mindspore import ops

from plugins.hierarchical_ep.dispatcher import UNCUT, Dispatcher, RoutedLayer, cut
from plugins.hierarchical_ep.settings import Part, check_room


class RoutedExperts(FFNGroupedGEMM):
    """This is MindFormers' `FFNGroupedGEMM`, except that the function in its operator `Morph` runs this plugin's
    `RoutedLayer`.

    Args:
        config: TransformerConfig.
        settings: see `Part`.
        net, rows: the device's collectives (of this rank's EP group) and row operations.
        streams: see `RoutedLayer`.

    Raises:
        RecipeError: a rank may receive more rows than the device can sort, see `check_room`.
    """

    def __init__(self, config, settings: Part, net, rows, streams):
        super().__init__(config)
        slices = settings.slices(config)
        check_room(settings.mode, settings.topology, max(map(len, slices)), config.moe_router_topk, rows)
        dispatchers = [
            Dispatcher(
                settings.mode,
                settings.topology,
                settings.rank,
                config.hidden_size,
                config.moe_router_topk,
                net,
                rows,
                config.use_pad_tokens,
            )
            for _ in slices
        ]
        pieces, whole = cut(slices)
        order = settings.order(len(slices)) if len(slices) > 1 else UNCUT
        self.layer = RoutedLayer(dispatchers, pieces, whole, order, self.experts_forward, rows, streams)

    def forward_func(self, tokens, probs, routing_map, w1, w2, num_tokens_per_expert=None):
        """Return the experts' output for the tokens of one rank; the operator `Morph` runs this function.

        Args:
            tokens: [1, N, h].
            probs: [1, N, k].
            routing_map: int [1, N, k], the chosen experts.
            w1: [E_local * h, 2H], gate then up.
            w2: [E_local * H, h].
            num_tokens_per_expert: not used (expert relocation is refused with this plugin).

        Returns:
            [1, N, h].
        """
        return self.routed(tokens, probs, routing_map, w1, w2)

    def routed(self, tokens, probs, routing_map, w1, w2):
        """Compute the same output as `forward_func`. Subclasses call this method instead of `super().forward_func`,
        because in a graph MindSpore resolves `super()` by the object's own class, and would call the wrong method.
        """
        hidden, top_k = tokens.shape[2], probs.shape[2]
        w1 = ops.reshape(w1, (-1, hidden, 2 * self.moe_ffn_hidden_size))
        w2 = ops.reshape(w2, (-1, self.moe_ffn_hidden_size, hidden))
        probs, ids = ops.reshape(probs, (-1, top_k)), ops.reshape(routing_map, (-1, top_k))
        out = self.layer(ops.reshape(tokens, (-1, hidden)), probs, ids, w1, w2)
        return ops.reshape(out, tokens.shape)
