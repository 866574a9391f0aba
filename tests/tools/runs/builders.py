"""Runs as a launch would have written them, with attempts, kills and lost steps; where their time went is known."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from plugins.lines import Span, note
from tools.runs import attempts
from tools.runs.attempts import Beat, End, Plan, Verdict


def step(number, loss=5.0, seconds=0.5):
    return {"step": number, "loss": loss, "lm_loss": loss - 1, "tokens": 100, "seconds": seconds}


def header(total, start=0):
    return {"total_steps": total, "start_step": start, "world_size": 2}


def empty(run_dir):
    """The metrics file of rank 0, with nothing in it."""
    path = run_dir / "metrics" / "rank_0.jsonl"
    path.parent.mkdir()
    path.touch()
    return path


def append(path, *records):
    with path.open("a") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


BEGIN = 1_700_000_000.0


@dataclass
class Built:
    """A run, and its truth: seconds of each kind, all whole tenths."""

    folder: Path
    truth: Counter = field(default_factory=Counter)  # in tenths of a second
    kept_steps: int = 0
    lost_steps: int = 0
    failures: int = 0
    moments: list = field(default_factory=list)  # (begin, end, kind, step) in tenths since BEGIN, in order

    @property
    def wall(self) -> int:
        """Tenths of a second."""
        return sum(self.truth.values())


class Builder:
    """Writes a run moment by moment; `lost` steps are found out when an attempt begins before them."""

    def __init__(self, folder: Path, total: int, usual: int = 20, hosts: tuple[str, ...] = ("node0", "node1")):
        self.built, self.total, self.usual, self.hosts = Built(folder), total, usual, list(hosts)
        self.now, self.attempt, self.step, self.saved = 0, -1, 0, 0
        (folder / "metrics").mkdir(parents=True)

    def time(self, tenths: int | None = None) -> float:
        """Seconds since 1970."""
        return BEGIN + (self.now if tenths is None else tenths) / 10

    def spend(self, tenths: int, kind: str, step: int = 0) -> None:
        """Let time pass."""
        self.built.moments.append((self.now, self.now + tenths, kind, step))
        self.now += tenths

    def folder(self) -> Path:
        """Of this attempt."""
        return attempts.folder_of(self.built.folder, self.attempt)

    def plan(self, wait: int = 0) -> None:
        """Begin an attempt from the newest checkpoint, `wait` tenths after the last one ended."""
        if self.attempt >= 0:
            self.spend(wait, "waiting")
        self.attempt += 1
        self.step = self.saved
        resume = f"/disk/iteration_{self.saved:08d}" if self.saved else None
        plan = Plan(self.attempt, self.time(), self.hosts, 1, self.hosts[0], 8118, resume=resume, step=self.step)
        attempts.write(self.folder() / attempts.PLAN, plan)

    def metrics(self, record: dict) -> None:
        """A line of rank 0."""
        with (self.built.folder / "metrics" / "rank_0.jsonl").open("a") as out:
            out.write(json.dumps(record) + "\n")

    def train(self, until: int, start: int = 100, compiling: int = 300, every: int = 5, save: int = 7,
              evaluation: int = 0, between: int = 1, loss=lambda step: 5.0) -> None:  # fmt: skip
        """Steps up to `until`, saving every `every`: a start, a compiling first step, gaps, saves, evaluations."""
        self.spend(start, "start")
        began = self.time()
        if evaluation:
            self.span("evaluation", evaluation)
        first = True
        while self.step < until:
            self.step += 1
            if first:
                self.spend(compiling, "compile")
            else:
                self.spend(between, "between")
            self.spend(self.usual, "step", self.step)
            if first:
                self.metrics({"total_steps": self.total, "start_step": self.step - 1, "world_size": 2, "time": began})
            seconds = (self.usual + compiling * first) / 10
            self.metrics({"step": self.step, "time": self.time(), "loss": loss(self.step), "lm_loss": 4.0,
                          "global_norm": 1.0, "learning_rate": 1e-3, "tokens": 1000, "seconds": seconds})  # fmt: skip
            first = False
            if self.step % every == 0 and save:
                self.span("save", save, sealed=True)
                self.saved = self.step

    def span(self, kind: str, tenths: int, sealed: bool = False) -> None:
        """Stand still for a save or an evaluation."""
        begin = self.time()
        self.spend(tenths, kind)
        note(self.built.folder, Span(kind, self.step, begin, self.time(), sealed))

    def beat(self, phase: attempts.Phase = "step") -> None:
        """A sign of life of every host."""
        for host in self.hosts:
            beat = Beat(host, self.time(), phase, self.time(), self.step)
            attempts.write(self.folder() / f"{attempts.BEAT}{host}.json", beat)

    def kill(self, after: int = 30, host: int = 1, lines: tuple[str, ...] = ("Segmentation fault",), decision="restart",
             cause: attempts.Cause = "signal") -> None:  # fmt: skip
        """The worker of one host dies `after` tenths behind the last event; the other is told to end."""
        self.spend(after, "stop" if self.step_made() else "start")
        log = self.folder() / "logs" / f"worker_{host}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("\n".join(lines) + "\n")
        for number, name in enumerate(self.hosts):
            guilty = number == host
            end = End(name, self.time(), "failed" if guilty else "told to end", "step", self.step,
                      cause if guilty else None, number, -9 if guilty else None,
                      "worker was killed" if guilty else "", str(log) if guilty else "")  # fmt: skip
            attempts.write(self.folder() / f"{attempts.END}{name}.json", end)
        others = [name for number, name in enumerate(self.hosts) if number != host]
        verdict = Verdict(self.time(), decision, f"{self.hosts[host]} failed", self.hosts[host], host, cause, others)
        attempts.write(self.folder() / attempts.VERDICT, verdict)
        self.built.failures += 1

    def step_made(self) -> bool:
        """Return whether this attempt has made a step."""
        kinds = [kind for *_, kind, _ in self.built.moments]
        return "step" in kinds and "step" in kinds[len(kinds) - kinds[::-1].index("start") :]

    def done(self, after: int = 40) -> Built:
        """The run ends well."""
        self.spend(after, "stop")
        for name in self.hosts:
            attempts.write(
                self.folder() / f"{attempts.END}{name}.json", End(name, self.time(), "done", "end", self.step)
            )
        attempts.write(self.folder() / attempts.VERDICT, Verdict(self.time(), "done", "all steps are made"))
        return self.sum_up()

    def sum_up(self) -> Built:
        """Count the truth: a step is lost if the same one is made again later."""
        built, stands = self.built, set()
        for begin, end, kind, step in reversed(built.moments):
            if kind == "step":
                kind = "lost" if step in stands else "kept"
                built.kept_steps += step not in stands
                built.lost_steps += step in stands
                stands.add(step)
            built.truth[kind] += end - begin
        return built


def random_run(folder: Path, seed: int) -> Built:
    """A run of some attempts, each killed at a random moment, of random durations."""
    rng = random.Random(seed)
    builder = Builder(folder, total=60, usual=rng.choice([3, 20, 50]))
    for _ in range(rng.randrange(5)):
        builder.plan(wait=rng.randrange(80))
        reach = min(59, builder.step + rng.randrange(0, 14))
        settings = {"start": rng.randrange(1, 200), "compiling": rng.randrange(400), "every": rng.randrange(2, 7)}
        if reach - builder.step == 1:  # the usual step of a part of one step is another part's
            reach += 1
        builder.train(
            reach, save=rng.randrange(1, 20), evaluation=rng.choice([0, 8]), between=rng.choice([0, 2]), **settings
        )
        builder.kill(rng.randrange(100), host=rng.randrange(2))
    builder.plan(wait=rng.randrange(80))
    builder.train(60, evaluation=rng.choice([0, 8]), between=rng.choice([0, 2]))
    return builder.done(rng.randrange(60))
