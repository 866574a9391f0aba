"""The hour goes on with independent checks, resumes where it stopped, and takes unknown for unknown."""

import json

import pytest

from launch.firsthour.checks import (
    GO,
    GO_WITH,
    HOUR_CHECKS,
    NO_GO,
    Finding,
    Outcome,
    judged,
    outcome_of,
    own_state,
    run_checks,
    verdict,
)
from plugins.errors import ClusterError, DataError

NAMES = [check.name for check in HOUR_CHECKS]


def work(calls, **said):
    """Rungs that say ok, unless `said` gives another verdict or an error."""

    def check(name):
        def run(seconds, done):
            calls.append(name)
            word = said.get(name, "ok")
            if isinstance(word, BaseException):
                raise word
            return [Finding(word, name, "seen")], {"seconds": seconds, "below": list(done)}

        return run

    return {name: check(name) for name in NAMES}


def reachable(failed):
    """The slow obvious reference: a check is run if no check that it needs, directly or not, failed."""
    needs = {check.name: set(check.needs) for check in HOUR_CHECKS}
    blocked = {failed}
    while more := {name for name in needs if needs[name] & blocked} - blocked:
        blocked |= more
    return [name for name in NAMES if name == failed or name not in blocked]


def test_every_need_stands_below_and_the_shares_are_within_the_budget():
    for number, check in enumerate(HOUR_CHECKS):
        assert set(check.needs) <= set(NAMES[:number])
    assert sum(check.share for check in HOUR_CHECKS) <= 1


@pytest.mark.parametrize("failed", NAMES)
@pytest.mark.parametrize("how", ["fail", "unknown", ClusterError("no answer")])
def test_what_does_not_depend_on_a_failed_check_goes_on(tmp_path, failed, how):
    calls = []
    outcomes = run_checks(work(calls, **{failed: how}), tmp_path, 3600, lambda outcome, kept: None)
    assert calls == reachable(failed)
    assert [one.check for one in outcomes] == NAMES
    assert all(one.verdict == "unknown" for one in outcomes if one.check not in calls)
    word, lines = verdict(outcomes)
    essential = {check.name: check.essential for check in HOUR_CHECKS}
    lost = [one.check for one in outcomes if not one.told]
    assert word == (NO_GO if how == "fail" or any(essential[name] for name in lost) else GO_WITH)
    assert any(failed in line for line in lines)


def said_of_missing(failed):
    """The slow obvious reference: check -> (reasons why it is not run, checks to look at), following each need."""
    needs = {check.name: check.needs for check in HOUR_CHECKS}
    missing = set(failed)
    found = {}
    for name in NAMES:
        if lacks := [need for need in needs[name] if need in missing]:
            roots, todo = [], lacks[::-1]
            while todo:
                need = todo.pop()
                todo += [below for below in needs[need] if below in missing][::-1]
                if need not in found and need not in roots:
                    roots.append(need)
            found[name] = lacks, roots
            missing.add(name)
    return found


@pytest.mark.parametrize("failed", [*([name] for name in NAMES), ["devices", "mini"], ["operators", "devices"]])
@pytest.mark.parametrize("how", ["fail", "unknown"])
def test_a_check_that_is_not_run_names_what_is_to_be_mended_first(tmp_path, failed, how):
    """It said "mend mini first" where mini itself was only not run, or "mend devices first" of a check that had found
    nothing to mend, and named one of two."""
    outcomes = run_checks(work([], **dict.fromkeys(failed, how)), tmp_path, 3600, lambda outcome, kept: None)
    expected, findings = said_of_missing(failed), {one.check: one.findings for one in outcomes}
    ended = {"fail": "failed", "unknown": "could judge nothing"}[how]
    begin = {"fail": "mend what the check {} found", "unknown": "see in the lines of the check {} why it could judge"}
    for name, (lacks, roots) in expected.items():
        (finding,) = findings[name]
        reasons = [f"{need} {'was not run' if need in expected else ended}" for need in lacks]
        assert finding.seen == f"this check was not run, because {' and '.join(reasons)}"
        places = [finding.remedy.index(begin[how].format(root)) for root in roots]
        assert places == sorted(places) and finding.remedy.count("the check ") == len(roots)
        assert finding.remedy.startswith("first ") and finding.remedy.endswith("; then run tc3 firsthour again")
    assert all("was not run" not in item.seen for name in NAMES if name not in expected for item in findings[name])


