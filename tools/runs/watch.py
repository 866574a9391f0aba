"""This module describes the present state of a run, from its files only, on any machine that can read its folder.

Ages are differences between times that the run itself wrote, so that the clock of the machine that reads the folder
does not matter.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from plugins.expert_balance.routers import routers_file
from plugins.held_out_loss.plan import held_out_file
from plugins.lines import OF, as_span, number_of, spans_file
from tools.files.atomic import real_path
from tools.files.locks import is_left
from tools.recipe.view import View
from tools.runs.attempts import PLAN, Attempt, Plan, numbers, of_the_run, read, read_attempt, recipe_file
from tools.runs.failures import Failure, failure_of, has_failed, in_words, is_untold
from tools.runs.goodput import missing
from tools.runs.places import END, Numbering, begin_of, begins_anew, tokens_of
from tools.runs.readings import (
    USUAL_OF,
    Evaluation,
    Follower,
    Steps,
    check_folder,
    evaluation_of,
    header_of,
    metrics_of,
    number,
    read_recipe,
    recipe_of,
)
from tools.runs.slow import Probes
from tools.runs.study import GOES_ON, GONE, JUDGED, state_of

# The steps of a run that goes on, taken in as they are written: memory does not grow with their number.
# Only sums are held. When an attempt begins before steps that were made, the file is read again from its start, once.

Sink = Callable[[dict[str, Any]], None]
_SPEED_OF = 50  # steps
_CLOCKS = 1.01  # times the wall time that steps may seem to have taken by another clock
_NEWEST = 1 << 20  # bytes at the end of a file, more than a line of routers


class _Part:
    """A `_Part` holds sums of the steps of one start of the workers that still stand. The field `unit` says what a step
    counts in places (`tools.runs.places`).
    """

    def __init__(self, start: int, unit: float | None):
        self.start, self.unit, self.last = start, unit, 0
        self.tokens: float | None = None  # of a step
        self.first = 0.0  # seconds of its first step, which compiles
        self.others = 0.0
        self.some: list[float] = []  # seconds of the first `USUAL_OF` others

    def place(self, step: int) -> float:
        """Return the place in the data after `step` steps, as this part counts them."""
        return step * (self.unit or 1)

    @property
    def begin(self) -> float:
        """Return the place in the data at which this part began to train."""
        return self.place(self.start)

    def add(self, record: dict[str, Any], cut: float) -> None:
        """Add the record of a step. A step behind the place `cut` does not count, because a later attempt repeats
        it.
        """
        seconds, stands = _number(record, "seconds"), self.place(record["step"]) <= cut
        if not self.last:
            self.first = seconds if stands else 0.0
        else:
            self.others += seconds if stands else 0.0
            if len(self.some) < USUAL_OF and seconds > 0:
                self.some.append(seconds)
        self.last, self.tokens = record["step"], self.tokens or record.get("tokens")


def _opens(record: dict[str, Any], parts: list[_Part]) -> bool:
    """Return whether a line begins a part: a header, or a step before which a kill broke the header."""
    if "total_steps" in record:
        return True
    return _is_step(record) and (not parts or begins_anew(record, parts[-1].last, parts[-1].tokens))


def _is_step(record: dict[str, Any]) -> bool:
    return isinstance(record.get("step"), int)


def _part(record: dict[str, Any], unit: float | None) -> _Part:
    return _Part(header_of(record)[0] if "total_steps" in record else record["step"] - 1, unit)


class Kept:
    """A `Kept` reads the records of training steps while a run trains, and counts the steps that no later attempt has
    repeated.

    Args:
        file: the metrics file of the rank that has the run's loss.
        sink: a function that is called once with the record of each step, in order.
        alike: whether it is known that all steps keep their numbers (`tools.runs.places.Numbering`).
    """

    def __init__(self, file: Path, sink: Sink = lambda record: None, alike: bool = False):
        self.file, self.sink = file, sink
        self.follower, self.numbering = Steps(file), Numbering(alike)
        self.parts: list[_Part] = []
        self.cut = END  # the place from which the attempt that is about to train begins
        self.made = 0.0  # the place of the newest step
        self.last: dict[str, Any] = {}
        self.total: int | None = None
        self.began: float | None = None  # of the newest part
        self.attempt: str | None = None  # that wrote the newest line
        self.first: float | None = None  # of the oldest one
        self.speeds: deque[float] = deque(maxlen=_SPEED_OF)

    def look(self) -> None:
        """Read the records of steps that the run has written since the last call."""
        again = False
        for record in self.follower.records():
            self.attempt = record.get(OF, self.attempt)
            if _opens(record, self.parts):
                self.parts.append(_part(record, self.numbering.unit))
                again = again or self.parts[-1].begin < self.made
                self.cut = END
                self.speeds.clear()
            if "total_steps" in record:
                _, self.began, self.total = header_of(record)
                self.first = self.began if self.first is None else self.first
            elif _is_step(record):
                again = self._renumbered(record) or again
                self._step(record)
        if again:
            self._count()

    def begin_at(self, place: float) -> None:
        """Stop counting the steps after `place`, because an attempt that has not trained yet will repeat these steps.
        If `place` is END, no attempt is about to repeat steps, and all steps are counted.
        """
        if place != self.cut:
            self.cut = place
            self._count()

    def has_begun(self, plan: Plan) -> bool:
        """Return whether a planned attempt, or a later one, has written lines. For lines of older versions, which name
        no attempt, the line's time (a host's clock) is compared with the plan's time (the disk's clock).
        """
        if plan.name and self.attempt is not None:
            return self.attempt == plan.name or number_of(self.attempt) > plan.attempt
        return self.began is not None and self.began >= plan.time

    def _renumbered(self, record: dict[str, Any]) -> bool:
        """Take in how a step is numbered, and return whether this shows that the parts must be counted anew."""
        before, part = self.numbering.unit, self.parts[-1]
        self.numbering.see(record["step"], record.get("tokens"), begins=not part.last)
        if self.numbering.unit == before:
            return False
        for each in self.parts if before is None else [part]:
            each.unit = self.numbering.unit
        return len(self.parts) > 1

    def _step(self, record: dict[str, Any]) -> None:
        part, seconds = self.parts[-1], _number(record, "seconds")
        if part.last and seconds > 0:
            self.speeds.append(_number(record, "tokens") / seconds)
        part.add(record, self.cut)
        self.made = part.place(part.last)
        self.last = record
        self.sink(record)

    def _count(self) -> None:
        """Count all parts anew, now that it is known which of their steps were made again."""
        begins = [*(part.begin for part in self.parts), self.cut]
        cuts = [min(begins[at + 1 :]) for at in range(len(self.parts))]
        parts: list[_Part] = []
        so_far = Steps(self.file)
        for record in so_far.records():
            if so_far.offset > self.follower.offset:
                break
            if _opens(record, parts):
                parts.append(_part(record, self.parts[len(parts)].unit))
            if _is_step(record):
                parts[-1].add(record, cuts[len(parts) - 1])
        self.parts = parts

    @property
    def step(self) -> int:
        """Return the number of the newest step that the run has trained."""
        return self.last.get("step", 0)

    @property
    def standing(self) -> int:
        """Return the number of the newest step that no attempt will repeat."""
        return self.step if self.cut == END else min(self.step, int(self.cut // (self.numbering.unit or 1)))

    @property
    def usual(self) -> float | None:
        """Return the usual number of seconds of a step, from the newest start of the workers with enough steps."""
        return next((median(part.some) for part in reversed(self.parts) if part.some), None)

    @property
    def seconds(self) -> float:
        """Return the total seconds of all steps that no later attempt has repeated. The first step after each start of
        the workers, which includes compiling, counts with the usual step time.
        """
        whole = 0.0
        for part in self.parts:
            usual = median(part.some) if part.some else self.usual
            whole += part.others + (min(part.first, usual) if usual else 0.0)
        return whole

    @property
    def speed(self) -> float | None:
        """Return the number of tokens per second, as the median over the newest steps."""
        return median(self.speeds) if self.speeds else None


def _number(record: dict[str, Any], name: str) -> float:
    value = number(record.get(name))
    return 0.0 if value is None or not math.isfinite(value) else float(value)


OVER = {"done": 0, "given up": 1, "left": 1}  # states that a run does not leave by itself -> exit code
BAD = ("failed", "given up", "left", "interrupted", "preempted", "unfinished")


@dataclass(frozen=True)
class Status:
    """A `Status` describes the state of a run at one moment; unknown values are None. All times are in seconds,
    `goodput` is a share of the run's time, and `quiet` is the time for which the run has written no new record. The
    held-out losses come from the last evaluation. The field `not_finite` names the loss or the global norm if it is NaN
    or infinite in the newest step. The field `not_finite` ignores the norm of a step that was skipped because of the
    loss scale. The field `fullest_expert` is the number of tokens of the fullest expert divided by the mean over the
    experts of the same layer. The field `idle_experts` is the number of experts (in all layers) that got no token in
    the newest step. If the batch size grows (plugins/batch_ramp), `step_samples` is the number of samples in the newest
    step, and `stage_end` is the last step with the same number. The field `untold` lists the attempts of which no
    record says how they ended; the number of failures is then unknown. The field `probed_ranks` is the number of ranks
    that the straggler probes can compare, and `left_out` says which lines of steps could not be read.
    """

    run: str
    state: str
    attempt: int | None
    hosts: int | None
    phase: str | None
    phase_seconds: float | None
    step: int
    total_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    goodput: float | None
    wall_seconds: float | None
    checkpoint_step: int | None
    checkpoint_age: float | None
    failures: int | None
    last_failure: str | None
    slow_ranks: list[str] = field(default_factory=list)
    last_sign: float | None = None
    quiet: float = 0.0
    held_out_step: int | None = None
    held_out_loss: float | None = None
    held_out_corpora: dict[str, float] = field(default_factory=dict)
    fullest_expert: float | None = None
    fullest_layer: int | None = None
    idle_experts: int | None = None
    router_alarms: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    step_samples: int | None = None
    stage_end: int | None = None
    untold: list[int] = field(default_factory=list)
    probed_ranks: int | None = None
    left_out: str = ""

    @property
    def over(self) -> int | None:
        """Return the exit code of `tc3 runs watch` for a run that has ended; return None for any other run."""
        return OVER.get(self.state)


class Watch:
    """A `Watch` reads the files of a run while it trains; each call reads only the lines that were added since the last
    call.

    Raises:
        DataError: the folder is not the folder of a run.
    """

    def __init__(self, folder: Path, sink: Sink = lambda record: None, routers: Sink | None = None):
        check_folder(folder)
        self.folder, self.sinks = folder, (sink, routers)
        self.recipe = recipe = recipe_of(folder)
        self.ramp = View(recipe).ramp if recipe else None
        self.kept = Kept(metrics_of(folder, recipe), sink, alike=bool(self.ramp and self.ramp.stages))
        self.probes = Probes(folder, recipe)
        self.asked: tuple[str, float | None] = "", None  # an attempt, and the tokens of a step of its recipe
        self.spans = Follower(spans_file(folder))
        self.sealed: tuple[int | None, str | None] = None, None  # the newest checkpoint: its step, and its attempt
        self.whole: dict[int | None, float] = {}  # when the checkpoint of a step was whole
        self.span_end = -math.inf
        self.held_out = Follower(held_out_file(folder))
        self.evaluation: Evaluation | None = None  # the newest
        self.routers = Follower(routers_file(folder), newest=None if routers else _NEWEST)
        self.untold = False  # whether it is unknown which steps the newest attempt will repeat
        self.measured: dict[str, Any] = {}  # the routers, in the newest step
        self.tell = routers or (lambda record: None)
        self.attempt: Attempt | None = None
        self.before: Attempt | None = None  # the attempt before that one
        self.first: float | None = None  # the first attempt's plan
        self.failed: list[int] = []  # attempts that failed, of those that are over
        self.lost: list[int] = []  # earlier attempts of which no record says how they ended
        self.last_failure: Failure | None = None
        self.told: tuple[int, int, bool] | None = None  # what was known when it was judged
        self.sign: float | None = None
        self.changed = time.monotonic()

    def look(self) -> Status:
        """Read what the run has written since the last call, and return the status of the run. If a new run was started
        in the same folder since the last call (`tc3 train --force`), read the new run from its beginning.
        """
        if self._is_another_run():
            Watch.__init__(self, self.folder, *self.sinks)
        self._attempts()
        self.kept.look()
        plan = self.attempt.plan if self.attempt else None
        waits = plan is not None and not self.kept.has_begun(plan)
        place = self._begin_of(plan) if plan and waits and self.kept.step else END
        self.untold = place is None
        self.kept.begin_at(END if place is None else place)
        self._spans()
        for record in self.held_out.records():
            self.evaluation = evaluation_of(record) or self.evaluation
        for record in self.routers.records():
            self.measured = record
            self.tell(record)
        sign = self._sign()
        if sign != self.sign:
            self.sign, self.changed = sign, time.monotonic()
        return self._status()

    def _begin_of(self, plan: Plan) -> float | None:
        """Return the place after which a planned attempt is to train; None if its records do not determine it."""
        if plan.start is not None and self.asked[0] != plan.name:
            self.asked = plan.name, tokens_of(read_recipe(recipe_file(self.folder, plan)))
        tokens = self.asked[1] if plan.start is not None else None
        return begin_of(plan, tokens, (part.place(1) for part in self.kept.parts), self.kept.numbering.alike)

    def _is_another_run(self) -> bool:
        """Return whether what was read is of another run than that in the folder, or of this one without its recipe."""
        if not (self.folder / "recipe.yaml").exists():  # it is written after the plan, and says which rank has the loss
            self.recipe = None  # a run that is started over has another one, which may come after a look at its plan
            return False
        if self.recipe is None and recipe_of(self.folder):
            return True
        if self.attempt is None:
            return False
        plan = read(self.attempt.folder / PLAN, Plan)  # which never changes in a run
        gone = not self.attempt.folder.exists() and bool(numbers(self.folder))
        return plan != self.attempt.plan if plan and self.attempt.plan else gone

    def _attempts(self) -> None:
        """Read the newest attempt, and read older attempts once more after they have ended."""
        newest = self.attempt.number if self.attempt else -1
        for attempt in (one for one in numbers(self.folder) if one >= newest):
            fresh = read_attempt(self.folder, attempt)
            before = self.before if attempt == newest else self.attempt
            if before and fresh not in of_the_run([before, fresh]):
                self.attempt = before  # also where the launch had not been refused yet at the last look
                continue
            self.lost += [before.number] if before and attempt > newest and is_untold(before) else []
            self.before, self.attempt = before, fresh
            if self.first is None and self.attempt.plan:
                self.first = self.attempt.plan.time
            known = attempt, len(self.attempt.ends), self.attempt.verdict is not None
            if has_failed(self.attempt) and known != self.told:  # its logs are read again only when more is known
                self.failed += [attempt] if attempt not in self.failed[-1:] else []
                self.last_failure, self.told = failure_of(self.attempt), known

    def _spans(self) -> None:
        for record in self.spans.records():
            if span := as_span(record):
                self.span_end = max(self.span_end, span.end)
                if span.sealed:
                    self.sealed, self.whole[span.step] = (span.step, record.get(OF)), span.end

    def _checkpoint(self) -> tuple[int | None, float | None]:
        """Return the step of the newest checkpoint, and when it was whole. Until an attempt has saved one, this is the
        checkpoint of its plan: later ones were found damaged, or were left behind.
        """
        (step, name), plan = self.sealed, self.attempt.plan if self.attempt else None
        if plan and step is not None and 0 <= number_of(name) < plan.attempt:
            step = plan.step if plan.resume else None
        return step, self.whole.get(step)

    def _sign(self) -> float | None:
        """Return the newest time that the run has written anywhere; of an attempt that has ended, its end."""
        attempt = self.attempt
        if attempt and attempt.ends:
            return max(end.time for end in attempt.ends.values())
        signs = [self.kept.last.get("time"), self.span_end, attempt.plan.time if attempt and attempt.plan else None]
        signs += [beat.time for beat in attempt.beats.values()] if attempt else []
        return max((one for one in signs if isinstance(one, float) and math.isfinite(one)), default=None)

    def _status(self) -> Status:
        kept, attempt = self.kept, self.attempt
        began = self.first if self.first is not None else kept.first
        wall = self.sign - began if self.sign is not None and began is not None else None
        # the host that is furthest behind is the one that the others wait for
        beat = min(attempt.beats.values(), key=lambda one: (one.step, one.since), default=None) if attempt else None
        running = beat if attempt and not attempt.ends else None
        loss, (saved, whole) = kept.last.get("loss"), self._checkpoint()
        state, slow = self._state(), self.probes.look()
        lost = self.lost + ([attempt.number] if attempt and state == "unfinished" and is_untold(attempt) else [])
        gone = missing(kept.file)
        known = wall is not None and kept.seconds <= _CLOCKS * wall and not (self.untold or gone)
        return Status(
            run=real_path(self.folder).name,
            state=state,
            attempt=attempt.number if attempt else None,
            hosts=len(attempt.plan.hosts) if attempt and attempt.plan else None,
            phase=running.phase if running else None,
            phase_seconds=max(0.0, running.time - running.since) if running else None,
            step=kept.standing,
            total_steps=kept.total,
            loss=loss if isinstance(loss, float) and math.isfinite(loss) else None,
            tokens_per_second=kept.speed,
            # where more was trained than time has passed, the clocks of hosts and disk do not agree; nor is it known
            # where it is unknown which steps are trained again
            goodput=min(kept.seconds / wall, 1.0) if known and wall else None,
            wall_seconds=wall,
            checkpoint_step=saved,
            checkpoint_age=max(0.0, self.sign - whole) if whole is not None and self.sign is not None else None,
            failures=len(self.failed) if attempt and not lost else None,
            last_failure=in_words(self.last_failure),
            slow_ranks=slow.slow,
            probed_ranks=slow.compared or None,
            untold=lost,
            left_out=gone or kept.follower.left_out,
            last_sign=self.sign,
            quiet=time.monotonic() - self.changed,
            not_finite=_not_finite(kept.last),
            **self._batch(kept.standing),
            **self._held_out(),
            **routers_of(self.measured),
        )

    def _batch(self, step: int) -> dict[str, Any]:
        """Return the samples of the newest step, where their number grows, and until when."""
        if self.ramp is None or not self.ramp.stages or not step:
            return {}
        return {"step_samples": self.ramp.batch_at(step), "stage_end": self.ramp.end_at(step)}

    def _held_out(self) -> dict[str, Any]:
        """Return the newest held-out losses, those that are finite."""
        if (one := self.evaluation) is None:
            return {}
        corpora = {name: loss for name, loss in one.corpora.items() if math.isfinite(loss)}
        loss = one.loss if math.isfinite(one.loss) else None
        return {"held_out_step": one.step, "held_out_loss": loss, "held_out_corpora": corpora}

    def _state(self) -> str:
        """Return the state of the newest attempt; for a run without attempts, the state that its steps show."""
        if not self.folder.is_dir():
            return GONE
        if self.attempt:
            state = state_of(self.attempt)
            if state in ("unfinished", GOES_ON) and is_left(self.folder):
                return "unfinished"
            return "running" if state == "unfinished" else state
        done = self.kept.total is not None and self.kept.step >= self.kept.total
        return "done" if done else "unfinished" if is_left(self.folder) else "running"


def _not_finite(record: dict[str, Any]) -> list[str]:
    """Return the names of a step's loss and global norm if they are NaN or infinite. The norm of a step that the loss
    scale skipped is no fault.
    """
    known = [name for name in JUDGED if name != "global_norm" or record.get("overflow") is not True]
    return [name for name in known if not math.isfinite(number(record.get(name)) or 0.0)]


def routers_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run's status that follow from a line of `metrics/routers.jsonl`; a malformed line gives no
    fields.
    """
    try:
        layer, fullest = max(zip(record["layers"], record["fullest"], strict=True), key=lambda pair: pair[1])
        alarms = [f"layer {each['layer']}, since step {each['since']:,}: {each['words']}" for each in record["alarms"]]
        idle = sum(record["idle"])
    except (KeyError, TypeError, ValueError):
        return {}
    return {"fullest_expert": fullest, "fullest_layer": layer, "idle_experts": idle, "router_alarms": alarms}
