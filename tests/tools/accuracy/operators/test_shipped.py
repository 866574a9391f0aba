"""Golden results that are shipped: this host computes the same, and what differs is named."""

import json

import pytest

from plugins.errors import DataError
from tools.accuracy.operators.report import SPECS
from tools.accuracy.operators.shipped import FILE, differences, numbers_of, read_shipped

PAIRS = [(spec, dtype) for spec in SPECS.values() for dtype in spec.dtypes]


def test_this_host_computes_what_is_shipped_for_every_operator_and_type():
    shipped = read_shipped()
    compared, lines = differences(PAIRS, shipped)
    assert lines == []
    assert compared == len(shipped["results"]) > 500
    assert FILE.stat().st_size < 100_000
    assert shipped["made"] >= "2026-11-27"


def test_a_result_that_is_a_little_off_is_named_with_both_numbers():
    spec = SPECS["matmul"]
    shipped = {"results": numbers_of(spec, "float16")}
    name = next(iter(shipped["results"]))
    rms, first, *rest = shipped["results"][name]
    shipped["results"][name] = [rms, first + 2e-4 * max(abs(first), rms), *rest]
    (line,) = differences([(spec, "float16")], shipped)[1]
    assert line.startswith(f"{name}: this host computes {first:.6g}, shipped is")
    shipped["results"][name] = [rms, first + 5e-5 * max(abs(first), rms), *rest]
    assert differences([(spec, "float16")], shipped)[1] == []
    del shipped["results"][name]
    assert "do not have this tensor" in differences([(spec, "float16")], shipped)[1][0]


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON"), ("[]", "holds no golden"), ("{}", "holds no golden")]
)
def test_a_damaged_file_is_refused(tmp_path, text, words):
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(DataError, match=words):
        read_shipped(tmp_path / "g.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_shipped(tmp_path / "none.json")


def test_the_file_is_json_that_names_its_numpy():
    assert set(json.loads(FILE.read_text())) == {"made", "numpy", "results"}
