"""`tc3 firsthour` from a recipe to a bundle, its page, a card, and the commands that take the bundle."""

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import yaml
from click.testing import CliRunner

from launch.cli import tc3
from launch.firsthour import cli
from launch.firsthour.checks import HOUR_CHECKS
from launch.firsthour.hour import Hour
from launch.run.compile_cache import FOLDER
from plugins.errors import DataError
from plugins.lines import locked
from tests.crashes import deaths
from tools.files.locks import only_process_in
from tools.files.page import BEGINS
from tools.measured import CLUSTER, MEMORY, read_bundle, write_bundle
from tools.recipe.catalogue import load_card
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

ROOT = Path(__file__).parents[3]
R438 = ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"
MINI = ROOT / "recipes" / "mini" / "pretrain.yaml"
SMALL = {"nodes": 4, "devices_per_node": 2, "efficiency": {"matmul": 0.55}, "memory": {"reserve_gib": 2.0}}


def run(*words):
    return CliRunner().invoke(tc3, ["firsthour", *map(str, words)])


def test_the_plan_of_the_438b_on_512_nodes_is_within_the_hour(tmp_path):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("".join(f"node{number:03d} 8\n" for number in range(512)))
    done = run(R438, "--dry-run", "--nodes", hosts, "--json", "--work", tmp_path / "w")
    plan = json.loads(done.output)
    assert (plan["nodes"], plan["devices"]) == (512, 4096)
    assert sum(check["seconds"] for check in plan["checks"]) == pytest.approx(plan["seconds"])
    assert plan["seconds"] <= plan["budget"] == 3600
    by_name = {check["check"]: check for check in plan["checks"]}
    assert by_name["devices"]["where"] == "node[000-511], ranks 0-4095"
    assert f"--nodes {hosts}" in by_name["hosts"]["commands"][0]
    assert not (tmp_path / "w").exists()
    text = run(R438, "--dry-run", "--nodes", hosts).output
    assert "sum of the limits: 3420 of 3600 s" in text
    for check in plan["checks"]:
        assert f"{check['check']}: at most {check['seconds']:.0f} s" in text


def test_every_command_of_the_plan_is_one_that_tc3_takes(tmp_path):
    commands = [words for words in Hour(MINI, tmp_path).commands().values() for words in words]
    for words in commands:
        command, rest = tc3, list(words)
        while hasattr(command, "commands") or hasattr(command, "list_commands"):
            context = click.Context(command, ignore_unknown_options=True)
            _, command, rest = command.resolve_command(context, rest)
        known = {option for one in command.params for option in one.opts}
        assert {word for word in rest if word.startswith("--")} <= known, words


@pytest.fixture(scope="module")
def hour(tmp_path_factory):
    """A small simulated hour without defects: its folder, which holds b.zip, and what was printed."""
    folder = tmp_path_factory.mktemp("hour")
    (folder / "c.yaml").write_text(yaml.safe_dump(SMALL))
    words = ("--simulate", folder / "c.yaml", "--work", folder / "work", "--hash-names", "--json")
    done = run(R438, *words, "--out", folder / "b.zip")
    assert done.exit_code == 0, done.output
    return folder, words


@pytest.mark.slow
def test_the_same_command_keeps_what_was_found(hour):
    folder, words = hour
    done = run(R438, *words, "--out", folder / "again.zip")
    assert done.exit_code == 0
    assert len(re.findall("kept from before", done.stderr)) == len(HOUR_CHECKS)
    first, again = (read_bundle(folder / name) for name in ("b.zip", "again.zip"))
    assert first.texts == again.texts and CLUSTER in again.texts and MEMORY in again.texts
    refused = run(MINI, *words, "--out", folder / "other.zip")
    assert "the results in this folder are of recipe" in str(refused.exception)
    kept = run(R438, *words, "--out", folder / "b.zip")
    assert "the file exists" in str(kept.exception)


