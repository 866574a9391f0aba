"""The known errors of predicted memory: recorded as they are computed, and what margin and odds follow."""

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from benchmarks.memory.terms import OWN, errors
from tools.estimate.memory.room import FILE, LEFT_OUT, ROWS, MemoryErrors, known_errors
from tools.estimate.published.rows import read_rows
from tools.estimate.published.validate import predict, summary
from tools.search.measured import validate


@pytest.fixture(scope="module")
def predictions():
    return [predict(row) for row in read_rows(ROWS) if row.use == "fit"]


def test_what_is_recorded_is_what_validate_computes(predictions):
    computed = {found.row.id: found.memory_error for found in predictions}
    assert set(computed) == set(known_errors().errors) and None not in computed.values()
    assert known_errors().differences(computed) == []
    assert all(0 <= computed[name] - error < 1e-4 for name, error in known_errors().errors.items())


def test_the_margin_is_at_least_what_the_worst_run_took_more_than_predicted(predictions):
    worst = summary(predictions, "memory_error")["all"]["worst"]
    low = min(found.memory_error for found in predictions)
    assert known_errors().missed == pytest.approx(-low, abs=1e-4)
    assert 0.03 < known_errors().missed <= worst + 1e-4 and worst < 0.05
    assert known_errors().margin == LEFT_OUT and MemoryErrors({"a": -0.2}).margin == 0.2
    assert summary(predictions, "memory_error")["all"]["mean"] < 0.01


def test_odds_are_the_share_of_runs_that_would_have_fit(predictions):
    known, limit = known_errors(), 64.0
    measured = [(found.peak_memory_gb, found.peak_memory_gb / (1 + found.memory_error)) for found in predictions]
    for predicted in (50.0, 59.3, 61.0, 63.85, 64.0, 70.0):
        fit = sum(real / said * predicted <= limit for said, real in measured)
        assert known.fits(predicted, limit) == f"{fit} of {len(measured)}"
    assert known.fitting(limit * (1 - known.margin), limit) == len(measured)
    assert known.fitting(0.998 * limit, limit) < 0.7 * len(measured)  # what winners were filled to


def test_the_margin_is_what_a_group_misses_without_its_own_terms():
    rows = [row for row in read_rows(ROWS) if row.use == "fit"]
    assert {row.group for row in rows} == set(OWN)
    found = [errors([row for row in rows if row.group == group], terms.get("all")) for group, terms in OWN.items()]
    missed = -np.concatenate(found).min()
    assert LEFT_OUT - 0.005 < missed <= LEFT_OUT
    assert 0.01 < np.abs(np.concatenate(found)).mean() < 0.02


def test_rows_that_are_only_shown_are_in_no_error(predictions):
    shown = {row.id for row in read_rows(ROWS)} - {found.row.id for found in predictions}
    assert shown and not shown & set(known_errors().errors)
    assert len(known_errors().errors) == len(predictions) == 37


def test_nothing_is_missed_by_predictions_that_are_never_too_low():
    assert MemoryErrors({"a": 0.1, "b": 0.0}).missed == 0


def test_validate_records_and_notices_what_changed(tmp_path, monkeypatch):
    runner, errors = CliRunner(), tmp_path / "errors.yaml"
    result = runner.invoke(validate, [str(ROWS), "--record", str(errors)])
    assert result.exit_code == 0 and errors.read_text("utf-8") == FILE.read_text("utf-8")
    assert "exists" in str(runner.invoke(validate, [str(ROWS), "--record", str(errors)]).exception)
    changed = dict(known_errors().errors, torchtitan_0=-0.1)
    monkeypatch.setattr("tools.search.measured.known_errors", lambda: MemoryErrors(changed))
    result = runner.invoke(validate, [str(ROWS)])
    assert result.exit_code == 1
    assert "torchtitan_0: its memory error is -4.78%, errors.yaml has -10.00%" in result.stderr
    assert runner.invoke(validate, [str(ROWS), "--record", str(errors), "--force"]).exit_code == 0


def test_the_file_of_errors_holds_nothing_else():
    assert list(yaml.safe_load(FILE.read_text("utf-8"))) == ["errors"]
