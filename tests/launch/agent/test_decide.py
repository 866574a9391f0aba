"""These tests check the decision that follows the end of an attempt."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.agent.decide import Rules, Smaller, _of_all_hosts, next_hosts
from launch.run.failure import OF_LOGS
from plugins.spike_guard.plan import NO_MORE
from tests.launch.agent.ends import A, B, C, attempt, end, judge, told
from tools.runs.attempts import Beat, End, Verdict

# the fault table: (ends, beats with the time of the last step where that is another, who began it, cause, decision)
LOST = "Connection to worker 1 timed out"
TABLE = {
    "worker 0 killed": ([end(A, 100, "signal", rank=0, code=-9), told(B)], [], A, "signal", "restart"),
    "worker 1 killed": ([told(A), end(B, 100, "signal", rank=1, code=-9)], [], B, "signal", "restart"),
    "worker 1 killed, the victim is seen first": (
        [end(A, 99.7, "exit", rank=0, code=1), end(B, 100, "signal", rank=1, code=-9)], [], B, "signal", "restart"),
    "worker 1 killed, the victim complains first": (
        [end(A, 70, "exit", rank=0, code=1, message=LOST), end(B, 100, "signal", rank=1, code=-9)], [], B, "signal",
        "restart"),
    "a worker killed, whose log spoke of a lost connection": (
        [end(A, 100.2, "exit", code=1), end(B, 100, "signal", code=-9, message=LOST)], [], B, "signal", "restart"),
    "worker 1 stopped": ([told(A), end(B, 130, "hang", rank=1)], [], B, "hang", "restart"),
    "worker 1 stopped, the other agent sees the hang first": (
        [end(A, 129, "hang"), end(B, 130, "hang", rank=1)], [], B, "hang", "restart"),
    "worker 1 stopped, its agent was told before it saw the hang": (
        [end(A, 129, "hang"), told(B, rank=1)], [], B, "hang", "restart"),
    "worker 1 hangs a step behind": ([end(A, 130, "hang", step=21), told(B, step=20)], [], B, "hang", "restart"),
    "worker 1 still compiles": (
        [end(A, 130, "hang", phase="step", step=8), told(B, phase="compile", step=8)], [], B, "hang", "restart"),
    "a hang without a trace": ([end(A, 130, "hang"), told(B)], [], None, "hang", "restart"),
    "the link is down": ([end(A, 133, "exit", code=1, message=LOST), told(B)], [], None, None, "restart"),
    "the link is down, both complain": (
        [end(A, 133, "exit", code=1, message=LOST), end(B, 133.2, "exit", code=1, message="Broken pipe")], [], None,
        None, "restart"),
    "the link is down, and its host says so": (
        [end(A, 133, "exit", code=1, message=LOST), end(B, 135, "lost node", message="eth0 has no carrier")], [], B,
        "lost node", "restart"),
    "the link is down: MindSpore ends the other host's worker, and its own host says so when it is told": (
        [end(A, 100, "signal", rank=0, code=-15), end(B, 101.7, "lost node", message="no link")], [(B, 101, 70)], B,
        "lost node", "restart"),
    "the link is down: the other host's worker fails with words that nobody knows": (
        [end(A, 100, "exit", code=1, message="odd"), end(B, 101.7, "lost node", message="no link")],
        [(B, 101, 70)], B, "lost node", "restart"),
    "the link is down: a collective of MindSpore's fails": (
        [end(A, 100, "exit", rank=0, code=1, message="RuntimeError: Launch kernel failed, name:Default/AllReduce-op62"),
         told(B)], [], None, None, "restart"),
    "a worker stopped: MindSpore ends the other host's": (
        [end(A, 100, "signal", rank=0, code=-15), end(B, 101.7, "hang", rank=1)], [(B, 101, 70)], B, "hang", "restart"),
    "a worker ended by SIGTERM, and nothing else is known": (
        [end(A, 100, "signal", rank=0, code=-15), told(B)], [], None, None, "restart"),
    "a kernel of one's own fails": (
        [end(A, 100, "exit", rank=0, code=1, message="RuntimeError: Launch kernel failed, name:Default/MatMul-op2"),
         told(B)], [], A, "exit", "restart"),
    "all of node 1 dead": ([told(A), end(B, 104.5, "lost node", by=A)], [(B, 100)], B, "lost node", "restart"),
    "all of node 0 dead": ([end(A, 104.5, "lost node", by=B), told(B)], [(A, 100)], A, "lost node", "restart"),
    "node 1 dead, the other's worker ends before it is missed": (
        [end(A, 101.5, "exit", code=1), end(B, 104.5, "lost node", by=A)], [(B, 100)], B, "lost node", "restart"),
    "node 1 dead, nobody has written so": ([end(A, 103, "exit", code=1)], [(A, 102.5), (B, 100)], B, "lost node",
                                           "restart"),
    "worker 0 killed, and then its whole node": (
        [end(A, 100, "signal", rank=0, code=-9), end(B, 109, "lost node", by=A)], [(B, 105)], A, "signal", "restart"),
    "the scheduler dead": (
        [end(A, 100, "signal", message="msrun's scheduler failed"), told(B)], [], A, "signal", "restart"),
    "disk full in a save": (
        [told(A, phase="save"), end(B, 100, "exit", phase="save", code=1, message="No space left on device")], [], None,
        "exit", "restart"),
    "disk full elsewhere": (
        [told(A), end(B, 100, "exit", code=1, message="No space left on device: 'b'")], [], B, "exit", "restart"),
    "a host has lost the disk": ([told(A), end(B, 104, "lost disk")], [], B, "lost disk", "restart"),
    "port taken": ([end(A, 20, "port", phase="start", step=8), told(B, 21)], [], A, "port", "restart"),
    "NaN": ([end(A, 100, "not finite", rank=0, code=1), told(B)], [], A, "not finite", "give up"),
    "NaN, seen by all": ([end(A, 100, "not finite"), end(B, 100.1, "not finite")], [], None, "not finite", "give up"),
    "spike, rolled back": ([end(A, 100, "spike", rank=0), told(B)], [], A, "spike", "restart"),
    "user error": ([end(A, 20, "user error", phase="start", step=8, code=2), told(B)], [], A, "user error", "give up"),
    "never came": ([told(A)], [(A, 99)], B, "never came", "restart"),
    "two hosts exit alike": (
        [end(A, 100, "exit", code=1), end(B, 100.4, "exit", code=1)], [], None, "exit", "restart"),
    "two nodes lost at once": (
        [end(A, 104, "lost node", by=C), end(B, 104, "lost node", by=C), told(C)], [(A, 100), (B, 100.3)], None,
        "lost node", "restart"),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE)
def test_the_fault_table(row):
    ends, beats, host, cause, decision = TABLE[row]
    signs = [Beat(name, time, "step", *(since or [time]), 20) for name, time, *since in beats]
    said = judge(attempt(*ends, hosts=[A, B, C] if any(each.host == C for each in ends) else [A, B], beats=signs))
    assert (said.initiator, said.cause, said.decision) == (host, cause, decision)
    assert said.why
    assert host not in said.victims


def test_victims_are_those_that_failed_without_beginning_it():
    ends = [end(A, 100.2, "exit", code=1), end(B, 100, "signal", code=-9, rank=1), told(C)]
    said = judge(attempt(*ends, hosts=[A, B, C]))
    assert (said.initiator, said.rank, said.victims) == (B, 1, [A])


@given(st.permutations([A, B, C]), st.floats(0.0, 5.0), st.booleans())
def test_a_kill_is_named_whatever_its_victims_say(hosts, later, complains):
    """Victims fail up to MARGIN before (looks of agents) and at any time after the kill."""
    message = LOST if complains else "worker failed with exit code 1"
    victims = [end(host, 99.0 + later, "exit", code=1, message=message) for host in hosts[1:]]
    assert judge(attempt(end(hosts[0], 100, "signal", code=-9), *victims, hosts=[A, B, C])).initiator == hosts[0]


def test_a_host_that_is_slow_to_write_its_end_is_not_gone():
    hang = attempt(end(A, 130, "hang"), beats=[Beat(B, 129, "step", 80, 20)])
    assert judge(hang, now=134.0).initiator is None
    said = judge(hang, now=141.0)
    assert (said.initiator, said.cause) == (B, "lost node")


def test_a_host_that_lost_the_disk_knows_no_time():
    ends = [end(A, float("nan"), "lost disk"), told(B)]
    assert judge(attempt(*ends)).initiator == A
    killed = [end(A, float("nan"), "lost disk"), end(B, 100, "signal", code=-9)]
    assert judge(attempt(*killed, told(C, 110), hosts=[A, B, C])).initiator == B


def test_done_needs_all_hosts():
    done = [End(host, 100, "done", "end", 24) for host in (A, B)]
    assert judge(attempt(*done)).decision == "done"
    assert judge(attempt(done[0], beats=[Beat(B, 90, "step", 80, 20)])).initiator == B


def test_a_user_who_stops_the_run_ends_it():
    said = judge(attempt(end(A, 100, outcome="interrupted"), told(B)))
    assert (said.decision, said.initiator) == ("leave", None)


def test_a_lost_node_is_replaced_by_a_spare():
    said = judge(attempt(told(A), end(B, 104, "lost node", by=A), spares=[C]))
    assert said.decision == "spare"
    assert next_hosts(attempt(told(A), end(B, 104, "lost node", by=A), spares=[C]), said, [A, C]) == [A, C]


def test_hosts_whose_agents_were_started_anew_are_there_again():
    """A job that was queued again: all agents died together, and all are back."""
    anew = [end(host, 100.0 + place, "lost node", by=host) for place, host in enumerate((A, B))]
    assert judge(attempt(*anew)).decision == "restart"
    smaller = Smaller(1, [], "half of it")
    both = judge(attempt(*anew), can=lambda hosts: smaller)
    assert both.decision == "restart" and "The run starts again (" in both.why
    lost = judge(attempt(anew[0], end(B, 101, "lost node", by=A)), can=lambda hosts: smaller)
    assert lost.decision == "smaller"


def test_without_a_spare_it_goes_on_smaller_where_the_recipe_can():
    lost = attempt(told(A), end(B, 104, "lost node", by=A))
    said = judge(lost, can=lambda hosts: Smaller(1, [], "one host") if hosts == [A] else None)
    assert said.decision == "smaller"
    assert next_hosts(lost, said, [A]) == [A]
    no = judge(lost, can=lambda hosts: "parallel_config.pipeline_stage 2 needs both")
    assert no.decision == "restart"
    assert "needs both" in no.why


def failures(count, *, cause="signal", host=B, steps=(), starts=None, **more):
    """`count` attempts in a row that `host` ended, judged; the last one is not."""
    found = []
    for number in range(count):
        step = steps[number] if steps else 20 + number
        bad = end(host, 100, cause, code=-9, step=step)
        other = told(A if host == B else B, step=step)
        found.append(attempt(bad, other, number=number, step=starts[number] if starts else 8, **more))
    return [*(replace(each, verdict=judge(each)) for each in found[:-1]), found[-1]]


@pytest.mark.parametrize(("phase", "words"), [("save", ""), ("step", f" (0 bytes are free {OF_LOGS})")])
def test_the_host_that_fills_the_shared_disk_is_not_left_out(phase, words):
    """Rank 0 writes most, and was named each time; after three failures a spare took its place, on the same disk."""
    full = {"phase": phase, "code": 1, "message": f"OSError: [Errno 28] No space left on device{words}"}
    made = [attempt(end(A, 100, "exit", **full), told(B), number=number, spares=[C]) for number in range(3)]
    made = [*(replace(each, verdict=judge(each)) for each in made[:2]), made[2]]
    said = judge(made[2], made[:2], Rules(restarts=9, same_step=9))
    assert (said.initiator, said.decision) == (None, "restart") and "the disk that all hosts share is full" in said.why
    assert next_hosts(made[2], said, [A, B, C], made[:2]) == [A, B]


def test_restarts_are_used_up_without_progress():
    rules = Rules(restarts=5, same_host=9)
    decisions = [judge(made[-1], made[:-1], rules).decision for made in map(failures, range(1, 8))]
    assert decisions == ["restart"] * 5 + ["give up"] * 2


def test_it_is_said_what_the_failures_are_counted_for():
    """ "Failure 1 of 4" did not say of what."""
    why = [judge(made[-1], made[:-1]).why for made in map(failures, (1, 2))]
    assert why[0].endswith("(1 failure without a newer checkpoint; after 4 in a row the run is given up)")
    assert why[1].endswith("(2 failures without a newer checkpoint; after 4 in a row the run is given up)")


def test_a_newer_checkpoint_to_go_on_from_resets_the_count():
    made = failures(6, starts=[8, 8, 8, 16, 16, 16])
    rules = Rules(restarts=3, same_host=9)
    assert judge(made[-1], made[:-1], rules).wait == rules.wait(3)
    assert judge(made[-1], made[:-1], rules, saved=24).wait == rules.wait(1)
    assert judge(made[-1], made[:-1], rules, saved=16).wait == rules.wait(3)


def in_batches(made, *plans):
    """Attempts that went on from (step of the checkpoint, the same step as their workers count it, samples)."""
    return [
        replace(each, plan=replace(each.plan, step=step, start=start, batch=batch))
        for each, (step, start, batch) in zip(made, plans, strict=True)
    ]


def test_a_newer_checkpoint_of_a_larger_batch_resets_the_count_although_its_number_is_smaller():
    """After step 100 of 8 samples, which is step 50 of 16, step 60 of 16 samples is progress."""
    rules = Rules(restarts=3, same_host=9)
    made = in_batches(failures(4, steps=[52, 55, 58, 62]), *[(100, 50, 16)] * 3, (60, 60, 16))
    assert judge(made[-1], made[:-1], rules).wait == rules.wait(1)
    same = in_batches(failures(4, steps=[52, 55, 58, 59]), *[(100, 50, 16)] * 4)
    assert judge(same[-1], same[:-1], rules).decision == "give up"
    # attempts of another batch, which did not end, stand before those of this one
    before = in_batches(failures(3, steps=[101, 103, 54]), (100, 100, 8), (100, 100, 8), (100, 50, 16))
    assert judge(before[-1], before[:-1], rules).wait == rules.wait(3)


def test_steps_that_are_counted_in_another_batch_are_not_taken_for_the_same_step():
    """All failed after "step 100", the step of the checkpoint, whatever they had trained since."""
    rules = Rules(restarts=9, same_host=9)
    made = in_batches(failures(3, steps=[52, 55, 58]), *[(100, 50, 16)] * 3)
    assert judge(made[-1], made[:-1], rules).decision == "restart"
    same = in_batches(failures(3, steps=[104, 104, 52]), (96, 96, 8), (96, 96, 8), (96, 48, 16))
    said = judge(same[-1], same[:-1], rules)
    assert said.decision == "give up" and "after step 52" in said.why
    other = in_batches(failures(3, steps=[52, 52, 52]), (48, 48, 8), (48, 48, 8), (48, 24, 16))
    assert judge(other[-1], other[:-1], rules).decision == "restart"


def test_a_host_that_made_no_step_is_not_ahead_of_the_others():
    """Its step was that of the checkpoint, as the smaller batch before counted it."""
    (made,) = in_batches([attempt(end(A, 130, "hang", step=52))], (100, 50, 16))
    known = _of_all_hosts(made, 131.0)
    assert (known[B].step, known[B].phase) == (50, "start")


def test_waits_double_up_to_a_bound():
    rules = Rules(first=2.0, most=30.0)
    assert [rules.wait(count) for count in range(1, 7)] == [2, 4, 8, 16, 30, 30]
    assert rules.wait(10**6) == 30


def test_a_rollback_is_the_guards_to_count():
    spike = attempt(end(A, 100, "spike"), told(B))
    earlier = [replace(spike, verdict=judge(spike), number=number) for number in range(9)]
    said = judge(spike, earlier)
    assert (said.decision, said.wait) == ("restart", 0)
    no_more = attempt(end(A, 100, "spike", message=f"spike: loss 9; {NO_MORE}"), told(B))
    assert judge(no_more).decision == "give up"
    failed = attempt(end(A, 100, "exit"), told(B))
    assert judge(failed, earlier).wait == Rules().wait(1)


def test_failures_at_the_same_step_are_given_up():
    rules = Rules(restarts=9, same_host=9)
    made = failures(3, steps=[20, 20, 20])
    said = judge(made[-1], made[:-1], rules)
    assert (said.decision, "step 20" in said.why) == ("give up", True)
    other = failures(3, steps=[20, 20, 21])
    assert judge(other[-1], other[:-1], rules).decision == "restart"


def test_failures_before_training_are_bounded_by_the_restarts_alone():
    made = [replace(each, ends={B: replace(each.ends[B], phase="start")}) for each in failures(4, steps=[8] * 4)]
    made = [replace(each, ends={**each.ends, A: told(A, phase="start", step=8)}) for each in made]
    assert judge(made[-1], made[:-1], Rules(restarts=9, same_host=9)).decision == "restart"


def test_a_host_that_keeps_failing_is_left_out_where_a_spare_is_there():
    made = failures(3, spares=[C])
    said = judge(made[-1], made[:-1], Rules(restarts=9))
    assert said.decision == "spare"
    assert next_hosts(made[-1], said, [A, B, C], made[:-1]) == [A, C]
    before = judge(made[1], made[:1], Rules(restarts=9))
    assert before.decision == "restart"
    assert next_hosts(made[1], before, [A, B, C], made[:1]) == [A, B]


def test_a_host_that_keeps_failing_without_a_spare_is_given_up():
    made = failures(3)
    assert judge(made[-1], made[:-1], Rules(restarts=9)).decision == "give up"
    with_progress = failures(3, starts=[0, 8, 16])
    assert judge(with_progress[-1], with_progress[:-1], Rules(restarts=9)).decision == "restart"


def test_a_host_that_keeps_failing_costs_others_no_place_as_long_as_there_is_progress():
    """Going on smaller is for hosts that are gone, or with which the run comes no further."""
    some = Smaller(1, [], "one host")
    made = failures(3, starts=[0, 8, 16])
    assert judge(made[-1], made[:-1], Rules(restarts=9), lambda hosts: some).decision == "restart"
    stuck = failures(3)
    said = judge(stuck[-1], stuck[:-1], Rules(restarts=9), lambda hosts: some)
    assert (said.decision, next_hosts(stuck[-1], said, [A, B], stuck[:-1])) == ("smaller", [A])


def test_a_spare_goes_first_to_a_host_that_is_gone():
    ends = [end(A, 104, "lost node", by=B), told(B)]
    made = failures(3, starts=[0, 2, 4], spares=[C])
    history = [*made[:-1], replace(made[-1], verdict=judge(made[-1], made[:-1]))]
    lost = attempt(*ends, spares=[C], number=3)
    said = judge(lost, history)
    assert said.decision == "spare"
    assert "in place of node-a" in said.why
    assert next_hosts(lost, said, [B, C], history) == [C, B]


def test_a_spare_that_began_failures_takes_nobodys_place():
    made = failures(3, starts=[0, 2, 4])
    history = [*made[:-1], replace(made[-1], verdict=judge(made[-1], made[:-1]))]
    lost = attempt(end(A, 104, "lost node", by=C), told(C), hosts=[A, C], spares=[B], number=3)
    assert judge(lost, history).decision == "restart"
    assert judge(lost, history[:-1]).decision == "spare"


def test_one_host_alone_is_no_host_to_give_up():
    made = [attempt(end(A, 100, "signal", code=-9, step=20 + number), hosts=[A], number=number) for number in range(4)]
    judged = [replace(each, verdict=judge(each)) for each in made[:-1]]
    assert judge(made[-1], judged, Rules(restarts=9)).decision == "restart"


@pytest.mark.parametrize("cause", ["port", "spike"])
def test_what_is_no_fault_of_the_host_does_not_count_against_it(cause):
    made = failures(4, cause=cause, spares=[C])
    assert judge(made[-1], made[:-1], Rules(restarts=9)).decision == "restart"


def test_preempted_hosts_leave_and_others_go_on():
    notice = [end(B, 100, outcome="preempted"), told(A)]
    assert judge(attempt(*notice, spares=[C])).decision == "spare"
    assert judge(attempt(*notice), can=lambda hosts: Smaller(1, [], "one host")).decision == "smaller"
    assert judge(attempt(*notice)).decision == "leave"
    assert judge(attempt(*notice)).cause is None


def test_preemption_is_no_failure():
    notice = attempt(end(B, 100, outcome="preempted"), told(A), spares=[C])
    earlier = [replace(notice, verdict=judge(notice), number=number) for number in range(5)]
    assert judge(failures(1)[0], earlier, Rules(restarts=1)).decision == "restart"


CAUSES = ["exit", "signal", "hang", "lost node", "lost disk", "port", "never came"]


@given(
    st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from(CAUSES), st.integers(8, 40)), max_size=12),
    st.integers(0, 4),
)
def test_every_run_of_failures_ends_or_goes_on_with_what_is_there(story, restarts):
    """Without progress at most `restarts` attempts follow the first; nobody is named who did not end; waits bounded."""
    rules, earlier = Rules(restarts=restarts), []
    for number, (host, cause, step) in enumerate(story):
        ends = [end(host, 100, cause, step=step), *(told(other, step=step) for other in (A, B, C) if other != host)]
        now = attempt(*ends, hosts=[A, B, C], number=number)
        said = judge(now, earlier, rules)
        assert said.initiator in (host, None)
        assert 0 <= said.wait <= rules.most
        assert number < restarts or said.decision == "give up"
        chosen = next_hosts(now, said, [A, B, C], earlier, rules)
        assert sorted(chosen) == [A, B, C]
        if said.decision == "give up":
            break
        earlier.append(replace(now, verdict=said))


def test_a_verdict_is_of_the_form():
    assert isinstance(judge(failures(1)[0], now=7.0), Verdict)
    assert judge(failures(1)[0], now=7.0).time == 7.0
