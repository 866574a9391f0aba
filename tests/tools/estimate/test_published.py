"""Parameters come back from steps that were made with them; what the steps cannot tell stays and is named."""

import json
import os
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import DataError, RecipeError
from tools.estimate.configuration import MODEL_VERSION, Recompute
from tools.estimate.efficiency import NAMES, PROFILED, Efficiency, cluster, efficiency_of
from tools.estimate.published.calibrate import BOUNDS, calibrate, cluster_text
from tools.estimate.published.rows import express, read_rows
from tools.estimate.published.validate import QUANTITIES, measured_step, predict, summary
from tools.estimate.time_model import TimeModel
from tools.hardware import load_hardware
from tools.profile.study import start_of
from tools.search.measured import calibrate_command, cluster_from, validate

FILE = Path(__file__).parent / "data" / "measurements.yaml"
SOURCES = yaml.safe_load(FILE.read_text("utf-8"))["rows"]


@pytest.fixture(scope="module")
def rows():
    return {row.id: row for row in read_rows(FILE)}


def test_a_gpt_with_dimensions(rows):
    row = rows["gpt_22b_selective"]
    config = row.config
    assert (row.cluster, row.samples, row.masked) == ("a100_80g", 4, True)
    assert (config.tp, config.batch, config.micro_batches, config.dtype) == (8, 4, 1, "fp16")
    assert config.recompute == Recompute(select=((48,),), selective="attention")
    assert config.sequence_parallel
    assert not config.flash
    assert not config.model.gated


def test_a_named_model(rows):
    config = rows["llama_70b_fp8"].config
    assert config.model.layers == 80
    assert (config.dp, config.micro_batches, config.chunks, config.dtype) == (2, 128, 5, "fp8")
    assert config.schedule == "interleaved_1f1b"


def test_torchtitan(rows):
    row = rows["llama_8b_titan"]
    assert row.config.shard_weights
    assert (row.config.dp, row.config.batch, row.samples) == (8, 2, 16)
    assert row.config.recompute.selective == "operators"
    assert row.config.fused


def test_torchtitans_degrees_are_those_of_the_devices():
    config = {"model": "Llama3 8B", "devices": 64, "local_batch": 2, "recompute": "none", "seq": 8192}
    assert express({"id": "a", "hardware": "H100", "config": {**config, "parallel": "FSDP8 TP8"}}).config.dp == 8
    found = express({"id": "a", "hardware": "H100", "config": {**config, "parallel": "FSDP16 TP8"}})
    assert found.config is None and found.reason == "parallel: FSDP16 TP8 is 128 devices, and the row has 64"


SIZES = {"layers": 4, "hidden": 1024, "heads": 8, "experts": 8, "topk": 2, "moe_ffn": 256, "vocab": 1000}
LAYOUT = {"devices": 8, "tp": 1, "pp": 1, "seq": 4096, "gbs": 8, "micro_batch": 1}
TITAN = {"model": "Llama3 8B", "devices": 8, "local_batch": 2, "parallel": "FSDP8", "recompute": "none"}
LAYER = {key: SIZES[key] for key in ("hidden", "experts", "topk", "moe_ffn")} | {"ep": 8, "dispatcher": "a2a"}


@pytest.mark.parametrize(("written", "width"), [({}, 0), ({"shared": 2}, 512), ({"shared_ffn": 640}, 640)])
def test_a_shared_expert_is_given_by_number_or_by_width(written, width):
    row = {"id": "a", "hardware": "H100", "config": {**SIZES, **LAYOUT, **written}}
    assert express(row).config.model.shared_ffn == width


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**SIZES, **LAYOUT, "shared": 1, "shared_ffn": 256}, "shared_ffn"),
        ({**SIZES, **LAYOUT, "local_batch": 2}, "local_batch"),
        ({"model": "Llama3 8B", **LAYOUT, "layers": 3}, "layers"),
        ({**TITAN, "tp": 2}, "tp"),
        ({**LAYER, "seq": 4096, "micro_batch": 1, "shared": 1}, "shared"),
    ],
)
def test_a_key_that_the_form_of_a_row_does_not_read_is_refused(config, key):
    with pytest.raises(DataError, match=f"row.config.{key}: "):
        express({"id": "a", "hardware": "H100", "config": config})


@pytest.mark.parametrize(("words", "parallel"), [("full_no_sp", False), ("full", True), ("selective_sp", True)])
def test_a_row_without_sequence_parallelism_is_not_predicted_with_it(words, parallel):
    sizes = {"model": "Llama3 8B", "devices": 8, "tp": 8, "pp": 1, "seq": 4096, "gbs": 8, "micro_batch": 1}
    found = express({"id": "a", "hardware": "H100", "config": {**sizes, "recompute": words}})
    assert found.config.sequence_parallel is parallel


