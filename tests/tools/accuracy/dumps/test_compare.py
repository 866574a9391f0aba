"""Two dumps compared: written by the test, by a little model with one fault at a time, and by MindFormers itself."""

import copy
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.run import accuracy_dump
from launch.run.accuracy_dump import dumped_bytes
from launch.run.msrun import msrun_command, worker_count, worker_environment
from launch.run.supervise import Outcome
from tests.tools.accuracy.dumps import dump_writer
from tests.tools.accuracy.dumps.dump_writer import run, write_dump
from tests.tools.accuracy.dumps.little import Faults, train, write_little
from tests.training import runs
from tests.training.conftest import corpus  # noqa: F401 (a fixture)
from tools.accuracy.cli import accuracy
from tools.accuracy.dumps.compare import compare_dumps
from tools.accuracy.dumps.read import Item, open_dump
from tools.accuracy.dumps.rows import _tensors
from tools.accuracy.dumps.write import Job


def compared(tmp_path, golden, bench, **settings):
    first, second = Path(tempfile.mkdtemp(dir=tmp_path)), Path(tempfile.mkdtemp(dir=tmp_path))
    return compare_dumps(
        open_dump(write_dump(first, golden, **settings)), open_dump(write_dump(second, bench, **settings))
    )


def tensors(steps):
    """(step, key, group, place) of every array, in order of execution."""
    return [
        (number, key, group, place)
        for number, calls in enumerate(steps)
        for key, groups in calls.items()
        for group, content in groups.items()
        for place in (content if isinstance(content, dict) else range(len(content)))
        if isinstance(content[place], np.ndarray)
    ]


def phase_of(key, group):
    return "weights" if group == "parameters" else "forward" if ".forward." in key else "backward"


def changed(steps, where, function):
    step, key, group, place = where
    steps = copy.deepcopy(steps)
    steps[step][key][group][place] = function(steps[step][key][group][place])
    return steps


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_a_rerun_has_no_finding(tmp_path, task):
    report = compared(tmp_path, run(), run(), task=task)
    by = " by max, min, mean and norm" * (task == "statistics")
    assert report.passed and report.meaning() == f"No tensor diverges{by}." and by[1:14] in "".join(report.notes())
    assert len(report.rows) == len(tensors(run())) and all(row.error == 0 for row in report.rows)


ARRAYS = [where for where in tensors(run()) if not (where[2] == "parameters" and where[0])]


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(ARRAYS), st.integers(0, 10**6), st.booleans())
def test_a_single_changed_tensor_is_named_first(where, position, above):
    """Above the tolerance it is the only finding and its phase's first; well below, there is none."""

    def change(values):
        values, place = values.copy(), position % values.size
        if values.dtype.kind != "f":
            values.reshape(-1)[place] += above
            return values
        scale = max(abs(values.reshape(-1)[place]), math.sqrt(np.mean(values.astype(np.float64) ** 2)))
        values.reshape(-1)[place] += (1.5e-4 if above else 0.5e-4) * scale
        return values

    steps = run()
    if where[2] == "parameters":  # a wrong weight of the first step is the wrong old weight of the next update
        steps = steps[:1]
    with tempfile.TemporaryDirectory() as folder:
        report = compared(folder, steps, changed(steps, where, change))
    if not above:
        assert report.passed
        return
    (step, key, group, _), (row,) = where, report.findings
    phase = phase_of(key, group)
    assert report.first == {each: row if each == phase else None for each in report.first}
    assert (row.step, row.kind) == (step, "value") and row.name.startswith(key)


