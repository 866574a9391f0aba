"""`tc3 search RECIPE`: table, files, exit codes, interruption; the pipeline optimiser mostly replaced by a stand-in."""

import json
import math
import multiprocessing
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import DataError, RecipeError
from tests.recipes.oracles import RECIPES
from tests.tools.search.conftest import stand_in
from tests.tools.search.test_candidates import request
from tools.check.check import check_recipe
from tools.estimate.from_recipe import from_recipe
from tools.estimate.loads import uniform as loads_uniform
from tools.estimate.memory.room import Room
from tools.estimate.time_model import TimeModel
from tools.files.figure import new_figure
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.load import load_hardware
from tools.hardware.units import GIB
from tools.layout.budget import LATE, Budget
from tools.layout.place import Placement
from tools.recipe.catalogue import load_card
from tools.recipe.load import load_recipe
from tools.search import page as report
from tools.search.cli import search
from tools.search.doubt import Doubt
from tools.search.ranking import rank as search_rank
from tools.search.ranking import run as search_run
from tools.search.ranking import workers
from tools.search.ranking.rank import explain_infeasible, feasible, more_memory, rank
from tools.search.ranking.run import ByStages, Found, entry_of
from tools.search.ranking.uneven import Uneven, in_order, renumbered, under
from tools.search.ranking.uneven import words as uneven_words
from tools.search.report import placed_words, reasons, stage_rows, why_faster
from tools.search.request import read_limit, request_of

RECIPE = "recipes/telechat3_105b/pretrain_4k.yaml"
NARROW = [word for limit in ("tp=2,4", "pp=4,8", "vpp<=2", "cp=1", "ep=8,16", "mbs<=2") for word in ("--limit", limit)]
FEW = ["--limit", "vpp=1", "--limit", "mbs=1"]  # with NARROW: still more than three layouts


def run(*words):
    return CliRunner().invoke(search, [RECIPE, *NARROW, *map(str, words)], catch_exceptions=False)


@pytest.mark.usefixtures("stand_in_placement")
def test_answer_as_json_and_as_an_overlay(tmp_path):
    overlay = tmp_path / "best.yaml"
    result = run("--json", "--top", 4, "--write", overlay)
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    steps = [one["step_s"] for one in answer["strategies"]]
    assert len(steps) == 4 and steps == sorted(steps)
    for one in [*answer["strategies"], answer["recipe"]]:
        assert sum(one["parts_s"].values()) == pytest.approx(one["step_s"])
        assert 0 < one["mfu"] < 0.6 and one["tokens_per_s"] > 0
    assert all(one["peak_gib"] <= answer["cap_gib"] for one in answer["strategies"])
    assert answer["funnel"][0][1] + sum(count for _, count in answer["funnel"][1:-1]) == answer["ranked"]
    best, written = answer["strategies"][0], load_recipe(overlay)
    assert check_recipe(written).errors == []
    config = from_recipe(written)
    assert (config.dp, config.tp, config.pp, config.ep) == tuple(best[name] for name in ("dp", "tp", "pp", "ep"))
    times = TimeModel(request().hardware)
    assert entry_of(config, times).seconds == pytest.approx(best["step_s"])
    assert f"{best['step_s']:.2f} s per step" in overlay.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
def test_table_and_report(tmp_path):
    page, picture = tmp_path / "new" / "report.html", tmp_path / "p.svg"
    result = run("--top", 3, "--html", page, "--picture", picture, *FEW)
    assert result.exit_code == 0
    assert "1 before 2 by" in result.stdout and "recipe " in result.stdout
    assert "tokens are dispatched whole, as in the recipe: no other chunks" in result.stdout
    assert "memory: over" in result.stdout and "--limit tp=2,4" in result.stdout
    text = page.read_text("utf-8")
    assert text.count("<svg") == 2 and "1 before 2 by" in text
    assert "src=" not in text and "<link" not in text and "@import" not in text
    for svg in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("stand_in_placement")
