"""The process with the model: asked, refused, failing, and gone at the end. A script stands in for the worker."""

import click
import numpy as np
import psutil
import pytest

from launch.generate import session
from launch.generate.session import continuation
from launch.generate.text import likeliest
from plugins.errors import CheckpointError


def counting(seen):
    def logits(ids):
        seen.append(list(ids))
        return np.eye(100)[ids[-1] + 1]

    return logits


def test_it_goes_on_from_what_it_said():
    seen = []
    assert list(continuation(counting(seen), likeliest, [3, 7], 10, 3, None)) == [8, 9, 10]
    assert seen == [[3, 7], [3, 7, 8], [3, 7, 8, 9]]


def test_the_end_of_a_document_is_the_last_token():
    assert list(continuation(counting([]), likeliest, [7], 10, 50, 9)) == [8, 9]


def test_it_sees_no_more_than_its_window():
    seen = []
    assert list(continuation(counting(seen), likeliest, [1, 2, 3, 4], 3, 2, None)) == [5, 6]
    assert seen == [[2, 3, 4], [3, 4, 5]]


def test_each_token_is_there_before_the_next_is_computed():
    seen = []
    words = continuation(counting(seen), likeliest, [1], 10, 5, None)
    assert (next(words), len(seen)) == (2, 1)


HEAD = """
import os, sys
from multiprocessing.connection import Connection
import numpy as np
from launch.generate.session import Ready, Refused
pipe = Connection(int(sys.argv[3]))
"""
ANSWERS = "pipe.send(Ready())\nwhile True:\n    pipe.send(np.array([sum(pipe.recv()), os.getpid()]))\n"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that starts a session with a script in the worker's place."""

    def start(script):
        (tmp_path / "worker.py").write_text(HEAD + script)
        monkeypatch.setattr(session, "WORKER", tmp_path / "worker.py")
        return session.answering_model({"a": 1}, tmp_path / "weights")

    return start


def test_it_answers_and_is_gone_afterwards(started):
    with started(ANSWERS) as logits:
        answers = [logits([1, 2]), logits((3,))]
    assert [answer[0] for answer in answers] == [3, 3]
    assert not psutil.pid_exists(int(answers[0][1]))


def test_it_is_gone_after_an_interrupt(started):
    pids = []
    with pytest.raises(KeyboardInterrupt), started(ANSWERS) as logits:
        pids.append(int(logits([])[1]))
        raise KeyboardInterrupt
    assert not psutil.pid_exists(pids[0])


def test_weights_that_it_refuses_are_the_users_to_mend(started):
    with pytest.raises(CheckpointError, match="of another model"), started("pipe.send(Refused('of another model'))"):
        pass


@pytest.mark.parametrize(
    "script", ["sys.exit('no memory left')", "pipe.send(Ready()); pipe.recv(); sys.exit('no memory left')"]
)
def test_an_end_before_its_time_shows_the_last_lines(started, script):
    with pytest.raises(click.ClickException, match=r"exit code 1:\n(.*\n)*no memory left"), started(script) as logits:
        logits([1])
