"""This module runs the checks of `tc3 firsthour` on this machine, by the commands that a user would type.

`Hour.commands` lists the commands of each check; `--dry-run` prints them, and the checks start them, each with the
check's time limit and in processes that end with the check. The results are judged by `launch.firsthour.judge` and
`launch.firsthour.calibrate`.

The checks from `mini` on train mini recipes on the CPU; `launch.firsthour.npu` contains the checks of a host with NPUs.
No check has run on an NPU.
"""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, TimeoutExpired
from typing import Any

from launch.firsthour.calibrate import judge_fit, judge_stage
from launch.firsthour.checks import HOUR_CHECKS, Finding, Outcome
from launch.firsthour.collectives import judge_collectives, measured, rows_of
from launch.firsthour.judge import hosts_evidence, judge_devices, judge_hosts, judge_operators, results_of
from launch.firsthour.trainings import ALL_STEPS, SAVE, STEPS, judge_golden, judge_parallel, judge_resume
from launch.firsthour.variants import STEPS as VARIANT_STEPS
from launch.firsthour.variants import Variant, judge_variants, variants_of, write_overlay
from launch.run.msrun import ROOT
from plugins.errors import ClusterError, TC3Error, not_json
from tools.data.index import read_whole, write_learnable
from tools.doctor.ask import REACHED, TC3, Answer, Trouble, ask_all, call_each, parsed
from tools.doctor.report import Report
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.hardware import DEFAULT_HARDWARE
from tools.layout.resolve import resolve
from tools.process.children import GRACE, child, kill, terminate_as_interrupt
from tools.process.host import read_hosts
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.view import LOADER, View
from tools.runs.attempts import newest_attempt
from tools.runs.readings import load_run, read_metrics
from tools.schema.stages import loss_rank

Found = tuple[list[Finding], dict[str, Any]]
# operators of a training that MindSpore's CPU kernels compute right, for a rehearsal; an NPU has to compute all
OPERATORS = ("matmul", "batch_matmul", "rms_norm", "softmax", "silu", "router_topk")
PROFILED = (6, 9)  # steps of the trainings that are profiled
_LOOK = 0.1  # seconds between two looks at a run that is to be killed
_OPERATORS_ENDS = (*REACHED, 2)  # exit codes of tc3 accuracy ops with an output; 2: no operator could be computed
NO_MEMORY = "a CPU worker's process holds MindSpore and the model together, so the memory of the model is not known"


