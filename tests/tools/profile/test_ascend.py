"""What the reader of Ascend profiles takes and what it refuses."""

import json
import re
import shutil

import pytest

from plugins.errors import DataError
from tests.tools.profile.test_recovery import HARDWARE, START, run_of
from tests.tools.profile.traces import Trace
from tools.estimate.layer_model import Matmul
from tools.profile.ascend import shapes_of
from tools.profile.attribute import attribute
from tools.profile.kernels import Kernel
from tools.profile.read import read_profile
from tools.profile.shapes import matmul_of
from tools.profile.study import study

HEAD = "Name,Type,Accelerator Core,Start Time(us),Duration(us)\n"
TRACE = "Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free\n"


def output(folder, **files):
    place = folder / "ASCEND_PROFILER_OUTPUT"
    place.mkdir()
    for name, text in files.items():
        (place / f"{name}.csv").write_text(text)
    return folder


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    config = run_of()
    return Trace(config, HARDWARE, START, 1).build().write(tmp_path_factory.mktemp("trace"), 32), config


def test_steps_are_told_apart_and_ranks_found(trace):
    profile = read_profile(trace[0])
    assert (profile.device, profile.steps, profile.rank) == ("Ascend", 2, 32)
    gathered = [kernel for kernel in profile.step.kernels if kernel.kind == "hcom_allGather_"]
    assert gathered and all(len(kernel.ranks) == 8 for kernel in gathered)
    assert any(kernel.inputs for kernel in profile.step.kernels)


def test_groups_of_no_ranks_tell_nothing(trace, tmp_path):
    shutil.copytree(trace[0], tmp_path / "p")
    (file,) = (tmp_path / "p").rglob("profiler_metadata.json")
    content = json.loads(file.read_text())
    for group in content["parallel_group_info"].values():
        group["global_ranks"][0] = str(group["global_ranks"][0])
    file.write_text(json.dumps(content))
    profile = read_profile(tmp_path / "p")
    assert not any(kernel.ranks for kernel in profile.step.kernels)
    assert study(tmp_path / "p", trace[1]).measured


def test_columns_of_older_versions_and_tabs_are_taken(tmp_path):
    text = "Device_id,Op Name,OP Type,Task Type,Task Start Time(us),Task Duration(us)\n"
    text += "0,a,Add,AIV,\t1795418422975426.533\t,2\n"
    more = "0,b,Add,AIV,1795418422975429.033,1\n"
    kernels = read_profile(output(tmp_path, kernel_details=text + more)).step.kernels
    # to the nanosecond, which a float of microseconds since 1970 has not
    assert kernels[1].start == pytest.approx(2.5e-6, abs=1e-10)


def test_steps_that_are_not_told_apart_are_shared_out(tmp_path):
    rows = "".join(f"a{n},Add,AIV,{10 * n},4\n" for n in range(4))
    profile = read_profile(output(tmp_path, kernel_details=HEAD + rows), steps=2)
    assert profile.step.seconds == pytest.approx(17e-6)
    assert attribute(profile, run_of()).terms["elementwise"] == pytest.approx(8e-6)


def test_sums_by_type_do_where_kernels_are_missing(tmp_path):
    sums = "Device_id,OP Type,Core Type,Count,Total Time(us)\n0,MatMulV3,AI_CORE,4,60\n0,hcom_alltoallv_,HCCL,2,40\n"
    folder = output(tmp_path, op_statistic=sums, step_trace_time=TRACE + "1,60,10,30,40,5\n")
    found = attribute(read_profile(folder), run_of())
    assert found.seconds == pytest.approx(75e-6)
    assert (found.terms["matmul"], found.terms["ep"]) == (pytest.approx(60e-6), pytest.approx(10e-6))
    assert found.terms["host of the step"] == pytest.approx(5e-6)


@pytest.mark.parametrize(
    "files, words",
    [
        ({}, "no profile below it"),
        ({"kernel_details": HEAD}, "has no rows"),
        ({"kernel_details": "Name,Type\na,Add\n"}, "no column 'Start Time(us)'; it has Name, Type"),
        ({"kernel_details": HEAD + "a,Add,AIV,1,fast\n"}, "kernel_details.csv:2: Duration(us): want a number"),
        ({"kernel_details": HEAD + "a,Add,AIV,nan,1\n"}, "Start Time(us): want a number"),
        ({"op_statistic": "OP Type,Core Type\nAdd,AIV\n"}, "no column 'Total Time(us)'"),
        ({"kernel_details": HEAD + "a,Add,AIV,1,1\n", "step_trace_time": "Step\n1\n"}, "no column 'Computing'"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, files, words):
    with pytest.raises(DataError, match=re.escape(words)):
        read_profile(output(tmp_path, **files))


def test_a_profile_of_another_recipe_is_refused(trace):
    folder, config = trace
    with pytest.raises(DataError, match=r"names layers .* but the recipe has"):
        study(folder, run_of(layers=(tuple(config.layers[0][:1] + (5, 7) + config.layers[0][3:]),)))
    with pytest.raises(DataError, match="FlashAttentionScoreGrad"):
        study(folder, run_of(micro_batches=8))
    with pytest.raises(DataError, match="FLOPs a step"):
        study(folder, run_of(sequence=4 * config.sequence))


@pytest.mark.parametrize(
    "inputs, outputs, wanted",
    [
        (((8, 4), (4, 2)), (), Matmul(8, 2, 4)),
        (((8, 4), (2, 4)), (), Matmul(8, 2, 4)),
        (((16, 8), (16, 2)), ((8, 2),), Matmul(8, 2, 16)),
        (((3, 8, 4), (3, 4, 2)), (), Matmul(8, 2, 4, 3)),
        (((5, 8, 4), (4, 2)), (), Matmul(40, 2, 4)),
        (((60, 4), (6, 4, 2), (6,)), (), Matmul(10, 2, 4, 6)),
        (((16, 8), (16, 8)), (), None),  # 16 or 8: the result would tell
        (((16, 8), (16, 8)), ((8, 8),), Matmul(8, 8, 16)),
        (((16,), (8, 2)), (), None),
    ],
)
def test_a_product_has_the_sizes_of_its_tensors(inputs, outputs, wanted):
    assert matmul_of(Kernel("a", "MatMul", "AI_CORE", 0, 1, inputs, outputs)) == wanted


def test_shapes_are_read_as_the_profiler_writes_them():
    assert shapes_of('"4096,2560;2560,7680;"') == ((4096, 2560), (2560, 7680), ())
    assert shapes_of("N/A") == ()
