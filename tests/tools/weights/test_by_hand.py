"""Converted weights against a mapping written out number by number, from the modules of transformers and MindFormers'
training graph. Every number of a model is unlike any other, and goes through files, in both directions.
"""

import copy
import json
import tempfile
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from plugins.errors import RecipeError
from tests.tools.weights.test_round_trips import BASES, converted, read_files, save, written
from tools.checkpoint.stored import read_whole
from tools.recipe.load import Recipe
from tools.weights.convert_plan import model_of


class Numbers:
    """Makes tensors of Hugging Face's model, and rows and columns of MindFormers' from them."""

    def __init__(self, kind):
        self.kind, self.count = kind, 1
        self.theirs, self.ours = {}, {}

    def draw(self, name, *shape, kind=None):
        """A tensor of Hugging Face's model; a vector of a router is fp32."""
        size = int(np.prod(shape))
        bits = np.arange(self.count, self.count + size, dtype=np.uint32)
        self.count += size
        kind = kind or self.kind
        whole = bits.astype(np.uint16).view(kind) if kind != np.float32 else bits.astype(np.float32)
        self.theirs[name] = whole.reshape(shape)
        return self.theirs[name]

    def same(self, ours, theirs, *shape):
        self.ours[ours] = self.draw(theirs, *shape)

    def mlp(self, ours, theirs, hidden, width, interleaved):
        gate = self.draw(f"{theirs}.gate_proj.weight", width, hidden)
        up = self.draw(f"{theirs}.up_proj.weight", width, hidden)
        joint = np.empty((2 * width, hidden), gate.dtype)
        for row in range(width):
            joint[2 * row if interleaved else row] = gate[row]
            joint[2 * row + 1 if interleaved else width + row] = up[row]
        self.ours[f"{ours}.linear_fc1.weight"] = joint
        self.same(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", hidden, width)


def grouped(numbers, ours, theirs, m):
    """Attention of Llama: MindFormers puts a group's queries, its key and its value one under the other."""
    h, heads, groups, d = m["hidden_size"], m["num_attention_heads"], m["num_key_value_heads"], m["head_dim"]
    query = numbers.draw(f"{theirs}.self_attn.q_proj.weight", heads * d, h)
    key = numbers.draw(f"{theirs}.self_attn.k_proj.weight", groups * d, h)
    value = numbers.draw(f"{theirs}.self_attn.v_proj.weight", groups * d, h)
    rows = []
    for group in range(groups):
        for head in range(group * heads // groups, (group + 1) * heads // groups):
            rows += [query[head * d + row] for row in range(d)]
        rows += [key[group * d + row] for row in range(d)]
        rows += [value[group * d + row] for row in range(d)]
    numbers.ours[f"{ours}.self_attention.linear_qkv.weight"] = np.stack(rows)
    numbers.same(f"{ours}.self_attention.linear_proj.weight", f"{theirs}.self_attn.o_proj.weight", h, heads * d)


def latent(numbers, ours, theirs, m):
    """Attention of DeepSeek-V3, which has the same matrices under other names."""
    ours, theirs = f"{ours}.self_attention", f"{theirs}.self_attn"
    h, heads, kv, q = m["hidden_size"], m["num_attention_heads"], m["kv_lora_rank"], m["q_lora_rank"]
    nope, rope, v = m["qk_nope_head_dim"], m["qk_rope_head_dim"], m["v_head_dim"]
    if q is None:
        numbers.same(f"{ours}.linear_q_proj.weight", f"{theirs}.q_proj.weight", heads * (nope + rope), h)
    else:
        numbers.same(f"{ours}.linear_q_down_proj.weight", f"{theirs}.q_a_proj.weight", q, h)
        numbers.same(f"{ours}.q_layernorm.weight", f"{theirs}.q_a_layernorm.weight", q)
        numbers.same(f"{ours}.linear_q_up_proj.weight", f"{theirs}.q_b_proj.weight", heads * (nope + rope), q)
    numbers.same(f"{ours}.linear_kv_down_proj.weight", f"{theirs}.kv_a_proj_with_mqa.weight", kv + rope, h)
    numbers.same(f"{ours}.kv_layernorm.weight", f"{theirs}.kv_a_layernorm.weight", kv)
    numbers.same(f"{ours}.linear_kv_up_proj.weight", f"{theirs}.kv_b_proj.weight", heads * (nope + v), kv)
    numbers.same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", h, heads * v)


def experts(numbers, ours, theirs, m):
    """Experts: each expert's matrix is turned, gate to the left of up, and one expert lies under the other."""
    h, width, count = m["hidden_size"], m["moe_intermediate_size"], m["n_routed_experts"]
    numbers.same(f"{ours}.router.weight", f"{theirs}.gate.weight", count, h)
    bias = numbers.draw(f"{theirs}.gate.e_score_correction_bias", count, kind=np.float32)
    numbers.ours[f"{ours}.router.expert_bias"] = bias
    into, out = np.empty((count * h, 2 * width), numbers.kind), np.empty((count * width, h), numbers.kind)
    for expert in range(count):
        gate = numbers.draw(f"{theirs}.experts.{expert}.gate_proj.weight", width, h)
        up = numbers.draw(f"{theirs}.experts.{expert}.up_proj.weight", width, h)
        down = numbers.draw(f"{theirs}.experts.{expert}.down_proj.weight", h, width)
        for i in range(h):
            for j in range(width):
                into[expert * h + i, j] = gate[j, i]
                into[expert * h + i, width + j] = up[j, i]
                out[expert * width + j, i] = down[i, j]
    numbers.ours[f"{ours}.experts.weight1"], numbers.ours[f"{ours}.experts.weight2"] = into, out
    interleaved = m["use_interleaved_weight_layout_mlp"]
    shared = m["n_shared_experts"] * width
    numbers.mlp(f"{ours}.shared_experts", f"{theirs}.shared_experts", h, shared, interleaved)


def by_hand(m, kind, tied):
    """Both forms of a model's weights."""
    numbers, h = Numbers(kind), m["hidden_size"]
    numbers.same("embedding.word_embeddings.weight", "model.embed_tokens.weight", m["vocab_size"], h)
    if tied:
        numbers.ours["output_layer.weight"] = numbers.theirs["model.embed_tokens.weight"]
    else:
        numbers.same("output_layer.weight", "lm_head.weight", m["vocab_size"], h)
    numbers.same("decoder.final_layernorm.weight", "model.norm.weight", h)
    mtp, layers = m.get("num_nextn_predict_layers") or 0, m["num_hidden_layers"]
    for number in range(layers + mtp):
        ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        if number >= layers:
            ours = f"mtp.layers.{number - layers}"
            numbers.same(f"{ours}.enorm.weight", f"{theirs}.enorm.weight", h)
            numbers.same(f"{ours}.hnorm.weight", f"{theirs}.hnorm.weight", h)
            numbers.same(f"{ours}.eh_proj.weight", f"{theirs}.eh_proj.weight", h, 2 * h)
            numbers.same(f"{ours}.final_layernorm.weight", f"{theirs}.shared_head.norm.weight", h)
            ours = f"{ours}.transformer_layer"
        numbers.same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", h)
        numbers.same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", h)
        has_experts = "n_routed_experts" in m
        (latent if has_experts else grouped)(numbers, ours, theirs, m)
        if has_experts and number >= m["first_k_dense_replace"]:
            experts(numbers, f"{ours}.mlp", f"{theirs}.mlp", m)
        else:
            interleaved = m["use_interleaved_weight_layout_mlp"]
            numbers.mlp(f"{ours}.mlp", f"{theirs}.mlp", h, m["intermediate_size"], interleaved)
    return numbers.ours, numbers.theirs


@st.composite
def recipes(draw):
    """A recipe of a very small model that the converter takes."""
    family = draw(st.sampled_from(["moe", "dense"]))
    recipe = Recipe(copy.deepcopy(dict(BASES[family])))
    model, layers = recipe["model"]["model_config"], draw(st.integers(1, 3))
    heads = draw(st.sampled_from([3, 6]))
    model |= {
        "num_hidden_layers": layers, "vocab_size": 5, "hidden_size": 6, "intermediate_size": 4,
        "num_attention_heads": heads, "use_interleaved_weight_layout_mlp": draw(st.booleans()), "offset": 0,
    }  # fmt: skip
    if family == "dense":
        model |= {
            "num_key_value_heads": draw(st.sampled_from([1, 3, heads])),
            "head_dim": draw(st.sampled_from([2, 4])),
        }
        return recipe
    shared, mtp = draw(st.integers(1, 2)), draw(st.integers(0, 1))
    model |= {
        "num_nextn_predict_layers": mtp,
        "q_lora_rank": draw(st.sampled_from([None, 5])), "kv_lora_rank": 3, "qk_nope_head_dim": 2, "qk_head_dim": 2,
        "qk_rope_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 3,
        "n_routed_experts": draw(st.sampled_from([1, 3, 6])), "num_experts_per_tok": 1, "moe_intermediate_size": 2,
        "n_shared_experts": shared, "moe_shared_expert_intermediate_size": 2 * shared,
        "first_k_dense_replace": draw(st.sampled_from(sorted({0, 1, layers} - ({layers} if mtp else set())))),
    }  # fmt: skip
    if draw(st.booleans()):
        model |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        model["moe_router_dtype"] = model.pop("router_dense_type")
    return recipe


def in_files(folder, tensors, count):
    """A Hugging Face folder with its tensors in `count` files."""
    folder.mkdir()
    names = sorted(tensors)
    files = {name: f"model-{1 + index % count:05d}-of-{count:05d}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype.name, found[name].shape) == (array.dtype.name, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(recipes(), st.sampled_from([np.float32, ml_dtypes.bfloat16]), st.booleans(), st.sampled_from([1, 3]))
def test_each_number_is_where_a_loop_puts_it(recipe, kind, tied, files):
    model = recipe["model"]["model_config"]
    tied = tied and "n_routed_experts" not in model
    ours, theirs = by_hand(model, kind, tied)
    limit = 10**9 if files == 1 else 200  # bytes of a file
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"):
        folder = Path(name)
        recipe = written(recipe, folder / "recipe.yaml")
        in_files(folder / "hf", theirs, files)
        if tied:
            (folder / "hf" / "config.json").write_text(json.dumps(config(recipe)))
        equal(read_whole(converted(folder / "hf", folder / "ms", recipe, limit)).arrays, ours)
        save(folder / "run" / "checkpoint" / "iteration_00000003", ours)
        back = read_files(
            converted(folder / "run" / "checkpoint" / "iteration_00000003", folder / "back", recipe, limit)
        )
        equal(back, theirs | ({"lm_head.weight": ours["output_layer.weight"]} if tied else {}))


def config(recipe):
    """A config.json that says that the output layer is the embedding."""
    return {**model_of(recipe).hf, "model_type": "llama", "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first_k_dense_replace": 2, "num_nextn_predict_layers": 1}, "has experts in its MTP layer: at most 1"),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, "moe_layer_freq: .* has experts in every layer after"),
        ({"first_k_dense_replace": 0, "moe_layer_freq": [1, 0]}, "moe_layer_freq: .* has experts in every layer after"),
    ],
)
def test_layers_that_hugging_face_does_not_build_are_refused_at_their_key(changes, said):
    """They ended in a list of weights that are missing, which another recipe would not have brought."""
    recipe = Recipe(copy.deepcopy(dict(BASES["moe"])))
    recipe["model"]["model_config"] |= {"num_hidden_layers": 2, "offset": 0, **changes}
    with pytest.raises(RecipeError, match=said):
        model_of(recipe)
