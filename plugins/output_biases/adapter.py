"""This module enables `plugins.output_biases` of a recipe: of a dense model's linear layers only those that write into
the residual stream have a bias, as in the public TeleChat2.

`add_bias_linear` gives all of them one. The plugin builds `linear_qkv` and `linear_fc1` from MindFormers' own class
without it; their forward pass adds a bias only if the layer has one, so that nothing else changes, sharded or not.
"""

from __future__ import annotations

from mindformers.parallel_core.training_graph.tensor_parallel.layers import ColumnParallelLinear
from mindformers.parallel_core.training_graph.transformer.attention import SelfAttention
from mindformers.parallel_core.training_graph.transformer.mlp import MLP

from plugins import telechat3_moe
from plugins.output_biases.plan import KEY, read
from plugins.private_hooks import relies_on
from plugins.semi_auto_cpu.chosen import chosen

for _owner, _line in (
    (SelfAttention, "bias=self.config.add_bias_linear or self.config.add_qkv_bias,"),
    (MLP, "if bias_parallel is not None:"),
    (ColumnParallelLinear, "if not self.skip_bias_add and self.has_bias:"),
):
    relies_on(_owner, _line)


class WithoutBias(ColumnParallelLinear):
    """This is `ColumnParallelLinear` without a bias, whatever the model's `add_bias_linear` says."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "bias": False})


def enable(config, settings) -> None:
    """Build models later with biases on outputs only, for `config` (a MindFormerConfig).

    Raises:
        RecipeError: a setting, or another model.
    """
    model_config = config.model.model_config
    read(settings, model_config)
    if config.context.device_target != "CPU" or chosen(config):
        telechat3_moe.use_edited_model(model_config, KEY, telechat3_moe.DENSE)
    telechat3_moe.edit_layers(KEY, without_input_biases)


def without_input_biases(layers) -> None:
    """Change the specs of dense layers (ModuleSpecs of TransformerLayer) in place."""
    for layer in layers:
        layer.submodules.self_attention.submodules.linear_qkv = WithoutBias
        layer.submodules.mlp.submodules.linear_fc1 = WithoutBias
