"""Text of MindFormers' forward graph against NumPy and transformers, from weights in which every mistake shows."""

import json
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.generate.session import continuation
from launch.generate.text import likeliest
from tests.training import runs
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.start import initial_weights
from tools.data.tokenizer import Coder, load
from tools.recipe.load import load_recipe
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_names import to_mindformers

pytestmark = pytest.mark.slow
PROMPTS = ("the expert keeps", "the router drops 7 tokens. " * 12)  # the second is longer than the window
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A recipe, with the epsilon that transformers has in the norms of latents, and weights in MindFormers' names."""
    folder = tmp_path_factory.mktemp("model")
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"base_config: {runs.TINY}\nmodel:\n  model_config:\n    rms_norm_eps: 1.e-6\n")
    sizes = model_of(load_recipe(recipe))
    (folder / "weights").mkdir()
    arrays = to_mindformers(initial_weights(sizes, 0), sizes)
    save_file(arrays, folder / "weights" / "weights-model-0000000-0000001.safetensors")
    return folder


@pytest.fixture(scope="module")
def said(model, corpus):
    """Return what `tc3 generate` makes of each prompt."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    command = [runs.TC3, "generate", str(model / "weights"), "--recipe", str(model / "recipe.yaml"), "--json", *prompts]
    more = ["--tokens", str(TOKENS), "--tokenizer", f"{corpus}_tokenizer"]
    done = subprocess.run([*command, *more], cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [text["ids"] for text in json.loads(done.stdout)["texts"]]


def test_greedy_tokens_are_those_of_the_forward_pass_in_numpy(model, said, corpus):
    recipe = load_recipe(model / "recipe.yaml")
    sizes, window = model_of(recipe), recipe["model"]["model_config"]["seq_length"]
    tokenizer, forward = load(f"{corpus}_tokenizer"), Forward(sizes, initial_weights(sizes, 0))
    prompts = Coder(tokenizer.spec).encode(PROMPTS)
    assert len(prompts[0]) + TOKENS <= window < len(prompts[1])
    margins = []

    def logits(ids):
        found = forward.run(np.array([ids]))["logits"][0, -1, : tokenizer.vocab_size]
        margins.append(np.diff(np.sort(found)[-2:])[0])
        return found

    want = [list(continuation(logits, likeliest, ids, window, TOKENS, tokenizer.eod_id)) for ids in prompts]
    assert min(margins) > 1e-3, "these weights leave it to rounding which token is the likeliest"
    assert len(set(want[0])) > 3, "a model that repeats itself proves little"
    assert said == want


def test_the_exported_folder_says_the_same_in_transformers(model, said, corpus):
    torch = pytest.importorskip("torch", reason="transformers runs where torch is: pip install -e '.[align]'")
    from transformers import AutoTokenizer, DeepseekV3ForCausalLM

    exported = model / "exported"
    command = [runs.TC3, "weights", "convert", str(model / "weights"), str(exported), "--recipe"]
    tokenizer = f"{corpus}_tokenizer"
    subprocess.run([*command, str(model / "recipe.yaml"), "--tokenizer", tokenizer], check=True)
    coder, theirs = AutoTokenizer.from_pretrained(exported), DeepseekV3ForCausalLM.from_pretrained(exported).float()
    ids = coder(PROMPTS[0], return_tensors="pt", add_special_tokens=False).input_ids
    unsaid = list(range(len(coder), theirs.config.vocab_size))  # ids that stand for no text
    end = {"eos_token_id": coder.eos_token_id, "pad_token_id": coder.eos_token_id}
    greedy = {"max_new_tokens": TOKENS, "do_sample": False, "suppress_tokens": unsaid, **end}
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    assert out[0, ids.shape[1] :].tolist() == said[0]