def test_an_interrupted_hour_resumes_where_it_stopped(tmp_path):
    calls = []
    with pytest.raises(KeyboardInterrupt):
        run_checks(work(calls, mini=KeyboardInterrupt()), tmp_path, 3600, lambda outcome, kept: None)
    assert calls == NAMES[: NAMES.index("mini") + 1]
    calls.clear()
    kept = []
    outcomes = run_checks(work(calls), tmp_path, 3600, lambda outcome, old: kept.append(outcome.check) if old else None)
    assert calls == NAMES[NAMES.index("mini") :]
    assert kept == NAMES[: NAMES.index("mini")]
    assert verdict(outcomes) == (GO, [])


def test_a_check_that_failed_is_run_again_and_one_that_was_ok_is_not(tmp_path):
    calls = []
    run_checks(work(calls, devices="fail"), tmp_path, 3600, lambda outcome, kept: None)
    calls.clear()
    run_checks(work(calls), tmp_path, 3600, lambda outcome, kept: None)
    assert calls == ["devices", "collectives", "stage", "calibrate"]


def test_versions_are_judged_again_by_new_reports_of_the_hosts(tmp_path):
    """Another driver that mended a host of a first start was not compared with those of the other hosts."""
    calls = []
    run_checks(work(calls, hosts="fail"), tmp_path, 3600, lambda outcome, kept: None)
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        run_checks(work(calls, versions=KeyboardInterrupt()), tmp_path, 3600, lambda outcome, kept: None)
    assert calls == ["hosts", "versions"]
    calls.clear()
    run_checks(work(calls), tmp_path, 3600, lambda outcome, kept: None)
    assert calls == ["versions"]


def test_partly_unknown_is_not_ok_but_bears(tmp_path):
    outcome = judged("hosts", [Finding("ok", "a", "b"), Finding("unknown", "c", "d")], {})
    assert (outcome.verdict, outcome.bears) == ("unknown", True)
    assert judged("hosts", [], {}).verdict == "unknown"
    assert not judged("hosts", [Finding("unknown", "c", "d")], {}).bears
    rest = [Outcome(name, "ok", (Finding("ok", name, ""),)) for name in NAMES if name != "hosts"]
    assert verdict([outcome, *rest])[0] == GO_WITH
    assert outcome_of(json.loads(json.dumps(outcome.as_json()))) == outcome


def test_results_without_an_essential_check_are_no_go():
    """A bundle without outcomes had the verdict go."""
    word, lines = verdict([])
    assert word == NO_GO and len(lines) == len(NAMES) and "hosts (all nodes): the results do not hold" in lines[0]
    rest = [Outcome(name, "ok", (Finding("ok", name, ""),)) for name in NAMES if name != "stage"]
    assert verdict(rest)[0] == GO_WITH, "not essential"


def test_the_folder_of_another_first_hour_is_refused(tmp_path):
    own_state(tmp_path, {"recipe": "a"}, again=False)
    own_state(tmp_path, {"recipe": "a"}, again=False)
    run_checks(work([]), tmp_path, 3600, lambda outcome, kept: None)
    with pytest.raises(DataError, match="recipe a, but this command was started with recipe b; choose another --work"):
        own_state(tmp_path, {"recipe": "b"}, again=False)
    own_state(tmp_path, {"recipe": "b"}, again=True)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_folder_of_something_else_is_refused_and_one_of_an_older_first_hour_is_not(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "small.yaml").touch()
    for again in (False, True):
        with pytest.raises(
            DataError, match=r"this folder holds other files \(small\.yaml\), but no results of tc3 firsthour"
        ):
            own_state(tmp_path, {"recipe": "a"}, again)
    (tmp_path / "ladder.json").write_text('{"recipe": "b"}')
    own_state(tmp_path, {"recipe": "a"}, again=False)
    assert json.loads((tmp_path / "state.json").read_text()) == {"recipe": "a"}


@pytest.mark.parametrize(
    ("error", "remedy"), [(ClusterError("no node answers: start one"), ""), (OSError(5, "x"), True)]
)
def test_a_refusal_says_itself_what_to_do(tmp_path, error, remedy):
    def refuse(seconds, done):
        raise error

    first = run_checks({"hosts": refuse}, tmp_path, 3600, lambda outcome, kept: None)[0]
    assert first.verdict == "unknown" and bool(first.findings[0].remedy) == bool(remedy)
