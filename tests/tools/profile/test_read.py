"""These tests check which Ascend profiles the reader accepts, and which it refuses."""

import json
import re
import shutil

import pytest

from plugins.errors import DataError
from tests.tools.profile.test_fit import HARDWARE, START, run_105b
from tests.tools.profile.traces import Trace
from tools.estimate.layer_model import Matmul
from tools.profile.attribute import attribute
from tools.profile.kernels import Kernel, matmul_of
from tools.profile.read import read_profile, shapes_of, spread_notes
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
    config = run_105b()
    return Trace(config, HARDWARE, START, 1).build().write(tmp_path_factory.mktemp("trace"), 32), config


def test_steps_are_told_apart_and_ranks_found(trace):
    profile = read_profile(trace[0])
    assert (profile.device, profile.steps, profile.rank) == ("Ascend", 2, 32)
    gathered = [kernel for kernel in profile.step.kernels if kernel.kind == "hcom_allGather_"]
    assert gathered and all(len(kernel.ranks) == 8 for kernel in gathered)
    assert any(kernel.inputs for kernel in profile.step.kernels)


def test_a_step_whose_last_kernels_were_cut_is_told(trace, tmp_path):
    """The optimizer and the communication of gradients took no time, and no note said why."""
    assert not any("was cut" in note for note in read_profile(trace[0]).notes)
    shutil.copytree(trace[0], tmp_path / "p")
    (file,) = (tmp_path / "p").rglob("kernel_details.csv")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-2]))
    found = study(tmp_path / "p", trace[1])
    assert found.measured.terms["optimizer"] == 0
    assert [note for note in found.profile.notes if "kernel_details.csv was cut" in note]


@pytest.mark.slow
def test_the_newest_of_several_profiles_of_a_rank_is_read(trace, tmp_path):
    """The folder whose name comes first was read, such as one of a run with another recipe."""
    names = ["node0_1234_20261101083000123_ascend_ms", "node0_77_20261130083000123_ascend_ms"]
    (whole,) = trace[0].rglob("host_1_ascend_ms")
    for name in reversed(names):
        shutil.copytree(whole, tmp_path / "rank_32" / name)
    shutil.copytree(whole, tmp_path / "rank_40" / "node0_99_20261130093000123_ascend_ms")
    profile = read_profile(tmp_path)
    assert names[1] in profile.source and profile.rank == 32
    assert any(note.startswith("2 profiles of rank 32 are in this folder") for note in profile.notes)
    assert not read_profile(tmp_path / "rank_40").notes
    for path in tmp_path.rglob("profiler_info_*.json"):
        path.unlink()
    for name, rank in (("a", "rank_32"), ("b", "rank_40")):  # folders that name no rank
        (tmp_path / rank).rename(tmp_path / name)
    assert any(note.startswith("3 profiles whose rank is not known are in") for note in read_profile(tmp_path).notes)


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
    assert attribute(profile, run_105b()).terms["elementwise"] == pytest.approx(8e-6)


def test_sums_by_type_do_where_kernels_are_missing(tmp_path):
    sums = "Device_id,OP Type,Core Type,Count,Total Time(us)\n0,MatMulV3,AI_CORE,4,60\n0,hcom_alltoallv_,HCCL,2,40\n"
    folder = output(tmp_path, op_statistic=sums, step_trace_time=TRACE + "1,60,10,30,40,5\n")
    found = attribute(read_profile(folder), run_105b())
    assert found.seconds == pytest.approx(75e-6)
    assert (found.terms["matmul"], found.terms["ep"]) == (pytest.approx(60e-6), pytest.approx(10e-6))
    assert found.terms["host of the step"] == pytest.approx(5e-6)


