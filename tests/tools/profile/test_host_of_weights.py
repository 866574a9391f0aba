"""What a CPU's profile tells of the optimizer: its share of memory, and the host's time for each weight."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tools.estimate.efficiency import cluster, efficiency_of
from tools.estimate.memory.model import stage_weights
from tools.estimate.time_model import TimeModel
from tools.profile.attribute import Measured
from tools.profile.fit import fit
from tools.profile.kernels import Profile, Step
from tools.profile.modelled import modelled
from tools.profile.own_host import START
from tools.profile.study import run_of

MINI = Path(__file__).parents[3] / "recipes" / "mini" / "pretrain.yaml"
HARDWARE = replace(cluster("atlas_800t_a2"), peak_flops={"fp32": 5e10, "bf16": 5e10}, hbm_bytes_per_s=5e10)  # a CPU's
LAYERS = "model.model_config.num_hidden_layers"


@cache
def mini(layers=3):
    return run_of(MINI, (f"{LAYERS}={layers}",))


def fitted(truth, device="CPU"):
    terms = modelled(mini(), HARDWARE, truth, 0)
    measured = Measured(sum(terms.values()), terms, {}, scoped=True)
    profile = Profile("x", device, Step((), measured.seconds), 1)
    return fit(profile, measured, mini(), HARDWARE, START, 0)


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(update=st.floats(0.3, 3.0), each=st.floats(1e-5, 1e-3), step=st.floats(1e-3, 1e-1))
def test_both_are_found_again_and_predict_another_mini(update, each, step):
    truth = replace(START, memory=0.03, update=update, weight_s=each, step_s=step)
    found = fitted(truth)
    assert {"memory", "update", "weight_s", "step_s"} <= set(found.fitted)
    for name in ("memory", "update", "weight_s", "step_s"):
        assert getattr(found.efficiency, name) == pytest.approx(getattr(truth, name), rel=0.01), name
    other = mini(5)
    seconds = (TimeModel(HARDWARE, values).step(other).total for values in (found.efficiency, truth))
    assert next(seconds) == pytest.approx(next(seconds), rel=0.01)


def test_a_device_keeps_what_published_runs_leave():
    found = fitted(replace(START, memory=0.2), "Ascend")
    assert not {"update", "weight_s"} & set(found.fitted)


def test_each_weight_costs_its_host_and_the_terms_stay_the_step():
    values = replace(START, weight_s=0.25)
    more = TimeModel(HARDWARE, values).optimizer(mini(), 0) - TimeModel(
        HARDWARE, replace(values, weight_s=0)
    ).optimizer(mini(), 0)
    weights = len(list(stage_weights(mini(), 0)))
    assert weights == 60  # AdamW's Addcmul kernels in a profile of MindSpore 2.9.0
    assert more == pytest.approx(0.25 * weights)
    terms = modelled(mini(), HARDWARE, values, 0)
    assert terms["host of the optimizer"] == pytest.approx(more)
    assert sum(terms.values()) == pytest.approx(TimeModel(HARDWARE, values).step(mini()).total)


@pytest.mark.parametrize("name", ["atlas_800t_a2", "h100"])
def test_published_sets_leave_the_optimizer_at_the_share_of_memory(name):
    found = efficiency_of(cluster(name))
    assert (found.update, found.weight_s) == (1.0, 0.0)
    half, whole = (TimeModel(HARDWARE, replace(found, update=u)).optimizer(mini(), 0) for u in (0.5, 1.0))
    assert half == 2 * whole
