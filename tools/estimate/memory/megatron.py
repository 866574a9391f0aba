"""What Megatron holds beside kept activations, where weights that compute are whole. Bytes of one device.

Read in the sources, not fitted:

* Transformer Engine keeps one spare gradient, in the precision that computes, of every shape that a matmul's weight
  has (`get_dummy_wgrad` in its pytorch/module/base.py; linear layers since 2.3, grouped ones since 2.10). Megatron Core
  takes the output layer's from there as well (core/tensor_parallel/layers.py). They are never freed.
* Without it that gradient is made anew for each weight and is gone once it is added up.
* In a layer's backward most is there when the MLP's activation is differentiated: gradients of the first products and
  of the activation's result, while the result itself is gone.
* In the loss's backward the output layer makes the gradient of its input and gathers that input again.
"""

from __future__ import annotations

from collections.abc import Iterable

from tools.estimate import sharding
from tools.estimate.configuration import Configuration
from tools.estimate.layer_model import ITEM, work
from tools.model.weights import Weight, weights


def spare_gradients(config: Configuration, every: Iterable[Weight]) -> float:
    """Bytes of Transformer Engine's spare gradients of a stage's weights: each shape counts once."""
    if not config.spare_gradients:
        return 0.0
    shapes = {_shape(weight, config) for weight in every if weight.multiplies and not weight.wide}
    return ITEM * sum(rows * columns for rows, columns in shapes)


def layer_pass(config: Configuration, kind: str) -> float:
    """Most bytes of gradients while a layer's backward runs."""
    model, done, tokens = config.model, work(config, kind), config.rank_tokens
    held = tokens / config.tp if config.sequence_parallel else tokens
    gates = 2 if model.gated else 1
    if kind == "dense":
        units = tokens * model.ffn / config.tp
    else:
        width = model.expert_ffn / (config.tp if config.expert_tp else 1)
        units = done.copies * width + tokens / config.tp * model.shared_ffn
    sent = 2 * done.copies * model.hidden  # rows of the experts, permuted and sent back
    gathered = (1 if config.overlap_tp else 2) * done.gathered if config.tp > 1 else 0.0
    return ITEM * (gates * units + held * model.hidden + sent) + gathered + _made_anew(config, kind)


def loss_pass(config: Configuration) -> float:
    """Bytes of the logits, of the gradient of the output layer's input and of that input gathered again."""
    tokens, model = config.rank_tokens, config.model
    rows = ITEM * tokens * model.hidden * (2 if config.tp > 1 else 1)
    return config.logit_bytes * tokens * model.vocab / config.tp + rows + _made_anew(config, "head")


def _shape(weight: Weight, config: Configuration) -> tuple[float, float]:
    """Rows and columns that a device holds of a weight; of experts those of one."""
    if weight.split == "experts":
        return weight.rows / config.model.experts, weight.columns / (config.tp if config.expert_tp else 1)
    rows = weight.rows / (config.tp if weight.split == "rows" else 1)
    return rows, weight.columns / (config.tp if weight.split == "columns" else 1)


def _made_anew(config: Configuration, kind: str) -> float:
    """Bytes of the largest weight's gradient where none is spare; each expert has its own."""
    if config.spare_gradients:
        return 0.0
    found = [0.0]
    for weight in weights(config.model, kind, config.shared_whole):
        if weight.multiplies:
            parts = config.model.experts // config.ep if weight.split == "experts" else 1
            found.append(weight.size / sharding.cut(weight, config) / parts)
    return ITEM * max(found)
