"""This module holds the efficiencies of each device type: the shares of nominal FLOP/s and bandwidths that the device
reaches. The module computes the seconds of single operators and collectives from the efficiencies of a device.

efficiencies.yaml has one set of parameters for each device type. With these parameters, a roofline model gives the
seconds of an operator or collective:

matmul        FLOPs / (peak x matmul x d / (d + half_size)), d the smallest dimension; at least the time to move
              its operands
elementwise   bytes / (HBM bandwidth x memory)
collective    launch + latency of each message + bytes over the slowest link of the group
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import yaml

from plugins.errors import RecipeError, did_you_mean, refuse_unknown
from tools.estimate.configuration import MODEL_VERSION, Configuration
from tools.estimate.layer_model import Matmul
from tools.hardware import Hardware, load_hardware
from tools.hardware.load import FOLDER, name_of
from tools.ranges import Range

FILE = Path(__file__).parent / "efficiencies.yaml"
CLUSTERS = FOLDER / "clusters"


@dataclass(frozen=True)
class Efficiency:
    """An `Efficiency` holds the efficiencies of one device type."""

    matmul: float  # share of the peak FLOP/s that a large matmul reaches
    matmul_fp8: float  # the same of the fp8 peak, including its casts
    half_size: float  # smallest dimension with which a matmul reaches half of `matmul`
    attention: float  # share of the peak FLOP/s that fused attention reaches
    memory: float  # share of the HBM bandwidth that elementwise operators reach
    unfused: float  # factor by which unfused elementwise operators move more bytes
    link: float  # factor on the share (of the hardware file) of its bandwidth that a link inside a node reaches
    hidden: float  # share of tensor-parallel communication that computation hides, in runs that overlap the two
    # the same of expert-parallel communication in other software's runs; a recipe's follows from plugins/ep_overlap
    hidden_ep: float
    # seconds that the host and kernel launches add to a layer's forward pass; the backward pass takes twice as long
    layer_s: float
    moe_s: float  # the same of the additional operators of an MoE layer (routing, sorting, many small kernels)
    burst: float  # factor on `matmul` for benchmarks of a single layer, too short for the clocks to fall under load
    step_s: float  # seconds of a step that no other parameter covers
    blocks: float = 0.9  # share of `matmul_fp8` that remains if every 32 elements have their own scale (MXFP8)
    matmul_fp4: float = 0.4  # share of the fp4 peak FLOP/s (NVFP4) that a large matmul reaches, including its casts
    # share of elementwise traffic that remains with fused operators, if the whole step is one CUDA graph
    graphed: float = 0.7
    network: float = 1.0  # factor on the share of its bandwidth that a link between nodes reaches
    mesh: bool = False  # a node's devices are connected pair by pair: a group uses only the links among its members
    # factor on `memory` for the optimizer and the gradient norm, if they reach another share than elementwise operators
    update: float = 1.0
    weight_s: float = 0.0  # seconds of the host to update one weight (tensor) in a step; 0 if one kernel updates many


@dataclass(frozen=True)
class KnownError:
    """A `KnownError` holds the mean and the largest error |predicted / measured - 1| of predicted step times on
    published runs. Each group of runs (one model on one cluster) was predicted with efficiencies that were fitted to
    all other groups.
    """

    rows: int
    groups: int
    mean: float
    worst: float

    @property
    def words(self) -> str:
        """Return a sentence with the mean and the largest error of predicted step times on published runs."""
        return (
            f"off by {100 * self.mean:.1f} % on average and {100 * self.worst:.1f} % at most on {self.rows} published "
            f"runs of this device type, each model left out of the fit that predicts it (docs/estimator.md)"
        )

    def as_json(self) -> dict[str, float]:
        """Return the errors of predicted step times, and the numbers of runs and groups, as a dictionary for JSON."""
        return {"rows": self.rows, "groups": self.groups, "mean": self.mean, "worst": self.worst}


@dataclass(frozen=True)
class Newer:
    """A `Newer` holds the mean and the largest error |predicted / measured - 1| of step times, over all device types,
    on runs whose software is newer than the software of the fitted runs.
    """

    rows: int
    mean: float
    worst: float

    @property
    def words(self) -> str:
        """Return a sentence with the mean and the largest error of predicted step times on runs of newer software."""
        return (
            f"runs of software that is newer than the fit, or of another stack, were off by {100 * self.mean:.1f} % on "
            f"average and {100 * self.worst:.1f} % at most ({self.rows} runs, all device types): rely on a prediction "
            "that is calibrated on steps of your own (tc3 search calibrate)"
        )

    def as_json(self) -> dict[str, float]:
        """Return the errors of predicted step times, and the numbers of runs, as a dictionary for JSON."""
        return {"rows": self.rows, "mean": self.mean, "worst": self.worst}


UNKNOWN = "no published run tells how far they are off on this cluster"
PROFILED = ("update", "weight_s")  # that only a profile tells: published runs leave them at what they are here
NAMES = tuple(field.name for field in fields(Efficiency) if field.name not in ("mesh", *PROFILED))


@lru_cache(maxsize=1)
def _content() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def _sets() -> dict[str, Any]:
    return _content()["sets"]


def clear_cache() -> None:
    """Forget the content of efficiencies.yaml, so that the next use reads the file again."""
    _content.cache_clear()


def newer_error(hardware: Hardware) -> Newer | None:
    """Return the errors of predicted step times on software that is newer than the software of the fitted runs. Return
    None if the cluster's file has its own efficiencies, because `calibrate` fitted them to the measured software.
    """
    return None if hardware.efficiency else Newer(**_content()["newer"])


def cluster_file(name: str) -> Path:
    """Return the path of the file that describes the hardware of a cluster. If this repository has no cluster with the
    given name, the name is taken as a path.
    """
    word = name_of(name)
    places = (CLUSTERS / f"{word}.yaml", FOLDER / f"{word}.yaml")
    return next((place for place in places if place.is_file()), Path(name))


def cluster(name: str) -> Hardware:
    """Return the hardware of a cluster, read from a file in `tools.hardware`, from a file of the user, or from a file
    beside the published measurements that used the cluster.
    """
    file = cluster_file(name)
    known = file.stat() if file.is_file() else None
    version = (os.path.abspath(file), known.st_mtime_ns, known.st_ino, known.st_size) if known else ()
    return _cluster(name, file.parent == CLUSTERS, version)


@lru_cache(maxsize=64)
def _cluster(name: str, measured: bool, version: tuple[str | int, ...]) -> Hardware:
    """Return a cluster; `version` tells the file's content from that of another file, or of the same one before."""
    return load_hardware(cluster_file(name) if measured else name)


