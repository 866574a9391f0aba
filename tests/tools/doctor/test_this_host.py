"""The checks of which a recorded host does not tell, on folders of this one: failing, and mended."""

from __future__ import annotations

import pytest

from tests.tools.process.roots import write
from tools.doctor import system
from tools.doctor.checks import CHECKS, Patient
from tools.process.host import Root
from tools.schema.versions import verified


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
        monkeypatch.setattr(system, "_SLOW", limit)
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
    monkeypatch.setattr(system, "installed", lambda name: None)
    found = CHECKS["python_packages"].look(Patient(Root()))
    assert found.verdict == "fail" and "not installed: mindspore" in found.seen
