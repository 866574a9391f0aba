"""This module enables `plugins.output_biases` of a recipe: only those linear layers of a dense model that write into
the residual stream have a bias, as in the public TeleChat2.

MindFormers' key `add_bias_linear` gives a bias to all linear layers. The plugin removes the biases of `linear_qkv` and
`linear_fc1` from a model that is built; their forward pass adds a bias only if the layer has one, so nothing else
changes, with or without sharding. The plugin does not use a layer spec, because a spec would have to name the layers'
class, which `plugins.lora` chooses.
"""

from __future__ import annotations

from mindformers.parallel_core.training_graph.tensor_parallel.layers import ColumnParallelLinear
from mindformers.parallel_core.training_graph.transformer.attention import SelfAttention
from mindformers.parallel_core.training_graph.transformer.mlp import MLP

from plugins import telechat3_moe
from plugins.edited_classes import DENSE
from plugins.output_biases.plan import KEY, read
from plugins.private_hooks import relies_on

for _owner, _line in (
    (SelfAttention, "bias=self.config.add_bias_linear or self.config.add_qkv_bias,"),
    (MLP, "if bias_parallel is not None:"),
    (ColumnParallelLinear, "if not self.skip_bias_add and self.has_bias:"),
    (ColumnParallelLinear, "self.bias = None"),
):
    relies_on(_owner, _line)


def enable(config, settings) -> None:
    """Make models that are built later for `config` (a MindFormerConfig) have biases only on outputs.

    Raises:
        RecipeError: a setting is wrong, or the plugin does not support the model.
    """
    read(settings, config.model.model_config)
    telechat3_moe.use_edited_model(config, KEY, DENSE)
    telechat3_moe.edit_model(KEY, without_input_biases)


def without_input_biases(model) -> None:
    """Remove the biases of `linear_qkv` and `linear_fc1` in each layer of `model` (a GPTModel of dense layers)."""
    for layer in model.decoder.layers:
        for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            del linear.bias
            linear.bias, linear.has_bias = None, False
