"""This module enables `plugins.lora` of a recipe: it adds adapters to linear layers, in a model whose other weights are
frozen.

MindFormers 1.9.0 has LoRA for its training graph (`model_config.pet_config`): it replaces linear layers by name after a
model is built (`pet/tuners/lora_adapter.py`). This LoRA does not work here for four reasons, and this module does
otherwise:

* MindFormers' new layers are created too late to be assigned to the pipeline stage of their layer, and they draw new
  random base weights. In this module the new layers are part of the layer's spec, which is MindFormers' own hook, so
  they are built in their places.
* MindFormers treats all layers as column- or row-parallel, also those layers of latent attention that tensor
  parallelism leaves whole (`LinearNoTP`, `SequenceParallelLinear`). In this module each kind of layer has an adapter
  that is split as the layer itself.
* MindFormers shards the sum of layer and adapter over tensor parallelism even in a row-parallel layer, whose result is
  not split in this way, or along the sequence. In this module the sum has the layout of the layer's result.
* MindFormers' wrapped model lacks methods that the trainer needs from a model. In this module no model is wrapped.

Weights are frozen by MindFormers' `PetAdapter.freeze_mcore_pretrained_model`, which sets `requires_grad = False`.
MindSpore requires a sum of gradients for each weight that requires gradients; otherwise it cannot compile a pipeline
whose stages have several devices. MindFormers loads and saves a sharded model by MindSpore's list of how parameters are
sharded; frozen weights are in this list only if MindSpore is set to include them (`only_trainable_params`).
"""

from __future__ import annotations

from typing import Any

from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearNoTP,
    RowParallelLinear,
    SequenceParallelLinear,
)
from mindformers.parallel_core.training_graph.tensor_parallel.lora_layers import init_lora_method
from mindformers.parallel_core.training_graph.transformer.mlp import MLP
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindformers.pet.tuners.pet_adapter import PetAdapter
from mindspore.context import ParallelMode, set_auto_parallel_context
from mindspore.ops.auto_generate import AddExt, Muls
from mindspore.parallel._utils import _get_parallel_mode

from plugins import telechat3_moe
from plugins.edited_classes import ALL
from plugins.errors import RecipeError
from plugins.lora.plan import FROZEN, KEY, TRAINED, B, Settings, check, chosen, frozen
from plugins.private_hooks import relies_on

for _kind, _line in (
    (ColumnParallelLinear, "output = self.morphed_forward(input_, weight)"),
    (RowParallelLinear, "output = self.morphed_forward(input_, weight)"),
    (ColumnParallelLinear, 'layout("cp", "dp", "tp"),          # output       [S, B, H]'),
    (RowParallelLinear, 'layout("cp_tp", "dp", "None"),  # output       [S, B, H]'),
    (SequenceParallelLinear, 'layout(("cp", "tp"), "dp", "None"),  # output       [S, B, H]'),
):
    relies_on(_kind, _line)
relies_on(GPTModel, "F.mul(F.sign(err), self.moe_router_bias_update_rate)")

RATE = "moe_router_bias_update_rate"
_WHOLE, _CUT, _ALONG = ("cp", "dp", "None"), ("cp", "dp", "tp"), (("cp", "tp"), "dp", "None")


def add_adapter(cell: Any, lora_rank: int, lora_scale: float) -> None:
    """Add the parameters `lora_A` and `lora_B`, and the operators that use them, to a linear layer that is already
    built.

    | layer | A | B | layout of the sum [sequence, batch, outputs] |
    |---|---|---|---|
    | column-parallel | whole | rows over tp | outputs over tp |
    | row-parallel | columns over tp | whole | as the layer: along the sequence with sequence parallelism |
    | not cut by tp | whole | whole | as the layer |
    """
    config, own = cell.config, type(cell).__bases__[-1]
    first, second = own, own
    thin: tuple[Any, ...] = _WHOLE
    result: tuple[Any, ...] = _WHOLE
    if own is ColumnParallelLinear:
        first, result = LinearNoTP, _CUT
    elif own is RowParallelLinear:
        second = SequenceParallelLinear if config.sequence_parallel else LinearNoTP
        thin = result = _ALONG if config.sequence_parallel else _WHOLE
    elif own is SequenceParallelLinear:
        thin = result = _ALONG
    sizes = ((first, cell.input_size, lora_rank, "normal"), (second, lora_rank, cell.output_size, "zeros"))
    cell.lora_A, cell.lora_B = (
        kind(inputs, outputs, config, init_lora_method(start, config.params_dtype), bias=False, skip_bias_add=True)
        for kind, inputs, outputs, start in sizes
    )
    cell.lora_scale, cell.lora_times, cell.lora_plus = lora_scale, Muls(), AddExt()
    if _get_parallel_mode() == ParallelMode.SEMI_AUTO_PARALLEL:
        cell.lora_times.shard(in_strategy=(layout(*thin),))
        cell.lora_plus.shard(in_strategy=(layout(*result), layout(*result)))


