"""The command that dumps, what it writes, and the names in it."""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from launch.run import accuracy_dump, preflight
from plugins.errors import DataError, RecipeError
from tests.tools.accuracy.dumps.dump_writer import KERNELS, write_kernels
from tools.accuracy.cli import SCRIPT, accuracy
from tools.accuracy.dumps import write
from tools.accuracy.dumps.compare import compare_dumps
from tools.accuracy.dumps.read import WEIGHTS_FOLDER, open_dump, parse
from tools.accuracy.dumps.write import Job, statistics
from tools.recipe.load import Recipe, load_recipe

MINI = "recipes/mini/pretrain.yaml"


def test_the_command_becomes_the_launcher(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append(argv))
    words = ["dump", "recipe.yaml", "--out", str(tmp_path), "--level", "mix", "--set", "seed=1", "--mini"]
    assert CliRunner().invoke(accuracy, words).exit_code == 0
    ((_, script, job),) = started
    assert script == str(SCRIPT) and SCRIPT.exists()
    assert Job(**json.loads(job)) == Job("recipe.yaml", str(tmp_path), True, 2, "mix", "statistics", ["seed=1"])


def test_two_dumps_do_not_share_a_new_folder(tmp_path):
    write.claim(tmp_path)
    with pytest.raises(DataError, match="another dump is being written into this folder"):
        write.claim(tmp_path)
    with pytest.raises(DataError, match="does not say whether the dump is complete"):
        write.stated(tmp_path)


def test_a_dump_is_deterministic_and_does_nothing_else():
    recipe = Recipe(
        {
            "plugins": {"held_out_loss": {"every": 3}, "ep_overlap": {"chunks": 2}},
            "callbacks": [{"type": "MFLossMonitor"}, {"type": "CheckpointMonitor"}],
        }
    )
    said = accuracy_dump.prepare(recipe)
    assert recipe == {
        "train_precision_sync": True,
        "plugins": {"held_out_loss": False, "ep_overlap": {"chunks": 2}, "finite_loss": False, "spike_guard": False},
        "callbacks": [{"type": "MFLossMonitor"}],
    }
    assert len(said) == 2 and not accuracy_dump.prepare(recipe)


def test_marker(tmp_path):
    assert write.stated(tmp_path) is None
    for complete in (False, True):
        write.mark(tmp_path, complete, level="L0")
        assert write.stated(tmp_path) == {"complete": complete, "level": "L0"}
    assert [path.name for path in tmp_path.iterdir()] == [write.MARKER]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Cell.net.layers.0.fc.Dense.forward.2", ("Cell", "net.layers.0.fc", "Dense", "forward", 2)),
        ("Module.0.fc.Linear.backward.0", ("Cell", "0.fc", "Linear", "backward", 0)),
        ("Cell.net.fc.Dense.parameters_grad.0", ("Cell", "net.fc", "Dense", "parameters_grad", 0)),
        ("Functional.matmul.3.backward", ("Functional", "matmul", "matmul", "backward", 3)),
        ("Primitive.softmax.Softmax.1.forward", ("Primitive", "softmax.Softmax", "Softmax", "forward", 1)),
    ],
)
def test_names(text, expected):
    name = parse(text)
    assert (name.kind, name.path, name.type, name.phase, name.call) == expected