def test_a_wrong_update_is_the_optimizers_unless_it_follows_from_the_gradients_error(tmp_path):
    """Too small by far for Table 2: the weight decay of one weight in the second of two updates. An error of the
    gradient that Table 2 allows, and that Adam magnifies, explains it.
    """
    where = (2, "Cell.layers.1.linear.Dense.forward.0", "parameters", "weight")
    bench = changed(run(3), where, lambda weight: weight * np.float32(1 - 1e-5))
    report = compared(tmp_path, run(3), bench)
    (row,) = report.findings
    assert (row.kind, row.step, row.place) == ("update", 2, "layers.1.linear (Dense)")
    assert report.first["weights"] == row and "the optimizer: weight decay" in report.meaning()
    where = (1, "Cell.layers.1.linear.Dense.parameters_grad.0", "weight", 0)
    assert compared(tmp_path, run(3), changed(bench, where, lambda gradient: gradient * np.float32(1 + 5e-5))).passed


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ((0, "Cell.embed.Embedding.forward.0", "input_args", 0), "dataset's order"),
        ((0, "Cell.layers.0.linear.Dense.forward.0", "parameters", "weight"), "before any update"),
        ((0, "Cell.layers.1.act.Relu.forward.0", "output", 0), "initial loss is affected: layers.1.act (Relu)"),
        ((0, "Cell.layers.1.linear.Dense.forward.0", "input_args", 0), "made in layers.1 between the calls"),
        ((0, "Cell.layers.0.act.Relu.backward.0", "output", 0), "its backward pass does not: layers.0.act (Relu)"),
        ((1, "Cell.layers.0.act.Relu.forward.0", "output", 0), "state that is not a weight"),
    ],
)
def test_what_it_means(tmp_path, where, words):
    report = compared(tmp_path, run(), changed(run(), where, lambda values: (values + 1).astype(values.dtype)))
    assert words in report.meaning()


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x[:-1], "shape"),
        (lambda x: x.astype(np.float16), "dtype"),
        (lambda x: np.where(x > 0, x, np.float32("nan")), "nan"),
        (lambda x: np.where(x > 0, x, np.float32("inf")), "inf"),
        (lambda x: x * np.float32(1.01), "value"),
    ],
)
@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_kinds(tmp_path, function, kind, task):
    where = (0, "Cell.layers.0.linear.Dense.forward.0", "output", 0)
    report = compared(tmp_path, run(), changed(run(), where, function), task=task)
    assert [row.kind for row in report.findings] == [kind]


def test_nan_on_both_sides_is_a_finding_and_infinity_is_not(tmp_path):
    where = (0, "Cell.layers.0.linear.Dense.forward.0", "output", 0)
    for value, found in ((np.nan, ["nan"]), (-np.inf, [])):
        steps = changed(run(), where, lambda x, value=value: np.where(x > 0, x, np.float32(value)))
        assert [row.kind for row in compared(tmp_path, steps, steps).findings] == found


def test_a_wider_golden_side_may_be_declared(tmp_path):
    where = (0, "Cell.layers.0.linear.Dense.forward.0", "output", 0)
    golden, bench = write_dump(tmp_path / "a", run()), changed(run(), where, lambda x: x.astype(np.float16))
    bench = open_dump(write_dump(tmp_path / "b", bench))
    assert compare_dumps(open_dump(golden), bench, promoted=True).passed
    assert not compare_dumps(bench, open_dump(golden), promoted=True).passed


@pytest.mark.parametrize(
    ("golden", "bench", "wider"),
    [
        ("float32", "bfloat16", True),
        ("int64", "int32", True),
        ("bfloat16", "float32", False),
        ("float16", "bfloat16", False),
        ("float32", "int32", False),
        ("int32", "float32", False),
        ("int64", "uint32", False),
        ("bool", "int8", False),
    ],
)
def test_a_wider_type_has_more_bits_of_the_same_kind(golden, bench, wider):
    head = {"step": 0, "rank": 0, "order": 0, "phase": "forward", "place": "", "name": "", "role": "output"}
    sides = [Item("output.0", "output", dtype, (2,), (1.0, 1.0, 1.0, 2**0.5)) for dtype in (golden, bench)]
    assert (_tensors(head, *sides, 1, True).kind == "") is wider


def without(folder, *keys):
    """Take what a dump says of its tensors out of it."""

    def strip(node):
        node.update(dict.fromkeys(keys) if node.get("shape") else {})
        return node

    for file in folder.glob("step*/rank*/dump.json"):
        file.write_text(json.dumps(json.loads(file.read_text(), object_hook=strip)))


