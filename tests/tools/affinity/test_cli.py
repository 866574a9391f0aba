"""`tc3 affinity` from the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from plugins.errors import ClusterError, RecipeError
from tests.tools.process.roots import atlas, cpuset_files, numa_files, write
from tools.affinity.cli import affinity

ROOT = Path(__file__).resolve().parents[3]
MINI, LARGE = str(ROOT / "recipes/mini/pretrain_dp2.yaml"), str(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml")


@pytest.fixture(autouse=True)
def _no_visible_devices(monkeypatch):
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)


def call(root, *arguments):
    """Standard output of `tc3 affinity --root ...`."""
    result = CliRunner().invoke(affinity, ["--root", str(root.path), *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_recipe_for_a_cluster_fills_a_node(tmp_path):
    out = call(atlas(tmp_path), LARGE)
    assert "node 6  144-167  IS0000000000011111111111  <- NPU 0, 1" in out
    assert "worker 7 (NPU 7, node 2): 0 remote; main 61-71,85-91, runtime 63-71,85-91, minddata 92-95" in out
    assert "cores of another socket than their NPU's: 0 here, 96 under msrun --bind_core=True" in out
    assert "msrun --bind_numa FILE" in out and "IRQBALANCE_BANNED_CPULIST=2-23,26-47" in out


def test_json_and_the_file_agree(tmp_path):
    file = tmp_path / "bind.json"
    answer = json.loads(call(atlas(tmp_path / "host"), LARGE, "--bind-file", str(file), "--json"))
    assert json.loads(file.read_text()) == answer["bind_file"]
    first = answer["workers"][0]
    assert (first["npu"], first["remote"], first["msrun_bind_core"]["remote"]) == (0, 0, 0)
    assert first["prefix"] == "numactl --membind 6-7 --physcpubind 146-156,170-180"
    assert answer["msrun_refuses"] is None and answer["notes"] == []


def test_prefixes_where_msrun_cannot_bind(tmp_path):
    out = call(atlas(tmp_path, version=2), LARGE)
    assert "  worker 7: numactl --membind 2-3 --physcpubind 61-71,85-95" in out
    assert "and msrun --bind_core=True would bind nothing" in out and "msrun --bind_numa FILE" not in out


def test_a_recipe_on_cpu_takes_no_npu(tmp_path):
    answer = json.loads(call(atlas(tmp_path), MINI, "--json"))
    assert [row["npu"] for row in answer["workers"]] == [None, None]
    assert list(answer["bind_file"]["bind_cpu"]) == ["device0", "device1"]


def test_a_recipe_for_npus_on_a_host_without(tmp_path):
    root = write(tmp_path, {**numa_files(2, 64, 2), **cpuset_files("0-63")})
    answer = json.loads(call(root, LARGE, "--json"))
    assert len(answer["workers"]) == 8 and "no NPU is seen here" in answer["notes"][0]


def test_more_workers_than_cores(tmp_path):
    root = write(tmp_path, {**numa_files(1, 2, 1), **cpuset_files("0-1")})
    out = call(root, "--workers", "4")
    assert "worker 3: not bound" in out and "note: 4 workers, but 2 cores are allowed" in out
    with pytest.raises(ClusterError, match="none is bound"):
        call(root, "--workers", "4", "--bind-file", str(tmp_path / "bind.json"))
    assert not (tmp_path / "bind.json").exists()


def test_what_is_refused(tmp_path):
    root = write(tmp_path, {**numa_files(1, 2, 1), **cpuset_files("0-1")})
    with pytest.raises(ClusterError, match="name a RECIPE, or give the number of --workers"):
        call(root)
    with pytest.raises(ClusterError, match="--workers 0 is out of range"):
        call(root, "--workers", "0")
    with pytest.raises(RecipeError, match="no such recipe"):
        call(root, "missing.yaml")


def test_this_host():
    """On any host the command makes a plan for one worker, from real files and tools."""
    result = CliRunner().invoke(affinity, ["--workers", "1", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["workers"][0]["cores"]