@dataclass
class Hour:
    """An `Hour` runs the checks of `tc3 firsthour` with a recipe on this machine.

    Args:
        recipe: the file of the recipe.
        work: folder of everything that the checks write.
        nodes: file of hosts, or None for this host.
    """

    recipe: Path
    work: Path
    nodes: Path | None = None

    def __post_init__(self) -> None:
        self.view = View(load_recipe(self.recipe))
        self.npus = sorted(Path("/dev").glob("davinci[0-9]*"))

    @property
    def names(self) -> list[str]:
        """Return the names of the nodes."""
        return read_hosts(self.nodes)[0] if self.nodes else [socket.gethostname()]

    @property
    def device(self) -> str:
        """Return "Ascend" on a host with NPUs, and "CPU" otherwise."""
        return "Ascend" if self.npus else "CPU"

    @property
    def small(self) -> Path:
        """Return the path of the small recipe that the checks train."""
        return self.work / "small.yaml"

    def commands(self) -> dict[str, list[list[str]]]:
        """Return for each check the commands that the check runs."""
        recipe, json_ = str(self.recipe), "--json"
        nodes = ["--nodes", str(self.nodes)] if self.nodes else []
        workers = [] if self.nodes or self.device == "Ascend" else ["--workers", str(self.each)]
        equal = ["accuracy", "equivalence", recipe, "--steps", str(STEPS), json_]
        operators = () if self.device == "Ascend" else OPERATORS
        work, small = str(self.work), str(self.small)
        profiled, profile = str(self.work / "profiled.yaml"), str(self.work / "profile")
        train = ["train", small, "--steps", str(ALL_STEPS), "--no-bind", json_]
        return {
            "hosts": [["doctor", recipe, *nodes, json_]],
            "versions": [],
            "devices": [["doctor", recipe, "--probe", *workers, *nodes, json_]],
            "collectives": [],
            "operators": [["accuracy", "ops", *operators, "--reruns", "2", "--shipped", json_]],
            "mini": [[*equal, "--only", "baseline", "--work", f"{work}/mini"]],
            "parallel": [[*equal, "--only", ",".join(self.strategies()), "--work", f"{work}/parallel"]],
            "stage": [
                [*("train", profiled, "--steps", str(ALL_STEPS), "--no-bind", json_), "--run-dir", f"{work}/stage"],
                ["search", "calibrate", profile, "--recipe", profiled, "--out", f"{work}/measured.yaml", json_],
                *(self.variant_command(one) for one in {one.name: one for one in self.variants()}.values()),
            ],
            "resume": [
                [*train, "--run-dir", f"{work}/whole"],
                [*train, "--run-dir", f"{work}/cut"],
                [*train, "--run-dir", f"{work}/cut", "--resume", "auto"],
            ],
            "calibrate": [["search", recipe, "--cluster", f"{work}/measured.yaml", "--effort", "low", json_]],
        }

    @property
    def each(self) -> int:
        """Return the number of workers on this node, each of which represents a device."""
        return max(2, min(8, self.view.devices))

    @property
    def world(self) -> int:
        """Return the number of devices, or workers, of all nodes."""
        return self.each

    def group_rows(self) -> list[dict[str, Any]]:
        """Return the collectives that the check `collectives` measures, without measured values."""
        # its data is not checked here: no training starts, and the small recipe has data of its own
        run = from_recipe(resolve(load_recipe(self.recipe), layout="file"))
        return rows_of(run, cluster(DEFAULT_HARDWARE), self.world, self.device == "CPU")

    def strategies(self) -> list[str]:
        """Return the strategies of `tc3 accuracy equivalence` that test the recipe's kinds of parallelism."""
        view = self.view
        kinds = {
            "executed_tp2_sp": view.tp > 1, "executed_pp2": view.pp > 1, "executed_cp2": view.cp > 1,
            "executed_moe_ep2": view.ep > 1,
        }  # fmt: skip
        return [name for name, there in kinds.items() if there] or ["data_parallel_2"]

    def work_of(self) -> dict[str, Any]:
        """Return for each check the function that runs the check."""
        return {check.name: getattr(self, check.name) for check in HOUR_CHECKS}

    # The checks of hosts and devices.

    def _asked(self, check: str, seconds: float) -> dict[str, Answer]:
        """Return the report of tc3 doctor from every node."""
        words = self.commands()[check][0]
        if self.nodes:
            own = [word for word in words[2:] if word not in ("--nodes", str(self.nodes), "--json")]
            return ask_all(self.names, [str(self.recipe.absolute()), *own], seconds)
        return {self.names[0]: Answer(parsed(json.dumps(ask(words, seconds))))}

    def hosts(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Collect the report of `tc3 doctor` from every node, and judge the reports."""
        evidence = hosts_evidence(self._asked("hosts", seconds))
        return judge_hosts(evidence, self.names, versions=False), evidence

    def versions(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Judge whether all nodes have the same versions, by the reports that the check `hosts` has
        collected.
        """
        evidence = done["hosts"].evidence
        if not evidence:
            raise ClusterError(
                "no node has reported its versions, because the check `hosts` gave no results: solve the "
                "problems of `hosts` first"
            )
        return judge_hosts(evidence, self.names, versions=True), {}

    def devices(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Collect from every node the speeds that `tc3 doctor --probe` measures for its workers, and judge them."""
        answers = self._asked("devices", seconds)
        reports = {host: answer.told for host, answer in answers.items() if isinstance(answer.told, Report)}
        probes = {host: report.probe for host, report in reports.items() if report.probe}
        evidence: dict[str, Any] = {"probes": probes, "memory": [], "links": []}
        silent = [
            Finding("unknown", "probe", "the node gave no probe", host, None, "tc3 doctor --probe there")
            for host in answers
            if host not in probes
        ]
        return (silent + judge_devices(evidence) if probes else silent), evidence

    def collectives(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Time the collectives of the recipe's own groups."""
        nodes = self.world // self.each
        names = self.names[:nodes] if nodes > 1 else [socket.gethostname()]
        folder = self.work / "collectives"
        rows = self.group_rows()
        usable = [row for row in rows if row["groups"]]
        done_ = iter(measured(usable, folder, names, self.each, self.device, seconds) if usable else ())
        rows = [next(done_) if row["groups"] else row for row in rows]
        return judge_collectives(rows, names, self.each, self.device == "CPU"), {"rows": rows}

    def operators(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Compare operators with their golden results on every device of every node; at any time one device of each
        node computes.
        """
        words = self.commands()["operators"][0]
        numbers = range(len(self.npus)) if self.npus else [0]
        rows, silent = [], []
        for number in numbers:
            chosen = {"ASCEND_RT_VISIBLE_DEVICES": str(number)} if self.npus else {}
            for host, told in self._operators(words, chosen, seconds / len(numbers)).items():
                if isinstance(told, Trouble):
                    silent.append(Finding("unknown", "operators", told.words, host, number, told.mend))
                else:
                    results, shipped = results_of(told["rows"]), told.get("shipped")
                    rows.append({"host": host, "device": number, "results": results, "shipped": shipped})
        return silent + (judge_operators(rows) if rows else []), {"devices": rows}

    def _operators(
        self, words: Sequence[str], chosen: Mapping[str, str], seconds: float
    ) -> Mapping[str, dict[str, Any] | Trouble]:  # fmt: skip
        """Return a dictionary host -> output of tc3 accuracy ops on this host, with the variables `chosen` in its
        environment.
        """
        remedy = "run tc3 accuracy ops there"
        if not self.nodes:
            try:
                return {self.names[0]: ask(words, seconds, {**os.environ, **chosen}, _OPERATORS_ENDS)}
            except ClusterError as error:  # the other devices are judged nevertheless
                return {self.names[0]: Trouble("operators", str(error), remedy)}
        argv_ = ["env", *(f"{name}={value}" for name, value in chosen.items()), *argv(words)]
        found: dict[str, dict[str, Any] | Trouble] = {}
        for host, told in call_each(dict.fromkeys(self.names, argv_), seconds, _OPERATORS_ENDS).items():
            try:
                found[host] = told if isinstance(told, Trouble) else dict(json.loads(told[max(told.find("{"), 0) :]))
            except ValueError as error:
                found[host] = Trouble("operators", f"the output {not_json(error)}", remedy)
        return found

    # The checks that train.

    def mini(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Train a small version of the recipe (its mini recipe) in one process, and compare its losses with the golden
        losses.
        """
        content = ask(self.commands()["mini"][0], seconds)
        known = Path(content["golden_file"]).name if content["golden_file"] else ""
        evidence = {"differences": content["golden"], "golden_file": known, "steps": content["steps"]}
        return judge_golden(content, known), evidence

    def parallel(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Train a small version of the recipe with each of its kinds of parallelism, and compare each training with a
        training in one process.
        """
        content = ask(self.commands()["parallel"][0], seconds)
        found = judge_parallel(content["rows"])
        if self.view.devices == 1:
            found = [replace(one, seen=f"{one.seen}; the recipe itself is for one device") for one in found]
        return found, {"rows": content["rows"]}

    @property
    def corpus(self) -> Path:
        """Return the path prefix of the corpus that the trainings read."""
        return self.work / "corpus"

    def write_corpus(self, vocabulary: int) -> None:
        """Write a corpus of token ids below `vocabulary`, from which a small model can learn."""
        self.work.mkdir(parents=True, exist_ok=True)
        write_learnable(self.corpus, vocabulary)

    def point(self, flat: dict[str, Any]) -> None:
        """Change the recipe of a check in place, so that it reads the corpus and saves checkpoints often."""
        loader = flat
        for key in LOADER:
            loader = loader[key]
        read_whole(loader["config"], str(self.corpus))
        for name in ("held_out_loss", "batch_ramp"):
            (flat.get("plugins") or {}).pop(name, None)
        flat["checkpoint"]["save_interleaved_steps"] = SAVE

    def write_small(self) -> None:
        """Write a corpus, the small recipe that the trainings use, and a copy of this recipe that profiles some
        steps.
        """
        flat: Any = load_recipe(self.recipe) if self.view.on_cpu else load_mini(self.recipe, str(self.corpus))
        flat = copy.deepcopy(flat)
        self.write_corpus(int(flat["model"]["model_config"]["vocab_size"]))
        self.point(flat)
        dump_recipe(flat, self.small)
        self.write_profiled(flat)

    def write_profiled(self, flat: dict[str, Any]) -> None:
        """Write a copy of a small recipe that profiles some training steps."""
        start, stop = PROFILED
        monitor = {
            "type": "ProfileMonitor", "start_step": start, "stop_step": stop, "profiler_level": 1,
            "output_path": str(self.work / "profile"), "data_simplification": False,
        }  # fmt: skip
        dump_recipe({**flat, "callbacks": [*flat["callbacks"], monitor]}, self.work / "profiled.yaml")

    def stage(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Train with profiling, and compare for each term of the step-time model the measured seconds with the
        predicted seconds. Then measure step times with other modes of expert dispatch and with fused operators.
        """
        self.write_measured()
        train, calibrate = self.commands()["stage"][:2]
        until = time.monotonic() + seconds
        self.start(train, "stage", seconds)
        content = ask([*calibrate, "--force"], max(1.0, until - time.monotonic()))
        evidence = {
            "seconds": content["measured"]["seconds"], "terms": content["measured"]["terms"],
            "predicted": content["before"], "after": content["after"], "fitted": content["fitted"],
            "notes": content["notes"], "memory": [], "why_no_memory": self.no_memory,
        }  # fmt: skip
        found, evidence["variants"] = self.compare_variants(until)
        return [*judge_stage(evidence), *found], evidence

    no_memory = NO_MEMORY

    def write_measured(self) -> None:
        """Write the recipe that the check `stage` trains, and a copy of it that profiles some steps."""
        self.write_small()

    def start(self, words: Sequence[str], run: str, seconds: float) -> None:
        """Run the command line `words`, which starts a training run; the run's files go into the folder of the work
        folder that `run` names.
        """
        ask([*words, "--force"], seconds)

    @property
    def measured_recipe(self) -> Path:
        """Return the file of the recipe whose variants are measured."""
        return self.small

    def variants(self) -> list[Variant]:
        """Return the variants of the recipe that this host can measure."""
        flat = load_recipe(self.recipe) if self.view.on_cpu else load_mini(self.recipe)
        return variants_of(View(flat), on_cpu=True)

    def variant_command(self, one: Variant) -> list[str]:
        """Return the command that trains a variant."""
        words = ["train", str(self.measured_recipe), "--steps", str(VARIANT_STEPS), *one.words]
        return [*words, "--no-bind", "--json", "--run-dir", str(self.work / one.name)]

    def compare_variants(self, until: float) -> tuple[list[Finding], dict[str, float | None]]:
        """Train each variant until its time limit, and write the fastest values into an overlay."""
        variants, file = self.variants(), self.work / "overlay.yaml"
        seconds: dict[str, float | None] = {}
        for name, one in {one.name: one for one in variants}.items():
            try:
                self.start(self.variant_command(one), name, max(1.0, until - time.monotonic()))
                seconds[name] = load_run(self.work / name).usual()
            except TC3Error:
                seconds[name] = None
        write_overlay(self.recipe, variants, seconds, file)
        return judge_variants(variants, seconds, file), seconds

    def resume(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Train once undisturbed and once with a kill and a resume, and compare every loss of the two runs bit by
        bit.
        """
        self.write_small()
        whole, cut, again = self.commands()["resume"]
        until = time.monotonic() + seconds
        ask([*whole, "--force"], seconds)
        killed = self._killed([*cut, "--force"], max(1.0, until - time.monotonic()))
        ask(again, max(1.0, until - time.monotonic()))
        wanted, got = (self._losses(name) for name in ("whole", "cut"))
        evidence = {"killed_after": killed, "whole": wanted, "cut": got}
        last = newest_attempt(self.work / "cut")
        return judge_resume(wanted, got, killed, last.plan.step if last and last.plan else 0), evidence

    def _losses(self, run: str) -> dict[str, float]:
        return self.read_losses(run, self.small, "loss")

    def read_losses(self, run: str, recipe: Path, key: str) -> dict[str, float]:
        """Return the losses of a run in the work folder as step -> loss; `key` names the kind of loss."""
        file = self.work / run / "metrics" / f"rank_{loss_rank(View(load_recipe(recipe)))}.jsonl"
        return {str(step): record[key] for step, record in sorted(read_metrics(file).steps.items())}

    def _killed(self, words: Sequence[str], seconds: float) -> int:
        """Start a training, end it by SIGKILL one step after its first save, and return its last step."""
        until = time.monotonic() + seconds
        shutil.rmtree(self.work / "cut", ignore_errors=True)  # the steps of an earlier start are not this run's
        with terminate_as_interrupt(), child(argv(words), GRACE, stdout=DEVNULL, stderr=DEVNULL, cwd=ROOT) as process:
            while process.poll() is None and time.monotonic() < until:
                if steps := self._losses("cut"):
                    last = max(map(int, steps))
                    if last > SAVE:
                        kill(process)
                        return last
                time.sleep(_LOOK)
            if process.poll() is None:
                raise ClusterError(
                    f"`tc3 {shlex.join(words)}` did not reach step {SAVE + 1} within {seconds:.0f} s; give more time "
                    "with --budget"
                )
        raise ClusterError(
            f"`tc3 {shlex.join(words)}` ended before tc3 firsthour could kill it to test resuming: start tc3 firsthour "
            "again"
        )

    def calibrate(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Fit the estimator to the pipeline stage that `tc3 firsthour` has measured, judge the fit, and search for
        strategies again with the calibrated cluster file.
        """
        seen = done["stage"].evidence
        found = judge_fit(seen["seconds"], seen["after"], seen["fitted"], None, self.no_memory)
        measured = (self.work / "measured.yaml").read_text(encoding="utf-8")
        content = ask(self.commands()["calibrate"][0], seconds)
        best = content["strategies"][:1]
        found.append(Finding("ok" if best else "warn", "search", "the search was repeated with the measured cluster"))
        return found, {"fitted": seen["fitted"], "after": seen["after"], "best": best, "cluster": measured}


def argv(words: Sequence[str]) -> list[str]:
    """Return the argv that runs `tc3` with the arguments `words`."""
    return [*TC3, *words]


def ask(
    words: Sequence[str], seconds: float, env: Mapping[str, str] | None = None, codes: Collection[int] = REACHED
) -> dict[str, Any]:
    """Return the JSON that a command of tc3 prints; the exit codes `codes` mean that the command has reached a verdict,
    all other exit codes that it could not reach a verdict.

    Raises:
        ClusterError: the command was not finished in time, or failed; the message ends with the last line of its
            output.
    """
    shown = f"tc3 {shlex.join(words)}"
    out, last = output(words, seconds, env, codes)
    start = out.find("{")
    try:
        return dict(json.loads(out[max(start, 0) :]))
    except ValueError as error:
        reason = not_json(error) if start >= 0 else f"holds no JSON: {last}"
        raise ClusterError(f"the output of `{shown}` {reason}") from None


def output(
    words: Sequence[str], seconds: float, env: Mapping[str, str] | None = None, codes: Collection[int] = REACHED
) -> tuple[str, str]:
    """Return (standard output, last line of standard error) of a command of tc3, which ends with one of the exit codes
    `codes`.

    Raises:
        ClusterError: the command was not finished in time, or failed.
    """
    shown = f"tc3 {shlex.join(words)}"
    with terminate_as_interrupt(), child(argv(words), GRACE, text=True, stdout=PIPE, stderr=PIPE, env=env) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except TimeoutExpired:
            raise ClusterError(
                f"`{shown}` did not finish within {seconds:.0f} s; give more time with --budget"
            ) from None
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
    if process.returncode not in codes:
        raise ClusterError(f"`{shown}` ended with exit code {process.returncode}: {last}")
    return out, last
