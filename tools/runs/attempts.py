"""This module writes and reads the folder of each attempt of a run (`RUN/attempts/0000/` and so on), which records the
hosts of the attempt, how the attempt ended, and what was decided afterwards.

Launches write these files, and `tc3 runs` reads them. An attempt is one start of a run's workers on all of its nodes.
The folder of an attempt holds

* `plan.json`: the plan of the attempt, which one process writes before any worker starts;
* `recipe-NAME.yaml`: the recipe that goes with the plan of that name, which the workers read;
* `beat-HOST.json`: the newest heartbeat of a node, written again and again while its workers run;
* `end-HOST.json`: the way in which a node's part of the attempt ended, written by this node, or by another node if this
  node cannot write any more;
* `verdict.json`: the node that caused the end of the attempt, and the decision after it, written by one process;
* `logs/`: the logs of msrun and of the workers; `RUN/logs` is a link to the logs of the newest attempt.

Each file in the folder of an attempt is complete or absent. Times are in seconds since 1970 by the clock of the shared
disk, which is the same for all nodes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote

from tools.files.atomic import atomic_file

Phase = Literal["start", "compile", "first step", "step", "evaluation", "save", "end"]
Cause = Literal[
    "exit", "signal", "hang", "user error", "not finite", "spike", "lost node", "lost disk", "port", "never came"
]
Outcome = Literal["done", "failed", "told to end", "preempted", "interrupted"]
Decision = Literal["done", "restart", "spare", "smaller", "give up", "leave"]
# the last words of a worker in its log: of one that has ended the run for what it saw in training, and of those that
# were told to save or to end; `tc3: ` and any other words are an error of the user
STOPPED, INTERRUPTED = "tc3: stopped: ", "tc3: interrupted"
SAVED, ASKED = "tc3: saved on request: ", "tc3: asked to save"
DONE = "tc3: all work is done"  # said before MindSpore's exit functions, in which a worker may still crash
TOLD = (INTERRUPTED, SAVED, ASKED, DONE)
_LARGEST = 1e15  # of any number in these files
FINAL = ("done", "give up", "leave")  # decisions after which a run does not go on
FOLDER, PLAN, VERDICT, BEAT, END = "attempts", "plan.json", "verdict.json", "beat-", "end-"
THERE, GONE = "there-", "gone"  # the file of an agent that waits for a plan, and its key that says whether it has left


@dataclass(frozen=True)
class Plan:
    """A `Plan` holds the decisions before an attempt of a run starts: the hosts in the order of node rank, the number
    of workers of each host (`slots`), and the checkpoint from which training resumes (`resume`).
    """

    attempt: int
    time: float
    hosts: list[str]
    slots: int
    master: str
    port: int
    spares: list[str] = field(default_factory=list)
    resume: str | None = None
    step: int = 0  # of the checkpoint `resume`, as its folder is named
    overrides: list[str] = field(default_factory=list)  # of the recipe, in this attempt: a smaller size
    compile_cache: str | None = None  # its folder
    name: str = ""  # of the attempt, NUMBER-TOKEN: no other plan's, also not one of the same number that lost
    branch: bool = False  # `resume` was named by a user: what was saved after it, or elsewhere, is left behind
    start: int | None = None  # steps done before it, as its workers count them: another batch than the checkpoint's
    batch: int = 0  # samples of its recipe's step (the largest, if the batch grows); 0: of an older version's plan

    @property
    def before(self) -> int:
        """Return the number of steps done before the attempt, as its workers count steps. (Plans of older versions
        state only the step number that the checkpoint has, which is another number if the global batch has changed.)
        """
        return self.step if self.start is None else self.start


@dataclass(frozen=True)
class Beat:
    """A `Beat` is a node's heartbeat: the present phase of its workers, the time at which this phase began, and the
    newest step that any of its workers has made.
    """

    host: str
    time: float
    phase: Phase
    since: float
    step: int = 0


@dataclass(frozen=True)
class End:
    """An `End` records how an attempt ended on one node. The field `rank` is the global rank of a worker, and `code` is
    the worker's exit code, which is negative for a signal.
    """

    host: str
    time: float
    outcome: Outcome
    phase: Phase
    step: int = 0
    cause: Cause | None = None
    rank: int | None = None
    code: int | None = None
    message: str = ""
    log: str = ""
    by: str = ""  # the host that wrote it, where that is another one


@dataclass(frozen=True)
class Verdict:
    """A `Verdict` names the host and the worker that caused the end of an attempt, and the decision about the next
    attempt.
    """

    time: float
    decision: Decision
    why: str
    initiator: str | None = None  # a host; None: nobody knows, or nobody failed
    rank: int | None = None
    cause: Cause | None = None
    victims: list[str] = field(default_factory=list)
    wait: float = 0.0  # seconds until the next attempt


@dataclass(frozen=True)
class Attempt:
    """An `Attempt` holds the content of one attempt's folder; a field is None or empty if its file does not exist yet
    or is damaged.
    """

    folder: Path
    number: int
    plan: Plan | None
    beats: dict[str, Beat]
    ends: dict[str, End]
    verdict: Verdict | None


Form = TypeVar("Form", Plan, Beat, End, Verdict)


def folder_of(run_dir: Path, number: int) -> Path:
    """Return the folder of one attempt of a run; attempts are numbered from 0."""
    return run_dir / FOLDER / f"{number:04d}"


def recipe_file(run_dir: Path, plan: Plan) -> Path:
    """Return the path of the recipe that the workers of an attempt read; this file is written before the attempt's
    plan, and never changes.
    """
    return folder_of(run_dir, plan.attempt) / f"recipe-{plan.name}.yaml"


def file_of(folder: Path, start: str, host: str) -> Path:
    """Return the path of a host's file in an attempt's folder. The file name begins with `start`, the kind of file (a
    heartbeat or the record of an end). Characters of the host's name that are not allowed in file names are escaped.
    """
    return folder / f"{start}{quote(host, safe='')}.json"


def numbers(run_dir: Path) -> list[int]:
    """Return the numbers of all attempts whose folders exist in a run's folder, the oldest first."""
    return sorted(int(path.name) for path in (run_dir / FOLDER).glob("[0-9]*") if path.name.isdecimal())


