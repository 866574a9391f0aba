"""Values that are not finite, and what a run does not have."""

import json

import numpy as np
import pytest

from tests.tools.accuracy.diagnose.simulated import ROUTER, SHAPES, Run
from tools.accuracy.diagnose.cli import _as_json
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side

EMBEDDING, DENSE, NORM = SHAPES


def verdict_on(folder, fault, single=True, **more):
    """The verdict on a run with a class's methods, and on a faultless run before it unless `single`."""
    b = read_side(fault(folder / "b", **more).write())
    return diagnose(b) if single else diagnose(read_side(Run(folder / "a").write()), b)


class Spoilt(Run):
    """A weight is NaN after the last step."""

    def record(self, rank, step, before, after, *more):
        spoilt = {DENSE: after[DENSE] * np.float32(np.nan)} if step == 3 else {}
        super().record(rank, step, before, after | spoilt, *more)


class NotANumber(Run):
    """In a `NotANumber` run one element of a gradient is NaN in the last step."""

    def gradient(self, step, name):
        made = super().gradient(step, name)
        if step == 3 and name == DENSE:
            made[0, 0] = np.nan
        return made


class Lost(Run):
    """The last step's loss is NaN, and nothing else."""

    def loss(self, step):
        return float("nan") if step == 3 else super().loss(step)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    ("fault", "stage", "module"),
    [(Spoilt, "update", "layers.0.mlp"), (NotANumber, "gradients", "layers.0.mlp"), (Lost, "forward", "model")],
)
def test_what_is_not_a_number_is_never_equal(tmp_path, fault, stage, module, single, ranks):
    verdict = verdict_on(tmp_path, fault, single, ranks=ranks)
    found = verdict.first[0]
    assert (found.step, found.stage, found.module) == (3, stage, module)
    told = json.dumps(_as_json(verdict, []), allow_nan=False)
    assert json.loads(told)["findings"][0]["error"] is None


@pytest.mark.parametrize("single", [True, False])
def test_a_global_norm_that_is_infinite_is_a_difference(tmp_path, single):
    """Clipping by it leaves nothing of the gradients. The comparison divided by 0."""

    class Overflow(Run):
        def metrics(self, rank, line):
            super().metrics(rank, line | ({"global_norm": float("inf")} if line.get("step") == 3 else {}))

    found = verdict_on(tmp_path, Overflow, single).first[0]
    assert (found.step, found.stage, found.module) == (3, "norm and clipping", "global norm")


@pytest.mark.parametrize(("skipped", "findings"), [(False, 1), (True, 0)])
def test_a_global_norm_that_is_not_a_number_is_a_finding_of_a_run_that_records_only_its_metrics(
    tmp_path, skipped, findings
):
    class Plain(Run):
        def line(self, rank, kind, line):
            pass

        def metrics(self, rank, line):
            spoilt = {"global_norm": float("nan"), "overflow": skipped} if line.get("step") == 3 else {}
            super().metrics(rank, line | spoilt)

    verdict = verdict_on(tmp_path, Plain, keys={"plugins.step_record": False})
    assert [(each.step, each.stage) for each in verdict.findings] == [(3, "norm and clipping")] * findings


@pytest.mark.parametrize("clipped", [True, False])
def test_what_a_run_does_not_have_is_not_compared(tmp_path, clipped):
    class Dense(Run):
        def line(self, rank, kind, line):
            state = {name: told for name, told in line["state"].items() if not name.startswith(ROUTER)}
            super().line(rank, kind, line | {"state": state, "biases": {}} | ({"loads": {}} if "loads" in line else {}))

        def metrics(self, rank, line):
            super().metrics(rank, line | ({"global_norm": None} if "step" in line else {}))

    verdict = verdict_on(tmp_path, Dense, keys={"runner_wrapper.use_clip_grad": clipped})
    assert {"routers", "norm and clipping"}.isdisjoint(verdict.compared)
    assert verdict.unknown == ("norm and clipping",) * clipped and (verdict.word == "equal") != clipped


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("decoder.layers.1.mlp.experts.weight1", "layers.1.experts"),
        ("decoder.layers.0.attn_hc.hc_fn", "layers.0.attn_hc"),
    ],
)
def test_weights_with_other_names_are_compared_in_another_layout_too(tmp_path, monkeypatch, name, module):
    """Experts' weights and those of residual streams: their second moments, and at the start the weights themselves."""
    monkeypatch.setitem(SHAPES, name, (4, 6))

    class Moment(Run):
        def step(self, step, before, recorded=True):
            spoilt = before | {f"adam_v.{name}": before[f"adam_v.{name}"] * np.float32(2)} if step == 3 else before
            return super().step(step, spoilt, recorded)

    class Drawn(Run):
        def start(self):
            return super().start() | {name: super().start()[name] * np.float32(1.5)}

    for fault, step, stage in ((Moment, 3, "update"), (Drawn, 0, "start")):
        verdict = verdict_on(tmp_path / stage, fault, single=False, ranks=2)
        found = verdict.first[0]
        assert not verdict.bits and (found.step, found.stage, found.module) == (step, stage, module)
