"""Weights under two sets of names: nothing lost, nothing doubled, every cut where it belongs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import CheckpointError
from plugins.hugging_face_weights.plan import copies
from tests.launch.resume.test_model import STRANGERS, stranger
from tests.tools.accuracy.align.cases import sizes
from tests.tools.accuracy.reference.renew import checksum
from tests.tools.weights import renew as frozen
from tools.accuracy.reference.start import initial_weights, nudged
from tools.checkpoint.stored import kind_of
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_names import (
    STATE,
    hugging_face_shapes,
    names_of,
    table,
    to_hugging_face,
    to_mindformers,
)
from tools.weights.hugging_face_sizes import Sizes
from tools.weights.reshard_target import target_of


def numbered(model):
    """MindFormers' tensors with every element unlike any other."""
    start, out = 0, {}
    for entry in table(model):
        count = int(np.prod(entry.shape))
        out[entry.mindformers] = np.arange(start, start + count, dtype=np.float64).reshape(entry.shape)
        start += count
    return out, start


models = st.builds(
    sizes,
    mtp=st.integers(0, 2),
    interleaved=st.booleans(),
    num_hidden_layers=st.integers(1, 3),
    hc_mult=st.sampled_from([1, 2]),
    first_k_dense_replace=st.integers(0, 2),
    n_routed_experts=st.integers(1, 5),
    n_shared_experts=st.integers(1, 3),
    q_lora_rank=st.sampled_from([None, 7]),
    hidden_size=st.sampled_from([6, 10]),
    moe_intermediate_size=st.sampled_from([4, 5]),
    v_head_dim=st.sampled_from([3, 8]),
)


@st.composite
def llamas(draw):
    """Dense models of grouped-query attention."""
    groups = draw(st.integers(1, 3))
    hf = {
        "vocab_size": 11, "hidden_size": draw(st.sampled_from([6, 10])), "intermediate_size": 8,
        "num_hidden_layers": draw(st.integers(1, 3)), "num_key_value_heads": groups,
        "num_attention_heads": groups * draw(st.integers(1, 4)), "head_dim": draw(st.sampled_from([2, 5])),
    }  # fmt: skip
    return Sizes(hf, 1e-5, draw(st.booleans()), 0, 0.0, 0.0, 0.0)


@settings(max_examples=40)
@given(models | llamas())
def test_round_trip_is_identity_and_every_element_has_one_place(model):
    arrays, count = numbered(model)
    theirs = to_hugging_face(arrays, model)
    assert {name: array.shape for name, array in theirs.items()} == hugging_face_shapes(model)
    everything = np.concatenate([array.ravel() for array in theirs.values()])
    assert sorted(everything) == list(range(count))
    back = to_mindformers(theirs, model)
    assert list(back) == list(arrays)
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


@settings(max_examples=20)
@given(models | llamas())
def test_the_other_way_round_too(model):
    theirs = initial_weights(model, 3)
    back = to_hugging_face(to_mindformers(theirs, model), model)
    assert checksum(back) == checksum(theirs)