# what an own value may be: shares, factors and seconds; wide, for published.calibrate bounds what is fitted
_VALUES = {
    **dict.fromkeys(("hidden", "hidden_ep"), Range(0, 1, whole=False)),
    **dict.fromkeys(("layer_s", "moe_s", "step_s", "weight_s"), Range(0, 100, whole=False)),
    "half_size": Range(0, 1_000_000, whole=False),
}
_FACTOR = Range(0, 100, whole=False, above=True)
_YOUNG = {"blocks", "matmul_fp4", "graphed", "network", *PROFILED}  # files made before these were there do without


def _own(hardware: Hardware) -> Efficiency:
    content, wanted = hardware.efficiency, [field.name for field in fields(Efficiency)]
    needed = [name for name in wanted if name not in _YOUNG]
    if missing := [name for name in needed if not isinstance(content, Mapping) or name not in content]:
        raise RecipeError(
            f"{hardware.file}: efficiency: the section must be a mapping with at least the keys {', '.join(needed)}; "
            f"it lacks {', '.join(missing)}"
        )
    refuse_unknown(f"{hardware.file}: efficiency.", content, wanted)
    for name in (*NAMES, *PROFILED):
        if name in content and (refusal := _VALUES.get(name, _FACTOR).refusal(content[name])):
            raise RecipeError(f"{hardware.file}: efficiency.{name}: {content[name]!r} {refusal}")
    if not isinstance(content["mesh"], bool):
        raise RecipeError(f"{hardware.file}: efficiency.mesh: {content['mesh']!r}: the value must be true or false")
    return Efficiency(**dict(content))


