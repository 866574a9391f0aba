"""These tests check whether ranks can run together, call by call and link by link.

The verdict is what happens when ranks run their programs: threads, real messages, and a short time-out
only where the verdict is that something hangs.
"""

import copy
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.semi_auto_cpu.collecting import LONG, attributes
from tests.plugins.semi_auto_cpu.test_failures import messages
from tools.dryrun.order import Call, check_links, check_order, count_groups, programs_of
from tools.dryrun.plan import Job, Plan, Stage
from tools.recipe.load import Recipe

HIERARCHICAL = "hierarchical_ep/dispatcher.py:10"
DISPATCHER = "moe/token_dispatcher.py:321"


def gather(members, what="4x8 Float32", where=DISPATCHER):
    return Call("AllGather", members, what, where)


def p2p(source, destination, tag):
    return Call("p2p", (source, destination), f"8 Float32, tag {tag}", "Send")


def test_equal_programs_pass():
    group = (0, 1, 2, 3)
    assert check_order({0: [gather(group)] * 3, 2: [gather(group)] * 3}) == []


def test_groups_with_several_compiled_members_are_counted():
    programs = {0: [gather((0, 1)), gather((0, 4)), p2p(0, 4, 1)], 4: [gather((0, 4)), gather((4, 5))]}
    assert count_groups(programs) == {"all": 3, "compared": 1}


def test_ranks_that_were_not_compiled_come_when_needed():
    assert check_order({0: [gather((0, 7)), p2p(0, 9, 1), gather((0, 1))]}) == []


def test_swapped_operators_on_a_group_name_the_key():
    first, second = gather((0, 1)), Call("AlltoAllV", (0, 1), "8 Float32", HIERARCHICAL)
    (line,) = check_order({0: [first, second], 1: [second, first]})
    assert line.startswith("model.model_config.moe_token_dispatcher_type: group of 2 (0, 1): call 1 is AllGather")
    assert "AlltoAllV" in line


def test_swapped_groups_wait_in_a_circle_and_name_the_plugin():
    inner, outer = gather((0, 1), where=HIERARCHICAL), gather((0, 1, 2, 3), where=HIERARCHICAL)
    (line,) = check_order({0: [inner, outer], 1: [outer, inner]})
    assert line.startswith(
        "plugins.hierarchical_ep: these calls wait for each other forever: rank 0 waits in AllGather"
    )


def test_a_missing_call_is_found():
    (line,) = check_order({0: [gather((0, 1))] * 2, 1: [gather((0, 1))]})
    assert "rank 0's call 2" in line and "rank 1 makes 1 calls" in line


def test_send_without_receive_and_with_another_tag():
    (line,) = check_order({0: [p2p(0, 1, 5)], 1: []})
    assert line.startswith("parallel.pipeline_config.pipeline_scheduler: ") and "no partner" in line
    (line,) = check_order({0: [p2p(0, 1, 5), p2p(0, 1, 6)], 1: [p2p(0, 1, 6), p2p(0, 1, 5)]})
    assert "tag 5" in line and "tag 6" in line


def test_crossing_sends_wait_for_ever():
    """Both send first: as the blocking Sends of a pipeline would."""
    (line,) = check_order({0: [p2p(0, 1, 1), p2p(1, 0, 2)], 1: [p2p(1, 0, 2), p2p(0, 1, 1)]})
    assert "wait for each other" in line


@given(st.integers(2, 5), st.integers(1, 30), st.integers(0, 10**6))
def test_programs_from_one_order_pass_and_a_missing_call_is_seen(ranks, calls, seed):
    """Members that follow one order of the world finish; one that leaves out its last call is found."""
    chosen = random.Random(seed)
    world = [tuple(sorted(chosen.sample(range(ranks), chosen.randint(2, ranks)))) for _ in range(calls)]
    programs = {rank: [gather(members) for members in world if rank in members] for rank in range(ranks)}
    assert check_order(programs) == []
    rank = chosen.randrange(ranks)
    broken = copy.copy(programs)
    if programs[rank]:
        broken[rank] = programs[rank][:-1]
        assert check_order(broken) != []


