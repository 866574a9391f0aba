"""Sizes and names of types stand once."""

import re
from pathlib import Path

import pytest

from tools.hardware.load import DTYPES
from tools.hardware.units import BOTH, LONG, same_dtype, short_dtype

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def test_types_by_either_name():
    assert set(BOTH) == {"bf16", "bfloat16", "float16", "float32", "fp16", "fp32"}
    assert [short_dtype(name, "fp32") for name in ("bfloat16", "bf16", "float16", "int8", None)] == [
        "bf16", "bf16", "fp16", "fp32", "fp32"
    ]  # fmt: skip
    assert same_dtype("bf16", "bfloat16") and same_dtype("RMSNorm", "rmsnorm") and not same_dtype("bf16", "fp16")
    assert set(LONG) < set(DTYPES)


@pytest.mark.parametrize("again", [r'"bf16": \(?"bfloat16"', r'"bfloat16": \(?"bf16"', r"GIB = 1 <<|\* ?2\*\*30"])
def test_no_tool_says_it_again(again):
    found = [path.relative_to(TOOLS).as_posix() for path in TOOLS.rglob("*.py") if re.search(again, path.read_text())]
    assert set(found) <= {"hardware/units.py"}


def test_the_cluster_where_nobody_names_one_stands_once():
    said = [path for path in TOOLS.rglob("*.py") if re.search(r'= ?"atlas_800t_a2"', path.read_text())]
    assert said == [TOOLS / "hardware/__init__.py"]
