"""This module runs the checks that train on a host with NPUs. None of this module's checks has run on an NPU: the small
recipes were checked and compiled for virtual devices, and the judging was tested on recorded losses.

The small recipes are a family (`tools.recipe.mini_ascend`): one for a CPU process, one for one device, one for two
devices, one for the devices of a node, and one for at most `MOST` devices of several nodes; all have the same weights,
batch and samples.

- `mini`: one device trains at the same time as a CPU process of the same node, whose losses are the golden losses. The
  device and the CPU process start from the same seed, and their losses are compared.
- `parallel`: each larger recipe of the family goes on from the checkpoint that the single device saved after `SAVE`
  steps, and its losses are compared with those of the single device. A recipe that needs several nodes is started on
  each node by ssh, with the script of tc3 train --script; the nodes must then share the work folder.
- `stage`: one stage of the recipe is trained at its own sizes (`tools.dryrun.one_stage`), on as many devices as a stage
  has, with a profile; then its dispatch modes and fused operators are compared with each other
  (`launch.firsthour.variants`).
- `resume`: the check is the same as on a host without NPUs, with the small recipe for one device.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.firsthour.checks import NO_SUBJECT, Finding, Outcome
from launch.firsthour.hour import Found, Hour, ask, output
from launch.firsthour.trainings import ALL_STEPS, SAVE, STEPS, judge_curves, rank_counts
from launch.firsthour.variants import Variant, variants_of
from plugins.errors import ClusterError, RecipeError
from tools.doctor.ask import Trouble, call_each
from tools.dryrun.one_stage import one_stage
from tools.layout.resolve import resolve
from tools.process.host import read_hosts
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini_ascend import ON_CPU, ascend_minis
from tools.recipe.view import View

MOST = 64  # devices of the largest small recipe, so that one device can hold its batch
LOSS = "lm_loss"  # without the balancing loss, which depends on how a batch is cut


class NpuHour(Hour):
    """An `NpuHour` runs the checks of `tc3 firsthour` with a recipe for Ascend on hosts with NPUs."""

    @property
    def device(self) -> str:
        """Return "Ascend", the device target of this host."""
        return "Ascend"

    @property
    def each(self) -> int:
        """Return the number of devices of a node that are used: all, or as many as the hosts file says."""
        own = len(self.npus) or self.view.node
        asked = read_hosts(self.nodes, own)[1] if self.nodes else own
        return min(asked, own) if self.npus else asked

    @property
    def world(self) -> int:
        """Return the number of devices of all nodes."""
        return self.each * self.node_count

    @property
    def node_count(self) -> int:
        """Return the number of nodes; without --nodes, return 1 or, on a host without NPUs, the number that the recipe
        needs.
        """
        if self.nodes:
            return len(self.names)
        return 1 if self.npus else -(-self.view.devices // self.each)

    @property
    def counts(self) -> list[int]:
        """Return the numbers of devices, except 1, for which the checks write a small recipe."""
        return rank_counts(self.each, self.node_count, min(MOST, self.view.devices))

    def of(self, devices: int) -> Path:
        """Return the path of the small recipe that the checks write for this number of devices."""
        return self.work / ("small_cpu.yaml" if devices == ON_CPU else f"small_{devices}.yaml")

    @property
    def small(self) -> Path:
        """Return the path of the small recipe that the checks write for one device."""
        return self.of(1)

    def train(self, devices: int, steps: int, run: str, *more: str) -> list[str]:
        """Return the command that trains a small recipe."""
        words = ["train", str(self.of(devices)), "--steps", str(steps), "--run-dir", str(self.work / run)]
        return [*words, "--no-bind", *more]

    def commands(self) -> dict[str, list[list[str]]]:
        """Return for each check the commands that the check runs."""
        saved = str(self.work / "one" / "checkpoint" / f"iteration_{SAVE:08d}")
        parallel = []
        for count in self.counts:
            script = ("--script", "--nodes", str(self.hosts_of(count))) if count > self.each else ("--json",)
            parallel.append(self.train(count, 2 * SAVE, f"parallel_{count}", "--resume", saved, *script))
        return {
            **super().commands(),
            "mini": [self.train(ON_CPU, STEPS, "cpu", "--json"), self.train(1, ALL_STEPS, "one", "--json")],
            "parallel": parallel,
        }

    def hosts_of(self, devices: int) -> Path:
        """Return the path of the file that lists the nodes on which a small recipe trains."""
        return self.work / f"hosts_{devices}.txt"

    def write_small(self) -> None:
        """Write a corpus and the family of small recipes."""
        family = ascend_minis(load_recipe(self.recipe), str(self.corpus), ALL_STEPS, self.counts)
        self.write_corpus(int(family[ON_CPU]["model"]["model_config"]["vocab_size"]))
        for count, flat in family.items():
            self.point(flat)
            dump_recipe(flat, self.of(count))
        for count in self.counts:
            self.write_hosts(count)

    def nodes_of(self, devices: int) -> tuple[list[str], int]:
        """Return the nodes on which a training with `devices` devices runs, and the number of devices that it uses on
        every node.

        Raises:
            ClusterError: there are too few nodes for equal numbers of devices.
        """
        each = max(count for count in range(1, self.each + 1) if devices % count == 0)
        if devices // each > len(self.names):
            raise ClusterError(
                f"{self.recipe}: {devices} devices cannot be divided equally among {len(self.names)} nodes with at "
                f"most {self.each} devices each; give a recipe whose data_parallel, model_parallel and "
                "context_parallel fill whole nodes"
            )
        return self.names[: devices // each], each

    def write_hosts(self, devices: int) -> None:
        """Write the file that lists the nodes of a training, if the training takes several nodes."""
        if devices > self.each:
            names, each = self.nodes_of(devices)
            self.hosts_of(devices).write_text("".join(f"{name} {each}\n" for name in names), encoding="utf-8")

    def mini(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Train a small recipe on one device and in one CPU process, and compare the losses."""
        self.write_small()
        until = time.monotonic() + seconds
        for words in self.commands()["mini"]:
            ask([*words, "--force"], max(1.0, until - time.monotonic()))
        wanted, got = self.losses("cpu", ON_CPU), self.losses("one", 1)
        rows = [{"name": "one device beside a CPU", "wanted": wanted, "got": {step: got.get(step) for step in wanted}}]
        return judge_curves(rows), {"rows": rows}

    def parallel(self, seconds: float, done: Mapping[str, Outcome]) -> Found:
        """Train on several devices, from the checkpoint of one device, and compare the losses with those of the single
        device.
        """
        if self.view.devices == 1:
            why = "the recipe is for one device and has no parallelism, so that nothing was compared"
            return [Finding("unknown", "parallel", why)], {"rows": [], NO_SUBJECT: True}
        until = time.monotonic() + seconds
        rows: list[dict[str, Any]] = []
        one = self.losses("one", 1)
        wanted = {step: loss for step, loss in one.items() if SAVE < int(step) <= 2 * SAVE}
        for count, words in zip(self.counts, self.commands()["parallel"], strict=True):
            left = max(1.0, until - time.monotonic())
            if not self.of(count).is_file():  # the recipe's degrees do not fill this number of devices
                continue
            shutil.rmtree(self.work / f"parallel_{count}", ignore_errors=True)  # of an hour that was interrupted
            if count > self.each:
                self._across(count, words, f"parallel_{count}", left)
            else:
                ask(words, left)
            got = self.losses(f"parallel_{count}", count)
            rows.append({"name": f"{count} devices", "wanted": wanted, "got": {step: got.get(step) for step in wanted}})
        return judge_curves(rows), {"rows": rows}

    def _across(self, count: int, words: Sequence[str], run: str, seconds: float) -> None:
        """Train a small recipe on `count` devices of several nodes: run on each node the script that tc3 train --script
        prints.

        Raises:
            ClusterError: a node did not finish; the first such node is named.
        """
        script = self.work / f"{run}.sh"
        script.write_text(output(words, seconds)[0], encoding="utf-8")
        names, _ = self.nodes_of(count)
        for name, told in call_each({name: ["bash", str(script)] for name in names}, seconds).items():
            if isinstance(told, Trouble):
                raise ClusterError(f"{name}: `bash {shlex.quote(str(script))}` failed: {told.words}; {told.mend}")

    def losses(self, run: str, devices: int) -> dict[str, float]:
        """Return the losses of a run of a small recipe as step -> loss."""
        return self.read_losses(run, self.of(devices), LOSS)

    # The check `stage`: one stage at the recipe's own sizes.

    no_memory = "the run does not record the peak memory of its devices"

    @property
    def measured_recipe(self) -> Path:
        """Return the file of the recipe that trains one pipeline stage, with which the dispatch modes are compared."""
        return self.work / "stage.yaml"

    @cached_property
    def cut(self) -> Recipe:
        """Return the recipe that trains one pipeline stage on the devices that this cluster has.

        Raises:
            RecipeError: the cluster has too few devices.
        """
        return one_stage(resolve(load_recipe(self.recipe), layout="file"), self.world)

    def write_measured(self) -> None:
        """Write a corpus, a recipe of one pipeline stage, and a copy of this recipe that profiles some steps."""
        flat = self.cut
        self.write_corpus(int(flat["model"]["model_config"]["vocab_size"]))
        self.point(flat)
        # a stage's weights and moments are hundreds of GB, and nothing is resumed from them
        flat["callbacks"] = [one for one in flat["callbacks"] if one["type"] != "CheckpointMonitor"]
        dump_recipe(flat, self.measured_recipe)
        self.write_profiled(flat)
        self.write_hosts(View(flat).devices)

    def variants(self) -> list[Variant]:
        """Return the variants of the recipe that trains one pipeline stage; the list is empty if the devices are too
        few for a stage.
        """
        try:
            return variants_of(View(self.cut), on_cpu=False)
        except RecipeError:
            return []

    def start(self, words: Sequence[str], run: str, seconds: float) -> None:
        """Run a training on this node; the training of a pipeline stage runs on as many nodes as it needs."""
        devices = View(load_recipe(Path(words[1]))).devices
        if devices <= self.each:
            super().start(words, run, seconds)
            return
        shutil.rmtree(self.work / run, ignore_errors=True)
        script = [word for word in words if word != "--json"]
        self._across(devices, [*script, "--script", "--nodes", str(self.hosts_of(devices))], run, seconds)


def hour_of(recipe: Path, work: Path, nodes: Path | None, planned: bool) -> Hour:
    """Return the object that runs the checks of `tc3 firsthour` with a recipe on this host: an `NpuHour` if the host
    has NPUs, otherwise an `Hour`, which rehearses the checks on CPU.

    Args:
        planned: whether the checks are only planned and not started, so that a recipe for Ascend is planned for NPUs
            also on a host without NPUs.

    Raises:
        ClusterError: the host has NPUs, and the recipe is for a CPU.
    """
    found = Hour(recipe, work, nodes)
    if found.view.on_cpu and found.npus:
        raise ClusterError(
            f"{recipe}: context.device_target: this recipe trains on CPU, so it cannot check the NPUs of this host; "
            "give a recipe for Ascend"
        )
    return NpuHour(recipe, work, nodes) if not found.view.on_cpu and (found.npus or planned) else found
