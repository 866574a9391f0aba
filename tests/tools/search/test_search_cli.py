"""`tc3 search pipeline`: files, exit codes, JSON, picture."""

import json

import pytest
from click.testing import CliRunner

from plugins.errors import DataError
from tests.tools.placement.pipeline_instances import content
from tools.placement.instance_file import judge, read_instance
from tools.search.cli import search


@pytest.fixture
def problem(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(content(stages=2, chunks=2, counts=(1, 5), cap=70.0)), "utf-8")
    return path


def run(*words):
    return CliRunner().invoke(search, ["pipeline", *map(str, words)], catch_exceptions=False)


def test_writes_a_solution_that_can_be_judged(problem, tmp_path):
    out = tmp_path / "new" / "solution.json"
    result = run(problem, "--effort", 20, "--out", out)
    assert result.exit_code == 0
    written = json.loads(out.read_text("utf-8"))
    assert list(written) == ["name", "solution", "time", "peak_mem"]
    judged = judge(read_instance(problem), written["solution"])
    assert (written["time"], written["peak_mem"]) == (judged.time, judged.peak.tolist())
    assert judged.over == {}
    assert f"simulated step {written['time']:.6g}" in result.stdout and "proven best" in result.stdout
    assert [path.name for path in out.parent.iterdir()] == ["solution.json"]


def test_json_on_stdout_and_a_picture_that_does_not_change(problem, tmp_path):
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        result = run(problem, "--out", tmp_path / "s.json", "--force", "--json", "--picture", picture)
    printed = json.loads(result.stdout)
    assert printed["proven"] is True and printed["gap"] <= 1e-6
    assert printed["lower_bound"] <= printed["time"]
    assert {key: printed[key] for key in ("name", "solution", "time", "peak_mem")} == json.loads(
        (tmp_path / "s.json").read_text("utf-8")
    )
    texts = [picture.read_text("utf-8") for picture in pictures]
    assert texts[0] == texts[1]
    assert "stage 1" in texts[0] and "backward, chunk 1" in texts[0]


def test_no_plan_is_exit_1_and_no_file(tmp_path):
    path = tmp_path / "tight.json"
    path.write_text(json.dumps(content(cap=10.0)), "utf-8")
    result = run(path, "--out", tmp_path / "s.json", "--json")
    assert result.exit_code == 1
    assert "no plan keeps memory_cap 10" in result.stderr
    printed = json.loads(result.stdout)
    assert printed["solution"] is None and printed["lower_bound"] is None
    assert not (tmp_path / "s.json").exists()


def test_wrong_input(problem, tmp_path):
    with pytest.raises(DataError, match=r"want a file that ends in \.svg"):
        run(problem, "--out", tmp_path / "s.json", "--picture", "p.gif")
    with pytest.raises(DataError, match="cannot be read"):
        run(tmp_path / "none.json", "--out", tmp_path / "s.json")
    assert run(problem).exit_code == 2
    assert run(problem, "--out", tmp_path / "s.json", "--time-limit", 0).exit_code == 2


def test_out_that_cannot_be_written(problem, tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(DataError, match=r"s\.json: cannot be written"):
        run(problem, "--out", tmp_path / "file" / "s.json")


def test_a_plan_is_not_replaced_unasked(problem, tmp_path):
    out = tmp_path / "s.json"
    out.write_text("mine", "utf-8")
    with pytest.raises(DataError, match=r"--out .*s\.json: exists; .* --force"):
        run(problem, "--out", out)
    assert out.read_text("utf-8") == "mine"
    assert run(problem, "--out", out, "--force").exit_code == 0 and out.read_text("utf-8") != "mine"


def test_the_cap_of_an_instance_is_taken_as_it_is_unless_a_margin_is_asked_for(problem, tmp_path):
    whole = json.loads(run(problem, "--out", tmp_path / "a.json", "--json").stdout)
    less = json.loads(run(problem, "--out", tmp_path / "b.json", "--json", "--memory-margin", 0.2).stdout)
    assert 0.8 * 70 < max(whole["peak_mem"]) <= 70
    assert max(less["peak_mem"]) <= 0.8 * 70
    assert less["time"] >= whole["time"]
