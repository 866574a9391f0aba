"""This module maps the weights of TeleChat3 and TeleChat2 between MindFormers' names and Hugging Face's names. The
module uses only NumPy.

Every MindFormers tensor is cut into one or more Hugging Face tensors, and every element has exactly one place in the
Hugging Face tensors, so gradients, Adam moments and updates can be converted like weights. The names come from
`plugins/hugging_face_weights/plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from plugins.errors import CheckpointError
from plugins.hugging_face_weights.plan import Model, Row, rows
from plugins.hyper_connections import plan as hyper_connections
from tools.weights.hugging_face_sizes import Sizes

Arrays = dict[str, np.ndarray]

# state of the run in MindFormers' routers and, with Muon, its attention; not weights, and not in Hugging Face
STATE = (".router.expert_load", ".router.fi_accu", ".core_attention.max_logits_val")
_BLOCK, _APART = 512, 8  # numbers: of the square that is turned at a time, and between its rows


@dataclass(frozen=True)
class Entry:
    """An `Entry` is one tensor of MindFormers with the Hugging Face tensors that hold its elements.

    Args:
        mindformers: the name of the tensor in MindFormers.
        shape: the shape of the tensor in MindFormers.
        parts: the names of the Hugging Face tensors; there are several for `gate_up` (gate, up), `experts_in` (gate, up
            of expert 0, of 1, ...), `experts_out` (down of each expert) and `qkv` (query, key, value; or query,
            key_value).
        how: the form of MindFormers' tensor: `same`, `gate_up` [2F, h] with `interleaved` rows or halves, `experts_in`
            [E * h, 2H], `experts_out` [E * H, h], or `qkv` [(N + 2 G) * D, h]: for each of `groups` its queries, its
            key, its value; `key_value` [2 G * D, h] has keys and values in the same order.
        groups: the number G of groups of query heads in `qkv`.
        queries: the number of query heads in a group of `qkv`, N / G.
    """

    mindformers: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    how: str = "same"
    interleaved: bool = False
    trained: bool = True
    groups: int = 1
    queries: int = 1

    @property
    def decayed(self) -> bool:
        """Return whether the optimizer applies weight decay to this weight; MindFormers leaves out weights of one
        dimension (mindformers/trainer/optimizer_grouped_parameters.py).
        """
        return self.trained and len(self.shape) > 1

    @property
    def heads(self) -> tuple[int, ...]:
        """Return for each part of a joint `qkv` weight the number of its heads in one group (a group has one key and
        one value head).
        """
        return (self.queries, *[2 // (len(self.parts) - 1)] * (len(self.parts) - 1))

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the tensors of Hugging Face into which a tensor of MindFormers is split, in their order."""
        return [self.part(array, index) for index in range(len(self.parts))]

    def part(self, array: np.ndarray, index: int) -> np.ndarray:
        """Return one of the tensors of Hugging Face into which a tensor of MindFormers is split."""
        if self.how == "gate_up":
            halves = array.reshape(-1, 2, array.shape[1]).swapaxes(0, 1) if self.interleaved else np.split(array, 2)
            return np.ascontiguousarray(halves[index])
        if self.how == "qkv":
            grouped = array.reshape(self.groups, self.queries + 2, -1, array.shape[1])  # [G, N / G + 2, D, h]
            first = sum(self.heads[:index])
            return np.ascontiguousarray(grouped[:, first : first + self.heads[index]]).reshape(-1, array.shape[1])
        if self.how == "experts_in":
            width = array.shape[1] // 2
            expert = array.reshape(len(self.parts) // 2, -1, array.shape[1])[index // 2]  # [h, 2H]
            return _transposed(expert[:, index % 2 * width :][:, :width])
        if self.how == "experts_out":
            return _transposed(array.reshape(len(self.parts), -1, array.shape[1])[index])
        return array

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join Hugging Face tensors into one MindFormers tensor, and return this tensor; the function is the inverse of
        `split`.
        """
        pieces = list(self.pieces(parts.__getitem__))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def pieces(self, part: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the tensor that `join` returns in pieces, one piece for each expert. The function `part(i)` is called
        once for each tensor i of Hugging Face.
        """
        if self.how == "gate_up":
            both = [part(0), part(1)]
            yield np.stack(both, axis=1).reshape(self.shape) if self.interleaved else np.concatenate(both)
        elif self.how == "qkv":
            grouped = [part(index).reshape(self.groups, -1, self.shape[1]) for index in range(len(self.parts))]
            yield np.concatenate(grouped, axis=1).reshape(self.shape)
        elif self.how == "experts_in":
            for index in range(0, len(self.parts), 2):
                gate, up = part(index), part(index + 1)
                expert = np.empty((gate.shape[1], 2 * len(gate)), gate.dtype)
                _transpose(gate, expert[:, : len(gate)])
                _transpose(up, expert[:, len(gate) :])
                yield expert
        elif self.how == "experts_out":
            for index in range(len(self.parts)):
                yield _transposed(part(index))
        else:
            yield part(0)


def table(sizes: Sizes) -> list[Entry]:
    """Return an entry for every weight of a model, in the order of the forward pass. All weights in the result are
    trained, except for the routers' biases.
    """
    shapes = _shapes(sizes)
    return [_entry(sizes, row, shapes) for row in rows(names_of(sizes))]


def names_of(sizes: Sizes) -> Model:
    """Return the properties of a model that determine the names of its weights, such as the number of layers."""
    hf = sizes.hf
    if sizes.is_dense:
        return Model(sizes.layers, 0, sizes.layers, 0, latent_query=False, grouped=True, telechat2=sizes.telechat2)
    dense, experts = hf["first_k_dense_replace"], hf["n_routed_experts"]
    latent_query, streams = hf["q_lora_rank"] is not None, sizes.streams > 1
    return Model(sizes.layers, sizes.mtp_layers, dense, experts, latent_query, hyper_connected=streams)


def to_hugging_face(arrays: Mapping[str, np.ndarray], sizes: Sizes) -> Arrays:
    """Return MindFormers' tensors, split and named as in Hugging Face's model.

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
    """Return Hugging Face's tensors, joined and named as in MindFormers' model. The function raises the same errors as
    `to_hugging_face`.
    """
    _check(arrays, hugging_face_shapes(sizes))
    return {entry.mindformers: entry.join([arrays[name] for name in entry.parts]) for entry in table(sizes)}


def hugging_face_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of Hugging Face's model by name, in the order of the forward pass."""
    return {name: part_shape(entry, index) for entry in table(sizes) for index, name in enumerate(entry.parts)}


def part_shape(entry: Entry, index: int) -> tuple[int, ...]:
    """Return the shape of one of the tensors of Hugging Face into which a tensor of MindFormers is split."""
    if entry.how == "qkv":
        return (entry.shape[0] // (entry.queries + 2) * entry.heads[index], entry.shape[1])
    rows = entry.shape[0] // (len(entry.parts) // 2 if entry.how == "experts_in" else len(entry.parts))
    columns = entry.shape[1:]
    if entry.how == "experts_in":
        return (columns[0] // 2, rows)
    return (columns[0], rows) if entry.how == "experts_out" else (rows, *columns)


def _transposed(array: np.ndarray) -> np.ndarray:
    """Return `array.T` in row-major order."""
    out = np.empty(array.shape[::-1], array.dtype)
    _transpose(array, out)
    return out


def _transpose(array: np.ndarray, out: np.ndarray) -> None:
    """Write `array.T` into `out`, block by block: NumPy's own copy takes twelve times as long.

    Rows of a weight are often a round number of kilobytes apart, which a cache maps to a few of its places; those of
    the copy are not.
    """
    block = np.empty((_BLOCK, _BLOCK + _APART), array.dtype)
    for row in range(0, array.shape[0], _BLOCK):
        for column in range(0, array.shape[1], _BLOCK):
            given = array[row : row + _BLOCK, column : column + _BLOCK]
            copied = block[: given.shape[0], : given.shape[1]]
            copied[...] = given
            out[column : column + _BLOCK, row : row + _BLOCK] = copied.T


def _entry(sizes: Sizes, row: Row, shapes: Mapping[str, tuple[int, ...]]) -> Entry:
    name = row.mindformers
    shape = next(shape for end, shape in shapes.items() if name.endswith(f".{end}") or name == end)
    if row.how == "experts":
        return Entry(name, row.parts, shape, "experts_in" if len(row.stacks) > 1 else "experts_out")
    if row.how == "qkv":
        groups = sizes.hf["num_key_value_heads"]
        return Entry(name, row.parts, shape, "qkv", groups=groups, queries=sizes.hf["num_attention_heads"] // groups)
    interleaved = sizes.interleaved and row.how == "gate_up"
    return Entry(name, row.parts, shape, row.how, interleaved, trained=not name.endswith("expert_bias"))


def _shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return what MindFormers' names end with -> shape."""
    hf = sizes.hf
    hidden, dense = hf["hidden_size"], hf["intermediate_size"]
    norms = ("input_layernorm", "pre_mlp_layernorm", "final_layernorm", "enorm", "hnorm")
    vocabulary = dict.fromkeys(("word_embeddings.weight", "output_layer.weight"), (hf["vocab_size"], hidden))
    attention = _grouped_query(hf) if sizes.is_dense else {**_latent_attention(hf), **_experts(hf)}
    gates = hyper_connections.shapes(sizes.streams, hidden)
    return {
        **vocabulary,
        **{f"{part}.{name}": shape for part in hyper_connections.SUBLAYERS for name, shape in gates.items()},
        **{f"{norm}.weight": (hidden,) for norm in norms},
        "eh_proj.weight": (hidden, 2 * hidden),
        "mlp.linear_fc1.weight": (2 * dense, hidden),
        "mlp.linear_fc2.weight": (hidden, dense),
        **attention,
    }


def _latent_attention(hf: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, q_rank, kv_rank = (
        hf[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    return {
        "linear_q_proj.weight": (heads * (nope + rope), hidden),
        "linear_q_down_proj.weight": (q_rank, hidden),
        "q_layernorm.weight": (q_rank,),
        "linear_q_up_proj.weight": (heads * (nope + rope), q_rank),
        "linear_kv_down_proj.weight": (kv_rank + rope, hidden),
        "kv_layernorm.weight": (kv_rank,),
        "linear_kv_up_proj.weight": (heads * (nope + value), kv_rank),
        "linear_proj.weight": (hidden, heads * value),
    }


def _grouped_query(hf: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of grouped-query attention, for which MindFormers has one projection for queries, keys and
    values.
    """
    hidden, heads, groups, size = (
        hf[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    biases = dict.fromkeys(("linear_proj.bias", "linear_fc2.bias"), (hidden,))  # which only TeleChat2's names have
    shapes = {"linear_qkv.weight": ((heads + 2 * groups) * size, hidden), "linear_proj.weight": (hidden, heads * size)}
    return {**shapes, **biases}


def _experts(hf: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return router, routed experts and shared expert."""
    hidden, width, count = hf["hidden_size"], hf["moe_intermediate_size"], hf["n_routed_experts"]
    shared = hf["n_shared_experts"] * width
    return {
        "router.weight": (count, hidden),
        "router.expert_bias": (count,),
        "experts.weight1": (count * hidden, 2 * width),
        "experts.weight2": (count * width, hidden),
        "shared_experts.linear_fc1.weight": (2 * shared, hidden),
        "shared_experts.linear_fc2.weight": (hidden, shared),
    }


def _check(given: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless `given` has exactly the names and shapes of `wanted`."""
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        lists = [f"{what} {', '.join(names[:3])}{' ...' * (len(names) > 3)}" for what, names in
                 (("missing", missing), ("not of this model:", unknown)) if names]  # fmt: skip
        raise CheckpointError(f"these weights do not belong to this recipe: {'; '.join(lists)}")
    for name, shape in wanted.items():
        if given[name].shape != shape:
            raise CheckpointError(
                f"{name}: the weight has the shape {list(given[name].shape)}, but the recipe needs {list(shape)}"
            )
