"""This module enables `plugins.group_aux_loss` of a recipe: the auxiliary loss is computed over all tokens of an EP
group, as in Pangu Ultra MoE.

With p the mean of the router's normalised scores over tokens, f the share of choices that falls on an expert, and E
experts, the loss of a layer is coefficient x E x sum(p f). The loss is linear in p, and f has no gradient: so it is
enough to average f over the ranks of the group. The mean of the ranks' losses, and its gradient, then equal those of
one process that holds all the group's tokens.

MindFormers averages f over the tensor-parallel ranks already (`seq_aux_loss`). On Ascend and in sharded runs on CPU the
same two operators average f over more ranks; MindSpore inserts an AllGather of E elements for this. In data-parallel
runs on CPU an AllReduce replaces this average. The formula itself remains that of MindFormers.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.operations import ReduceMean

from plugins import telechat3_moe
from plugins.group_aux_loss import plan as reader
from plugins.private_hooks import relies_on
from plugins.semi_auto_cpu.chosen import chosen, splits_model

# MoELayer builds its router by name: the operators below are replaced on the instance, after the build
for _line in (
    "fi = self.reduce_mean_sp(fi.reshape(self.dp // self.original_tp, self.original_tp, -1), 1)",
    "fi = self.mul_sp(fi, self.ones_sp).reshape(self.dp, -1)",
    "self.reduce_mean_sp.shard(((self.dp // self.original_tp, 1, 1),))",
    "self.mul_sp.shard(((self.dp // self.original_tp, 1, 1), (1, 1, 1)))",
):
    relies_on(TopKRouter, _line)


class GroupMean(nn.Cell):
    """A `GroupMean` computes the mean over all workers of a tensor that has no gradient; it replaces the router's
    `reduce_mean_sp`.
    """

    def __init__(self, workers):
        super().__init__(auto_prefix=False)
        self.workers = workers
        self.sum = ops.AllReduce().recompute(False)

    def construct(self, f, axis):
        """Return the mean over the workers of `f` [1, 1, E], the share of the choices that each expert got on this
        rank. The argument `axis` is ignored.
        """
        return ops.stop_gradient(self.sum(f) / self.workers)


def enable(config, settings) -> None:
    """Make the routers of models that are built later compute the auxiliary loss over the EP group.

    Raises:
        RecipeError: the settings are impossible, the recipe has no auxiliary loss, or the plugin does not support the
            model.
    """
    reader.Settings.read(settings)
    model, parallel = config.model.model_config, config.parallel_config
    split = config.use_parallel and splits_model(config.parallel.parallel_mode)
    ranks = parallel.expert_parallel if config.use_parallel else 1
    reader.check(
        model.get("moe_router_load_balancing_type", reader.DEFAULT_KIND),
        model.get("moe_aux_loss_coeff"),
        ranks,
        parallel.model_parallel if split else 1,
    )
    if config.context.device_target == "CPU" and not chosen(config):
        edit = partial(over_workers, mean=GroupMean(ranks) if ranks > 1 else None)
    else:
        telechat3_moe.use_edited_model(config, reader.KEY)
        edit = partial(over_ranks, ranks=ranks)
    telechat3_moe.edit_routers(reader.KEY, edit)


def over_workers(router, mean=None) -> None:
    """Set up a router of a data-parallel CPU run to compute the auxiliary loss over all tokens of this worker. If
    `mean` (a cell such as `GroupMean`) is given, it averages each expert's share of the choices over the workers.
    """
    router.dp, router.takes_batches_whole = 1, True  # of plugins.batch_ramp, too
    if mean is not None:
        router.reduce_mean_sp = mean


def over_ranks(router, ranks) -> None:
    """Set up a router of a sharded graph to compute the auxiliary loss with each expert's share of the choices averaged
    over the `ranks` consecutive ranks of an EP group (MoeLayoutManager).
    """
    groups = router.dp // ranks
    router.original_tp = ranks
    router.ones_sp = Tensor(np.ones((1, ranks, 1), np.float32), mstype.float32)
    # kept for the backward, [E] numbers: a recomputed layer does not gather them again
    router.reduce_mean_sp = ReduceMean(keep_dims=True).recompute(False)
    router.reduce_mean_sp.shard(((groups, 1, 1),))
    router.mul_sp = ops.Mul()
    router.mul_sp.shard(((groups, 1, 1), (1, 1, 1)))
