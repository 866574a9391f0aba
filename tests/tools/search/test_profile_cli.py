"""`tc3 search calibrate PROFILE` and `tc3 search explain` from the command line."""

import json

import pytest
import yaml
from click.testing import CliRunner

from tests.tools.profile.test_recovery import HARDWARE, ROOT, perturbed, run_of
from tests.tools.profile.traces import Trace
from tools.profile.attribute import Measured
from tools.search.cli import search
from tools.search.explain import advice, lines, lines_of_total

RECIPE = str(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml")
RUN = [RECIPE, "--set", "parallel_config.micro_batch_num=4"]
TRUTH = perturbed({"matmul": 0.8, "moe_s": 1.5})


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return str(Trace(run_of(), HARDWARE, TRUTH, 1).build().write(tmp_path_factory.mktemp("trace"), 32))


def run(*words):
    ended = CliRunner().invoke(search, [str(word) for word in words], catch_exceptions=False)
    return ended.exit_code, ended.stdout


def test_a_profile_makes_a_cluster_file_that_explains_it(profile, tmp_path):
    out = tmp_path / "mine.yaml"
    code, text = run("calibrate", profile, "--recipe", *RUN, "--out", out)
    assert code == 0 and "matmuls, recomputation included" in text and "burst: stays" in text
    content = yaml.safe_load(out.read_text())
    assert content["name"] == "mine"
    assert content["efficiency"]["matmul"] == pytest.approx(TRUTH.matmul, rel=0.01)
    assert out.read_text().startswith("# mine: atlas_800t_a2 with efficiencies fitted to one profiled step")

    before = json.loads(run("explain", *RUN, "--measured", profile, "--json")[1])
    after = json.loads(run("explain", *RUN, "--measured", profile, "--cluster", out, "--json")[1])
    assert sum(line["measured"] for line in before["terms"]) == pytest.approx(before["measured"])
    largest = {line["term"] for line in before["terms"][:3]}
    assert {"matmul", "host of experts"} <= largest
    assert before["advice"] and not after["advice"]
    assert after["predicted"] == pytest.approx(after["measured"], rel=0.002)


def test_of_a_steps_time_alone_the_terms_stay_unknown():
    code, text = run("explain", *RUN, "--measured", "12.3")
    assert code == 0
    assert "unknown" in text and "a profile tells which it was" in text
    found = json.loads(run("explain", *RUN, "--measured", "12.3", "--json")[1])
    assert all(line["measured"] is None and line["gap"] is None for line in found["terms"])
    for line in found["terms"]:
        if line["factor"]:
            rest = found["predicted"] - line["predicted"]
            assert rest + line["factor"] * line["predicted"] == pytest.approx(12.3)


def test_a_term_that_is_smaller_than_the_gap_cannot_be_it():
    factors = {line.term: line.factor for line in lines_of_total({"matmul": 5.0, "tp": 1.0}, 4.0)}
    assert factors == {"matmul": pytest.approx(0.6), "tp": None}


def test_the_largest_gap_comes_first_and_is_named():
    measured = Measured(10.0, {"matmul": 4.0, "tp": 5.0, "host of layers": 1.0}, {}, scoped=True)
    found = lines({"matmul": 3.5, "tp": 2.0, "host of layers": 1.0}, measured)
    assert [line.term for line in found] == ["tp", "matmul", "host of layers"]
    first, second = advice(found, measured.seconds)
    assert first.startswith("tensor-parallel communication: 3 s longer")
    assert second.startswith("matmuls")
