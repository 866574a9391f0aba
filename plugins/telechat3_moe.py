"""This module builds TeleChat3 and TeleChat3-MoE with parts that plugins replace: it changes the layer spec of
MindFormers' GPTModel before the model is built.

The spec of a model without experts, such as the dense TeleChat3, has only dense layers. On Ascend only `plugins.yarn`,
`plugins.output_biases`, `plugins.lora` and `plugins.hyper_connections` change the specs of dense layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from mindformers.models.telechat3.modeling_telechat3_train import TrainingTeleChat3ForCausalLM
from mindformers.models.telechat3.utils import TeleChat3PreTrainedModel
from mindformers.models.telechat3_moe.modeling_telechat3_moe_train import TrainingTeleChat3MoeForCausalLM
from mindformers.models.telechat3_moe.utils import TeleChat3MoePreTrainedModel
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.training_graph.transformer.moe.moe_layer import MoELayer
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import ops
from mindspore.context import ParallelMode
from mindspore.parallel._utils import _get_parallel_mode

from plugins.edited_classes import ARCHITECTURES, edited
from plugins.private_hooks import relies_on
from plugins.semi_auto_cpu.chosen import chosen

relies_on(TransformerLayer, "actual_seq_len=None,\n            sharded_key=None,")  # arguments come by their places
relies_on(GPTModel, "if pattern.match(param_name, timeout=MAX_REGEX_MATCH_TIME):")  # see `Spared`

_experts: list[Any] = []
_edits: dict[str, Callable[[Any], None]] = {}
_layer_edits: dict[str, Callable[[list[Any]], None]] = {}
_layers: list[tuple[Any, dict[str, Any]]] = []
_spared: dict[str, tuple[str, ...]] = {}
_templates: list[Callable[[Any], Any]] = []
_positions: list[Callable[[Any], AbstractContextManager[Callable[[Any], None]]]] = []


def use_experts(spec) -> None:
    """Make `spec` (a ModuleSpec or class, hook: `MoESubmodules.experts`) the routed experts of models that are built
    later.
    """
    _experts[:] = [spec]


def experts():
    """Return the spec of the routed experts that was last given to `use_experts`."""
    return _experts[0]


def edit_model(plugin: str, edit: Callable[[Any], None]) -> None:
    """Call `edit` with each GPTModel that is built later, after all its parts are built, to change parts that no layer
    spec describes.
    """
    _edits[plugin] = edit


def edit_layers(plugin: str, edit: Callable[[list[Any]], None]) -> None:
    """Call `edit` with the distinct layer specs (ModuleSpec) of each model that is built later, including those of MTP;
    `edit` changes them in place.
    """
    _layer_edits[plugin] = edit


def use_layer(module: Any, **params: Any) -> None:
    """Make models that are built later use the class `module` as their decoder layer, with `params` as further
    arguments. The class becomes the module of the ModuleSpec that describes a layer. The layers of MTP remain
    MindFormers' TransformerLayer.
    """
    _layers[:] = [(module, params)]


def edit_routers(plugin: str, edit: Callable[[Any], None]) -> None:
    """Call `edit` with each router of models that are built later, including routers of MTP layers, because no layer
    spec describes routers.
    """

    def edit_all(model: Any) -> None:
        for _, cell in model.cells_and_names():
            if isinstance(cell, TopKRouter):
                edit(cell)

    edit_model(plugin, edit_all)


def spare(plugin: str, ends: tuple[str, ...]) -> None:
    """Let parameters whose names end with one of `ends`, in models that are built later, begin with the values that
    their plugin gives them, whatever `param_init_std_rules` of the recipe says.
    """
    _spared[plugin] = ends


class Spared:
    """A `Spared` is the compiled pattern of one of MindFormers' `param_init_std_rules`, which does not match the
    parameters that `spare` has named. MindFormers would otherwise fill these parameters with its own initial values:
    with random numbers, and parameters of whole numbers with zeros.
    """

    def __init__(self, pattern: Any):
        self.pattern = pattern

    def __repr__(self) -> str:
        return repr(self.pattern)  # MindFormers logs the rules

    def match(self, name: str, **options: Any) -> Any:
        """Return the match of a parameter's name; return None if the parameter is spared."""
        own = any(name.endswith(ends) for ends in _spared.values())
        return None if own else self.pattern.match(name, **options)


def apply_edits(model) -> None:
    """Apply the changes that `edit_model` and `edit_routers` have registered to a built GPTModel."""
    for edit in _edits.values():
        edit(model)


def use_positions(around: Callable[[Any], AbstractContextManager[Callable[[Any], None]]]) -> None:
    """From now on, build models inside the context manager `around(TransformerConfig)`. The context manager yields a
    function, which is called with each GPTModel that was built inside the context manager.
    """
    _positions[:] = [around]


def use_template(make: Callable[[Any], Any]) -> None:
    """Give models that are built later a template for reading Hugging Face weights, which `make` creates from a
    TransformerConfig.
    """
    _templates[:] = [make]


def apply_template(model, config) -> None:
    """Register the template that `use_template` has set, in the way in which MindFormers' `register_hf_weight_template`
    registers templates.
    """
    for make in _templates:
        model.template = make(config)


def use_edited_model(config, plugin: str, classes: Mapping[str, str] = ARCHITECTURES) -> None:
    """Set in `architectures` of `config` (a MindFormerConfig) the class that builds the model with plugins' edits.

    The CPU backend has its own classes, which also apply the edits.

    Args:
        classes: the classes that the plugin replaces: MindFormers' class -> ours.

    Raises:
        RecipeError: the model does not have such a class.
    """
    if config.context.device_target == "CPU" and not chosen(config):
        return
    model_config = config.model.model_config
    model_config.architectures = edited(model_config.architectures, plugin, classes)