def test_programs_of_reports():
    report = {
        "rank": 4,
        "graph": {
            "groups": [[4, 5], [0, 4]],
            "collectives": [
                {"op": "AllReduce", "group": 0, "shape": [], "dtype": "Float32", "source": ""},
                {"op": "Send", "group": 1, "shape": [2, 3], "dtype": "Float32", "source": "", "peer": 0, "tag": 1,
                 "micro": 0, "chunk": 1},
                {"op": "Receive", "group": 1, "shape": [2, 3], "dtype": "Float32", "source": "", "peer": 0, "tag": 2,
                 "micro": 0, "chunk": 1},
            ],
        },
    }  # fmt: skip
    reduce, send, receive = programs_of([report])[4]
    assert (reduce.op, reduce.members, reduce.what) == ("AllReduce", (4, 5), "one number Float32")
    assert (send.members, receive.members) == ((4, 0), (0, 4))
    assert send.what == "2x3 Float32, tag 1, micro-batch 0"
    assert send.key == "parallel.pipeline_config.pipeline_scheduler"
    assert reduce.key == "parallel"


@pytest.mark.parametrize(
    ("where", "key"), [("ep_overlap/adapter.py:3", "plugins.ep_overlap"), ("layers.py:1", "parallel")]
)
def test_key_of_a_source(where, key):
    assert gather((0, 1), where=where).key == key


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


RANKS = 3


def planned(rank, op, members, size, tag=0):
    """Return one call of a rank in two forms: as the check reads it, and as `Collectives.run` takes it."""
    x = np.ones(size, np.float32)
    if op == "p2p":
        source, target = members
        group = sorted(members)
        call = Call(op, members, f"{size} Float32, tag {tag}", "Send")
        if rank == source:
            return call, ("Send", attributes(group, sr_tag=tag, dest_rank=group.index(target)), [x], [])
        return call, ("Receive", attributes(group, sr_tag=tag, src_rank=group.index(source)), [], [x])
    out = np.empty(size * len(members) if op == "AllGather" else size, np.float32)
    return Call(op, members, f"{size} Float32", ""), (op, attributes(members, op="sum"), [x], [out])


def draw(chosen):
    """Draw one call that ranks make together: (op, members, size, tag)."""
    if chosen.random() < 0.5:
        return "p2p", tuple(chosen.sample(range(RANKS), 2)), chosen.choice([2, 3]), chosen.choice([1, 2])
    members = tuple(sorted(chosen.sample(range(RANKS), chosen.randint(2, RANKS))))
    return chosen.choice(["AllReduce", "AllGather"]), members, chosen.choice([2, 3]), 0


def disturb(chosen, program):
    """A fault of one rank: another order, a call too few or too many, another size or tag."""
    if not program:
        return
    place = chosen.randrange(len(program))
    kind = chosen.choice(["swap", "remove", "repeat", "size", "tag"])
    op, members, size, tag = program[place]
    if kind == "swap":
        other = chosen.randrange(len(program))
        program[place], program[other] = program[other], program[place]
    elif kind == "remove":
        del program[place]
    elif kind == "repeat":
        program.insert(place, program[place])
    elif kind == "size":
        program[place] = op, members, size + 1, tag
    else:
        program[place] = op, members, size, tag + 1


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 8), st.integers(0, 2))
def test_the_verdict_is_what_happens(seed, calls, faults):
    chosen = random.Random(seed)
    world = [draw(chosen) for _ in range(calls)]
    drawn = [[item for item in world if rank in item[1]] for rank in range(RANKS)]
    for _ in range(faults):
        disturb(chosen, chosen.choice(drawn))
    plans = [[planned(rank, *item) for item in program] for rank, program in enumerate(drawn)]
    verdict = check_order({rank: [call for call, _ in plan] for rank, plan in enumerate(plans)})
    # a machine with much to do may be slow, not wrong: what is to run through gets its time
    timeout = 0.25 if verdict else LONG
    told = messages([[run for _, run in plan] for plan in plans], timeout, test="synchronous")
    assert bool(verdict) == any(told), (verdict, told)
