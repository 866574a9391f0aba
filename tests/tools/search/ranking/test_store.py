from dataclasses import replace
from pathlib import Path

import pytest

from plugins.errors import DataError
from tests.tools.search.space.test_candidates import request
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.placement.place import Placement
from tools.search.ranking import store
from tools.search.ranking.rank import rank
from tools.search.ranking.store import Store, digest_of
from tools.search.space.candidates import configuration


@pytest.fixture(scope="module")
def case():
    asked = request(limits=["pp=2", "vpp=2", "tp=2"])
    one = rank(asked).short_list(1)[0].candidate
    config = configuration(asked, one)
    mixed = replace(config, recompute=replace(config.recompute, full=((1, 0), (0, 1)), select=((2, 0), (0, 0))))
    return asked, TimeModel(asked.hardware), one, Placement(mixed, 2.0, 1.5, (3.0, 4.0))


def test_round_trip(case, tmp_path):
    asked, times, candidate, placement = case
    path = tmp_path / "new" / "state.json"
    Store(asked, times, path).keep(candidate, placement, 10.0)
    kept = Store(asked, times, path, resume=True)
    assert len(kept) == 1 and kept.find(candidate, 10.0) == placement
    assert kept.find(candidate, 11.0) is None  # of another effort
    kept.keep(candidate, replace(placement, cut=True), 10.0)
    assert kept.find(candidate, 10.0) is None  # a deadline ended it
    kept.keep(candidate, Placement(None, float("inf"), float("inf"), why="too tight"), 30.0)
    again = Store(asked, times, path, resume=True).find(candidate, 30.0)
    assert again.configuration is None and again.why == "too tight" and again.step_s == float("inf")
    assert len(Store(asked, times, path)) == 0


def test_all_code_that_answers_counts(case, monkeypatch):
    asked, times, _, _ = case
    names = {f"{file.parent.name}/{file.name}" for file in store.code()}
    assert {
        "estimate/layer_time.py",
        "hierarchical_ep/traffic.py",
        "hierarchical_ep/topology.py",
        "model/weights.py",
    } <= names
    before = digest_of(asked, times)
    monkeypatch.setattr(store, "code", lambda: [Path(__file__)])
    assert digest_of(asked, times) != before


def test_another_question_has_another_state(case, tmp_path):
    asked, times, candidate, placement = case
    other = replace(asked, cap=asked.cap + GIB)
    assert digest_of(asked, times) != digest_of(other, times)
    path = tmp_path / "state.json"
    Store(asked, times, path).keep(candidate, placement, 10.0)
    assert len(Store(other, times, path, resume=True)) == 0
    path.write_text(path.read_text("utf-8")[:-9], "utf-8")
    assert len(Store(asked, times, path, resume=True)) == 0


@pytest.mark.parametrize("content", ["# a page of somebody's\n", '["a list"]', ""])
@pytest.mark.parametrize("resume", [True, False])
def test_a_file_of_another_kind_is_not_written_over(case, tmp_path, content, resume):
    asked, times, _, _ = case
    path = tmp_path / "README.md"
    path.write_text(content, "utf-8")
    with pytest.raises(DataError, match=r"README\.md: is no state of a search"):
        Store(asked, times, path, resume)
    assert path.read_text("utf-8") == content


def test_a_damaged_state_in_the_cache_is_begun_anew(case, tmp_path, monkeypatch):
    asked, times, _, _ = case
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store.folder().mkdir(parents=True)
    (store.folder() / f"{digest_of(asked, times)}.json").write_text('{"digest": "x", "pla', "utf-8")
    assert len(Store(asked, times, resume=True)) == 0
