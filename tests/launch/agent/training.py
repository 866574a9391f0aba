"""Whole runs of simulated agents: real plans, verdicts, ledgers and checkpoints; steps that only note their samples.

What differs from a run is in `simulation.World` and here: a step takes a look, and leaves behind which samples it saw;
workers are killed, and agents are held up, at random. While one is held up (in the middle of a plan, or between looking
at a checkpoint and renaming it) the others go on, take its place, and may be many steps further when it wakes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from launch.agent import decide, planning
from launch.agent.cli import Start
from launch.agent.decide import Rules
from launch.agent.lookout import Around
from launch.agent.meeting import Meeting
from launch.agent.planning import Job, Planning, follow, history, recipe_of
from launch.resume import checkpoints, data
from launch.run.msrun import ROOT
from plugins.sealed_checkpoint.plan import fault, made, publish, remove_old, saving_folder, write_seal
from plugins.spike_guard.ledger import add_entry, original, read_ledger
from plugins.spike_guard.plan import Settings, what_follows
from tests.launch.agent.simulation import Agent, World, _Disk
from tools.checkpoint.scan import newest_saved
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.runs.attempts import END, FINAL, VERDICT, Attempt, Beat, End, Plan, Verdict, file_of, folder_of, read

NODES, EVERY, KEPT = 2, 2, 3  # hosts that train, steps between two checkpoints, checkpoints that stay
SKIP = 4  # steps whose samples are left out for a spike: two checkpoints hold some of them
NAP = 40.0  # seconds for which an agent is held up: ten times what it takes to be given up


class Training(World):
    """A run of `steps` steps on two of `hosts`, whose data has `bad` samples: each step that sees one is a spike. Its
    batch grows by the `stages` of plugins.batch_ramp, if it has any.

    Attributes:
        kills, naps: how likely a worker dies in a step, and an agent is held up where that may hurt.
        planners: who has planned, attempt by attempt; trained: the samples of the whole run, once it is through.
        late: saves that rank 0 could not put in their place, after the last one that it could, which removes old ones.
    """

    def __init__(
        self, folder: Path, monkeypatch, seed: int, steps: int, bad: set[int], kills: float, naps: float, stages=()
    ):
        super().__init__(folder, monkeypatch, seed=seed)
        self.stages = [list(stage) for stage in stages]
        self.steps, self.bad, self.kills, self.naps = steps, bad, kills, naps
        self.attempts: dict[int, SimpleNamespace] = {}
        self.planners: list[str] = []
        self.late = 0
        self.trained: list[int] = []
        self.asleep = False
        self.settings = Settings(rollbacks=9, skip=SKIP)
        self.hosts: tuple[str, ...] = ()
        self.ramp = View(self._recipe()).ramp
        assert len(self.ramp.stages) == len(stages)
        monkeypatch.setattr(planning, "meanwhile", lambda *_: nullcontext())
        monkeypatch.setattr(planning, "time", SimpleNamespace(monotonic=lambda: self.time))
        monkeypatch.setattr(planning, "free_port", lambda: 9000)
        for module, name in ((planning, "make_plan"), (data, "set_aside"), (checkpoints, "set_aside")):
            monkeypatch.setattr(module, name, self._held_up(getattr(module, name)))

    def start(self, *hosts: str) -> None:
        """An agent on each host."""
        self.hosts = hosts
        for host in hosts:
            self.add(host, NODES, comes=self.random.uniform(0, 3))

    def _recipe(self) -> Recipe:
        recipe = load_recipe(ROOT / "recipes/mini/pretrain_dp2.yaml")
        recipe["output_dir"] = str(self.folder)
        recipe["checkpoint"] = {**recipe["checkpoint"], "save_path": str(self.folder / "checkpoint")}
        recipe["plugins"] = {"spike_guard": {"rollbacks": 9, "skip": SKIP}}
        if self.stages:
            recipe["plugins"]["batch_ramp"] = {"stages": self.stages}
        return recipe

    def _held_up(self, does):
        """`does`, with naps before and after it, in which the others live."""

        def nap():
            if self.asleep or self.random.random() >= self.naps:
                return
            agent, self.asleep = self.now, True
            self.run(NAP)
            self.now, self.asleep = agent, False

        def slowly(*arguments, **more):
            nap()
            found = does(*arguments, **more)
            nap()
            return found

        return slowly

    def _live(self, agent: Agent, nodes: int) -> Iterator[None]:
        recipe = self._recipe()
        start = Start(recipe, self.folder, None)
        rules = Rules(restarts=999, same_step=999, same_host=999, hosts=list(self.hosts))
        job = Job(recipe, self.folder, agent.host, self.hosts, nodes, choose=start.choose, rules=rules)
        meeting = Meeting(self.folder, agent.host, lost_after=self.lost_after, disk=_Disk(self, agent))
        number = 0
        while True:
            until = self.time + self.random.uniform(0, 3)  # who comes first plans
            while self.time < until:
                yield
            plan = yield from self._planned(agent, job, start, meeting, number)
            if agent.host not in plan.hosts:
                yield from self._stand_by(agent, meeting, plan)
            elif not read(file_of(folder_of(self.folder, number), END, agent.host), End):
                follow(job, plan)
                yield from self._part(agent, job, meeting, plan)
            agent.verdict = yield from self._verdict(agent, job, meeting, plan)
            if agent.verdict.decision in FINAL:
                return
            number += 1

    def _planned(self, agent: Agent, job: Job, start: Start, meeting: Meeting, number: int) -> Iterator[None]:
        wanted = Planning(job, number, lambda hosts: "too few", meeting, start.prepare).wanted
        meeting.come(number)
        while not (plan := meeting.plan(number, wanted)):
            yield
        if len(self.planners) == number:
            claims = sorted(folder_of(self.folder, number).glob("claim-plan-*"))
            self.planners.append(json.loads(claims[-1].read_text())["host"])
        return plan

    def _stand_by(self, agent: Agent, meeting: Meeting, plan: Plan) -> Iterator[None]:
        around = Around(meeting, plan, agent.host)
        while not (around.look() or read(folder_of(self.folder, plan.attempt) / VERDICT, Verdict)):
            meeting.beat(plan.attempt, Beat(agent.host, meeting.now(), "start", 0.0))
            yield

    def _verdict(self, agent: Agent, job: Job, meeting: Meeting, plan: Plan) -> Iterator[None]:
        around = Around(meeting, plan, agent.host)

        def given(attempt: Attempt) -> Verdict:
            best = newest_saved(job.saves)
            more = {"now": meeting.now(), "saved": best.step if best else None}
            return decide.verdict(attempt, history(job, attempt.number), job.rules, lambda hosts: "too few", **more)

        while not (verdict := meeting.verdict(plan.attempt, given)):
            around.look()
            yield
        return verdict

    def _part(self, agent: Agent, job: Job, meeting: Meeting, plan: Plan) -> Iterator[None]:
        """Do the work of one host's workers; the first host's workers make the steps as soon as all hosts are there."""
        number, first = plan.attempt, agent.host == plan.hosts[0]
        around = Around(meeting, plan, agent.host)
        if around.look():  # the workers of a host that was held up are ended before they read a checkpoint
            meeting.end(number, End(agent.host, meeting.now(), "told to end", "start", plan.step))
            return
        run = self.attempts.setdefault(number, SimpleNamespace(there={}, step=plan.step, samples=self._load(plan)))
        run.there[agent.host] = data.left_out(recipe_of(job, plan))
        while True:
            meeting.beat(number, Beat(agent.host, meeting.now(), "step", 0.0, run.step))
            how = dict.fromkeys(("outcome", "cause", "message"), "")
            if around.look():
                how = {"outcome": "told to end"}
            elif run.step >= self.steps:
                how = {"outcome": "done"}
                self.trained = run.samples
            elif first and len(run.there) == len(plan.hosts):
                how = self._step(run, plan) or {}
            else:
                how = {}
            if how:
                meeting.end(number, End(agent.host, meeting.now(), phase="step", step=run.step, **how))
                return
            yield

    def _step(self, run: SimpleNamespace, plan: Plan) -> dict[str, str] | None:
        left_out, *others = run.there.values()
        assert all(each == left_out for each in others), "all ranks leave out the same"
        run.step += 1
        positions = self.ramp.rows_at(run.step, 0, 1)
        run.samples = run.samples + [original(position, left_out) for position in positions]
        if self.bad & set(run.samples[-len(positions) :]):
            before = read_ledger(self.folder)
            entry, words = what_follows(run.step, "loss is NaN", before, self.settings, self.ramp, left_out)
            assert entry, words
            add_entry(self.folder, entry)
            return {"outcome": "failed", "cause": "spike", "message": words}
        saves = run.step % EVERY == 0 or run.step == self.steps
        if (saves and not self._save(run, plan, left_out)) or self.random.random() < self.kills:
            return {"outcome": "failed", "cause": "signal", "message": "killed"}
        return None

    def _save(self, run: SimpleNamespace, plan: Plan, left_out) -> bool:
        """Save a checkpoint, and return whether it was moved to its final place; if not, rank 0 was killed before."""
        root = self.folder / "checkpoint"
        folder = saving_folder(root, plan.name) / f"iteration_{run.step:08d}"
        folder.mkdir(parents=True)
        (folder / "common.json").write_text(json.dumps({"global_batch_size": self.ramp.full}))
        for rank in range(NODES):
            (folder / f"mini-model-{rank:07d}-{NODES:07d}.safetensors").write_text(json.dumps(run.samples))
            write_seal(folder, rank, NODES, run.step, made={"attempt": plan.name, "skipped": left_out})
        if self.random.random() < 0.2:
            self.late += 1
            return False
        self.late = 0
        remove_old(root, publish(folder, root), KEPT, plan.name)
        return True

    def _load(self, plan: Plan) -> list[int]:
        if not plan.resume:
            return []
        folder = Path(plan.resume)
        assert fault(folder) is None and "attempt" in made(folder)
        return json.loads(next(folder.glob("*.safetensors")).read_text())