def test_tensors_of_which_a_dump_says_nothing_are_unknown(tmp_path):
    golden = run(1)
    for name, steps in (("a", golden), ("b", changed(golden, tensors(golden)[0], lambda value: value + 1))):
        without(write_dump(tmp_path / name, steps, task="statistics"), "Max", "Min", "Mean", "Norm")
    report = compare_dumps(open_dump(tmp_path / "a"), open_dump(tmp_path / "b"))
    assert not report.passed and ", 0 identical" in report.summary()
    assert any("tensors have neither values nor statistics" in note for note in report.notes())


@pytest.mark.parametrize("function", [lambda x: np.where(x > 0, x, np.float32("-inf")), lambda x: x > 0])
def test_statistics_that_an_infinity_or_a_mask_hides_are_unknown(tmp_path, function):
    where = (0, "Cell.layers.0.linear.Dense.forward.0", "output", 0)
    golden = changed(run(), where, function)
    other = changed(golden, where, lambda x: np.roll(x, 1, 0) if x.dtype == bool else np.where(x < x.max(), x / 2, x))
    report = compared(tmp_path, golden, other, task="statistics")
    assert not report.findings and any("so they are unknown: Cell.layers.0.linear" in note for note in report.notes())


def test_tensors_without_values_are_judged_by_statistics_and_it_is_said(tmp_path):
    for name in "ab":
        without(write_dump(tmp_path / name, run(1)), "data_name")
    report = compare_dumps(open_dump(tmp_path / "a"), open_dump(tmp_path / "b"))
    assert report.passed
    assert any("tensors without values judged by max, min, mean and norm only" in note for note in report.notes())


def test_an_empty_tensor_of_another_type_has_no_error(tmp_path):
    sides = ([{"Cell.a.B.forward.0": {"output": [np.zeros((0, 8), dtype)]}}] for dtype in (np.float32, np.float16))
    (row,) = compared(tmp_path, *sides).rows
    assert (row.kind, row.error) == ("dtype", 0.0)


def test_calls_of_one_side_stand_where_they_happened(tmp_path):
    bench = run()
    del bench[0]["Cell.layers.0.act.Relu.forward.0"]
    calls = {}
    for key, groups in bench[0].items():
        calls[key] = groups
        if key == "Cell.layers.1.linear.Dense.forward.0":
            calls["Cell.layers.1.extra.Cast.forward.0"] = {"input_args": [np.ones(2, np.float32)], "output": []}
    report = compared(tmp_path, run(), [calls, bench[1]])
    assert [(row.kind, row.name) for row in report.findings] == [
        ("missing", "Cell.layers.0.act.Relu.forward.0"),
        ("extra", "Cell.layers.1.extra.Cast.forward.0"),
    ]
    names = [row.name.split(".forward")[0] for row in report.rows if row.step == 0]
    assert names.index("Cell.layers.1.extra.Cast") > names.index("Cell.layers.1.linear.Dense")
    assert "do not call the same" in report.meaning()


def test_another_frameworks_class_names_pair(tmp_path):
    renamed = [
        {key.replace("Cell.", "Module.").replace("Dense", "Linear"): value for key, value in calls.items()}
        for calls in run()
    ]
    report = compared(tmp_path, run(), renamed)
    assert report.passed and len(report.rows) == len(tensors(run()))


def test_plain_values_are_compared(tmp_path):
    bench = run()
    bench[0]["Cell.layers.0.act.Relu.forward.0"]["input_args"][1] = 1.515
    (row,) = compared(tmp_path, run(), bench).findings
    assert row.detail == "the value is 1.515, but must be 1.5" and row.name.endswith("input.1")


def test_a_plain_value_that_is_nan_on_both_sides_is_the_same(tmp_path):
    sides = run(), run()
    for side in sides:
        side[0]["Cell.layers.0.act.Relu.forward.0"]["input_args"][1] = float("nan")
    assert compared(tmp_path, *sides).passed
    sides[1][0]["Cell.layers.0.act.Relu.forward.0"]["input_args"][1] = 1.5
    assert not compared(tmp_path, *sides).passed


