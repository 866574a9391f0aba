"""`tc3 doctor` from the command line."""

import json
import os
import platform
from pathlib import Path

from click.testing import CliRunner

from tests.tools.process.roots import write
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
    """Whatever it is: every check has a verdict."""
    result = call("--json")
    report = json.loads(result.stdout)
    found, facts = report["findings"], report["facts"]
    assert result.exit_code in (0, 1) and len(found) > 25 and report.keys() == {"findings", "facts", "probe"}
    assert facts["Python"] == platform.python_version() and facts["cores"] == str(len(os.sched_getaffinity(0)))
    assert result.exit_code == any(item["verdict"] == "fail" for item in found)
