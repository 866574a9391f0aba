"""Public folders that are odd: keys of config.json that change numbers, files without an index, pickles, tied heads."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from plugins.errors import CheckpointError, RecipeError
from tests.tools.weights.test_yarn import PUBLIC, converted, public, recipe_of
from tools.accuracy.reference.start import initial_weights
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_config import check_config, config_of
from tools.weights.source import INDEX, open_source

FULL = {
    "telechat3": "recipes/telechat3_36b/context_32k.yaml",
    "telechat2": "recipes/telechat2_115b/pretrain_8k.yaml",
    "deepseek_v3": "recipes/telechat3_105b/context_32k.yaml",
}
MODELS = {name: model_of(load_mini(recipe)) for name, recipe in FULL.items()}
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("config")


def refusal(folder, model, config):
    """Return the error about a config.json; return None if the file is accepted."""
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    try:
        assert check_config(folder, MODELS[model])
    except CheckpointError as error:
        assert "\n" not in str(error) and str(folder / "config.json") in str(error)
        return str(error)
    return None


values = st.recursive(
    st.one_of(
        st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from([0, 1, 1.0, 2, 10**400, "yarn"])
    ),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(max_size=4), inner, min_size=1),
    max_leaves=4,
)
names = st.from_regex(r"[a-z]{1,8}_[a-z]{1,8}", fullmatch=True)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_written_is_taken(folder, model):
    assert refusal(folder, model, config_of(MODELS[model], "float32")) is None


@settings(max_examples=150)
@given(model=st.sampled_from(list(MODELS)), name=names, value=values)
def test_a_key_that_is_not_known_is_never_converted_in_silence(folder, model, name, value):
    config = config_of(MODELS[model], "float32")
    said = refusal(folder, model, {**config, name: value})
    assert (said is None) == (value == "") or name in config
    assert said is None or f"{name} is " in said


@pytest.mark.slow
@settings(max_examples=150)
@given(model=st.sampled_from(list(MODELS)), data=st.data(), value=values)
def test_another_value_of_a_key_that_decides_numbers_is_refused(folder, model, data, value):
    """Another value of a key that decides numbers is refused, whatever its type: no config.json ends in a traceback."""
    config = config_of(MODELS[model], "float32")
    free = {"architectures", "torch_dtype", "use_cache", "tie_word_embeddings", "pad_token_id", "attention_dropout"}
    free |= {"hidden_dropout", "max_position_embeddings", "num_nextn_predict_layers"}
    lengths = {"training_seqlen", "base_seqlen"} if model == "telechat2" else set()  # a longer one changes nothing
    key = data.draw(st.sampled_from(sorted(set(config) - free - lengths)))
    number = isinstance(value, (int, float)) and isinstance(config[key], (int, float))
    same = value == config[key] or (number and abs(value) < 1e300 and math.isclose(value, config[key], rel_tol=1e-6))
    unset = value in ("", [], {}) or (not value and config[key] in (None, False))
    said = refusal(folder, model, {**config, key: value})
    assert said is not None or same or unset
    refusal(folder, model, {**config, **dict.fromkeys(lengths, value)})
    refusal(folder, model, {**config, "rope_scaling": value, "rope_parameters": {key: value}})
    scaling = data.draw(st.sampled_from(["rope_type", "factor", "beta_fast", "mscale", "mscale_all_dim", "truncate"]))
    refusal(folder, model, {**config, "rope_scaling": {**PUBLIC, scaling: value}})


@pytest.mark.parametrize(
    ("model", "config", "says"),
    [
        ("telechat3", {"sliding_window": 16}, "sliding_window is 16, and the training graph attends to all tokens"),
        ("telechat3", {"sliding_window": 4096}, None),  # wider than the recipe's texts
        ("telechat3", {"sliding_window": 16, "use_sliding_window": False}, None),
        ("telechat3", {"sliding_window": 16, "use_sliding_window": True}, "use_sliding_window is True"),
        ("telechat3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ("telechat3", {"layer_types": ["full_attention"], "sliding_window": 16}, None),
        (
            "telechat3",
            {"embedding_multiplier": 12.0},
            "embedding_multiplier is 12.0, and the training graph computes 1",
        ),
        ("telechat3", {"embedding_multiplier": 1.0, "logits_scaling": 1}, None),
        ("telechat3", {"logits_scaling": 8}, "logits_scaling is 8"),
        ("telechat3", {"attention_multiplier": 0.5}, "attention_multiplier is 0.5"),
        ("telechat3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: this key is not known"),
        ("telechat3", {"final_logit_softcapping": None}, None),
        ("telechat3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("telechat3", {"quantization_config": {"bits": 8}}, "quantization_config is {'bits': 8}"),
        ("telechat3", {"model_type": "gemma"}, "model_type is 'gemma', whose layers may compute something else"),
        ("telechat3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_scaling.full_attention"),
        ("telechat3", {"rope_scaling": {**PUBLIC, "partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor"),
        ("telechat3", {"rope_scaling": {**PUBLIC, "type": "linear"}}, "but its type 'linear'"),
        ("telechat3", {"rope_parameters": {"rope_theta": 5e5, **PUBLIC}}, "rope_theta differs from that of rope_param"),
        ("telechat3", {"rope_parameters": {**PUBLIC, "factor": 8}}, "rope_scaling and rope_parameters differ"),
        ("telechat3", {"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, **PUBLIC}}, None),
        ("telechat3", {"rms_norm_eps": None}, "rms_norm_eps is 1e-06, but the recipe has 1e-05"),  # the default
        ("telechat2", {"layer_norm_epsilon": None}, "rms_norm_eps is None, but the recipe has 1e-05"),
        ("telechat2", {"logn": True}, "logn is True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}, None),
        ("deepseek_v3", {"rope_scaling": None}, "rope_scaling is None, but the recipe has {'rope_type': 'yarn'"),
        ("deepseek_v3", {"routed_scaling_factor": None}, "routed_scaling_factor is 2.5"),
        ("deepseek_v3", {"head_dim": 3}, "head_dim is 3"),
    ],
)
def test_keys_by_name(folder, model, config, says):
    said = refusal(folder, model, {**config_of(MODELS[model], "float32"), **config})
    assert (says in said) if says else said is None


@pytest.mark.parametrize("text", ["[]", '[["model_type", "llama"]]', "3", "null", '"llama"'])
def test_a_configuration_that_is_no_mapping(folder, text):
    assert "this is not the configuration of a model: it is a " in refusal(folder, "telechat3", text)


def test_keys_that_a_recipe_trains_and_hugging_face_has_not(tmp_path):
    change = {"model": {"model_config": {"window_size": [16, 0]}}}
    with pytest.raises(RecipeError, match=r"window_size: .* attends to all tokens"):
        model_of(load_recipe(recipe_of(tmp_path, change)))


def dealt(folder, files, again=()):
    """The one file of a public folder dealt to several, without an index; tensors of `again` are in two of them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number in range(files):
        held = {name: array for at, (name, array) in enumerate(weights.items()) if at % files == number}
        held |= {name: weights[name] for name in again}
        save_file(held, folder / f"model-{number + 1:05d}-of-{files:05d}.safetensors", {"format": "pt"})
    return folder


