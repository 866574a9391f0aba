"""This module simulates a cluster with planted defects, so that the checks that need many nodes can be rehearsed
without any node: `tc3 firsthour RECIPE --simulate CLUSTER.yaml`.

The simulated nodes give the same kinds of results as real nodes: a report of tc3 doctor with its facts and its clock, a
probe of each node's workers, the memory of each device, and the seconds of each link. The results of operators are
computed: a simulated device is NumPy that rounds its results, and a device with the defect "wrong rounding" adds up its
matrix products in float16. The seconds of a stage come from the estimator with planted efficiencies, and its peaks of
memory from the memory model with planted terms. All results are judged by the rules for real clusters.

The checks `mini`, `parallel` and `resume` train a small model in NumPy on the simulated devices
(`launch.firsthour.played`); MindSpore trains nothing in a simulated cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from launch.firsthour.calibrate import fit_memory, judge_fit, judge_stage, memory_row
from launch.firsthour.checks import HOUR_CHECKS, Finding, Outcome
from launch.firsthour.collectives import judge_collectives, rows_of
from launch.firsthour.judge import hosts_evidence, judge_devices, judge_hosts, judge_operators, results_of
from launch.firsthour.played import TOKENS, Rank, added_in_half, exact, resumed, train
from launch.firsthour.trainings import ALL_STEPS, SAVE, STEPS, judge_golden, judge_parallel, judge_resume, rank_counts
from plugins.errors import ClusterError, refuse_unknown
from tools.accuracy.equivalence.golden_gate import differences, numbers_of
from tools.accuracy.equivalence.matrix import FAIL, PASS, Row
from tools.accuracy.equivalence.strategies import BASELINE, Case
from tools.accuracy.equivalence.trained import compare_trained
from tools.accuracy.judge import rounded
from tools.accuracy.operators.report import SPECS
from tools.accuracy.operators.run import backward, forward, verify
from tools.doctor.ask import Answer, Skew
from tools.doctor.checks import CHECKS
from tools.doctor.checks import Finding as Checked
from tools.doctor.outliers import Link, Probe, Worker
from tools.doctor.report import Report, tool_version
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import cluster, cluster_file, efficiency_of
from tools.estimate.groups import GROUPS
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.load import read_yaml
from tools.hardware.units import GIB
from tools.profile.attribute import Measured, modelled
from tools.profile.fit import file_text, fit
from tools.profile.kernels import Profile, Step
from tools.ranges import Range

ROUNDS = 7
GBYTES = {True: 28.0, False: 22.0}  # GB/s of a healthy link inside a node and between nodes; only ratios are judged
PLAYED = "the small model of a healthy device"
OPERATORS = (("matmul", "float16"), ("matmul", "bfloat16"))
# defect -> the keys that it needs beside `what` and `node`
DEFECTS: dict[str, tuple[str, ...]] = {
    "slow link": ("device", "to", "factor"),
    "throttled device": ("device", "factor"),
    "wrong rounding": ("device",),
    "slow port": ("device", "factor"),
    "slow disk": ("factor",),
    "clock": ("seconds",),
    "huge pages": (),
    "cann": ("version",),
    "less memory": ("device", "gib"),
    "slow group": ("device", "group", "factor"),
    "doubled gradient": ("device",),
    "lost moments": (),
}
_KEYS = ("nodes", "devices_per_node", "device", "seed", "noise", "memory_gib", "efficiency", "memory", "defects")
_FACTOR = Range(0, 1000, whole=False, above=True)
_MEMORY = {"activations": _FACTOR, "buffers": _FACTOR, "reserve_gib": Range(0, 1000, whole=False)}
_NUMBERS = {
    "nodes": Range(2, 4096), "devices_per_node": Range(1, 64), "seed": Range(0, 2**32 - 1),
    "noise": Range(0, 0.2, whole=False), "memory_gib": Range(1, 1000, whole=False),
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """A `Cluster` describes a simulated cluster: its nodes, its devices and their planted defects.

    Args:
        noise: relative standard deviation of each measurement.
        efficiency: name -> planted value, of `tools.estimate.efficiency`.
        memory: planted terms of memory.
        defects: each with `what`, `node`, and the keys of `DEFECTS`.
    """

    nodes: int = 64
    devices_per_node: int = 8
    device: str = "910B3"
    seed: int = 0
    noise: float = 0.02
    memory_gib: float = 64.0
    efficiency: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    defects: Sequence[Mapping[str, Any]] = ()

    @property
    def hosts(self) -> list[str]:
        """Return the names of the nodes."""
        return [f"node{number:03d}" for number in range(self.nodes)]

    def of(self, what: str) -> list[Mapping[str, Any]]:
        """Return the planted defects of one kind, such as "slow disk"."""
        return [one for one in self.defects if one["what"] == what]

    def factor(self, what: str, host: str, device: int | None = None) -> float:
        """Return the factor by which defects of one kind change a speed on a host or device; 1 without a defect."""
        found = 1.0
        for one in self.of(what):
            if one["node"] == host and (device is None or one["device"] == device):
                found *= one["factor"]
        return found


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a YAML file describes.

    Raises:
        ClusterError, RecipeError: a key is unknown or missing, or a value is impossible.
    """
    content = read_yaml(path, ClusterError)
    if not isinstance(content, dict):
        raise ClusterError(f"{path}: this is not a cluster; write a mapping with the keys {', '.join(_KEYS)}")
    refuse_unknown(f"{path}: ", content, _KEYS, ClusterError)
    _check_numbers(f"{path}: ", content, _NUMBERS)
    if not isinstance(content.get("device", ""), str):
        wrong = f"{content['device']!r} is not the name of a device; write a name such as 910B3"
        raise ClusterError(f"{path}: device: {wrong}")
    for name, kind, words in (("efficiency", dict, "mapping"), ("memory", dict, "mapping"), ("defects", list, "list")):
        if content.get(name) is None:
            content.pop(name, None)
        elif not isinstance(content[name], kind):
            raise ClusterError(f"{path}: {name}: {content[name]!r} is not a {words}; write a {words}")
    refuse_unknown(f"{path}: memory.", content.get("memory", {}), _MEMORY, ClusterError)
    _check_numbers(f"{path}: memory.", content.get("memory", {}), _MEMORY)
    hardware = cluster(DEFAULT_HARDWARE)
    planted = {**asdict(efficiency_of(hardware)), **content.get("efficiency", {})}
    efficiency_of(replace(hardware, efficiency=planted, file=str(path)))
    found = Cluster(**content)
    for number, defect in enumerate(found.defects):
        _check_defect(f"{path}: defects[{number}]", defect, found)
    return found


