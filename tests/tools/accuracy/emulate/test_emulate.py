"""The emulated network on one rank is what finite differences and the plainest code say it is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.cpu_backend import reference as cpu_reference
from plugins.errors import RecipeError
from plugins.hierarchical_ep import reference as moe_reference
from tests.tools.accuracy.emulate.small import SMALL, STRATEGIES, reference
from tests.training.runs import ROOT
from tools.accuracy.emulate import kernels
from tools.accuracy.emulate.context import BACKWARD, FORWARD, Context
from tools.accuracy.emulate.kernels import Kernels
from tools.accuracy.emulate.network import Network, layouts_of, make_weights, schedule, shapes_of
from tools.accuracy.emulate.run import ONE_RANK
from tools.accuracy.emulate.sizes import sizes_of
from tools.accuracy.emulate.strategy import Strategy
from tools.accuracy.emulate.world import World
from tools.recipe.load import load_recipe


def network_of(weights):
    parts = {name: [value] for name, value in weights.items()}
    context = Context(SMALL, ONE_RANK, World(ONE_RANK.mesh), Kernels(), layouts_of(SMALL, ONE_RANK), parts)
    return Network(context)


def loss_and_gradients(weights, seed=3):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, SMALL.vocabulary, (SMALL.batch, SMALL.length + 1))
    network = network_of(weights)
    loss = network.gradients(tokens[:, :-1], tokens[:, 1:])
    return loss, {name: parts[0] for name, parts in network.context.gradients.items()}, network.context


def test_every_gradient_is_the_finite_difference():
    weights = make_weights(SMALL, 3)
    loss, gradients, _ = loss_and_gradients(weights)
    trained = {name for name in weights if not name.endswith("bias")}
    assert gradients.keys() == trained
    rng = np.random.default_rng(0)
    for name in sorted(trained):
        direction = rng.standard_normal(weights[name].shape)
        step = 1e-6
        up, _, _ = loss_and_gradients({**weights, name: weights[name] + step * direction})
        down, _, _ = loss_and_gradients({**weights, name: weights[name] - step * direction})
        assert (gradients[name] * direction).sum() == pytest.approx((up - down) / (2 * step), rel=2e-6, abs=1e-8), name
    assert loss == pytest.approx(np.log(SMALL.vocabulary), abs=1.5)


def entry(context, phase, module, tensor):
    (found,) = [e for e in context.entries if (e.phase, e.module, e.tensor) == (phase, module, tensor)]
    return found.parts[0]


def test_the_experts_are_those_of_the_plain_loop():
    weights = make_weights(SMALL, 3)
    _, _, context = loss_and_gradients(weights)
    tokens = entry(context, "forward", "layers.1.mlp_norm", "out").reshape(-1, SMALL.hidden)
    probs = entry(context, "forward", "layers.1.router", "probabilities").reshape(-1, SMALL.top_k)
    chosen = entry(context, "forward", "layers.1.router", "chosen experts").reshape(-1, SMALL.top_k)
    w1 = weights["layers.1.experts.w1"].reshape(SMALL.experts, SMALL.hidden, -1)
    want = moe_reference.moe(tokens, probs, chosen, w1, weights["layers.1.experts.w2"])
    got = entry(context, "forward", "layers.1.experts", "out").reshape(want.shape)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
    assert len(np.unique(chosen)) > SMALL.experts // 2


def test_attention_is_that_of_the_plain_code():
    weights = make_weights(SMALL, 3)
    _, _, context = loss_and_gradients(weights)
    query = entry(context, "forward", "layers.0.attention", "query").transpose(1, 0, 2, 3)
    key = entry(context, "forward", "layers.0.attention", "key").transpose(1, 0, 2, 3)
    latent = entry(context, "forward", "layers.0.attention", "key-value latent")
    value = kernels.linear(latent, weights["layers.0.attention.kv_up"])[..., SMALL.nope :].transpose(1, 0, 2, 3)
    mask = np.triu(np.ones((SMALL.length, SMALL.length), int), 1)[None, None].repeat(SMALL.batch, 0)
    scale = (SMALL.nope + SMALL.rope) ** -0.5
    want, softmax = cpu_reference.attention(query, key, value, mask, scale)
    np.testing.assert_allclose(entry(context, "forward", "layers.0.attention", "softmax"), softmax, atol=1e-14)
    got = entry(context, "forward", "layers.0.attention", "context of heads")
    np.testing.assert_allclose(got.transpose(1, 0, 2, 3).reshape(want.shape), want, atol=1e-13)


def test_rope_depends_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 1, 8))
    products = [
        (kernels.rope(q, np.array([at + 3]), 1e4) * kernels.rope(k, np.array([at]), 1e4)).sum() for at in (0, 5, 100)
    ]
    np.testing.assert_allclose(products, products[0], rtol=1e-10)


@given(stages=st.integers(1, 6), micro=st.integers(1, 8))
def test_every_stage_passes_each_micro_batch_once_and_none_waits_for_ever(stages, micro):
    waiting = [schedule(stage, stages, micro) for stage in range(stages)]
    for stage, passes in enumerate(waiting):
        assert [turn for phase, turn in passes if phase == FORWARD] == list(range(micro))
        assert [turn for phase, turn in passes if phase == BACKWARD] == list(range(micro))
        kept = np.cumsum([1 if phase == FORWARD else -1 for phase, _ in passes])
        assert kept.min() == 0 and kept.max() == min(micro, stages - stage), "as 1F1B"
    done = {(phase, stage, turn) for phase, stage in ((FORWARD, -1), (BACKWARD, stages)) for turn in range(micro)}
    while any(waiting):
        ready = [
            stage
            for stage, passes in enumerate(waiting)
            if passes and (passes[0][0], stage + (1 if passes[0][0] == BACKWARD else -1), passes[0][1]) in done
        ]
        assert ready
        for stage in ready:
            phase, turn = waiting[stage].pop(0)
            done.add((phase, stage, turn))


def test_a_stage_holds_nothing_of_another():
    """Each weight is used by one stage, and what crosses is sent."""
    strategy = Strategy(pp=2, micro=2)
    weights = {name: [value] for name, value in make_weights(SMALL, 0).items()}
    context = Context(SMALL, strategy, World(strategy.mesh), Kernels(), layouts_of(SMALL, strategy), weights)
    first, last = Network(context).stages
    assert (first.embedding is None, first.head is None, last.embedding is None, last.head is None) == (0, 1, 1, 0)
    assert [layer.residual.name for stage in (first, last) for layer in stage.layers] == ["layers.0", "layers.1"]
    with pytest.raises(KeyError):
        last.forward([], [])


def test_gradients_are_clipped():
    """Otherwise a wrong global norm would change nothing."""
    assert min(reference(0, 3).norms) > SMALL.clip


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_strategy_fits_the_small_model(strategy):
    assert strategy.misfit(SMALL) == ""


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (Strategy(tp=3), "4 attention heads cannot be cut into 3"),
        (Strategy(dp=8), "4 samples of a step cannot be cut into 8"),
        (Strategy(dp=2, ep=4), "2 ranks with tokens cannot be cut into 4"),
        (Strategy(pp=3), "2 layers cannot be cut into 3 stages"),
    ],
)
def test_what_does_not_fit_says_why(strategy, why):
    assert strategy.misfit(SMALL) == why


def test_sizes_come_from_the_recipe():
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    sizes = sizes_of(recipe, batch=8)
    assert (sizes.hidden, sizes.experts, sizes.top_k, sizes.dense) == (128, 16, 4, 1)
    assert sizes.decay == 0.1 and sizes.clip == 1.0 and sizes.rate == 3e-3
    assert shapes_of(sizes)["layers.1.experts.w1"] == (16, 128, 2, 64)
    model = recipe["model"]["model_config"]
    del model["kv_lora_rank"]
    assert sizes_of(recipe, batch=8).kv_rank == 512, "MindFormers' default, with which it trains"
    model["moe_shared_expert_intermediate_size"], model["n_shared_experts"] = 96, 2
    assert sizes_of(recipe, batch=8).shared_ffn == 96, "MindFormers builds this width, however many they are"
    model["hidden_size"] = None
    with pytest.raises(RecipeError, match=r"model\.model_config: its sizes make no model"):
        sizes_of(recipe, batch=8)


@pytest.mark.parametrize("change", [{"q_lora_rank": None}, {"first_k_dense_replace": 0, "moe_layer_freq": 2}])
def test_a_model_that_the_emulated_layers_are_not(change):
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    recipe["model"]["model_config"].update(change)
    with pytest.raises(RecipeError, match=r"model\.model_config: the emulated layers have .*; this model has not"):
        sizes_of(recipe, batch=8)
