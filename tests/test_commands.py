"""Every command of README, the pages and the cards works as it is written; tests/commands.py says how each is shown."""

from __future__ import annotations

import ast
import atexit
import gzip
import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from filecmp import cmp
from pathlib import Path

import click
import numpy as np
import pytest

from launch.cli import tc3
from launch.firsthour.cli import firsthour_command
from plugins.expert_balance.record import Record, append
from plugins.sealed_checkpoint.plan import write_seal
from tests.commands import CARDS, JUDGES, ROOT, Command, commands, leaf_of, linked, way_of
from tests.inputs.rows import Row
from tests.inputs.runner import run_here
from tests.tools.checkpoint.saved import of_two_ranks
from tools.checkpoint.stored import TRACKER
from tools.data.prepare import PrepareOptions, prepare
from tools.data.sources import Corpus
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.view import View
from tools.search.command import space_command

FOLDER = linked(Path(tempfile.mkdtemp(prefix="tc3_commands_")))  # where a reader would be
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
COMMANDS = commands(FOLDER)
OF_TC3 = [each for each in COMMANDS if each.words[0] == "tc3"]
BENCHMARKS = [each for each in COMMANDS if each.words[0] == "python" and "benchmarks" in " ".join(each.words[1:3])]
OUTPUTS = ("--write", "--out", "--output", "--html", "--picture", "--to", "--bind-file", "--time-line")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "mix"]
TOUR = "TC3_TOUR"  # set in the environment, it runs the commands of README's tour in their order: about twenty minutes


class Started(BaseException):
    """A command has begun its long work; no `Exception`, so that nobody on the way takes it for an error."""


def whole(command: Command) -> bool:
    """Return whether the command can be run as written; in running text a command may stand without its recipe or
    other arguments.
    """
    leaf, rest = leaf_of(command.words)
    if leaf == "search" and not any(word.endswith(".yaml") for word in rest):
        return False
    if command.words == ("tc3", "--version") or command.whole:
        return True
    try:
        resolved(command.words)
    except click.MissingParameter:
        return False
    except click.BadParameter:  # a file that only the folder has
        return bool(rest)
    except click.UsageError as error:
        assert "no such" not in error.format_message().lower(), f"{command}: {error.format_message()}"
        return False
    return bool(rest)


def resolved(words):
    """Parse a command as tc3 does, without running it."""
    command, context, rest = tc3, click.Context(tc3, info_name="tc3"), list(words[1:])
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name, found, rest = command.resolve_command(context, rest)
        command, context = found, click.Context(found, info_name=name, parent=context)
    with command.make_context(command.name, rest, parent=context.parent):
        return command


