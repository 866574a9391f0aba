"""The whole search of small spaces: against every strategy placed, at several efforts, with the recipe's own mesh."""

import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks.search_regret import every_placement, problem, regret, searched
from tests.tools.search.test_candidates import BASE, MODEL, request
from tools.estimate.loads import loads_of
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.model import pattern_of
from tools.search.candidates import candidate_of
from tools.search.ranking import run, workers
from tools.search.ranking.rank import explain_infeasible, rank
from tools.search.ranking.run import Found, add_loads, entry_of, search_under
from tools.search.ranking.uneven import lowered
from tools.search.ranking.workers import place_all, screen_one
from tools.search.report import more_stages, reasons, stage_rows, table_rows
from tools.search.request import PLANNED


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(workers, "processes", lambda: 1)


def small(number, **sizes):
    """A problem with few strategies."""
    return problem(number, **{"devices": (4, 8), "layers": (4, 6), "fit": 2, **sizes})


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 4, 7, 14, 17, 21])  # each family and each space
def test_nothing_placed_by_the_solver_is_half_a_percent_faster(number):
    asked = small(number)
    found = searched(asked, 0.2)
    truth = regret(asked, found, 0.1, others=1)
    assert found.entries[0].seconds <= 1.005 * truth.seconds
    assert truth.bounded and found.least <= truth.seconds * (1 + 1e-6)
    assert not found.dropped and not found.unplaced
    assert all(entry.peak <= asked.room for entry in found.entries)


def wide(limits):
    """A dense model of six layers and many words on four stages, in the memory that balanced layers need at least."""
    model = replace(MODEL, pattern=pattern_of(6), experts=0, top_k=0, shared_ffn=0, vocab=64000, hidden=1536, ffn=6144)
    asked = request(4, 8, ["tp=1", "cp=1", "pp=4", "shard=optimizer", "mode=global", *limits], model)
    return replace(asked, cap=rank(asked).least.peak)


@pytest.mark.slow
def test_neither_more_memory_nor_a_wider_choice_makes_the_answer_slower():
    asked = wide(["mbs=1", "vpp=1"])
    rooms = [replace(asked, cap=share * asked.cap) for share in (0.88, 0.95, 1.0, 1.3)]
    wider = replace(rooms[1], limits=wide(["mbs<=2", "vpp<=2"]).limits)
    steps = [searched(one, 0.2).entries[0].seconds for one in (*rooms, wider)]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(steps[:-1]))
    assert steps[-1] <= steps[1] * (1 + 1e-6)
    own = replace(asked.base, pp=4, layers=((1, 2, 2, 1),), micro_batches=8)
    found = searched(replace(rooms[1], base=own), 0.2)
    assert found.own_mesh and found.own_mesh.seconds == found.entries[0].seconds, "its balanced layers do not fit"


def test_a_search_gives_up_nothing_of_the_recipe_that_it_reads(stand_in_placement):
    """With less effort than the search that wrote it, the layers of a recipe were placed anew, and slower."""
    asked = wide(["mbs=1", "vpp=1"])
    own = replace(asked.base, pp=4, layers=((2, 2, 2, 0),), micro_batches=8)
    asked = replace(asked, base=own, cap=2 * asked.cap)
    found = searched(asked, 1.0)
    for entry in (found.entries[0], found.own_mesh):
        assert (entry.config.layers, entry.config.recompute) == (own.layers, own.recompute)
    assert "1 is the recipe's own layout: no faster one was found" in reasons(found)
    assert found.least <= found.entries[0].seconds == found.own.seconds
    for other in (
        replace(asked, margin=1 - 0.99 * found.own.peak / asked.cap),  # it leaves no margin
        replace(asked, schedule="gpipe"),  # that is another run
    ):
        assert searched(other, 1.0).entries[0].config.recompute != own.recompute


@pytest.mark.parametrize("margin", [0.0, 0.99])
def test_the_recipes_own_layout_is_written_if_it_is_the_first_under_loads(margin):
    """It was only told: a second search of the recipe that a first one wrote could write a slower layout."""
    asked = request(4, 8, ["pp=1"])
    base = replace(asked.base, dp=4, ep=2, micro_batches=2, sequence_parallel=False)
    asked, times = replace(asked, base=base, margin=margin), TimeModel(asked.hardware)
    own, full = entry_of(base, times, "recipe"), replace(base.recompute, full=base.layers)
    other = replace(entry_of(replace(base, recompute=full), times), seconds=0.9 * own.seconds)
    found = Found(asked, None, entries=[other], own=own, own_mesh=other)
    add_loads(found, "1.3", times, lambda *_: None, {"gpipe": replace(own, seconds=1.0)})
    assert (found.best.config.recompute == base.recompute) is (margin == 0.0)
    names = [one.name for one in found.uneven]
    assert names == (["2", "gpipe", "recipe", "1"] if margin == 0.0 else ["gpipe", "recipe", "1"])
    assert found.entries == sorted(found.entries, key=lambda entry: entry.seconds)


