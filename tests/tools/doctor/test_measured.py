"""Workers of a host beside those that a first hour measured: `tc3 doctor --probe --measured BUNDLE`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from plugins.errors import DataError
from tests.tools.doctor.reports import probe, scale
from tools.doctor import cli
from tools.doctor.outliers import against
from tools.measured import FORMAT, OUTCOMES, Bundle, Manifest, read_bundle, recipe_digest, software, write_bundle

ROOT = Path(__file__).parents[3]
MINI = ROOT / "recipes" / "mini" / "pretrain.yaml"


def bundle(path, probes):
    """A bundle of an hour that probed these hosts."""
    manifest = Manifest(
        format=FORMAT, made="2026-11-27T00:00:00Z", device="910B3", devices=16, simulated=False, names="plain",
        recipe="recipes/mini/pretrain.yaml", digest=recipe_digest(MINI), versions=software(), verdict="go",
    )  # fmt: skip
    rows = [{"check": "devices", "verdict": "ok", "evidence": {"probes": probes}, "findings": [], "seconds": 1.0}]
    write_bundle(path, manifest, {OUTCOMES: json.dumps(rows) + "\n"})
    return read_bundle(path)


@pytest.fixture
def measured(tmp_path) -> Bundle:
    return bundle(tmp_path / "b.zip", {host: probe(8, seed=number) for number, host in enumerate("ab")})


@pytest.mark.parametrize("seed", range(20))
def test_a_host_like_those_of_the_hour_is_ok(measured, seed):
    (found,) = against(probe(8, seed=100 + seed), measured)
    assert (found.verdict, found.seen) == ("ok", "8 workers are as fast as 16 that were measured")


@pytest.mark.parametrize(("measure", "factor"), [("matmul", 0.5), ("memory", 0.5), ("disk", 0.1)])
def test_a_host_whose_workers_are_all_slow_is_named_which_its_own_peers_do_not_show(measured, measure, factor):
    own = probe(8, seed=7)
    for worker in own["workers"]:
        scale(worker[measure], factor)
    found = against(own, measured)
    assert {item.verdict for item in found} == {"fail"} and len(found) == 8
    assert f"worker 0: {measure} " in found[0].seen and "times as long" in found[0].seen and found[0].mend


def test_slow_in_some_rounds_only_is_a_neighbour_on_the_host(measured):
    own = probe(8, seed=7)
    own["workers"][3]["matmul"][:5] = [rate / 2 for rate in own["workers"][3]["matmul"][:5]]
    assert {item.verdict for item in against(own, measured)} == {"ok"}


def test_another_kind_of_device_is_unknown_and_not_ok(measured):
    own = probe(2, seed=7)
    for worker in own["workers"]:
        worker["kind"] = "another device"
    (found,) = against(own, measured)
    assert (found.verdict, found.seen) == ("unknown", "the bundle has no worker of the kind another device")


def test_a_bundle_without_probes_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"e\.zip: the bundle has no probes; tc3 firsthour read"):
        against(probe(2), bundle(tmp_path / "e.zip", {}))


def test_the_command_adds_what_it_finds_to_the_report(measured, monkeypatch):
    own = probe(8, seed=7)
    for worker in own["workers"]:
        scale(worker["matmul"], 0.5)
    monkeypatch.setattr(cli, "probe_if", lambda *words: own)
    monkeypatch.setattr(cli, "examine", lambda *words: [])
    done = CliRunner().invoke(cli.doctor, ["--probe", "--measured", str(measured.path), "--json"])
    assert done.exit_code == 1
    found = [item for item in json.loads(done.stdout)["findings"] if item["verdict"] == "fail"]
    assert len(found) == 8 and all("first hour measured" in item["seen"] for item in found)
    assert "16 x 910B3" in done.stderr
