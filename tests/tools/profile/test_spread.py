"""Steps that differ are told, alike ones are not."""

import pytest

from tests.tools.profile.test_ascend import HEAD, TRACE, output
from tests.tools.profile.test_cpu import ATTENTION, write
from tools.profile.read import read_profile
from tools.profile.spread import spread_notes


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
