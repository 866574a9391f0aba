"""Seeded faults, each of which must fail at its own rung and be told by its place."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.tools.accuracy.align import cases
from tools.accuracy.align.ladder import Ladder, compare_records
from tools.accuracy.align.recipe import alone, load
from tools.accuracy.reference import golden
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.hyper import hyper_of
from tools.accuracy.reference.weights import initial_weights
from tools.weights.hugging_face.sizes import Sizes

MODEL = cases.sizes(mtp=0)
ROPE = MODEL.hf["qk_rope_head_dim"]


class ScaledSoftmax(Forward):
    def scale(self):
        return 1.01 * super().scale()


class PositionsOfASplitSequence(Forward):
    """Each half of the sequence counts from 0."""

    def positions(self, length):
        return np.arange(length) % (length // 2)


class HalvesRotated(Forward):
    """RoPE on the two halves of a head instead of neighbours."""

    def rotate(self, x):
        angles = np.outer(self.positions(x.shape[1]), self.frequencies())[:, None]
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class ExpertsSwapped(Forward):
    """What expert 0 should compute, expert 1 does, and vice versa."""

    def swiglu(self, name, x):
        swap = {"experts.0": "experts.1", "experts.1": "experts.0"}
        head, _, tail = name.rpartition(".experts.")
        return super().swiglu(f"{head}.{swap[f'experts.{tail}']}" if tail in ("0", "1") and head else name, x)


class RouterNotNormalised(Forward):
    def __init__(self, sizes, weights):
        super().__init__(replace(sizes, hf={**sizes.hf, "norm_topk_prob": False}), weights)


class WithoutBias(Forward):
    def __init__(self, sizes, weights):
        super().__init__(sizes, {name: value * (not name.endswith("bias")) for name, value in weights.items()})


class LatentEpsilon(Forward):
    """Hugging Face's own epsilon of the norms inside latent attention, which its configuration cannot set."""

    def __init__(self, sizes, weights):
        super().__init__(replace(sizes, latent_eps=1e-6), weights)


class SharedExpertLeftOut(Forward):
    def swiglu(self, name, x):
        return super().swiglu(name, x) * (not name.endswith("shared_experts"))


def climbed(ours, theirs, floor=None):
    ladder = Ladder("ours", "theirs")
    compare_records(ladder, ours, theirs, floor, cases.HYPER, ROPE)
    return ladder


def failed(ladder):
    """(name, reason) of the last rung, which must be the only one that failed."""
    assert [rung.status for rung in ladder.rungs[:-1]] == ["passed"] * (len(ladder.rungs) - 1)
    assert ladder.rungs[-1].status == "failed"
    return ladder.rungs[-1].name, ladder.rungs[-1].reason


def test_equal_sides_pass_every_rung():
    ladder = climbed(cases.record(MODEL), cases.record(MODEL))
    assert [(rung.name, rung.status) for rung in ladder.rungs] == [
        ("forward", "passed"), ("backward", "passed"), ("optimizer", "passed"), ("steps", "passed"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (ScaledSoftmax, "layer 0, self_attention.core_attention"),
        (PositionsOfASplitSequence, "layer 0, self_attention (query) .*not at position 0: RoPE's angles"),
        (HalvesRotated, "layer 0, self_attention (query) .*from the first position on: RoPE's offset, layout or scale"),
        (LatentEpsilon, "layer 0, self_attention (query) .*the query's projections and norm"),
        (ExpertsSwapped, "layer 1, mlp .*routed experts' weights"),
        (RouterNotNormalised, "layer 1, mlp.router"),
        (WithoutBias, "layer 1, mlp.router"),
        (SharedExpertLeftOut, "layer 1, mlp.shared_experts"),
    ],
)
def test_faults_of_the_forward_pass(fault, told):
    name, reason = failed(climbed(cases.record(MODEL, fault), cases.record(MODEL)))
    assert name == "forward"
    where, _, meaning = told.partition(" .*")
    assert f"first difference: {where}" in reason and meaning in reason


def test_a_swapped_weight_is_seen_before_anything_is_computed():
    weights = initial_weights(MODEL, 0)
    one, other = (f"model.layers.1.mlp.experts.{index}.up_proj.weight" for index in (2, 3))
    swapped = {**weights, one: weights[other], other: weights[one]}
    name, reason = failed(climbed(cases.record(MODEL, weights=swapped), cases.record(MODEL)))
    assert name == "forward"
    assert reason == f"the two sides were not given the same: initial {one}, initial {other}"


def test_other_tokens_are_seen():
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    ours.batch["input_ids"] = ours.batch["input_ids"] + 1
    name, reason = failed(climbed(ours, theirs))
    assert (name, reason) == ("forward", "the two sides were not given the same: batch input_ids")


def test_a_gradient_is_found_where_backward_meets_it_first():
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    for weight in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.input_layernorm.weight"):
        ours.gradient[weight] = ours.gradient[weight] * np.float32(1.01)
    name, reason = failed(climbed(ours, theirs))
    assert name == "backward"
    assert "2 of 52 gradients differ; backward meets model.layers.0.self_attn.o_proj.weight first" in reason
    assert "1.0100 times the other side's" in reason


def everything_decayed(name, weight, gradient):
    return cases.adamw(name, weight, gradient) - cases.HYPER.rates[1] * 0.1 * weight * (weight.ndim <= 1)


def nothing_decayed(name, weight, gradient):
    return cases.adamw(name, weight, gradient, decay=0.0)


def too_fast(name, weight, gradient):
    return 1.1 * cases.adamw(name, weight, gradient)


@pytest.mark.parametrize(
    ("update", "group", "told"),
    [
        (everything_decayed, "no_weight_decay", "decayed by +0.1 more than on the other side"),
        (nothing_decayed, "weight_decay", "decayed by -0.1 more than on the other side"),
        (too_fast, "weight_decay", "1.1000 times the other side's"),
    ],
)
def test_faults_of_the_optimizer(update, group, told):
    name, reason = failed(climbed(cases.record(MODEL, update=update), cases.record(MODEL)))
    assert name == "optimizer"
    assert f"group {group}: " in reason and told in reason
    assert ("group weight_decay" in reason and "group no_weight_decay" in reason) == (update is too_fast)


def test_the_golden_samples_of_updates_show_a_missing_decay():
    """`test_align_mindformers` holds MindFormers to them; norms hardly change."""
    kept = golden.load()
    model = Sizes(**json.loads(str(kept["sizes"])))
    hyper = hyper_of(alone(load(golden.RECIPE, (), None, golden.STEPS), golden.STEPS), golden.STEPS)
    weights, shrink = initial_weights(model, golden.SEED), hyper.rates[hyper.first_update - 1] * hyper.decay
    names = [str(name) for name in kept["update/names"]]
    back = [shrink * golden.samples(name, weights[name]) * (weights[name].ndim > 1) for name in names]
    got = {"update/samples": kept["update/samples"] + np.array(back)}
    elements = [weights[name].size for name in names]
    assert cases.samples_apart("update", got, kept, elements) > 2 * cases.UPDATE_SAMPLE


def test_a_router_bias_that_stays_is_told_apart_from_the_weights():
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    theirs.updated[bias] = theirs.updated[bias] + np.float32(1e-3)
    name, reason = failed(climbed(ours, theirs))
    assert name == "optimizer" and reason.startswith(f"weights agree; the router's bias does not: {bias}")
