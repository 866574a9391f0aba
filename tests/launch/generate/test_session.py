"""The process with the model: asked, refused, failing, and gone at the end. A script stands in for the worker."""

import click
import psutil
import pytest

from launch.generate import session
from plugins.errors import CheckpointError

HEAD = """
import os, sys
from multiprocessing.connection import Connection
import numpy as np
from launch.generate.answers import Ready, Refused
pipe = Connection(int(sys.argv[3]))
"""
ANSWERS = "pipe.send(Ready())\nwhile True:\n    pipe.send(np.array([sum(pipe.recv()), os.getpid()]))\n"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that starts a session with a script in the worker's place."""

    def start(script):
        (tmp_path / "worker.py").write_text(HEAD + script)
        monkeypatch.setattr(session, "WORKER", tmp_path / "worker.py")
        return session.model_of({"a": 1}, tmp_path / "weights")

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