def test_ctrl_c_leaves_what_fits_only_because_layers_moved(monkeypatch):
    asked = wide(["mbs=1", "vpp=1"])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run._Placing, "_prove", interrupted)
    asked = replace(asked, cap=0.95 * asked.cap)
    found = run.search(asked, 4, Budget(0.01, 60), TimeModel(asked.hardware), lambda *_: None)
    assert not found.whole and found.entries
    assert found.placed == len(found.ranking.seconds) == found.ranking.funnel.left == 1


@pytest.mark.slow
@pytest.mark.parametrize(("model", "share"), [("dense", 1.1), ("moe", 1.2), ("mtp", 1.15), ("wide", 0.9)])
def test_no_placement_of_any_strategy_is_faster(model, share):
    """Every strategy of four devices without tensor parallelism, each placement of each tried one by one; in less
    memory than balanced layers need, too.
    """
    plain = replace(MODEL, pattern=pattern_of(4), experts=0, top_k=0, shared_ffn=0)
    moe = replace(MODEL, pattern=pattern_of(4, 8, 1), experts=8)
    limits = ["tp=1", "cp=1", "pp>1", "mbs=1", "shard=optimizer", "mode=global", "ep<=2"]
    if model == "wide":
        asked = wide(["mbs=1", "vpp=1"])
    else:
        asked = request(4, 8, limits, {"dense": plain, "moe": moe, "mtp": replace(moe, mtp=1)}[model])
    asked = replace(asked, cap=share * rank(asked).least.peak)
    times, found = TimeModel(asked.hardware), searched(asked, 1.0)
    strategies = [block.candidate(row, PLANNED) for block in found.ranking.blocks for row in range(len(block))]
    assert found.ranking.funnel.left == len(found.ranking.seconds) > 0
    best = min(every_placement(asked, one, times)[0] for one in strategies)
    assert found.least * (1 - 1e-6) <= best <= found.entries[0].seconds * (1 + 1e-6)
    assert found.entries[0].seconds <= 1.005 * best


@pytest.mark.slow
def test_more_effort_is_never_worse_and_the_bound_only_rises():
    asked = small(4, devices=(8,))
    every = [searched(asked, effort, top=4) for effort in (0.1, 0.4, 1.0)]
    steps, bounds = [found.entries[0].seconds for found in every], [found.least for found in every]
    assert steps == sorted(steps, reverse=True) and max(bounds) <= steps[-1]


@pytest.mark.slow
def test_the_answer_does_not_depend_on_which_process_ends_first(monkeypatch):
    """On four stages of one device nothing is sharded, so that strategies with and without shards are equally fast."""
    asked = request(4, 8, ["pp=4", "mbs=1", "mode=global"], replace(MODEL, pattern=pattern_of(9, 8, 1), experts=8))

    @contextmanager
    def backwards(_):
        yield lambda work, jobs: reversed([(index, work(*job)) for index, job in enumerate(jobs)])

    found = [searched(asked, 0.1, top=3)]
    monkeypatch.setattr(run, "working", backwards)
    found.append(searched(asked, 0.1, top=3))
    first, second = ([entry.candidate for entry in one.entries] for one in found)
    assert first == second and found[0].placed > len(first)
    first, second = ([(row.pp, row.vpp, row.entry and row.entry.candidate) for row in one.stages] for one in found)
    assert first == second
    assert found[0].dropped == found[1].dropped


@pytest.mark.slow
def test_what_is_left_open_is_bounded_with_more_effort_before_the_solver(monkeypatch):
    """Here the first bounds by whole layers get nearly no effort, and the solver does not run."""
    little = 0.01
    monkeypatch.setattr(run, "WHOLE_EFFORT", little)
    monkeypatch.setattr(run, "screen_one", lambda *job: screen_one(*job, *[little] * (len(job) == 4)))
    monkeypatch.setattr(run._Placing, "_close", lambda *_: None)
    model = replace(MODEL, pattern=pattern_of(12, 8, 1), experts=8)
    limits = ["pp=4", "vpp=2", "tp=1", "cp=1", "mbs=1", "shard=optimizer", "mode=global"]
    asked = request(8, 16, limits, model)
    asked = replace(asked, cap=1.2 * rank(asked).least.peak)
    open_, more = (searched(asked, effort) for effort in (little, 1.0))
    assert open_.least < more.least <= more.entries[0].seconds <= open_.entries[0].seconds
    assert more.gap < 0.01 < open_.gap


