"""The ladder goes on where rungs are independent, resumes where it stopped, and takes unknown for unknown."""

import json

import pytest

from launch.firsthour.ladder import (
    GO,
    GO_WITH,
    LADDER,
    NO_GO,
    Finding,
    Outcome,
    climb,
    judged,
    outcome_of,
    own_state,
    seconds_of,
    verdict,
)
from plugins.errors import ClusterError, DataError

NAMES = [rung.name for rung in LADDER]


def work(calls, **said):
    """Rungs that say ok, unless `said` gives another verdict or an error."""

    def rung(name):
        def run(seconds, done):
            calls.append(name)
            word = said.get(name, "ok")
            if isinstance(word, BaseException):
                raise word
            return [Finding(word, name, "seen")], {"seconds": seconds, "below": list(done)}

        return run

    return {name: rung(name) for name in NAMES}


def reachable(failed):
    """The slow obvious reference: a rung is run if no rung that it needs, directly or not, failed."""
    needs = {rung.name: set(rung.needs) for rung in LADDER}
    blocked = {failed}
    while more := {name for name in needs if needs[name] & blocked} - blocked:
        blocked |= more
    return [name for name in NAMES if name == failed or name not in blocked]


def test_every_need_stands_below_and_the_shares_are_within_the_budget():
    for number, rung in enumerate(LADDER):
        assert set(rung.needs) <= set(NAMES[:number])
    assert sum(seconds_of(rung, 3600) for rung in LADDER) <= 3600


@pytest.mark.parametrize("failed", NAMES)
@pytest.mark.parametrize("how", ["fail", "unknown", ClusterError("no answer")])
def test_what_does_not_depend_on_a_failed_rung_goes_on(tmp_path, failed, how):
    calls = []
    outcomes = climb(work(calls, **{failed: how}), tmp_path, 3600, lambda outcome, kept: None)
    assert calls == reachable(failed)
    assert [one.rung for one in outcomes] == NAMES
    assert all(one.verdict == "unknown" for one in outcomes if one.rung not in calls)
    word, lines = verdict(outcomes)
    essential = {rung.name: rung.essential for rung in LADDER}
    lost = [one.rung for one in outcomes if not one.told]
    assert word == (NO_GO if how == "fail" or any(essential[name] for name in lost) else GO_WITH)
    assert any(failed in line for line in lines)


def test_an_interrupted_ladder_resumes_where_it_stopped(tmp_path):
    calls = []
    with pytest.raises(KeyboardInterrupt):
        climb(work(calls, mini=KeyboardInterrupt()), tmp_path, 3600, lambda outcome, kept: None)
    assert calls == NAMES[: NAMES.index("mini") + 1]
    calls.clear()
    kept = []
    outcomes = climb(work(calls), tmp_path, 3600, lambda outcome, old: kept.append(outcome.rung) if old else None)
    assert calls == NAMES[NAMES.index("mini") :]
    assert kept == NAMES[: NAMES.index("mini")]
    assert verdict(outcomes) == (GO, [])


def test_a_rung_that_failed_is_run_again_and_one_that_was_ok_is_not(tmp_path):
    calls = []
    climb(work(calls, devices="fail"), tmp_path, 3600, lambda outcome, kept: None)
    calls.clear()
    climb(work(calls), tmp_path, 3600, lambda outcome, kept: None)
    assert calls == ["devices", "collectives", "stage", "calibrate"]


def test_partly_unknown_is_not_ok_but_bears(tmp_path):
    outcome = judged("hosts", [Finding("ok", "a", "b"), Finding("unknown", "c", "d")], {})
    assert (outcome.verdict, outcome.bears) == ("unknown", True)
    assert judged("hosts", [], {}).verdict == "unknown"
    assert not judged("hosts", [Finding("unknown", "c", "d")], {}).bears
    rest = [Outcome(name, "ok", (Finding("ok", name, ""),)) for name in NAMES if name != "hosts"]
    assert verdict([outcome, *rest])[0] == GO_WITH
    assert outcome_of(json.loads(json.dumps(outcome.as_json()))) == outcome


def test_the_folder_of_another_ladder_is_refused(tmp_path):
    own_state(tmp_path, {"recipe": "a"}, again=False)
    own_state(tmp_path, {"recipe": "a"}, again=False)
    climb(work([]), tmp_path, 3600, lambda outcome, kept: None)
    with pytest.raises(DataError, match="recipe a, but this start has recipe b; choose another --work"):
        own_state(tmp_path, {"recipe": "b"}, again=False)
    own_state(tmp_path, {"recipe": "b"}, again=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ladder.json"]
