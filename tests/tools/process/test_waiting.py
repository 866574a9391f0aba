import threading

from tools.process import waiting
from tools.process.waiting import Progressing, saying


def test_what_lasts_is_said_now_and_then_on_stderr_alone(monkeypatch, capsys):
    said, enough = [], threading.Event()

    def note(*args, **kwargs):
        said.append((args, kwargs["file"]))
        if len(said) == 3:
            enough.set()

    monkeypatch.setattr(waiting, "AFTER", 0.01)
    monkeypatch.setattr(waiting, "EVERY", 0.01)
    monkeypatch.setattr("builtins.print", note)
    with saying("counting"):
        assert enough.wait(30)
    assert all(words[0].startswith("counting (") and file is waiting.sys.stderr for words, file in said)
    count = len(said)
    assert not enough.wait(0) or len(said) == count  # and nothing after the end


def test_what_is_soon_done_is_silent(capsys):
    with saying("counting"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_command_that_is_soon_loaded_is_silent(monkeypatch, capsys):
    """Loading takes three seconds on a busy machine: nothing to speak of."""
    pauses = []
    monkeypatch.setattr(waiting, "_say", lambda what, done, pause: pauses.append(pause))
    with saying("tc3 doctor is being loaded", after=5.0):
        pass
    assert pauses == [5.0] and capsys.readouterr() == ("", "")


def test_an_error_passes_through():
    try:
        with saying("counting"):
            raise ValueError("x")
    except ValueError as error:
        assert str(error) == "x"
    assert threading.active_count() >= 1 and not any(item.name.startswith("saying") for item in threading.enumerate())


def test_what_counts_says_what_it_is_at(monkeypatch):
    said, enough = [], threading.Event()

    def note(*args, **kwargs):
        said.append(args[0])
        if len(said) == 1:
            progress.show("39 of 40 done: matmul", 39, 40)
        if len(said) == 2:
            monkeypatch.setattr(waiting, "AGAIN", 0.0)
        if len(said) == 3:
            enough.set()

    monkeypatch.setattr(waiting, "AFTER", 0.01)
    monkeypatch.setattr(waiting, "EVERY", 0.01)
    monkeypatch.setattr("builtins.print", note)
    with Progressing("comparing operators") as progress:
        assert enough.wait(30)
    assert said[:2] == ["comparing operators ...", "39 of 40 done: matmul ..."]
    assert said[2].startswith("39 of 40 done: matmul ... ("), "only after a while the same again"
