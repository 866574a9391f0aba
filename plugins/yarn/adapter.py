"""This module enables `plugins.yarn` of a recipe, with which MindFormers also builds YaRN's positions for a model with
grouped-query attention.

MindFormers 1.9.0 chooses the type of positions in GPTModel by name, and has no hook to replace it (nothing in the
training graph reads its table of functions, `ROPE_FUNCTIONS` in `rope_utils.py`). Two faults of MindFormers keep
grouped-query attention from YaRN:

* MindFormers reads the size of a head from `qk_pos_emb_head_dim`, which only multi-latent attention has. The plugin
  sets this value while the model is built. The frequencies, and their split over devices, remain those of MindFormers.
* Each attention layer multiplies the *angles* by the attention factor, where YaRN multiplies cos and sin. The plugin
  sets the factor of the angles to 1, and multiplies cos and sin by the real factor. This product is computed on each
  device for all positions, as cos and sin are; context parallelism selects its positions from the result afterwards.
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
from plugins.edited_classes import DENSE
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
    """Make models that are built later have YaRN as `config` (a MindFormerConfig) describes it.

    Raises:
        RecipeError: the settings are impossible, the plugin does not support the model, or `rope_scaling` is
            incomplete.
    """
    yarn = read(settings, config.model.model_config)
    telechat3_moe.use_edited_model(config, KEY, DENSE)
    telechat3_moe.use_positions(lambda transformer_config: positions(transformer_config, yarn))


@contextmanager
def positions(config, yarn: Yarn) -> Iterator[Any]:
    """Within the `with` block, make GPTModel build YaRN from `config` (a TransformerConfig). The context manager yields
    a function that multiplies cos and sin in a built model by YaRN's attention factor.
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
