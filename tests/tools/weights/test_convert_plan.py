"""These tests check the plan of a conversion, which reads only headers: every tensor is written once or named, and
files have a bounded size.

The forward passes in NumPy, which MindFormers is compared with, against transformers' Llama in torch, if installed.

Llama has all that the dense public models compute: TeleChat2's `key_value` is taken apart by heads here, as Tele-AI's
class views it, and its other linear layers get biases of zero; the 36B's positions are YaRN with their own factor.

A model that transformers wrote, converted: MindFormers computes its logits, and the way back gives its file.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from plugins.errors import CheckpointError, RecipeError
from plugins.hugging_face_weights.plan import EMBEDDING, HEAD
from tests.tools.accuracy.align.cases import sizes
from tests.tools.accuracy.reference.grouped import Grouped, TeleChat2
from tests.tools.weights import renew as frozen
from tests.tools.weights import test_telechat2 as of_telechat2
from tests.tools.weights import test_yarn as of_yarn
from tools.accuracy.align import sides
from tools.accuracy.align.sides import load, on_one_worker
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.start import hyper_of, initial_weights
from tools.checkpoint.tensor_files import Header
from tools.data.index import write_learnable
from tools.recipe.load import load_recipe
from tools.weights.convert import convert
from tools.weights.convert_plan import model_of, plan_conversion, prepare, refuse_lost_biases
from tools.weights.hugging_face_names import hugging_face_shapes, table
from tools.weights.source import INDEX, open_source

MODEL = sizes()
FIRST_EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"


def headers(shapes, dtype="F32"):
    return {name: Header(dtype, tuple(shape), 4 * math.prod(shape)) for name, shape in shapes.items()}


def theirs():
    return headers(hugging_face_shapes(MODEL))


def ours():
    return headers({entry.mindformers: entry.shape for entry in table(MODEL)})


@settings(max_examples=30)
@given(st.integers(1, 200_000), st.sampled_from(["Hugging Face", "MindFormers"]))
def test_every_weight_is_in_one_file_and_files_keep_their_limit_where_they_can(limit, to):
    plan = plan_conversion(theirs() if to == "MindFormers" else ours(), MODEL, to, None, limit)
    assert [entry.mindformers for shard in plan.shards for entry in shard.entries] == list(ours())
    assert plan.bytes == sum(4 * math.prod(entry.shape) for entry in table(MODEL))
    assert all(shard.bytes <= limit or len(shard.entries) == 1 for shard in plan.shards)
    assert len({shard.file for shard in plan.shards}) == len(plan.shards)
    assert plan.tensors == len(theirs() if to == "Hugging Face" else ours())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found.pop(FIRST_EXPERT), f"1 missing: {FIRST_EXPERT}"),
        (lambda found: found.update({"a.weight": Header("F32", (1,), 4)}), "1 not of this model: a.weight"),
        (
            lambda found: found.update({"model.norm.weight": Header("F32", (31,), 4)}),
            "1 of another shape: model.norm.weight [31] instead of [32]",
        ),
        (
            lambda found: found.update({"model.norm.weight": Header("F8_E4M3", (32,), 32)}),
            "1 of a type that is not converted: model.norm.weight (F8_E4M3)",
        ),
        (
            lambda found: [found.pop(name) for name in list(found) if ".experts." in name],
            f"48 missing: {FIRST_EXPERT.replace('down', 'gate')}",
        ),
    ],
)
def test_what_does_not_fit_is_listed(change, said):
    found = theirs()
    change(found)
    with pytest.raises(CheckpointError) as error:
        plan_conversion(found, MODEL, "MindFormers", None, 1000)
    assert said in str(error.value)


def test_all_that_is_wrong_is_said_at_once():
    found = theirs()
    del found[HEAD]
    found["b.weight"] = Header("F32", (1,), 4)
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head.weight; 1 not of this model: b.weight"):
        plan_conversion(found, MODEL, "MindFormers", None, 1000)


def test_the_state_of_a_run_is_left_out_and_counted():
    found = {
        **ours(),
        "adam_m.output_layer.weight": Header("F32", (64, 32), 8192),
        "global_step": Header("I32", (1,), 4),
    }
    found["decoder.layers.1.mlp.router.expert_load"] = Header("F32", (8,), 32)
    plan = plan_conversion(found, MODEL, "Hugging Face", None, 1000)
    assert plan.left_out == {"of the optimizer's state": 1, "counters of the run": 2}


def test_a_weight_that_the_model_lacks_is_never_left_out():
    with pytest.raises(CheckpointError, match=r"1 not of this model: decoder.layers.9.mlp.linear_fc1.weight"):
        plan_conversion(
            {**ours(), "decoder.layers.9.mlp.linear_fc1.weight": Header("F32", (2, 2), 16)},
            MODEL,
            "Hugging Face",
            None,
            1000,
        )


def test_copies_in_the_mtp_layer_are_known_and_buffers_left_out():
    found = theirs()
    found["model.layers.2.embed_tokens.weight"] = found[EMBEDDING]
    found["model.layers.2.shared_head.head.weight"] = found[HEAD]
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = Header("F32", (4,), 16)
    plan = plan_conversion(found, MODEL, "MindFormers", None, 1000)
    assert plan.copies == {
        "model.layers.2.embed_tokens.weight": EMBEDDING,
        "model.layers.2.shared_head.head.weight": HEAD,
    }
    assert plan.left_out == {"rotary frequencies, which are computed": 1}


def test_a_head_that_is_tied_to_the_embedding():
    found = theirs()
    del found[HEAD]
    assert plan_conversion(found, MODEL, "MindFormers", None, 1000, tied=True).stands_for == {HEAD: EMBEDDING}
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head.weight"):
        plan_conversion(found, MODEL, "MindFormers", None, 1000, tied=False)


def test_parts_of_several_types_want_one_to_be_chosen():
    found = theirs()
    found[FIRST_EXPERT] = replace(found[FIRST_EXPERT], dtype="BF16")
    with pytest.raises(CheckpointError, match=r"several types .BF16, F32.; choose one type with --dtype"):
        plan_conversion(found, MODEL, "MindFormers", None, 1000)
    assert plan_conversion(found, MODEL, "MindFormers", "BF16", 1 << 30).dtype == "BF16"


PARTS = {"self_attention.query": "self_attn.q_proj", "self_attention.dense": "self_attn.o_proj"} | {
    name: name
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
}
ENDS = {"transformer.word_embeddings": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}


def logits_of(hf, weights, ids, **config):
    """[S, v] of transformers' Llama with these weights."""
    torch = pytest.importorskip("torch", reason="transformers' Llama needs torch: pip install -e '.[align]'")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes += ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
    model = LlamaForCausalLM(LlamaConfig(**{name: hf[name] for name in sizes}, **config)).eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits[0].numpy()