def test_options_may_stand_before_the_recipe():
    words = ["--limit", "tp=8", "--limit", "pp=8", "--limit", "vpp=1", "--top", "1", "--json", RECIPE]
    result = CliRunner().invoke(search, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert {json.loads(result.stdout)["strategies"][0][name] for name in ("tp", "pp")} == {8}


@pytest.mark.usefixtures("stand_in_placement")
def test_help_explains_both_ways():
    text = CliRunner().invoke(search, ["--help"]).stdout
    assert "search RECIPE [OPTIONS]" in text and "pipeline" in text and "validate" in text
    assert "--verify" in text and "calibrate" in text
    assert text == CliRunner().invoke(search, [RECIPE, "--help"]).stdout
    assert text == CliRunner().invoke(search, ["--devices", "8", "-h"]).stdout
    assert CliRunner().invoke(search, ["pipeline", "--help"]).stdout.count("INSTANCE.json")


@pytest.mark.usefixtures("stand_in_placement")
def test_uniform_recomputation_is_not_placed(monkeypatch):
    monkeypatch.setattr(workers, "screen", None)
    answer = json.loads(run("--json", "--top", 2, "--limit", "recompute=full").stdout)
    assert [one["recompute"]["full"] for one in answer["strategies"]] == [one["layers"] for one in answer["strategies"]]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--memory", "10"], ["nothing fits: the least memory", "nearest: --memory", "without "]),
        (["--limit", "pp=5"], ["--limit pp=5 drops", "without --limit 'pp=5' there are strategies that fit"]),
        (["--devices", "251"], ["is legal; most break", "nearest with fewer: --devices"]),
    ],
)
def test_infeasible_requests_say_what_would_be_feasible(monkeypatch, words, expected):
    if "pp=5" in words:
        monkeypatch.setattr(search_rank, "_NEAR", 16)  # numbers of devices tried each way: of 256 none takes 5 stages
    result = run(*words)
    assert result.exit_code == 1
    for text in expected:
        assert text in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
def test_nearest_memory_is_enough(monkeypatch):
    for others in ("_without_limits", "_more_devices"):  # the other advice, for which whole spaces are looked at
        monkeypatch.setattr(search_rank, others, lambda *_: [])
    problems = json.loads(run("--memory", "8", "--json").stdout)["problems"]
    assert problems[1].startswith("nearest: --memory ") and problems[1].endswith("recompute: planned")
    assert run("--memory", problems[1].split()[2], "--top", "1").exit_code == 0


@pytest.mark.usefixtures("stand_in_placement")
def test_nearest_memory_keeps_the_limits():
    asked = request(devices=8, batch=16, cap=0.01 * GIB, limits=["recompute=none"])
    nearest = explain_infeasible(asked, rank(asked))[1]
    assert nearest.endswith("recompute: none")
    assert feasible(replace(asked, cap=float(nearest.split()[2]) * GIB))


@pytest.mark.usefixtures("stand_in_placement")
def test_no_device_has_more_memory_than_it_has():
    least = rank(request()).least
    for reserve in (0.0, 2.0):  # GiB of those that --memory names are in use beside the model
        asked, needs = replace(request(), reserve=reserve * GIB), replace(least, peak=(59.5 - reserve) * GIB)
        assert more_memory(asked, needs).startswith("nearest: --memory 59.5 (GiB)")
    assert more_memory(request(), replace(least, peak=59.9 * GIB)).startswith(
        "no --memory is enough for balanced layers: a device has 59.6 GiB"
    )


@pytest.mark.usefixtures("stand_in_placement")
def test_wrong_inputs():
    with pytest.raises(RecipeError, match="atlas_800t_a3"):
        run("--cluster", "atlas_800t_a3")
    with pytest.raises(RecipeError, match="a limit must have a name, a sign and a value"):
        run("--limit", "tp")
    with pytest.raises(DataError, match=r"must end in \.svg"):
        run("--picture", "p.gif")
    with pytest.raises(RecipeError, match="no such recipe"):
        CliRunner().invoke(search, ["recipes/none.yaml"], catch_exceptions=False)
    assert run("--top", "0").exit_code == 2


@pytest.mark.usefixtures("stand_in_placement")
def test_interrupted_it_shows_the_best_so_far(monkeypatch, tmp_path):
    placed, overlay = [], tmp_path / "o.yaml"

    def interrupted(config, *rest):
        if len(placed) == 2:
            raise KeyboardInterrupt
        placed.append(config)
        return stand_in(config, *rest)

    monkeypatch.setattr(workers, "screen", interrupted)
    result = run("--top", 4, "--json", "--write", overlay)
    assert result.exit_code == 130 and "interrupted: this is the best so far" in result.stderr
    assert "placement; the search was interrupted" in overlay.read_text("utf-8")
    early = json.loads(result.stdout)
    assert not early["whole"] and len(early["strategies"]) == 2