def write(path: Path, form: Plan | Beat | End | Verdict) -> None:
    """Write one file of an attempt atomically; an existing file of that name is replaced.

    Raises:
        DataError: the file cannot be written.
    """
    with atomic_file(path) as part:
        part.write_text(text_of(form), encoding="utf-8")


def read(path: Path, kind: type[Form]) -> Form | None:
    """Return the content of one file of an attempt; return None if the file does not exist or does not have the
    expected form. Keys that later versions write are ignored.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), kind)
    except (OSError, ValueError):
        return None


def text_of(form: Plan | Beat | End | Verdict) -> str:
    """Return the content of a file of an attempt as text, in one line of JSON."""
    return json.dumps(asdict(form)) + "\n"


def parse(text: str, kind: type[Form]) -> Form | None:
    """Convert the text of an attempt's file to an object (the inverse of `text_of`); return None if the text does not
    have the expected form. Keys that later versions write are ignored.
    """
    try:
        content: Any = json.loads(text)
        known = {each.name: each.type for each in fields(kind)}
        values = {key: value for key, value in content.items() if key in known}
        return kind(**values) if all(_fits(value, str(known[key])) for key, value in values.items()) else None
    except (ValueError, TypeError, AttributeError):
        return None


def _fits(value: object, wanted: str) -> bool:
    """Return whether a value out of JSON is of a field's type, as that is written in the classes above."""
    wanted, optional, _ = wanted.partition(" | None")
    if value is None:
        return bool(optional)
    if wanted == "list[str]":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if wanted == "bool":
        return isinstance(value, bool)
    if wanted in ("int", "float"):
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST  # nor is NaN
    return isinstance(value, str)  # the rest are names


def read_attempt(run_dir: Path, number: int) -> Attempt:
    """Return the content of the folder of the attempt with a given number."""
    folder = folder_of(run_dir, number)
    beats, ends = _by_host(folder, BEAT, Beat), _by_host(folder, END, End)
    return Attempt(folder, number, read(folder / PLAN, Plan), beats, ends, read(folder / VERDICT, Verdict))


def newest_attempt(run_dir: Path) -> Attempt | None:
    """Return the newest attempt of a run; return None before the first attempt."""
    known = numbers(run_dir)
    return read_attempt(run_dir, known[-1]) if known else None


def read_attempts(run_dir: Path) -> list[Attempt]:
    """Return all attempts of a run, the oldest first; the list is empty for a run that an older version made without
    attempts.
    """
    return [read_attempt(run_dir, number) for number in numbers(run_dir)]


def of_the_run(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts that belong to the run. The attempts of a launch that began after the run had ended are left
    out if the launch was refused, or if all of its agents left, before it planned anything, because such a launch has
    changed nothing in the run.
    """
    found: list[Attempt] = []
    for attempt in attempts:
        ended = bool(found) and found[-1].verdict is not None and found[-1].verdict.decision in FINAL
        if not (ended and attempt.plan is None and _came_to_nothing(attempt)):
            found.append(attempt)
    return found


def _came_to_nothing(attempt: Attempt) -> bool:
    """Return whether an attempt without a plan was refused, or all agents that came to it have left it."""
    if attempt.verdict is not None:
        return attempt.verdict.cause == "user error"
    there = list(attempt.folder.glob(f"{THERE}*.json"))
    return bool(there) and all(map(_has_left, there))


def _has_left(file: Path) -> bool:
    try:
        return json.loads(file.read_text(encoding="utf-8"))[GONE] is True
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _by_host(folder: Path, start: str, kind: type[Form]) -> dict[str, Form]:
    found = {unquote(path.stem.removeprefix(start)): read(path, kind) for path in sorted(folder.glob(f"{start}*.json"))}
    return {host: form for host, form in found.items() if form}