def test_the_own_mesh_is_placed_and_each_pair_of_stages_and_chunks_is_shown():
    model = replace(MODEL, pattern=pattern_of(6, 8, 1), experts=8)
    base = replace(BASE, model=model, dp=2, pp=2, layers=((3, 3),), micro_batches=4, shard_optimizer=True)
    asked = replace(request(4, 8, limits=["cp=1"], model=model, cap=0.9 * GIB), base=base)
    found = searched(asked, 0.2, top=2)
    assert not asked.changed
    own = candidate_of(found.own_mesh.config)
    assert own._replace(recompute=PLANNED) == candidate_of(base)._replace(recompute=PLANNED)
    assert found.own_mesh.seconds <= found.own.seconds or found.own.peak > asked.room
    assert [row[0] for row in table_rows(found)][-2:] == ["mesh", "recipe"]
    words = "own mesh was not placed anew"
    assert not any(words in line for line in reasons(found))
    assert any(words in line for line in reasons(replace(found, own_mesh=None)))
    assert found.stages[0].entry.seconds == found.entries[0].seconds
    assert len(stage_rows(found)) == min(12, len(found.stages)) and bool(more_stages(found)) == (len(found.stages) > 12)
    assert {(row.pp, row.vpp) for row in found.stages} == {(block.pp, block.vpp) for block in found.ranking.blocks}
    for row in found.stages:
        assert row.entry is None or row.bound <= row.entry.seconds
    assert min(row.bound for row in found.stages) <= found.least


@pytest.mark.slow
def test_under_loads_the_best_of_all_placed_under_them_is_found():
    asked, text = small(4, devices=(8,)), "spread:0.8"
    times, found = TimeModel(asked.hardware), searched(asked, 0.2, top=4)
    before = [entry.config for entry in found.entries]
    search_under(found, text, 4, Budget(0.2), times, lambda *_: None)
    assert found.under.entries and found.added == len(found.entries) - len(before)
    assert all(entry.config.skew == 1 for entry in found.entries)
    assert set(before) <= {entry.config for entry in found.entries}
    ratio = dict(found.under.request.skews)
    assert ratio[1] == 1 and ratio == dict(sorted(ratio.items())) and max(ratio.values()) > 1.3

    def expected(config):
        return times.under(config, loads_of(text, config), simulated=True).total

    every: dict = {}
    placed = [one for one in found.ranking.fastest() if one.candidate.recompute == PLANNED]
    place_all(found.under.request, placed, times, Budget(0.1), every.__setitem__)
    best = min(
        expected(replace(one.configuration, skew=1.0)) for one in every.values() if one.configuration is not None
    )
    assert min(expected(entry.config) for entry in found.entries) <= 1.01 * best
    search_under(even := searched(asked, 0.2, top=4), "even", 4, Budget(0.2), times, lambda *_: None)
    assert even.under is None


@pytest.mark.slow
def test_ctrl_c_in_the_second_search_leaves_the_first(monkeypatch):
    asked = small(4, devices=(8,))
    found = searched(asked, 0.1, top=2)
    before = list(found.entries)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.search.ranking.run.rank", interrupted)
    search_under(found, "1.5", 2, Budget(0.1), TimeModel(asked.hardware), lambda *_: None)
    assert found.entries == before and not found.whole and found.under is None
    assert any("share the experts: taken is 1 for EP 1" in line for line in reasons(found)), "also without its layouts"


def test_a_ratio_that_few_devices_cannot_have_is_named_with_the_one_that_was_taken():
    words = (
        "--loads 3: the largest load of a device, divided by the mean load, can be at most the number of devices that "
        "share the experts: taken is "
    )
    assert lowered("3", ((1, 1.0), (2, 2.0), (4, 3.0))) == [f"{words}1 for EP 1, 2 for EP 2"]
    assert lowered("3", ((4, 3.0),)) == lowered("spread:0.8", ((1, 1.0), (2, 1.3))) == lowered("", ()) == []


@pytest.mark.parametrize(
    ("changes", "asked_for", "words"),
    [
        ({}, {"cap": 0.01 * GIB}, ["nothing fits: the least memory", "nearest: --memory"]),
        ({}, {"devices": 251, "batch": 48}, ["is legal; most break", "nearest with fewer: --devices"]),
        (
            {"pattern": pattern_of(1)},
            {"devices": 2, "batch": 4, "limits": ["pp=2"]},
            ["pp=2", "without --limit 'pp=2'"],
        ),
        ({}, {"devices": 16, "batch": 32, "limits": ["pp=16"]}, ["--limit pp=16 drops", "without --limit 'pp=16'"]),
    ],
)
def test_what_cannot_be_says_in_a_line_each_what_would_make_it_feasible(changes, asked_for, words):
    dense = {"experts": 0, "top_k": 0, "shared_ffn": 0} if changes else {}
    asked = request(**{"devices": 4, "batch": 8, **asked_for, "model": replace(MODEL, **dense, **changes)})
    lines = explain_infeasible(asked, rank(asked))
    for text in words:
        assert any(text in line for line in lines), lines
