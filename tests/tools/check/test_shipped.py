"""MindFormers' own public 105B recipe: refused, with the lines where it goes wrong."""

import importlib.util
from pathlib import Path

import pytest

from tools.check.check import check_recipe

SITE = Path(importlib.util.find_spec("mindformers").origin).parent.parent
SHIPPED = SITE / "configs" / "telechat3_moe" / "pretrain_telechat3_105b_a4b_4k.yaml"


@pytest.fixture(scope="module")
def report():
    return check_recipe(SHIPPED)


def line_of(text):
    lines = SHIPPED.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("key", "text", "severity", "word"),
    [
        ("model.model_config.offset", "offset: 0", "error", "45 layers on 8 stages leave 5 over"),
        ("context.ascend_config.parallel_speed_up_json_path", "parallel_speed_up_4M.json", "error", "no such file"),
        ("model.model_config.qk_rope_head_dim", "qk_rope_head_dim: 64", "warning", "qk_pos_emb_head_dim"),
        ("model.model_config.qk_nope_head_dim", "qk_nope_head_dim: 128", "warning", "qk_head_dim"),
        ("context.affinity_cpu_list", "affinity_cpu_list:", "warning", "a mapping"),
    ],
)
def test_its_faults_are_reported_where_they_stand(report, key, text, severity, word, tmp_path, monkeypatch):
    finding = next(finding for finding in report.findings if finding.key == key)
    assert (finding.severity, finding.line) == (severity, line_of(text))
    assert Path(finding.file) == SHIPPED
    assert word in finding.wrong
    assert finding.source.startswith("mindformers/")


def test_the_named_line_of_mindformers_is_the_one_that_fails(report):
    finding = next(finding for finding in report.findings if finding.key.endswith("offset"))
    file, _, number = finding.source.rpartition(":")
    assert "self.offset.sum() != remainder_layers" in (SITE / file).read_text("utf-8").splitlines()[int(number) - 1]
    assert "[1, 1, 1, 1, 1, 0, 0, 0]" in finding.right


def test_its_sizes_are_counted_all_the_same(report):
    assert report.table["parameters_total"] == 104_576_167_936
    assert report.table["stage_layers"] is None


@pytest.mark.parametrize("file", sorted((SITE / "configs").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_no_shipped_recipe_ends_in_a_traceback(file):
    assert isinstance(check_recipe(file).findings, list)
