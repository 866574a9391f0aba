"""Weights that were Hugging Face's train as those of a run do."""

import subprocess

import pytest

from tests.training import runs

pytestmark = pytest.mark.slow


def test_weights_that_went_to_hugging_face_and_back_begin_a_run_alike(whole, graph, corpus, tmp_path):
    weights = whole / "checkpoint" / "iteration_00000008"
    for source, target, more in (
        (weights, tmp_path / "hf", ()),
        (tmp_path / "hf", tmp_path / "ms", ("--recipe", str(whole / "recipe.yaml"), "--file-size", "0.001")),
    ):
        subprocess.run([runs.TC3, "weights", "convert", str(source), str(target), *more], check=True)
    assert len(list((tmp_path / "ms").glob("*.safetensors"))) > 1
    curves = []
    for name, begin in (("own", weights), ("converted", tmp_path / "ms")):
        run_dir = tmp_path / name
        runs.train(runs.TINY, run_dir, corpus, "--steps", "6", "--set", f"checkpoint.load_path={begin}", **graph)
        curves.append(runs.steps(run_dir))
    assert sorted(curves[0]) == list(range(1, 7)) and curves[0][1]["loss"] < runs.steps(whole)[1]["loss"] - 0.5
    for step in curves[0]:
        runs.same(curves[0][step], curves[1][step])
