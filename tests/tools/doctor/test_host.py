"""Control groups of version 1 and 2, each the real /sys/fs/cgroup of a mount namespace.

What `tc3 affinity`, `tc3 doctor` and msrun's own function read there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.process.roots import write
from tools.doctor import host
from tools.doctor.checks import CHECKS, Patient
from tools.process.host import Root
from tools.schema.versions import verified

ROOT = Path(__file__).resolve().parents[3]
# run inside the namespace: each version is mounted in turn; MindSpore is imported once
SCRIPT = """
import json, subprocess, sys
from mindspore.runtime.thread_bind_core import _get_available_cpus
from tools.affinity import msrun
from tools.affinity.plan import make_plan
from tools.affinity.topology import read_host
import tools.doctor.host
from tools.doctor.checks import CHECKS, Patient
from tools.process.host import Root

found = {}
for version in sys.argv[1:]:
    subprocess.run(["mount", "--bind", version, "/sys/fs/cgroup"], check=True)
    host = read_host(Root())
    plan = make_plan(host, 1, None)
    found[version] = {
        "allowed": sorted(host.allowed),
        "affinity": list(host.msrun),
        "msrun": _get_available_cpus(),
        "binding": CHECKS["binding"].look(Patient(Root())).verdict,
        "obstacle": msrun.obstacle(host, plan),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Return what is read under each version of control groups, with a cpuset of the first core of this process."""
    try:
        namespace = subprocess.run(["unshare", "--mount", "mount", "--bind", "/tmp", "/sys/fs/cgroup"])
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if namespace.returncode:
        pytest.skip("mounting in a namespace of one's own wants root")
    folder = tmp_path_factory.mktemp("cgroup")
    core = f"{min(os.sched_getaffinity(0))}\n"
    write(folder / "one", {"cpuset/cpuset.cpus": core})
    write(folder / "two", {"cgroup.controllers": "cpuset cpu\n", "cpuset.cpus.effective": core})
    places = [str(folder / "one"), str(folder / "two")]
    command = ["unshare", "--mount", sys.executable, "-c", SCRIPT, *places]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return [found[place] for place in places]


@pytest.mark.slow
def test_version_1_is_seen_alike_by_all(seen):
    core = [min(os.sched_getaffinity(0))]
    found = seen[0]
    assert found["allowed"] == found["affinity"] == found["msrun"] == core
    assert (found["binding"], found["obstacle"]) == ("ok", None)


def test_version_2_is_seen_by_tc3_alone_and_it_says_so(seen):
    found = seen[1]
    assert found["allowed"] == [min(os.sched_getaffinity(0))] and found["affinity"] == found["msrun"] == []
    assert found["binding"] == "warn" and "control groups of version 1 only" in found["obstacle"]


class _Recipe:
    """Of which only the folder is asked."""

    def __init__(self, folder):
        self.on_cpu, self.folder = True, str(folder)

    def get(self, path, default=None):
        return self.folder


def test_a_write_where_checkpoints_go(tmp_path, monkeypatch):
    """It fails below a file, and is mended by a folder; a slow disk is a warning, by any clock."""
    look = CHECKS["disk_write"].look
    (tmp_path / "file").write_text("")
    assert look(Patient(Root(), _Recipe(tmp_path / "file" / "run"))).verdict == "fail"
    for limit, verdict in ((float("inf"), "ok"), (0.0, "warn")):
        monkeypatch.setattr(host, "_SLOW", limit)
        assert look(Patient(Root(), _Recipe(tmp_path / "new" / "run"))).verdict == verdict
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(("version", "verdict"), [("2.8.0", "fail"), (None, "ok")])
def test_python_packages(tmp_path, monkeypatch, version, verdict):
    """As pip writes them down: a folder of metadata that Python finds first."""
    wanted = verified()["mindspore"]
    write(tmp_path, {"mindspore-x.dist-info/METADATA": f"Name: mindspore\nVersion: {version or wanted}\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    found = CHECKS["python_packages"].look(Patient(Root()))
    assert found.verdict == verdict and f"MindSpore {version or wanted}" in found.seen


def test_a_package_that_is_not_there(monkeypatch):
    monkeypatch.setattr(host, "installed", lambda name: None)
    found = CHECKS["python_packages"].look(Patient(Root()))
    assert found.verdict == "fail" and "not installed: mindspore" in found.seen