@pytest.mark.usefixtures("stand_in_placement")
def test_what_cannot_be_placed_is_dropped_with_its_reason(monkeypatch):
    def refused(config, *rest, **more):
        return stand_in(config, *rest) if config.tp == 2 else Placement(None, float("inf"), 0.0, why="too tight")

    monkeypatch.setattr(workers, "screen", refused)
    monkeypatch.setattr(workers, "place", refused)
    result = run("--top", 4)
    assert result.exit_code == 0 and "too tight" in result.stdout


@pytest.mark.usefixtures("stand_in_placement")
def test_a_plan_that_is_dropped_is_named(monkeypatch):
    monkeypatch.setattr(workers, "screen", lambda *rest: replace(stand_in(*rest), dropped=("a plan was dropped",)))
    assert ": a plan was dropped" in run("--top", 2).stdout


@pytest.mark.usefixtures("stand_in_placement")
def test_parts_explain_the_difference():
    asked = request(limits=["pp>1"])
    times = TimeModel(asked.hardware)
    short = [entry_of(stand_in_config(asked, one), times) for one in rank(asked).short_list(5)]
    for entry in short:
        assert sum(entry.parts.values()) == pytest.approx(entry.seconds)
        assert min(entry.parts.values()) >= -1e-12
    slow = replace(short[0], seconds=short[0].seconds + 1, parts=dict(short[0].parts, ep=short[0].parts["ep"] + 1))
    assert why_faster(short[0], slow) == "1.00 s per step: 1.00 s less expert-parallel communication"
    near = replace(slow, seconds=short[0].seconds, parts=dict(short[0].parts, ep=short[0].parts["ep"] + 0.004))
    assert why_faster(short[0], near) == "0.00 s per step: the same within a hundredth"


def stand_in_config(asked, one):
    from tools.search.candidates import configuration

    return configuration(asked, one.candidate)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
def test_placing_in_two_processes(monkeypatch):
    monkeypatch.undo()
    limits = [read_limit(text) for text in ("pp=2", "vpp=2", "tp=1", "cp=1", "shard=optimizer")]
    asked = replace(request(devices=8, batch=16, cap=1.2 * GIB), limits=tuple(limits))
    times, short = TimeModel(asked.hardware), rank(asked).short_list(2)
    found = {}
    whole = workers.place_all(asked, short, times, Budget(2), found.__setitem__, at_once=2)
    assert whole and set(found) == set(short)
    assert not multiprocessing.active_children()
    for one, placement in found.items():
        assert placement.configuration is not None
        assert placement.step_s == pytest.approx(times.step(placement.configuration, simulated=True).total)
        assert max(placement.peak_bytes) <= asked.cap
        assert placement.step_s <= 1.05 * one.seconds  # layers that cannot be cut cost a little


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
def test_one_process_and_two_find_the_same(monkeypatch):
    monkeypatch.undo()
    limits = [read_limit(text) for text in ("pp=2", "vpp=2", "cp=1", "shard=optimizer", "mode=global")]
    asked = replace(request(devices=8, batch=16, cap=1.2 * GIB), limits=tuple(limits))
    times, answers = TimeModel(asked.hardware), []
    for at_once in (1, 2):
        found = search_run.search(asked, 3, Budget(1), times, lambda *_: None, at_once)
        answers.append((found.entries, found.least, found.open, found.placed, found.solved, found.stages, found.cut))
    assert answers[0] == answers[1] and not answers[0][-1]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
def test_a_time_limit_that_bites_is_said_everywhere(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "screen", lambda *rest: replace(stand_in(*rest), cut=True))
    page, overlay = tmp_path / "r.html", tmp_path / "o.yaml"
    result = run("--top", 2, "--html", page, "--write", overlay)
    assert LATE in result.stderr and LATE in result.stdout and LATE in page.read_text("utf-8")
    written = " ".join(line.lstrip("# ") for line in overlay.read_text("utf-8").splitlines())
    assert LATE in written
    assert json.loads(run("--top", 2, "--json").stdout)["ended_by_time_limit"]