def test_a_mindformers_card(rows):
    config = rows["llama2_13b_card"].config
    assert config.model.ffn == 13824  # Llama's rule
    assert config.recompute.full == ((40,),)
    assert config.global_batch == 32
    assert not config.wide_gradients


def test_a_layer_alone(rows):
    config = rows["moe_layer"].config
    assert config.stage_kinds(0) == [["moe"]]
    assert config.ep_mode == "deepep"


def test_what_a_row_leaves_out_is_said(rows):
    row = rows["without_measurement"]
    assert row.use == "fit"
    assert any("vpp 2" in text for text in row.assumptions)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_configuration", "no configuration"),
        ("no_lengths", "not given: seq, gbs, tp, pp"),
        ("lora", "LoRA"),
        ("unknown_model", "models.yaml does not know it"),
        ("unknown_device", "no hardware is known"),
        ("impossible", "more than 8 devices"),
    ],
)
def test_rows_that_cannot_be_expressed_say_why(rows, name, reason):
    assert rows[name].config is None
    assert reason in rows[name].reason


@pytest.mark.parametrize("content", ["rows: 3", "a: [", "rows: [1]", "- 5"])
def test_broken_files_are_refused(tmp_path, content):
    file = tmp_path / "rows.yaml"
    file.write_text(content, "utf-8")
    with pytest.raises(DataError, match=r"rows\.yaml"):
        read_rows(file)


def test_a_missing_file_and_a_missing_id_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / "none.yaml")
    with pytest.raises(DataError, match="id: the key is missing"):
        express({"hardware": "H100"})


@given(st.data())
@settings(max_examples=60)
def test_a_row_with_anything_missing_or_odd_is_refused_or_gets_a_reason_or_a_configuration(data):
    source = data.draw(st.sampled_from(SOURCES[:6]))
    config = dict(source["config"])
    key = data.draw(st.sampled_from(sorted(config)))
    config[key] = data.draw(st.sampled_from([None, 0, 3, 1000, "word", [], {}]))
    try:
        row = express({**source, "config": config})
    except DataError as refused:
        assert "config." in str(refused)  # a block in another one's place
        return
    assert (row.config is None) == bool(row.reason)


def test_the_measured_block_changes_no_configuration(rows):
    for source in SOURCES:
        bare = {key: value for key, value in source.items() if key != "measured"}
        assert express(bare).config == rows[source["id"]].config


@pytest.fixture(scope="module")
def predictions():
    return {row.id: predict(row) for row in read_rows(FILE)}


def test_quantities_of_a_row_agree_with_each_other(predictions):
    for found in predictions.values():
        if found.row.config is None or found.row.config.layer_only:
            continue
        config, row = found.row.config, found.row
        assert found.step_time_s * found.tokens_per_s_per_device * config.devices == pytest.approx(
            row.samples * config.sequence
        )
        assert found.mfu == pytest.approx(found.tflops_per_device * 1e12 / row.hardware.peak_flops["bf16"])
        assert (found.reason is None) == (found.peak_memory_gb is not None)


def test_published_runs_are_predicted(predictions):
    # the target of the estimator: worst 25 % of step time, 10 % of memory
    errors = {name: found.step_error for name, found in predictions.items() if found.step_error is not None}
    assert set(errors) == {"gpt_22b_selective", "llama_70b_fp8", "llama_8b_titan", "llama2_13b_card", "moe_layer"}
    assert max(map(abs, errors.values())) < 0.25
    memory = [found.memory_error for found in predictions.values() if found.memory_error is not None]
    assert len(memory) == 2
    assert max(map(abs, memory)) < 0.10


def test_every_null_has_a_reason(predictions):
    for found in predictions.values():
        if any(getattr(found, name) is None for name in QUANTITIES):
            assert found.reason


def test_memory_of_a_schedule_that_cannot_run_is_left_out(predictions):
    found = predictions["too_few_micro_batches"]
    assert found.step_time_s > 0
    assert found.peak_memory_gb is None
    assert "needs at least 8 micro-batches" in found.reason


def test_a_measured_rate_becomes_seconds(predictions):
    row = replace(predictions["llama_70b_fp8"].row, measured={"tflops_per_gpu": 500})
    # 256 samples of 100 TFLOP over 64 devices at 500 TFLOP/s
    assert measured_step(row, 1e14) == pytest.approx(256 * 1e14 / 64 / 500e12)
    assert measured_step(replace(row, measured={"mfu_percent": "47 -> 42"}), 1e14) is None


