"""This module is a weight template for TeleChat3-MoE, so that MindFormers loads Hugging Face's weights as it loads
those of Qwen3.

MindFormers 1.9.0 looks for `network.template`, a `WeightTemplate` that converts weights by their names; MindFormers has
such templates for qwen3 and qwen3_moe (`checkpoint/converter/template.py`). A decorator of MindFormers makes a template
from name patterns in the class. Such patterns cannot express TeleChat3-MoE, so the template of this module is made from
every parameter's full name, and changes the methods of MindFormers' template for these reasons:

* MindFormers takes every tensor with "experts" in its name for routed experts, including the shared expert, which then
  matches no pattern;
* MindFormers reads the optimizer's sharding from layer 0, which has no experts in this model;
* `model.layers.N` of the MTP layer is `mtp.layers.0` in MindFormers, and a pattern cannot express the change of the
  number;
* MindFormers only logs a missing or unknown tensor, and the parameter keeps its random initial value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindformers.checkpoint.converter.convert_op import ConcatConvertOp, ConvertOp, ExpertsConvertOp, RenameConvertOp
from mindformers.checkpoint.converter.template import WeightTemplate

from plugins import telechat3_moe
from plugins.errors import CheckpointError, RecipeError
from plugins.hugging_face_weights.plan import Model, copies, rows
from plugins.hyper_connections import plan as hyper_connections
from plugins.lora.plan import is_adapter
from plugins.private_hooks import relies_on

KEY = "checkpoint.load_path"
_PARTS, _WEIGHTS = ("embedding.", "decoder.", "mtp.", "output_layer."), (".weight", ".bias", ".gamma", ".beta")
MODEL_TYPE = "telechat3_moe"  # of the models that the template describes
for _line in (
    "if self.check_weights_for_experts(dst_name):",
    "self.network_tensor_info[op.mf_names[0].replace('{}', '0')].axis_fragmentations[0]",
):
    relies_on(WeightTemplate, _line)


class Halves(ConcatConvertOp):
    """A `Halves` operation concatenates gate and up along the rows; MindFormers' own operation would alternate their
    rows.
    """

    def _hf_to_mf(self, weights: list) -> list:
        return [np.concatenate([np.asarray(weight) for weight in weights])]


class TeleChat3MoeTemplate(WeightTemplate):
    """This weight template says for each parameter of one model, by its full name, from which Hugging Face tensors the
    parameter is made.
    """

    def __init__(self, config: Any):
        """Prepare the template for the model that `config` (a TransformerConfig) describes."""
        self.model = Model(
            layers=config.num_layers,
            mtp_layers=config.mtp_num_layers or 0,
            dense=config.first_k_dense_replace,
            experts=config.num_moe_experts,
            latent_query=config.q_lora_rank is not None,
            hyper_connected=bool(hyper_connections.active),
        )
        found = rows(self.model)
        self.parameters = {part: row.mindformers for row in found for part in (*row.parts, *row.stacks)}
        self.counts = {row.mindformers: len(row.parts) // len(row.stacks) for row in found if row.how == "experts"}
        pairs = ConcatConvertOp if config.use_interleaved_weight_layout_mlp else Halves
        kinds: dict[str, type[ConvertOp]] = {"same": RenameConvertOp, "gate_up": pairs, "experts": ExpertsConvertOp}
        super().__init__([kinds[row.how](list(row.stacks), [row.mindformers]) for row in found])
        self.set_model_config(config)

    def get_mf_name(self, hf_name: str) -> list[str]:
        """Return a list with the name of the parameter to which a Hugging Face tensor belongs; raise CheckpointError if
        it belongs to no parameter.
        """
        if hf_name in copies(self.model):
            return [""]  # of no parameter of its own: MindFormers goes on without it
        if hf_name not in self.parameters:
            raise CheckpointError(
                f"{KEY}: the folder holds {hf_name}, which is not a weight of the recipe's model; name the folder of "
                "that model's weights"
            )
        return [self.parameters[hf_name]]

    def check_weights_for_experts(self, weight_name: str) -> bool:
        """Return whether a tensor belongs to a routed expert, given its name in MindFormers or in Hugging Face."""
        return ".mlp.experts." in weight_name

    def check_weights_for_qkv(self, weight_name: str) -> bool:
        """Return False, because no weight of latent attention is a merged query-key-value projection."""
        return False

    def get_num_moe_experts(self, dst_name: str, src_names_num: int) -> int:
        """Return how many Hugging Face tensors of each kind are stacked into the parameter `dst_name`."""
        return self.counts[dst_name]

    def preprocess_hf_weights(
        self, src_name: str, parameter: Any, experts_weights: dict, qkv_weights: dict, num_moe_experts: int
    ) -> tuple[str | None, Any]:
        """Stack the tensors of one kind of all experts under their common name; return (None, None) until the tensor of
        the last expert has been passed.
        """
        words = src_name.split(".")
        number = words.index("experts") + 1
        index, words[number] = int(words[number]), "stack"
        stack = ".".join(words)
        waiting = experts_weights.setdefault(stack, {})
        waiting[index] = parameter
        if len(waiting) < num_moe_experts:
            return None, None
        del experts_weights[stack]
        return stack, np.concatenate([waiting[each].asnumpy() for each in range(num_moe_experts)])

    def get_mf_state_dict(self, hf_state_dict: dict) -> dict:
        """Return the parameters of this rank; raise CheckpointError if a parameter is missing or has no name in Hugging
        Face's form, or is cut in a way that cannot be assembled.
        """
        strange = [name for name in self.network_tensor_info if self._is_strange(name)]
        if strange:
            raise CheckpointError(
                f"{KEY}: {len(strange)} parameters of the recipe's model have no name in Hugging Face's form and would "
                f"keep their random values, such as {strange[0]}; name a recipe of the model whose weights the folder "
                "holds"
            )
        wanted = [name for name in self.network_tensor_info if name in self.mf_name_to_converter]
        missing = [name for name in wanted if not hf_state_dict.keys() >= set(self.mf_name_to_converter[name].hf_names)]
        if missing:  # looked at here: MindFormers' own words of it end in a TypeError
            raise CheckpointError(
                f"{KEY}: the folder lacks weights for {len(missing)} parameters of the recipe's model, such as "
                f"{missing[0]}; name the folder of that model's weights"
            )
        for name in wanted:
            cuts = tuple(self.network_tensor_info[name].axis_fragmentations or ())
            halves = isinstance(self.mf_name_to_converter[name], Halves)
            if (name in self.counts and any(cut > 1 for cut in cuts[1:])) or (halves and cuts[0] > 1):
                raise CheckpointError(
                    f"{KEY}: MindFormers cannot load {name} in this parallel layout, which cuts the weight's axes into "
                    f"{list(cuts)} parts; `tc3 weights convert` writes weights for every layout"
                )
        return dict(super().get_mf_state_dict(hf_state_dict))

    def _is_strange(self, name: str) -> bool:
        """Return whether a parameter is a weight of the model (not of its adapters) that is made from no tensor of the
        Hugging Face folder.
        """
        return (
            name.startswith(_PARTS)
            and name.endswith(_WEIGHTS)
            and not is_adapter(name)
            and name not in self.mf_name_to_converter
        )


def enable(config: Any) -> None:
    """Make the model that is built later use this weight template; `checkpoint.load_path` is the path of a Hugging Face
    folder.

    Raises:
        RecipeError: the checkpoint belongs to another model, or the optimizer state is missing.
    """
    if config.checkpoint.get("no_load_optim", True) is False:  # MindFormers' default is True
        raise RecipeError(
            "checkpoint.no_load_optim: a Hugging Face folder holds no optimizer state that could be loaded; write True"
        )
    if (found := config.model.model_config.get("model_type") or MODEL_TYPE) != MODEL_TYPE:
        raise RecipeError(
            f"only weights of {MODEL_TYPE!r} can be loaded from a Hugging Face folder, not those of {found!r}; convert "
            "these weights to MindFormers' form with `tc3 weights convert`, and name the converted folder",
            KEY,
        )
    telechat3_moe.use_template(TeleChat3MoeTemplate)
    telechat3_moe.use_edited_model(config, KEY)
