"""TeleChat3-MoE with other layers: MindFormers' GPTModel from its own spec, edited before it is built."""

from __future__ import annotations

from typing import Any

from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.training_graph.transformer.moe.moe_layer import MoELayer

_experts: list[Any] = []


def use_experts(spec) -> None:
    """Make `spec` (a ModuleSpec or class, hook: `MoESubmodules.experts`) the routed experts of models built later."""
    _experts[:] = [spec]


def gpt_model(config, edit_layer=None) -> GPTModel:
    """What TrainingTeleChat3MoeForCausalLM builds, from an edited spec.

    Args:
        config: TransformerConfig.
        edit_layer: called with each distinct layer spec, before `use_experts` has its say.
    """
    block = get_gpt_decoder_block_spec(config)
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        if edit_layer is not None:
            edit_layer(layer)
        if _experts and layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.experts = _experts[0]
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type=config.position_embedding_type,
        rotary_percent=1.0,
        rotary_base=config.rotary_base,
        rope_scaling=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, block) if config.mtp_num_layers else None,
    )
