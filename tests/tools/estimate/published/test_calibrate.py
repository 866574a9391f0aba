"""Parameters come back from steps that were made with them; what the steps cannot tell stays and is named."""

import json
import os
from dataclasses import asdict, fields, replace

import pytest
import yaml
from click.testing import CliRunner

from plugins.errors import DataError, RecipeError
from tools.estimate.efficiency import NAMES, PROFILED, Efficiency, cluster, efficiency_of
from tools.estimate.published.calibrate import BOUNDS, calibrate, cluster_text
from tools.estimate.published.rows import express
from tools.estimate.published.validate import predict
from tools.hardware import load_hardware
from tools.search.measured import calibrate_command

CLUSTER = "h100"
START = efficiency_of(cluster(CLUSTER))
DENSE = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000, "precision": "bf16"}
MOE = {**DENSE, "experts": 64, "topk": 6, "moe_ffn": 2048, "shared": 1, "dense_ffn": 14336}
LAYOUTS = [
    {"seq": 4096, "gbs": 128, "devices": 8, "tp": 8, "pp": 1, "micro_batch": 1, "vpp": 1},
    {"seq": 4096, "gbs": 128, "devices": 8, "tp": 1, "pp": 1, "micro_batch": 1, "vpp": 1},
    {"seq": 32768, "gbs": 8, "devices": 8, "tp": 1, "pp": 1, "micro_batch": 1, "vpp": 1},
    {"seq": 1024, "gbs": 512, "devices": 64, "tp": 4, "pp": 2, "micro_batch": 4, "vpp": 1},
    {"seq": 4096, "gbs": 8, "devices": 8, "tp": 1, "pp": 1, "micro_batch": 1, "vpp": 1},
]


def rows_of(truth, configs, spoilt=None):
    """Rows whose steps were made with `truth`; `spoilt` is the index of one that took half as long again."""
    found = []
    for index, config in enumerate(configs):
        row = {"id": f"row{index}", "group": "own", "hardware": "H100", "config": config}
        step = predict(express(row), truth).step_time_s
        row["measured"] = {"step_time_s": step * (1.5 if index == spoilt else 1.0)}
        found.append(row)
    return found


def dense_configs():
    return [{**DENSE, **layout} for layout in LAYOUTS]


def test_every_parameter_has_bounds_and_starts_inside():
    assert tuple(BOUNDS) == NAMES
    assert set(NAMES) == {field.name for field in fields(Efficiency)} - {"mesh", *PROFILED}


def test_parameters_come_back():
    truth = replace(START, matmul=0.5, attention=0.4, step_s=0.3)
    found = calibrate([express(row) for row in rows_of(truth, dense_configs())], CLUSTER, START)
    assert {"matmul", "attention", "step_s"} <= set(found.fitted)
    assert found.efficiency.matmul == pytest.approx(0.5, rel=0.03)
    assert found.efficiency.attention == pytest.approx(0.4, rel=0.05)
    assert found.efficiency.step_s == pytest.approx(0.3, rel=0.1)
    for before, after in found.errors.values():
        assert abs(before) > 0.05 and abs(after) < 0.005


def test_moe_parameters_come_back_from_moe_rows():
    truth = replace(START, moe_s=0.004, link=0.6)
    configs = [
        {**MOE, **LAYOUTS[0], "tp": 1, "devices": 64, "ep": 64},
        {**MOE, **LAYOUTS[0], "tp": 1, "devices": 8, "ep": 8},
        {**MOE, **LAYOUTS[1], "devices": 32, "ep": 32, "seq": 1024},
        {**MOE, **LAYOUTS[1], "devices": 8, "ep": 1, "seq": 2048},
    ]
    found = calibrate([express(row) for row in rows_of(truth, configs)], CLUSTER, START)
    assert "moe_s" in found.fitted
    assert found.efficiency.moe_s == pytest.approx(0.004, rel=0.1)
    assert max(abs(after) for _, after in found.errors.values()) < 0.02


def test_a_link_that_starts_beyond_its_nominal_figure_is_not_overlooked():
    start, truth = replace(START, link=2.0), replace(START, link=0.4)
    found = calibrate([express(row) for row in rows_of(truth, dense_configs())], CLUSTER, start)
    # beyond that figure nothing moves, though the steps depend on the link
    assert found.kept.get("link") != "no row depends on it"
    assert max(abs(after) for _, after in found.errors.values()) < 0.02


def test_one_row_tells_one_parameter():
    truth = replace(START, matmul=0.5)
    found = calibrate([express(row) for row in rows_of(truth, dense_configs()[1:2])], CLUSTER, START)
    assert found.fitted == ("matmul",)
    assert found.kept["matmul_fp8"] == found.kept["moe_s"] == found.kept["hidden_ep"] == "no row depends on it"
    assert found.kept["half_size"] in ("it moves no row by enough", "the rows cannot tell it from matmul")
    assert found.efficiency == replace(START, matmul=found.efficiency.matmul)
    assert set(found.fitted) | set(found.kept) == set(NAMES)
    assert abs(found.errors["row0"][1]) < 0.003  # it is drawn to where it started


