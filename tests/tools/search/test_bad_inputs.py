"""Files and options that are none: one line, at once, and nothing written (tests/inputs has more)."""

import json
import math
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from plugins.errors import DataError, RecipeError, TC3Error
from tools.ep_report.cli import ep_report
from tools.estimate.published.rows import read_rows
from tools.hardware.load import FOLDER
from tools.placement.instance_file import read_instance
from tools.search.cli import search

RECIPE = "recipes/telechat3_105b/pretrain_4k.yaml"
INSTANCE = Path(__file__).parents[3] / "tools" / "search" / "examples" / "pipeline.json"


def refused(result, *words):
    """One line that says all of `words`."""
    if isinstance(result.exception, TC3Error):
        said = str(result.exception)
    else:
        assert result.exit_code == 2, result.output
        said = result.stderr.strip().splitlines()[-1]
    assert "\n" not in said and len(said) < 800
    for word in words:
        assert word in said


def changed(path, value):
    content = json.loads(INSTANCE.read_text("utf-8"))
    place = content
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    place[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("memory_cap", math.nan, "memory_cap: NaN"),
        ("memory_cap", -1, "memory_cap: -1"),
        ("memory_cap", 10**400, "memory_cap: 1000"),
        ("body.0.fwd", math.inf, "body[0].fwd: Infinity"),
        ("body.0.count", -5, "body[0].count: -5"),
        ("body.0.count", 10**9, "body[0].count: 1000000000: want 1, 2, 3, ... up to 10,000"),
        ("body.0.count", "five", 'body[0].count: "five"'),
        ("body.0.options", [], "want a list that is not empty"),
        ("P", 10**9, "P: 1000000000: want 1, 2, 3, ... up to 1,000"),
        ("M", 96_000, "M: 96000: P x V x M is 1,536,000 passes"),
        ("static_mem", {}, "static_mem: {}"),
    ],
)
def test_instances(tmp_path, path, value, words):
    file = tmp_path / "instance.json"
    file.write_text(json.dumps(changed(path, value)), "utf-8")
    with pytest.raises(DataError) as caught:
        read_instance(file)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, "\0", '{"schema": "pp-balance/2"}'])
def test_files_that_are_no_instance(tmp_path, text):
    file = tmp_path / "instance.json"
    file.write_text(text, "utf-8")
    with pytest.raises(DataError, match=r"instance\.json"):
        read_instance(file)


def row(**more):
    config = {"model": "llama3.1-8B", "devices": 8, "gbs": 8, "seq": 4096, "tp": 8, "pp": 1}
    return {"id": "a", "hardware": "H100", "config": config, "measured": {"step_time_s": 1.0}, **more}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"rows": []}, "rows: want a list"),
        ({"rows": [row(id=None)]}, "rows[0].id"),
        ({"rows": [row(hardware=["H100"])]}, "rows[0].hardware: want a text"),
        ({"rows": [row(config=5)]}, "rows[0].config: want a mapping"),
        ({"rows": [row(measured=[1])]}, "rows[0].measured: want a mapping"),
        ({"rows": [row(measured={"step_time_s": math.nan})]}, "rows[0].measured.step_time_s: nan is not finite"),
        ({"rows": [row(measured={"step_time_s": -1})]}, "rows[0].measured.step_time_s: -1 is out of range"),
        ({"rows": [row(measured={"step_time_s": "1e3"})]}, "'1e3' is text, not a number"),
        ({"rows": [row(config={**row()["config"], "layers": 10**9})]}, "rows[0].config.layers: 1000000000 is out of"),
        ({"rows": [row(config={**row()["config"], "devices": -8})]}, "rows[0].config.devices: -8 is out of range"),
        ({"rows": [row(config={**row()["config"], "seq": math.inf})]}, "rows[0].config.seq: inf is not finite"),
    ],
)
def test_measurements(tmp_path, content, words):
    file = tmp_path / "rows.yaml"
    file.write_text(yaml.safe_dump(content), "utf-8")
    with pytest.raises(DataError) as caught:
        read_rows(file)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "rows: 2001-99-99", "[" * 100_000, "rows: *nothing", "a: \0"])
def test_files_that_hold_no_measurements(tmp_path, text):
    file = tmp_path / "rows.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(DataError, match=r"rows\.yaml"):
        read_rows(file)


def test_a_file_of_which_no_row_can_be_predicted_is_refused(tmp_path):
    file = tmp_path / "rows.yaml"
    file.write_text(yaml.safe_dump({"rows": [row(config={"model": "nobody's", "devices": 8})]}), "utf-8")
    refused(CliRunner().invoke(search, ["validate", str(file)]), "no row can be predicted (a: not given")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--devices", value) for value in ("0", "-1", "nan", "99999999999", "9" * 400, "x", "1.5")),
        *(("--gbs", value) for value in ("0", "-3", "inf", "99999999999")),
        *(("--memory", value) for value in ("0", "nan", "1e9")),
        *(("--memory-margin", value) for value in ("-0.1", "1", "nan")),
        *(("--top", value) for value in ("0", "99999")),
        *(("--effort", value) for value in ("0", "nan", "-1", "most", "1e9")),
        *(("--time-limit", value) for value in ("0", "nan", "-1")),
        *(
            ("--limit", value)
            for value in ("", "tp", "ep%0=0", "tp=1,x", "recompute=never", "tp<8,9", "tp<=" + "9" * 30)
        ),
        *(("--cluster", value) for value in ("", "nobody", "recipes")),
        *(("--html", value) for value in ("a.yaml", "a")),
    ],
)
def test_options_of_a_search(monkeypatch, option, value):
    monkeypatch.setattr("tools.search.ranking.run.search", None)  # refused before it
    refused(CliRunner().invoke(search, [RECIPE, option, value]), option if option != "--cluster" else "cluster")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--skew", "nan"), ("--skew", "0.5"), ("--skew", "1e9"), ("--ep", "0"), ("--ep", "9" * 12), ("--ep", "16,,")],
)
def test_options_of_ep_report(option, value):
    refused(CliRunner().invoke(ep_report, [RECIPE, option, value]), option)


def test_nothing_is_replaced_unasked(monkeypatch, tmp_path):
    monkeypatch.setattr("tools.search.ranking.run.search", None)  # refused before it
    file = tmp_path / "mine.yaml"
    file.write_text("mine", "utf-8")
    with pytest.raises(DataError, match=r"--write .*mine\.yaml: exists; .*--force"):
        CliRunner().invoke(search, [RECIPE, "--write", str(file)], catch_exceptions=False)
    assert file.read_text("utf-8") == "mine"


@pytest.mark.parametrize("value", [math.nan, 0, -1, "x", None])
def test_clusters(tmp_path, value):
    content = yaml.safe_load((FOLDER / "h100.yaml").read_text("utf-8"))
    content["hbm_bytes"]["value"] = value
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content), "utf-8")
    for command in (search, ep_report):
        with pytest.raises(RecipeError, match=r"mine\.yaml: hbm_bytes\.value: "):
            CliRunner().invoke(command, [RECIPE, "--cluster", str(file)], catch_exceptions=False)
