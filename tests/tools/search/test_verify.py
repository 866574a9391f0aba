import os

import pytest

from plugins.errors import ClusterError
from tools.recipe.load import load_recipe
from tools.search.efficiency import cluster
from tools.search.from_recipe import from_recipe
from tools.search.memory_model import GIB, all_stages
from tools.search.search_entry import entry_of
from tools.search.search_request import request_of
from tools.search.search_times import SearchTimes
from tools.search.space import candidate_of, configuration
from tools.search.verify import DryRun, dry_run, judge, verify

RECIPE = "recipes/telechat3_105b/pretrain_4k.yaml"


def asked(cap=45):
    return request_of(load_recipe(RECIPE), "atlas_800t_a2", memory_gib=cap)


@pytest.fixture(scope="module")
def entries():
    request = asked()
    times = SearchTimes(cluster("atlas_800t_a2"))
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

    def tell(number, problems, estimate):
        told.append((number, problems, estimate))

    verify(load_recipe(RECIPE), entries, 2, asked(), tell, run=run)
    assert told == [(0, [], 9), (1, ["no memory left"], 0)]
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


def test_quick_runs_count_the_larger_activations_and_full_ones_their_own(entries):
    entry = entries[0]
    stages = all_stages(entry.config)
    exact = [int(stage.static) for stage in stages]
    peak = max(stage.peak for stage in stages)
    low = DryRun([], exact, exact)  # of a dry run that sees less than the search predicts
    assert judge(entry, low, peak + 1, full=False) == []
    tight = judge(entry, low, peak - 0.01 * GIB, full=False)
    assert len(tight) == 1 and tight[0].startswith(f"stage {[stage.peak for stage in stages].index(peak)}:")
    high = DryRun([], exact, [*exact[:4], int(peak) + GIB, *exact[5:]])  # and of one that sees more
    assert [line.split(":")[0] for line in judge(entry, high, peak + 1, full=False)] == ["stage 4"]
    found = DryRun([], exact, [size + 2 * GIB for size in exact])
    assert judge(entry, found, max(exact) + 2 * GIB, full=True) == []
    assert judge(entry, found, min(exact), full=True) and judge(entry, DryRun(["no"], [], []), 0, True) == ["no"]
