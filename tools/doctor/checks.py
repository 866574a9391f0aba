"""This module defines a check: a function that examines a host, the reason why its result matters (with a source), and
the command that corrects a failure.

A check changes nothing on the host. A check is a function from a host to an `Answer`; the decorator `check` adds the
texts of the check and enters the check in `CHECKS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Literal, TypeVar

from tools.files.atomic import real_path
from tools.process.host import Root
from tools.recipe.view import View

Verdict = Literal["ok", "warn", "fail", "unknown"]  # unknown is never ok
COLOURS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "red", "unknown": "cyan"}
REPORT = "report, section 6"


@dataclass(frozen=True)
class Patient:
    """A `Patient` is a host that is examined, with the recipe that is to run on it if the user named one."""

    root: Root
    recipe: View | None = None

    @property
    def on_cpu(self) -> bool:
        """Return whether the recipe runs on CPU and needs no NPU."""
        return self.recipe is not None and self.recipe.on_cpu

    @property
    def wants_npus(self) -> bool:
        """Return whether the recipe is for Ascend; if no recipe was named, return whether the host has NPUs."""
        return not self.on_cpu if self.recipe is not None else bool(self.root.find("/dev/davinci[0-9]*"))

    @property
    def workers(self) -> int:
        """Return the number of workers that the recipe runs on this host."""
        if self.recipe is None:
            return 1
        return self.recipe.devices if self.on_cpu else min(self.recipe.devices, self.recipe.node)

    def find(self, pattern: str, path: str, otherwise: str) -> re.Match[str]:
        """Return the match of a regular expression in a file of the host; raise UntoldError with the message
        `otherwise` if no line matches.
        """
        return told(re.search(pattern, self.root.read(path) or "", re.MULTILINE), otherwise)

    @property
    def folder(self) -> Path:
        """Return the folder in which a run of the recipe saves its checkpoints; symbolic links of this host are
        resolved.
        """
        paths = (("checkpoint", "save_path"), ("output_dir",)) if self.recipe is not None else ()
        written = (self.recipe.get(path) for path in paths if self.recipe is not None)
        folder = Path(next((each for each in written if isinstance(each, str) and each), ".")).absolute()
        return real_path(folder) if self.root.live else folder


@dataclass(frozen=True)
class Answer:
    """An `Answer` is the result of one check of a host: the verdict, and what the check found."""

    verdict: Verdict
    seen: str


@dataclass(frozen=True)
class Check:
    """A `Check` is a function that examines a host, with the texts that are reported about it. The field `npu` marks a
    check that a recipe on CPU does not need.
    """

    name: str
    look: Callable[[Patient], Answer]
    why: str
    source: str
    mend: str
    npu: bool


@dataclass(frozen=True)
class Finding:
    """A `Finding` is the result of one check of one host, with the texts that are reported about it."""

    check: str
    verdict: Verdict
    seen: str
    why: str
    source: str
    mend: str


CHECKS: dict[str, Check] = {}
Looker = Callable[[Patient], Answer]
Told = TypeVar("Told")


class UntoldError(ValueError):
    """This error means that a host does not provide the facts that a check needs. A check that raises this error gets
    the verdict "unknown", and the message says what was found instead of the facts.
    """


def told(value: Told | None, otherwise: str) -> Told:
    """Return `value`, which a check has read from a host; raise UntoldError with the message `otherwise` if the value
    is None.
    """
    if value is None:
        raise UntoldError(otherwise)
    return value


def check(why: str, source: str, mend: str, npu: bool = False) -> Callable[[Looker], Looker]:
    """Return a decorator that adds a function to `CHECKS` under the function's name. If the function cannot read a fact
    of the host, its check gets the verdict "unknown".
    """

    def enter(look: Looker) -> Looker:
        @wraps(look)
        def looked(patient: Patient) -> Answer:
            try:
                return look(patient)
            except UntoldError as error:
                seen = str(error)
            except (OSError, ValueError, LookupError) as error:  # a file in a form that we have not met
                seen = f"could not be read: {error}"
            return Answer("unknown", seen)

        CHECKS[look.__name__] = Check(look.__name__, looked, why, source, mend, npu)
        return looked

    return enter


def examine(patient: Patient, modules: Sequence[str]) -> list[Finding]:
    """Return the findings of all checks in `modules` that the recipe needs, in the order of the modules."""
    found = []
    for item in sorted(CHECKS.values(), key=lambda item: modules.index(item.look.__module__)):
        if item.npu and patient.on_cpu:
            continue
        answer = item.look(patient)
        mend = item.mend if answer.verdict != "ok" else ""
        found.append(Finding(item.name, answer.verdict, answer.seen, item.why, item.source, mend))
    return found