def test_several_files_without_an_index_are_read_by_the_names_in_them(tmp_path):
    recipe = recipe_of(tmp_path / "recipe")
    whole = converted(public(tmp_path / "one", recipe), tmp_path / "whole", recipe)
    parts = converted(dealt(public(tmp_path / "three", recipe), 3), tmp_path / "parts", recipe)
    (name,) = (path.name for path in whole.glob("*.safetensors"))
    assert (whole / name).read_bytes() == (parts / name).read_bytes()
    other = dealt(public(tmp_path / "other", recipe), 2)
    for number, file in enumerate(sorted(other.glob("*.safetensors"))):
        file.rename(other / f"consolidated.{number}.safetensors")
    odd = converted(other, tmp_path / "odd", recipe)
    assert (whole / name).read_bytes() == (odd / name).read_bytes(), "config.json says whose form it is"


def test_a_file_that_is_missing_or_a_tensor_that_is_there_twice_is_named(tmp_path):
    recipe = recipe_of(tmp_path / "recipe")
    twice = dealt(public(tmp_path / "twice", recipe), 2, again=["model.norm.weight"])
    with pytest.raises(
        CheckpointError, match=rf"this file and .*of-00002.* both hold model\.norm\.weight, and {INDEX}"
    ):
        open_source(twice)
    (twice / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: the file is missing"):
        open_source(twice)
    lacks = dealt(public(tmp_path / "lacks", recipe), 2)
    file = lacks / "model-00002-of-00002.safetensors"
    held = load_file(file)
    name = next(iter(held))
    save_file({each: array for each, array in held.items() if each != name}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"1 missing: {name}"):
        converted(lacks, tmp_path / "ms", recipe)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickles_are_not_read(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match=rf"{name} is a pickle, .* can run code; write safetensors"):
        open_source(tmp_path)


def test_a_corpus_is_not_called_a_pickle(tmp_path):
    for name in ("corpus.bin", "corpus.idx"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="safetensors") as error:
        open_source(tmp_path)
    assert "pickle" not in str(error.value)


@pytest.mark.parametrize("step", [0, 1])
def test_a_head_that_is_stored_beside_a_tie_must_be_the_embedding(tmp_path, step):
    recipe = recipe_of(tmp_path / "recipe")
    theirs = public(tmp_path / "hf", recipe, tie_word_embeddings=True)
    weights = initial_weights(model_of(load_recipe(recipe)), 3)
    weights[HEAD] = weights["model.embed_tokens.weight"] + step
    save_file(weights, theirs / "model.safetensors", {"format": "pt"})
    if step:
        with pytest.raises(CheckpointError, match=rf"{HEAD} differs from model.embed_tokens.weight"):
            converted(theirs, tmp_path / "ms", recipe)
    else:
        converted(theirs, tmp_path / "ms", recipe)
