"""`tc3 doctor` from the command line."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.tools.process.roots import OUTPUTS, write
from tools.doctor.cli import doctor

MINI = str(Path(__file__).resolve().parents[3] / "recipes/mini/pretrain_dp2.yaml")
GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"


def call(*arguments):
    return CliRunner().invoke(doctor, list(arguments))


def test_a_failing_check_is_exit_code_1_and_mending_it_0(tmp_path):
    root = write(tmp_path, {GOVERNOR: "powersave\n"})
    result = call(MINI, "--root", str(root.path))
    assert result.exit_code == 1
    assert "fail    governor" in result.stdout and "mend: cpupower frequency-set -g performance" in result.stdout
    last = result.stdout.splitlines()[-2]
    assert last.startswith("fail: governor: ") and last.endswith("; mend: cpupower frequency-set -g performance")
    (tmp_path / GOVERNOR).write_text("performance\n")
    result = call(MINI, "--root", str(root.path))
    assert result.exit_code == 0 and "ok      governor" in result.stdout and "cpupower frequency" not in result.stdout


def test_json(tmp_path):
    result = call(MINI, "--root", str(write(tmp_path, {GOVERNOR: "powersave\n"}).path), "--json")
    found = {item["check"]: item for item in json.loads(result.stdout)["findings"]}
    assert found["governor"]["verdict"] == "fail" and found["governor"]["mend"] and found["governor"]["source"]


def test_this_host():
    """On any host every check has a verdict."""
    result = call("--json")
    report = json.loads(result.stdout)
    found, facts = report["findings"], report["facts"]
    assert result.exit_code in (0, 1) and len(found) > 25 and report.keys() == {"findings", "facts", "probe"}
    assert facts["Python"] == platform.python_version() and facts["cores"] == str(len(os.sched_getaffinity(0)))
    assert result.exit_code == any(item["verdict"] == "fail" for item in found)


ROOT = Path(__file__).resolve().parents[3]
TC3 = [sys.executable, "-c", "from launch.cli import main; main()"]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
LARGE = ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"
HEAVY = {"mindspore", "mindformers", "torch", "transformers", "scipy", "matplotlib", "datasets"}
# what Ascend's tools say to somebody who is not root
REFUSE = '#!/bin/sh\n[ "$(id -u)" = 0 ] && { echo "$ANSWER"; exit 0; }\necho "Permission denied" >&2; exit 1\n'


@pytest.fixture
def folder():
    """Make a folder that everybody may write to, because only the owner may write to pytest's own folders."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def verdicts(folder, *before):
    """Check -> (verdict, what was seen)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [*before, *TC3, "doctor", "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    return {item["check"]: (item["verdict"], item["seen"]) for item in json.loads(done.stdout)["findings"]}


def test_somebody_without_rights_is_told_what_wants_root(folder):
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("becoming somebody else wants root and setpriv")
    if subprocess.run([*NOBODY, *TC3, "--help"], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode:
        pytest.skip("nobody may not read this checkout or this Python")
    output = (OUTPUTS / "910B2C_23.0.2.1.txt").read_text()
    (folder / "npu-smi").write_text(REFUSE.replace("$ANSWER", output))
    (folder / "npu-smi").chmod(0o755)
    root, nobody = verdicts(folder), verdicts(folder, *NOBODY)
    assert root.keys() == nobody.keys() and root["npu_health"] == ("ok", "2 OK")
    asked = {"npu_health", "npu_processes", "npu_clock"}
    assert {nobody[name][0] for name in asked} == {"unknown"} and all("root" in nobody[name][1] for name in asked)
    others = root.keys() - asked - {"disk_write", "memory", "free_ports", "disk"}  # which change meanwhile
    assert {name: nobody[name][0] for name in others} == {name: root[name][0] for name in others}
    assert nobody["disk_write"][0] in ("ok", "warn")


def test_it_loads_nothing_that_takes_long(folder):
    """It takes a second because it does without MindSpore and all that comes with it."""
    code = f"""
import sys
from launch.cli import main
sys.argv = ["tc3", "doctor", {str(LARGE)!r}, "--json"]
try:
    main()
finally:
    print({HEAVY} & sys.modules.keys() or "nothing", file=sys.stderr)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1) and done.stderr.splitlines()[-1] == "nothing"
