"""The forward pass in NumPy, and recipes in Hugging Face's words with what those cannot say."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from plugins.errors import RecipeError
from tests.tools.accuracy.align.cases import YARN, sizes, tokens
from tests.tools.accuracy.reference import renew as golden
from tools.accuracy.align.sides import load, on_one_worker, reference_sizes
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.start import Hyper, hyper_of, initial_weights, rate
from tools.recipe.load import load_recipe
from tools.weights.hugging_face_sizes import Sizes


def test_it_computes_the_golden_logits():
    stored = golden.load()
    model = Sizes(**json.loads(str(stored["sizes"])))
    weights = initial_weights(model, golden.SEED)
    assert golden.checksum(weights) == int(stored["checksum/weights"]), "the golden file is of other starting weights"
    logits = Forward(model, weights).run(stored["first_ids"])["logits"]
    assert np.abs(logits[:, ::8, ::16] - stored["logits"]).max() < 1e-5


def test_golden_file_is_small():
    assert golden.FILE.stat().st_size < 300_000


@pytest.mark.parametrize("model", [sizes(), sizes(rope_scaling=YARN), sizes(q_lora_rank=None, n_group=4, topk_group=2)])
def test_it_is_causal(model):
    weights, ids = initial_weights(model, 0), tokens(model)[0]
    before = Forward(model, weights).run(ids)["logits"]
    changed = ids.copy()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    after = Forward(model, weights).run(changed)["logits"]
    # an expert's product has one row more or less: on some processors NumPy then adds each row in another order
    assert np.abs(before[:, :9] - after[:, :9]).max() < 1e-12
    assert (np.abs(before[:, 9:] - after[:, 9:]).max(-1) > 1e-6).all()


def test_yarn_changes_angles_and_scale():
    plain, yarn = Forward(sizes(), {}), Forward(sizes(rope_scaling=YARN), {})
    ratio = yarn.frequencies() / plain.frequencies()
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(1 / 4) and (np.diff(ratio) <= 0).all()
    assert yarn.scale() / plain.scale() == pytest.approx((0.1 * np.log(4) + 1) ** 2)


RECIPES = Path(__file__).parents[4] / "recipes"
MINI = RECIPES / "mini" / "pretrain.yaml"


def mini(**changes):
    recipe = load(MINI, (), None, 20)
    recipe["model"]["model_config"].update(changes)
    return on_one_worker(recipe, 20)


def test_the_mini_recipe():
    sizes = reference_sizes(mini())
    assert sizes.layers == 3 and not sizes.is_moe(0) and sizes.is_moe(1) and sizes.is_moe(3)
    hf = sizes.hf
    assert (hf["hidden_size"], hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]) == (128, 32, 16, 32)
    assert (hf["n_routed_experts"], hf["num_experts_per_tok"], hf["routed_scaling_factor"]) == (16, 4, 2.8)
    assert (hf["n_group"], hf["topk_group"], hf["rope_scaling"]) == (1, 1, None)
    assert (sizes.latent_eps, sizes.mtp_layers, sizes.mtp_factor) == (1e-5, 1, 0.2)
    assert (sizes.aux_coefficient, sizes.bias_rate, sizes.interleaved) == (0.001, 0.001, True)


def test_yarn_is_said_by_two_lengths():
    recipe = load(RECIPES / "telechat3_105b" / "context_32k.yaml", (), None, 20)
    recipe["train_dataset"]["data_loader"]["config"].update(reset_attention_mask=False, reset_position_ids=False)
    hf = reference_sizes(on_one_worker(recipe, 20)).hf
    scaling = hf["rope_scaling"]
    assert scaling["rope_type"] == "yarn"
    assert hf["max_position_embeddings"] == scaling["factor"] * scaling["original_max_position_embeddings"]


def test_what_a_recipe_leaves_out_has_mindformers_defaults():
    recipe = load_recipe(MINI)
    del recipe["callbacks"], recipe["optimizer"]["betas"]
    plain = on_one_worker(recipe, 2)
    assert plain["callbacks"] == [{"type": "MFLossMonitor"}] and hyper_of(plain, 2).betas == (0.9, 0.999)
    del recipe["lr_schedule"]["learning_rate"]
    with pytest.raises(RecipeError, match=r"^lr_schedule\.learning_rate: the key is missing; write "):
        hyper_of(recipe, 2)


@pytest.mark.parametrize("experts", [1, 2])
def test_where_every_expert_is_chosen_there_is_no_tie(experts):
    model = sizes(n_routed_experts=experts, num_experts_per_tok=experts)
    weights = initial_weights(model, 0)
    gates = [name for name in weights if name.endswith((".gate.weight", "e_score_correction_bias"))]
    forward = Forward(model, weights | {name: np.zeros_like(weights[name]) for name in gates})
    forward.run(tokens(model)[0])
    assert gates and set(forward.ties.values()) == {0}


def test_without_its_callback_the_bias_stays():
    recipe = mini()
    recipe["callbacks"] = [callback for callback in recipe["callbacks"] if "Topk" not in callback["type"]]
    assert reference_sizes(recipe).bias_rate == 0.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("multi_latent_attention", False),
        ("moe_router_score_function", "softmax"),
        ("hidden_act", "gelu"),
        ("hidden_dropout", 0.1),
        ("add_bias_linear", True),
        ("moe_shared_expert_intermediate_size", 96),
        ("num_nextn_predict_layers", 2),
        ("moe_router_load_balancing_type", "gbs_aux_loss"),
        ("rotary_scaling_factor", 4),
        ("position_embedding_type", "none"),
    ],
)
def test_what_it_cannot_say_is_refused_by_key(key, value):
    with pytest.raises(RecipeError, match=rf"model\.model_config\.{key}: this value cannot be used, because"):
        reference_sizes(mini(**{key: value}))


def test_one_worker_keeps_the_global_batch():
    for name in ("pretrain_dp2", "pretrain_ep4"):
        recipe = load(RECIPES / "mini" / f"{name}.yaml", (), None, 20)
        plain = on_one_worker(recipe, 20)
        assert plain["runner_config"]["batch_size"] == plain["model"]["model_config"]["batch_size"] == 8
        assert plain["train_dataset"]["data_loader"]["sizes"] == [160, 0, 0]
        assert plain["plugins"] == {} and plain["use_parallel"] is False
        assert recipe["use_parallel"] is True, "the recipe itself must stay"


def test_learning_rates():
    hyper = hyper_of(load_recipe(MINI), 30)
    assert hyper.rates[:3] == [0.0, 3e-3 / 20, 2 * 3e-3 / 20] and hyper.rates[20] == hyper.rates[29] == 3e-3
    assert hyper.first_update == 2 and (hyper.decay, hyper.clip, hyper.eps) == (0.1, 1.0, 1e-8)
    assert Hyper(**asdict(hyper)) == hyper
    cosine = {"type": "CosineWithWarmUpLR", "learning_rate": 1.0, "lr_end": 0.1, "warmup_steps": 2, "total_steps": 12}
    got = [rate(cosine, step) for step in (0, 1, 2, 7, 11, 12, 40)]
    assert got[:3] == [0.0, 0.5, 1.0] and got[3] == pytest.approx(0.55) and got[5:] == [0.1, 0.1]
    assert got[4] == pytest.approx(0.1 + 0.9 * 0.024471741852423)
