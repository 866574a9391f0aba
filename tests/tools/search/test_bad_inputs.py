"""Files and options that are none: one line, at once, and nothing written (tests/inputs has more)."""

import json
import math
import multiprocessing
import os
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from plugins.errors import DataError, RecipeError, TC3Error
from tests.tools.search.test_search import RECIPE, run
from tools.check.check import check_recipe
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import all_stages
from tools.estimate.published.rows import read_rows
from tools.experts.cost import ep_report
from tools.hardware.load import FOLDER
from tools.layout.instance import read_instance
from tools.layout.resolve import resolve
from tools.recipe.load import load_recipe
from tools.search.cli import search

ROOT = Path(__file__).parents[3]
PRETRAIN_4K = "recipes/telechat3_105b/pretrain_4k.yaml"
INSTANCE = Path(__file__).parents[3] / "tools" / "search" / "examples" / "pipeline.json"


def refused(result, *words):
    """Check that the error is one line that contains all of `words`."""
    if isinstance(result.exception, TC3Error):
        said = str(result.exception)
    else:
        assert result.exit_code == 2, result.output
        said = result.stderr.strip().splitlines()[-1]
    assert "\n" not in said and len(said) < 800
    for word in words:
        assert word in said


def changed(path, value):
    content = json.loads(INSTANCE.read_text("utf-8"))
    place = content
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    place[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("memory_cap", math.nan, "memory_cap: NaN"),
        ("memory_cap", -1, "memory_cap: -1"),
        ("memory_cap", 10**400, "memory_cap: 1000"),
        ("body.0.fwd", math.inf, "body[0].fwd: Infinity"),
        ("body.0.count", -5, "body[0].count: -5"),
        ("body.0.count", 10**9, "body[0].count: 1000000000: the value must be 1, 2, 3, ... up to 10,000"),
        ("body.0.count", "five", 'body[0].count: "five"'),
        ("body.0.options", [], "must be a list that is not empty"),
        ("P", 10**9, "P: 1000000000: the value must be 1, 2, 3, ... up to 1,000"),
        ("M", 96_000, "M: 96000: P x V x M is 1,536,000 passes"),
        ("static_mem", {}, "static_mem: {}"),
    ],
)
def test_instances(tmp_path, path, value, words):
    file = tmp_path / "instance.json"
    file.write_text(json.dumps(changed(path, value)), "utf-8")
    with pytest.raises(DataError) as caught:
        read_instance(file)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, "\0", '{"schema": "pp-balance/2"}'])
def test_files_that_are_no_instance(tmp_path, text):
    file = tmp_path / "instance.json"
    file.write_text(text, "utf-8")
    with pytest.raises(DataError, match=r"instance\.json"):
        read_instance(file)


def row(**more):
    config = {"model": "llama3.1-8B", "devices": 8, "gbs": 8, "seq": 4096, "tp": 8, "pp": 1}
    return {"id": "a", "hardware": "H100", "config": config, "measured": {"step_time_s": 1.0}, **more}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"rows": []}, "rows: the value must be a list"),
        ({"rows": [row(id=None)]}, "rows[0].id"),
        ({"rows": [row(hardware=["H100"])]}, "rows[0].hardware: the value must be text"),
        ({"rows": [row(config=5)]}, "rows[0].config: the value must be a mapping"),
        ({"rows": [row(measured=[1])]}, "rows[0].measured: the value must be a mapping"),
        ({"rows": [row(measured={"step_time_s": math.nan})]}, "rows[0].measured.step_time_s: nan is not finite"),
        ({"rows": [row(measured={"step_time_s": -1})]}, "rows[0].measured.step_time_s: -1 is out of range"),
        ({"rows": [row(measured={"step_time_s": "1e3"})]}, "'1e3' is text, not a number"),
        ({"rows": [row(config={**row()["config"], "tp": 10**9})]}, "rows[0].config.tp: 1000000000 is out of"),
        ({"rows": [row(config={**row()["config"], "devices": -8})]}, "rows[0].config.devices: -8 is out of range"),
        ({"rows": [row(config={**row()["config"], "seq": math.inf})]}, "rows[0].config.seq: inf is not finite"),
    ],
)
def test_measurements(tmp_path, content, words):
    file = tmp_path / "rows.yaml"
    file.write_text(yaml.safe_dump(content), "utf-8")
    with pytest.raises(DataError) as caught:
        read_rows(file)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "rows: 2001-99-99", "[" * 100_000, "rows: *nothing", "a: \0"])
