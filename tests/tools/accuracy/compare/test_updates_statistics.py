"""Updates of weights where only max, min, mean and norm were dumped: what these tell, and what they cannot."""

import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.accuracy.compare.test_updates import CELL, RATE, compared, level_1, trained
from tools.accuracy.compare.updates_statistics import HIDDEN, NOISE, NONE, judge_statistics
from tools.accuracy.dumps.read_items import Item


def by_statistics(folder, golden, bench):
    return compared(folder, golden, bench, task="statistics")


def updates(report):
    return [row for row in report.findings if row.kind == "update"]


@pytest.mark.parametrize("shape", [(64, 64), (256, 256), (8,)])
def test_a_rerun_is_judged_and_clean(tmp_path, shape):
    golden = trained(0, shape, 0)
    report = by_statistics(tmp_path, golden, golden)
    assert report.passed and (report.updates, dict(report.judged.unknown)) == (3, {})


@pytest.mark.parametrize("share", [0.001, 0.05, -0.5])
@pytest.mark.parametrize("shape", [(64, 64), (256, 256)])
def test_a_wrong_learning_rate_is_found_and_called_so(tmp_path, shape, share):
    """From a thousandth on, where the gradients are the same: the note says from where on."""
    golden, bench = trained(0, shape, 0)[:2], trained(0, shape, 0, rate=(1 + share) * RATE)[:2]
    report = by_statistics(tmp_path, golden, bench)
    (row,) = updates(report)
    assert row.step == 1 and "learning rate" in row.cause and abs(share) > report.judged.least[0]
    assert float(row.detail.split(" times as long")[0].rpartition(" ")[2]) == pytest.approx(1 + share, abs=0.01)
    assert "the optimizer: learning rate" in report.meaning()
    assert any("1 updates of weights judged by how max, min, mean and norm moved: one th" in n for n in report.notes())


@pytest.mark.parametrize("noise", [0, 1e-8, 1e-7, 1e-6])
@pytest.mark.parametrize("shape", [(64, 64), (256, 256)])
def test_a_missing_weight_decay_is_found_across_platforms(tmp_path, shape, noise):
    report = by_statistics(tmp_path, trained(0, shape, 0), trained(0, shape, noise, decay=0.0))
    assert [row.step for row in updates(report)] == [1, 2, 3] and len(report.findings) == 3
    assert "the optimizer" in report.meaning()
    if not noise:
        (decay,) = {row.detail.partition("BENCH decays it by ")[2].partition(" of")[0] for row in report.findings} - {
            ""
        }
        assert float(decay) == pytest.approx(2e-5, rel=0.05)
        assert "the optimizer: weight decay" in report.meaning()


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(8, 128), st.integers(8, 128), st.floats(1e-9, 2e-5))
def test_noise_of_the_gradients_is_no_finding(seed, rows, columns, noise):
    with tempfile.TemporaryDirectory() as folder:
        report = by_statistics(folder, trained(seed, (rows, columns), 0), trained(seed, (rows, columns), noise))
    assert report.passed and report.updates + sum(report.judged.unknown.values()) == 3


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 4000), st.floats(1e-8, 1e-1))
def test_another_rounding_of_the_same_update_is_no_finding(seed, size, rate):
    """Decay and step in one rounding or in two, as a fused optimizer and its parts do."""
    rng = np.random.default_rng(seed)
    weight, step = (rng.normal(size=size).astype(np.float32) for _ in range(2))
    rate = np.float32(rate)
    ours = (weight - rate * (step + np.float32(0.1) * weight)).astype(np.float32)
    theirs = (weight * (1 - np.float32(0.1) * rate) - rate * step).astype(np.float32)
    found = judge_statistics((item(weight), item(ours)), (item(weight), item(theirs)), 0.0, 0.0, "float32")
    assert found.unknown or found.error <= found.allowed


def item(values):
    wide = values.astype(np.float64)
    numbers = (wide.max(), wide.min(), wide.mean(), np.sqrt((wide**2).sum()))
    return Item("parameters.weight", "parameters", "float32", values.shape, tuple(map(float, numbers)))


def test_what_rounding_hides_is_unknown_and_not_right(tmp_path):
    golden, bench = (trained(0, (64, 64), 0, rate=rate) for rate in (2e-10, 2.1e-10))
    report = by_statistics(tmp_path, golden, bench)
    assert report.passed and report.judged.unknown[HIDDEN] + report.updates == 3 and report.judged.unknown[HIDDEN]
    assert any(f"updates of weights unknown: {HIDDEN}; --task tensor tells" in note for note in report.notes())
    assert report.as_json()["updates_unknown"][HIDDEN]


def test_what_noise_hides_is_unknown_and_not_right(tmp_path):
    """A learning rate 5 % off, beside gradients as different as Table 2 lets them be."""
    golden, bench = trained(0, (64, 64), 0)[:2], trained(0, (64, 64), 2e-5, rate=1.05 * RATE)[:2]
    report = by_statistics(tmp_path, golden, bench)
    assert not updates(report) and (report.updates, dict(report.judged.unknown)) == (0, {NOISE: 1})


def test_statistics_that_are_not_finite_are_unknown():
    broken = Item("parameters.weight", "parameters", "float32", (2,), (float("nan"), 0.0, None, 1.0))
    assert judge_statistics((broken, broken), (broken, broken), 0.0, 0.0, "float32").unknown == NONE


def test_what_changes_places_is_not_seen(tmp_path):
    """The limit that a dump of statistics has: the first note says it."""
    golden, bench = trained(0, (64, 64), 0), trained(0, (64, 64), 0)
    weight = bench[1][f"{CELL}.forward.0"]["parameters"]["weight"]
    places = [place for place in range(100) if weight.flat[place] not in (weight.max(), weight.min())][:2]
    weight.flat[places] = weight.flat[places[::-1]]
    report = by_statistics(tmp_path, golden[:2], bench[:2])
    assert report.passed and "changed places" in report.notes()[0]
    assert not compared(tmp_path, golden[:2], bench[:2]).passed


def test_an_update_of_level_1_is_judged_by_statistics(tmp_path):
    golden, bench = trained(0, (64, 64), 0), trained(0, (64, 64), 0, rate=1.05 * RATE)
    (row,) = level_1(tmp_path, golden, bench, task="statistics").findings
    assert (row.kind, row.step) == ("update", 3)
