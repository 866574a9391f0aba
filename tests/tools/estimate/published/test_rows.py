import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import DataError
from tools.estimate.configuration import Recompute
from tools.estimate.efficiency import efficiency_of
from tools.estimate.published.rows import express, read_rows
from tools.estimate.published.validate import QUANTITIES, measured_step, predict, summary
from tools.search.measured import validate

FILE = Path(__file__).parents[1] / "data" / "measurements.yaml"
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
