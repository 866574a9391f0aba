"""These tests check which information a loaded graph gets, and when no graph is loaded; short texts replace
MindSpore's files here.
"""

import json
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore.parallel import strategy

from plugins.errors import ClusterError
from plugins.semi_auto_cpu import kept
from plugins.semi_auto_cpu.compile import FrontEnd, Turn, refuse_compiling
from plugins.semi_auto_cpu.kept import FILE, KeptGraphs, described
from plugins.semi_auto_cpu.ranks import Ranks

INPUTS = (Tensor(np.zeros((2, 4), np.int32)),)
LAYOUT = ([2], [0, -1], [2, 4], 0, True, "", [4, 4], [2, 4], False, False, 0, 0)
STRATEGY = {
    "dev_matrix": [2], "tensor_map": [[0], [-1]], "tensor_shape": [4, 4], "tensor_type": "float32",
    "opt_weight_shard_step": 0, "opt_weight_shard_size": 0, "rank_list": [0, 1],
}  # fmt: skip
STRATEGIES = {"global": {"0": {"split": STRATEGY}, "1": {"split": STRATEGY}}, "local": {"0": {"split": STRATEGY}}}


class Step:
    """A cell with a weight that is split over two ranks, one that is not, what accumulates the first one's gradients,
    and a copy of another stage's weight."""

    def __init__(self, rows=4, phase="train.1"):
        names = (("split", (rows, 4), 1), ("whole", 4, 0), ("accu_grads.split", (rows, 4), 0), ("copy", 4, 1))
        self.items = [weight(*each) for each in names]
        self.compile_phase = phase

    def get_parameters(self):
        return self.items

    def sliced(self, rows=2, marked=("split", "whole"), compiled=True):
        """As a compile of MindSpore leaves it, which marks all that it has seen; a load only what has a layout."""
        self.items[0].set_data(Tensor(np.ones((rows, 4), np.float32)), slice_shape=True)
        if compiled:
            self.items[2].set_data(Tensor(np.zeros((rows, 4), np.float32)), slice_shape=True)
            self.items[3].param_info.is_pipeline_shared_param = True
        for item in self.items:
            item.sliced = item.name in marked
        self.parameter_layout_dict, self.parallel_parameter_name_list = {"split": LAYOUT}, ["inputs0", "split", "whole"]
        return self


def weight(name, shape, value=0):
    return Parameter(Tensor(np.full(shape, value, np.float32)), name=name)


class Kernels(list):
    """As `plugins.semi_auto_cpu.library`: the operators that Python computes."""

    def registered(self):
        return list(self)

    register = list.append


@pytest.fixture
def kernels():
    return Kernels(["AllReduce"])


@pytest.fixture
def start(tmp_path, monkeypatch, kernels):
    """A function that begins a process, rank 0 of two, whose compile cache is a folder."""
    monkeypatch.setattr(kept, "strategies", lambda phase: STRATEGIES)
    monkeypatch.setattr(kept.library, "load", lambda: kernels)
    monkeypatch.setattr(strategy._NetStrategyInfo, "__init__", strategy._NetStrategyInfo.__init__)
    environ = {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(tmp_path)}
    return lambda: KeptGraphs(Ranks(2, 0), environ)


@pytest.fixture
def folder(start, tmp_path, kernels):
    """Return the folder in which a first process left the files of two compiles: a train step, and another graph."""
    first, folder = start(), tmp_path / "rank_0"
    kernels.register("TensorMove")  # by the pass
    (folder / "graph_cache").mkdir(parents=True)
    for number, rows in ((0, 4), (1, 8)):
        (folder / "graph_cache" / f"MS_WORKERcompile_cache_{number}.mindir").write_text("graph")
        what = described(Step(rows), INPUTS, "train")
        assert first.to_load(what) is None
        first.ranks.create("2-77", [0, 1])  # as in the midst of a compile
        first.ranks.rank_in("2-77")
        first.keep(Step(rows).sliced(), what)
    kernels.remove("TensorMove")  # another process
    return folder


