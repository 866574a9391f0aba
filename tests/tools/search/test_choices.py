"""`tc3 search --recompute-operators` and `--swap`: asked for they stand in the answer, else the answer is as before."""

import functools
import json

import pytest
from click.testing import CliRunner

from tools.check.check import check_recipe
from tools.estimate.configuration import PATTERNS
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import peak_memory
from tools.hardware.units import GIB
from tools.recipe.load import load_recipe
from tools.search.cli import search
from tools.search.ranking import workers

RECIPE = "recipes/telechat3_105b/pretrain_4k_searched.yaml"
LIMITS = ("tp=1", "pp=8", "vpp=1", "cp=1", "ep=8", "mbs=1", "shard=optimizer", "recompute=planned")


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(workers, "processes", lambda: 1)


def asked(*words):
    limits = [word for limit in LIMITS for word in ("--limit", limit)]
    words = [RECIPE, *limits, "--effort", "1", "--top", "1", "--json", *words]
    return CliRunner().invoke(search, list(map(str, words)), catch_exceptions=False)


@functools.cache
def plain_answer():
    """Without either option."""
    return json.loads(asked().stdout)


@pytest.mark.slow
def test_the_answer_with_groups_is_not_slower_and_is_written(tmp_path):
    plain = plain_answer()
    overlay = tmp_path / "best.yaml"
    found = json.loads(asked("--recompute-operators", "--write", overlay).stdout)
    (before,), (after,) = plain["strategies"], found["strategies"]
    assert "swapping" not in plain and set(before["recompute"]) == {"full", "select", "communication"}
    assert after["step_s"] < before["step_s"]
    groups = set(after["recompute"]) & set(PATTERNS)
    assert groups
    assert check_recipe(load_recipe(overlay)).errors == []
    config = from_recipe(load_recipe(overlay))
    assert {name: [list(row) for row in table] for name, table in config.recompute.operators} == {
        name: after["recompute"][name] for name in groups
    }
    assert peak_memory(config) / GIB == pytest.approx(after["peak_gib"])


@pytest.mark.slow
def test_swapping_is_said_and_changes_nothing_else():
    plain, found = plain_answer(), json.loads(asked("--swap").stdout)
    assert found["strategies"] == plain["strategies"]
    swapping = found["swapping"]
    assert not swapping["runnable"] and swapping["step_s"] <= swapping["step_s_without"]
    assert sum(swapping["layers"].values()) == 45 and len(swapping["swapping_by_stage"]) == 8
    assert any("keep, recompute or swap" in line for line in found["reasons"])
    assert any("only simulated" in line for line in found["reasons"])
