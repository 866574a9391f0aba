"""This module builds TeleChat3 and TeleChat3-MoE on CPU: it makes MindFormers' GPTModel from a layer spec whose
operators run on CPU.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
from mindformers.models.telechat3.modeling_telechat3_train import TrainingTeleChat3ForCausalLM
from mindformers.models.telechat3.utils import TeleChat3PreTrainedModel
from mindformers.models.telechat3_moe.modeling_telechat3_moe_train import TrainingTeleChat3MoeForCausalLM
from mindformers.models.telechat3_moe.utils import TeleChat3MoePreTrainedModel
from mindformers.parallel_core.training_graph.base_models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from mindformers.parallel_core.training_graph.loss_func import CrossEntropyLoss
from mindformers.parallel_core.training_graph.tensor_parallel.layers import VocabParallelEmbedding
from mindformers.parallel_core.training_graph.transformer.moe.moe_layer import MoELayer
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, context, ops
from mindspore.communication import get_group_size

from plugins.cpu_backend import train_step
from plugins.cpu_backend.attention import compute_unrounded, core_attention
from plugins.cpu_backend.layers import EmbeddingLookup, GroupedExperts, Outer, TopK
from plugins.cpu_backend.train_step import MeanOfSamples, TokensOfARank
from plugins.private_hooks import relies_on
from plugins.telechat3_moe import apply_edits, apply_template, gpt_model

# attributes that `replace_hard_coded` sets: one that is gone would be set all the same, and read by nobody
for _owner, _line in (
    (RotaryEmbedding, "self.outer = Outer()"),
    (RotaryEmbedding, "self.outer_for_eod = Outer()"),
    (VocabParallelEmbedding, "self.embedding_morph = P.Morph("),
    (TopKRouter, "self.topk = TopkExt()"),
    (TopKRouter, "self.afb_topk = TopkExt()"),
    (TopKRouter, "self.tc_topk = TopkExt()"),
    (TopKRouter, "self.dp = config.data_parallel_size"),
    (TopKRouter, "dp_mean_fi = self.reduce_mean_dp(fi.reshape(self.dp, -1), 0)"),
    (TopKRouter, "fi = self.mul_dp(dp_pp_mean_fi, self.ones_dp).reshape(self.dp, -1)"),
    (CrossEntropyLoss, "denominator = self.add2("),
):
    relies_on(_owner, _line)


def on_cpu(layer) -> None:
    """Change a layer's spec in place, so that it names the attention and the experts of the CPU backend."""
    layer.submodules.self_attention.submodules.core_attention = core_attention()
    if layer.submodules.mlp.module is MoELayer:
        layer.submodules.mlp.submodules.experts = GroupedExperts


def build_gpt(config):
    """Return the GPTModel for CPU that a TransformerConfig describes.

    The model is built in stand-alone mode: in data-parallel mode GPTModel would create process groups from
    `data_parallel_size`, which MindFormers' trainer has reset to 1 by then. On CPU the gradient reducer implements data
    parallelism, and needs no process groups.
    """
    mode = context.get_auto_parallel_context("parallel_mode")
    context.set_auto_parallel_context(parallel_mode="stand_alone")
    try:
        model = gpt_model(config, on_cpu)
    finally:
        context.set_auto_parallel_context(parallel_mode=mode)
    replace_hard_coded(model, config)
    apply_edits(model)
    return model


def replace_hard_coded(model, config):
    """Replace, in a built model, the operators that MindFormers' classes create directly, because a layer spec cannot
    change them.
    """
    if model.rotary_pos_emb is not None:
        model.rotary_pos_emb.outer = Outer()
        model.rotary_pos_emb.outer_for_eod = Outer()
    compute_unrounded(model)
    for embedding in cells_of(model, VocabParallelEmbedding):
        embedding.embedding_morph = EmbeddingLookup()
    for router in cells_of(model, TopKRouter):
        router.topk = router.afb_topk = router.tc_topk = TopK()
        if config.moe_router_load_balancing_type == "gbs_aux_loss":  # built for one rank's samples together
            router.reduce_mean_dp = MeanOfSamples(get_group_size() if train_step.distributed() else 1)
    set_rows(model, config.batch_size)
    if train_step.distributed():
        for loss in cells_of(model, CrossEntropyLoss):  # of the last layer, and of MTP's, which has a mask of its own
            loss.add2 = TokensOfARank(get_group_size())


