"""This module finds which Hugging Face tensors make up which parameter of TeleChat3 and TeleChat2. The module uses only
names, and does not need MindFormers.

MTP tensors are named as in DeepSeek-V3's checkpoints: an MTP layer is one more decoder layer, and these checkpoints
also hold copies of embedding and head (`copies`). TeleChat2's names are those of Tele-AI's own class, which vLLM
(`telechat2.py`) and MindFormers (`models/telechat2`) read: keys and values are one tensor, in which the key of each
head comes before its value. `tools/weights/hugging_face_names.py` adds shapes, and the conversion of arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.hyper_connections.plan import SUBLAYERS, WEIGHTS

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STACKED = "stack"  # in the place of an expert's number: what MindFormers calls all of them, one over the other
_GROUPED = (("linear_proj", "o_proj"),)
_LATENT = (
    ("linear_kv_down_proj", "kv_a_proj_with_mqa"),
    ("kv_layernorm", "kv_a_layernorm"),
    ("linear_kv_up_proj", "kv_b_proj"),
    ("linear_proj", "o_proj"),
)
_QUERY = (("linear_q_proj", "q_proj"),)
_LATENT_QUERY = (
    ("linear_q_down_proj", "q_a_proj"),
    ("q_layernorm", "q_a_layernorm"),
    ("linear_q_up_proj", "q_b_proj"),
)


@dataclass(frozen=True)
class Row:
    """A `Row` describes one parameter of MindFormers' model: its name, the Hugging Face tensors from which it is made,
    and the way in which these tensors are joined.

    how: `same`; `gate_up` (gate and up, whose rows alternate, or in two halves, as the model stores them); `qkv` (for
        each group its queries, its key and its value; with two parts, the second part holds key and value of each
        group); `experts` (each matrix is transposed, and the matrices are stacked; two kinds are put side by side),
        whose `parts` name every expert.
    """

    mindformers: str
    parts: tuple[str, ...]
    how: str = "same"

    @property
    def stacks(self) -> tuple[str, ...]:
        """Return the names in `parts`, with one common name (without the expert's number) in place of the names of all
        experts' tensors of one kind.
        """
        if self.how != "experts":
            return self.parts
        return tuple(dict.fromkeys(".".join(_without_number(part)) for part in self.parts))


def _without_number(part: str) -> list[str]:
    words = part.split(".")
    words[words.index("experts") + 1] = STACKED
    return words


@dataclass(frozen=True)
class Model:
    """A `Model` holds the sizes of a model that decide which parameters it has: among them `layers` (decoder layers
    without MTP) and `dense` (the number of first layers that have no experts).

    Args:
        latent_query: whether latent attention has a latent query.
        grouped: whether the model has grouped-query attention instead of latent attention.
        telechat2: whether a grouped model without experts has TeleChat2's names and biases.
        hyper_connected: whether all layers except those of MTP have Xing4.0's residual streams.
    """

    layers: int
    mtp_layers: int
    dense: int
    experts: int
    latent_query: bool
    grouped: bool = False
    telechat2: bool = False
    hyper_connected: bool = False

    @property
    def embedding(self) -> str:
        """Return the name of the embedding in Hugging Face's form."""
        return "transformer.word_embeddings.weight" if self.telechat2 else EMBEDDING


def rows(model: Model) -> list[Row]:
    """Return one `Row` for each weight of the model (the Hugging Face tensors from which it is made), in the order of
    the forward pass.
    """
    if model.telechat2:
        return _telechat2(model)
    found = [Row("embedding.word_embeddings.weight", (EMBEDDING,))]
    for number in range(model.layers):
        found += _layer(model, f"decoder.layers.{number}", number)
    found.append(Row("decoder.final_layernorm.weight", ("model.norm.weight",)))
    found.append(Row("output_layer.weight", (HEAD,)))
    for layer in range(model.mtp_layers):
        number = model.layers + layer
        ours, theirs = f"mtp.layers.{layer}", f"model.layers.{number}"
        found += [Row(f"{ours}.{name}.weight", (f"{theirs}.{name}.weight",)) for name in ("enorm", "hnorm", "eh_proj")]
        found += _layer(model, f"{ours}.transformer_layer", number)
        found.append(Row(f"{ours}.final_layernorm.weight", (f"{theirs}.shared_head.norm.weight",)))
    return found


def copies(model: Model) -> dict[str, str]:
    """Return a dictionary from each copy of the embedding or the head in DeepSeek's MTP layers to the tensor of which
    it is a copy; MindFormers has no such copies.
    """
    ends = (("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", HEAD))
    layers = range(model.layers, model.layers + model.mtp_layers)
    return {f"model.layers.{layer}.{end}": original for layer in layers for end, original in ends}


def _layer(model: Model, ours: str, number: int) -> list[Row]:
    theirs = f"model.layers.{number}"
    found = [Row(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",))]
    if model.hyper_connected and number < model.layers:  # Xing4.0's names are those of plugins.hyper_connections
        gates = [f"{part}.{name}" for part in SUBLAYERS for name in WEIGHTS]
        found += [Row(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in gates]
    if model.grouped:
        heads = tuple(f"{theirs}.self_attn.{kind}_proj.weight" for kind in "qkv")
        found.append(Row(f"{ours}.self_attention.linear_qkv.weight", heads, "qkv"))
    query = _LATENT_QUERY if model.latent_query else _QUERY
    for mindformers, hugging_face in _GROUPED if model.grouped else (*query, *_LATENT):
        found.append(Row(f"{ours}.self_attention.{mindformers}.weight", (f"{theirs}.self_attn.{hugging_face}.weight",)))
    found.append(Row(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",)))
    if number < model.dense:
        return found + _dense(f"{ours}.mlp", f"{theirs}.mlp")
    experts = [f"{theirs}.mlp.experts.{index}" for index in range(model.experts)]
    into = tuple(f"{expert}.{name}_proj.weight" for expert in experts for name in ("gate", "up"))
    return [
        *found,
        Row(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.gate.weight",)),
        Row(f"{ours}.mlp.router.expert_bias", (f"{theirs}.mlp.gate.e_score_correction_bias",)),
        Row(f"{ours}.mlp.experts.weight1", into, "experts"),
        Row(f"{ours}.mlp.experts.weight2", tuple(f"{expert}.down_proj.weight" for expert in experts), "experts"),
        *_dense(f"{ours}.mlp.shared_experts", f"{theirs}.mlp.shared_experts"),
    ]


def _dense(ours: str, theirs: str) -> list[Row]:
    both = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
    return [
        Row(f"{ours}.linear_fc1.weight", both, "gate_up"),
        Row(f"{ours}.linear_fc2.weight", (f"{theirs}.down_proj.weight",)),
    ]


def _telechat2(model: Model) -> list[Row]:
    found = [Row("embedding.word_embeddings.weight", (model.embedding,))]
    for number in range(model.layers):
        ours, theirs = f"decoder.layers.{number}", f"transformer.h.{number}"
        attention, mlp = f"{theirs}.self_attention", f"{theirs}.mlp"
        found += [
            Row(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",)),
            Row(
                f"{ours}.self_attention.linear_qkv.weight",
                (f"{attention}.query.weight", f"{attention}.key_value.weight"),
                "qkv",
            ),
            Row(f"{ours}.self_attention.linear_proj.weight", (f"{attention}.dense.weight",)),
            Row(f"{ours}.self_attention.linear_proj.bias", (f"{attention}.dense.bias",)),
            Row(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",)),
            *_dense(f"{ours}.mlp", mlp),
            Row(f"{ours}.mlp.linear_fc2.bias", (f"{mlp}.down_proj.bias",)),
        ]
    found.append(Row("decoder.final_layernorm.weight", ("transformer.ln_f.weight",)))
    return [*found, Row("output_layer.weight", (HEAD,))]


def is_hugging_face(folder: Any) -> bool:
    """Return whether MindFormers treats a `checkpoint.load_path` as a Hugging Face folder (its `is_hf_checkpoint`)."""
    if not isinstance(folder, str) or not folder or not Path(folder).is_dir():
        return False
    return (Path(folder) / "model.safetensors").exists() or any(Path(folder).glob("*model.safetensors.index.json"))