def test_other_efficiencies_give_other_times(predictions):
    row = predictions["llama2_13b_card"].row
    slower = replace(efficiency_of(row.hardware), matmul=0.3)
    assert predict(row, slower).step_time_s > predictions["llama2_13b_card"].step_time_s


def test_summary_counts_only_rows_to_fit(predictions):
    found = summary(predictions.values())
    assert found["all"]["rows"] == 5
    assert found["device a100_80g"]["mean"] == found["group korthikanti22"]["worst"]
    context = replace(predictions["moe_layer"], row=replace(predictions["moe_layer"].row, use="context_only"))
    assert summary([context]) == {}


def test_command_prints_json_and_a_table():
    runner = CliRunner()
    result = runner.invoke(validate, [str(FILE), "--json"])
    assert isinstance(result.exception, DataError)  # one of the rows is on a device that nobody knows
    rows = json.loads(result.stdout)
    assert len(rows) == 13
    assert all(set(row) >= {"id", "reason", *QUANTITIES} for row in rows)
    assert "step_error" not in rows[5]  # no measurement, no error
    text = runner.invoke(validate, [str(FILE)]).stdout
    assert "llama_70b_fp8" in text
    assert "step time, device h100: mean" in text


def test_an_unknown_device_is_refused_with_what_is_known():
    with pytest.raises(DataError, match=r"measurements.yaml: rows\[11\].hardware: .*'TPU v9'; known are a100_80g, .*"):
        CliRunner().invoke(validate, [str(FILE)], catch_exceptions=False)


@pytest.mark.parametrize("hardware", ["Atlas 800T A2", "atlas_800t_a2", "Atlas 800T A2, 8 a node", "Ascend 910B"])
def test_a_device_is_taken_by_its_name_and_by_that_of_its_cluster(tmp_path, hardware):
    file = tmp_path / "rows.yaml"
    config = {"model": "llama3.1-8B", "devices": 8, "gbs": 8, "seq": 4096, "tp": 8, "pp": 1}
    file.write_text(json.dumps({"rows": [{"id": "a", "hardware": hardware, "config": config}]}), "utf-8")
    result = CliRunner().invoke(validate, [str(file), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)[0]["step_time_s"] > 0


def test_a_slip_in_a_devices_name_is_suggested_away(tmp_path):
    file = tmp_path / "rows.yaml"
    file.write_text(json.dumps({"rows": [{"id": "a", "hardware": "atlas_800t_a3", "config": {"layers": 1}}]}), "utf-8")
    with pytest.raises(DataError, match="did you mean 'atlas_800t_a2'"):
        CliRunner().invoke(validate, [str(file)], catch_exceptions=False)


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


def test_a_cluster_file_says_to_which_version_of_the_model_it_was_fitted(tmp_path, capsys):
    """A file that an older model was fitted to was read like a new one."""
    found = calibrate([express(row) for row in rows_of(START, dense_configs()[:1])], CLUSTER, START)
    content = yaml.safe_load(cluster_text(CLUSTER, "mine", found, "measured.yaml"))
    assert content["estimator"] == MODEL_VERSION
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    assert efficiency_of(cluster(str(path))) and capsys.readouterr().err == ""
    path.write_text(yaml.safe_dump(content | {"estimator": "older"}))
    assert TimeModel(cluster(str(path)))
    assert f"to version older, and the present version of the model of time and memory is {MODEL_VERSION}" in (
        capsys.readouterr().err
    )
    assert start_of(str(path), None) == efficiency_of(replace(cluster(str(path)), estimator=MODEL_VERSION))
    del content["estimator"]
    path.write_text(yaml.safe_dump(content))
    assert TimeModel(cluster(str(path))) and TimeModel(cluster(str(path)))
    assert capsys.readouterr().err.count("mine.yaml: estimator: the key is missing") == 1
    path.write_text(yaml.safe_dump(content | {"estimator": 12}))
    with pytest.raises(RecipeError, match="estimator: the value must be text, not 12"):
        cluster(str(path))


@pytest.mark.slow
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
    text, _ = cluster_from(measured, tmp_path / "not_read.yaml", CLUSTER, "mine")
    assert text == out.read_text(), "tc3 search --from makes the same fit"


def test_a_file_with_half_of_the_efficiencies_is_refused(tmp_path):
    found = calibrate([express(row) for row in rows_of(START, dense_configs()[:1])], CLUSTER, START)
    content = yaml.safe_load(cluster_text(CLUSTER, "half", found, "measured.yaml"))
    del content["efficiency"]["link"]
    (tmp_path / "half.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(
        RecipeError, match=r"efficiency: the section must be a mapping with at least the keys matmul, .*; it lacks "
    ):
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
