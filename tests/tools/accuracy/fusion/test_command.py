"""`tc3 accuracy fusion` on the text of a graph: plain or packed, all known or not."""

import gzip
import json

import pytest
from click.testing import CliRunner

from launch.cli import tc3
from tests.tools.fusion.small_graphs import node, text_of

FULL = ("Float32", (64, 64))
KNOWN = [node("Exp", ["x"], [FULL], FULL, "a/x-op"), node("Neg", [0], [FULL], FULL, "a/y-op")]
# two more in a chain, of which one is a number that the text does not hold
ELIDED = [
    node("Cos", [1], [FULL], FULL, "a/z-op"),
    node("Add", [2], [FULL], FULL, "a/u-op", more=["Tensor(shape=[64, 64], dtype=Float32, value=[...])"]),
    node("Neg", [3], [FULL], FULL, "a/v-op"),
]


def run(file, *words):
    return CliRunner().invoke(tc3, ["accuracy", "fusion", str(file), *words], catch_exceptions=False)


@pytest.mark.parametrize("ending", ["ir", "ir.gz"])
def test_kernels_of_a_graph_are_replayed(tmp_path, ending):
    text = text_of(KNOWN).encode()
    file = tmp_path / f"graph.{ending}"
    file.write_bytes(gzip.compress(text) if ending == "ir.gz" else text)
    done = run(file, "--json")
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["rows"]] == ["Exp-Neg"]
    assert (done.exit_code, report["passed"], report["unknown"]) == (0, True, 0)
    assert "all within tolerance" in run(file).stdout


def test_a_kernel_that_cannot_be_replayed_is_unknown_and_not_passed(tmp_path):
    file = tmp_path / "graph.ir"
    file.write_text(text_of(KNOWN + ELIDED))
    done = run(file, "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["passed"], report["unknown"]) == (2, None, 1)
    assert [row["passed"] for row in report["rows"]] == [True]
    assert "unknown of 1 kernels; the others are within tolerance" in run(file).stdout