def test_ranks_are_paired_by_number(tmp_path):
    golden, bench = write_dump(tmp_path / "a", run(), ranks=3), write_dump(tmp_path / "b", run(), ranks=3)
    where = (1, "Cell.layers.0.act.Relu.forward.0", "output", 0)
    wrong = changed(run(), where, lambda x: x + 1)[1]
    for file in sorted((bench / "step1" / "rank2").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (bench / "step1" / "rank2").rmdir()
    dump_writer.write_rank(bench / "step1" / "rank2", wrong)
    (row,) = compare_dumps(open_dump(golden), open_dump(bench)).findings
    assert (row.step, row.rank) == (1, 2)


def invoke(*arguments):
    return CliRunner().invoke(accuracy, ["compare", *map(str, arguments)])


def test_files_and_exit_codes(tmp_path):
    golden = write_dump(tmp_path / "a", run())
    where = (0, "Cell.layers.1.act.Relu.forward.0", "output", 0)
    bench = write_dump(tmp_path / "b", changed(run(), where, lambda x: x * np.float32(1.01)))
    clean = invoke(golden, write_dump(tmp_path / "again", run()))
    assert clean.exit_code == 0 and "0 findings" in clean.stdout
    result = invoke(golden, bench, "--out", tmp_path / "out", "--html", "--json")
    content = json.loads(result.stdout)
    assert result.exit_code == 1 and content == json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["first"]["forward"]["place"] == "layers.1.act (Relu)" and content["first"]["weights"] is None
    assert len((tmp_path / "out" / "rows.csv").read_text().splitlines()) == content["tensors"] + 1
    page = (tmp_path / "out" / "compare.html").read_text()
    assert all(
        words in page for words in ("error (logarithmic)", "within its tolerance", "tolerance (Table 2)", "step 1")
    )
    assert "<svg" in page and "layers.1.act" in page and "http" not in page and "<script" not in page
    text = invoke(golden, bench).stdout
    assert "first forward: step 0 Cell.layers.1.act.Relu.forward.0.output.0: value: error 0.01" in text
    assert "first backward: none" in text
    invoke(golden, tmp_path / "again", "--out", tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["compare.json", "rows.csv"], "a page of another comparison"


FAULTS = {
    # a forward fault: counters, caches, moments and weights that follow from it are not the first
    "softmax": ({"softmax": 1.01}, "initial loss is affected: net.attn.core (Attention) is the first"),
    "dropout": ({"dropout": 1}, "net.attn.dropout (Dropout) gets the same and gives another result: look at the seed"),
    "before an inner cell": ({"inside": 1.01}, "net.moe.router (Router), which no gradient|initial loss is affected"),
    "backward": (
        {"loss_gradient": 1.01},
        "The forward pass of the first step agrees, its backward pass does not: what arrives at net.head",
    ),
    # only the optimizer
    "weight decay": ({"decay": 0.0}, "the optimizer: weight decay: the update since step 0"),
    "learning rate": ({"rate": 1.05e-3}, "the optimizer: learning rate, or what else makes a whole update longer"),
    "betas": ({"beta": 0.8, "moments": False}, "until the weights of step 2 differ (5 of 5)"),
    "betas, with its moments": ({"beta": 0.8}, "The first that differs is first.embed of optimizer (AdamW), which no"),
    # where a run starts
    "seed": ({"seed": 1}, "The weights differ before any update (5 of 5), .* The batch differs too: another seed"),
    "initial weights": ({"weights_seed": 1}, "before any update (5 of 5), first net.embed (Embedding): look at init"),
    "one weight": ({"one_weight": 1.01}, "before any update (1 of 5), first net.moe.experts (Experts)"),
    # the batch
    "data": (
        {"data_from": 0},
        "The inputs of the first step differ (Cell.net.Model.forward.0.input.0): look at the data",
    ),
    "data later": ({"data_from": 1}, "agrees until step 1, whose inputs differ (Cell.net.Model.forward.0.input.0)"),
    # state by itself
    "a router's bias at the start": (
        {"start_bias": 0.02},
        "first that differs is expert_bias of net.moe.router (Router)",
    ),
    "what moves the bias": ({"bias_rate": 2e-3}, "until expert_bias of net.moe.router (Router), .* differs in step 1"),
    "a counter": ({"load": 1.01}, "first that differs is expert_load of net.moe.router (Router)"),
    "a cache": ({"cache": 1.01}, "first that differs is key_cache of net.attn.core (Attention)"),
    "a running mean": ({"momentum": 0.8}, "first that differs is running_mean of net.norm (Norm)"),
    "a count of calls": ({"calls": 5}, "first that differs is count of net.norm (Norm)"),
}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """(task, moments hooked) -> the dump without a fault."""
    cases = {}

    def of(task, moments):
        if (task, moments) not in cases:
            folder = tmp_path_factory.mktemp("golden")
            cases[task, moments] = open_dump(write_little(folder, task, moments=moments))
        return cases[task, moments]

    return of


@pytest.mark.parametrize("task", ["tensor", "statistics"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_headline_names_the_fault_and_not_what_follows_from_it(tmp_path, golden, fault, task):
    faults, words = FAULTS[fault]
    bench = open_dump(write_little(tmp_path / "bench", task, **faults))
    report = compare_dumps(golden(task, faults.get("moments", True)), bench)
    assert any(all(part in report.meaning() for part in option.split(" .* ")) for option in words.split("|"))


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_a_rerun_of_the_little_model_has_no_finding(tmp_path, golden, task):
    assert compare_dumps(golden(task, True), open_dump(write_little(tmp_path / "b", task))).passed


def test_without_gradients_a_counter_is_not_taken_for_an_initial_weight_either(tmp_path):
    """Dumps of only forward passes do not tell weights from state: then the order of the calls decides."""
    sides = {
        name: train(Faults(**faults))
        for name, faults in (("a", {}), ("b", {"softmax": 1.01}), ("c", {"weights_seed": 1}))
    }
    dumps = {}
    for name, steps in sides.items():
        forward = [{key: call for key, call in calls.items() if ".forward." in key} for calls in steps]
        dumps[name] = open_dump(write_dump(tmp_path / name, forward))
    report = compare_dumps(dumps["a"], dumps["b"])
    assert report.first["state"] is None and "initial loss is affected: net.attn.core" in report.meaning()
    assert "before any update" in compare_dumps(dumps["a"], dumps["c"]).meaning()


def test_parameters_that_a_dump_itself_calls_untrained_are_state(tmp_path):
    """At L1 and L2 there are no gradients of parameters; the weights that are dumped apart say it themselves."""
    dumps = []
    for name, load in (("a", 1.0), ("b", 2.0)):
        router = {"weight": np.ones((4, 4), np.float32), "expert_load": np.full(4, load, np.float32)}
        held = {0: {"Cell.net.router.Router.forward.0": {"parameters": router}}}
        call = {"Functional.matmul.0.forward": {"input": [np.ones(4, np.float32)], "output": []}}
        folder = write_dump(tmp_path / name, [call], level="L1", weights=held)
        file = folder / "weights" / "step0" / "rank0" / "dump.json"
        content = json.loads(file.read_text())
        for label, node in content["data"]["Cell.net.router.Router.forward.0"]["parameters"].items():
            node["requires_grad"] = label == "weight"
        file.write_text(json.dumps(content))
        dumps.append(open_dump(folder))
    report = compare_dumps(*dumps)
    assert report.first["weights"] is None and report.first["state"].name.endswith("expert_load")
    assert "expert_load of net.router (Router), which no gradient trains" in report.meaning()


FOLDER_OF_FAULTS = Path(__file__).parent / "fault"
SMALL = (
    "train_dataset.data_loader.config.seq_length=16",
    "model.model_config.max_position_embeddings=16",
    "model.model_config.num_nextn_predict_layers=0",
)


def overrides(corpus):  # noqa: F811
    return [f"train_dataset.data_loader.config.data_path.1={corpus}", *SMALL]


def dump(corpus, out):  # noqa: F811
    command = [runs.TC3, "accuracy", "dump", str(runs.TINY), "--out", str(out), "--task", "tensor"]
    for setting in overrides(corpus):
        command += ["--set", setting]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return open_dump(out)


def faulty_dump(workers, corpus, out, fault):  # noqa: F811
    """The same with a fault, in this process and with a worker that is a fork."""

    def supervised(recipe, folder, job):
        count = worker_count(recipe)
        words = msrun_command(recipe, folder, 0, worker=runs.ROOT / "launch" / "workers" / "accuracy_worker.py")
        words = words[words.index(str(folder / "recipe.yaml")) - 2 :]  # the worker's file, and its arguments
        arguments = [FOLDER_OF_FAULTS / "worker.py", *words, "--level", job.level, "--task", job.task]
        (folder / "logs").mkdir()
        environment = worker_environment(count, folder, {**os.environ, "TC3_TEST_FAULT": fault})
        codes, logs = workers.cluster(count, arguments, folder / "logs", environment)
        assert not any(codes), logs[-1][-3000:]
        return Outcome(0)

    with mock.patch.object(accuracy_dump, "_supervised", supervised):
        assert accuracy_dump.run(Job(str(runs.TINY), str(out), False, 2, "L0", "tensor", overrides(corpus))) == 0
    return open_dump(out)


@pytest.mark.slow
def test_a_rerun_is_clean_and_faults_are_placed(corpus, workers, tmp_path):  # noqa: F811
    """A worker that is a fork without a fault computes the same bits: those of the other fault's first steps."""
    golden = dump(corpus, tmp_path / "golden")
    assert dumped_bytes(tmp_path / "golden") > 1e6
    assert (golden.level, golden.task, list(golden.folders)) == ("L0", "tensor", [0, 1, 2])
    check_layout(tmp_path / "golden")

    report = compare_dumps(golden, faulty_dump(workers, corpus, tmp_path / "softmax", "softmax"))
    first = report.first["forward"]
    assert (first.step, first.role, first.kind) == (0, "output", "value")
    assert first.place == "network.model.decoder.layers.1.self_attention.core_attention (CoreAttention)"
    assert first.error == pytest.approx(0.01, rel=0.1) and "initial loss is affected" in report.meaning()
    assert report.first["weights"] is None or report.first["weights"].step == 2

    # the first step's learning rate is 0: until the weights after the second, this is a rerun of the same
    report = compare_dumps(golden, faulty_dump(workers, corpus, tmp_path / "decay", "decay"))
    assert all(row.error == 0 for row in report.rows if row.step < 2) and len(report.rows) > 800
    assert {row.kind for row in report.findings} == {"update"} and report.first["backward"] is None
    assert report.first["weights"].step == 2 and "weight decay" in report.meaning()


def check_layout(folder):
    """Check that `dump_writer` writes the keys, groups and files that msprobe wrote for one call of each kind."""
    rank = folder / "step0" / "rank0"
    data = json.loads((rank / "dump.json").read_text())["data"]
    linear = "Cell.network.model.decoder.layers.0.self_attention.linear_proj.RowParallelLinear"
    forward, backward, gradient = (
        data[f"{linear}.{each}"] for each in ("forward.0", "backward.0", "parameters_grad.0")
    )
    assert list(forward) == ["input_args", "input_kwargs", "output", "parameters"]
    assert list(backward) == ["input", "output"] and list(gradient) == ["weight"]
    node = forward["parameters"]["weight"]
    assert set(node) == {"type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "data_name"}
    assert (node["type"], node["dtype"]) == ("mindspore.Tensor", "Float32")
    assert node["data_name"] == f"{linear}.forward.0.parameters.weight.npy"
    assert gradient["weight"][0]["data_name"] == f"{linear}.parameters_grad.0.weight.npy"
    assert (rank / "dump_tensor_data" / node["data_name"]).exists()
