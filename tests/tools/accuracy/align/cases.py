"""Small models and records for the tests of alignment: a forward pass in NumPy, gradients that are only plausible."""

from dataclasses import replace

import numpy as np

from tools.accuracy.align.sides import Record
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.start import Hyper, initial_weights
from tools.weights.hugging_face_names import table
from tools.weights.hugging_face_sizes import Sizes

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
HYPER = Hyper(rates=[0.0, 1e-3, 2e-3, 3e-3], betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip=1.0)

UPDATE_SAMPLE = 1e-3  # of an element of an update, relative to its tensor's root mean square


def sizes(mtp=1, interleaved=True, **changes):
    """Return the sizes of a model with one dense and one MoE layer."""
    hf = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "n_shared_experts": 1,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 2.8, "norm_topk_prob": True,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 6, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "n_group": 1,
        "topk_group": 1, "hidden_act": "silu", "max_position_embeddings": 64, "rope_scaling": None,
        "rope_interleave": True, "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "pad_token_id": None, **changes,
    }  # fmt: skip
    return Sizes(hf, 1e-5, interleaved, mtp, 0.2, 1e-3, 1e-3)


def tokens(model, steps=1, batch=2, length=16, seed=0):
    """[steps, batch, length]."""
    return np.random.default_rng(seed).integers(0, model.hf["vocab_size"], (steps, batch, length))


def record(model, forward=Forward, weights=None, hyper=HYPER, update=None):
    """A record whose trace is `forward`'s; its gradients are random and its updates those of AdamW on them.

    update: a function (name, weight, gradient) -> step, to update wrongly.
    """
    initial = initial_weights(model, 0)
    given = initial if weights is None else weights
    ids = tokens(model)
    trace = forward(model, given).run(ids[0])
    random = np.random.default_rng(1)
    trained = [name for entry in table(model) if entry.trained for name in entry.parts]
    gradient = {name: (1e-2 * random.standard_normal(given[name].shape)).astype(np.float32) for name in trained}
    update = update or adamw
    updated = {name: given[name] + (update(name, given[name], gradient[name]) if name in gradient else 0)
               for name in given}  # fmt: skip
    loss = np.linspace(5, 4, len(hyper.rates))
    curves = dict.fromkeys(("loss", "lm_loss", "mtp_loss", "global_norm"), loss)
    return Record(
        trace=trace, gradient=gradient, initial=given, updated=updated,
        curve={**curves, "learning_rate": np.array(hyper.rates)}, batch={"input_ids": ids},
    )  # fmt: skip


def adamw(name, weight, gradient, decay=HYPER.decay, rate=HYPER.rates[1]):
    """The second step of AdamW, the first having seen the same gradient at a rate of 0."""
    return -rate * (gradient / (np.abs(gradient) + HYPER.eps) + (decay * weight if weight.ndim > 1 else 0))


def with_curve(one, name, values):
    return replace(one, curve={**one.curve, name: np.asarray(values)})


def samples_apart(kind, got, kept, elements):
    """Largest difference of an element that the golden file keeps of each tensor, relative to its root mean square.

    elements: of each tensor, in the order of the file's names.
    """
    scale = np.maximum(kept[f"{kind}/norms"] / np.sqrt(elements), 1e-30)
    return float((np.abs(got[f"{kind}/samples"] - kept[f"{kind}/samples"]) / scale[:, None]).max())