class Adapted:
    """This class adds an adapter to a linear layer; in the list of base classes, the linear layer's class must come
    after this class.

    `plain` is the method `construct` of the linear layer: MindSpore's compiler turns `super().construct` in a class
    with two base classes into an endless recursion.
    """

    plain: Any
    lora_A: Any  # these are of `add_adapter`
    lora_B: Any
    lora_scale: Any
    lora_times: Any
    lora_plus: Any

    def __init__(self, *sizes, lora_rank, lora_scale, **options):
        super().__init__(*sizes, **options)
        add_adapter(self, lora_rank, lora_scale)

    def construct(self, input_):
        """Return the sum of the layer's result and the adapter's result, [S, B, outputs], and the bias that the layer
        did not add.
        """
        output, bias = self.plain(input_)
        thin = self.lora_times(self.lora_A(input_)[0], self.lora_scale)
        return self.lora_plus(output, self.lora_B(thin)[0]), bias


class ColumnAdapted(Adapted, ColumnParallelLinear):
    """A `ColumnAdapted` is a column-parallel linear layer with an adapter."""

    plain = ColumnParallelLinear.construct


class RowAdapted(Adapted, RowParallelLinear):
    """A `RowAdapted` is a row-parallel linear layer with an adapter."""

    plain = RowParallelLinear.construct


class WholeAdapted(Adapted, LinearNoTP):
    """A `WholeAdapted` is a linear layer that tensor parallelism leaves whole, with an adapter."""

    plain = LinearNoTP.construct


class SequenceAdapted(Adapted, SequenceParallelLinear):
    """A `SequenceAdapted` is a linear layer with an adapter that every device holds whole; each device computes the
    layer for a part of the sequence.
    """

    plain = SequenceParallelLinear.construct


ADAPTED = {
    ColumnParallelLinear: ColumnAdapted,
    RowParallelLinear: RowAdapted,
    LinearNoTP: WholeAdapted,
    SequenceParallelLinear: SequenceAdapted,
}


def enable(config, settings) -> None:
    """Make models that are built later have the adapters that `settings` describes, and freeze all other weights.

    Raises:
        RecipeError: the settings are impossible, the recipe has a feature that does not work with frozen weights, or a
            pattern matches no layer of the model.
    """
    ours = check(settings, config)
    telechat3_moe.use_edited_model(config, KEY, ALL)
    set_auto_parallel_context(strategy_ckpt_config={"only_trainable_params": False})
    telechat3_moe.edit_layers(KEY, lambda layers: put_in(layers, ours))
    telechat3_moe.edit_model(KEY, freeze)
    telechat3_moe.spare(KEY, (B,))


def put_in(layers: list[Any], settings: Settings) -> None:
    """Replace the linear layers that `settings` names in the specs of a model's `layers`, in place.

    Raises:
        RecipeError: a pattern matches no linear layer.
    """
    parts = [(name, part, attribute) for layer in layers for name, part, attribute in _linear_layers(layer)]
    names = chosen(settings, dict.fromkeys(name for name, _, _ in parts))
    options = {"lora_rank": settings.rank, "lora_scale": settings.scale}
    for name, part, attribute in parts:
        if name in names:
            kind = ADAPTED.get(getattr(part, attribute))
            if kind is None:
                raise RecipeError(
                    f"{name} is a layer of {getattr(part, attribute)!r}, which {KEY} does not support; "
                    f"leave this layer out of {KEY}.targets"
                )
            setattr(part, attribute, ModuleSpec(module=kind, params=options))


def _linear_layers(layer: Any) -> list[tuple[str, Any, str]]:
    """Return (name, submodules of the spec, attribute) of each linear layer of attention, and of an MLP without
    experts.
    """
    found = []
    for name in ("self_attention", "mlp"):
        part = getattr(layer.submodules, name)
        if name == "mlp" and part.module is not MLP and not issubclass(part.module, MLP):
            continue
        for attribute, kind in vars(part.submodules).items():
            if attribute.startswith("linear_") and kind is not None:
                found.append((f"{name}.{attribute}", part.submodules, attribute))
    return found


def freeze(model: Any) -> None:
    """Freeze all weights of `model` (a GPTModel) except the adapters, and keep the routers' biases unchanged; the
    optimizer, which is built next, then gets only the adapters.
    """
    if hasattr(model, RATE):  # the biases have no gradient to freeze: a callback moves them, at a rate by default
        setattr(model, RATE, 0.0)
        setattr(model.config, RATE, 0.0)
    weights = model.trainable_params()
    PetAdapter.freeze_mcore_pretrained_model(model, FROZEN, TRAINED)
    frozen.clear()
    frozen.update(weight.name for weight in weights if not weight.requires_grad)