@pytest.mark.parametrize("text", ["Cell.fc.forward", "Functional.matmul.forward.x", "a.b.c.d"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        parse(text)


def test_statistics():
    assert statistics(np.array([3.0, -4.0], np.float32)) == (3.0, -4.0, -0.5, 5.0)
    assert statistics(np.array([True, False])) == (True, False) and statistics(np.zeros(0)) == ()


def test_kernels(tmp_path):
    values = {key: np.full((2, 3), number + 1, np.float32) for number, key in enumerate(KERNELS)}
    golden = write_kernels(tmp_path / "a", values)
    bench = write_kernels(tmp_path / "b", {**values, ("MatMul", 40): values["MatMul", 40] * 2})
    assert compare_dumps(golden, golden).passed
    report = compare_dumps(golden, bench)
    assert [row.phase for row in report.rows] == ["forward", "forward", "forward", "backward", "weights"]
    (row,) = report.findings
    assert row.order == 2 and "layers-CellList_0_MatMul-op0.1.forward" in row.name
    assert report.first["forward"] == row


@pytest.mark.parametrize("text", ["a,b,c\n", "\0" * 500, "\0" * 200_000])
def test_a_damaged_list_of_names_is_refused(tmp_path, text):
    dump = write_kernels(tmp_path / "a")
    next((tmp_path / "a").rglob("mapping.csv")).write_text(text)
    with pytest.raises(DataError, match=r"mapping\.csv: each line must hold two names"):
        dump.entries(0, 0)


def test_an_optimizers_kernel_is_no_initial_weight(tmp_path):
    golden = write_kernels(tmp_path / "a")
    bench = write_kernels(tmp_path / "b", {("Sub", 60): np.zeros((2, 3), np.float32)})
    assert "the optimizer: weight decay" in compare_dumps(golden, bench).meaning()


@pytest.mark.parametrize(
    ("callbacks", "words"), [("5", "callbacks: must be a list"), ("[MFLossMonitor]", "callbacks.0: must be a mapping")]
)
def test_a_recipe_is_checked_before_anything_of_it_is_changed(tmp_path, callbacks, words):
    text = Path("recipes/mini/pretrain.yaml").read_text("utf-8")
    head, _, tail = text.partition("\ncallbacks:\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{head}\ncallbacks: {callbacks}\n\n{tail[tail.index('checkpoint:') :]}")
    out = tmp_path / "out"
    with pytest.raises(RecipeError, match=words):
        accuracy_dump.run(Job(str(recipe), str(out), False, 2, "L0", "statistics", []))
    assert not out.exists()


def test_a_dump_that_fills_its_disk_is_ended(tmp_path, monkeypatch):
    for free, ends in ((preflight.MIN_FREE, False), (preflight.MIN_FREE - 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        failure = accuracy_dump.full(tmp_path)
        assert bool(failure) == ends
    assert failure.user_error and "1.1 GB are left free" in failure.message and "--task statistics" in failure.message


@pytest.mark.parametrize("new", [True, False])
def test_an_interrupted_dump_leaves_nothing(tmp_path, monkeypatch, capsys, new):
    out = tmp_path / "dump"
    if not new:
        out.mkdir()
    recipe = load_recipe(MINI)
    monkeypatch.setattr(accuracy_dump, "effective_recipe", lambda *settings: recipe)
    for check in ("check_machine", "check_sound", "check_data", "check_disk"):
        monkeypatch.setattr(preflight, check, lambda *settings: None)

    def killed(recipe, out, job):
        (out / "step0" / "rank0").mkdir(parents=True)
        (out / "step0" / "rank0" / "dump.json").touch()
        return accuracy_dump.Outcome(130)

    monkeypatch.setattr(accuracy_dump, "_supervised", killed)
    job = accuracy_dump.Job(MINI, str(out), False, 2, "L0", "statistics", [])
    assert accuracy_dump.run(job) == 130
    assert out.exists() != new and not (out.exists() and any(out.iterdir()))
    assert "was removed" in capsys.readouterr().err


class Parameter:
    """Of MindSpore, as far as it is used."""

    def __init__(self, values, has_init=False, requires_grad=True):
        self.values, self.has_init, self.dtype, self.shape = values, has_init, "Float32", values.shape
        self.requires_grad = requires_grad

    def asnumpy(self):
        assert not self.has_init
        return self.values


class Cell:
    def __init__(self, **parameters):
        self.parameters = parameters

    def parameters_dict(self, recurse):
        return self.parameters


class Network(Cell):
    def cells_and_names(self):
        return [("", self), ("fc", Cell(**self.parameters))]


@pytest.fixture
def mindspore(monkeypatch):
    """The few names that are used, instead of seconds of import."""
    monkeypatch.setitem(sys.modules, "mindspore", SimpleNamespace(bfloat16="BFloat16", float32="Float32"))


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_weights_are_read_as_parameters_of_their_cell(tmp_path, mindspore, task):
    weight = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    write.dump_weights(Network(weight=Parameter(weight)), tmp_path / "step0" / "rank0", "L0", task)
    write.mark(tmp_path, True)
    (entry,) = open_dump(tmp_path).entries(0, 0)
    (item,) = entry.items
    assert (entry.name.text, item.label, item.role) == ("Cell.fc.Cell.forward.0", "parameters.weight", "parameters")
    assert item.statistics[3] == pytest.approx(np.linalg.norm(weight), rel=1e-6)
    assert (item.file is None) == (task == "statistics")
    assert item.file is None or np.array_equal(np.load(item.file), weight)


def test_weights_that_do_not_exist_yet_are_left_out(tmp_path, mindspore):
    network = Network(weight=Parameter(np.ones(2, np.float32), has_init=True))
    write.dump_weights(network, tmp_path / "step0" / "rank0", "L2", "tensor")
    assert not any(tmp_path.rglob("*.json"))


@pytest.fixture
def callback(monkeypatch):
    """launch.workers.accuracy_callback without MindFormers; what its debugger and `dump_weights` were told."""
    said = []
    names = SimpleNamespace(register=lambda kind: lambda cls: cls)
    fakes = {
        "mindformers.tools.register": SimpleNamespace(
            MindFormerModuleType=SimpleNamespace(CALLBACK="callback"), MindFormerRegister=names
        ),
        "mindformers.tools.utils": SimpleNamespace(get_real_rank=lambda: 1),
        "mindspore.train.callback": SimpleNamespace(Callback=object),
        "mindspore.train.dataset_helper": SimpleNamespace(_DataWrapper=Network),
    }
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "launch.workers.accuracy_callback", raising=False)
    module = importlib.import_module("launch.workers.accuracy_callback")
    debugger = SimpleNamespace(
        start=lambda **settings: said.append("start"), stop=lambda: said.append("stop"), step=lambda: None
    )
    monkeypatch.setattr(module, "debugger", lambda *settings: debugger)
    monkeypatch.setattr(
        module, "dump_weights", lambda network, folder, level, task: said.append("/".join(folder.parts[-3:]))
    )
    yield module, said
    monkeypatch.delitem(sys.modules, "launch.workers.accuracy_callback")


@pytest.mark.parametrize("level", ["L0", "mix", "L1", "L2"])
def test_levels_without_weights_get_them_before_the_first_step_too(callback, level):
    module, said = callback
    context = SimpleNamespace(original_args=lambda: SimpleNamespace(train_network=SimpleNamespace(network="network")))
    dump = module.AccuracyDump("run", level, "tensor")
    for _ in range(2):
        dump.on_train_step_begin(context)
        dump.on_train_step_end(context)
    dump.on_train_end(context)
    run = ["start", "stop", "start", "stop"]
    if level in ("L1", "L2"):
        assert said == [f"{WEIGHTS_FOLDER}/step0/rank1", *run, f"{WEIGHTS_FOLDER}/step2/rank1"]
    else:
        assert said == [*run, "run/step2/rank1"]


def test_weights_that_stand_apart_belong_to_their_step(tmp_path, mindspore):
    """After the calls, so that the step's inputs stay its first."""
    network = Network(weight=Parameter(np.ones(2, np.float32)))
    for folder in ("step0", "weights/step0", "weights/step1"):
        write.dump_weights(network, tmp_path / folder / "rank0", "L1", "tensor")
    dump = open_dump(tmp_path)
    assert (dump.steps, list(dump.folders), dump.ranks) == ([0, 1], [0], [0])
    assert [len(dump.entries(step, 0)) for step in dump.steps] == [2, 1]
