"""The slow tests have a budget of processor time: each of them is listed with its seconds."""

import json

from tests import timing


def test_slow_tests_keep_to_their_budget():
    """To renew: TC3_RENEW_DURATIONS=1 tests/run; or write the new test's processor seconds by hand.

    A whole run shall last at most 20 minutes on two cores. The fast tests take some 420 seconds of processor time, and
    a part of the cores' time is lost while all four processes wait.
    """
    known = timing.read()
    total = sum(known["slow"].values())
    assert total <= known["budget_seconds"], (
        f"the slow tests take {total:.0f} s of processor time, {known['budget_seconds']} are allowed: make one "
        f"smaller, or let one read a run that another test trains; the longest are {list(known['slow'])[:5]}"
    )


def test_every_slow_test_that_is_there_is_listed_and_no_other(request):
    """Of those that were collected: a whole run holds all of them, part of a run its part."""
    items = request.session.items
    slow = {timing.function_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    listed = timing.read()["slow"]
    new = sorted(slow - listed.keys())
    assert new == [], f"run `{timing.RENEW}=1 tests/run {new[0]}` and commit tests/durations.json"
    files = {item.nodeid.partition("::")[0] for item in items if item.get_closest_marker("slow")}
    functions = {timing.function_of(item.nodeid) for item in items}
    gone = [name for name in listed if name.partition("::")[0] in files and name not in functions]
    assert not gone or request.config.option.keyword or "::" in " ".join(request.config.args), gone


def test_what_was_measured_replaces_what_was_known(tmp_path, monkeypatch):
    file = tmp_path / "durations.json"
    here = "tests/test_durations.py"
    old = {"budget_seconds": 9, "slow": {f"{here}::a": 5.0, "tests/gone.py::b": 1.0}, "files": {here: 7.0}}
    file.write_text(json.dumps(old))
    monkeypatch.setattr(timing, "FILE", file)
    recorder = timing.Recorder(writes=True)
    for nodeid, seconds in ((f"{here}::c[1]", 2.0), (f"{here}::c[2]", 4.0)):
        report = type("Report", (), {"when": "teardown", "nodeid": nodeid, "keywords": {"slow": 1}})
        report.user_properties = [(timing.PROPERTY, seconds)]
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish(None, 2)
    assert json.loads(file.read_text()) == old, "a run that was interrupted says nothing"
    recorder.pytest_sessionfinish(None, 0)
    expected = {"budget_seconds": 9, "slow": {f"{here}::c": 6.0, f"{here}::a": 5.0}, "files": {here: 6.0}}
    assert json.loads(file.read_text()) == expected
