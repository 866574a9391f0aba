"""Ranks that are asked to save and leave: threads here, each a rank that steps, and waits in collectives."""

import json
import os
import threading

import pytest

from launch.workers.leave_request import FILE, agree, environment, request, requested, saved_at


@pytest.fixture
def attempt(tmp_path):
    environment(tmp_path / "attempts" / "0000")
    for file in (tmp_path / "attempts" / "0000").iterdir():
        os.utime(file, (1000, 1000))
    return tmp_path / "attempts" / "0000"


def stepped(run_dir, rank, steps, seconds, ago):
    """Metrics of a rank whose last step ended `ago` seconds before now."""
    file = run_dir / "metrics" / f"rank_{rank}.jsonl"
    file.parent.mkdir(exist_ok=True)
    lines = [{"total_steps": 100, "start_step": 0}, *({"step": step, "seconds": seconds} for step in steps)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = file.stat().st_mtime
    os.utime(file, (now - ago, now - ago))


@pytest.mark.parametrize(
    ("seconds", "ago", "step"),
    [
        (10.0, 2.0, 8),  # step 8 ends in eight seconds at the earliest: all can know by then
        (10.0, 9.5, 9),  # step 8 may end before the request is seen
        (0.1, 0.0, 18),  # a second is ten steps; one more for the time of the asking itself
        (60.0, 59.9, 9),
    ],
)
def test_the_step_is_the_first_that_no_rank_can_have_passed(attempt, tmp_path, seconds, ago, step):
    stepped(tmp_path, 0, range(1, 7), seconds, ago + 1)
    stepped(tmp_path, 1, range(1, 8), seconds, ago)
    assert request(tmp_path, attempt, [0, 1]) in (step, step + (seconds < 1))
    assert requested(attempt / FILE) in (step, step + (seconds < 1))


def test_without_a_step_in_this_attempt_there_is_nothing_to_save(attempt, tmp_path):
    assert request(tmp_path, attempt, [0, 1]) is None
    stepped(tmp_path, 0, [7], 1.0, 0.0)
    os.utime(tmp_path / "metrics" / "rank_0.jsonl", (900, 900))  # of the attempt before
    assert request(tmp_path, attempt, [0, 1]) is None and requested(attempt / FILE) is None
    assert request(tmp_path, tmp_path / "nowhere", [0]) is None


def test_the_clock_of_another_host_that_touched_the_request_does_not_matter(attempt, tmp_path):
    stepped(tmp_path, 0, [7], 10.0, 0.0)
    os.utime(attempt / FILE, (4e9, 4e9))  # by a host whose clock is years ahead, on a disk that takes it
    assert request(tmp_path, attempt, [0, 1]) == 8


def test_of_two_nodes_that_ask_one_names_the_step(attempt, tmp_path):
    stepped(tmp_path, 0, [7], 10.0, 0.0)
    first = request(tmp_path, attempt, [0, 1])
    stepped(tmp_path, 0, [7, 8, 9], 10.0, 0.0)
    assert request(tmp_path, attempt, [0, 1]) == first == 8


def test_half_a_request_is_none(attempt):
    (attempt / FILE).write_text('{"ste')
    assert requested(attempt / FILE) is None


class World:
    """Ranks that meet in a collective at the end of each step, and in those of a save."""

    def __init__(self, attempt, ranks, patience):
        self.attempt, self.ranks, self.patience = attempt, ranks, patience
        self.barrier = threading.Barrier(ranks)
        self.did: dict[int, list[str]] = {rank: [] for rank in range(ranks)}

    def train(self, rank, steps, hears_late):
        answered = False
        for step in range(1, steps + 1):
            self.meet(rank, f"step {step}")
            wanted = None if hears_late and step == 3 else requested(self.attempt / FILE)
            if wanted is None or step < wanted or answered:
                continue
            answered = True
            if step == wanted and agree(self.attempt, rank, self.ranks, self.patience):
                self.meet(rank, f"save {step}")
                return

    def meet(self, rank, what):
        self.did[rank].append(what)
        self.barrier.wait(timeout=10)  # a collective with others in another one, or with too few, hangs

    def run(self, steps=5, late=()):
        threads = [threading.Thread(target=self.train, args=(rank, steps, rank in late)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len({tuple(did) for did in self.did.values()}) == 1, "the ranks did not do the same"
        return self.did[0]


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_all_ranks_save_at_the_step_and_leave(attempt, ranks):
    (attempt / FILE).write_text('{"step": 3}')
    assert World(attempt, ranks, patience=10).run() == ["step 1", "step 2", "step 3", "save 3"]
    assert saved_at(attempt) == 3


@pytest.mark.parametrize("late", [(0,), (2,), (0, 1)])
def test_a_rank_that_hears_too_late_lets_nobody_hang(attempt, late):
    (attempt / FILE).write_text('{"step": 3}')
    done = World(attempt, 4, patience=0.3).run(late=late)
    assert done == [f"step {step}" for step in range(1, 6)]
    assert saved_at(attempt) is None


def test_nobody_asked(attempt):
    assert World(attempt, 2, patience=1).run(steps=2) == ["step 1", "step 2"] and saved_at(attempt) is None
