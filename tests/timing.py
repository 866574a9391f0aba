"""How long the tests take: measured by `TC3_RENEW_DURATIONS=1 tests/run`, kept in durations.json.

Of a slow test the processor time is measured, with its fixtures and all processes that it started and waited for:
unlike seconds on the clock it hardly depends on what else the machine does, and tests/test_repository.py holds the slow
tests to a budget. Of a file the seconds on the clock are measured. Files that take longest start first, so that no core
waits for one file at the end, and files that mostly wait run beside files that compute.
"""

import json
import os
import resource
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "durations.json"
RENEW = "TC3_RENEW_DURATIONS"
SHORT = 3.0  # files that take less are not listed
PROPERTY = "processor_seconds"


def read():
    """Return the content of durations.json.

    `budget_seconds` is the most that all slow tests may take together, `slow` maps each slow test function to its
    processor seconds, and `files` maps each test file to its seconds on the clock.
    """
    return json.loads(FILE.read_text())


def function_of(nodeid):
    """The test function, without the values that it is called with."""
    return nodeid.partition("[")[0]


def longest_first(items):
    """Sort tests by their file's seconds; the tests of a file, and files of one time, stay in their order."""
    seconds = read()["files"]
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


forked = [0.0]  # of processes that tests/forks.py started, which are not this one's children


def add_forked(seconds):
    forked[0] += seconds


def processor_seconds():
    """Of this process and of all children that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + forked[0]


class Recorder:
    """Measures in pytest's workers, and writes what they report from the process that started them."""

    def __init__(self, writes):
        self.writes = writes
        self.slow, self.files = defaultdict(float), defaultdict(float)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.began = processor_seconds()
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":
            item.user_properties.append((PROPERTY, processor_seconds() - self.began))
        yield

    def pytest_runtest_logreport(self, report):
        self.files[report.nodeid.partition("::")[0]] += report.duration
        if report.when == "teardown" and "slow" in report.keywords:
            self.slow[function_of(report.nodeid)] += dict(report.user_properties).get(PROPERTY, 0.0)

    def pytest_sessionfinish(self, session, exitstatus):
        """Write what was measured over what was there: of tests that did not run, the old seconds stay."""
        if not self.writes or exitstatus not in (0, 1):  # interrupted
            return
        known = read()
        found = {
            "budget_seconds": known["budget_seconds"],
            "slow": _sorted({**known["slow"], **self.slow}),
            "files": _sorted({**known["files"], **self.files}, SHORT),
        }
        FILE.write_text(json.dumps(found, indent=1) + "\n")


def _sorted(seconds, least=0.0):
    """Longest first, of what is still there."""
    there = {name: round(each, 1) for name, each in seconds.items() if (ROOT / name.partition("::")[0]).exists()}
    return {name: there[name] for name in sorted(there, key=lambda name: (-there[name], name)) if there[name] >= least}


def configure(config):
    """Record where it is asked for."""
    if os.environ.get(RENEW):
        config.pluginmanager.register(Recorder(writes=not hasattr(config, "workerinput")), "tc3-timing")
