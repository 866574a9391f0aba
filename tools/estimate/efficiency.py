"""What a device type reaches of its nominal figures: one set of parameters for each, in efficiencies.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from plugins.errors import RecipeError, did_you_mean, refuse_unknown
from tools.hardware import Hardware, load_hardware
from tools.hardware.load import FOLDER
from tools.hardware.names import name_of
from tools.ranges import Range

FILE = Path(__file__).parent / "efficiencies.yaml"
CLUSTERS = FOLDER / "clusters"


@dataclass(frozen=True)
class Efficiency:
    """One device type.

    Args:
        matmul: share of the peak that a large matmul reaches.
        matmul_fp8: the same of the fp8 peak, casts included.
        blocks: share of that which is left where every 32 numbers have a scale of their own (MXFP8).
        matmul_fp4: share of the fp4 peak (NVFP4), casts included.
        half_size: smallest dimension of a matmul at which it reaches half of that.
        attention: share of the peak that fused attention reaches.
        memory: share of HBM bandwidth that elementwise operators reach.
        unfused: how much more elementwise operators move where nobody fuses them.
        link: factor on the share of link bandwidth that the hardware file states, inside a node.
        network: the same between nodes.
        hidden: share of tensor-parallel communication that overlap hides, where a run overlaps it.
        hidden_ep: the same of expert-parallel communication, of published runs of others; a recipe's comes from the
            plan of plugins/ep_overlap.
        layer_s: seconds of host and launches for each layer, forward; backward twice that.
        moe_s: the same for what only MoE layers have: routing, sorting, many small kernels.
        burst: factor on `matmul` where one layer runs alone, before clocks fall under load.
        step_s: seconds of a step beside all that is computed here.
        graphed: elementwise traffic that fused operators leave, where the whole step is one CUDA graph.
        mesh: devices of a node are joined pair by pair, so a group uses only the links among its members.
        update: factor on `memory` for the optimizer and the norm of gradients, where these reach another share.
        weight_s: host's seconds of the update for each weight (tensor), once a step; 0 where one kernel updates many.
    """

    matmul: float
    matmul_fp8: float
    half_size: float
    attention: float
    memory: float
    unfused: float
    link: float
    hidden: float
    hidden_ep: float
    layer_s: float
    moe_s: float
    burst: float
    step_s: float
    blocks: float = 0.9
    matmul_fp4: float = 0.4
    graphed: float = 0.7
    network: float = 1.0
    mesh: bool = False
    update: float = 1.0
    weight_s: float = 0.0


@dataclass(frozen=True)
class KnownError:
    """How far predicted step times are off measured ones: of published runs, left out of the fit by whole groups.

    Args:
        groups: models on one cluster; each was predicted by a fit to all others.
        mean, worst: of |predicted / measured - 1|.
    """

    rows: int
    groups: int
    mean: float
    worst: float

    @property
    def words(self) -> str:
        """A sentence."""
        return (
            f"off by {100 * self.mean:.1f} % on average and {100 * self.worst:.1f} % at most on {self.rows} published "
            f"runs of this device type, each model left out of the fit that predicts it (docs/estimator.md)"
        )

    def as_json(self) -> dict[str, float]:
        """The numbers."""
        return {"rows": self.rows, "groups": self.groups, "mean": self.mean, "worst": self.worst}


UNKNOWN = "no published run tells how far they are off on this cluster"
PROFILED = ("update", "weight_s")  # that only a profile tells: published runs leave them at what they are here
NAMES = tuple(field.name for field in fields(Efficiency) if field.name not in ("mesh", *PROFILED))


@lru_cache(maxsize=1)
def _sets() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))["sets"]


def clear_cache() -> None:
    """Read efficiencies.yaml again."""
    _sets.cache_clear()


def cluster_file(name: str) -> Path:
    """The file of a cluster: of a name or device of this repository, else `name` as a path."""
    word = name_of(name)
    places = (CLUSTERS / f"{word}.yaml", FOLDER / f"{word}.yaml")
    return next((place for place in places if place.is_file()), Path(name))


@lru_cache(maxsize=64)
def cluster(name: str) -> Hardware:
    """A cluster of `tools.hardware`, or one that only measurements speak of."""
    file = cluster_file(name)
    return load_hardware(file if file.parent == CLUSTERS else name)


# what an own value may be: shares, factors and seconds; wide, for published.calibrate bounds what is fitted
_VALUES = {
    **dict.fromkeys(("hidden", "hidden_ep"), Range(0, 1, whole=False)),
    **dict.fromkeys(("layer_s", "moe_s", "step_s", "weight_s"), Range(0, 100, whole=False)),
    "half_size": Range(0, 1_000_000, whole=False),
}
_FACTOR = Range(0, 100, whole=False, above=True)
_YOUNG = {"blocks", "matmul_fp4", "graphed", "network", *PROFILED}  # files made before these were there do without


def _own(hardware: Hardware) -> Efficiency:
    """The efficiencies of a cluster file."""
    content, wanted = hardware.efficiency, [field.name for field in fields(Efficiency)]
    if not isinstance(content, Mapping) or not set(wanted) - _YOUNG <= set(content):
        raise RecipeError(f"{hardware.file}: efficiency: want exactly {', '.join(wanted)}")
    refuse_unknown(f"{hardware.file}: efficiency.", content, wanted)
    for name in (*NAMES, *PROFILED):
        if name in content and (refusal := _VALUES.get(name, _FACTOR).refusal(content[name])):
            raise RecipeError(f"{hardware.file}: efficiency.{name}: {content[name]!r} {refusal}")
    if not isinstance(content["mesh"], bool):
        raise RecipeError(f"{hardware.file}: efficiency.mesh: {content['mesh']!r}: want true or false")
    return Efficiency(**dict(content))


def known_error(hardware: Hardware) -> KnownError | None:
    """The error of step times on a device type.

    None where the file has efficiencies of its own, or fewer than two groups of runs tell.
    """
    found = [entry for entry in _sets().values() if hardware.name in entry["clusters"]]
    if hardware.efficiency or not found or "step_errors" not in found[0]:
        return None
    known = KnownError(**found[0]["step_errors"])
    return known if known.groups > 1 else None


def efficiency_of(hardware: Hardware) -> Efficiency:
    """The file's own efficiencies, or the set of the hardware's device type.

    Raises:
        RecipeError: the device type has none, or the file's are not all of them.
    """
    if hardware.efficiency:
        return _own(hardware)
    for entry in _sets().values():
        if hardware.name in entry["clusters"]:
            return Efficiency(**{name: float(value) for name, value in entry["values"].items()}, mesh=entry["mesh"])
    known = [name for entry in _sets().values() for name in entry["clusters"]]
    raise RecipeError(
        f"{hardware.name}: no efficiencies for it{did_you_mean(hardware.name, known)}; known are {', '.join(known)}; "
        "name a device type of efficiencies.yaml that is like it"
    )
