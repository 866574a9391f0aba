import errno
import importlib.metadata
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch import cli
from launch.cli import Output, OutputFailed, exit_code_of
from plugins.errors import RecipeError

ROOT = Path(__file__).resolve().parents[2]
HELP = """
import sys
from launch.cli import main
sys.argv = ["tc3", "--help"]
try:
    main()
except SystemExit:
    print([name for name in ("mindspore", "numpy", "tools.data.cli", "yaml") if name in sys.modules])
"""


def test_help_lists_every_command_and_imports_none():
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for name, (_, help_line) in cli.COMMANDS.items():
        assert name in done.stdout and help_line.split(".")[0][:30] in done.stdout


def test_help_names_each_command_once_where_it_is_used():
    assert sorted(name for names in cli.STAGES.values() for name in names) == sorted(cli.COMMANDS)
    text = CliRunner().invoke(cli.tc3, ["--help"]).output
    places = [text.index(f"\n  {name} ") for names in cli.STAGES.values() for name in names]
    assert places == sorted(places) and all(f"\n{stage}:\n" in text for stage in cli.STAGES)


def test_that_a_command_is_loaded_is_said_after_five_seconds_only(monkeypatch):
    """Commands take three seconds to load on a busy machine, which everybody was told of after two."""
    told = []
    monkeypatch.setattr(cli, "saying", lambda what, after=None: told.append((what, after)) or nullcontext())
    assert CliRunner().invoke(cli.tc3, ["recipe", "--help"]).exit_code == 0
    assert told == [("tc3 recipe is being loaded", 5.0)]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_exists_and_explains_itself(name):
    result = CliRunner().invoke(cli.tc3, [name, "--help"])
    assert result.exit_code == 0 and "Usage:" in result.output


def test_a_misspelt_command_gets_a_suggestion():
    result = CliRunner().invoke(cli.tc3, ["trian"])
    assert result.exit_code == 2
    assert "no such command 'trian' (did you mean 'train'?)" in result.output


def test_a_user_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    def fail(**kwargs):
        raise RecipeError("recipes/x.yaml:3: a.b: wrong")

    monkeypatch.setattr(cli, "tc3", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "tc3: recipes/x.yaml:3: a.b: wrong\n"


MINI = "recipes/mini/pretrain.yaml"
TC3 = [sys.executable, "-c", "from launch.cli import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def end(raised, monkeypatch, capsys):
    """Exit code and stderr of a command that raises."""

    def fail(**kwargs):
        raise raised

    monkeypatch.setattr(cli, "tc3", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "tc3: interrupted\n"),
        (cli.click.Abort(), 130, "tc3: interrupted\n"),
        (PermissionError(errno.EACCES, "Permission denied", "d/x"), 2, "tc3: d/x: Permission denied\n"),
        (OSError("no number"), 2, "tc3: no number\n"),
        (SystemExit(1), 1, ""),
        (SystemExit(None), 0, ""),
    ],
)
def test_how_a_command_ends(raised, code, words, monkeypatch, capsys):
    assert end(raised, monkeypatch, capsys) == (code, words)


def test_an_interrupted_command_is_one_line(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    result = CliRunner().invoke(cli.tc3, ["check"])
    assert (result.exit_code, result.output) == (130, "tc3: interrupted\n")


def test_a_working_folder_that_is_gone(monkeypatch, capsys):
    def gone():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    code, line = end(FileNotFoundError(errno.ENOENT, "No such file or directory"), monkeypatch, capsys)
    assert code == 2 and "working folder" in line


def shell(command):
    done = subprocess.run(
        ["bash", "-c", command.replace("tc3", f"{sys.executable} -c 'from launch.cli import main; main()'")],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return done.returncode, at_any_speed(done.stderr)


def at_any_speed(text):
    """Leave out that a command is being loaded, which is said where that takes more than five seconds."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.rstrip().endswith(" s so far)"))


def test_a_reader_that_leaves_early_ends_the_command_quietly():
    assert shell(f"tc3 check --no-build {MINI} | true; exit ${{PIPESTATUS[0]}}") == (141, "")


def test_a_disk_that_is_full_is_one_line():
    code, line = shell(f"tc3 recipe show {MINI} > /dev/full")
    assert (code, line) == (2, "tc3: standard output cannot be written: No space left on device\n")


class Broken:
    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    flush = writelines = write


def test_output_that_fails_is_not_mistaken_for_another_error():
    """rich ends the program with exit code 1 on a BrokenPipeError of its own, click too."""
    from rich.console import Console

    with pytest.raises(OutputFailed):
        Console(file=Output(Broken())).print("a")
    with pytest.raises(OutputFailed):
        cli.click.echo("a", file=Output(Broken()))
    assert not issubclass(OutputFailed, Exception) and Output(Broken()).encoding == "utf-8"


def test_what_is_no_broken_pipe_is_said(monkeypatch, capsys):
    monkeypatch.setattr(os, "dup2", lambda *ends: None)
    assert exit_code_of(OutputFailed(OSError(errno.EIO, "Input/output error"))) == 2
    assert capsys.readouterr().err == "tc3: standard output cannot be written: Input/output error\n"
    assert exit_code_of(OutputFailed(BrokenPipeError(errno.EPIPE, "Broken pipe"))) == 141
    assert capsys.readouterr().err == ""


def test_an_interrupt_while_a_command_runs(tmp_path):
    os.mkfifo(tmp_path / "open")
    code = f"""
from launch import cli
import tools.recipe.cli as recipe
def slow(*args):
    open({str(tmp_path / "open")!r}, "w").close()
    __import__("time").sleep(3600)
recipe.recipe_as_text = slow
cli.main()
"""
    arguments = [sys.executable, "-c", code, "recipe", "show", MINI]
    process = subprocess.Popen(arguments, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    (tmp_path / "open").read_text()  # waits for the command
    process.send_signal(signal.SIGINT)
    assert at_any_speed(process.communicate(timeout=300)[1]) == "tc3: interrupted\n" and process.returncode == 130


def coloured(arguments, **more):
    """Return what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm-256color", **more}
    process = subprocess.Popen([*TC3, *arguments], cwd=ROOT, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 4096):
            written += part
    except OSError:  # the other end is closed
        pass
    process.wait(timeout=300)
    os.close(ours)
    return at_any_speed(written.decode())


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
WITH_WARNING = ["check", "--no-build", "recipes/telechat3_105b/pretrain_4k.yaml"]
DIFFERENCE = ["recipe", "diff", MINI, "recipes/mini/pretrain_dp2.yaml"]


@pytest.mark.parametrize("arguments", [WITH_WARNING, DIFFERENCE], ids=["check", "diff"])
def test_no_color_is_obeyed_on_a_terminal(arguments):
    assert COLOUR.search(coloured(arguments))
    left = COLOUR.findall(coloured(arguments, NO_COLOR="1"))
    assert set(left) <= {"\x1b[1m", "\x1b[2m", "\x1b[0m"}  # bold and dim are no colours


def test_the_versions_of_the_stack():
    result = CliRunner().invoke(cli.tc3, ["--version"])
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert f"MindSpore {importlib.metadata.version('mindspore')}" in lines
    assert f"mindstudio-probe {importlib.metadata.version('mindstudio-probe')}" in lines
    assert lines[0].startswith("tc3 ") and lines[-1] == "verified: MindSpore 2.9.0 with MindFormers 1.9.0"


def test_another_stack_than_the_verified_one_is_said(monkeypatch):
    def missing(name):
        if name == "mindspore":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "MindSpore not installed" in cli.version_text()
    assert cli.version_text().endswith("(not what is here)")