def graphs(folder):
    return sorted(path.stem[-1] for path in folder.rglob("*.mindir"))


def test_a_loaded_graph_is_told_what_its_compile_knew(start, folder):
    second = start()
    for rows, phase in ((4, "train.2"), (8, "train.3")):
        cell = Step(rows, phase)
        entry = second.to_load(described(cell, INPUTS, "train"))
        second.restore(cell.sliced(marked=("split",), compiled=False), entry)
        assert [item.shape for item in cell.items] == [(2, 4), (4,), (2, 4), (4,)], "gradients of a slice"
        left_out = [item.param_info.is_pipeline_shared_param for item in cell.items]
        assert left_out == [False, False, False, True], "or the next checkpoint has the copy, too"
        assert cell.parameter_layout_dict == {"split": LAYOUT}
        assert cell.parallel_parameter_name_list == ["inputs0", "split", "whole"]
        assert [item.sliced for item in cell.items] == [True, True, False, False], (
            "or the next checkpoint is without it"
        )
        assert second.ranks.groups == {"2-77": (0, 1)}
        assert second.ranks.places == {"2-77": 0}, "or tc3 accuracy collectives misses it beside a rank that compiled"
        known = strategy.get_strategy_metadata(cell)
        assert sorted(known) == [0, 1]
        layout, kind, shape = known[1]["split"]
        assert (kind, shape) == ("float32", [4, 4])
        assert layout.to_dict()["tensor_map"] == (0, -1) and layout.to_dict()["rank_list"] == [0, 1]
        assert list(strategy.get_current_strategy_metadata(cell)) == [0]
    assert second.to_load(described(Step(16), INPUTS, "train")) is None, "a third compile, of which nothing was kept"
    assert strategy.get_strategy_metadata(Step(phase="train.9")) is None
    assert graphs(folder) == ["0", "1"]


@pytest.mark.parametrize(
    "what",
    [
        described(Step(6), INPUTS, "train"),
        described(Step(), (Tensor(np.zeros((2, 8), np.int32)),), "train"),
        described(Step(), (Tensor(np.zeros((2, 4), np.int64)),), "train"),
        described(Step(), INPUTS, "eval"),
        described(SimpleNamespace(get_parameters=Step().get_parameters), INPUTS, "train"),
    ],
    ids=["parameters", "shape", "type", "phase", "cell"],
)
def test_the_graph_of_another_compile_is_compiled_anew(start, folder, what, capsys):
    second = start()
    assert second.to_load(what) is None and graphs(folder) == []
    assert "rank 0 compiles" in capsys.readouterr().err


def test_kernels_that_the_pass_registered_are_there_at_a_load(start, folder, kernels):
    start().to_load(described(Step(), INPUTS, "train"))
    assert kernels == ["AllReduce", "TensorMove"], "MindSpore's own TensorMove takes no bfloat16"


def test_those_before_it_are_loaded(start, folder):
    second, cell = start(), Step()
    entry = second.to_load(described(cell, INPUTS, "train"))
    second.restore(cell.sliced(), entry)
    assert second.to_load(described(Step(9), INPUTS, "train")) is None and graphs(folder) == ["0"]


def test_a_process_that_is_killed_behind_its_compile_leaves_no_graph_of_another_one(start, folder):
    """MindSpore has written its graph, and nothing that goes with it was kept."""
    first, other = described(Step(), INPUTS, "train"), described(Step(6), INPUTS, "train")
    assert start().to_load(other) is None
    (folder / "graph_cache" / "MS_WORKERcompile_cache_0.mindir").write_text("graph of the other one")
    assert start().to_load(first) is None and graphs(folder) == []


def test_nor_is_one_loaded_whose_file_is_gone(start, folder, capsys):
    next(folder.rglob("*_0.mindir")).unlink()
    assert start().to_load(described(Step(), INPUTS, "train")) is None and graphs(folder) == []
    assert "another file" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [None, "", "{", "{}", "[]"])
def test_a_graph_without_what_goes_with_it_is_compiled_anew(start, folder, damage):
    (folder / FILE).unlink() if damage is None else (folder / FILE).write_text(damage)
    assert start().to_load(described(Step(), INPUTS, "train")) is None and graphs(folder) == []


