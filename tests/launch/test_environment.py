"""launch/environment.sh: what a bare machine lacks is named before anything is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

from launch.workers import dataset_helpers

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dirname", "df", "awk", "cat", "sha256sum", "flock", "g++", "make")


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the script reads, and a PATH with every tool it needs."""
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch/environment.sh", tmp_path / "launch")
    for name in ("constraints.txt", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def run(checkout, call, **environment):
    env = {"PATH": str(checkout / "bin"), "PYTHON": sys.executable, **environment}
    command = ["bash", "-c", f"set -euo pipefail; source launch/environment.sh; {call}"]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)


def stand_in(checkout, tool, script):
    path = checkout / "bin" / tool
    path.unlink(missing_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    path.chmod(0o755)


def test_a_good_host_passes(checkout):
    done = run(checkout, 'check_host "$(find_python)"')
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("tool", ["g++", "make"])
def test_a_missing_compiler_is_named(checkout, tool):
    (checkout / "bin" / tool).unlink()
    done = run(checkout, "ensure_environment")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tool} is not installed") and "apt-get install g++ make" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_fitting_python_is_named(checkout):
    stand_in(checkout, "python3", "exit 1")
    done = run(checkout, "ensure_environment", PYTHON="python3")
    assert done.returncode == 2
    assert "no Python 3.10, 3.11 or 3.12 found" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_full_disk_is_named(checkout):
    stand_in(
        checkout, "df", 'echo "Filesystem 1024-blocks Used Available Capacity Mounted on"; echo "d 1 1 2097152 1% /"'
    )
    done = run(checkout, "ensure_environment")
    assert done.returncode == 2
    assert "error: 2 GiB free" in done.stderr and "6 are needed" in done.stderr


def test_an_installed_environment_is_left_alone(checkout):
    """Idempotent: the stamp of the same pins means nothing to do; other pins mean an installation."""
    wanted = subprocess.run(
        ["bash", "-c", "cat constraints.txt setup.cfg | sha256sum"], cwd=checkout, capture_output=True, check=True
    ).stdout
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.installed").write_bytes(wanted)
    assert run(checkout, "ensure_environment", PYTHON="none").returncode == 0
    with (checkout / "constraints.txt").open("a") as pins:
        pins.write("other==1.0\n")
    done = run(checkout, "install_into_venv() { echo installing; }; ensure_environment")
    assert done.stdout == "installing\n", done.stderr
    assert run(checkout, "ensure_environment", PYTHON="none").returncode == 0


def test_a_failing_installation_is_not_taken_for_done(checkout):
    done = run(checkout, "install_into_venv() { fail 'pip could not'; }; ensure_environment")
    assert done.returncode == 2 and "error: pip could not" in done.stderr
    assert not (checkout / ".venv/.installed").exists()


def test_kernels_that_do_not_compile_do_not_stop_the_installation(checkout):
    (checkout / ".venv/bin").mkdir(parents=True)
    script = '[[ $* != *semi_auto_cpu* ]] || { echo "error: of g++" >&2; exit 1; }'
    stand_in(checkout, "../.venv/bin/python", script)
    done = run(checkout, "install_into_venv python3")
    assert done.returncode == 0 and "error: of g++\n== they do not compile here" in done.stderr


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ([], ["--steps", "30"]),
        (["--steps", "60"], ["--steps", "30"]),  # the last one counts
        (["--set", "train_dataset.data_loader.sizes.0=400"], []),
        (["--set", "plugins.held_out_loss=False"], ["--steps", "30"]),
    ],
)
def test_the_sharded_quickstart_has_no_number_of_steps_beside_the_users_own(checkout, given, first):
    """`tc3 train` refuses `--steps` beside a setting that asks for another number."""
    shutil.copy(ROOT / "launch/quickstart", checkout / "launch")
    (checkout / "launch/environment.sh").write_text(
        "ensure_environment() { :; }\nsay() { :; }\nROOT=$PWD\nVENV=$PWD/.venv\n"
    )
    stand_in(checkout, "tc3", '[ "$1" != train ] || printf "%s\\n" "$@"')
    done = subprocess.run(
        [shutil.which("bash"), "launch/quickstart", "--parallel", *given],
        cwd=checkout, env={"PATH": str(checkout / "bin")}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = done.stdout.split()
    assert words[:2] == ["train", "recipes/mini/pretrain_tp2.yaml"]
    own = [word for word in words[2:] if word not in ("--run-dir", "output/quickstart-parallel", "--force")]
    assert own == [*first, *given]


@pytest.mark.parametrize("minutes", ["0", "nan", "-1", "1.5"])
def test_exploring_wants_whole_minutes(minutes):
    done = subprocess.run([ROOT / "tests/explore", minutes], capture_output=True, text=True)
    assert done.returncode == 2 and f"{minutes} is not a whole number above 0" in done.stderr


def test_exploring_also_draws_examples_for_slow_property_tests():
    """They were left out, and one of them was wrong."""
    assert " -m hypothesis " in (ROOT / "tests/explore").read_text()


def test_the_commands_are_plain_bash_and_executable():
    for name in ("launch/quickstart", "tests/run", "tests/explore"):
        path = ROOT / name
        assert os.access(path, os.X_OK) and path.read_text().startswith("#!/usr/bin/env bash\n")


@pytest.mark.parametrize("folder", ["/opt/a checkout/include", "/opt/costs $5 (no $HOME)/include", "/opt/it's/include"])
def test_mindformers_makefile_finds_the_headers_of_any_checkout(folder, monkeypatch):
    """Make expands dollar signs, and the shell that it starts divides words at blanks."""
    for name in ("CPPFLAGS", "MAKEFLAGS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(dataset_helpers.sysconfig, "get_paths", lambda: {"include": folder})
    dataset_helpers.use_this_python()
    rule = "all:\n\t@printf '%s\\n' $(CPPFLAGS)\n"
    flags = subprocess.run(["make", "-f", "-"], input=rule, capture_output=True, text=True, check=True).stdout
    assert flags.splitlines() == [f"-I{folder}", f"-I{pybind11.get_include()}"]
