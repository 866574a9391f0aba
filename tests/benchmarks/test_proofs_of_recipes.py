"""The table of proofs: which recipes are in it, and what a line says."""

import json

from click.testing import CliRunner

from benchmarks import proofs_of_recipes
from benchmarks.proofs_of_recipes import ROOT, main, row_of, shipped

LARGE = ROOT / "recipes" / "telechat3_36b" / "context_32k.yaml"
REPORT = {"weights": 21, "proven": 19, "wrong": 0, "unknown": 2, "problems": [], "missing": {"A": 3, "B": 1},
          "stages": [{"operators": 900}, {"operators": 600}]}  # fmt: skip


def test_parts_cards_and_small_recipes_are_left_out():
    found = shipped()
    assert LARGE in found and len(found) > 30
    assert not [path for path in found if path.parent.name in ("base", "mini") or path.name == "card.yaml"]


def test_a_line_tells_the_layout_and_where_the_proof_ends():
    line = row_of(LARGE, REPORT)
    assert line == (
        "| `telechat3_36b/context_32k.yaml` | tp8 cp4 pp2 (64 devices) | 1,500 | 19 of 21 | 0 | 2 | 0 | `A` 3, `B` 1 |"
    )
    many = {**REPORT, "missing": dict.fromkeys("ABCDE", 1)}
    assert row_of(LARGE, many).endswith("`D` 1 and more |")


def test_a_violation_and_a_refusal_end_with_1(monkeypatch):
    told = {0: (0, json.dumps(REPORT), ""), 1: (1, json.dumps({**REPORT, "problems": ["x"]}), ""), 2: (2, "", "a\nno.")}
    for number, code in ((0, 0), (1, 1), (2, 1)):
        monkeypatch.setattr(proofs_of_recipes, "proof_of", lambda _, number=number: told[number])
        result = CliRunner().invoke(main, [str(LARGE)])
        assert result.exit_code == code
        assert ("refused" in result.output and "no." in result.output) == (number == 2)