def test_files_that_hold_no_measurements(tmp_path, text):
    file = tmp_path / "rows.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(DataError, match=r"rows\.yaml"):
        read_rows(file)


def test_a_file_of_which_no_row_can_be_predicted_is_refused(tmp_path):
    file = tmp_path / "rows.yaml"
    file.write_text(yaml.safe_dump({"rows": [row(config={"model": "nobody's", "devices": 8})]}), "utf-8")
    refused(
        CliRunner().invoke(search, ["validate", str(file)]), "the estimator can predict none of the rows (a: not given"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--devices", value) for value in ("0", "-1", "nan", "99999999999", "9" * 400, "x", "1.5")),
        *(("--gbs", value) for value in ("0", "-3", "inf", "99999999999")),
        *(("--memory", value) for value in ("0", "nan", "1e9")),
        *(("--memory-margin", value) for value in ("-0.1", "1", "nan")),
        *(("--top", value) for value in ("0", "99999")),
        *(("--effort", value) for value in ("0", "nan", "-1", "most", "1e9")),
        *(("--time-limit", value) for value in ("0", "nan", "-1")),
        *(
            ("--limit", value)
            for value in ("", "tp", "ep%0=0", "tp=1,x", "recompute=never", "tp<8,9", "tp<=" + "9" * 30)
        ),
        *(("--cluster", value) for value in ("", "nobody", "recipes")),
        *(("--html", value) for value in ("a.yaml", "a")),
    ],
)
def test_options_of_a_search(monkeypatch, option, value):
    monkeypatch.setattr("tools.search.ranking.run.search", None)  # refused before it
    refused(CliRunner().invoke(search, [PRETRAIN_4K, option, value]), option if option != "--cluster" else "cluster")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--skew", "nan"), ("--skew", "0.5"), ("--skew", "1e9"), ("--ep", "0"), ("--ep", "9" * 12), ("--ep", "16,,")],
)
def test_options_of_ep_report(option, value):
    refused(CliRunner().invoke(ep_report, [PRETRAIN_4K, option, value]), option)


def test_nothing_is_replaced_unasked(monkeypatch, tmp_path):
    monkeypatch.setattr("tools.search.ranking.run.search", None)  # refused before it
    file = tmp_path / "mine.yaml"
    file.write_text("mine", "utf-8")
    with pytest.raises(DataError, match=r"--write .*mine\.yaml: the file exists; .*--force"):
        CliRunner().invoke(search, [PRETRAIN_4K, "--write", str(file)], catch_exceptions=False)
    assert file.read_text("utf-8") == "mine"


@pytest.mark.parametrize("value", [math.nan, 0, -1, "x", None])
def test_clusters(tmp_path, value):
    content = yaml.safe_load((FOLDER / "h100.yaml").read_text("utf-8"))
    content["hbm_bytes"]["value"] = value
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content), "utf-8")
    for command in (search, ep_report):
        with pytest.raises(RecipeError, match=r"mine\.yaml: hbm_bytes\.value: "):
            CliRunner().invoke(command, [PRETRAIN_4K, "--cluster", str(file)], catch_exceptions=False)


@pytest.mark.usefixtures("stand_in_placement")
def test_verify_drops_what_fails(monkeypatch):
    from tools.search.ranking import verify

    seen = []

    def dry_run(path, full):
        seen.append(from_recipe(load_recipe(path)))
        return verify.DryRun(["stage 3 does not compile"] if len(seen) == 1 else [], [], [])

    monkeypatch.setattr(verify.verify, "__defaults__", (False, dry_run))
    answer = json.loads(run("--top", 3, "--json", "--verify", 2).stdout)
    assert answer["verified"] == len(seen) == 2
    assert [one["problems"] for one in answer["failed"]] == [["stage 3 does not compile"]]
    assert len(answer["strategies"]) == 2
    assert answer["failed"][0]["step_s"] <= answer["strategies"][0]["step_s"]