def test_other_slices_than_those_of_the_compile_end_the_run(start, folder):
    second, cell = start(), Step()
    entry = second.to_load(described(cell, INPUTS, "train"))
    with pytest.raises(ClusterError, match=r"Step was loaded.*slices differ .*: split; remove the folder"):
        second.restore(cell.sliced(rows=4), entry)


def test_other_groups_than_those_of_the_compile_end_the_run(start, folder):
    second, cell = start(), Step()
    entry = second.to_load(described(cell, INPUTS, "train"))
    second.ranks.create("2-77", [0])
    with pytest.raises(ClusterError, match=r"its groups differ .*: 2-77; remove the folder"):
        second.restore(cell.sliced(), entry)


def test_without_a_cache_nothing_is_kept(tmp_path):
    for environ in ({}, {"MS_COMPILER_CACHE_PATH": str(tmp_path)}, {"MS_COMPILER_CACHE_ENABLE": "1"}):
        process = KeptGraphs(Ranks(2, 0), environ)
        process.keep(Step().sliced(), described(Step(), INPUTS, "train"))
    assert list(tmp_path.iterdir()) == []


def test_what_json_would_change_is_not_kept(start, folder, monkeypatch, capsys):
    monkeypatch.setattr(kept, "strategies", lambda phase: {"global": {0: {}}, "local": {}})
    start().keep(Step().sliced(), described(Step(), INPUTS, "train"))
    assert [path for path in folder.rglob("*") if path.is_file()] == [], "nothing is published"
    assert "cannot keep Step (strategies: nothing that JSON holds)" in capsys.readouterr().err


def test_nor_is_a_graph_that_mindspore_could_not_write(start, tmp_path, capsys):
    """It says so in its log and goes on, with the groups' file written."""
    group = tmp_path / "rank_0" / "graph_cache" / "group_0.ckpt"
    group.parent.mkdir(parents=True)
    group.touch()
    start().keep(Step().sliced(), described(Step(), INPUTS, "train"))
    assert "cannot keep Step (MindSpore has written no graph)" in capsys.readouterr().err and not group.exists()
    assert not (tmp_path / "rank_0" / FILE).exists()


@pytest.mark.parametrize(("loads", "passed"), [(True, True), (False, False)])
def test_a_graph_that_mindspore_compiles_instead_of_loading_ends_the_run(start, folder, monkeypatch, loads, passed):
    """It would be one for CPU, and not sharded; and the other way round."""
    monkeypatch.setattr(kept, "os", SimpleNamespace(environ={}))
    front_end = FrontEnd(Ranks(2, 0))
    front_end.kept = start()
    what = described(Step(), INPUTS, "train")
    entry = front_end.kept.to_load(what) if loads else None
    words = r"compiled the graph.*have loaded" if loads else r"loaded the graph.*have compiled"
    with pytest.raises(ClusterError, match=words):
        front_end._end(Turn(Step(), INPUTS, "train", what, entry, passed))


def test_a_kept_graph_that_mindspore_does_not_load_is_named(start, folder):
    """MindSpore then fails to compile it for the CPU. Other errors, and those without a kept graph, pass unchanged."""
    what, error = described(Step(), INPUTS, "train"), RuntimeError("Invalid backend: CPU")
    turn = Turn(Step(), INPUTS, "train", what, start().to_load(what))
    with pytest.raises(ClusterError, match=r"compiled the graph of Step, .* should have loaded it"):
        refuse_compiling(turn, error)
    refuse_compiling(turn, RuntimeError("out of memory"))
    refuse_compiling(Turn(Step(), INPUTS, "train", what), error)


def test_the_file_says_what_was_compiled(folder):
    first, second = json.loads((folder / FILE).read_text())
    assert first["cell"]["inputs"] == [[str(ms.int32), [2, 4]]]
    assert (first["weights"]["split"][1], second["cell"]["parameters"]["split"][1]) == ([2, 4], [8, 4])
