"""TeleChat3-MoE on CPU: MindFormers' GPTModel from a layer spec whose leaves run on CPU."""

from __future__ import annotations

from mindformers.models.telechat3_moe.modeling_telechat3_moe_train import TrainingTeleChat3MoeForCausalLM
from mindformers.models.telechat3_moe.utils import TeleChat3MoePreTrainedModel
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.training_graph.tensor_parallel.layers import VocabParallelEmbedding
from mindformers.parallel_core.training_graph.transformer.moe.moe_layer import MoELayer
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import context, ops
from mindspore.communication import get_group_size

from plugins.cpu_backend import world
from plugins.cpu_backend.attention import CoreAttention
from plugins.cpu_backend.experts import GroupedExperts
from plugins.cpu_backend.operators import EmbeddingLookup, Outer, TopK


def on_cpu(block_spec):
    """Point a decoder block's spec at the CPU attention and experts (in place); returns it."""
    for layer in {id(spec): spec for spec in block_spec.layer_specs}.values():
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
        if layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.experts = GroupedExperts
    return block_spec


def build_gpt(config):
    """GPTModel for a TransformerConfig.

    It is built in stand-alone mode: in data-parallel mode GPTModel would create process groups from
    `data_parallel_size`, which MindFormers' trainer has reset to 1 by then. Data parallelism on CPU lives in
    the gradient reducer and needs no groups.
    """
    block = on_cpu(get_gpt_decoder_block_spec(config))
    mtp = get_gpt_mtp_block_spec(config, block) if config.mtp_num_layers else None
    mode = context.get_auto_parallel_context("parallel_mode")
    context.set_auto_parallel_context(parallel_mode="stand_alone")
    try:
        model = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=1.0,
            rotary_base=config.rotary_base,
            rope_scaling=False,
            mtp_block_spec=mtp,
        )
    finally:
        context.set_auto_parallel_context(parallel_mode=mode)
    replace_hard_coded(model, config)
    return model


def replace_hard_coded(model, config):
    """Swap operators that MindFormers builds by name, where no spec reaches (on the instances, after the build)."""
    if model.rotary_pos_emb is not None:
        model.rotary_pos_emb.outer = Outer()
        model.rotary_pos_emb.outer_for_eod = Outer()
    for embedding in cells_of(model, VocabParallelEmbedding):
        embedding.embedding_morph = EmbeddingLookup()
    for router in cells_of(model, TopKRouter):
        router.topk = router.afb_topk = router.tc_topk = TopK()
        # the auxiliary loss is taken sample by sample, so that it does not depend on how a batch is split
        router.dp = config.batch_size


def cells_of(model, kind):
    """Every cell of a class in `model`, MTP's included."""
    return [cell for _, cell in model.cells_and_names() if isinstance(cell, kind)]


class CpuTrainingTeleChat3Moe(TrainingTeleChat3MoeForCausalLM):
    """`TrainingTeleChat3MoeForCausalLM` with the layers above."""

    def __init__(self, config):
        # not the parent's: it builds a GPTModel for Ascend
        TeleChat3MoePreTrainedModel.__init__(self, config, auto_prefix=False)
        self.model = build_gpt(self.convert_to_transformer_config(config, is_mla_model=True))

    def update_topk_bias(self, gradient_accumulation_steps=1):
        """As MindFormers, with the expert load averaged over the ranks: each has seen its own tokens only."""
        if world.distributed():
            mean = ops.AllReduce()
            for router in cells_of(self.model, TopKRouter):
                router.expert_load.set_data(mean(router.expert_load.value() + 0) / get_group_size())
        return super().update_topk_bias(gradient_accumulation_steps)


@MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)
class CpuTeleChat3MoeForCausalLM:
    """What `architectures:` names on CPU (train only)."""

    def __new__(cls, config, *args, **kwargs):
        """Build the training model."""
        return CpuTrainingTeleChat3Moe(config)
