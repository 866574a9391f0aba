"""The committed table of the report's sections 4.3 and 4.4."""

import pytest
from click.testing import CliRunner

from benchmarks.report_case import DEGREES, MODELS, cases, main, markdown
from tests.tools.check.test_mutations import ROOT
from tests.tools.layout.test_advise import sent_forward
from tools.hardware import load_hardware


def test_the_case_of_the_report():
    rows = cases(load_hardware("atlas_800t_a2"), skew=1.0)
    assert [(row.model, row.ep) for row in rows] == [(model, ep) for model in MODELS for ep in DEGREES]
    assert [(row.model, row.ep) for row in rows if row.refused] == [("105b", 128)]
    for row in rows:
        if not row.advice:
            continue
        modes, model = row.advice.modes, row.advice.config.model
        # the closed form of section 4.3: nodes / top-k, within the metadata
        sent = [sent_forward(row.advice, mode) for mode in ("hierarchical", "global")]
        ratio = sent[0] / sent[1]
        assert ratio == pytest.approx(row.advice.topology.nodes / model.top_k, rel=0.02)
        assert modes["deduplicated"].inter_bytes <= modes["hierarchical"].inter_bytes
        before, after = row.hierarchical.share_of_communication
        assert after <= before * (1 + 1e-12)
        if row.ep == 16:
            assert row.gain("hierarchical") > 0
    grown = {row.ep: row.mesh for row in rows if row.model == "105b"}
    assert grown[16] == "dp4 tp8 pp8" and grown[64] == "dp8* tp8 pp8"


def test_the_table_is_markdown_and_says_what_it_is():
    result = CliRunner().invoke(main, [])
    table = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(MODELS) * len(DEGREES)
    assert len({line.count("|") for line in table}) == 1
    for word in ("modelled", "the report says about 15%", "30% -> 5%", "assumed in", "does not divide 192 experts"):
        assert word in result.stdout
    assert markdown(cases(load_hardware("atlas_800t_a2"))) == result.stdout


def test_the_committed_table_is_current():
    file = ROOT / "benchmarks" / "report_case.md"
    made = CliRunner().invoke(main, []).stdout
    assert file.read_text() == made, "python -m benchmarks.report_case > benchmarks/report_case.md"
