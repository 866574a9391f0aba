"""Efficiencies that made a trace are found in it again."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.tools.profile.traces import Trace
from tools.estimate.efficiency import cluster, efficiency_of
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import stage_weights
from tools.estimate.time_model import TimeModel
from tools.profile.attribute import Measured, modelled, whole
from tools.profile.fit import CPU_START, fit
from tools.profile.kernels import Profile, Step
from tools.profile.study import run_of, study
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

ROOT = Path(__file__).parents[3]
HARDWARE = cluster("atlas_800t_a2")
START = efficiency_of(HARDWARE)
FACTORS = dict.fromkeys(("matmul", "half_size", "attention", "memory", "link"), (0.75, 1.25))
SECONDS = dict.fromkeys(("layer_s", "moe_s", "step_s"), (0.3, 3.0))


@cache
def run_105b(**changes):
    recipe = load_recipe(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml")
    config = from_recipe(apply_overrides(recipe, ["parallel_config.micro_batch_num=4"]))
    return replace(config, **changes)


def perturbed(factors):
    changed = {name: getattr(START, name) * factor for name, factor in factors.items()}
    return replace(START, **{**changed, "link": min(changed.get("link", START.link), 1.1)})


def found_in(folder, config, truth, stage=1, scoped=True):
    rank = stage * (config.devices // config.pp)
    Trace(config, HARDWARE, truth, stage, scoped).build().write(folder, rank)
    seen = study(folder, config)
    assert seen.stage == stage
    assert sum(seen.measured.terms.values()) == pytest.approx(seen.measured.seconds, rel=1e-9)
    return seen, fit(seen.profile, seen.measured, config, HARDWARE, START, seen.stage)


@pytest.mark.slow
@settings(
    max_examples=5,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink takes minutes and says little here
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(factors=st.fixed_dictionaries({name: st.floats(*span) for name, span in {**FACTORS, **SECONDS}.items()}))
def test_perturbed_efficiencies_are_recovered_to_one_percent(factors, tmp_path_factory):
    truth = perturbed(factors)
    _, found = found_in(tmp_path_factory.mktemp("trace"), run_105b(), truth)
    assert set(found.fitted) >= {"matmul", "half_size", "attention", "memory", "link", "moe_s", "step_s"}
    for name in found.fitted:
        assert getattr(found.efficiency, name) == pytest.approx(getattr(truth, name), rel=0.01), name
    assert sum(found.after.values()) == pytest.approx(found.measured.seconds, rel=0.001)


def test_what_is_hidden_is_told_from_the_speed_of_links(tmp_path):
    truth = replace(perturbed({"link": 0.8}), hidden=0.3)
    seen, found = found_in(tmp_path, run_105b(cp=2, dp=2), truth)
    model = whole(seen.config, HARDWARE, truth, seen.stage)
    assert seen.measured.whole["cp"] == pytest.approx(model["cp"], rel=1e-3)
    assert seen.measured.terms["cp"] == pytest.approx(0.7 * model["cp"], rel=1e-3)
    assert found.efficiency.link == pytest.approx(truth.link, rel=0.01)
    assert found.efficiency.hidden == pytest.approx(0.3, abs=0.003)


def test_without_scopes_the_host_is_one_term_and_it_is_said_which_parameters_that_hides(tmp_path):
    seen, found = found_in(tmp_path, run_105b(), perturbed({"moe_s": 1.2}), scoped=False)
    assert not seen.measured.scoped
    together = {"layer_s", "moe_s", "step_s"}
    assert len(together & set(found.fitted)) == 1
    assert all("host's time is one" in found.kept[name] for name in together - set(found.fitted))
    assert sum(found.after.values()) == pytest.approx(seen.measured.seconds, rel=0.001)


def test_a_parameter_that_nothing_depends_on_keeps_its_value(tmp_path):
    _, found = found_in(tmp_path, run_105b(), START)
    assert found.kept["matmul_fp8"] == "no term depends on it"
    assert found.efficiency.matmul_fp8 == START.matmul_fp8


MINI = Path(__file__).parents[3] / "recipes" / "mini" / "pretrain.yaml"
CPU = replace(cluster("atlas_800t_a2"), peak_flops={"fp32": 5e10, "bf16": 5e10}, hbm_bytes_per_s=5e10)  # a CPU's
LAYERS = "model.model_config.num_hidden_layers"


@cache
def mini(layers=3):
    return run_of(MINI, (f"{LAYERS}={layers}",))


def fitted(truth, device="CPU"):
    terms = modelled(mini(), CPU, truth, 0)
    measured = Measured(sum(terms.values()), terms, {}, scoped=True)
    profile = Profile("x", device, Step((), measured.seconds), 1)
    return fit(profile, measured, mini(), CPU, CPU_START, 0)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(update=st.floats(0.3, 3.0), each=st.floats(1e-5, 1e-3), step=st.floats(1e-3, 1e-1))
def test_both_are_found_again_and_predict_another_mini(update, each, step):
    truth = replace(CPU_START, memory=0.03, update=update, weight_s=each, step_s=step)
    found = fitted(truth)
    assert {"memory", "update", "weight_s", "step_s"} <= set(found.fitted)
    for name in ("memory", "update", "weight_s", "step_s"):
        assert getattr(found.efficiency, name) == pytest.approx(getattr(truth, name), rel=0.01), name
    other = mini(5)
    seconds = (TimeModel(CPU, values).step(other).total for values in (found.efficiency, truth))
    assert next(seconds) == pytest.approx(next(seconds), rel=0.01)


def test_a_device_keeps_what_published_runs_leave():
    found = fitted(replace(CPU_START, memory=0.2), "Ascend")
    assert not {"update", "weight_s"} & set(found.fitted)


def test_each_weight_costs_its_host_and_the_terms_stay_the_step():
    values = replace(CPU_START, weight_s=0.25)
    more = TimeModel(CPU, values).optimizer(mini(), 0) - TimeModel(CPU, replace(values, weight_s=0)).optimizer(
        mini(), 0
    )
    weights = len(list(stage_weights(mini(), 0)))
    assert weights == 60  # AdamW's Addcmul kernels in a profile of MindSpore 2.9.0
    assert more == pytest.approx(0.25 * weights)
    terms = modelled(mini(), CPU, values, 0)
    assert terms["host of the optimizer"] == pytest.approx(more)
    assert sum(terms.values()) == pytest.approx(TimeModel(CPU, values).step(mini()).total)


@pytest.mark.parametrize("name", ["atlas_800t_a2", "h100"])
def test_published_sets_leave_the_optimizer_at_the_share_of_memory(name):
    found = efficiency_of(cluster(name))
    assert (found.update, found.weight_s) == (1.0, 0.0)
    half, whole = (TimeModel(CPU, replace(found, update=u)).optimizer(mini(), 0) for u in (0.5, 1.0))
    assert half == 2 * whole
