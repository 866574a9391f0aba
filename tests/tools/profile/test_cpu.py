"""MindSpore's profile of a CPU: the form of its lines is what MindSpore 2.9.0 wrote, the numbers are made up."""

import pytest

from plugins.errors import DataError
from tools.profile.read import read_profile

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


@pytest.mark.parametrize("line", ["no semicolons", "a;b;c", "a;b;1,x,0", ""])
def test_a_line_of_another_form_is_refused_by_its_number(tmp_path, line):
    place = tmp_path / "FRAMEWORK"
    place.mkdir()
    (place / "cpu_op_execute_timestamp_0.txt").write_text(line + "\n")
    with pytest.raises(DataError, match=r"cpu_op_execute_timestamp_0.txt"):
        read_profile(tmp_path)
