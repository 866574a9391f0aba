"""A worker that is really slowed is named, and none of a run in which nobody is."""

import os
from contextlib import ExitStack

import pytest

from plugins.straggler_probe.plan import slow_ranks
from plugins.straggler_probe.record import read_run
from tests.plugins.straggler_probe import workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need a core each"),
]


def test_nobody_is_named_where_nobody_is_slowed(tmp_path):
    """Where this machine does other work as well, a worker may be named for that; it is true then."""
    workers.train(tmp_path, 100)
    verdict = slow_ranks(read_run(tmp_path))
    own = [one for one in verdict.slow if "others have its cores" not in one.seen]
    assert (own, verdict.unknown, verdict.compared) == ([], [], 2)
    assert len(read_run(tmp_path)) == 2 * 50


@pytest.mark.skipif(not workers.can_limit(), reason="making a control group with a limit needs root")
def test_a_worker_that_a_limit_stops_is_named_with_the_limit(tmp_path):
    with ExitStack() as held:
        workers.train(tmp_path, 50, lambda pids: held.enter_context(workers.limit(pids[1:], 0.05)))
    one = next(one for one in slow_ranks(read_run(tmp_path)).slow if one.kind == "limit")
    assert (one.rank, one.until) == (1, None) and one.since <= 10
