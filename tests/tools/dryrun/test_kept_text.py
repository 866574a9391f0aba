"""Texts of final graphs are kept where somebody asks for them, and compiled once."""

import pytest

from plugins.errors import ClusterError
from tests.tools.fusion.small_graphs import node, text_of
from tools.dryrun import compiles
from tools.dryrun.compile import cache
from tools.dryrun.compile.rank import keep_text
from tools.dryrun.graph.text import read_graph
from tools.dryrun.jobs import plan_jobs
from tools.recipe.load import load_recipe

TENSOR = ("Float32", (2, 2))
TEXT = text_of([node("Exp", ["x"], [TENSOR], TENSOR)])


def test_what_is_kept_is_read_again(tmp_path):
    plain, kept = tmp_path / "a.ir", tmp_path / "deep" / "a.ir.gz"
    plain.write_text(TEXT, encoding="utf-8")
    keep_text(plain, kept)
    assert read_graph(kept) == read_graph(plain)
    assert [each.op for each in read_graph(kept).graphs["main"]] == ["Exp"]
    kept.write_bytes(kept.read_bytes()[:-20])
    with pytest.raises(ClusterError, match="cannot be read"):
        read_graph(kept)


def test_a_result_without_its_text_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = plan_jobs(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"), (0, 512))
    asked = []

    def run_jobs(jobs, told, at_once, texts=()):
        asked.append([job.rank for job in jobs])
        for file in texts:
            file.write_bytes(b"")
        return [{"rank": job.rank} for job in jobs]

    monkeypatch.setattr(compiles, "run_jobs", run_jobs)
    for job in plan.jobs:
        cache.keep(job, {"rank": job.rank})
    compiles.compile_all(plan, 1, True)
    assert asked == []
    compiles.compile_all(plan, 1, True, texts=True)
    compiles.compile_all(plan, 1, True, texts=True)
    assert asked == [[0, 512]]
    cache.text_of(plan.jobs[1]).unlink()
    compiles.compile_all(plan, 1, True, texts=True)
    assert asked == [[0, 512], [512]]