def judged(monkeypatch, *good):
    """Dry runs that find something wrong, but for those of these numbers; returns the layouts tried."""
    from tools.search.ranking import verify

    seen = []

    def dry_run(path, full):
        seen.append(from_recipe(load_recipe(path)))
        return verify.DryRun([] if len(seen) in good else ["does not compile"], [], [])

    monkeypatch.setattr(verify.verify, "__defaults__", (False, dry_run))
    return seen


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
def test_under_loads_the_first_of_them_is_verified_with_what_they_add(monkeypatch):
    from tools.search.ranking import verify

    def dry_run(path, full):
        every = all_stages(from_recipe(load_recipe(path)))
        return verify.DryRun([], [int(one.static) for one in every], [int(one.peak) for one in every])

    monkeypatch.setattr(verify.verify, "__defaults__", (False, dry_run))
    asked = ("--top", 3, "--json", "--memory", 16, "--verify", 1)
    even = json.loads(run(*asked).stdout)
    assert even["verified"] == 1 and even["best_is_verified"]
    for load in ("1.1", "14"):  # the second search finds what fits under these loads
        found = json.loads(run(*asked, "--loads", load).stdout)
        assert found["best_is_verified"] and found["loads"][0]["chance_to_run_out"] == 0
    monkeypatch.setattr("tools.search.ranking.run.search_under", lambda *_: None)
    hard = run(*asked, "--loads", "14")
    failed = json.loads(hard.stdout)["failed"]
    assert hard.exit_code == 1 and len(failed) == 3
    assert all("added by the fullest step of the loads, the limit is 16.0" in one["problems"][0] for one in failed)


@pytest.mark.usefixtures("stand_in_placement")
def test_when_all_fail_the_next_are_verified(monkeypatch, tmp_path):
    seen, overlay = judged(monkeypatch, 3), tmp_path / "best.yaml"
    answer = json.loads(run("--top", 4, "--json", "--verify", 2, "--write", overlay).stdout)
    assert len(seen) == answer["verified"] == 3 and answer["best_is_verified"]
    assert from_recipe(load_recipe(overlay)) == seen[2]
    assert "# Its dry run compiles and fits." in overlay.read_text("utf-8")


@pytest.mark.usefixtures("stand_in_placement")
def test_nothing_is_written_when_no_dry_run_passes(monkeypatch, tmp_path):
    judged(monkeypatch)
    result = run("--top", 3, "--verify", 1, "--write", tmp_path / "best.yaml")
    assert result.exit_code == 1 and "dry runs: 0 of 3" in result.stdout
    assert not (tmp_path / "best.yaml").exists()


@pytest.mark.usefixtures("stand_in_placement")
def test_an_interrupted_dry_run_is_said(monkeypatch, tmp_path):
    from tools.search.ranking import verify

    def dry_run(path, full):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.verify, "__defaults__", (False, dry_run))
    result = run("--top", 2, "--verify", 1, "--write", tmp_path / "best.yaml")
    assert result.exit_code == 130 and "the best is not verified" in result.stderr
    assert "# NOT VERIFIED" in (tmp_path / "best.yaml").read_text("utf-8")


