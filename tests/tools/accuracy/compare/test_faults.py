"""A real dump: a rerun has no finding, and two faults are found and placed. No edit to model or recipe puts them in."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from launch.run.accuracy_dump import dumped_bytes
from tests.training import runs
from tests.training.conftest import corpus  # noqa: F401 (a fixture)
from tools.accuracy.compare.run import compare_dumps
from tools.accuracy.dumps.read import open_dump

FAULTS = Path(__file__).parent / "fault"
SMALL = (
    "train_dataset.data_loader.config.seq_length=16",
    "model.model_config.max_position_embeddings=16",
    "model.model_config.num_nextn_predict_layers=0",
)


def dump(corpus, out, fault=""):  # noqa: F811
    """`tc3 accuracy dump` of the test recipe, optionally with a fault."""
    command = [runs.TC3, "accuracy", "dump", str(runs.TINY), "--out", str(out), "--task", "tensor"]
    for setting in (f"train_dataset.data_loader.config.data_path.1={corpus}", *SMALL):
        command += ["--set", setting]
    path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "TC3_TEST_FAULT": fault}
    done = subprocess.run(command, cwd=runs.ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return open_dump(out)


@pytest.mark.slow
def test_a_rerun_is_clean_and_faults_are_placed(corpus, tmp_path):  # noqa: F811
    golden = dump(corpus, tmp_path / "golden")
    assert dumped_bytes(tmp_path / "golden") > 1e6
    assert (golden.level, golden.task, list(golden.folders)) == ("L0", "tensor", [0, 1, 2])
    check_layout(tmp_path / "golden")

    report = compare_dumps(golden, dump(corpus, tmp_path / "softmax", "softmax"))
    first = report.first["forward"]
    assert (first.step, first.role, first.kind) == (0, "output", "value")
    assert first.place == "network.model.decoder.layers.1.self_attention.core_attention (CoreAttention)"
    assert first.error == pytest.approx(0.01, rel=0.1) and "initial loss is affected" in report.meaning()
    assert report.first["weights"] is None or report.first["weights"].step == 2

    # the first step's learning rate is 0: until the weights after the second, this is a rerun of the same
    report = compare_dumps(golden, dump(corpus, tmp_path / "decay", "decay"))
    assert all(row.error == 0 for row in report.rows if row.step < 2) and len(report.rows) > 800
    assert {row.kind for row in report.findings} == {"update"} and report.first["backward"] is None
    assert report.first["weights"].step == 2 and "weight decay" in report.meaning()


def check_layout(folder):
    """What `dump_writer` writes is what msprobe wrote: keys, groups and files of one call of each kind."""
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
