"""A process that dies, or whose disk fails, at each of its operations on files in turn.

`deaths` runs a function once for each file operation that the function makes below a folder. In each run, one operation
and all later ones are left out, as if SIGKILL had come at that moment. Opening a file for writing and writing to this
file are two operations.
"""

import builtins
import io
import os
import pathlib
from contextlib import contextmanager, suppress
from itertools import count
from types import SimpleNamespace

_CHANGES = ("rename", "replace", "link", "symlink", "unlink", "remove", "mkdir", "rmdir", "fsync", "write")


class Died(BaseException):
    """The process is dead: nothing may catch this."""


@contextmanager
def dies_at(number, error=None, meanwhile=None):
    """Fail at the operation with this number, counted from 0, that the block makes. Yield the list of operations made.

    Args:
        error: an exception that only this operation raises; by default the process dies, so that all later ones fail.
        meanwhile: instead of a failure, a function that is called before this operation, as another process would do
            its work at that moment.
    """
    made = []

    def meets(name):
        made.append(name)
        place = len(made) - 1
        if meanwhile:
            if place == number:
                meanwhile()
                del made[place + 1 :]  # operations of the other process
            return
        if place == number and error:
            raise error
        if place >= number and not error:
            raise Died(name)

    def failing(name, real):
        def called(*given, **named):
            meets(name)
            return real(*given, **named)

        return called

    def opening(real):
        def called(file, mode="r", *given, **named):
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return real(file, mode, *given, **named)
            meets(f"open {file}")
            opened = real(file, mode, *given, **named)
            try:
                meets(f"write {file}")
            except BaseException:
                opened.close()
                raise
            return opened

        return called

    def descriptor_of(real):
        def called(file, flags, *given, **named):
            if flags & os.O_CREAT:
                meets(f"open {file}")
            return real(file, flags, *given, **named)

        return called

    functions = {name: failing(name, getattr(os, name)) for name in _CHANGES}
    with _replaced({**functions, "open": descriptor_of(os.open)}, opening(builtins.open)):
        yield made


def patch_os(monkeypatch, name, function):
    """Replace the function `name` of `os` by `function` until the test ends, also where `pathlib` calls it."""
    monkeypatch.setattr(os, name, function)
    monkeypatch.setitem(_accessor(), name, function)


def _accessor():
    """Return what replaces the functions of `os` that the pathlib of Python 3.10 found when it was imported."""
    return vars(getattr(pathlib, "_normal_accessor", SimpleNamespace()))


@contextmanager
def _replaced(functions, opening):
    """Put functions in place of those of `os`, and `opening` in place of `open`."""
    kept, opens, accessor = {name: getattr(os, name) for name in functions}, (builtins.open, io.open), _accessor()
    try:
        for name, function in functions.items():
            setattr(os, name, function)
        builtins.open = io.open = opening
        accessor.update({name: functions[name] for name in _CHANGES if name not in ("fsync", "write")}, open=opening)
        yield
    finally:
        accessor.clear()
        for name, real in kept.items():
            setattr(os, name, real)
        builtins.open, io.open = opens


def deaths(act, fresh, error=None):
    """Yield for each operation of `act` the folder that it leaves when it dies there, and a text that says where.

    Args:
        act: a function that gets the folder.
        fresh: a function that makes a new folder.
        error: as in `dies_at`.
    """
    for number in count():
        folder = fresh()
        with dies_at(number, error) as made, suppress(Died):
            try:
                act(folder)
            except BaseException as raised:
                if raised is not error:
                    raise
        yield folder, f"dies at {number}: {made[number] if len(made) > number else 'never'}"
        if len(made) <= number:
            return


def meetings(act, other, fresh):
    """Yield for each operation of `act` the folder in which `other` has done all of its work before this operation,
    what the two returned or raised, and a text that says where they met.
    """
    for number in count():
        folder, results = fresh(), {}

        def told(name, work, folder=folder, results=results):
            try:
                results[name] = work(folder)
            except Exception as error:
                results[name] = error

        with dies_at(number, meanwhile=lambda told=told: told("other", other)) as made:
            told("act", act)
        yield folder, results, f"meet at {number}: {made[number] if len(made) > number else 'never'}"
        if len(made) <= number:
            return
