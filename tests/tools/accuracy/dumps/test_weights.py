import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tools.accuracy.dumps import marker
from tools.accuracy.dumps import weights as msprobe_weights
from tools.accuracy.dumps.read import WEIGHTS, open_dump


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
    msprobe_weights.dump_weights(Network(weight=Parameter(weight)), tmp_path / "step0" / "rank0", "L0", task)
    marker.write(tmp_path, True)
    (entry,) = open_dump(tmp_path).entries(0, 0)
    (item,) = entry.items
    assert (entry.name.text, item.label, item.role) == ("Cell.fc.Cell.forward.0", "parameters.weight", "parameters")
    assert item.statistics[3] == pytest.approx(np.linalg.norm(weight), rel=1e-6)
    assert (item.file is None) == (task == "statistics")
    assert item.file is None or np.array_equal(np.load(item.file), weight)


def test_weights_that_do_not_exist_yet_are_left_out(tmp_path, mindspore):
    network = Network(weight=Parameter(np.ones(2, np.float32), has_init=True))
    msprobe_weights.dump_weights(network, tmp_path / "step0" / "rank0", "L2", "tensor")
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
        assert said == [f"{WEIGHTS}/step0/rank1", *run, f"{WEIGHTS}/step2/rank1"]
    else:
        assert said == [*run, "run/step2/rank1"]


def test_weights_that_stand_apart_belong_to_their_step(tmp_path, mindspore):
    """After the calls, so that the step's inputs stay its first."""
    network = Network(weight=Parameter(np.ones(2, np.float32)))
    for folder in ("step0", "weights/step0", "weights/step1"):
        msprobe_weights.dump_weights(network, tmp_path / folder / "rank0", "L1", "tensor")
    dump = open_dump(tmp_path)
    assert (dump.steps, list(dump.folders), dump.ranks) == ([0, 1], [0], [0])
    assert [len(dump.entries(step, 0)) for step in dump.steps] == [2, 1]
