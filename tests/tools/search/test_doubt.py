"""The set that cannot be told apart: clear winners, ties, and the term that would tell."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tools.search.test_candidates import request
from tools.estimate.efficiency import known_error, newer_error
from tools.estimate.time_model import TimeModel
from tools.search.candidates import configuration
from tools.search.doubt import TERMS, doubt, doubt_of, least_devices, perturbed, scaled, slopes
from tools.search.ranking.rank import rank
from tools.search.ranking.run import Found, entry_of

LINKS = ("intra_node", "inter_node")
NAMES = [term.name for term in TERMS]


def slope(**rests):
    """[layouts, terms]: 5 % of each layout's time per deviation rests on the terms named."""
    rows = np.zeros((len(next(iter(rests.values()))), len(TERMS)))
    for name, values in rests.items():
        rows[:, NAMES.index(name.replace("_", " "))] = values
    return rows


def test_a_clear_winner_is_alone():
    found = doubt(["1", "2"], [10.0, 15.0], slope(matmul=[0.05, 0.05], attention=[0.01, 0.02]), 8, 0.05)
    assert found.alike == [("1", 1.0)] and found.experiment is None
    assert len(found.lines()) == 1 and "holds" not in found.lines()[0]
    assert found.lines()[0].endswith("layouts that were not placed may be faster")
    whole = replace(found, whole=True)
    assert "among the layouts of the table" in whole.lines()[0] and len(whole.lines()) == 1
    assert [one.as_json()["of_the_whole_space"] for one in (found, whole)] == [False, True]


def test_what_all_share_cancels():
    """A common error of 30 % leaves a difference of 1 % as it is."""
    assert doubt(["1", "2"], [10.0, 10.1], slope(matmul=[0.3, 0.3]), 8, 0.3).alike == [("1", 1.0)]


def test_equal_layouts_are_both_in():
    found = doubt(["1", "2", "3"], [10.0, 10.0, 12.0], slope(matmul=[0.05, 0.05, 0.05]), 8, 0.05, devices=[64, 32, 999])
    assert found.alike == [("1", 0.5), ("2", 0.5)]
    assert found.experiment is None and "one step of each of 1, 2" in found.lines()[1]
    assert found.steps == 64


def test_a_term_that_only_one_rests_on_is_the_experiment():
    rests = slope(matmul=[0.05, 0.05], links_of_nodes=[0.0, 0.04])
    found = doubt(["1", "2"], [10.0, 10.05], rests, 8, 0.05)
    assert [name for name, _ in found.alike] == ["1", "2"]
    assert found.experiment.term.name == "links of nodes" and found.experiment.devices == 16
    assert found.experiment.right > 0.9 > 0.7 > max(found.shares)
    assert "AlltoAll between nodes on 16 devices" in found.lines()[1]
    assert found.as_json()["experiment"]["term"] == "links of nodes"


def test_of_terms_that_tell_as_much_the_one_on_fewer_devices():
    rests = slope(attention=[0.0, 0.0399], links_of_nodes=[0.0, 0.04])
    found = doubt(["1", "2"], [10.0, 10.02], rests, 8, 0.05)
    assert found.experiment.term.name == "attention" and found.experiment.devices == 1


def test_the_answer_does_not_change():
    rests = np.random.default_rng(1).normal(0, 0.03, (5, len(TERMS)))
    first, again = (doubt("abcde", [10, 10.1, 10.2, 10.3, 11], rests, 8, 0.05) for _ in range(2))
    assert first == again and sum(first.shares) == pytest.approx(1)


@pytest.fixture(scope="module")
def layouts():
    asked = request(devices=16, batch=64, limits=["pp>1"])
    return asked, [configuration(asked, one.candidate) for one in rank(asked).short_list(4)]


def test_slopes_predict_what_a_perturbed_model_says(layouts):
    asked, configs = layouts
    model, found = TimeModel(asked.hardware), slopes(TimeModel(asked.hardware), configs)
    for column, term in enumerate(TERMS):
        factor = np.exp(0.5 * term.deviation)
        for row, config in enumerate(configs):
            expected = perturbed(model, term, factor).step(config, simulated=True).total
            base = model.step(config, simulated=True).total
            assert np.log(expected / base) == pytest.approx(0.5 * found[row, column], abs=0.01)
    assert (found[:, NAMES.index("matmul")] < -0.001).all()
    assert (found[:, NAMES.index("routing")] > 0.001).all()


def test_step_times_vary_by_the_known_error(layouts):
    asked, configs = layouts
    known = known_error(asked.hardware)
    rests = scaled(slopes(TimeModel(asked.hardware), configs), known.mean)
    drawn = np.random.default_rng(0).standard_normal((20_000, len(TERMS)))
    assert np.abs(drawn @ rests.T).mean() == pytest.approx(known.mean, rel=0.1)


def test_what_a_release_changes_is_drawn_by_itself(layouts):
    asked, configs = layouts
    times, newer = TimeModel(asked.hardware), newer_error(asked.hardware)
    assert newer.mean > known_error(asked.hardware).mean
    entries = [entry_of(config, times) for config in configs]
    found = doubt_of(Found(asked, None, entries=entries), times)
    assert found.newer == newer and sum(found.newer_shares) == pytest.approx(1)
    assert max(found.newer_shares) <= max(found.shares), "a wider draw makes the first no surer"
    rests = scaled(slopes(times, configs), newer.mean)
    again = doubt(found.names, [entry.seconds for entry in entries], rests, 8, newer.mean)
    assert found.newer_shares == again.shares
    assert "on software newer than the fit" in found.lines()[-1] and "calibrate" in found.lines()[-1]
    assert found.as_json()["newer_software"]["rows"] == newer.rows
    own = replace(asked.hardware, efficiency={"matmul": 0.5})
    assert newer_error(own) is None


def test_a_term_changes_only_what_it_names(layouts):
    asked, _ = layouts
    model = TimeModel(asked.hardware)
    for term in TERMS:
        other = perturbed(model, term, 1.1)
        changed = {key for key in vars(model.reached) if getattr(other.reached, key) != getattr(model.reached, key)}
        links = {key for key in LINKS if getattr(other.hardware, key) != getattr(model.hardware, key)}
        assert changed | links == set(term.keys)


def test_a_step_needs_a_copy_of_the_pipeline_and_its_experts(layouts):
    _, configs = layouts
    for config in configs:
        assert least_devices(config) % (config.pp * config.tp * config.cp) == 0
        assert least_devices(config) // config.pp % config.ep == 0
        fewest = replace(config, dp=least_devices(config) // (config.pp * config.tp * config.cp))
        assert fewest.devices == least_devices(config) <= config.devices
    assert least_devices(replace(configs[0], dp=64, ep=1)) == configs[0].pp * configs[0].tp * configs[0].cp
    cut = replace(configs[0], dp=64, tp=2, cp=2, ep=8)  # as `tc3 check` has it, dp 4: dp x tp must be a multiple of ep
    assert least_devices(cut) == cut.pp * cut.cp * 4 * cut.tp