@pytest.fixture
def family(tmp_path):
    """A recipe, its base and the base's base."""
    for name, base in (("oldest", os.path.abspath(RECIPE)), ("parent", "oldest.yaml"), ("recipe", "parent.yaml")):
        (tmp_path / f"{name}.yaml").write_text(f"base_config: {base}\n", "utf-8")
    (tmp_path / "other").symlink_to(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("stand_in_placement")
@pytest.mark.parametrize("target", ["recipe.yaml", "parent.yaml", "oldest.yaml", "other/recipe.yaml"])
@pytest.mark.parametrize("option", ["--write", "--html"])
def test_no_file_of_the_recipe_is_written_over(monkeypatch, family, option, target):
    monkeypatch.setattr("tools.search.ranking.run.search", None)  # it is refused before the search
    before = {file: file.read_bytes() for file in family.glob("*.yaml")}
    words = [str(family / "recipe.yaml"), option, str(family / target)]
    with pytest.raises(
        RecipeError, match=f"{option} .*: this file is (the recipe itself|a base of .*) and would be overwritten"
    ):
        CliRunner().invoke(search, words, catch_exceptions=False)
    assert {file: file.read_bytes() for file in family.glob("*.yaml")} == before


@pytest.mark.usefixtures("stand_in_placement")
@pytest.mark.parametrize("words", [["--write", "best.yaml"], ["--verify", "1"]])
def test_a_recipe_without_layouts_is_refused_before_the_search(monkeypatch, words):
    monkeypatch.setattr("tools.search.ranking.run.search", None)
    command = ["recipes/mini/pretrain_dp2.yaml", "--devices", "8", *words]
    with pytest.raises(RecipeError, match=r"use_parallel: True and parallel.parallel_mode: 1"):
        CliRunner().invoke(search, command, catch_exceptions=False)


def of_stages(stages, overlay, both_there, code):
    """In a process of its own: the best layout of so many stages, written when both searches are done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.search.report.print_text", lambda *_: both_there.wait(60))
        code.value = run("--top", 1, "--limit", f"pp={stages}", "--write", overlay).exit_code


@pytest.mark.usefixtures("stand_in_placement")
def test_of_two_searches_that_write_the_same_file_the_last_wins(tmp_path):
    """Neither has seen the other's file when it began, so neither refuses."""
    fork, overlay = multiprocessing.get_context("fork"), tmp_path / "best.yaml"
    both_there, codes = fork.Barrier(2), [fork.Value("i", -1) for _ in range(2)]
    work = zip((4, 8), codes, strict=True)
    searches = [fork.Process(target=of_stages, args=(stages, overlay, both_there, code)) for stages, code in work]
    for search_ in searches:
        search_.start()
    for search_ in searches:
        search_.join()
    assert [code.value for code in codes] == [0, 0]
    assert from_recipe(load_recipe(overlay)).pp in (4, 8) and check_recipe(overlay).errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["best.yaml"]


@pytest.mark.usefixtures("stand_in_placement")
def test_a_file_that_cannot_be_written_any_more_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tools.search.command.check_writable", lambda _: None
    )  # it was checked when it could be written
    (tmp_path / "file").write_text("", "utf-8")
    words = ["--top", 1, "--write", tmp_path / "file" / "best.yaml", "--html", tmp_path / "report.html"]
    with pytest.raises(DataError, match=r"best\.yaml: this path cannot be written"):
        run(*words)
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
@pytest.mark.parametrize("words", [["--top", 1, "--write"], ["pipeline", INSTANCE, "--effort", 1, "--out"]])
def test_what_another_command_has_written_meanwhile_is_not_replaced_without_force(words, tmp_path, monkeypatch):
    """Of two searches with one output, the second silently replaced the strategy that the first had written."""
    for module in ("command", "cli"):
        monkeypatch.setattr(f"tools.search.{module}.check_writable", lambda path: path.write_text("of another"))
    words = [str(word) for word in (*words, tmp_path / "best.yaml")]
    with pytest.raises(DataError, match=r"best\.yaml: the file exists; .*--force"):
        CliRunner().invoke(search, words, catch_exceptions=False) if words[0] == "pipeline" else run(*words)
    assert (tmp_path / "best.yaml").read_text() == "of another" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("stand_in_placement")
def test_memory_of_the_command_line_is_written(tmp_path):
    overlay = tmp_path / "best.yaml"
    assert run("--top", 1, "--memory", 50, "--write", overlay).exit_code == 0
    written = load_recipe(overlay)["context"]
    assert (written["max_device_memory"], written["mempool_block_size"]) == ("50GB", "50GB")


@pytest.mark.usefixtures("stand_in_placement")
def test_interrupted_dry_runs_keep_the_answer(monkeypatch):
    from tools.search.ranking import verify

    def dry_run(path, full):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.verify, "__defaults__", (False, dry_run))
    result = run("--top", 2, "--json", "--verify", 2)
    assert result.exit_code == 130 and len(json.loads(result.stdout)["strategies"]) == 2


@pytest.mark.parametrize(
    "words",
    [
        [PRETRAIN_4K, "--write"],
        [PRETRAIN_4K, "--html"],
        [PRETRAIN_4K, "--picture"],
        ["layout", PRETRAIN_4K, "--out"],
        ["pipeline", str(INSTANCE), "--out"],
        ["pipeline", str(INSTANCE), "--out", "plan.json", "--picture"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_search(words, tmp_path, monkeypatch):
    def work(*_, **__):
        raise AssertionError("the search has begun")

    for place in ("tools.search.cli.make_layout", "tools.search.ranking.run.search", "tools.layout.optimise.optimise"):
        monkeypatch.setattr(place, work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    words = [os.path.join(ROOT, word) if word == PRETRAIN_4K else word for word in words]
    ending = {"--html": "html", "--write": "yaml"}.get(words[-1], "svg")
    target = f"file/answer.{ending}"
    refused(CliRunner().invoke(search, [*words, target]), f"{target}: this path cannot be written", "is a file")


def test_a_launch_does_not_search_for_a_layout_that_it_cannot_keep(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base_config: {os.path.abspath(PRETRAIN_4K)}\nmodel: {{model_config: {{offset: auto}}}}\n")

    def locked(target):
        raise DataError(f"{target}: this path cannot be written")

    monkeypatch.setattr("tools.layout.resolve.check_writable", locked)
    monkeypatch.setattr("tools.layout.resolve.make_layout", lambda *_: pytest.fail("the search has begun"))
    with pytest.raises(DataError, match=r"recipe\.layout\.yaml: this path cannot be written"):
        resolve(load_recipe(path), layout="search")