def known_error(hardware: Hardware) -> KnownError | None:
    """Return the known error of predicted step times on a cluster's device type. The error is None if the cluster's
    file states its own efficiencies, or if the fit has fewer than two groups of published runs on this device type.
    """
    found = [entry for entry in _sets().values() if hardware.name in entry["clusters"]]
    if hardware.efficiency or not found or "step_errors" not in found[0]:
        return None
    known = KnownError(**found[0]["step_errors"])
    return known if known.groups > 1 else None


def error_lines(hardware: Hardware) -> list[str]:
    """Return lines of text that state the known errors of predicted step times on a cluster, also for newer software.
    If the errors are unknown, return a line that says so.
    """
    known, newer = known_error(hardware), newer_error(hardware)
    return [f"step times: {known.words if known else UNKNOWN}", *([newer.words] if newer else [])]


@lru_cache(maxsize=64)
def _say_other_version(file: str, version: str) -> None:
    """Print once on stderr that the efficiencies of a cluster file may have been fitted to an older model of time. The
    version is that of all predictions, of memory too, so that another version does not make the efficiencies wrong.
    """
    fitted = f"the efficiencies were fitted to version {version}" if version else "the key is missing"
    click.echo(
        f"{file}: estimator: {fitted}, and the present version of the model of time and memory is {MODEL_VERSION}: if "
        "the model of time has changed, they no longer hold; tc3 search calibrate fits them again",
        err=True,
    )


def efficiency_of(hardware: Hardware, any_version: bool = False) -> Efficiency:
    """Return the efficiencies that a cluster's file states. If the cluster's file states no efficiencies, return the
    efficiencies of the device type. If the efficiencies were fitted to another version of the time model, a warning is
    printed unless `any_version` is True.

    Raises:
        RecipeError: they are not known, or the cluster's file states only some of them.
    """
    if hardware.efficiency:
        own = _own(hardware)
        if not any_version and hardware.estimator != MODEL_VERSION:
            _say_other_version(hardware.file, hardware.estimator)
        return own
    for entry in _sets().values():
        if hardware.name in entry["clusters"]:
            return Efficiency(**{name: float(value) for name, value in entry["values"].items()}, mesh=entry["mesh"])
    known = [name for entry in _sets().values() for name in entry["clusters"]]
    raise RecipeError(
        f"{hardware.name}: tc3 knows no efficiencies for this cluster{did_you_mean(hardware.name, known)}, only for "
        f"{', '.join(known)}; choose of these the cluster whose devices are most like this cluster's, and name it"
    )


_WIDE_HEAD = 128  # the width of heads for which kernels of fused attention are made
_PRODUCT_BYTES = 4  # of a score that one unfused matmul writes and the other reads
_LOW = ("fp8", "mxfp8", "nvfp4")
_BLOCKS = {"mxfp8": "fp8", "nvfp4": "fp4"}  # what hardware files call their peaks


