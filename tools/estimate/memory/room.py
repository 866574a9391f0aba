"""How many bytes a prediction may reach on a device: the limit of the recipe or of the device, less a margin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from tools.estimate.from_recipe import LEVEL
from tools.estimate.memory.error import known_errors
from tools.hardware import Hardware
from tools.hardware.units import GIB
from tools.recipe.view import limit_of, look

# of HBM for a job where nobody says: the driver, HCCL's buffers and the allocator's fragments take the rest (assumed;
# MindFormers' public recipes for 64 GB devices write 54 to 59 GB, of 2^30)
USABLE = 0.9


@dataclass(frozen=True)
class Room:
    """What a job may use.

    Args:
        cap: bytes that it may use on a device; source: where that comes from.
        margin: share of `cap` that predictions must leave free, because they are off by as much.
    """

    cap: float
    source: str
    margin: float

    @property
    def bytes(self) -> float:
        """What a prediction may reach: the cap without its margin."""
        return self.cap * (1 - self.margin)

    @property
    def words(self) -> str:
        """``51.4 GiB (55.5 less a margin of 7.4 %)``."""
        margin = f" ({self.cap / GIB:.1f} less a margin of {100 * self.margin:.1f} %)" if self.margin else ""
        return f"{self.bytes / GIB:.1f} GiB{margin}"


def room_of(
    recipe: Mapping[str, Any], hardware: Hardware, memory_gib: float | None = None, margin: float | None = None
) -> Room:
    """`memory_gib`, else the recipe's limit where the device has it, else `USABLE` of the device.

    Args:
        margin: the estimator's known error by default.

    Raises:
        RecipeError: `context.max_device_memory` is no such text, or nothing can be said of the recipe's memory.
    """
    require_known(recipe)
    limit = limit_of(recipe)
    cap, source = USABLE * hardware.hbm_bytes, f"{USABLE:.0%} of the device's memory (assumed)"
    if memory_gib is not None:
        cap, source = memory_gib * GIB, "--memory"
    elif 0 < limit <= hardware.hbm_bytes:
        cap, source = float(limit), "context.max_device_memory of the recipe"
    return Room(cap, source, known_errors().margin if margin is None else margin)


def require_known(recipe: Mapping[str, Any]) -> None:
    """Refuse a recipe whose memory the model says nothing of.

    Raises:
        RecipeError: its optimizer_level is level3.
    """
    if look(recipe, LEVEL) == "level3":
        raise RecipeError(
            f"{'.'.join(LEVEL)}: level3: whether it fits is unknown, its memory is not modelled; level1 and level2 "
            "are (docs/memory.md)"
        )
