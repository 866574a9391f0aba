"""What excuses a difference, and how far: ties between experts, rounding of the reference. Nothing infinite is."""

import numpy as np
import pytest

from tests.tools.accuracy.align import cases
from tests.tools.accuracy.align.test_faults import MODEL, climbed, failed
from tools.accuracy.align import compare as align_compare


def test_a_curve_that_parts_later():
    ours = cases.record(MODEL)
    theirs = cases.with_curve(ours, "loss", ours.curve["loss"] + np.array([0, 0, 0, 2e-4]))
    name, reason = failed(climbed(ours, theirs))
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
    rung = climbed(ours, theirs).rungs[-1]
    assert (rung.name, rung.status) == ("steps", "undecided")
    theirs.single = single(ours, update=np.array([0, 0, 2e-3, 0]))
    name, reason = failed(climbed(ours, theirs))
    assert name == "steps" and reason.startswith("step 3 by itself: update is the first to differ")


@pytest.mark.parametrize(("moved", "status"), [(0, "failed"), (2, "undecided"), (40, "failed")])
def test_few_choices_are_a_tie_and_many_are_a_fault(moved, status):
    ours = cases.record(MODEL)
    theirs = cases.record(MODEL)
    theirs.single = single(ours, update=np.array([0, 0, 2e-3, 0]), moved=np.array([0, 0, moved, 0]))
    assert climbed(ours, theirs).rungs[-1].status == status


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
    assert climbed(ours, theirs).rungs[-1].status == status


def test_a_moved_choice_excuses_no_curve_that_is_far_off():
    ours = cases.record(MODEL)
    theirs = cases.with_curve(ours, "loss", ours.curve["loss"] + np.array([0, 0, 0, 6.0]))
    theirs.single = single(ours, moved=TIE)
    assert failed(climbed(ours, theirs))[1].startswith("loss of step 4 is the first to differ")
    theirs = cases.with_curve(ours, "loss", ours.curve["loss"] + np.array([0, 0, 0, 2e-4]))
    theirs.single = single(ours, moved=1 - TIE)
    assert failed(climbed(ours, theirs))[1].startswith("loss of step 4"), "ties in most steps"


def test_what_rounding_does_to_the_reference_itself_is_undecided_and_not_passed():
    ours, theirs, floor = (cases.record(MODEL) for _ in range(3))
    ours.trace["logits"] = ours.trace["logits"] + 3e-5
    floor.trace["logits"] = floor.trace["logits"] - 2e-5
    assert climbed(ours, theirs).rungs[-1].status == "failed"
    rungs = climbed(ours, theirs, floor).rungs
    assert rungs[0].status == "undecided" and len(rungs) == 4, "an undecided rung does not stop the ladder"


def test_a_weight_that_differs_in_its_last_place_does_not_differ():
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    name = "model.norm.weight"
    theirs.updated[name] = theirs.updated[name].astype(np.float32)
    ours.updated[name] = np.nextafter(theirs.updated[name], np.float32(2))
    assert climbed(ours, theirs).rungs[2].status == "passed"
    ours.updated[name] = np.nextafter(np.nextafter(ours.updated[name], np.float32(2)), np.float32(2))
    assert failed(climbed(ours, theirs))[0] == "optimizer"


@pytest.mark.parametrize("spoil", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1, 2])
def test_nothing_infinite_passes(spoil, side):
    """Neither ours, nor the reference, nor its run that says what rounding does."""
    sides = [cases.record(MODEL) for _ in range(3)]
    sides[side].gradient["lm_head.weight"][0, 0] = spoil
    name, reason = failed(climbed(*sides))
    assert name == "backward" and "lm_head.weight" in reason


def test_nan_among_the_worst_thousandth_of_an_update_is_seen():
    ours, theirs = cases.record(MODEL), cases.record(MODEL)
    assert ours.updated["lm_head.weight"].size > 2000
    ours.updated["lm_head.weight"][0, 0] = np.nan
    assert failed(climbed(ours, theirs))[0] == "optimizer"


@pytest.mark.parametrize(("got", "nudged", "status"), [(1, 1e-12, "failed"), (1e-9, 1e-12, "failed"),
                                                       (1e-3, 1e-3, "undecided"), (0, 1, "passed")])  # fmt: skip
def test_beside_a_zero_gradient_of_the_reference_only_its_own_rounding_counts(got, nudged, status):
    ours, theirs, floor = (cases.record(MODEL) for _ in range(3))
    for side, value in ((ours, got), (theirs, 0), (floor, nudged)):
        side.gradient["lm_head.weight"] = np.full_like(side.gradient["lm_head.weight"], value)
    rung = next(rung for rung in climbed(ours, theirs, floor).rungs if rung.name == "backward")
    assert next(row for row in rung.rows if row.name == "lm_head.weight").status == rung.status == status


def test_a_thousandth_of_an_update_is_left_out_and_no_more():
    want = np.ones((100, 100))
    few, more = want.copy(), want.copy()
    few[0, :10] = -1
    more[0, :11] = -1
    assert align_compare.trimmed(few, want) == 0 and align_compare.trimmed(more, want) > 1e-2
    assert align_compare.trimmed(np.array([1.0, 2.0]), np.array([1.0, 1.0])) > 0.5