@pytest.fixture(scope="module")
def place():
    """FOLDER with what a reader has after some days: corpora, a run with checkpoints, recipes, clusters."""
    texts = [" ".join(random.Random(number).choices(WORDS, k=200)) for number in range(60)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (FOLDER / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    source = Corpus((str(FOLDER / "corpus.jsonl.gz"),))
    data = FOLDER / "output" / "data"
    for name in ("stdlib", "mine"):  # the first is what recipes/mini reads, with the samples that its recipes want
        prepare(PrepareOptions(source, data / name, vocab_size=300, held_out=0.1, seed=3))
    prepare(PrepareOptions(source, data / "docs", tokenizer=str(data / "stdlib_tokenizer"), held_out=0.1))
    rows = [{"instruction": "Say", "input": word, "output": word} for word in WORDS]
    for name in ("", "_heldout"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (FOLDER / "output" / "data" / f"stdlib_instructions{name}.jsonl").write_text(text)
    for name in ("RUN", "A", "B", "quickstart"):
        run(FOLDER / "output" / name)
    large = np.tile(np.arange(1, 257), (53, 1)), np.tile(np.arange(256), (53, 1))  # of the 438B, whose recipe reads it
    append(FOLDER / "expert_load.jsonl", Record(1, 16, tuple(range(1, 54)), *large, (None,) * 53))
    library = FOLDER / "library"
    library.mkdir()
    for name in ("argparse", "textwrap", "shutil", "tarfile", "csv", "pathlib", "random", "statistics", "typing"):
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py", library)
    system = "sys/devices/system"
    for part in ("proc/cpuinfo", "proc/meminfo", f"{system}/node/node0/cpulist", f"{system}/cpu/online"):
        target = FOLDER / "recorded" / "host7" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Path("/", part).read_text() if Path("/", part).is_file() else "0")
    shutil.copytree(FOLDER / "output", FOLDER / "kept")
    yield FOLDER
    shutil.rmtree(FOLDER)


def same_file(first, second):
    """Return whether the second file is there and has the content of the first."""
    return second.is_file() and first.stat().st_size == second.stat().st_size and cmp(first, second, shallow=False)


def furnish(leaf, rest):
    """Small files as they are before a command, and no file where it writes."""
    for name in ("my", "mine", "theirs", "fast"):
        own = "lr_schedule: {learning_rate: 1.0e-5}\n" if name == "theirs" else ""
        (FOLDER / f"{name}.yaml").write_text(f"base_config: recipes/telechat3_105b/pretrain_4k.yaml\n{own}")
    examples = ROOT / "tools" / "search" / "examples"
    for name in ("measurements", "my_steps"):
        shutil.copy(examples / "measurements.yaml", FOLDER / f"{name}.yaml")
    shutil.copy(examples / "pipeline.json", FOLDER / "plan_this.json")
    shutil.copy(ROOT / "tools" / "hardware" / "atlas_800t_a2.yaml", FOLDER / "my_cluster.yaml")
    recipe = next((word for word in rest if word.startswith("recipes/")), None)
    devices = View(load_recipe(FOLDER / recipe)).devices if recipe and "hosts.txt" in rest else 1
    spares = int(rest[rest.index("--spares") + 1]) if "--spares" in rest else 0
    slots = min(8, devices) if devices > 8 else 1
    numbers = range(1, devices // slots + spares)  # addresses, because a name service may be slow
    hosts = [socket.gethostname(), *(f"198.18.{number // 250}.{number % 250 + 1}" for number in numbers)]
    (FOLDER / "hosts.txt").write_text("".join(f"{host} {slots}\n" for host in hosts))
    for started in [*FOLDER.glob("output/mini-*"), *FOLDER.glob("output/telechat3_*"), FOLDER / "new"]:
        shutil.rmtree(started, ignore_errors=True)
    kept = FOLDER / "kept"  # `tc3 data prepare` may have made other corpora, or its target below was cleared for it
    if any(not same_file(path, FOLDER / "output" / path.relative_to(kept)) for path in (kept / "data").rglob("*.*")):
        shutil.copytree(kept, FOLDER / "output", dirs_exist_ok=True)
    if "checkpoint.load_path=mean" in rest and not (FOLDER / "mean").exists():  # of the command before on the page
        shutil.copytree(FOLDER / "output" / "RUN" / "checkpoint" / "iteration_00000100", FOLDER / "mean")
    targets = [rest[at + 1] for at, word in enumerate(rest[:-1]) if word in OUTPUTS]
    targets += [rest[1]] if leaf in ("weights convert", "weights reshard") else []
    for target in targets:
        for path in (found for found in FOLDER.glob(f"{target}*") if not found.is_symlink()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(folder):
    """A run of the mini that is done: metrics, loads of experts, three sealed checkpoints of two ranks."""
    recipe = load_recipe(ROOT / "recipes" / "mini" / "pretrain.yaml")
    (folder / "metrics").mkdir(parents=True)
    dump_recipe(recipe, folder / "recipe.yaml")
    lines = [{"total_steps": 100, "start_step": 0, "world_size": 1, "time": 1e9}]
    lines += [{"step": n, "time": 1e9 + n, "seconds": 1.0, "loss": 5.0, "tokens": 1024} for n in range(1, 101)]
    (folder / "metrics" / "rank_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in range(1, 5):
        load = np.tile(np.arange(1, 17), (3, 1)), np.tile(np.arange(16), (3, 1))
        append(folder / "metrics" / "expert_load.jsonl", Record(step, 4, (1, 2, 3), *load, (None,) * 3))
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / TRACKER).write_text("100")
    for number in (80, 90, 100):
        made = of_two_ranks(folder / "checkpoint" / f"iteration_{number:08d}", recipe)
        (made / "common.json").write_text(json.dumps({"step_num": number, "global_batch_size": 8}))
        for rank in range(2):
            write_seal(made, rank, 2, number)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_how_it_is_shown_is_said(command):
    if command.words[0] == "tc3" and not whole(command):
        return  # a command's name, or a part of one: below
    way = way_of(command.words)
    assert way, f"{command}: say in tests/commands.py how it is shown to work"
    if way.kind == "by":
        file, _, test = way.test.partition("::")
        assert (ROOT / file).exists(), way.test
        assert not test or f"def {test}(" in (ROOT / file).read_text(), way.test


@pytest.mark.parametrize("command", OF_TC3, ids=str)
def test_a_command_or_the_part_of_one_that_is_written_exists(command, place, monkeypatch):
    leaf, rest = leaf_of(command.words)
    assert leaf or rest, command
    found: click.Command = tc3
    for name in leaf.split():
        found = found.get_command(click.Context(found), name)
    behind = {"search": space_command.params, "firsthour": firsthour_command.params}  # of `tc3 search RECIPE`
    params = [*found.params, *behind.get(leaf, [])]
    options = {name for option in params for name in option.opts} | {"--help"}
    assert not [word for word in rest if word.startswith("--") and word.partition("=")[0] not in options]
    if command.whole:
        monkeypatch.chdir(place)
        furnish(leaf, rest)
        resolved(command.words)  # with all that it needs


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [each for each in OF_TC3 if (way := way_of(each.words)) and way.kind != "by" and whole(each)],
    ids=str,
)
def test_it_runs_or_starts_as_it_is_written(command, place, tmp_path, capfd, monkeypatch):
    way, (leaf, rest) = way_of(command.words), leaf_of(command.words)
    furnish(leaf, rest)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tools.data.sources.sysconfig.get_paths", lambda: {"stdlib": str(place / "library")})
    monkeypatch.setattr("launch.run.preflight.check_machine", lambda recipe, *rest: None)  # devices of a cluster
    no_build = ["--no-build"] * (leaf == "check")  # MindFormers' own builder, ten seconds: tests/tools/check
    if any(word.startswith("recipes/telechat3_") for word in rest) and "--mini" not in rest:
        monkeypatch.setattr("launch.run.preflight.check_data", lambda recipe: None)  # of a cluster, too
    row = Row("commands", str(command), [], run=shlex.join([*command.words[1:], *no_build]))
    if way.kind == "start":
        stop_at_long_work(monkeypatch)
        with pytest.raises(Started):
            ended = run_here(row, tmp_path, capfd, monkeypatch)
            pytest.fail(f"it ended with {ended.code}: {ended.text}")
        return
    ended = run_here(row, tmp_path, capfd, monkeypatch)
    assert ended.code in ((0, 1) if leaf in JUDGES or "--diff" in rest else (0,)), ended.text
    assert "would be refused" not in ended.text
    assert "Traceback" not in ended.text


def stop_at_long_work(monkeypatch):
    """Children that compile or train, and the searches, end in `Started`."""

    def start(*arguments, **options):
        raise Started

    child = subprocess.Popen

    def popen(words, *arguments, **options):
        if "tools.check.build" in list(words):  # of `tc3 check`, which others call before their long work
            return child(words, *arguments, **options)
        raise Started

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("tools.doctor.ask.Popen", popen)
    monkeypatch.setattr(os, "execv", start)
    monkeypatch.setattr("launch.agent.loop.Agent.run", start)  # of `tc3 train`, too; it would wait for other nodes
    monkeypatch.setattr("tools.search.ranking.run.search", start)
    monkeypatch.setattr("tools.layout.optimise.optimise", start)
    monkeypatch.setattr("tools.search.cli.make_layout", start)


@pytest.mark.parametrize("command", BENCHMARKS, ids=str)
def test_a_benchmark_starts_as_it_is_written(command):
    """It is there, finds what it imports from where python starts it, and has the options that the page gives it."""
    words = list(command.words[1:])
    module = words[0] == "-m"
    file = ROOT / (words[1].replace(".", "/") + ".py" if module else words[0])
    if module and not file.is_file():
        file = file.with_suffix("") / "__main__.py"
    assert file.is_file(), command
    source = file.read_text("utf-8")
    if not module:  # python puts the script's own folder in front, not the checkout; `pip install -e` has three of them
        found = re.search(r"^(from|import) (tests|benchmarks)\b", source, re.MULTILINE)
        assert not found or "sys.path.insert(0" in source[: found.start()], f"{file}: cannot import {found[2]}"
    for option in (word for word in words[1 + module :] if word.startswith("--")):
        assert f'"{option}"' in source, f"{file} has no {option}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("tests", "benchmarks"):
            assert importlib.util.find_spec(node.module), node.module


def test_cards_name_commands():
    assert sum(each.page.endswith("card.yaml") for each in COMMANDS) >= 10 and CARDS


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get(TOUR), reason=f"takes twenty minutes: {TOUR}=1 tests/run tests/test_commands.py")
def test_the_tour(tmp_path):
    """README's commands in their order, in a fresh clone: none fails."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    readme = (clone / "README.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if not line.startswith("tests/run")]
    assert lines[0].startswith("launch/quickstart") and len(lines) >= 8
    path = f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"
    failed = []
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line], cwd=clone, env={**os.environ, "PATH": path, "PYTHONPATH": str(clone)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        print(f"$ {line}\n{done.stdout[-2000:]}\nexit code {done.returncode}", flush=True)
        failed += [line] if done.returncode else []
    assert failed == []
