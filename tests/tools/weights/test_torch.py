"""The forward passes in NumPy, which MindFormers is compared with, against transformers' Llama in torch, if installed.

Llama has all that the dense public models compute: TeleChat2's `key_value` is taken apart by heads here, as Tele-AI's
class views it, and its other linear layers get biases of zero; the 36B's positions are YaRN with their own factor.
"""

import numpy as np
import pytest

from tests.tools.weights import test_telechat2 as of_telechat2
from tests.tools.weights import test_yarn as of_yarn
from tools.accuracy.reference.forward import Grouped, TeleChat2
from tools.accuracy.reference.start import initial_weights
from tools.recipe.load import load_recipe
from tools.weights.convert_plan import model_of

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
