import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.dryrun.compile.job import Job
from tools.dryrun.jobs import Plan
from tools.dryrun.links import check_links
from tools.dryrun.order import check_order, programs_of
from tools.dryrun.stages import Stage
from tools.recipe.load import Recipe

PER_STAGE, MICRO = 4, 3


def calls(op, rank, peer, chunk=0, shape=(8, 2), micros=range(MICRO)):
    more = {"group": 0, "source": "", "dtype": "BFloat16", "shape": list(shape), "chunk": chunk}
    return [{"op": op, "me": rank, "peer": peer, "tag": peer * 100 + micro, "micro": micro, **more} for micro in micros]


def result(stage, stages, place=0):
    """A rank of a plain pipeline, with an embedding that the first and the last stage share."""
    rank, found = stage * PER_STAGE + place, []
    before, behind = rank - PER_STAGE, rank + PER_STAGE
    if stage > 0:
        found += calls("Receive", rank, before) + calls("Send", rank, before)
    if stage < stages - 1:
        found += calls("Send", rank, behind) + calls("Receive", rank, behind)
    if stages > 2 and stage in (0, stages - 1):
        other = (stages - 1 - stage) * PER_STAGE + place
        ops = ("Send", "Receive") if stage == 0 else ("Receive", "Send")
        found = [item for op in ops for item in calls(op, rank, other, 0, (64,), [0])] + found
    for item in found:  # as MindSpore does: named after both ends
        item["tag"] = (min(rank, item["peer"]) * 1000 + max(rank, item["peer"])) * 10 + item["micro"]
    return {"rank": rank, "graph": {"groups": [[]], "collectives": found}}


def plan(job_of, compiled):
    stages = [Stage(number, ((0, ("moe",)),), (), ()) for number in range(len(job_of))]
    return Plan(stages, [Job(Recipe({}), stage * PER_STAGE, stage) for stage in compiled], job_of, MICRO)


def as_105b():
    """Stages 0, 1, 5 and 7 of 8, as `plan_jobs` chooses them for the 105B recipe."""
    compiled = [0, 1, 5, 7]
    return plan([0, 1, 1, 1, 1, 2, 2, 3], compiled), [result(stage, 8) for stage in compiled]


def test_links_are_compared_by_the_stages_that_stand_for_their_ends():
    whole, results = as_105b()
    links = check_links(whole, results, PER_STAGE, alike=True)
    assert links.problems == []
    assert links.exact == [(0, 1), (0, 7)]
    assert links.alike == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert links.as_json() == {"exact": 2, "alike": 6, "unknown": 0}


def broken(results, stage, change):
    """The results with another list of calls on one stage; its peers were not compiled."""
    results = copy.deepcopy(results)
    graph = next(one for one in results if one["rank"] == stage * PER_STAGE)["graph"]
    graph["collectives"] = change(graph["collectives"])
    assert check_order(programs_of(results)) == []  # which sees compiled ends only
    return results


def test_a_stage_that_sends_nothing_is_seen_though_its_neighbours_were_not_compiled():
    whole, results = as_105b()
    silent = broken(results, 5, lambda items: [item for item in items if item["op"] != "Send"])
    links = check_links(whole, silent, PER_STAGE, alike=True)
    assert [line.partition(", as")[0].partition("stages ")[2] for line in links.problems] == [
        "4 and 5",
        "5 and 6",
        "5 and 6",
        "6 and 7",
    ]
    first = links.problems[0]
    assert first.startswith("parallel.pipeline_config.pipeline_scheduler: between stages 4 and 5")
    assert first.endswith("rank 20's Send 1 is not there, rank 4's Receive 1 is 8x2 BFloat16, micro-batch 0, chunk 0")


@pytest.mark.parametrize("key, value", [("shape", [8, 3]), ("dtype", "Float32"), ("chunk", 1)])
def test_each_part_of_a_call_counts(key, value):
    whole, results = as_105b()
    other = broken(results, 5, lambda items: [{**items[0], key: value}, *items[1:]])
    assert len(check_links(whole, other, PER_STAGE, alike=True).problems) == 2  # (4, 5) and (5, 6)


@given(st.data())
def test_any_call_that_is_missing_twice_or_late_is_seen(data):
    whole, results = as_105b()
    number = len(results[2]["graph"]["collectives"])
    place = data.draw(st.integers(0, number - 1))
    way = data.draw(st.sampled_from(["missing", "twice", "late"]))

    def change(items):
        rest = items[:place] + items[place + 1 :]
        return {"missing": rest, "twice": [*items, items[place]], "late": [*rest, items[place]]}[way]

    other = broken(results, 5, change)
    if way == "late" and items_after(results[2], place) == 0:
        return  # it was the last of its link and direction
    assert check_links(whole, other, PER_STAGE, alike=True).problems != []


def items_after(one, place):
    """Calls of the same operator and peer behind a place."""
    items = one["graph"]["collectives"]
    mine = items[place]["op"], items[place]["peer"]
    return sum((item["op"], item["peer"]) == mine for item in items[place + 1 :])


def test_a_link_without_any_call_is_no_link():
    whole, results = plan([0, 1, 2], [0, 1, 2]), [result(stage, 3) for stage in range(3)]
    for one in results:
        one["graph"]["collectives"] = [
            item for item in one["graph"]["collectives"] if {one["rank"], item["peer"]} != {4, 8}
        ]
    links = check_links(whole, results, PER_STAGE, alike=True)
    assert len(links.problems) == 2 and "rank 4 sends nothing" in links.problems[0]


def test_what_no_stage_stands_for_is_unknown():
    chosen, results = plan([-1, 0, 0, 0, 0, -1, -1, -1], [1]), [result(1, 8)]
    assert check_links(chosen, results, PER_STAGE, alike=True).as_json() == {"exact": 0, "alike": 3, "unknown": 4}
    whole, results = as_105b()
    assert check_links(whole, results, PER_STAGE, alike=False).as_json() == {"exact": 2, "alike": 0, "unknown": 6}
    assert check_links(plan([], []), results, PER_STAGE, alike=True).as_json() == {"exact": 0, "alike": 0, "unknown": 0}


def test_ranks_at_other_places_of_two_stages_stand_for_each_other():
    both = plan([0, 1], [0, 1])
    results = [result(0, 2), result(1, 2, place=3)]
    results[0]["graph"]["collectives"][0]["chunk"] = 1  # the way around: on to the next chunk
    links = check_links(both, results, PER_STAGE, alike=True)
    assert (links.problems, links.alike) == ([], [(0, 1)])
