"""This module computes the fields of the TransformerConfig that MindFormers would build from `model.model_config`, by
the rules of MindFormers' ConfigConverter and without MindFormers.

MindFormers collects defaults, drops ignored keys, adds the parallel settings, renames keys by the model's mapping
(`schema.json`), and drops keys without a rule. A slow test checks that the fields equal those that MindFormers itself
computes. `model_default` returns the value that MindFormers uses for a key that a recipe leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from plugins.hyper_connections import plan as hyper_connections
from tools.recipe.load import KeyPath
from tools.recipe.view import MODEL, View, look
from tools.schema.schema import Schema, load_schema
from tools.schema.values import SECTIONS

ONLY_OUTPUTS = "biases_of_outputs_only"  # of the linear layers that add_bias_linear gives a bias
STREAMS = "residual_streams"  # of plugins.hyper_connections; 1 without it
SINKHORN = "sinkhorn_iterations"  # of its residual mappings
_RECOMPUTE = tuple(SECTIONS["recompute_config"])
_ALONE = ("data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage", "micro_batch_num")


@dataclass
class Built:
    """A `Built` holds the arguments with which MindFormers would build a TransformerConfig."""

    fields: dict[str, Any]  # including default values
    origin: dict[str, KeyPath] = field(default_factory=dict)  # field -> the key path of the recipe that set it
    # (key path, field) of a field that another key or setting had already set
    conflicts: list[tuple[KeyPath, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # keys of model_config that set no field

    def number(self, name: str, default: int = 0) -> int:
        """Return the value of an integer field; return `default` if the value is None or has another type."""
        value = self.fields.get(name)
        return value if type(value) is int else default


def convert(view: View, schema: Schema) -> Built:
    """Return the fields of the TransformerConfig that MindFormers would build for the recipe."""
    model = schema.model_type(view.recipe)
    described = schema.models[model]
    written = view.get(MODEL, {})
    written = written if isinstance(written, dict) else {}
    merged = {**described["defaults"], **written, "batch_size": view.batch}
    built = Built({name: spec.get("default") for name, spec in schema.fields(model).items()})
    taken: set[str] = set()
    for path, key, value in _parallel(view):
        _place(built, taken, schema.targets(model, key), path, value)
    for key, value in merged.items():
        if key in described["ignored"]:
            continue
        targets = schema.targets(model, key)
        if not targets and key in written and key not in schema.not_reported:
            built.unread.append(key)
        _place(built, taken, targets, (*MODEL, key), value)
    built.unread += [key for key in written if key in described["ignored"]]
    _derive(built)
    # no field of MindFormers, but what add_bias_linear means with the plugin
    built.fields[ONLY_OUTPUTS] = view.get(("plugins", "output_biases")) not in (None, False)
    _streams(view, built)
    # the other training models have output weights of their own, whatever this says
    built.fields["tie_word_embeddings"] = built.fields.get("tie_word_embeddings") is True and described["ties"]
    built.fields.update(described["fixed"])
    return built


def _streams(view: View, built: Built) -> None:
    """Set the residual streams of plugins.hyper_connections; a refused section counts as none."""
    written = view.get(("plugins", "hyper_connections"), False)
    settings = None if written is None or written is False else hyper_connections.Settings.look(written)[0]
    on = settings is not None and settings.streams > 1
    built.fields[STREAMS] = settings.streams if settings is not None else 1
    built.fields[SINKHORN] = settings.sinkhorn_iterations if on and settings is not None else 0


def _parallel(view: View) -> list[tuple[KeyPath, str, Any]]:
    """Return what the trainer hands over of parallel_config, swap_config and recompute_config."""
    sizes = {
        **dict.fromkeys(_ALONE, 1),
        **{"seq_split_num": 1, "use_seq_parallel": False, "gradient_aggregation_group": 4, "vocab_emb_dp": True},
        **{"context_parallel_algo": "colossalai_cp", "ulysses_degree_in_cp": 1},
    }
    found: list[tuple[KeyPath, str, Any]] = []
    for key, default in sizes.items():
        alone = not view.parallel and key in (*_ALONE, "use_seq_parallel")
        value = default if alone else look(view.recipe, ("parallel_config", key), default)
        found.append((("parallel_config", key), key, value))
    for key in _RECOMPUTE:
        default = key == "mp_comm_recompute"
        found.append((("recompute_config", key), key, look(view.recipe, ("recompute_config", key), default)))
    return found


def _place(built: Built, taken: set[str], targets: list[tuple[str, str | None]], path: KeyPath, value: Any) -> None:
    """Write one value to each of its fields; a field written before is a conflict, which MindFormers raises."""
    for target, function in targets:
        if target in taken:
            built.conflicts.append((path, target))
            continue
        taken.add(target)
        built.fields[target] = _apply(function, value)
        built.origin[target] = path


def _apply(function: str | None, value: Any) -> Any:
    """Return what a conversion function of MindFormers returns (parallel_core/transformer_config_utils.py has four)."""
    if function == "is_float_32":
        return value in ("fp32", "float32") if isinstance(value, str) else bool(value)
    if function == "get_drop_policy":
        return ("position" if value else "probs") if isinstance(value, bool) else value
    if function == "get_cp_comm_type":
        return {"colossalai_cp": "all_gather", "ulysses_cp": "a2a"}.get(str(value))
    if function == "is_use_gated_sigmoid":
        return value if isinstance(value, str) else ("sigmoid" if value else "softmax")
    return value


def _derive(built: Built) -> None:
    """Compute the part of TransformerConfig.__post_init__ that later rules and the table need."""
    fields = built.fields
    fields["vocab_emb_dp"] = False
    fields["mtp_num_layers"] = fields.get("mtp_num_layers") or 0
    heads = fields.get("num_attention_heads")
    if fields.get("num_query_groups") is None:
        fields["num_query_groups"] = heads
    if fields.get("kv_channels") is None and type(heads) is int and heads > 0:
        fields["kv_channels"] = built.number("hidden_size") // heads
    if fields.get("ffn_hidden_size") is None:
        fields["ffn_hidden_size"] = 4 * built.number("hidden_size")
    if fields.get("moe_ffn_hidden_size") is None:
        fields["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]
    if fields.get("moe_shared_expert_intermediate_size") is None and built.number("shared_expert_num") > 0:
        shared = built.number("moe_ffn_hidden_size") * built.number("shared_expert_num")
        fields["moe_shared_expert_intermediate_size"] = shared
    scaling = fields.get("rope_scaling")
    if isinstance(scaling, dict):
        fields["position_embedding_type"] = scaling.get("type") or scaling.get("rope_type")
        fields["rotary_scaling_factor"] = scaling.get("factor")
        original = scaling.get("original_max_position_embeddings")
        fields["max_position_embeddings"] = original or fields.get("seq_length")
        skipped = ("type", "rope_type", "factor", "original_max_position_embeddings")
        fields.update({key: value for key, value in scaling.items() if key not in skipped})
    if fields.get("bias_swiglu_fusion") is True:
        fields["hidden_act"] = "fusedswiglu"


def model_number(view: View, key: str) -> int:
    """Return the positive integer at `model.model_config.KEY`; if there is none, return MindFormers' default of the key
    for the recipe's model.

    Raises:
        KeyError: MindFormers has no default number for the key, so the recipe must state it.
    """
    default = model_default(view, key)
    if type(default) is not int:
        raise KeyError(f"MindFormers has no default value for model_config.{key}")
    return view.number((*MODEL, key), default)


def model_default(view: View, key: str) -> Any:
    """Return MindFormers' default for a key of `model.model_config`. The default comes from the model's config class
    or, if this class has no default, from the corresponding field of TransformerConfig. Return None if there is no
    default.
    """
    schema = load_schema()
    model = schema.model_type(view.recipe)
    defaults = schema.models[model]["defaults"]
    if key in defaults:
        return defaults[key]
    fields = schema.fields(model)
    return next((fields[field].get("default") for field, _ in schema.targets(model, key)), None)