@pytest.mark.usefixtures("stand_in_placement")
@pytest.mark.parametrize(
    ("changes", "holds", "words"),
    [
        (
            {"least": 10.0},
            True,
            "proven within the estimator's model: no strategy is under 10.00 s (3 of 5 candidates that fit were placed",
        ),
        (
            {"least": 9.0, "open": 1},
            True,
            "no strategy is under 9.00 s, which is 10.0 % less than the best one's 10.00 s (3 of 5",
        ),
        ({"least": 9.0, "open": 2, "unplaced": 1}, False, "; 1 that were not placed could be faster by their bounds"),
        ({}, False, "ranked by balanced layers only, and could be faster"),  # no bound is known
        ({"least": 9.0, "cut": True}, False, None),
        ({"least": 9.0, "whole": False}, False, None),
    ],
)
def test_a_choice_holds_of_a_space_only_where_nothing_was_left_unplaced(changes, holds, words):
    """ "The choice holds, 100 %" was said of three layouts while the fastest had never been placed."""
    found = Found(None, SimpleNamespace(seconds=np.zeros(5)), placed=3, **changes)
    found.entries = [SimpleNamespace(seconds=10.0)]
    assert found.complete == holds
    if words:
        assert words in placed_words(found)


def test_the_bound_is_compared_with_a_layout_that_a_dry_run_dropped_by_its_name():
    """ "The best one's 6.33 s" was said above a table whose first layout took 6.47 s."""
    found = Found(None, SimpleNamespace(seconds=np.zeros(5)), placed=3, least=9.0, open=1)
    fast, slow = (
        SimpleNamespace(layout=layout, config=SimpleNamespace(), seconds=seconds)
        for layout, seconds in (("dp4", 10.0), ("dp2 pp2", 12.0))
    )
    found.entries, found.failed = [slow], [(fast, ["stage 0 is full"])]
    found.stages = [ByStages(1, 1, 3, fast, 9.0), ByStages(2, 1, 3, slow, 9.0)]
    assert "less than the step of dp4, which was dropped by its dry run, 10.00 s" in placed_words(found)
    assert [row[-1] for row in stage_rows(found)] == ["dp4 (dropped by its dry run)", "dp2 pp2"]


@pytest.mark.usefixtures("stand_in_placement")
def test_what_cannot_be_told_apart_is_in_text_json_and_page(tmp_path):
    page = tmp_path / "r.html"
    answer = json.loads(run("--top", 3, "--json", "--html", page, *FEW).stdout)
    told = answer["sensitivity"]
    assert told["cannot_be_told_apart"] and sum(told["shares"].values()) == pytest.approx(1)
    assert told["error"] == pytest.approx(0.0515, abs=0.05) and set(told["shares"]) <= {"1", "2", "3", "recipe"}
    alone = "among the layouts of the table" if told["of_the_whole_space"] else "of the layouts that were"
    words = alone if len(told["cannot_be_told_apart"]) == 1 else "within "
    assert told["of_the_whole_space"] == (not answer["never_placed"])
    assert words in unescape(page.read_text("utf-8")) and any(line.startswith(words) for line in answer["reasons"])
    assert 0 < answer["bound_s"] <= answer["strategies"][0]["step_s"] and answer["placed"] >= 3


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
def test_the_page_marks_the_rows_that_cannot_be_told_apart(monkeypatch, tmp_path):
    page = tmp_path / "r.html"
    for shares, marked in (((0.5, 0.02, 0.48), ["1", "3"]), ((0.98, 0.02, 0.0), [])):
        monkeypatch.setattr(report, "doubt_of", lambda *_, of=shares: Doubt(("1", "2", "3"), of, None, 0.05, True))
        run("--top", 3, "--html", page, *FEW)
        rows = page.read_text("utf-8").split('<tr class="alike">')[1:]
        assert [row.split("</td>")[0][-1] for row in rows] == marked


POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30)


@given(POINTS)
def test_frontier_is_what_nobody_beats(points):
    seconds, peaks = np.array(points, float).T
    found = {(seconds[index], peaks[index]) for index in report.frontier(seconds, peaks)}
    expected = {(s, p) for s, p in points if not any((t <= s and q <= p) and (t, q) != (s, p) for t, q in points)}
    assert found == expected and list(peaks[report.frontier(seconds, peaks)]) == sorted(p for _, p in expected)


