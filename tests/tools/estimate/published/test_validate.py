import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from plugins.errors import DataError
from tools.estimate.efficiency import efficiency_of
from tools.estimate.published.rows import read_rows
from tools.estimate.published.validate import QUANTITIES, measured_step, predict, summary
from tools.search.validate_cli import validate

FILE = Path(__file__).parents[1] / "data" / "measurements.yaml"


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
    assert "want at least 8 micro-batches" in found.reason


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