def test_a_second_start_in_the_folder_of_one_that_is_at_work_is_refused(hour, tmp_path):
    """Its trainings met those of the first one, and its outcomes replaced them."""
    folder, words = hour
    before = {path: path.read_bytes() for path in (folder / "work").glob("*.json")}
    with only_process_in(folder / "work", "tc3 firsthour", "--work"):
        second = run(R438, *words, "--out", tmp_path / "b.zip", "--force")
    assert f"{folder / 'work'}: another tc3 firsthour is at work in this folder" in str(second.exception)
    assert {path: path.read_bytes() for path in (folder / "work").glob("*.json")} == before
    assert not (tmp_path / "b.zip").exists()


def test_results_of_another_cluster_are_not_kept(hour, tmp_path):
    """The nodes and the content of the simulated cluster were not compared: another cluster got the old verdict."""
    folder, _ = hour
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**SMALL, "seed": 5}))
    work = tmp_path / "work"
    shutil.copytree(folder / "work", work)
    state = json.loads((work / "state.json").read_text())
    state["simulated"] = state["simulated"].replace(str(folder), str(tmp_path))
    (work / "state.json").write_text(json.dumps(state))
    again = run(R438, "--simulate", tmp_path / "c.yaml", "--work", work, "--out", tmp_path / "b.zip")
    assert "the results in this folder are of simulated " in str(again.exception)
    hours = [SimpleNamespace(names=["a1", "a2"][:count], world=8 * count, device="Ascend") for count in (1, 2)]
    found = [cli._cluster_of(each, None) for each in hours]
    assert [(each["nodes"], each["devices"]) for each in found] == [("a1", "8 x Ascend"), ("a[1-2]", "16 x Ascend")]


def test_the_bundle_is_read_and_its_page_needs_no_other_file(hour, tmp_path):
    done = run("read", hour[0] / "b.zip", "--recipe", R438, "--html", tmp_path / "p.html")
    assert done.exit_code == 0
    assert "verdict: go" in done.output
    page = (tmp_path / "p.html").read_text()
    assert page.startswith(BEGINS)
    assert "nothing on this page was measured" in page
    assert "src=" not in page and "href=" not in page
    for check in ("hosts", "calibrate"):
        assert f"<td>{check}</td>" in page
    assert "node00" not in page + "".join(read_bundle(hour[0] / "b.zip").texts.values())


def test_no_path_of_this_machine_is_in_a_bundle(hour):
    found = read_bundle(hour[0] / "b.zip")
    assert found.manifest.recipe == "recipes/telechat3_438b/pretrain_4k.yaml"
    assert str(ROOT) not in "".join(found.texts.values())


def test_a_simulated_bundle_is_not_claimed_and_a_measured_one_is(hour, tmp_path):
    shutil.copytree(R438.parent, tmp_path / "recipes" / "telechat3_438b")
    shutil.copytree(ROOT / "recipes" / "base", tmp_path / "recipes" / "base")
    recipe = tmp_path / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"
    card = recipe.with_name("card.yaml")
    before = card.read_text()
    refused = run("card", hour[0] / "b.zip", recipe)
    assert "card.yaml may state only measured results" in str(refused.exception)
    assert card.read_text() == before
    found = read_bundle(hour[0] / "b.zip")
    write_bundle(tmp_path / "m.zip", replace(found.manifest, simulated=False, files={}), found.texts)
    assert "measured-910B3-8" in run("card", tmp_path / "m.zip", recipe, "--dry-run").output
    assert card.read_text() == before
    assert run("card", tmp_path / "m.zip", recipe).exit_code == 0
    first = load_card(card).entries[0]
    assert first.file.name == "pretrain_4k.yaml"
    assert first.status[0]["claim"] == "measured-910B3-8"
    assert found.manifest.made[:10] in first.status[0]["how"]
    assert "mindspore" in first.status[0]["how"]
    after = card.read_text().splitlines()
    assert [line for line in after if line in before.splitlines()] == before.splitlines()
    assert "already has this claim" in str(run("card", tmp_path / "m.zip", recipe).exception)


def card_of(folder):
    """A recipe with a card in a new folder, and what a bundle says of a device of that kind."""
    shutil.copytree(R438.parent, folder / "recipes" / "telechat3_438b")
    shutil.copytree(ROOT / "recipes" / "base", folder / "recipes" / "base")

    def bundle(device):
        manifest = SimpleNamespace(versions={"mindspore": "2.9.0"}, made="2026-11-29T06:00:00Z", verdict="go")
        return SimpleNamespace(manifest=manifest, claim=f"measured-{device}-8", json=lambda name: [])

    return folder / "recipes" / "telechat3_438b" / "pretrain_4k.yaml", bundle