def set_rows(model, rows):
    """Set in each router the number of samples in a rank's batch, before a graph for that batch is compiled.

    The auxiliary loss is computed sample by sample, so that it does not depend on how a batch is split; a router of
    `plugins.group_aux_loss` computes it from the whole batch, of any size.
    """
    for router in cells_of(model, TopKRouter):
        if getattr(router, "takes_batches_whole", False):
            continue
        router.dp = rows
        router.ones_dp = Tensor(np.ones((1, rows, 1), np.float32))


@contextmanager
def of_rows(model, rows):
    """Set the number of samples that each router expects to `rows` until the `with` block ends (see `set_rows`)."""
    before = {router.dp for router in cells_of(model, TopKRouter)}
    set_rows(model, rows)
    try:
        yield
    finally:
        for own in before:  # one number, or none
            set_rows(model, own)


def cells_of(model, kind):
    """Return every cell of the given class in `model`, including the cells of MTP layers."""
    return [cell for _, cell in model.cells_and_names() if isinstance(cell, kind)]


def build(model, parent, config, latent):
    """Build a training model in place; this function replaces the `__init__` of MindFormers' class, which would make a
    GPTModel for Ascend.

    Args:
        parent: MindFormers' class of pre-trained models from which the class inherits.
        latent: whether its attention is multi-head latent attention.
    """
    parent.__init__(model, config, auto_prefix=False)
    transformer_config = model.convert_to_transformer_config(config, is_mla_model=latent)
    model.model = build_gpt(transformer_config)
    apply_template(model, transformer_config)


def average_loads(model):
    """Average each router's counts of tokens per expert over the ranks, because each rank has counted only its own
    tokens.
    """
    if train_step.distributed():
        mean = ops.AllReduce()
        for router in cells_of(model, TopKRouter):
            router.expert_load.set_data(mean(router.expert_load.value() + 0) / get_group_size())


class CpuTrainingTeleChat3Moe(TrainingTeleChat3MoeForCausalLM):
    """This is MindFormers' `TrainingTeleChat3MoeForCausalLM`, built by `build` for CPU: with multi-latent attention,
    with or without experts.
    """

    def __init__(self, config):
        build(self, TeleChat3MoePreTrainedModel, config, latent=True)

    def update_topk_bias(self, gradient_accumulation_steps=1):
        """Update the routers' biases as MindFormers does, but by the experts' loads on all ranks."""
        average_loads(self.model)
        return super().update_topk_bias(gradient_accumulation_steps)


class CpuTrainingTeleChat3(TrainingTeleChat3ForCausalLM):
    """This is MindFormers' `TrainingTeleChat3ForCausalLM`, built by `build` for CPU: with grouped-query attention,
    usually without experts.
    """

    def __init__(self, config):
        build(self, TeleChat3PreTrainedModel, config, latent=False)

    def update_topk_bias(self, gradient_accumulation_steps=1):
        """Update the routers' biases as MindFormers does, but by the experts' loads on all ranks."""
        average_loads(self.model)
        return super().update_topk_bias(gradient_accumulation_steps)


@MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)
class CpuTeleChat3MoeForCausalLM:
    """The CPU backend writes the name of this class into `architectures:` for TeleChat3-MoE; the class supports only
    training.
    """

    def __new__(cls, config, *args, **kwargs):
        """Build the training model."""
        return CpuTrainingTeleChat3Moe(config)


@MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)
class CpuTeleChat3ForCausalLM:
    """The CPU backend writes the name of this class into `architectures:` for TeleChat3 and TeleChat2; the class
    supports only training.
    """

    def __new__(cls, config, *args, **kwargs):
        """Build the training model."""
        return CpuTrainingTeleChat3(config)
