"""Weights of TeleChat3-MoE under MindFormers' names and under Hugging Face's, both ways. NumPy only.

Every MindFormers tensor is cut into one or more Hugging Face tensors and every element has exactly one place on the
other side, so gradients, Adam moments and updates convert like weights. MTP is named as in DeepSeek-V3's checkpoints:
one more layer, without the copies of embedding and head that those hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from plugins.errors import CheckpointError
from tools.accuracy.reference.sizes import Sizes

Arrays = dict[str, np.ndarray]

# state of the run in MindFormers' routers; not weights, and not in Hugging Face
STATE = (".router.expert_load", ".router.fi_accu")


@dataclass(frozen=True)
class Entry:
    """One MindFormers tensor.

    Args:
        mindformers: its name. shape: its shape.
        parts: Hugging Face's names; several for `gate_up` (gate, up), `experts_in` (gate, up of expert 0, of 1, ...)
            and `experts_out` (down of each expert).
        how: `same`, `gate_up` [2F, h] with `interleaved` rows or halves, `experts_in` [E * h, 2H],
            `experts_out` [E * H, h].
        decayed: whether AdamW decays it: MindFormers leaves out what has one dimension.
    """

    mindformers: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    how: str = "same"
    interleaved: bool = False
    trained: bool = True

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies (mindformers/trainer/optimizer_grouped_parameters.py)."""
        return self.trained and len(self.shape) > 1

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """The tensor as Hugging Face's parts, in their order."""
        if self.how == "gate_up":
            gate_up = array.reshape(-1, 2, array.shape[1]).swapaxes(0, 1) if self.interleaved else np.split(array, 2)
            return [np.ascontiguousarray(half) for half in gate_up]
        if self.how == "experts_in":
            experts = array.reshape(len(self.parts) // 2, -1, array.shape[1])  # [E, h, 2H]
            return [np.ascontiguousarray(half.T) for expert in experts for half in np.split(expert, 2, axis=1)]
        if self.how == "experts_out":
            return [np.ascontiguousarray(expert.T) for expert in array.reshape(len(self.parts), -1, array.shape[1])]
        return [array]

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """The inverse of `split`."""
        if self.how == "gate_up":
            return np.stack(parts, axis=1).reshape(self.shape) if self.interleaved else np.concatenate(parts)
        if self.how == "experts_in":
            pairs = [np.concatenate(parts[first : first + 2]).T for first in range(0, len(parts), 2)]
            return np.concatenate(pairs)
        if self.how == "experts_out":
            return np.concatenate([part.T for part in parts])
        return parts[0]


def table(sizes: Sizes) -> list[Entry]:
    """Every weight of the model, in the order of the forward pass; the routers' biases are the only untrained ones."""
    hf = sizes.hf
    hidden, vocabulary = hf["hidden_size"], hf["vocab_size"]
    entries = [_same("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocabulary, hidden)]
    for layer in range(sizes.layers):
        entries += _layer(sizes, f"decoder.layers.{layer}", layer)
    entries.append(_same("decoder.final_layernorm.weight", "model.norm.weight", hidden))
    entries.append(_same("output_layer.weight", "lm_head.weight", vocabulary, hidden))
    for layer in range(sizes.mtp_layers):
        theirs, ours = f"model.layers.{sizes.layers + layer}", f"mtp.layers.{layer}"
        entries.append(_same(f"{ours}.enorm.weight", f"{theirs}.enorm.weight", hidden))
        entries.append(_same(f"{ours}.hnorm.weight", f"{theirs}.hnorm.weight", hidden))
        entries.append(_same(f"{ours}.eh_proj.weight", f"{theirs}.eh_proj.weight", hidden, 2 * hidden))
        entries += _layer(sizes, f"{ours}.transformer_layer", sizes.layers + layer)
        entries.append(_same(f"{ours}.final_layernorm.weight", f"{theirs}.shared_head.norm.weight", hidden))
    return entries


def to_hugging_face(arrays: Mapping[str, np.ndarray], sizes: Sizes) -> Arrays:
    """MindFormers' tensors under Hugging Face's names.

    Raises:
        CheckpointError: a tensor is missing, has another shape or belongs to no weight.
    """
    entries = table(sizes)
    given = {name: array for name, array in arrays.items() if not name.endswith(STATE)}
    _check(given, {entry.mindformers: entry.shape for entry in entries})
    return {
        name: part
        for entry in entries
        for name, part in zip(entry.parts, entry.split(given[entry.mindformers]), strict=True)
    }


def to_mindformers(arrays: Mapping[str, np.ndarray], sizes: Sizes) -> Arrays:
    """Hugging Face's tensors under MindFormers' names; raises as `to_hugging_face`."""
    _check(arrays, hugging_face_shapes(sizes))
    return {entry.mindformers: entry.join([arrays[name] for name in entry.parts]) for entry in table(sizes)}


def hugging_face_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name -> shape of Hugging Face's tensors, in the order of the forward pass."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in table(sizes):
        rows = entry.shape[0] // (len(entry.parts) // 2 if entry.how == "experts_in" else len(entry.parts))
        columns = entry.shape[1:]
        if entry.how == "experts_in":
            one: tuple[int, ...] = (columns[0] // 2, rows)
        elif entry.how == "experts_out":
            one = (columns[0], rows)
        else:
            one = (rows, *columns)
        shapes.update(dict.fromkeys(entry.parts, one))
    return shapes


def _same(mindformers: str, hugging_face: str, *shape: int, trained: bool = True) -> Entry:
    return Entry(mindformers, (hugging_face,), shape, trained=trained)


def _layer(sizes: Sizes, ours: str, number: int) -> list[Entry]:
    """The weights of one transformer layer."""
    theirs, hidden = f"model.layers.{number}", sizes.hf["hidden_size"]
    norms = [
        _same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", hidden),
        _same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", hidden),
    ]
    attention = _attention(sizes.hf, f"{ours}.self_attention", f"{theirs}.self_attn")
    if sizes.is_moe(number):
        mlp = _experts(sizes, f"{ours}.mlp", f"{theirs}.mlp")
    else:
        mlp = _dense(sizes, f"{ours}.mlp", f"{theirs}.mlp", sizes.hf["intermediate_size"])
    return [norms[0], *attention, norms[1], *mlp]


def _attention(hf: dict, ours: str, theirs: str) -> list[Entry]:
    """Latent attention; q_lora_rank None means one query projection."""
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    nope, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    q_rank, kv_rank = hf["q_lora_rank"], hf["kv_lora_rank"]

    def one(mindformers: str, hugging_face: str, *shape: int) -> Entry:
        return _same(f"{ours}.{mindformers}.weight", f"{theirs}.{hugging_face}.weight", *shape)

    if q_rank is None:
        query = [one("linear_q_proj", "q_proj", heads * (nope + rope), hidden)]
    else:
        query = [
            one("linear_q_down_proj", "q_a_proj", q_rank, hidden),
            one("q_layernorm", "q_a_layernorm", q_rank),
            one("linear_q_up_proj", "q_b_proj", heads * (nope + rope), q_rank),
        ]
    return [
        *query,
        one("linear_kv_down_proj", "kv_a_proj_with_mqa", kv_rank + rope, hidden),
        one("kv_layernorm", "kv_a_layernorm", kv_rank),
        one("linear_kv_up_proj", "kv_b_proj", heads * (nope + value), kv_rank),
        one("linear_proj", "o_proj", hidden, heads * value),
    ]


def _dense(sizes: Sizes, ours: str, theirs: str, width: int) -> list[Entry]:
    hidden = sizes.hf["hidden_size"]
    both = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
    return [
        Entry(f"{ours}.linear_fc1.weight", both, (2 * width, hidden), "gate_up", sizes.interleaved),
        _same(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", hidden, width),
    ]


def _experts(sizes: Sizes, ours: str, theirs: str) -> list[Entry]:
    """Router, routed experts and shared expert."""
    hidden, width, count = sizes.hf["hidden_size"], sizes.hf["moe_intermediate_size"], sizes.hf["n_routed_experts"]
    experts = [f"{theirs}.experts.{index}" for index in range(count)]
    into = tuple(f"{expert}.{name}.weight" for expert in experts for name in ("gate_proj", "up_proj"))
    out = tuple(f"{expert}.down_proj.weight" for expert in experts)
    bias = f"{theirs}.gate.e_score_correction_bias"
    shared = sizes.hf["n_shared_experts"] * width
    return [
        _same(f"{ours}.router.weight", f"{theirs}.gate.weight", count, hidden),
        _same(f"{ours}.router.expert_bias", bias, count, trained=False),
        Entry(f"{ours}.experts.weight1", into, (count * hidden, 2 * width), "experts_in"),
        Entry(f"{ours}.experts.weight2", out, (count * width, hidden), "experts_out"),
        *_dense(sizes, f"{ours}.shared_experts", f"{theirs}.shared_experts", shared),
    ]


def _check(given: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless `given` has exactly the names and shapes of `wanted`."""
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        lists = [f"{what} {', '.join(names[:3])}{' ...' * (len(names) > 3)}" for what, names in
                 (("missing", missing), ("not of this model:", unknown)) if names]  # fmt: skip
        raise CheckpointError(f"weights do not belong to this recipe: {'; '.join(lists)}")
    for name, shape in wanted.items():
        if given[name].shape != shape:
            raise CheckpointError(f"{name}: shape {list(given[name].shape)}, the recipe's is {list(shape)}")
