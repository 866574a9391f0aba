"""The measurements in benchmarks/data: read whole, each predicted or with a reason, and what contradicts itself."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from tools.estimate.published.contradictions import contradictions, floor, same_configuration
from tools.estimate.published.fit import usable
from tools.estimate.published.rows import express, read_rows
from tools.estimate.published.validate import measured_seconds, predict

FILES = sorted((Path(__file__).parents[4] / "benchmarks/data").glob("*.yaml"))


def _written():
    return [row for file in FILES for row in yaml.safe_load(file.read_text("utf-8"))["rows"]]


@pytest.fixture(scope="module")
def rows():
    return [row for file in FILES for row in read_rows(file)]


def test_every_row_is_read_once_with_its_source(rows):
    written = _written()
    assert [row.id for row in rows] == [row["id"] for row in written]
    assert len({row.id for row in rows}) == len(rows) == 182
    assert all(row["source"] and row["certainty"] and row["use"] in ("fit", "context_only") for row in written)


def test_every_row_is_predicted_or_says_why_not(rows):
    for row in rows:
        found = predict(row)
        assert found.step_time_s or found.reason
        if row.use == "fit" and measured_seconds(row) is None:
            assert "not given" in row.reason  # what a fit leaves out for want of a configuration says so


def test_rows_for_context_are_in_no_fit(rows):
    assert {row.use for row in usable(rows)} == {"fit"}
    assert len(usable(rows)) == sum(row.use == "fit" and measured_seconds(row) is not None for row in rows)


def test_what_a_row_measured_decides_nothing_of_its_configuration(rows):
    bare = {row["id"]: {k: v for k, v in row.items() if k != "measured"} for row in _written()}
    assert all(express(bare[row.id]).config == row.config for row in rows)


def test_releases_that_contradict_each_other_are_named(rows):
    found = contradictions(usable(rows))
    assert all(one.spread > 0.1 for one in found)
    assert all(first.spread >= second.spread for first, second in pairwise(found))
    (widest, *_) = found
    assert {row.id[:11] for row in widest.rows} == {"new_26.08_D", "new_26.06.0", "new_26.06_D"}  # GPT-OSS on GB200
    assert widest.floor == pytest.approx((4.476 - 2.83) / (4.476 + 2.83), abs=1e-3)


def test_no_prediction_is_better_than_the_floor(rows):
    every = usable(rows)
    for found in same_configuration(every):
        seconds = np.array(found.seconds)
        tried = np.linspace(seconds[0], seconds[-1], 200)[:, None]
        errors = np.abs(tried / seconds - 1)
        assert errors.max(axis=1).min() >= found.floor - 1e-12
        assert errors.sum(axis=1).min() >= sum(found.least_errors) - 1e-9
    mean, worst = floor(every)
    assert 0.005 < mean < 0.05 and worst == max(one.floor for one in same_configuration(every))


def test_a_configuration_measured_once_has_no_floor(rows):
    one = usable(rows)[0]
    assert floor([one]) == (0.0, 0.0)
    twice = replace(one, id="again", measured={"step_time_s": 2 * measured_seconds(one)})
    assert floor([one, twice])[1] == pytest.approx(1 / 3)
