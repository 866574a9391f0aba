"""Constants that MindSpore writes over several lines are read as one."""

from tools.dryrun.graph_text import arguments_of, read_graph, whole_lines

TEXT = """# IR entry: @0_Step
subgraph @0_Step(%para1_x) {
  %0(a) = PrimFunc_Mul(%para1_x, Tensor(shape=[2, 1], dtype=Float32, value=
[[ 1.0]
 [ 2.0]]), I64(1)) {instance name: mul}
      : (<Tensor[Float32], (2, 1)>) -> (<Tensor[Float32], (2, 1)>)
  %1(b) = PrimFunc_Neg(%0)
      : (<Tensor[Float32], (2, 1)>) -> (<Tensor[Float32], (2, 1)>)
}
"""


def test_a_constant_over_several_lines_is_one_argument(tmp_path):
    file = tmp_path / "graph.ir"
    file.write_text(TEXT, encoding="utf-8")
    first, second = read_graph(file).graphs["0_Step"]
    wanted = ["%para1_x", "Tensor(shape=[2, 1], dtype=Float32, value= [[ 1.0]  [ 2.0]])", "I64(1)"]
    assert arguments_of(first.head) == wanted and first.outputs[0].shape == (2, 1)
    assert second.operands == [0]


def test_each_line_keeps_its_number():
    lines = TEXT.splitlines(keepends=True)
    assert [number for number, _ in whole_lines(lines)] == [1, 2, 3, 6, 7, 8, 9]
