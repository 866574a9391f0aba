"""The committed schemas: current, and open to every recipe.

One check of the installed MindSpore and MindFormers, asked by every command that runs or speaks for them.
"""

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from launch.cli import tc3
from plugins.errors import VersionError
from tests.tools.check.test_mutations import RECIPES, name
from tools.recipe.load import load_recipe
from tools.schema import versions
from tools.schema.schema import FILE, SCHEMA_FILE, json_schema, load_schema

ROOT = Path(__file__).resolve().parents[2]


def test_the_editors_schema_is_current():
    assert SCHEMA_FILE.read_text("utf-8") == json_schema(load_schema()), "python -m tools.schema.extract"


def test_the_schema_was_made_from_the_installed_versions():
    installed = {package: importlib.metadata.version(package) for package in ("mindformers", "mindspore")}
    assert load_schema().versions == installed


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_the_editors_schema_knows_every_key_of_a_recipe(path):
    schema = json.loads(SCHEMA_FILE.read_text("utf-8"))
    recipe = load_recipe(path)
    assert set(recipe) <= set(schema["properties"])
    model = schema["properties"]["model"]["properties"]["model_config"]
    assert model["additionalProperties"] is False
    assert set(recipe["model"]["model_config"]) <= set(model["properties"])
    for section in ("runner_config", "parallel_config", "context", "parallel"):
        assert set(recipe[section]) <= set(schema["properties"][section]["properties"])


def test_every_reference_leads_somewhere():
    schema = json.loads(SCHEMA_FILE.read_text("utf-8"))
    names = set()

    def walk(node):
        if isinstance(node, dict):
            names.update([node["$ref"]] if "$ref" in node else [])
            node = list(node.values())
        for item in node if isinstance(node, list) else []:
            walk(item)

    walk(schema)
    assert {reference.removeprefix("#/$defs/") for reference in names} <= set(schema["$defs"])


@pytest.mark.slow
def test_mindformers_still_says_what_the_schema_says(tmp_path):
    import subprocess
    import sys

    code = (
        "import json; from tools.schema.extract import extract; print('tc3 ' + json.dumps(extract(), sort_keys=True))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**__import__("os").environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    fresh = next(line for line in output.splitlines() if line.startswith("tc3 "))
    assert json.loads(fresh[4:]) == json.loads(FILE.read_text("utf-8")), "python -m tools.schema.extract"


MINI = ROOT / "recipes" / "mini" / "pretrain.yaml"
LARGE = ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"


def distribution(folder, name, version):
    """The metadata of a package as pip leaves it: what comes first on the path is what is installed."""
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Another MindFormers than the verified one."""
    distribution(tmp_path, "mindformers", "2.1.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(versions.VARIABLE, raising=False)
    assert importlib.metadata.version("mindformers") == "2.1.0"
    return tmp_path


def test_what_is_installed_here_is_what_was_verified(capsys):
    versions.require_verified()
    assert capsys.readouterr().err == "" and versions.others() == {}
    assert versions.verified() == {name: importlib.metadata.version(name) for name in ("mindspore", "mindformers")}


def test_another_version_is_named_with_the_verified_ones(other):
    with pytest.raises(VersionError) as refused:
        versions.require_verified()
    for words in ("MindFormers 2.1.0 is installed", "MindSpore 2.9.0 and MindFormers 1.9.0", "--unverified"):
        assert words in str(refused.value)
    distribution(other, "mindspore", "2.10.0")
    importlib.invalidate_caches()
    with pytest.raises(VersionError, match=r"MindSpore 2.10.0 and MindFormers 2.1.0 are installed"):
        versions.require_verified()


def test_what_is_not_installed_is_no_other_version(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    versions.require_verified()


@pytest.mark.parametrize("value", ["", "0"])
def test_unverified_goes_on_and_says_so(value, other, monkeypatch, capsys):
    monkeypatch.setenv(versions.VARIABLE, value)
    with pytest.raises(VersionError):
        versions.require_verified()
    monkeypatch.setenv(versions.VARIABLE, "1")
    versions.require_verified()
    assert "MindFormers 2.1.0" in capsys.readouterr().err


def test_the_option_holds_for_what_the_command_starts_and_no_longer(other):
    @click.command()
    @versions.unverified_option
    def command():
        versions.require_verified()
        click.echo(os.environ[versions.VARIABLE])

    run = CliRunner()
    assert isinstance(run.invoke(command).exception, VersionError)
    assert run.invoke(command, ["--unverified"]).stdout == "1\n"
    assert versions.VARIABLE not in os.environ


@pytest.mark.parametrize(
    "command",
    [
        "check {mini}",
        "check {mini} --no-build",
        "dryrun {large}",
        "train {mini}",
        "search {large} --verify 1",
        "accuracy ops rms_norm",
        "accuracy align {mini}",
        "accuracy dump {mini} --out {folder}/dump",
        "accuracy equivalence {mini}",
    ],
)
def test_every_command_that_speaks_for_mindformers_asks(command, other, monkeypatch):
    monkeypatch.chdir(other)
    words = command.format(mini=MINI, large=LARGE, folder=other).split()
    ended = CliRunner().invoke(tc3, words)
    assert isinstance(ended.exception, VersionError), ended.output
    assert "MindFormers 2.1.0 is installed" in str(ended.exception)
    assert not [path for path in other.iterdir() if path.suffix != ".dist-info"], "nothing is left behind"


def test_a_check_goes_on_when_told(other):
    ended = CliRunner().invoke(tc3, ["check", "--no-build", "--unverified", str(MINI)])
    assert ended.exit_code == 0 and "MindFormers 2.1.0 is installed" in ended.stderr


def test_what_runs_no_framework_does_not_ask(other):
    for words in (
        ["recipe", "show", str(MINI)],
        ["accuracy", "equivalence", "--list"],
        ["train", str(MINI), "--script"],
    ):
        assert CliRunner().invoke(tc3, words).exit_code == 0, words


def test_workers_are_told_and_ask_themselves(other, monkeypatch):
    monkeypatch.chdir(other)
    dry = ["train", str(MINI), "--dry-run"]
    ended = CliRunner().invoke(tc3, dry)
    assert "would be refused here: MindFormers 2.1.0" in ended.stderr and "--unverified" not in ended.stdout
    told = CliRunner().invoke(tc3, [*dry, "--unverified", "--json"])
    assert json.loads(told.stdout)[-1] == "--unverified" and "would be refused here: MindFormers" not in told.stderr
    script = CliRunner().invoke(tc3, ["train", str(MINI), "--script", "--unverified"]).stdout
    assert f"export {versions.VARIABLE}=1" in script and "--script --unverified" in script


@pytest.mark.parametrize("environment", [{}, {"MS_ROLE": "MS_SCHED"}])
def test_a_worker_started_by_hand_refuses(environment, other):
    """msrun starts it, for its scheduler too; nothing of the framework is imported before it asks."""
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(MINI)]
    path = os.pathsep.join([str(other), str(ROOT)])
    done = subprocess.run(
        command, cwd=other, env={**os.environ, **environment, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("tc3: MindFormers 2.1.0 is installed"), done.stderr