@pytest.mark.parametrize(("micro_batches", "drawn"), [(8, 8), (16, 16), (64, 16)])
def test_of_many_micro_batches_as_many_are_drawn_as_can_be_seen(micro_batches, drawn):
    config = replace(from_recipe(load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")), micro_batches=micro_batches)
    entry, axes = entry_of(config, times := TimeModel(load_hardware(DEFAULT_HARDWARE))), new_figure(4, 3).subplots()
    report.draw_entry(axes, entry, times)
    bars = sum(len(bars.get_paths()) for bars in axes.collections)
    assert config.pp == 8 and bars == 2 * drawn * config.pp * config.chunks
    shown = "one step" if micro_batches == drawn else f"{drawn} micro-batches of the step's {micro_batches}"
    assert axes.get_xlabel() == f"seconds, {shown}" and axes.get_title().endswith(f"drawn: {shown}")


WINNERS = {  # folder: seconds a step as searched and as in pretrain_4k.yaml, GiB on the fullest stage
    "telechat3_105b": (7.39, 20.09, 48.4),
    "telechat3_438b": (36.96, 37.67, 32.45),
    "telechat3_1119b": (32.71, 35.37, 39.2),
}


def predicted(folder, file):
    return entry_of(from_recipe(load_recipe(RECIPES / folder / file)), TimeModel(load_hardware(DEFAULT_HARDWARE)))


@pytest.mark.parametrize("folder", WINNERS)
def test_predictions_are_those_it_was_chosen_by(folder):
    seconds, before, memory = WINNERS[folder]
    chosen = predicted(folder, "pretrain_4k_searched.yaml")
    assert chosen.seconds == pytest.approx(seconds, rel=0.005)
    assert chosen.peak / GIB == pytest.approx(memory, rel=0.005)
    assert predicted(folder, "pretrain_4k.yaml").seconds == pytest.approx(before, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("folder", WINNERS)
def test_its_card_says_what_uneven_loads_do_to_it(folder):
    """The card's seconds, drawn steps and max/mean under `--loads published` are those that the tools find today."""
    file = "pretrain_4k_searched.yaml"
    asked, entry = request_of(load_recipe(RECIPES / folder / file), DEFAULT_HARDWARE), predicted(folder, file)
    room = Room(asked.cap, asked.cap_source, asked.margin)
    found = under("published", "recipe", "", entry.config, entry.seconds, room, TimeModel(asked.hardware))
    assert found.runs_out == 0
    says = load_card(RECIPES / folder / "card.yaml")
    (entry,) = (one for one in says.entries if one.file.name == file)
    text = " ".join(claim["what"] for claim in entry.status)
    assert f"max/mean {found.loads.typical:.2f} on average" in text
    assert f"{found.seconds:.1f} s a step are expected" in text
    opened = int(found.judged.open.sum())
    assert f"none of 256 drawn steps needs more memory than the limit, {opened} are open" in text
    assert f"max/mean of {math.floor(100 * found.judged.up_to) / 100:.2f} in every layer" in text


@pytest.mark.parametrize("folder", WINNERS)
def test_it_is_the_same_run_in_another_layout(folder):
    ours, other = (load_recipe(RECIPES / folder / f"pretrain_4k{end}.yaml") for end in ("_searched", ""))
    tables = [check_recipe(recipe).table for recipe in (ours, other)]
    for key in ("parameters_total", "global_batch_samples", "devices"):
        assert tables[0][key] == tables[1][key]
    assert ours["lr_schedule"] == other["lr_schedule"] and ours["train_dataset"] == other["train_dataset"]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
def test_placed_layouts_are_ranked_under_loads(tmp_path):
    page, overlay = tmp_path / "r.html", tmp_path / "o.yaml"
    told = json.loads(run("--top", 3, "--json", *FEW, "--loads", "1.3", "--html", page, "--write", overlay).stdout)
    found = told["loads"]
    by_name = {str(number): entry for number, entry in enumerate(told["strategies"], 1)} | {"recipe": told["recipe"]}
    assert {one["name"] for one in found} == set(by_name)
    assert [one["chance_to_run_out"] for one in found] == sorted(one["chance_to_run_out"] for one in found)
    for one in found:
        assert one["even_step_s"] == by_name[one["name"]]["step_s"] < one["expected_step_s"]
    assert any(line.startswith("under the loads") for line in told["reasons"])
    assert "Under the loads, by expected seconds" in page.read_text("utf-8")
    assert "Under one max/mean everywhere: busiest rank 1.3" in overlay.read_text("utf-8").replace("\n# ", " ")
    even = run("--top", 2, *FEW, "--loads", "even").stdout
    assert (
        "under the loads 1 stays the first of the placed layouts: even loads" in even and "1.00 times as long" in even
    )


def uneven(name, even_s, seconds, over):
    judged = SimpleNamespace(over=np.array([True] * over + [False] * (4 - over)))
    return Uneven(name, f"layout {name}", SimpleNamespace(), even_s, seconds, loads_uniform(1.3), judged)


def test_a_changed_winner_is_named_with_the_reason():
    first, second = uneven("1", 10.0, 14.0, 0), uneven("2", 10.5, 12.0, 0)
    order = in_order([first, second, uneven("recipe", 9.0, 9.0, 4)])
    assert [one.name for one in order] == ["2", "1", "recipe"]
    assert "the winner changes: 2 before 1, 12.00 instead of 14.00 s per step" in uneven_words(order)[0]
    own = uneven_words(in_order([first, uneven("recipe", 11.0, 12.5, 0)]))
    assert own[1] == "under the loads the recipe's own layout is better than all of them, at 12.50 s per step"
    assert "1 stays the first" in uneven_words(in_order([first, uneven("2", 10.5, 15.0, 0)]))[0]
    lost = in_order([uneven("1", 10.0, 11.0, 1), second])
    assert "2 before 1, which runs out of memory" in uneven_words(lost)[0]
    every = uneven_words(in_order([uneven("1", 10.0, 11.0, 1), uneven("2", 10.0, 12.0, 2)]))
    assert every[1] == "every placed layout runs out of memory; 1 at 25.0% of the steps"
    assert uneven_words([]) == []
    faster = uneven_words(in_order([first, second, uneven("zero_bubble_v", 9.0, 11.0, 0)]))
    assert faster[1] == "under the loads schedule zero_bubble_v is faster still: 11.00 s per step"
    safer = uneven_words(in_order([uneven("1", 10.0, 11.0, 1), uneven("zero_bubble_v", 9.0, 12.0, 0)]))
    assert safer[1] == "under the loads schedule zero_bubble_v runs out of memory at fewer steps: 12.00 s per step"


@pytest.mark.parametrize("changed", [False, True])
def test_a_recipe_for_other_devices_does_not_stand_before_the_layouts(changed):
    rows = in_order([uneven("1", 10.0, 14.0, 0), uneven("recipe", 3.0, 4.0, 0)])
    told = "\n".join(reasons(Found(SimpleNamespace(changed=changed), None, uneven=rows)))
    assert ("the recipe's own layout is better than all of them" in told) is not changed


def test_a_layout_that_a_dry_run_dropped_leaves_the_table_under_loads():
    configs = [SimpleNamespace() for _ in range(3)]
    entries = [SimpleNamespace(config=config) for config in configs]
    rows = [replace(uneven(str(at + 1), 10.0, 15.0 - at, 0), config=config) for at, config in enumerate(configs)]
    found = Found(None, None, entries=list(entries), uneven=in_order([*rows, uneven("zero_bubble_v", 9.0, 11.0, 0)]))
    assert found.best is entries[2]
    found.entries.pop()
    found.uneven = renumbered(found.uneven, [entry.config for entry in found.entries])
    assert [one.name for one in found.uneven] == ["zero_bubble_v", "2", "1"] and found.best is entries[1]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_placement")
def test_other_schedules_are_ranked_under_loads_and_the_first_of_them_is_written(tmp_path):
    overlay = tmp_path / "o.yaml"
    words = (
        "--top",
        2,
        "--json",
        "--limit",
        "mbs=1",
        "--schedule",
        "zero_bubble_v",
        "--loads",
        "1.3",
        "--write",
        overlay,
    )
    told = json.loads(run(*words).stdout)
    own = next(one for one in told["loads"] if one["name"] == "zero_bubble_v")
    assert own["even_step_s"] == told["schedules"][0]["strategy"]["step_s"] < own["expected_step_s"]
    assert from_recipe(load_recipe(overlay)).schedule == "zero_bubble_v"
    assert "Under one max/mean everywhere" in overlay.read_text("utf-8").replace("\n# ", " ")
