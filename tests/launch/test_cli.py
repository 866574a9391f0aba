import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch import cli
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