class DeviceTimes:
    """A `DeviceTimes` predicts the seconds of single operators and collectives on one cluster."""

    def __init__(self, hardware: Hardware, efficiency: Efficiency | None = None):
        self.hardware = hardware
        self.reached = efficiency or efficiency_of(hardware)

    def _peak(self, dtype: str) -> float:
        """Return FLOP/s of a dtype; of bf16 where the file has none for it.

        Raises:
            RecipeError: it has neither.
        """
        flops, dtype = self.hardware.peak_flops, _BLOCKS.get(dtype, dtype)
        if dtype not in flops and "bf16" not in flops:
            raise RecipeError(
                f"{self.hardware.name}: peak_flops.bf16: the key is missing; the cluster's file has only "
                f"{', '.join(flops)}"
            )
        return flops[dtype] if dtype in flops else flops["bf16"]

    def _attention(self, config: Configuration, flops: float) -> float:
        """Return forward seconds of `flops` FLOPs of scores and their products with the values. Two unfused matmuls
        move their scores while they compute, or take as long as moving them does.
        """
        dtype, width = self._attention_dtype(config), config.model.qk_dim
        if config.flash:
            # narrower heads have as many exponentials for each score
            return flops / (self._peak(dtype) * self.reached.attention * min(1.0, width / _WIDE_HEAD))
        computing = flops / (self._peak(dtype) * self.reached.matmul * width / (width + self.reached.half_size))
        scores = flops / (2 * (width + config.model.v_dim))
        return max(computing, _PRODUCT_BYTES * scores / self.hardware.hbm_bytes_per_s)

    def _attention_dtype(self, config: Configuration) -> str:
        """Return the type in which attention computes: fp8 and fp4 do not reach it, and of fp32 MindFormers gives fp16
        to the flash kernel of grouped-query attention only (`tools.estimate.memory.training_graph`).
        """
        if config.dtype != "fp32":
            return config.dtype if config.dtype in ("bf16", "fp16") else "bf16"
        return "fp16" if config.training_graph and config.flash and config.model.latent is None else "fp32"

    def multiplying(self, config: Configuration, matmul: Matmul) -> float:
        """Return the seconds that a device needs for the matrix products `matmul` in the run's precision."""
        size = min(matmul.rows, matmul.columns, matmul.depth)
        if not size:
            return 0.0
        dtype = "bf16" if matmul.high and config.dtype in _LOW else config.dtype
        share = self._share(dtype)
        share *= self.reached.burst if config.layer_only and dtype not in _LOW else 1
        computing = matmul.flops / (self._peak(dtype) * share * size / (size + self.reached.half_size))
        moved = matmul.rows * (matmul.depth + matmul.columns) + matmul.depth * matmul.columns
        return max(computing, config.item * moved * matmul.times / self.hardware.hbm_bytes_per_s)

    def _share(self, dtype: str) -> float:
        """Return the share of the peak that a large matmul reaches."""
        if _BLOCKS.get(dtype, dtype) not in self.hardware.peak_flops or dtype not in _LOW:
            return self.reached.matmul
        if dtype == "nvfp4":
            return self.reached.matmul_fp4
        return self.reached.matmul_fp8 * (self.reached.blocks if dtype == "mxfp8" else 1)

    def _moved(self, config: Configuration, size: float) -> float:
        """Return seconds in which elementwise operators read and write `size` bytes."""
        more = 1 if config.fused else self.reached.unfused
        more *= self.reached.graphed if config.graphs == "step" else 1
        return more * self.moving(size)

    def moving(self, size: float) -> float:
        """Return the seconds in which elementwise operators read and write `size` bytes of HBM in total."""
        return size / (self.hardware.hbm_bytes_per_s * self.reached.memory)

    def launching(self, operators: float) -> float:
        """Return the seconds that launching the given number of operators takes, if the device waits for each
        launch.
        """
        return operators * self.hardware.launch_s

    def to_host(self, size: float) -> float | None:
        """Return the seconds to copy `size` bytes to the host over an idle link; return None if this is unknown."""
        host = self.hardware.host_link
        return None if host is None else size / host.bytes_per_s

    def sending(self, size: float, span: int) -> float:
        """Return the seconds to send `size` bytes over the slowest link inside `span` consecutive ranks."""
        inside = span <= self.hardware.devices_per_node
        link = self.hardware.intra_node if inside else self.hardware.inter_node
        return self.hardware.launch_s + link.latency_s + size / self._speed(inside)

    def _speed(self, inside: bool) -> float:
        """Return the bytes per second that a large transfer reaches over the links inside a node, or between nodes. The
        place decides which share is reached, not the numbers of the link: both kinds of links may have the same.
        """
        link = self.hardware.intra_node if inside else self.hardware.inter_node
        factor = self.reached.link if inside else self.reached.network
        return link.reached * min(factor, 1 / link.efficiency)

    def _collective(self, size: float, ranks: int, stride: int) -> float:
        """Return seconds of an AllGather or ReduceScatter of a tensor of `size` bytes over ranks that are `stride`
        apart. Across nodes, ranks of the same node send different parts over their own links.
        """
        if ranks == 1:
            return 0.0
        node, intra, inter = self.hardware.devices_per_node, self.hardware.intra_node, self.hardware.inter_node
        if ranks * stride <= node:
            link, speed = intra, self._speed(inside=True)
            speed *= (ranks - 1) / (node - 1) if self.reached.mesh else 1
        else:
            beside = max(1, node // stride)
            link, speed = inter, min(self._speed(inside=False) * beside, self._speed(inside=True))
        return self.hardware.launch_s + link.latency_s * min(ranks - 1, 64) + size * (1 - 1 / ranks) / speed
