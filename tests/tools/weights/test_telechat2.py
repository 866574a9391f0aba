"""Weights of TeleChat2 under its public names: converted there and back, and what they compute."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from launch.generate.command import forward_recipe
from launch.generate.session import answering_model
from plugins.errors import CheckpointError, RecipeError, TC3Error
from tests.tools.accuracy.reference.grouped import TeleChat2
from tools.accuracy.reference.start import initial_weights
from tools.checkpoint.tensor_files import Header
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.weights.convert import convert
from tools.weights.convert_plan import model_of, plan_conversion, prepare
from tools.weights.hugging_face_config import check_config, config_of
from tools.weights.hugging_face_names import hugging_face_shapes, to_hugging_face, to_mindformers
from tools.weights.hugging_face_sizes import Sizes
from tools.weights.source import open_source

RECIPE = "recipes/telechat2_115b/pretrain_8k.yaml"  # eight query heads share a head of keys and values
LENGTH, WIDTH = 128, 8  # of the mini: tokens, and numbers of a head
MODEL = "model.model_config"


def recipe_of(folder, change=None, full=RECIPE):
    """The mini of the 115B, in a file that may change it."""
    folder.mkdir(exist_ok=True)
    dump_recipe(dict(load_mini(full)), folder / "mini.yaml")
    (folder / "recipe.yaml").write_text(json.dumps({"base_config": "./mini.yaml", **(change or {})}))
    return folder / "recipe.yaml"


def of_model(**keys):
    return {"model": {"model_config": keys}}


def public(folder, recipe, shards=1, tied=False, **config):
    """A folder as the public one, in so many files, with a config.json of Tele-AI's class."""
    sizes = model_of(load_recipe(recipe))
    folder.mkdir()
    weights = initial_weights(sizes, 3)
    if tied:
        del weights["lm_head.weight"]
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    names = names if shards > 1 else ["model.safetensors"]
    where = {name: names[index % shards] for index, name in enumerate(weights)}
    for file in names:
        held = {name: array for name, array in weights.items() if where[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    if shards > 1:
        total = sum(array.nbytes for array in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    content = {**config_of(sizes, "float32"), "tie_word_embeddings": tied, **config}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


def converted(source, target, recipe):
    opened = open_source(source)
    conversion = prepare(opened, recipe, None, int(5e9))
    convert(opened, target, conversion.plan, conversion.sizes)
    return target


@pytest.mark.parametrize("size", ["35b", "115b"])
def test_there_and_back_to_the_file(tmp_path, size):
    recipe = recipe_of(tmp_path / "recipe", full=f"recipes/telechat2_{size}/pretrain_8k.yaml")
    theirs = public(tmp_path / "hf", recipe)
    back = converted(converted(theirs, tmp_path / "ms", recipe), tmp_path / "back", recipe)
    assert (back / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    config = json.loads((back / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("telechat", ["TeleChat2ForCausalLM"])
    sizes = model_of(load_recipe(recipe)).hf
    assert (config["n_head"], config["num_key_value_heads"]) == (
        sizes["num_attention_heads"],
        sizes["num_key_value_heads"],
    )
    assert config["training_seqlen"] == config["base_seqlen"] == LENGTH


def test_another_number_of_files_gives_the_same_weights(tmp_path):
    recipe = recipe_of(tmp_path / "recipe")
    one = converted(public(tmp_path / "one", recipe), tmp_path / "ms1", recipe)
    three = converted(public(tmp_path / "three", recipe, shards=3), tmp_path / "ms3", recipe)
    (name,) = (path.name for path in one.glob("*.safetensors"))
    assert (one / name).read_bytes() == (three / name).read_bytes()


def test_a_tied_head_becomes_a_weight_of_its_own(tmp_path):
    recipe = recipe_of(tmp_path / "recipe")
    back = converted(
        converted(public(tmp_path / "hf", recipe, tied=True), tmp_path / "ms", recipe), tmp_path / "b", recipe
    )
    read = open_source(back)
    assert np.array_equal(read.bits("lm_head.weight")[0], read.bits("transformer.word_embeddings.weight")[0])


@st.composite
def models(draw):
    """TeleChat2 with any number of heads that share a key and a value."""
    groups, shared, width = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([2, 3, 4]))
    hf = {
        "vocab_size": draw(st.sampled_from([5, 11])), "hidden_size": groups * shared * width,
        "intermediate_size": draw(st.integers(1, 7)), "num_hidden_layers": draw(st.integers(1, 3)),
        "num_key_value_heads": groups, "num_attention_heads": groups * shared, "head_dim": width,
    }  # fmt: skip
    return Sizes(hf, 1e-5, draw(st.booleans()), 0, 0.0, 0.0, 0.0, True)


def merged(weights, sizes, layer):
    """linear_qkv and linear_fc1 of a layer, row by row, as the training graph takes them apart."""
    hf, name = sizes.hf, f"transformer.h.{layer}"
    width, groups = hf["head_dim"], hf["num_key_value_heads"]
    shared = hf["num_attention_heads"] // groups
    query, both = (weights[f"{name}.self_attention.{each}.weight"] for each in ("query", "key_value"))
    rows = []
    for group in range(groups):
        rows += [query[(group * shared + head) * width + row] for head in range(shared) for row in range(width)]
        rows += [both[group * 2 * width + row] for row in range(width)]  # the key
        rows += [both[group * 2 * width + width + row] for row in range(width)]  # the value
    gate, up = (weights[f"{name}.mlp.{each}_proj.weight"] for each in ("gate", "up"))
    pairs = zip(gate, up, strict=True)
    return np.array(rows), np.array([row for pair in pairs for row in pair] if sizes.interleaved else [*gate, *up])


@settings(max_examples=30)
@given(models())
def test_every_row_has_the_place_that_a_loop_over_heads_gives_it(sizes):
    weights = initial_weights(sizes, 5)
    ours = to_mindformers(weights, sizes)
    for layer in range(sizes.layers):
        name = f"decoder.layers.{layer}"
        qkv, fc1 = merged(weights, sizes, layer)
        assert np.array_equal(ours[f"{name}.self_attention.linear_qkv.weight"], qkv)
        assert np.array_equal(ours[f"{name}.mlp.linear_fc1.weight"], fc1)
        for mine, theirs in (
            ("self_attention.linear_proj", "self_attention.dense"),
            ("mlp.linear_fc2", "mlp.down_proj"),
        ):
            for kind in ("weight", "bias"):
                assert np.array_equal(ours[f"{name}.{mine}.{kind}"], weights[f"transformer.h.{layer}.{theirs}.{kind}"])
    back = to_hugging_face(ours, sizes)
    assert list(back) == list(weights) and all(np.array_equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("layers", "hidden", "heads", "ffn"), [(30, 4096, 32, 12288), (64, 6144, 48, 20480)])
def test_public_sizes(layers, hidden, heads, ffn):
    """The 7B and the 35B, in which each query head has keys and values of its own."""
    hf = {
        "vocab_size": 131072, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_key_value_heads": heads, "num_attention_heads": heads, "head_dim": 128,
    }  # fmt: skip
    shapes = hugging_face_shapes(Sizes(hf, 1e-5, True, 0, 0.0, 0.0, 0.0, True))
    assert len(shapes) == 3 + 10 * layers
    assert shapes["transformer.h.0.self_attention.key_value.weight"] == (2 * hidden, hidden)
    assert shapes["transformer.h.0.mlp.down_proj.bias"] == shapes["transformer.ln_f.weight"] == (hidden,)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"n_head": 8}, "num_attention_heads is 8, but the recipe has 16"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, but the recipe has 2"),
        ({"num_key_value_heads": None}, "num_key_value_heads is 16, but the recipe has 2"),  # default: all
        ({"ffn_hidden_size": 64}, "intermediate_size is 64"),
        ({"layer_norm_epsilon": 1e-6}, "rms_norm_eps is 1e-06, but the recipe has 1e-05"),
        ({"rope_theta": 1e6}, "rope_theta is 1000000.0, but the recipe has 10000.0"),
        ({"base_seqlen": LENGTH // 4}, f"rope_theta is {10000 * 7 ** (WIDTH / (WIDTH - 2))!r}, but the recipe has 100"),
        ({"training_seqlen": 64, "base_seqlen": 64}, "training_seqlen is 64, and the recipe's max_position_embeddings"),
        ({"embed_layernorm": True}, "embed_layernorm is True, which is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is {'type': 'dynamic'"),
        ({"attention_bias": True}, "attention_bias is True, but the recipe has False"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, config, says):
    recipe = recipe_of(tmp_path / "recipe")
    with pytest.raises(CheckpointError) as refused:
        check_config(public(tmp_path / "hf", recipe, **config), model_of(load_recipe(recipe)))
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ({"rope_theta": ...}, {}),  # fixed in Tele-AI's class
        ({"base_seqlen": LENGTH // 4}, of_model(rope_theta=10000 * 7 ** (WIDTH / (WIDTH - 2)))),
        ({"training_seqlen": 2 * LENGTH, "base_seqlen": 2 * LENGTH}, {}),
    ],
)
def test_the_same_model_in_other_words_is_taken(tmp_path, config, change):
    theirs = public(tmp_path / "hf", recipe_of(tmp_path / "theirs"), **config)
    assert check_config(theirs, model_of(load_recipe(recipe_of(tmp_path / "ours", change))))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"plugins": {"output_biases": False}}, "add_bias_linear: .* has no biases: False"),
        (of_model(head_dim=4), "head_dim: .*TeleChat2 has heads of hidden_size / heads"),
        (of_model(attention_bias=True), "add_qkv_bias: .* has no biases there: False"),
        (of_model(qk_layernorm=True), "qk_layernorm: .*TeleChat2 does not normalise"),
        (of_model(hidden_act="gelu"), "hidden_act: .*TeleChat2 computes SwiGLU"),
    ],
)
def test_a_recipe_of_another_model_is_refused_at_its_key(tmp_path, change, says):
    with pytest.raises(RecipeError, match=says):
        model_of(load_recipe(recipe_of(tmp_path, change)))


def test_a_recipe_without_biases_says_what_to_write(tmp_path):
    plain = {"plugins": {"output_biases": False}, **of_model(add_bias_linear=False)}
    theirs = public(tmp_path / "hf", recipe_of(tmp_path / "theirs"))
    with pytest.raises(CheckpointError, match=r"add_bias_linear: True, and plugins\.output_biases: {}"):
        converted(theirs, tmp_path / "ms", recipe_of(tmp_path / "plain", plain))
    assert not (tmp_path / "ms").exists()


def half(folder):
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file.name


def absent(folder):
    (folder / "model-00003-of-00003.safetensors").unlink()
    return "model-00003-of-00003.safetensors"


def in_the_index(change):
    def spoil(folder):
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        name = change(index["weight_map"])
        file.write_text(json.dumps(index))
        return name

    return spoil


def added(names):
    names["transformer.h.9.mlp.down_proj.bias"] = next(iter(names.values()))
    return "transformer.h.9.mlp.down_proj.bias"


@pytest.mark.parametrize("spoil", [half, absent, in_the_index(added)], ids=["half", "absent", "added"])
def test_a_folder_that_is_not_whole_is_refused_with_the_name(tmp_path, spoil):
    recipe = recipe_of(tmp_path / "recipe")
    theirs = public(tmp_path / "hf", recipe, shards=3)
    name = spoil(theirs)
    with pytest.raises(TC3Error) as refused:
        converted(theirs, tmp_path / "ms", recipe)
    assert name in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.glob("*ms*")), "nothing half-written"


def test_a_tensor_that_is_missing_or_unknown_is_listed():
    sizes = Sizes(
        {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 1,
         "num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 2}, 1e-5, True, 0, 0.0, 0.0, 0.0, True,
    )  # fmt: skip
    headers = {name: Header("F32", shape, 0, 0) for name, shape in hugging_face_shapes(sizes).items()}
    headers["transformer.h.0.mlp.up_proj.bias"] = headers.pop("transformer.h.0.self_attention.dense.bias")
    with pytest.raises(CheckpointError) as refused:
        plan_conversion(headers, sizes, "MindFormers", None, int(5e9))
    assert "1 missing: transformer.h.0.self_attention.dense.bias" in str(refused.value)
    assert "1 not of this model: transformer.h.0.mlp.up_proj.bias" in str(refused.value)


@pytest.mark.slow
def test_mindformers_computes_what_the_weights_mean(tmp_path):
    recipe = recipe_of(tmp_path / "recipe")
    sizes = model_of(load_recipe(recipe))
    weights = converted(public(tmp_path / "hf", recipe), tmp_path / "ms", recipe)
    ids = np.random.default_rng(4).integers(0, sizes.hf["vocab_size"], (1, LENGTH))
    expected = TeleChat2(sizes, initial_weights(sizes, 3)).run(ids)["logits"][0]
    places = [1, 7, LENGTH]
    with answering_model(forward_recipe(load_recipe(recipe)), weights) as logits:
        found = np.array([logits(ids[0, :place].tolist()) for place in places])
    assert np.abs(found - expected[np.array(places) - 1]).max() < 1e-5
    plain = {name: array for name, array in initial_weights(sizes, 3).items() if not name.endswith(".bias")}
    assert np.abs(TeleChat2(sizes, plain).run(ids)["logits"][0] - expected).max() > 1e-3, "biases would be seen"