def test_two_claims_that_are_written_at_once_are_both_in_the_card(tmp_path):
    recipe, bundle = card_of(tmp_path)
    card = recipe.with_name("card.yaml")
    with ThreadPoolExecutor(1) as other:
        with locked(card.parent):
            late = other.submit(cli.write_claim, bundle("910B3"), recipe, False)
            time.sleep(0.2)
            assert not late.done()
            cli._write_claim(bundle("910B2"), recipe, card, dry_run=False)
        late.result(timeout=60)
    claims = [status["claim"] for status in load_card(card).entries[0].status]
    assert {"measured-910B3-8", "measured-910B2-8"} <= {*claims}


def test_a_kill_leaves_the_card_as_it_was_or_with_the_claim_and_hinders_nobody(tmp_path):
    root, bundle = card_of(tmp_path / "first")
    before, seen = root.with_name("card.yaml").read_text(), []
    numbers = count()

    def fresh():
        return shutil.copytree(tmp_path / "first", tmp_path / str(next(numbers)))

    def write(folder):
        return cli.write_claim(bundle("910B3"), folder / root.relative_to(tmp_path / "first"), dry_run=False)

    for folder, where in deaths(write, fresh):
        card = folder / root.with_name("card.yaml").relative_to(tmp_path / "first")
        seen.append(card.read_text() == before)
        if seen[-1]:
            write(folder)
        assert load_card(card).entries[0].status[0]["claim"] == "measured-910B3-8", where
    assert {True, False} == {*seen}


def test_a_claim_is_not_added_to_the_next_recipe_of_a_card(hour, tmp_path):
    """An entry whose line `status:` has a comment was passed over, and the next recipe got the claim."""
    shutil.copytree(R438.parent, tmp_path / "recipes" / "telechat3_438b")
    recipe = tmp_path / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"
    card = recipe.with_name("card.yaml")
    before = card.read_text().replace("    status:\n", "    status:  # of today\n", 1)
    card.write_text(before)
    found = SimpleNamespace(
        manifest=replace(read_bundle(hour[0] / "b.zip").manifest, simulated=False), claim="measured-910B3-8",
        json=lambda name: [],
    )  # fmt: skip
    with pytest.raises(DataError, match=r"recipes\.pretrain_4k\.yaml\.status: the claim must be added below a line"):
        cli.write_claim(found, recipe, dry_run=False)
    assert card.read_text() == before


def test_memory_takes_the_measured_terms(hour):
    words = ["memory", str(R438), "--json"]
    plain = json.loads(CliRunner().invoke(tc3, words).output)
    done = CliRunner().invoke(tc3, [*words, "--measured", str(hour[0] / "b.zip")])
    found = json.loads(done.stdout)
    assert "nothing in them was measured" in done.stderr
    assert found["room"]["cap"] == pytest.approx(plain["room"]["cap"] - 2.0 * 2**30, rel=1e-6)
    assert found["measured"]["reserve_bytes"] == pytest.approx(2.0 * 2**30, rel=0.01)
    assert found["stages"][0]["peak"] == pytest.approx(plain["stages"][0]["peak"], rel=1e-6)  # factors of 1


def test_search_takes_the_measured_cluster(hour, monkeypatch):
    from tools.search import command

    class Seen(Exception):
        pass

    def stop(recipe, request, times, *rest, **more):
        raise Seen(request.hardware.efficiency["matmul"], request)

    asked = command._asked

    def look(*words):
        found = asked(*words)
        stop(*found)

    monkeypatch.setattr(command, "_asked", look)
    done = CliRunner().invoke(tc3, ["search", str(R438), "--measured", str(hour[0] / "b.zip")])
    assert isinstance(done.exception, Seen)
    assert done.exception.args[0] == pytest.approx(0.55, rel=0.01)
    assert "factors (activations x 1.00, buffers x 1.00) are not used" in done.stderr
    found = done.exception.args[1]
    assert found.cap == pytest.approx((45 - 2.0) * 2**30, rel=1e-6) and found.site.memory is None
    assert found.cap_source == "context.max_device_memory of the recipe, less 2.00 GiB measured beside the model"