@pytest.mark.parametrize(
    "files, words",
    [
        ({}, "the folder holds no profile"),
        ({"kernel_details": HEAD}, "has no rows"),
        ({"kernel_details": "Name,Type\na,Add\n"}, "no column 'Start Time(us)'; it has Name, Type"),
        ({"kernel_details": HEAD + "a,Add,AIV,1,fast\n"}, "kernel_details.csv:2: Duration(us): 'fast' is not a number"),
        ({"kernel_details": HEAD + "a,Add,AIV,nan,1\n"}, "Start Time(us): 'nan' is not a number"),
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
        study(folder, run_105b(layers=(tuple(config.layers[0][:1] + (5, 7) + config.layers[0][3:]),)))
    with pytest.raises(DataError, match="FlashAttentionScoreGrad"):
        study(folder, run_105b(micro_batches=8))
    with pytest.raises(DataError, match="FLOPs a step"):
        study(folder, run_105b(sequence=4 * config.sequence))


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


ATTENTION = "Default/network/model-GPTModel/decoder-TransformerBlock/layers-CellList/0-TransformerLayer/self_attention"
SECOND = ATTENTION.replace("0-Tr", "1-Tr")
EPOCH = 1_795_418_422_975_426_496  # nanoseconds


def write(folder, operators, shapes, steps=4, slow=2):
    """`operators` name -> (start, milliseconds) in a step of 10 ms; in step `slow` each takes three times as long."""
    place = folder / "rank_0" / "x_ascend_ms" / "FRAMEWORK"
    place.mkdir(parents=True)
    lines, framework = [], []
    for name, (start, length) in operators.items():
        runs = [
            f"{EPOCH + round((10 * step + start) * 1e6)},{length * (3 if step == slow else 1)},0"
            for step in range(steps)
        ]
        lines.append(f"{name};HostCpuOps;{' '.join(runs)} ")
    for _ in range(steps):
        framework += [f"{name.split('-op')[0].split('/')[-1]};{name.split('/')[-1]};7;{text}" for name, text in shapes]
    (place / "cpu_op_execute_timestamp_0.txt").write_text("\n".join(lines) + "\n")
    (place / "cpu_framework_0.txt").write_text("\n".join(framework) + "\n")
    return folder


def test_an_operator_takes_what_it_takes_in_its_quiet_quarter(tmp_path):
    operators = {f"{ATTENTION}/MatMul-op0": (0.0, 1.0), f"{SECOND}/MatMul-op0": (1.5, 0.5)}
    shapes = [
        (f"{ATTENTION}/MatMul-op0", "input_1:[8, 4];input_2:[4, 2];input_3:NoShape;"),
        (f"{SECOND}/MatMul-op0", "input_1:[16, 4];input_2:[4, 2];"),
    ]
    profile = read_profile(write(tmp_path, operators, shapes))
    assert (profile.device, profile.steps, profile.rank) == ("CPU", 4, 0)
    first, second = profile.step.kernels
    assert [kernel.kind for kernel in (first, second)] == ["MatMul", "MatMul"]
    # one short name, two operators: the k-th execution has the shapes of the k-th line
    assert (first.inputs, second.inputs) == (((8, 4), (4, 2)), ((16, 4), (4, 2)))
    assert first.seconds == pytest.approx(1e-3, rel=1e-6)
    assert second.seconds == pytest.approx(0.5e-3, rel=1e-6)
    assert second.start - first.start - first.seconds == pytest.approx(0.375e-3, rel=1e-3)  # 0.5, 0.5, 0 and 0.5 ms


def test_times_and_shapes_are_those_of_the_lowest_rank(tmp_path):
    """Rank 10 was taken for lower than rank 2, and the shapes were those of a rank whose times were missing."""
    name = f"{ATTENTION}/MatMul-op0"
    place = write(tmp_path, {name: (0.0, 1.0)}, [(name, "input_1:[8, 4];")]) / "rank_0/x_ascend_ms/FRAMEWORK"
    place = place.rename(tmp_path / "FRAMEWORK")
    shutil.rmtree(tmp_path / "rank_0")
    (place / "cpu_op_execute_timestamp_0.txt").rename(place / "cpu_op_execute_timestamp_10.txt")
    (place / "cpu_op_execute_timestamp_2.txt").write_text(f"{name};HostCpuOps;{EPOCH},2.0,0 {EPOCH + 10**7},2.0,0\n")
    profile = read_profile(tmp_path)
    (kernel,) = profile.step.kernels
    assert (profile.rank, kernel.inputs, kernel.seconds) == (2, (), pytest.approx(2e-3))
    assert any("cpu_framework_*.txt is missing" in note for note in profile.notes)
    (place / "cpu_framework_2.txt").write_text("MatMul;MatMul-op0;7;input_1:[6, 4];\n" * 2)
    assert read_profile(tmp_path).step.kernels[0].inputs == ((6, 4),)


@pytest.mark.parametrize(
    "line",
    [
        "no semicolons",
        "a;b;c",
        "a;b;1,x,0",
        "",
        "Default/X-op0;HostCpuOps;1000,nan,1",
        "Default/X-op0;HostCpuOps;1000,-2.0,1",
    ],
)
def test_a_line_of_another_form_is_refused_by_its_number(tmp_path, line):
    place = tmp_path / "FRAMEWORK"
    place.mkdir()
    (place / "cpu_op_execute_timestamp_0.txt").write_text(line + "\n")
    with pytest.raises(DataError, match=r"cpu_op_execute_timestamp_0.txt"):
        read_profile(tmp_path)


@pytest.mark.parametrize(
    "lengths, quiet, words",
    [
        ([1.0], None, []),
        ([1.0, 1.02, 0.98, 1.01], 1.0, []),
        ([1.0, 1.0, 1.0, 1.0, 9.0], 1.0, []),  # one odd step is none of the halves
        ([1.0, 1.5, 1.0, 1.6], None, ["half of them take 1 to 1.525 s"]),
        ([2.0, 2.0, 2.0], 1.0, ["2.00 times one of quiet operators"]),
        ([2.0, 3.0, 4.0], 1.0, ["steps differ widely", "a usual step takes 3 s"]),
    ],
)
def test_notes(lengths, quiet, words):
    found = spread_notes(lengths, quiet)
    assert len(found) == len(words) and all(word in note for word, note in zip(words, found, strict=True))


def noted(profile):
    return [note for note in profile.notes if "steps differ widely" in note]


@pytest.mark.parametrize("late, told", [(0.0, False), (10.0, True)])
def test_a_cpu_profile_is_judged_by_its_steps(tmp_path, late, told):
    folder = write(tmp_path, {f"{ATTENTION}/MatMul-op0": (0.0, 9.0)}, [], steps=4, slow=None)
    path = next(folder.rglob("cpu_op_execute_timestamp_0.txt"))
    name, kind, runs = path.read_text().strip().split(";")
    moved = []
    for number, run in enumerate(runs.split()):
        start, rest = run.split(",", 1)
        moved.append(f"{int(start) + round(late * 1e6) * (number // 2)},{rest}")
    path.write_text(f"{name};{kind};{' '.join(moved)}\n")
    assert bool(noted(read_profile(folder))) == told


@pytest.mark.parametrize("length, told", [(4, False), (40, True)])
def test_a_device_profile_is_judged_by_its_steps(tmp_path, length, told):
    kernels = "Step ID," + HEAD + f"1,a,Add,AIV,0,4\n2,a,Add,AIV,100,{length}\n"
    assert bool(noted(read_profile(output(tmp_path, kernel_details=kernels)))) == told


@pytest.mark.parametrize("length, told", [(60, False), (160, True)])
def test_sums_are_judged_by_the_summary(tmp_path, length, told):
    sums = "OP Type,Core Type,Count,Total Time(us)\nMatMulV3,AI_CORE,4,60\n"
    trace = TRACE + f"1,60,0,0,0,0\n2,{length},0,0,0,0\n"
    assert bool(noted(read_profile(output(tmp_path, op_statistic=sums, step_trace_time=trace)))) == told
