from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import DataError
from tools.estimate.configuration import Recompute
from tools.estimate.published.rows import express, read_rows

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
    with pytest.raises(DataError, match="id: missing"):
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