def as_llama(weights, hf):
    """TeleChat2's weights under Llama's names, with biases everywhere."""
    found = {f"{new}.weight": weights[f"{old}.weight"] for old, new in ENDS.items()}
    width = hf["hidden_size"] // hf["num_attention_heads"]
    for layer in range(hf["num_hidden_layers"]):
        theirs, name = f"transformer.h.{layer}", f"model.layers.{layer}"
        found |= {f"{name}.{new}.weight": weights[f"{theirs}.{old}.weight"] for old, new in PARTS.items()}
        both = weights[f"{theirs}.self_attention.key_value.weight"].reshape(-1, 2, width, hf["hidden_size"])
        for place, part in enumerate(("k_proj", "v_proj")):
            found[f"{name}.self_attn.{part}.weight"] = both[:, place].reshape(-1, hf["hidden_size"])
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            found[f"{name}.{part}.bias"] = np.zeros(len(found[f"{name}.{part}.weight"]), np.float32)
        for old in ("self_attention.dense", "mlp.down_proj"):
            found[f"{name}.{PARTS[old]}.bias"] = weights[f"{theirs}.{old}.bias"]
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


@pytest.mark.parametrize("size", ["35b", "115b"])
def test_telechat2(tmp_path, size):
    sizes = model_of(load_recipe(of_telechat2.recipe_of(tmp_path, full=f"recipes/telechat2_{size}/pretrain_8k.yaml")))
    weights = initial_weights(sizes, 3)
    ids = np.random.default_rng(4).integers(0, sizes.hf["vocab_size"], (1, of_telechat2.LENGTH))
    hf = {**sizes.hf, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    theirs = logits_of(hf, as_llama(weights, hf), ids, attention_bias=True, mlp_bias=True)
    assert np.abs(TeleChat2(sizes, weights).run(ids)["logits"][0] - theirs).max() < 1e-5


@pytest.mark.parametrize(("factor", "right"), [(1.0970406, True), (1.1386294, False)])
def test_telechat3_36b(tmp_path, factor, right):
    """To four times the length before the extension; standard YaRN would be another model."""
    sizes = model_of(load_recipe(of_yarn.recipe_of(tmp_path)))
    weights = initial_weights(sizes, 3)
    ids = np.random.default_rng(4).integers(0, sizes.hf["vocab_size"], (1, of_yarn.LENGTH))
    scaling = {**of_yarn.PUBLIC, "rope_type": "yarn", "attention_factor": factor}
    hf = {**sizes.hf, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    theirs = logits_of(hf, weights, ids, max_position_embeddings=of_yarn.LENGTH, rope_scaling=scaling)
    apart = np.abs(Grouped(sizes, weights).run(ids)["logits"][0] - theirs).max()
    assert apart < 1e-5 if right else apart > 1e-2


LIMIT = 200_000  # bytes of a file: several files for MindFormers
LOGITS = 1e-5


def converted(source, target, limit):
    opened = open_source(source)
    conversion = prepare(opened, frozen.RECIPE, None, limit)
    convert(opened, target, conversion.plan, conversion.sizes)
    return target


@pytest.fixture(scope="module")
def ours_of_frozen(tmp_path_factory):
    """The frozen model in MindFormers' form."""
    return converted(frozen.FOLDER, tmp_path_factory.mktemp("frozen") / "ms", LIMIT)


def test_biases_by_which_routers_choose_are_not_left_out_in_silence(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    unbiased = "model: {model_config: {moe_router_enable_expert_bias: False}}"
    recipe.write_text(f"base_config: {frozen.RECIPE}\n{unbiased}\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml.*moe_router_enable_expert_bias: the routers in .* write True"):
        prepare(open_source(frozen.FOLDER), recipe, None, LIMIT)
    arrays = load_file(frozen.FOLDER / "model.safetensors")
    biases = {name: array * 0 for name, array in arrays.items() if name.endswith("e_score_correction_bias")}
    (tmp_path / "zeros").mkdir()
    save_file(arrays | biases, tmp_path / "zeros" / "model.safetensors", {"format": "pt"})
    assert biases
    refuse_lost_biases(open_source(tmp_path / "zeros"), load_recipe(recipe))  # nothing would be lost


def test_it_is_small():
    assert sum(path.stat().st_size for path in Path(frozen.HERE).rglob("*") if path.is_file()) < 2 * 2**20


def test_there_and_back_to_the_file(ours_of_frozen, tmp_path):
    assert len(list(ours_of_frozen.glob("*.safetensors"))) > 2
    back = converted(ours_of_frozen, tmp_path / "back", int(5e9))
    names = [path.name for path in back.glob("*.safetensors")]
    assert names == ["model.safetensors"] and not (back / INDEX).exists(), "as transformers names a single file"
    assert (back / names[0]).read_bytes() == (frozen.FOLDER / names[0]).read_bytes()


def test_the_configuration_that_is_written_is_the_same_to_transformers(ours_of_frozen, tmp_path):
    from transformers import DeepseekV3Config

    back = converted(ours_of_frozen, tmp_path / "back", int(5e9))
    given, written = (DeepseekV3Config.from_pretrained(folder).to_dict() for folder in (frozen.FOLDER, back))
    apart = {key for key in given | written if given.get(key) != written.get(key)}
    # its class has no MTP layer, and no word for how many there are; vLLM and SGLang have
    assert apart <= {"transformers_version", "_name_or_path", "num_nextn_predict_layers"}


def test_the_forward_pass_in_numpy_computes_its_logits():
    sizes = prepare(open_source(frozen.FOLDER), frozen.RECIPE, None, LIMIT).sizes
    logits = Forward(sizes, load_file(frozen.FOLDER / "model.safetensors")).run(frozen.tokens())["logits"]
    assert np.abs(frozen.sample(logits) - np.load(frozen.LOGITS)).max() < LOGITS


@pytest.mark.slow
def test_mindformers_computes_its_logits(ours_of_frozen, tmp_path):
    write_learnable(tmp_path / "corpus", 512)
    recipe = on_one_worker(load(frozen.RECIPE, (), str(tmp_path / "corpus"), 1), 1)
    recipe["checkpoint"] = {"save_path": "", "load_path": str(ours_of_frozen), "no_load_optim": True}
    record = sides.run_mindformers(recipe, tmp_path / "run", hyper_of(recipe, 1), None)
    assert np.array_equal(record.batch["input_ids"][0], frozen.tokens())
    assert np.abs(frozen.sample(record.trace["logits"]) - np.load(frozen.LOGITS)).max() < LOGITS


@pytest.mark.slow
def test_transformers_loads_what_is_written(ours_of_frozen, tmp_path):
    pytest.importorskip("torch", reason="transformers' model needs torch: pip install -e '.[align]'")
    back = converted(ours_of_frozen, tmp_path / "back", LIMIT)  # in several files, with an index
    assert (back / INDEX).exists()
    assert np.array_equal(frozen.sample(frozen.compute(back)), np.load(frozen.LOGITS))


def test_another_value_in_the_file_is_noticed(ours_of_frozen, tmp_path):
    """The comparison of bytes above can fail."""
    arrays = load_file(frozen.FOLDER / "model.safetensors")
    arrays["model.norm.weight"] = np.nextafter(arrays["model.norm.weight"], np.float32(9))
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file(arrays, changed / "model.safetensors", {"format": "pt"})
    (changed / "config.json").write_text(json.dumps(json.loads((frozen.FOLDER / "config.json").read_text())))
    back = converted(converted(changed, tmp_path / "ms", LIMIT), tmp_path / "back", int(5e9))
    assert (back / "model.safetensors").read_bytes() != (frozen.FOLDER / "model.safetensors").read_bytes()