def test_what_one_row_mixes_is_named():
    long = {**DENSE, **LAYOUTS[2]}
    found = calibrate([express(row) for row in rows_of(START, [long])], CLUSTER, START)
    (fitted,) = found.fitted
    other = {"matmul": "attention", "attention": "matmul"}[fitted]
    assert found.kept[other] == f"the rows cannot tell it from {fitted}"


def test_one_bad_row_does_not_spoil_the_others():
    truth = replace(START, matmul=0.5)
    configs = [{**DENSE, **LAYOUTS[1], "gbs": 64 + 8 * more} for more in range(7)]
    found = calibrate([express(row) for row in rows_of(truth, configs, spoilt=3)], CLUSTER, START)
    assert found.efficiency.matmul == pytest.approx(0.5, rel=0.06)
    assert found.errors["row3"][1] < -0.2


def test_rows_without_a_step_are_left_out_with_their_reason():
    rows = rows_of(START, dense_configs()[:2])
    del rows[0]["measured"]
    rows.append({"id": "mystery", "hardware": "H100", "config": {"model": "nobody's"}})
    found = calibrate([express(row) for row in rows], CLUSTER, START)
    assert list(found.errors) == ["row1"]
    assert "no step time" in found.skipped["row0"] and "not given: seq, gbs" in found.skipped["mystery"]
    with pytest.raises(
        DataError, match=r"no row of the measurements can be used to calibrate \(row0: it has no step time"
    ):
        calibrate([express(rows[0])], CLUSTER, START)


def test_the_file_is_a_cluster_file(tmp_path):
    truth = replace(START, matmul=0.5)
    found = calibrate([express(row) for row in rows_of(truth, dense_configs())], CLUSTER, START)
    text = cluster_text(CLUSTER, "my_cluster", found, "measured.yaml")
    (tmp_path / "my_cluster.yaml").write_text(text)
    hardware = cluster(str(tmp_path / "my_cluster.yaml"))
    assert asdict(efficiency_of(hardware)) == pytest.approx(asdict(found.efficiency), rel=1e-3)
    assert hardware == replace(load_hardware(CLUSTER), name="my_cluster", efficiency=hardware.efficiency)
    assert "# Fitted: " in text and "no row depends on it" in text


def test_the_command(tmp_path):
    measured, out = tmp_path / "measured.yaml", tmp_path / "mine.yaml"
    rows = rows_of(replace(START, matmul=0.5), dense_configs())
    measured.write_text(yaml.safe_dump({"rows": rows}))
    words = [str(measured), "--cluster", CLUSTER, "--out", str(out)]
    result = CliRunner().invoke(calibrate_command, words)
    assert result.exit_code == 0, result.output
    assert "matmul: " in result.output and "matmul_fp8: stays" in result.output and os.path.isfile(out)
    again = CliRunner().invoke(calibrate_command, words)
    assert isinstance(again.exception, DataError) and "mine.yaml: the file exists" in str(again.exception)
    found = json.loads(CliRunner().invoke(calibrate_command, [*words, "--force", "--json"]).stdout)
    assert found["efficiency"]["matmul"] == pytest.approx(0.5, rel=0.05)
    assert yaml.safe_load(out.read_text())["name"] == "mine"


def test_a_file_with_half_of_the_efficiencies_is_refused(tmp_path):
    found = calibrate([express(row) for row in rows_of(START, dense_configs()[:1])], CLUSTER, START)
    content = yaml.safe_load(cluster_text(CLUSTER, "half", found, "measured.yaml"))
    del content["efficiency"]["link"]
    (tmp_path / "half.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(RecipeError, match="efficiency: the section must be a mapping of matmul, "):
        efficiency_of(cluster(str(tmp_path / "half.yaml")))


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("matmul", 0, "out of range"),
        ("hidden", -0.5, "from 0 to 1"),
        ("link", float("nan"), "not finite"),
        ("memory", float("inf"), "not finite"),
        ("step_s", "0.05", "not a number"),
        ("mesh", 1, "the value must be true or false"),
    ],
)
def test_efficiencies_that_nothing_reaches_are_refused(tmp_path, name, value, word):
    found = calibrate([express(row) for row in rows_of(START, dense_configs()[:1])], CLUSTER, START)
    content = yaml.safe_load(cluster_text(CLUSTER, "odd", found, "measured.yaml"))
    content["efficiency"][name] = value
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(RecipeError, match=f"odd.yaml: efficiency.{name}: .*{word}"):
        efficiency_of(cluster(str(tmp_path / "odd.yaml")))
