"""This module enables `plugins.yarn` of a recipe: MindFormers builds YaRN for a model with grouped-query attention.

MindFormers 1.9.0 chooses a model's positions in GPTModel by name, where no hook reaches (its table of functions in
`rope_utils.py`, `ROPE_FUNCTIONS`, has no reader in the training graph). Two things keep grouped-query attention from
YaRN there:

* The size of a head is read from `qk_pos_emb_head_dim`, which only multi-latent attention has. It is given while the
  model is built. The frequencies, and how they are split over devices, are MindFormers' own.
* Each attention layer multiplies the *angles* by the attention factor, where YaRN multiplies cos and sin. The angles
  are given the factor 1 here, and cos and sin the real one. The product is computed on each device for all positions,
  as cos and sin are; context parallelism takes its positions from it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindformers.parallel_core.training_graph.base_models.common.embeddings.rope_utils import ApplyRotaryPosEmb
from mindformers.parallel_core.training_graph.base_models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
)
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindspore import nn
from mindspore.context import ParallelMode
from mindspore.ops.auto_generate import Muls
from mindspore.parallel._utils import _get_parallel_mode

from plugins import telechat3_moe
from plugins.private_hooks import relies_on
from plugins.yarn.plan import KEY, Yarn, read

for _owner, _line in (
    (GPTModel, "kv_channels=config.qk_pos_emb_head_dim,"),
    (GPTModel, "self.rotary_pos_emb = YarnRotaryEmbedding("),
    (YarnRotaryEmbedding, "return out, self.mscale"),
    (ApplyRotaryPosEmb, "cos_ = self.cast(self.cos(self.mul_mscale(freqs, m_scale)), self.rotary_dtype)"),
    (ApplyRotaryPosEmb, "sin_ = self.cast(self.sin(self.mul_mscale(freqs, m_scale)), self.rotary_dtype)"),
):
    relies_on(_owner, _line)


class Scaled(nn.Cell):
    """A `Scaled` computes an operator, cos or sin, and multiplies the result by a number; the operator is not split
    over devices.
    """

    def __init__(self, operator: Any, factor: float):
        super().__init__(auto_prefix=False)
        self.operator, self.factor = operator, factor
        self.multiply = Muls()
        if _get_parallel_mode() == ParallelMode.SEMI_AUTO_PARALLEL:
            self.multiply.shard(in_strategy=(layout("None", "None", "None", "None"),))

    def construct(self, angles):
        """Return cos or sin of angles [S, B or 1, 1, D] times the factor, in the same shape."""
        return self.multiply(self.operator(angles), self.factor)


def enable(config, settings) -> None:
    """Build models later with YaRN as `config` (a MindFormerConfig) describes it.

    Raises:
        RecipeError: the settings are impossible, the plugin does not support the model, or `rope_scaling` is
            incomplete.
    """
    yarn = read(settings, config.model.model_config)
    telechat3_moe.use_edited_model(config, KEY, telechat3_moe.DENSE)
    telechat3_moe.use_positions(lambda transformer_config: positions(transformer_config, yarn))


@contextmanager
def positions(config, yarn: Yarn) -> Iterator[Any]:
    """Let GPTModel build YaRN from `config` (a TransformerConfig) inside the block. The block yields a function that
    multiplies cos and sin of the built model by the attention factor.
    """
    config.qk_pos_emb_head_dim = config.kv_channels
    try:
        yield lambda model: scale(model, yarn.attention_factor)
    finally:
        del config.qk_pos_emb_head_dim  # the model keeps the config; nothing else may take it for a latent one


def scale(model, factor: float) -> None:
    """Multiply cos and sin of every attention layer of `model` (a GPTModel) by `factor`, and leave the angles
    unchanged.
    """
    model.rotary_pos_emb.mscale = 1.0
    for _, cell in list(model.cells_and_names()):
        if isinstance(cell, ApplyRotaryPosEmb):
            cell.cos, cell.sin = Scaled(cell.cos, factor), Scaled(cell.sin, factor)
