"""Seeded faults, each of which must fail at its own stage and be told by its place; and what excuses a difference."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.tools.accuracy.align import cases
from tests.tools.accuracy.diagnose.simulated import but
from tests.tools.accuracy.reference import renew as golden
from tools.accuracy.align import stages as align_stages
from tools.accuracy.align.comparison import Comparison, compare_records
from tools.accuracy.align.sides import load, of_mindformers, on_one_worker
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.run import KINDS
from tools.accuracy.reference.start import hyper_of, initial_weights
from tools.weights.hugging_face_sizes import Sizes

MODEL = cases.sizes(mtp=0)
ROPE = MODEL.hf["qk_rope_head_dim"]


ScaledSoftmax = but(Forward, scale=lambda scale: 1.01 * scale)


class HalvesRotated(Forward):
    """RoPE on the two halves of a head instead of neighbours."""

    def rotate(self, x):
        angles = np.outer(self.positions(x.shape[1]), self.frequencies())[:, None]
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class ExpertsSwapped(Forward):
    """An `ExpertsSwapped` computes with expert 1 what expert 0 should compute, and vice versa."""

    def swiglu(self, name, x):
        swap = {"experts.0": "experts.1", "experts.1": "experts.0"}
        head, _, tail = name.rpartition(".experts.")
        return super().swiglu(f"{head}.{swap[f'experts.{tail}']}" if tail in ("0", "1") and head else name, x)


FAULTS = {
    "a scaled softmax": (ScaledSoftmax, "layer 0, self_attention.core_attention"),
    "each half of the sequence counts from 0": (
        but(Forward, positions=lambda made, length: made % (length // 2)),
        "layer 0, self_attention (query) .*not at position 0: RoPE's angles",
    ),
    "halves rotated": (
        HalvesRotated,
        "layer 0, self_attention (query) .*from the first position on: RoPE's offset, layout or scale",
    ),
    # Hugging Face's own, which its configuration cannot set
    "the epsilon of latent attention": (
        lambda sizes, weights: Forward(replace(sizes, latent_eps=1e-6), weights),
        "layer 0, self_attention (query) .*the query's projections and norm",
    ),
    "experts swapped": (ExpertsSwapped, "layer 1, mlp .*routed experts' weights"),
    "a router that is not normalised": (
        lambda sizes, weights: Forward(replace(sizes, hf={**sizes.hf, "norm_topk_prob": False}), weights),
        "layer 1, mlp.router",
    ),
    "no bias": (
        lambda sizes, weights: Forward(sizes, {name: x * (not name.endswith("bias")) for name, x in weights.items()}),
        "layer 1, mlp.router",
    ),
    "no shared expert": (
        but(Forward, swiglu=lambda made, name, _: made * (not name.endswith("shared_experts"))),
        "layer 1, mlp.shared_experts",
    ),
}


def compared(ours, theirs, floor=None):
    comparison = Comparison("ours", "theirs")
    compare_records(comparison, ours, theirs, floor, cases.HYPER, ROPE)
    return comparison


def failed(comparison):
    """(name, reason) of the last stage, which must be the only one that failed."""
    assert [stage.status for stage in comparison.stages[:-1]] == ["passed"] * (len(comparison.stages) - 1)
    assert comparison.stages[-1].status == "failed"
    return comparison.stages[-1].name, comparison.stages[-1].reason


def test_equal_sides_pass_every_stage():
    comparison = compared(cases.record(MODEL), cases.record(MODEL))
    assert [(stage.name, stage.status) for stage in comparison.stages] == [
        ("forward", "passed"), ("backward", "passed"), ("optimizer", "passed"), ("steps", "passed"),
    ]  # fmt: skip


def without(one, *names):
    return replace(one, curve={name: values for name, values in one.curve.items() if name not in names})


def test_losses_and_norms_that_no_side_has_are_not_compared():
    """Dense models of grouped-query attention log no parts of the loss, and a run without clipping no norm."""
    names = ("lm_loss", "mtp_loss", "global_norm")
    one, whole = without(cases.record(MODEL), *names), cases.record(MODEL)
    comparison = compared(one, one)
    assert {stage.status for stage in comparison.stages} == {"passed"} and len(comparison.stages) == 4
    assert not [row for stage in comparison.stages for row in stage.rows if any(name in row.name for name in names)]
    for sides in ((one, whole), (whole, one)):
        name, _ = failed(compared(*sides))
        assert name == "forward", "a part that only one side has"


def test_what_only_the_other_side_has_fails():
    whole = cases.record(MODEL)
    last = [*whole.gradient][-1]

    def less(part):
        return replace(whole, **{part: {name: each for name, each in getattr(whole, part).items() if name != last}})

    for part, stage, told in (
        ("initial", "forward", f"initial {last}"),
        ("gradient", "backward", f"backward meets {last} first"),
        ("updated", "optimizer", f"only one side moves {last}"),
    ):
        for sides in ((whole, less(part)), (less(part), whole)):
            name, reason = failed(compared(*sides))
            assert name == stage and told in reason
    longer = cases.with_curve(whole, "loss", [*whole.curve["loss"], 3.0])
    assert failed(compared(whole, longer))[0] == failed(compared(longer, whole))[0] == "steps"


def test_a_log_without_parts_of_the_loss_has_no_curve_of_them():
    step = {"loss": 5.0, "lm_loss": None, "mtp_loss": None, "global_norm": None, "learning_rate": 1e-3}
    states = {f"state/{at}/{kind}/w": np.ones(2, np.float32) for at in range(3) for kind in KINDS}
    stored = {**states, "trace/embedding": np.ones((1, 2, 3)), "logits/graph": np.ones((2, 4))}
    stored["trace/logits"] = np.ones((1, 2, 4))
    hyper = replace(cases.HYPER, rates=[0.0, 1e-3], clip=0.0)
    assert set(of_mindformers(stored, [step, step], hyper).curve) == {"loss", "learning_rate"}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_forward_pass(fault):
    forward, told = FAULTS[fault]
    name, reason = failed(compared(cases.record(MODEL, forward), cases.record(MODEL)))
    assert name == "forward"
    where, _, meaning = told.partition(" .*")
    assert f"first difference: {where}" in reason and meaning in reason


def test_a_swapped_weight_is_seen_before_anything_is_computed():
    weights = initial_weights(MODEL, 0)
    one, other = (f"model.layers.1.mlp.experts.{index}.up_proj.weight" for index in (2, 3))
    swapped = {**weights, one: weights[other], other: weights[one]}
    name, reason = failed(compared(cases.record(MODEL, weights=swapped), cases.record(MODEL)))
    assert name == "forward"
    assert reason == f"the two sides were not given the same: initial {one}, initial {other}"


def test_other_tokens_are_seen():
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    ours.batch["input_ids"] = ours.batch["input_ids"] + 1
    name, reason = failed(compared(ours, theirs))
    assert (name, reason) == ("forward", "the two sides were not given the same: batch input_ids")


def test_a_gradient_is_found_where_backward_meets_it_first():
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    for weight in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.input_layernorm.weight"):
        ours.gradient[weight] = ours.gradient[weight] * np.float32(1.01)
    name, reason = failed(compared(ours, theirs))
    assert name == "backward"
    assert "2 of 52 gradients differ; backward meets model.layers.0.self_attn.o_proj.weight first" in reason
    assert "1.0100 times the other side's" in reason


@pytest.mark.parametrize(
    ("update", "groups", "told"),
    [
        (
            lambda name, weight, _: -cases.HYPER.rates[1] * 0.1 * weight * (weight.ndim <= 1),
            ("no_weight_decay",),
            "decayed by +0.1 more than on the other side",
        ),
        (
            lambda name, weight, _: cases.HYPER.rates[1] * 0.1 * weight * (weight.ndim > 1),
            ("weight_decay",),
            "decayed by -0.1 more than on the other side",
        ),
        (
            lambda *given: 0.1 * cases.adamw(*given),
            ("weight_decay", "no_weight_decay"),
            "1.1000 times the other side's",
        ),
    ],
    ids=["everything decays", "nothing decays", "too fast"],
)
def test_faults_of_the_optimizer(update, groups, told):
    faulty = cases.record(MODEL, update=lambda *given: cases.adamw(*given) + update(*given))
    name, reason = failed(compared(faulty, cases.record(MODEL)))
    assert name == "optimizer" and told in reason
    assert [group for group in ("weight_decay", "no_weight_decay") if f"group {group}: " in reason] == [*groups]


def test_the_golden_samples_of_updates_show_a_missing_decay():
    kept = golden.load()
    model = Sizes(**json.loads(str(kept["sizes"])))
    hyper = hyper_of(on_one_worker(load(golden.RECIPE, (), None, golden.STEPS), golden.STEPS), golden.STEPS)
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
    name, reason = failed(compared(ours, theirs))
    assert name == "optimizer" and reason.startswith(f"weights agree; the router's bias does not: {bias}")


def test_a_curve_that_parts_later():
    ours = cases.record(MODEL)
    theirs = cases.with_curve(ours, "loss", ours.curve["loss"] + np.array([0, 0, 0, 2e-4]))
    name, reason = failed(compared(ours, theirs))
    assert name == "steps" and reason.startswith("loss of step 4 is the first to differ, by 2.0e-04")


def single(ours, **changes):
    """A reference that took every step by itself and agrees."""
    zero = np.zeros(4)
    parts = {"loss": ours.curve["loss"], "update": zero, "bias": zero, "moved": zero, "choices": zero + 4096,
             "tokens": zero + 1024}  # fmt: skip
    return {**parts, **changes}


def test_a_curve_that_parts_at_a_tie_is_undecided_when_every_step_by_itself_agrees():
    ours = cases.record(MODEL)
    theirs = cases.with_curve(ours, "loss", ours.curve["loss"] + np.array([0, 0, 0, 2e-4]))
    theirs.single = single(ours)
    stage = compared(ours, theirs).stages[-1]
    assert (stage.name, stage.status) == ("steps", "undecided")
    theirs.single = single(ours, update=np.array([0, 0, 2e-3, 0]))
    name, reason = failed(compared(ours, theirs))
    assert name == "steps" and reason.startswith("step 3 by itself: update is the first to differ")


@pytest.mark.parametrize(("moved", "status"), [(0, "failed"), (2, "undecided"), (40, "failed")])
def test_few_choices_are_a_tie_and_many_are_a_fault(moved, status):
    ours = cases.record(MODEL)
    theirs = cases.record(MODEL)
    theirs.single = single(ours, update=np.array([0, 0, 2e-3, 0]), moved=np.array([0, 0, moved, 0]))
    assert compared(ours, theirs).stages[-1].status == status


TIE = np.array([0, 0, 1.0, 0])  # one choice moved in step 3, out of 4096, with 1024 tokens


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"moved": TIE}, "passed"),
        ({"moved": TIE, "loss": 2e-4 * TIE}, "undecided"),
        ({"moved": TIE, "loss": 1e-3 * TIE}, "failed"),  # a tenth of what a step of training changes
        ({"moved": TIE, "loss": 6.0 * TIE}, "failed"),
        ({"moved": TIE, "update": 0.03 * TIE}, "undecided"),
        ({"moved": TIE, "update": 0.1 * TIE}, "failed"),
        ({"moved": TIE, "bias": 1e-3 * TIE}, "failed"),
        ({"update": np.nan * TIE}, "failed"),
        ({"moved": TIE, "loss": np.nan * TIE}, "failed"),
        ({"moved": 1 - TIE, "update": 0.03 * TIE}, "failed"),  # in most steps: no tie any more
    ],
)
def test_a_tie_excuses_no_more_than_it_can_do(changes, status):
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    loss = ours.curve["loss"] + changes.pop("loss", 0)
    theirs.single = single(ours, loss=loss, **changes)
    assert compared(ours, theirs).stages[-1].status == status


def test_a_model_without_routers_has_no_ties():
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    theirs.single = single(ours, choices=np.zeros(4))
    assert compared(ours, theirs).stages[-1].status == "passed"
    theirs = cases.with_curve(ours, "loss", ours.curve["loss"] + np.array([0, 0, 0, 2e-4]))
    theirs.single = single(ours, choices=np.zeros(4))
    assert failed(compared(ours, theirs))[1].startswith("loss of step 4 is the first to differ")


def test_a_moved_choice_excuses_no_curve_that_is_far_off():
    ours = cases.record(MODEL)
    theirs = cases.with_curve(ours, "loss", ours.curve["loss"] + np.array([0, 0, 0, 6.0]))
    theirs.single = single(ours, moved=TIE)
    assert failed(compared(ours, theirs))[1].startswith("loss of step 4 is the first to differ")
    theirs = cases.with_curve(ours, "loss", ours.curve["loss"] + np.array([0, 0, 0, 2e-4]))
    theirs.single = single(ours, moved=1 - TIE)
    assert failed(compared(ours, theirs))[1].startswith("loss of step 4"), "ties in most steps"


def test_what_rounding_does_to_the_reference_itself_is_undecided_and_not_passed():
    ours, theirs, floor = (cases.record(MODEL) for _ in range(3))
    ours.trace["logits"] = ours.trace["logits"] + 3e-5
    floor.trace["logits"] = floor.trace["logits"] - 2e-5
    assert compared(ours, theirs).stages[-1].status == "failed"
    stages = compared(ours, theirs, floor).stages
    assert stages[0].status == "undecided" and len(stages) == 4, "an undecided stage does not stop the comparison"


def test_a_weight_that_differs_in_its_last_place_does_not_differ():
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    name = "model.norm.weight"
    theirs.updated[name] = theirs.updated[name].astype(np.float32)
    ours.updated[name] = np.nextafter(theirs.updated[name], np.float32(2))
    assert compared(ours, theirs).stages[2].status == "passed"
    ours.updated[name] = np.nextafter(np.nextafter(ours.updated[name], np.float32(2)), np.float32(2))
    assert failed(compared(ours, theirs))[0] == "optimizer"


@pytest.mark.parametrize("spoil", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1, 2])
def test_nothing_infinite_passes(spoil, side):
    sides = [cases.record(MODEL) for _ in range(3)]
    sides[side].gradient["lm_head.weight"][0, 0] = spoil
    name, reason = failed(compared(*sides))
    assert name == "backward" and "lm_head.weight" in reason


@pytest.mark.parametrize("side", [0, 1])
def test_nan_among_the_worst_thousandth_of_an_update_is_seen(side):
    sides = cases.record(MODEL), cases.record(MODEL)
    assert sides[side].updated["lm_head.weight"].size > 2000
    sides[side].updated["lm_head.weight"][0, 0] = np.nan
    assert failed(compared(*sides))[0] == "optimizer"


@pytest.mark.parametrize(("got", "nudged", "status"), [(1, 1e-12, "failed"), (1e-9, 1e-12, "failed"),
                                                       (1e-3, 1e-3, "undecided"), (0, 1, "passed")])  # fmt: skip
def test_beside_a_zero_gradient_of_the_reference_only_its_own_rounding_counts(got, nudged, status):
    ours, theirs, floor = (cases.record(MODEL) for _ in range(3))
    for side, value in ((ours, got), (theirs, 0), (floor, nudged)):
        side.gradient["lm_head.weight"] = np.full_like(side.gradient["lm_head.weight"], value)
    stage = next(stage for stage in compared(ours, theirs, floor).stages if stage.name == "backward")
    assert next(row for row in stage.rows if row.name == "lm_head.weight").status == stage.status == status


def test_a_thousandth_of_an_update_is_left_out_and_no_more():
    want = np.ones((100, 100))
    few, more = want.copy(), want.copy()
    few[0, :10] = -1
    more[0, :11] = -1
    assert align_stages.trimmed(few, want) == 0 and align_stages.trimmed(more, want) > 1e-2
    assert align_stages.trimmed(np.array([1.0, 2.0]), np.array([1.0, 1.0])) > 0.5
