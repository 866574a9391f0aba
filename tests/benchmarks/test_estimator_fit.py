"""Known parameters come back; a group is left out whole; what is recorded is what the code gives."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.estimator import cards, newer
from benchmarks.estimator_fit import (
    CARD,
    FOLLOWS,
    RELEASE,
    START,
    TYPES,
    Problem,
    contradictions,
    cross_validated,
    errors_of,
    fit,
    floor,
    folds,
    group_of,
    grouped,
    predicted,
    runs_of,
    same_configuration,
    type_of,
    unseen,
    usable,
)
from tools.estimate.efficiency import FILE, NAMES, cluster, known_error, newer_error
from tools.estimate.published.calibrate import BOUNDS, SPREAD
from tools.estimate.published.rows import express, read_rows
from tools.estimate.published.validate import measured_seconds, predict
from tools.estimate.time_model import TimeModel

DATA = Path(__file__).parents[2] / "benchmarks/data"
ROWS = usable(row for file in sorted(DATA.glob("*.yaml")) for row in read_rows(file))
A100 = [row for row in ROWS if row.cluster == "a100_80g"]


@pytest.fixture
def only_a100s(monkeypatch):
    """Only A100s, which are drawn to no other type and draw none: their part of the fit of all, exactly."""
    monkeypatch.setattr("benchmarks.estimator_fit.TYPES", {"a100": TYPES["a100"]})


def test_every_parameter_has_a_start_a_spread_and_bounds():
    assert set(SPREAD) == set(BOUNDS) == set(NAMES)
    assert all(BOUNDS[name][0] <= getattr(START, name) <= BOUNDS[name][1] for name in NAMES)
    assert set(FOLLOWS) | set(FOLLOWS.values()) <= set(NAMES)


def test_the_known_error_is_also_that_of_replayed_schedules():
    """The fit computes schedules in closed form, and the commands replay them."""
    errors = []
    for run in runs_of(ROWS):
        times = TimeModel(cluster(run.cluster))
        closed, replayed = (times.step(run.config, simulated).total for simulated in (False, True))
        assert replayed == pytest.approx(closed, rel=0.02), run
        errors += [(closed / seconds - 1, replayed / seconds - 1) for seconds in run.seconds]
    of_closed, of_replayed = np.abs(errors).mean(0)
    assert len(errors) == len(ROWS) and of_replayed == pytest.approx(of_closed, abs=5e-4)


def test_every_cluster_has_one_type_and_parents_come_first():
    clusters = [name for kind in TYPES.values() for name in kind.clusters]
    assert len(set(clusters)) == len(clusters)
    seen = set()
    for name, kind in TYPES.items():
        assert kind.parent == "" or kind.parent in seen
        assert all(type_of(one) == name for one in kind.clusters)
        seen.add(name)


@given(st.sets(st.integers(0, len(ROWS) - 1), min_size=2, max_size=25))
@settings(max_examples=25)
def test_no_group_is_on_both_sides_of_a_fold(picked):
    problem = Problem(runs_of(ROWS[index] for index in picked), list(TYPES))
    owners = [group_of(replace(ROWS[0], cluster=run.cluster, config=run.config)) for run in problem.runs]
    groups = [owners[index] for index in problem.owner]
    seen = []
    for group, kept in folds(problem):
        inside = {groups[index] for index in range(len(kept)) if kept[index]}
        outside = {groups[index] for index in range(len(kept)) if not kept[index]}
        assert outside == {group} and group not in inside
        seen.append(group)
    assert sorted(seen) == sorted(set(groups))


def test_truncated_models_and_other_releases_are_one_group():
    groups = grouped(ROWS)
    simumax = {group_of(row) for row in ROWS if row.group == "simumax_b200" and row.id.startswith("llama3_70b")}
    assert len(simumax) == 1
    gpt = {group_of(row) for row in ROWS if "GB200_GPT_OSS" in row.id}
    assert len(gpt) == 1 and len(groups[gpt.pop()]) > 5


@pytest.mark.slow
def test_what_is_left_out_has_no_part_in_its_prediction(only_a100s):
    (group, own), *_ = grouped(A100).items()
    spoilt = [replace(row, measured={"step_time_s": 1000.0}) if row in own else row for row in A100]
    start = {"a100": START}
    before, after = (
        {one.row.id: predicted(runs_of([one.row])[0], {"a100": START}) for one in cross_validated(rows, start)}
        for rows in (A100, spoilt)
    )
    assert set(before) == set(after)
    sets = [fit([row for row in rows if group_of(row) != group], start) for rows in (A100, spoilt)]
    assert sets[0] == sets[1]


def test_known_parameters_come_back(only_a100s):
    truth = {"a100": replace(START, matmul=0.62, memory=0.9, link=0.8)}
    made = []
    for row in A100:
        seconds = predicted(runs_of([row])[0], truth) * row.samples / row.config.global_batch
        made.append(replace(row, measured={"step_time_s": seconds}))
    found = fit(made)
    assert max(map(abs, errors_of(made, found))) < 0.03
    assert found["a100"].matmul == pytest.approx(0.62, rel=0.05)
    assert abs(np.log(found["a100"].link / 0.8)) < abs(np.log(START.link / 0.8))


def test_a_search_that_stops_short_goes_on(only_a100s, monkeypatch):
    problem = Problem(runs_of(A100), ["a100"])
    far = {"a100": replace(START, matmul=0.35, half_size=40.0, memory=0.3, link=2.0, step_s=1.0, layer_s=1e-3)}

    def cost(at):
        assert np.allclose(at.logs, problem.logs(at.x))
        return problem.cost(at.logs, at.x, problem.weight)

    best = cost(problem.settled({"a100": START}))
    monkeypatch.setattr("benchmarks.estimator_fit._ROUNDS", 1)
    assert cost(problem.settled(far)) == pytest.approx(best, abs=0.3)


def test_no_link_is_fitted_faster_than_nominal():
    problem = Problem(runs_of(A100), list(TYPES))
    fastest = problem.sets(problem.high)
    for kind, values in fastest.items():
        for name in TYPES[kind].clusters:
            assert values.link * cluster(name).intra_node.efficiency <= 1 + 1e-9
            assert values.network * cluster(name).inter_node.efficiency <= 1 + 1e-9


def test_a_type_without_runs_is_as_its_parent(monkeypatch):
    kinds = {"a100": TYPES["a100"], "h800": replace(TYPES["h800"], parent="a100")}
    monkeypatch.setattr("benchmarks.estimator_fit.TYPES", kinds)
    monkeypatch.setattr("benchmarks.estimator_fit._ROUNDS", 1)
    found = fit(A100[:4])
    for name in NAMES:
        assert getattr(found["h800"], name) == pytest.approx(getattr(found["a100"], name), rel=0.02)


def test_recorded_errors_are_what_the_code_gives(only_a100s):
    judged = cross_validated(A100)
    size = np.abs([one.error for one in judged])
    recorded = known_error(cluster("a100_80g"))
    assert (recorded.rows, recorded.groups) == (len(judged), len({one.group for one in judged}))
    assert (recorded.mean, recorded.worst) == pytest.approx((size.mean(), size.max()), abs=4e-3)


def test_errors_of_runs_that_no_fit_has_seen_are_recorded():
    found = newer_error(cluster("atlas_800t_a2")).as_json()
    assert found == newer()
    ascend = known_error(cluster("atlas_800t_a2"))
    assert ascend.worst == pytest.approx(max(abs(one.error) for one in cards()), abs=1e-3)
    ids = {row.id for row in ROWS}
    assert not ids & {one.row.id for band in (RELEASE, CARD) for one in unseen(band)}


def test_every_set_with_runs_has_errors_of_all_of_them():
    sets = yaml.safe_load(FILE.read_text("utf-8"))["sets"]
    assert list(sets) == list(TYPES)
    for kind, entry in sets.items():
        own = [row for row in [*ROWS, *(one.row for one in unseen(CARD))] if type_of(row.cluster) == kind]
        found = entry.get("step_errors", {"rows": 0, "groups": 0})
        assert (found["rows"], found["groups"]) == (len(own), len(grouped(own)))


FILES = sorted((Path(__file__).parents[2] / "benchmarks/data").glob("*.yaml"))


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


@pytest.mark.slow
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