def _check_numbers(place: str, content: Mapping[str, Any], spans: Mapping[str, Range]) -> None:
    for name, span in spans.items():
        if name in content and (wrong := span.refusal(content[name])):
            raise ClusterError(f"{place}{name}: {content[name]!r} {wrong}")


def _check_defect(place: str, defect: Any, found: Cluster) -> None:
    if not isinstance(defect, dict) or "what" not in defect:
        raise ClusterError(
            f"{place}: this is not a defect; write a mapping whose key `what` is one of {', '.join(DEFECTS)}"
        )
    refuse_unknown(f"{place}.what: ", [defect["what"]], DEFECTS, ClusterError, "defect")
    wanted = ("what", "node", *DEFECTS[defect["what"]])
    refuse_unknown(f"{place}.", defect, wanted, ClusterError)
    if missing := [key for key in wanted if key not in defect]:
        raise ClusterError(f"{place}.{missing[0]}: the key is missing, but this kind of defect needs the key")
    if "group" in defect:
        refuse_unknown(f"{place}.group: ", [defect["group"]], GROUPS, ClusterError, "group")
    device = Range(0, found.devices_per_node - 1)
    spans = {"device": device, "factor": _FACTOR, "seconds": Range(-1e9, 1e9, whole=False)}
    _check_numbers(f"{place}.", defect, spans | {"gib": Range(0, found.memory_gib, whole=False)})
    ends = {"node": defect["node"]}
    if "to" in defect:
        if not isinstance(defect["to"], list) or len(defect["to"]) != 2:
            raise ClusterError(
                f"{place}.to: {defect['to']!r} does not name the device at the other end of the link; write [node, "
                "device]"
            )
        ends["to[0]"] = defect["to"][0]
        _check_numbers(f"{place}.", {"to[1]": defect["to"][1]}, {"to[1]": device})
    for key, node in ends.items():
        if node not in found.hosts:
            nodes = f"{found.hosts[0]} to {found.hosts[-1]}"
            raise ClusterError(f"{place}.{key}: there is no node {node!r}; the nodes are {nodes}")


