"""Style, types and shell scripts, by the tools that maintain those rules."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [f"launch/{name}" for name in ("environment.sh", "quickstart", "script_body.sh")]
SCRIPTS += ["tests/run", "tests/explore", ".ci/run"]
SCRIPTS += sorted(
    str(path.relative_to(ROOT)) for place in ("launch/scripts", "benchmarks") for path in ROOT.glob(f"{place}/**/*.sh")
)
CHECKS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
    "shellcheck": ["shellcheck", "-x", "--source-path=SCRIPTDIR", *SCRIPTS],
}


@pytest.mark.parametrize("name", CHECKS)
def test_clean(name):
    command = [str(Path(sys.executable).with_name(CHECKS[name][0])), *CHECKS[name][1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_bash_script_is_checked():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    bash = [name for name in tracked if (ROOT / name).read_bytes()[:19] == b"#!/usr/bin/env bash"]
    assert set(bash) <= set(SCRIPTS)
