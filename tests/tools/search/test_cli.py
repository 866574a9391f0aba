"""`tc3 search pipeline`: files, exit codes, JSON, picture."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from benchmarks.pipeline_search import judge
from plugins.errors import DataError
from tests.tools.layout.pipeline_instances import content
from tests.tools.profile.test_fit import HARDWARE, ROOT, perturbed, run_105b
from tests.tools.profile.traces import Trace
from tools.check.check import check_recipe
from tools.estimate.memory.room import known_errors
from tools.layout.instance import read_instance
from tools.layout.offsets import maker_of, read_layout, write_layout
from tools.profile.attribute import Measured, gap_advice, gap_lines, gap_lines_of_total
from tools.search import command
from tools.search.cli import layout, search


@pytest.fixture
def problem(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(content(stages=2, chunks=2, counts=(1, 5), cap=70.0)), "utf-8")
    return path


def run_pipeline(*words):
    return CliRunner().invoke(search, ["pipeline", *map(str, words)], catch_exceptions=False)


def test_writes_a_solution_that_can_be_judged(problem, tmp_path):
    out = tmp_path / "new" / "solution.json"
    result = run_pipeline(problem, "--effort", 20, "--out", out)
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
        result = run_pipeline(problem, "--out", tmp_path / "s.json", "--force", "--json", "--picture", picture)
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
    result = run_pipeline(path, "--out", tmp_path / "s.json", "--json")
    assert result.exit_code == 1
    assert "no plan keeps memory_cap 10" in result.stderr
    printed = json.loads(result.stdout)
    assert printed["solution"] is None and printed["lower_bound"] is None
    assert not (tmp_path / "s.json").exists()


def test_wrong_input(problem, tmp_path):
    with pytest.raises(DataError, match=r"the file must end in \.svg"):
        run_pipeline(problem, "--out", tmp_path / "s.json", "--picture", "p.gif")
    with pytest.raises(DataError, match="cannot be read"):
        run_pipeline(tmp_path / "none.json", "--out", tmp_path / "s.json")
    assert run_pipeline(problem).exit_code == 2
    assert run_pipeline(problem, "--out", tmp_path / "s.json", "--time-limit", 0).exit_code == 2


def test_out_that_cannot_be_written(problem, tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(DataError, match=r"s\.json: this path cannot be written"):
        run_pipeline(problem, "--out", tmp_path / "file" / "s.json")


def test_a_plan_is_not_replaced_unasked(problem, tmp_path):
    out = tmp_path / "s.json"
    out.write_text("mine", "utf-8")
    with pytest.raises(DataError, match=r"--out .*s\.json: the file exists; .* --force"):
        run_pipeline(problem, "--out", out)
    assert out.read_text("utf-8") == "mine"
    assert run_pipeline(problem, "--out", out, "--force").exit_code == 0 and out.read_text("utf-8") != "mine"


def test_the_cap_of_an_instance_is_taken_as_it_is_unless_a_margin_is_asked_for(problem, tmp_path):
    whole = json.loads(run_pipeline(problem, "--out", tmp_path / "a.json", "--json").stdout)
    less = json.loads(run_pipeline(problem, "--out", tmp_path / "b.json", "--json", "--memory-margin", 0.2).stdout)
    assert 0.8 * 70 < max(whole["peak_mem"]) <= 70
    assert max(less["peak_mem"]) <= 0.8 * 70
    assert less["time"] >= whole["time"]


EXAMPLES = Path(__file__).parents[3] / "tools" / "search" / "examples"


def run(*words):
    return CliRunner().invoke(search, [str(word) for word in words], catch_exceptions=False)


def test_measurements_are_predicted_and_calibrated_against(tmp_path):
    rows = json.loads(run("validate", EXAMPLES / "measurements.yaml", "--json").stdout)
    assert all(abs(row["step_error"]) < 0.1 and row["reason"] is None for row in rows) and len(rows) == 3
    out = tmp_path / "my_cluster.yaml"
    result = run("calibrate", EXAMPLES / "measurements.yaml", "--cluster", "atlas_800t_a2", "--out", out, "--json")
    found = json.loads(result.stdout)
    assert found["fitted"] and set(found["errors"]) == {row["id"] for row in rows} and not found["skipped"]
    assert out.read_text("utf-8").startswith("# my_cluster: atlas_800t_a2 with efficiencies fitted to 3 measured steps")


@pytest.mark.slow
def test_the_instance_is_solved(tmp_path):
    instance, out = EXAMPLES / "pipeline.json", tmp_path / "plan.json"
    assert run("pipeline", instance, "--effort", 1, "--out", out).exit_code == 0
    problem = read_instance(instance)
    assert judge(problem, json.loads(out.read_text("utf-8"))["solution"]).over == {}


@pytest.mark.parametrize("command", ["validate", "calibrate", "pipeline"])
def test_the_help_names_them(command):
    assert "examples" in run(command, "--help").stdout


def test_the_usage_of_the_command_for_recipes_has_no_gap():
    assert "Usage: search [OPTIONS] RECIPE" in CliRunner().invoke(search, ["x.yaml", "--efort", "3"]).output


LARGE = os.path.abspath("recipes/telechat3_438b/pretrain_4k.yaml")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base_config: {LARGE}\nmodel: {{model_config: {{offset: auto}}}}\n")
    return path


def run_layout(*words):
    return CliRunner().invoke(layout, [str(word) for word in words])


@pytest.mark.slow
def test_it_makes_what_a_launch_reads(recipe):
    result = run_layout(recipe, "--effort", "1")
    assert result.exit_code == 0, result.stderr
    assert "layout (Megatron)      E" in result.stdout and "no layout is more than" in result.stdout
    assert "step times: off by " in result.stdout and "runs of software that is newer" in result.stdout
    path = recipe.with_suffix(".layout.yaml")
    assert f"written: {path}" in result.stderr
    assert check_recipe(recipe).clean
    assert path.read_text().startswith("# What `offset: auto` stands for. Made by `tc3 search layout")


@pytest.mark.slow
def test_json_and_another_place(recipe, tmp_path):
    out = tmp_path / "elsewhere" / "layout.yaml"
    change = "context.max_device_memory=58GB"
    more = "--set", "runner_config.batch_size= \n1", "--seed", "3"
    result = run_layout(recipe, "--effort", "1", "--json", "--out", out, "--set", change, *more)
    found = json.loads(result.stdout)
    assert found["path"] == str(out) and found["offset"] == read_layout(out).offset
    assert found["predicted"]["cap_gib"] == 58 and max(found["predicted"]["stage_gib"]) <= 58 * (
        1 - known_errors().margin
    )
    assert found["layout"].startswith("E") and found["known_step_errors"]["worst"] > found["known_step_errors"]["mean"]
    assert f"--seed 3 --set {change} --set 'runner_config.batch_size= 1'`" in out.read_text().splitlines()[0]
    assert not recipe.with_suffix(".layout.yaml").exists()


@pytest.mark.slow
def test_nothing_fits(recipe):
    result = run_layout(recipe, "--effort", "1", "--set", "context.max_device_memory=20GB")
    assert result.exit_code == 1
    assert "no plan keeps memory_cap 18." in result.stderr
    assert "18.5 GiB (20.0 less a margin of 7.3 %)" in result.stderr  # the estimator's known error
    assert "--memory-margin takes a smaller one" in result.stderr
    assert not recipe.with_suffix(".layout.yaml").exists()


@pytest.mark.slow
def test_a_margin_of_ones_own(recipe, tmp_path):
    words = ["--effort", "1", "--json", "--out", tmp_path / "l.yaml", "--memory-margin", "0.2"]
    found = json.loads(run_layout(recipe, *words, "--set", "context.max_device_memory=50GB").stdout)["predicted"]
    assert found["memory_margin"] == 0.2 and max(found["stage_gib"]) <= 0.8 * 50
    assert found["fits"] == "37 of 37" and "--memory-margin 0.2" in (tmp_path / "l.yaml").read_text()


@pytest.mark.slow
def test_a_layout_file_is_made_anew_and_nothing_else_replaced(recipe, tmp_path, monkeypatch):
    mine = tmp_path / "mine.yaml"
    mine.write_text("anything: 1\n")
    result = run_layout(recipe, "--effort", "1", "--out", mine)
    assert isinstance(result.exception, DataError) and "--force" in str(result.exception)
    assert mine.read_text() == "anything: 1\n"
    assert run_layout(recipe, "--effort", "1", "--out", mine, "--force").exit_code == 0
    again = run_layout(recipe, "--effort", "1", "--out", mine)
    assert again.exit_code == 0 and "a launch reads only " in again.stderr and "once its" not in again.stderr
    monkeypatch.setattr("tools.search.cli.make_layout", lambda *given: read_layout(given[-1]))
    before = read_layout(mine)
    write_layout(replace(before, predicted={**before.predicted, "ended_by_time_limit": True}), mine, "a test")
    written, said = mine.read_bytes(), run_layout(recipe, "--out", mine).stderr
    assert f"kept, because this search found no faster layout: {mine}" in said
    assert mine.read_bytes() == written and "the time limit ended it" not in said, "it ended an earlier search"

    def late(_recipe, _cluster, budget, _seed, _margin, path):
        budget.cut = True
        kept = read_layout(path)
        return replace(kept, predicted={**kept.predicted, "step_s": 99.0, "bound_s": 0.0})

    monkeypatch.setattr("tools.search.cli.make_layout", late)
    ended = run_layout(recipe, "--out", mine)
    assert f"no faster layout, with its times predicted anew: {mine}" in ended.stderr
    assert "the time limit ended it" in ended.stderr and "99.000 s; no bound on other" in ended.stdout
    assert maker_of(mine) == "a test" and read_layout(mine).predicted["step_s"] == 99.0
    monkeypatch.undo()
    other = run_layout(recipe, "--effort", "1", "--out", mine, "--memory-margin", "0.09")
    assert f"written: {mine}" in other.stderr and "--memory-margin 0.09" in maker_of(mine), "made with another margin"


RECIPE = str(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml")
RUN = [RECIPE, "--set", "parallel_config.micro_batch_num=4"]
TRUTH = perturbed({"matmul": 0.8, "moe_s": 1.5})


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return str(Trace(run_105b(), HARDWARE, TRUTH, 1).build().write(tmp_path_factory.mktemp("trace"), 32))


@pytest.fixture
def recipe_105b(tmp_path):
    """The run that was profiled."""
    path = tmp_path / "run.yaml"
    path.write_text(f"base_config: {RECIPE}\nparallel_config:\n  micro_batch_num: 4\n", "utf-8")
    return path


def told(*words):
    ended = CliRunner().invoke(search, [str(word) for word in words], catch_exceptions=False)
    return ended.exit_code, ended.stdout


def test_a_profile_makes_a_cluster_file_that_explains_it(profile, tmp_path):
    out = tmp_path / "mine.yaml"
    code, text = told("calibrate", profile, "--recipe", *RUN, "--out", out)
    assert code == 0 and "matmuls, recomputation included" in text and "burst: stays" in text
    content = yaml.safe_load(out.read_text())
    assert content["name"] == "mine"
    assert content["efficiency"]["matmul"] == pytest.approx(TRUTH.matmul, rel=0.01)
    assert out.read_text().startswith("# mine: atlas_800t_a2 with efficiencies fitted to one profiled step")

    before = json.loads(told("explain", *RUN, "--measured", profile, "--json")[1])
    after = json.loads(told("explain", *RUN, "--measured", profile, "--cluster", out, "--json")[1])
    assert sum(line["measured"] for line in before["terms"]) == pytest.approx(before["measured"])
    largest = {line["term"] for line in before["terms"][:3]}
    assert {"matmul", "host of experts"} <= largest
    assert before["advice"] and not after["advice"]
    assert after["predicted"] == pytest.approx(after["measured"], rel=0.002)


@pytest.mark.slow
def test_a_search_from_a_profile_is_a_search_on_the_calibrated_cluster(profile, recipe_105b, tmp_path):
    limits = ["tp=8", "pp=8", "vpp=1", "cp=1", "ep=8", "mbs=1", "shard=optimizer", "recompute=full", "mode=global"]
    words = [recipe_105b, *(word for limit in limits for word in ("--limit", limit)), "--gbs", 64, "--json"]
    fitted, overlay = tmp_path / "mine.yaml", tmp_path / "best.yaml"
    assert told("calibrate", profile, "--recipe", recipe_105b, "--out", fitted)[0] == 0
    ended = run(*words, "--from", profile, "--write", overlay)
    assert ended.exit_code == 0 and "efficiencies fitted to a step of" in ended.stderr
    found, wanted, other = (
        json.loads(text) for text in (ended.stdout, told(*words, "--cluster", fitted)[1], told(*words)[1])
    )
    assert [one["step_s"] for one in found["strategies"]] == [one["step_s"] for one in wanted["strategies"]]
    assert found["strategies"][0]["step_s"] != other["strategies"][0]["step_s"]
    kept = yaml.safe_load((tmp_path / "best.cluster.yaml").read_text("utf-8"))
    assert kept["name"] == "best" and kept["efficiency"] == yaml.safe_load(fitted.read_text("utf-8"))["efficiency"]


def test_a_search_from_measured_steps_that_ends_without_a_strategy_leaves_no_cluster(tmp_path):
    """The cluster file was written before the search: a second try was refused because of it, and with `--force` an
    overlay of before stood beside the cluster of another search.
    """
    words = [RECIPE, "--from", EXAMPLES / "measurements.yaml", "--write", tmp_path / "best.yaml"]
    with pytest.raises(DataError, match="no_run: there is no such file"):
        told(*words, "--loads", tmp_path / "no_run")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_search_left_is_taken_over_and_another_cluster_is_not(tmp_path):
    """A search that was killed between its two files made the next one ask for `--force`."""
    own, kept = tmp_path / "own.yaml", tmp_path / "best.cluster.yaml"
    own.write_text("of now")
    kept.write_text("of now")
    with command._beside(kept, own, force=False):
        pass
    kept.write_text("of another search")
    words = [RECIPE, "--from", EXAMPLES / "measurements.yaml", "--write", tmp_path / "best.yaml"]
    with pytest.raises(DataError, match=r"best.cluster.yaml: .* killed before it wrote its recipe; .* --force"):
        told(*words)
    assert kept.read_text() == "of another search"


@pytest.mark.parametrize("earlier", [None, "of before"])
def test_an_overlay_that_cannot_be_written_leaves_the_cluster_as_it_was(tmp_path, earlier):
    own, kept = tmp_path / "own.yaml", tmp_path / "best.cluster.yaml"
    own.write_text("of now")
    if earlier:
        kept.write_text(earlier)
    with pytest.raises(KeyboardInterrupt), command._beside(kept, own, force=True):
        assert kept.read_text() == "of now"
        raise KeyboardInterrupt
    assert (kept.read_text() if kept.exists() else None) == earlier
    with command._beside(kept, own, force=True):
        pass
    assert kept.read_text() == "of now"


def test_a_search_from_measured_steps_says_what_the_fit_brings():
    limits = ["tp=8", "pp=8", "vpp=1", "cp=1", "ep=8", "mbs=1", "recompute=full"]
    words = [RECIPE, *(word for limit in limits for word in ("--limit", limit)), "--top", 1]
    ended = run(*words, "--from", EXAMPLES / "measurements.yaml")
    assert ended.exit_code == 0 and "to 3 measured steps" in ended.stderr and "% after" in ended.stderr


def test_of_only_a_steps_time_the_terms_stay_unknown():
    code, text = told("explain", *RUN, "--measured", "12.3")
    assert code == 0
    assert "unknown" in text and "a profile shows which term is wrong" in text
    found = json.loads(told("explain", *RUN, "--measured", "12.3", "--json")[1])
    assert all(line["measured"] is None and line["gap"] is None for line in found["terms"])
    for line in found["terms"]:
        if line["factor"]:
            rest = found["predicted"] - line["predicted"]
            assert rest + line["factor"] * line["predicted"] == pytest.approx(12.3)


def test_a_term_that_is_smaller_than_the_gap_cannot_be_it():
    factors = {line.term: line.factor for line in gap_lines_of_total({"matmul": 5.0, "tp": 1.0}, 4.0)}
    assert factors == {"matmul": pytest.approx(0.6), "tp": None}


def test_the_largest_gap_comes_first_and_is_named():
    measured = Measured(10.0, {"matmul": 4.0, "tp": 5.0, "host of layers": 1.0}, {}, scoped=True)
    found = gap_lines({"matmul": 3.5, "tp": 2.0, "host of layers": 1.0}, measured)
    assert [line.term for line in found] == ["tp", "matmul", "host of layers"]
    first, second = gap_advice(found, measured.seconds)
    assert first.startswith("tensor-parallel communication: 3 s longer")
    assert second.startswith("matmuls")