def after_input(hidden_states, rotary_pos_emb, actual_seq_len):
    """Return the rotary positions and document lengths unchanged, but with a data dependency on the layer's input, so
    that MindSpore recomputes each layer separately (see `InTurn`).
    """
    if rotary_pos_emb is not None:
        angles, factor = rotary_pos_emb
        rotary_pos_emb = (ops.depend(angles, hidden_states), factor)
    if actual_seq_len is not None:
        actual_seq_len = ops.depend(actual_seq_len, hidden_states)
    return rotary_pos_emb, actual_seq_len


class InTurn(TransformerLayer):
    """An `InTurn` is a transformer layer that is recomputed separately from the layers above it, even if one graph
    holds all layers.

    MindSpore's pass `InsertRecomputedNodes` recomputes connected operators together, all of them after the first
    gradient that one of them needs. Layers are connected if each computes the same values from the same tensors, which
    MindSpore then computes only once: cos and sin of positions, and the lengths of documents as a tuple. All layers
    would then be recomputed before the backward pass of the last layer. In this class each layer makes these tensors
    depend on its own input, so that no value is computed for two layers at once. The values of the tensors are
    unchanged.
    """

    def construct(
        self,
        hidden_states,
        attention_mask=None,
        context=None,
        context_mask=None,
        rotary_pos_emb=None,
        prefix_keys_values=None,
        extra_loss=0.0,
        actual_seq_len=None,
        sharded_key=None,
        sharded_value=None,
        attention_loss=0.0,
    ):
        """Return the same values as MindFormers' TransformerLayer."""
        rotary_pos_emb, actual_seq_len = after_input(hidden_states, rotary_pos_emb, actual_seq_len)
        return super().construct(
            hidden_states,
            attention_mask,
            context,
            context_mask,
            rotary_pos_emb,
            prefix_keys_values,
            extra_loss,
            actual_seq_len,
            sharded_key,
            sharded_value,
            attention_loss,
        )


def recomputes_at_once(config) -> bool:
    """Return whether MindSpore would recompute all layers at once. MindSpore recomputes all layers at once in the
    sharded graph of a step without pipeline and without gradient accumulation, for which MindFormers sets
    `disable_lazy_inline` (`base_trainer.py`). With a pipeline or with gradient accumulation, the model is a separate
    subgraph, whose layers MindSpore recomputes one by one.
    """
    return config.disable_lazy_inline and _get_parallel_mode() == ParallelMode.SEMI_AUTO_PARALLEL


def gpt_model(config, edit_layer=None) -> GPTModel:
    """Return the GPTModel that MindFormers' training class of TeleChat3-MoE (or TeleChat3) would build, but from an
    edited spec, and with layers that are recomputed one by one (`InTurn`).

    Args:
        config: TransformerConfig.
        edit_layer: a function that is called with each distinct layer spec, before `edit_layers` and `use_experts`.
    """
    if rules := config.param_init_std_rules:
        config.param_init_std_rules = [{**rule, "target": Spared(rule["target"])} for rule in rules]
    block = get_gpt_decoder_block_spec(config)
    layers = list({id(spec): spec for spec in block.layer_specs}.values())
    for layer in layers:
        if edit_layer is not None:
            edit_layer(layer)
        if _experts and layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.experts = _experts[0]
    for edit in _layer_edits.values():
        edit(layers)
    if recomputes_at_once(config):
        for layer in layers:
            layer.module = InTurn
    mtp = get_gpt_mtp_block_spec(config, block) if config.mtp_num_layers else None
    if _layers:
        module, params = _layers[0]
        block.layer_specs = [replace(spec, module=module, params=params) for spec in block.layer_specs]
    with _positions[0](config) if _positions else nullcontext(lambda model: None) as set_positions:
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
    set_positions(model)
    return model


class EditedTrainingTeleChat3Moe(TrainingTeleChat3MoeForCausalLM):
    """This is MindFormers' `TrainingTeleChat3MoeForCausalLM`, built from an edited layer spec; `apply_edits` then
    changes the built model.
    """

    def __init__(self, config):
        # not the parent's: it builds the spec and the model in one go
        TeleChat3MoePreTrainedModel.__init__(self, config, auto_prefix=False)
        transformer_config = self.convert_to_transformer_config(config, is_mla_model=True)
        self.model = gpt_model(transformer_config)
        apply_edits(self.model)
        apply_template(self, transformer_config)


class EditedTrainingTeleChat3(TrainingTeleChat3ForCausalLM):
    """This is `TrainingTeleChat3ForCausalLM` built by `gpt_model` from an edited spec, so that plugins can replace its
    linear layers and its rotary positions.
    """

    def __init__(self, config):
        # not the parent's, as above
        TeleChat3PreTrainedModel.__init__(self, config, auto_prefix=False)
        self.model = gpt_model(self.convert_to_transformer_config(config, is_mla_model=False))
        apply_edits(self.model)


@MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)
class EditedTeleChat3ForCausalLM:
    """On Ascend, `architectures:` names this class if a plugin edits the dense model; the class supports only
    training.
    """

    def __new__(cls, config, *args, **kwargs):
        """Build the training model."""
        return EditedTrainingTeleChat3(config)


@MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)
class EditedTeleChat3MoeForCausalLM:
    """On Ascend, `architectures:` names this class if a plugin edits the model TeleChat3-MoE; the class supports only
    training.
    """

    def __new__(cls, config, *args, **kwargs):
        """Build the training model."""
        return EditedTrainingTeleChat3Moe(config)