def test_where_query_key_and_value_lie():
    """A group's queries, its key, its value: as SelfAttention of the training graph takes linear_qkv apart."""
    hf = {"hidden_size": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 3, "vocab_size": 5}
    model = Sizes({**hf, "intermediate_size": 4, "num_hidden_layers": 1}, 1e-5, True, 0, 0.0, 0.0, 0.0)
    arrays, _ = numbered(model)
    merged = arrays["decoder.layers.0.self_attention.linear_qkv.weight"]  # [(6 + 2 * 2) * 3, 4]
    theirs = to_hugging_face(arrays, model)
    query, key, value = (theirs[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    group = 5 * 3  # rows: three queries, a key, a value
    assert np.array_equal(query, np.concatenate([merged[:9], merged[group : group + 9]]))
    assert np.array_equal(key, np.concatenate([merged[9:12], merged[group + 9 : group + 12]]))
    assert np.array_equal(value, np.concatenate([merged[12:15], merged[group + 12 :]]))


def test_where_gate_and_up_lie():
    model = sizes(interleaved=True)
    arrays, _ = numbered(model)
    theirs = to_hugging_face(arrays, model)
    fc1 = arrays["decoder.layers.0.mlp.linear_fc1.weight"]
    assert np.array_equal(theirs["model.layers.0.mlp.gate_proj.weight"], fc1[0::2])
    assert np.array_equal(theirs["model.layers.0.mlp.up_proj.weight"], fc1[1::2])
    halves = to_hugging_face(arrays, sizes(interleaved=False))
    assert np.array_equal(halves["model.layers.0.mlp.up_proj.weight"], fc1[len(fc1) // 2 :])
    width, hidden = 16, 32
    expert = arrays["decoder.layers.1.mlp.experts.weight1"].reshape(8, hidden, 2 * width)[5]
    assert np.array_equal(theirs["model.layers.1.mlp.experts.5.gate_proj.weight"], expert[:, :width].T)
    down = arrays["decoder.layers.1.mlp.experts.weight2"].reshape(8, width, hidden)[5]
    assert np.array_equal(theirs["model.layers.1.mlp.experts.5.down_proj.weight"], down.T)


def test_state_of_the_run_is_not_weights_and_the_bias_is_not_trained():
    model = sizes()
    arrays, _ = numbered(model)
    arrays["decoder.layers.1.mlp.router.expert_load"] = np.zeros(8)
    arrays["decoder.layers.1.mlp.router.fi_accu"] = np.zeros(8)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in to_hugging_face(arrays, model)
    decayed = {entry.mindformers: entry.decayed for entry in table(model)}
    assert not decayed["decoder.layers.1.mlp.router.expert_bias"]
    assert not decayed["decoder.final_layernorm.weight"]
    assert decayed["decoder.layers.1.mlp.router.weight"] and decayed["embedding.word_embeddings.weight"]


def test_wrong_weights_are_named():
    model = sizes()
    theirs = initial_weights(model, 0)
    missing = {name: array for name, array in theirs.items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        to_mindformers(missing, model)
    with pytest.raises(CheckpointError, match=r"not of this model: model\.rotary"):
        to_mindformers({**theirs, "model.rotary": np.zeros(1)}, model)
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight: the weight has the shape \[32, 64\], but the recipe needs \[64, 32\]"
    ):
        to_mindformers({**theirs, "lm_head.weight": theirs["lm_head.weight"].T}, model)


def test_weights_depend_on_name_and_seed_only_and_a_nudge_is_one_unit():
    model = sizes()
    one, same, other = initial_weights(model, 0), initial_weights(sizes(vocab_size=48), 0), initial_weights(model, 1)
    assert np.array_equal(one["model.norm.weight"], same["model.norm.weight"])
    assert not np.array_equal(one["model.norm.weight"], other["model.norm.weight"])
    moved = nudged(one)
    for name, array in one.items():
        assert (moved[name] != array).all()
        assert (np.abs(moved[name] - array) <= np.spacing(np.abs(array))).all()


@pytest.mark.parametrize("recipe", frozen.FULL)
def test_every_name_and_shape(recipe):
    """The MTP layer apart, which transformers leaves out."""
    model = replace(model_of(load_recipe(frozen.RECIPES / recipe)), mtp_layers=0)
    found, kept = frozen.summary(hugging_face_shapes(model)), json.loads(frozen.NAMES.read_text())[recipe]
    assert found["groups"] == kept["groups"]
    assert found["sha256"] == kept["sha256"]


def test_xing4_has_the_tensors_of_the_public_index():
    """8,307 tensors in its safetensors index, 31,215,031,088 numbers in all (recipes/xing4_29b/card.yaml)."""
    model = model_of(load_recipe(frozen.RECIPES / "xing4_29b/pretrain_4k.yaml"))
    shapes, repeated = hugging_face_shapes(model), copies(names_of(model))
    assert len(shapes) + len(repeated) == 8307
    sizes = [*map(math.prod, shapes.values()), *(math.prod(shapes[name]) for name in repeated.values())]
    assert sum(sizes) == 31_215_031_088
    assert shapes["model.layers.39.ffn_hc.hc_fn"] == (24, 14336)
    assert not [name for name in shapes if name.startswith("model.layers.40.") and "_hc." in name], "MTP has one stream"


def test_the_checksum_sees_a_number():
    shapes = {"a.0.b": (2, 3), "a.1.b": (2, 3)}
    other = {"a.0.b": (2, 3), "a.2.b": (2, 3)}
    assert frozen.summary(shapes)["groups"] == frozen.summary(other)["groups"]
    assert frozen.summary(shapes)["sha256"] != frozen.summary(other)["sha256"]


RECIPES = Path(__file__).resolve().parents[3] / "recipes"
MODELS = ["telechat3_36b/pretrain_8k.yaml", "telechat3_105b/pretrain_4k.yaml"]
LAYERS = 2


@pytest.fixture(scope="module")
def built(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    for name in STRANGERS:
        dump_recipe(stranger(name), folder / f"{name}.yaml")
    files = [*(RECIPES / name for name in MODELS), *(folder / f"{name}.yaml" for name in STRANGERS)]
    worker = ("-m", "tests.tools.weights.built_worker", LAYERS, *files)
    done = forks.python(*worker, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("built: ") for line in done.stdout.splitlines() if line.startswith("built: ")]
    return dict(zip((*MODELS, *STRANGERS), map(json.loads, lines), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_its_row(built, name):
    model = model_of(load_recipe(RECIPES / name))
    model = replace(model, hf={**model.hf, "num_hidden_layers": LAYERS})
    found = {key: tuple(shape) for key, shape in built[name].items() if not key.endswith(STATE)}
    assert found == {entry.mindformers: entry.shape for entry in table(model)}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRANGERS)
def test_names_of_a_model_that_is_not_converted_are_known_too(built, name):
    """A resume compares them with the checkpoint."""
    recipe = stranger(name)
    recipe["model"]["model_config"]["num_hidden_layers"] = LAYERS
    found = {key: tuple(shape) for key, shape in built[name].items() if kind_of(key) == "weights"}
    assert found == {key: placed.shape for key, placed in target_of(recipe).weights.items()}