def test_the_small_recipe_trains_on_made_up_data_and_saves(tmp_path):
    recipe = load_recipe(MINI)
    recipe["train_dataset"]["data_loader"]["config"].update(pad=1, split="1, 1, 1", test_data_path=["1", "elsewhere"])
    dump_recipe(recipe, tmp_path / "recipe.yaml")
    hour = Hour(tmp_path / "recipe.yaml", tmp_path)
    hour.write_small()
    small, profiled = load_recipe(hour.small), load_recipe(tmp_path / "profiled.yaml")
    config = small["train_dataset"]["data_loader"]["config"]
    assert (config["pad"], config["split"]) == (-1, "1, 0, 0") and "test_data_path" not in config
    assert small["checkpoint"]["save_interleaved_steps"] == 4
    assert (tmp_path / "corpus.bin").is_file()
    assert [one["type"] for one in profiled["callbacks"]][-1] == "ProfileMonitor"
    assert [one["type"] for one in small["callbacks"]] == [one["type"] for one in profiled["callbacks"]][:-1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_rehearsal_runs_every_check_on_this_cpu(tmp_path, monkeypatch):
    """With the smallest recipe; no limit of time is asserted, and the budget leaves room for a busy machine.

    It has one layer, which has experts: six workers compile it, and no check asks which layers a model has. Of the
    check `resume`, the run that is killed and the run that goes on load the graph of the one that is not.
    """
    monkeypatch.setenv(FOLDER, str(tmp_path / "graphs"))
    tiny, sizes = tmp_path / "tiny.yaml", {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    tiny.write_text(
        yaml.safe_dump(
            {
                "base_config": str(ROOT / "tests" / "training" / "tiny.yaml"),
                "model": {"model_config": {**sizes, "num_nextn_predict_layers": 0}},
            }
        )
    )
    done = run(tiny, "--work", tmp_path / "w", "--out", tmp_path / "b.zip", "--budget", "90m", "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["verdict"] == "go with"  # the memory of a CPU's worker is unknown, and so it is said
    found = read_bundle(tmp_path / "b.zip", tiny)
    outcomes = {one["check"]: one for one in found.json("outcomes.json")}
    verdicts = {name: outcomes[name]["verdict"] for name in ("mini", "parallel", "resume")}
    assert verdicts == {"mini": "unknown", "parallel": "ok", "resume": "ok"}  # this recipe has no golden numbers
    losses = outcomes["resume"]["evidence"]
    assert losses["whole"] == losses["cut"] and len(losses["whole"]) == 12
    assert 4 < losses["killed_after"] <= 12
    assert set(outcomes["calibrate"]["evidence"]["fitted"]) >= {"matmul", "memory"}
    assert "efficiency:" in found.texts["cluster.yaml"]
    assert run("read", tmp_path / "b.zip", "--html", tmp_path / "p.html").exit_code == 0
    assert "this was a rehearsal" in (tmp_path / "p.html").read_text()
    (row,) = outcomes["collectives"]["evidence"]["rows"]
    assert (row["group"], row["groups"], len(row["seconds"][0])) == ("dp", [[0, 1]], 5) and min(row["seconds"][0]) > 0
    assert outcomes["collectives"]["verdict"] == "unknown"  # nothing is predicted for a CPU, so it is not ok
    assert {item["verdict"] for item in outcomes["operators"]["findings"] if item["what"] == "golden results"} == {"ok"}
    report = CliRunner().invoke(
        tc3, ["runs", "report", str(tmp_path / "w" / "whole"), "--measured", str(tmp_path / "b.zip"), "--json"]
    )
    (one,) = json.loads(report.stdout)["runs"]  # how far apart both are depends on what else this machine did meanwhile
    assert one["measured"]["predicted"] > 0
    assert one["measured"]["ratio"] == pytest.approx(one["usual_step_seconds"] / one["measured"]["predicted"])
