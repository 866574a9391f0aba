import os
from dataclasses import replace

import pytest

from plugins.errors import ClusterError
from tools.dryrun.quick import ERROR
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import all_stages
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.recipe.load import load_recipe
from tools.search.candidates import candidate_of, configuration
from tools.search.ranking.run import entry_of
from tools.search.ranking.verify import DryRun, Verdict, dry_run, judge, verify, wrong_term
from tools.search.request import request_of

RECIPE = "recipes/telechat3_105b/pretrain_4k.yaml"


def asked(cap=45):
    return request_of(load_recipe(RECIPE), "atlas_800t_a2", memory_gib=cap)


@pytest.fixture(scope="module")
def entries():
    request = asked()
    times = TimeModel(cluster("atlas_800t_a2"))
    own = candidate_of(request.base)._replace(recompute="full")
    others = [own, own._replace(tp=4, dp=2 * own.dp, m=own.m // 2)]
    return [entry_of(configuration(request, one), times) for one in others]


def test_each_entry_is_written_and_run(entries):
    seen, told = [], []

    def run(path, full):
        seen.append(from_recipe(load_recipe(path)))
        if len(seen) == 2:
            raise ClusterError("no memory left")
        return DryRun([], [0] * 8, [9] * 8)

    def tell(number, verdict):
        told.append((number, verdict))

    verify(load_recipe(RECIPE), entries, 2, asked(), tell, run=run)
    assert told == [(0, Verdict([], [], 9)), (1, Verdict(["no memory left"], [], 0))]
    for config, entry in zip(seen, entries, strict=True):
        assert (config.layers, config.tp, config.dp) == (entry.config.layers, entry.config.tp, entry.config.dp)


@pytest.mark.parametrize(("count", "good", "tried"), [(1, 0, 1), (1, 1, 2), (2, 0, 2), (1, None, 3)])
def test_it_goes_on_until_one_passes(entries, count, good, tried):
    told = []

    def run(path, full):
        return DryRun([], [0] * 8, [9] * 8) if len(told) == good else DryRun(["no"], [], [])

    three = [*entries, entries[0]]
    verify(load_recipe(RECIPE), three, count, asked(), lambda *words: told.append(words), run=run)
    assert len(told) == tried


def test_what_is_run_has_the_memory_that_was_asked_for(entries):
    seen = []

    def run(path, full):
        seen.append(load_recipe(path)["context"])
        return DryRun([], [0] * 8, [9] * 8)

    verify(load_recipe(RECIPE), entries[:1], 1, asked(58), lambda *words: None, run=run)
    assert [(context["max_device_memory"], context["mempool_block_size"]) for context in seen] == [("58GB", "58GB")]


def test_what_check_refuses_is_not_compiled(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(
        f"base_config: {os.path.relpath(RECIPE, tmp_path)}\nparallel_config:\n  model_parallel: 3\n", "utf-8"
    )
    problems = dry_run(wrong, full=False).problems
    assert any("parallel_config.model_parallel" in problem for problem in problems)


def with_cap(cap, margin=0.0):
    """A request of so many bytes."""
    return replace(asked(), cap=cap, margin=margin)


def test_quick_runs_are_exact_without_activations_and_full_ones_count_their_own(entries):
    entry = entries[0]
    stages = all_stages(entry.config)
    exact = [int(stage.static) for stage in stages]
    found = DryRun([], exact, exact)
    peak = max(stage.peak for stage in stages)
    assert not judge(entry, found, with_cap(peak + 1), full=False).problems
    assert judge(entry, found, with_cap((1 + ERROR) * peak + 1), full=False).proven
    tight = judge(entry, found, with_cap(peak - 0.01 * GIB), full=False).problems
    assert len(tight) == 1 and tight[0].startswith(f"stage {[stage.peak for stage in stages].index(peak)}:")
    found = DryRun([], exact, [size + 2 * GIB for size in exact])
    assert judge(entry, found, with_cap(max(exact) + 2 * GIB), full=True).proven
    assert judge(entry, found, with_cap(min(exact)), full=True).problems
    assert judge(entry, DryRun(["no"], [], []), with_cap(0), True).problems == ["no"]


def test_a_stage_that_the_dry_run_finds_over_the_limit_fails_whatever_the_search_predicted(entries):
    """Its stage 4 recomputes nothing: the search took it to fit, and a quick dry run was not asked."""
    entry = entries[0]
    exact = [int(stage.static) for stage in all_stages(entry.config)]
    total = [size + GIB for size in exact]
    cap = max(stage.peak for stage in all_stages(entry.config)) + GIB
    assert not judge(entry, DryRun([], exact, total), with_cap(cap), full=False).problems
    total[4] = int(cap) + GIB
    problems = judge(entry, DryRun([], exact, total), with_cap(cap), full=False).problems
    assert len(problems) == 1 and problems[0].startswith("stage 4:")


def test_within_the_margin_nothing_is_proven_and_nothing_dropped(entries):
    entry = entries[0]
    exact = [int(stage.static) for stage in all_stages(entry.config)]
    peak = max(stage.peak for stage in all_stages(entry.config))
    verdict = judge(entry, DryRun([], exact, exact), with_cap(1.03 * peak, margin=0.05), full=False)
    assert not verdict.proven and verdict.problems == [] and len(verdict.doubts) >= 1
    assert "less a margin of 5.0 %" in verdict.doubts[0]
    assert judge(entry, DryRun([], exact, exact), with_cap(peak / 0.95, margin=0.05), full=False).proven


def test_it_goes_on_where_nothing_is_proven(entries):
    told = []

    def run(path, full):
        exact = [0] * 8
        return DryRun([], exact, [int(0.99 * 45 * GIB) if not told else 9] * 8)

    verify(load_recipe(RECIPE), entries, 1, asked(), lambda *words: told.append(words), run=run)
    assert [verdict.proven for _, verdict in told] == [False, True]


def test_a_wrong_term_is_named_and_counts_in_strategies_that_are_alike(entries):
    """Twice the activations: the next strategy with the same graph of a layer is not compiled if it cannot fit."""
    first, other = entries
    told, compiled = [], []

    def run(path, full):
        every = all_stages((first if not compiled else other).config)
        compiled.append(path)
        exact = [int(stage.static) for stage in every]
        return DryRun([], exact, [int(2 * stage.peak - stage.static) for stage in every])

    cap = max(2 * stage.peak - stage.static for stage in all_stages(first.config))
    for memory, words in ((cap - 1, "not compiled: stage"), (cap + GIB, "")):
        told.clear(), compiled.clear()
        verify(load_recipe(RECIPE), [first, first, other], 3, with_cap(memory), lambda *w: told.append(w), run=run)
        verdicts = [verdict for _, verdict in told]
        assert [verdict.compiled for verdict in verdicts] == [True, not words, True]
        assert len(compiled) == 3 - bool(words)
        assert "GiB of activations and buffers on stage" in verdicts[0].wrong
        assert all(problem.startswith(words) for problem in verdicts[1].problems)


def test_what_a_dry_run_teaches_counts_in_rows_that_were_not_to_be_compiled(entries):
    """Rows of the same kind stood in the table as fitting, at 55.4 GiB of 55.5, below one found to need 1.8 more."""
    first, other = entries
    own = candidate_of(first.config)
    tighter = entry_of(configuration(asked(), own._replace(recompute="none")), TimeModel(cluster("atlas_800t_a2")))
    cap = 1.02 * max(stage.peak for stage in all_stages(tighter.config))  # by the search it fits
    told, compiled = [], []

    def run(path, full):
        compiled.append(path)
        every = all_stages(first.config)
        return DryRun(
            [], [int(stage.static) for stage in every], [int(2 * stage.peak - stage.static) for stage in every]
        )

    rows = [first, other, tighter, first]
    verify(load_recipe(RECIPE), rows, 1, with_cap(cap), lambda *words: told.append(words), run=run)
    assert len(compiled) == 1
    assert [(number, verdict.compiled) for number, verdict in told] == [(0, True), (2, False)]
    assert told[1][1].problems[0].startswith("not compiled: stage")


def test_within_its_error_a_dry_run_agrees_and_weights_can_be_wrong_too(entries):
    every = all_stages(entries[0].config)
    exact, peaks = [int(stage.static) for stage in every], [stage.peak for stage in every]
    assert wrong_term(entries[0], DryRun([], exact, [int((1 + 0.9 * ERROR) * peak) for peak in peaks])) is None
    assert wrong_term(entries[0], DryRun(["refused"], [], [])) is None
    more = [3 * size for size in exact]
    wrong = wrong_term(entries[0], DryRun([], more, [peak + 2 * size for peak, size in zip(peaks, exact, strict=True)]))
    assert wrong.static and wrong.found == pytest.approx(3 * wrong.counted)
    assert "optimizer state" in wrong.words and wrong.exceeds(entries[0], max(peaks))
