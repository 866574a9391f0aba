"""No run with a fault is called equal: the faults that a verdict once passed over."""

import math

import numpy as np
import pytest

from tests.tools.accuracy.diagnose.simulated import SHAPES, Run, but
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side

EMBEDDING, DENSE, NORM = SHAPES
NOT_RECORDED = "nothing differs in what was recorded"


class Metric(Run):
    """A `Metric` run writes another value for one number of the metrics, in some steps."""

    name, value, steps, stateless = "", None, (3,), False

    def metrics(self, rank, line):
        if line.get("step") in self.steps:
            line |= {self.name: self.value(line[self.name]) if callable(self.value) else self.value}
        super().metrics(rank, line)

    def line(self, rank, kind, line):
        if not self.stateless:
            super().line(rank, kind, line)


def metric(name, value, steps=(3,), stateless=False):
    fixed = staticmethod(value) if callable(value) else value
    return type("Changed", (Metric,), {"name": name, "value": fixed, "steps": steps, "stateless": stateless})


def sides(folder, fault, **more):
    return read_side(Run(folder / "a").write()), read_side(fault(folder / "b", **more).write())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("value", [0.0, lambda loss: -loss, lambda loss: loss * (1 + 2**-8)])
def test_a_wrong_loss_of_right_parts_is_a_difference(tmp_path, value, ranks):
    verdict = diagnose(*sides(tmp_path, metric("loss", value), ranks=ranks))
    assert verdict.word == "differs: forward, step 3"
    assert [each.detail.split()[0] for each in verdict.findings] == ["loss"]


def test_a_loss_that_differs_with_its_part_is_told_once(tmp_path):
    wrong = but(loss=lambda loss, step: loss + 0.5 * (step == 3))
    assert [each.detail.split()[0] for each in diagnose(*sides(tmp_path, wrong)).findings] == ["lm_loss"]


@pytest.mark.parametrize("stateless", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, lambda rate: rate * (1 + 2**-8), lambda rate: rate * (1 + 1e-7)])
def test_another_learning_rate_is_a_difference(tmp_path, value, stateless):
    verdict = diagnose(*sides(tmp_path, metric("learning_rate", value, stateless=stateless)))
    assert verdict.word == "differs: update, step 3"


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_one_run_by_itself_shows_an_impossible_learning_rate(tmp_path, value):
    verdict = diagnose(read_side(metric("learning_rate", value)(tmp_path / "a").write()))
    assert verdict.word == "differs: update, step 3"


def test_a_global_norm_of_0_is_not_that_of_gradients(tmp_path):
    verdict = diagnose(read_side(metric("global_norm", 0.0)(tmp_path / "a").write()))
    assert verdict.word == "differs: norm and clipping, step 3"
    assert "infinity" not in verdict.first[0].detail


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["loss", "learning_rate"])
def test_a_number_that_no_step_has_is_a_gap(tmp_path, name, ranks):
    verdict = diagnose(*sides(tmp_path, metric(name, None, (1, 2, 3)), ranks=ranks))
    assert verdict.word == NOT_RECORDED
    assert any(f"the {name} of steps 1 to 3 is missing" in gap for gap in verdict.gaps)


def test_a_sample_that_comes_twice_is_a_difference(tmp_path):
    twice = but(batch=lambda made, _: tuple(np.concatenate([each, each[:1]]) for each in made))
    assert diagnose(*sides(tmp_path, twice)).word == "differs: samples, step 1"


class Still(Run):
    weight, factor = NORM, 1.0

    def rate(self, step):
        return self.factor * super().rate(step)

    def record(self, rank, step, before, after, *more):
        super().record(rank, step, before, after | {self.weight: before[self.weight]}, *more)

    def step(self, step, before, recorded=True):
        return super().step(step, before, recorded) | {self.weight: before[self.weight]}


@pytest.mark.parametrize(
    ("factor", "word"), [(1.0, "differs: update, step 2"), (1e-5, "equal")], ids=["large", "lost in rounding"]
)
def test_a_weight_that_stands_still_is_not_explained_by_adam(tmp_path, factor, word):
    fault = type("Fault", (Still,), {"factor": factor})
    assert diagnose(read_side(fault(tmp_path / "a").write())).word == word


class Averaging(Run):
    """An `Averaging` run replaces its weights in step 2, by other numbers than AdamW's, which stand for averages."""

    def replaced(self, step, after):
        return {name: value / 2 if step == 2 and name in SHAPES else value for name, value in after.items()}

    def record(self, rank, step, before, after, *more):
        super().record(rank, step, before, self.replaced(step, after), *more)

    def step(self, step, before, recorded=True):
        return self.replaced(step, super().step(step, before, recorded))


@pytest.mark.parametrize(("optimizer", "word"), [("PmaAdamW", "equal"), ("AdamW", "differs: update, step 2")])
def test_weights_that_are_replaced_by_averages_are_no_fault(tmp_path, optimizer, word):
    keys = {"optimizer.type": optimizer, "optimizer.fused_num": 2, "optimizer.interleave_step": 1}
    assert diagnose(read_side(Averaging(tmp_path / "a", keys=keys).write())).word == word


def test_steps_of_only_one_run_are_named(tmp_path):
    a, b = sides(tmp_path, Run, steps=5)
    verdict = diagnose(a, b)
    assert not verdict.findings and verdict.word == "equal in the steps that both runs recorded"
    assert not a.notes
    assert any("steps 4, 5 are not in the other run" in note for note in b.notes)


def test_states_of_only_one_run_are_not_called_equal(tmp_path):
    """The losses of all steps are compared, but the gradients of step 3 were recorded in one run only."""
    a, b = sides(tmp_path, Run, keys={"plugins.step_record.steps": 2})
    del b.states[3]
    assert diagnose(a, b).word == "equal in the steps that both runs recorded"
    assert a.notes == [
        "the weights, gradients and routers of step 3 are not recorded by the other run, and so not compared"
    ]


def test_many_steps_of_only_one_run_are_counted(tmp_path):
    a, b = sides(tmp_path, Run)
    a.steps, b.steps = (dict.fromkeys(range(every, 10001, every), a.steps[1]) for every in (1, 10))
    diagnose(a, b)
    assert any("9,000 steps (the first is step 1) are not in the other run" in note for note in a.notes)
    assert max(map(len, a.notes)) < 200 and not b.notes


@pytest.mark.parametrize(("name", "stage"), [("global_norm", "norm and clipping"), ("learning_rate", "update")])
def test_a_number_that_only_one_rank_has_is_a_finding(tmp_path, name, stage):
    """A global norm differs where a collective was left out, and in the file of another run."""

    class Other(Run):
        def metrics(self, rank, line):
            super().metrics(rank, line | ({name: line[name] * 1.01} if rank == 1 and line.get("step") == 2 else {}))

    verdict = diagnose(read_side(Other(tmp_path / "a", ranks=2).write()))
    assert verdict.word == f"differs: {stage}, step 2"
    assert [each.ranks for each in verdict.findings] == [(1,)]