class Play:
    """A `Play` runs the checks of `tc3 firsthour` on a simulated cluster."""

    def __init__(self, found: Cluster, config: Configuration):
        self.cluster, self.config = found, config
        self.hardware = cluster(DEFAULT_HARDWARE)
        self.random = np.random.default_rng(found.seed)

    @property
    def names(self) -> list[str]:
        """Return the names of the nodes."""
        return self.cluster.hosts

    def work_of(self) -> dict[str, Any]:
        """Return for each check the function that simulates the check."""
        return {check.name: getattr(self, check.name) for check in HOUR_CHECKS}

    def hosts(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Simulate the reports of `tc3 doctor` on all nodes, and judge them."""
        evidence = hosts_evidence({host: self._answer(host) for host in self.cluster.hosts})
        return judge_hosts(evidence, self.cluster.hosts, versions=False), evidence

    def versions(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Judge whether all nodes have the same versions, by the reports that the check `hosts` has stored."""
        return judge_hosts(done["hosts"].evidence, self.cluster.hosts, versions=True), {}

    def _answer(self, host: str) -> Answer:
        never = any(one["node"] == host for one in self.cluster.of("huge pages"))
        checks = [
            Checked(name, "warn" if never and name == "huge_pages" else "ok",
                    "never" if never and name == "huge_pages" else "as it should be", one.why, one.source, one.mend)
            for name, one in CHECKS.items()
        ]  # fmt: skip
        cann = next((one["version"] for one in self.cluster.of("cann") if one["node"] == host), "8.5.0")
        facts: dict[str, str | None] = {
            "tc3": tool_version(), "code": "simulated", "driver": "25.5.2", "CANN": str(cann),
            "NPUs": f"{self.cluster.devices_per_node} x {self.cluster.device}",
        }  # fmt: skip
        off = sum(one["seconds"] for one in self.cluster.of("clock") if one["node"] == host)
        return Answer(Report(checks, facts), Skew(off + float(self.random.normal(0, 0.002)), 0.001))

    def _rates(self, speed: float) -> list[float]:
        return [float(speed * rate) for rate in np.exp(self.random.normal(0, self.cluster.noise, ROUNDS))]

    def devices(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Simulate the probes of all nodes, the memory of the devices, and their links."""
        small = {(one["node"], one["device"]): one["gib"] for one in self.cluster.of("less memory")}
        whole = self.cluster.memory_gib
        evidence = {
            "probes": {host: self._probe(host) for host in self.cluster.hosts},
            "memory": [
                [host, device, int((whole - small.get((host, device), 0)) * GIB)]
                for host in self.cluster.hosts
                for device in range(self.cluster.devices_per_node)
            ],
            "links": self._links(),
        }
        return judge_devices(evidence), evidence

    def _probe(self, host: str) -> Probe:
        disk = 400.0 * self.cluster.factor("slow disk", host)
        workers = [
            Worker(
                rank=device, place="", kind=self.cluster.device, cores="",
                matmul=self._rates(250e3 * self.cluster.factor("throttled device", host, device)),
                memory=self._rates(12.0), disk=self._rates(disk), waited=[0.0] * ROUNDS, throttled=[0.0] * ROUNDS,
                failed="",
            )
            for device in range(self.cluster.devices_per_node)
        ]  # fmt: skip
        links: list[Link] = []
        return Probe(device="Ascend", rounds=ROUNDS, folder="/", workers=workers, links=links, notes=[])

    def _links(self) -> list[dict[str, Any]]:
        """Return the links of each device: with the next device of its node, and with the same device of the nodes 1,
        2, 4, ... further on.
        """
        each, hosts = self.cluster.devices_per_node, self.cluster.hosts
        ends = [((host, one), (host, other)) for host in hosts for one in range(each) for other in range(one)]
        steps = [1 << power for power in range(len(hosts).bit_length()) if 1 << power <= len(hosts) // 2]
        far = [(at, (at + step) % len(hosts)) for step in steps for at in range(len(hosts))]
        ends += [((hosts[a], device), (hosts[b], device)) for a, b in far for device in range(each)]
        return [
            {"source": list(a), "target": list(b), "gbytes": self._rates(GBYTES[a[0] == b[0]] * self._speed(a, b))}
            for a, b in ends
        ]

    def _speed(self, source: tuple[str, int], target: tuple[str, int]) -> float:
        found = 1.0
        if source[0] != target[0]:
            found = min(self.cluster.factor("slow port", *source), self.cluster.factor("slow port", *target))
        for one in self.cluster.of("slow link"):
            if {(one["node"], one["device"]), (one["to"][0], one["to"][1])} == {source, target}:
                found *= one["factor"]
        return found

    def collectives(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Simulate the collectives of the recipe's groups: the predicted seconds with noise, and slow groups."""
        each, hosts = self.cluster.devices_per_node, self.cluster.hosts
        rows = rows_of(self.config, self.hardware, each * len(hosts), on_cpu=False)
        late = {
            (one["group"], hosts.index(one["node"]) * each + one["device"]): one["factor"]
            for one in self.cluster.of("slow group")
        }
        for row in rows:
            factors = [late.get((row["group"], group[0]), 1.0) for group in row["groups"]]
            row["seconds"] = [self._rates(row["predicted"] / factor) for factor in factors]
        return judge_collectives(rows, hosts, each, on_cpu=False), {"rows": rows}

    def operators(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Compute the operators as healthy and as defective devices compute them, and judge every device."""
        right, wrong = _results(narrow=False), None
        bad = {(one["node"], one["device"]) for one in self.cluster.of("wrong rounding")}
        if bad:
            wrong = _results(narrow=True)
        rows = [
            {
                "host": host,
                "device": device,
                "results": wrong if (host, device) in bad and wrong else right,
                "shipped": None,
            }
            for host in self.cluster.hosts
            for device in range(self.cluster.devices_per_node)
        ]
        return judge_operators(rows), {"devices": rows}

    def stage(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Simulate the measurement of a pipeline stage: the seconds of each term of its step, and the memory peaks of
        all stages for two micro-batch sizes.
        """
        truth = replace(efficiency_of(self.hardware), **self.cluster.efficiency)
        terms = modelled(self.config, self.hardware, truth, None)
        planted = self.cluster.memory
        rows = []
        for config in (self.config, replace(self.config, batch=2 * self.config.batch)):
            for stage in range(config.pp):
                row = memory_row(config, stage, 0.0)
                row["peak"] = (
                    row["static"]
                    + planted.get("activations", 1.0) * row["activations"]
                    + planted.get("buffers", 1.0) * row["buffers"]
                    + planted.get("reserve_gib", 0.0) * GIB
                )
                rows.append(row)
        predicted = modelled(self.config, self.hardware, efficiency_of(self.hardware), None)
        evidence = {"seconds": sum(terms.values()), "terms": terms, "predicted": predicted, "memory": rows}
        return judge_stage(evidence), evidence

    def calibrate(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Fit the estimator's efficiencies and memory terms to the measurements of the simulated pipeline stage."""
        seen = done["stage"].evidence
        measured = Measured(seen["seconds"], seen["terms"], {}, scoped=True)
        profile = Profile("the simulated stage", self.cluster.device, Step((), measured.seconds), 1)
        found = fit(profile, measured, self.config, self.hardware, efficiency_of(self.hardware), None)
        memory = fit_memory(seen["memory"])
        content = read_yaml(cluster_file(DEFAULT_HARDWARE), ClusterError)
        evidence = {
            "fitted": {name: getattr(found.efficiency, name) for name in found.fitted},
            "kept": found.kept,
            "after": found.after,
            "memory": asdict(memory) if memory else None,
            "cluster": file_text(content, "simulated", found, profile, DEFAULT_HARDWARE),
        }
        why = "the peaks of the runs do not tell the terms of memory apart"
        return judge_fit(measured.seconds, found.after, found.fitted, memory, why), evidence

    def _rank(self, number: int) -> Rank:
        """Return the device of a rank, counted through the nodes, with its planted defects."""
        node, device = divmod(number, self.cluster.devices_per_node)
        place = (self.cluster.hosts[node], device)
        product, counted = (
            any((one["node"], one["device"]) == place for one in self.cluster.of(what))
            for what in ("wrong rounding", "doubled gradient")
        )
        return Rank(added_in_half if product else exact, 2.0 if counted else 1.0)

    def mini(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Train the small model on the first device, and compare it with a device that computes correctly."""
        golden, _ = train([Rank()], STEPS)
        runs = {BASELINE: numbers_of(train([self._rank(0)], STEPS)[0])}
        lines = differences({BASELINE: numbers_of(golden)}, runs)
        content = {"golden": lines, "without_golden_numbers": [], "steps": STEPS, "passed": not lines}
        return judge_golden(content, PLAYED), {"differences": lines, "golden_file": PLAYED, "steps": STEPS}

    def parallel(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Train the small model on 2 devices, on the devices of a node, and on all devices, and compare each training
        with one device.
        """
        one, _ = train([self._rank(0)], STEPS)
        rows = []
        for count in rank_counts(self.cluster.devices_per_node, self.cluster.nodes, TOKENS):
            compared_ = compare_trained(train([self._rank(number) for number in range(count)], STEPS)[0], one)
            case = Case(f"{count} devices", "played")
            status = FAIL if compared_.findings else PASS
            rows.append(Row(case, status, "", compared_.tensors, compared_.used, compared_.findings).as_json())
        return judge_parallel(rows), {"rows": rows}

    def resume(self, seconds: float, done: Mapping[str, Outcome]) -> tuple[list[Finding], dict[str, Any]]:
        """Train the small model with and without a kill; a checkpoint of the first node may lose its moments."""
        lost = any(one["node"] == self.cluster.hosts[0] for one in self.cluster.of("lost moments"))
        wanted, got = resumed(self._rank(0), ALL_STEPS, SAVE, whole=not lost)
        return judge_resume(wanted, got, SAVE + 1, SAVE), {"killed_after": SAVE + 1, "whole": wanted, "cut": got}


class _Device:
    """This computes operators in NumPy and rounds their results; `narrow` adds up matrix products in float16."""

    def __init__(self, narrow: bool):
        self.narrow = narrow

    def forward(self, spec: Any, inputs: Any, dtype: str) -> tuple[np.ndarray, ...]:
        """Return the outputs of an operator as the simulated device computes them."""
        if not self.narrow:
            return tuple(rounded(out.astype(np.float32), dtype) for out in forward(spec, inputs, dtype))
        return (rounded(added_in_half(*inputs).astype(np.float32), dtype),)

    def backward(self, spec: Any, inputs: Any, douts: Any, dtype: str) -> tuple[np.ndarray, ...]:
        """Return the gradients of an operator, which the device's planted defect does not change."""
        return tuple(rounded(grad.astype(np.float32), dtype) for grad in backward(spec, inputs, douts, dtype))


@cache
def _results(narrow: bool) -> dict[str, list[Any]]:
    """Return operator, type and check -> status, error and detail."""
    device: Any = _Device(narrow)
    specs = [(replace(SPECS[name], special=""), dtype) for name, dtype in OPERATORS]
    return results_of(asdict(row) for spec, dtype in specs for row in verify(spec, dtype, device, reruns=2))
