"""What a device type reaches of its nominal figures: one set of parameters for each, in efficiencies.yaml."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from plugins.errors import RecipeError, did_you_mean
from tools.search.hardware import Hardware, load_hardware

FILE = Path(__file__).parent / "efficiencies.yaml"
CLUSTERS = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Efficiency:
    """One device type.

    Args:
        matmul: share of the peak that a large matmul reaches.
        matmul_fp8: the same of the fp8 peak, casts included.
        half_size: smallest dimension of a matmul at which it reaches half of that.
        attention: share of the peak that fused attention reaches.
        memory: share of HBM bandwidth that elementwise operators reach.
        unfused: how much more elementwise operators move where nobody fuses them.
        link: factor on the share of link bandwidth that the hardware file states.
        hidden: share of tensor-parallel communication that overlap hides, where a run overlaps it.
        hidden_ep: the same of expert-parallel communication.
        layer_s: seconds of host and launches for each layer, forward; backward twice that.
        moe_s: the same for what only MoE layers have: routing, sorting, many small kernels.
        burst: factor on `matmul` where one layer runs alone, before clocks fall under load.
        step_s: seconds of a step beside all that is computed here.
        mesh: devices of a node are joined pair by pair, so a group uses only the links among its members.
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
    mesh: bool = False


NAMES = tuple(field.name for field in fields(Efficiency) if field.name != "mesh")


@lru_cache(maxsize=1)
def _sets() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))["sets"]


def clear_cache() -> None:
    """Read efficiencies.yaml again."""
    _sets.cache_clear()


@lru_cache(maxsize=64)
def cluster(name: str) -> Hardware:
    """A cluster of `tools.search.hardware`, or one that only measurements speak of."""
    own = CLUSTERS / f"{name}.yaml"
    return load_hardware(own if own.is_file() else name)


def efficiency_of(hardware: Hardware) -> Efficiency:
    """The file's own efficiencies, or the set of the hardware's device type.

    Raises:
        RecipeError: the device type has none, or the file's are not all of them.
    """
    if hardware.efficiency:
        if set(hardware.efficiency) != {field.name for field in fields(Efficiency)}:
            wanted = ", ".join(field.name for field in fields(Efficiency))
            raise RecipeError(f"{hardware.name}: efficiency: want exactly {wanted}")
        return Efficiency(**dict(hardware.efficiency))
    for entry in _sets().values():
        if hardware.name in entry["clusters"]:
            return Efficiency(**{name: float(entry["values"][name]) for name in NAMES}, mesh=entry["mesh"])
    known = [name for entry in _sets().values() for name in entry["clusters"]]
    raise RecipeError(
        f"{hardware.name}: no efficiencies for it{did_you_mean(hardware.name, known)}; known are {', '.join(known)}; "
        "name a device type of efficiencies.yaml that is like it"
    )
