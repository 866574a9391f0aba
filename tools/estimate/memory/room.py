"""This module computes how many bytes the predicted memory of a device may reach. The limit for a prediction is the
memory limit of the recipe or of the device, minus a margin for the error of predictions.

The margin, and the number of known runs that would fit, follow from the errors of predicted memory on published runs.

`errors.yaml` holds the errors of the runs of `rows.yaml`, as `tc3 search validate` computes them. No run in `rows.yaml`
used MindFormers or Ascend, because no such run has been published with its memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from plugins.errors import RecipeError
from tools.estimate.from_recipe import LEVEL
from tools.files.atomic import write_atomically
from tools.hardware import Hardware
from tools.hardware.units import GIB
from tools.recipe.findings import refusal
from tools.recipe.view import limit_of, look
from tools.schema.stages import EXCLUDE, excludes

ROWS = Path(__file__).parent / "rows.yaml"
FILE = Path(__file__).parent / "errors.yaml"
# The most of its memory that a run took beyond the prediction of a model without the terms that were found on runs of
# its own group (docs/memory.md). The errors of errors.yaml are smaller, for the terms were found on those very runs.
LEFT_OUT = 0.0732
_DIGITS = 4
_ROUNDED = 1e-9
_HEAD = """\
# Predicted over measured memory - 1 of published runs. Written by `tc3 search validate {rows} --record`.
# `tc3 search` takes its margin from these, and how likely a strategy fits.
"""


FITS, UNKNOWN, DOES_NOT_FIT, NO_LIMIT = "fits", "unknown", "does not fit", "no limit"


def fit_between(least: float, most: float, limit: float, proven: float | None = None) -> str:
    """Return `FITS`, `UNKNOWN` or `DOES_NOT_FIT` for a job that needs between `least` and `most` bytes on a device. The
    commands `tc3 memory`, `tc3 dryrun` and `tc3 search --verify` use this function.

    Args:
        least, most: bounds of the bytes on a device, equal if they are known exactly.
        limit: the bytes of a job.
        proven: the bytes up to which the job surely fits, if the error may be larger than the bounds say.
    """
    if least > limit:
        return DOES_NOT_FIT
    return UNKNOWN if most > (limit if proven is None else proven) else FITS


@dataclass(frozen=True)
class MemoryErrors:
    """A `MemoryErrors` holds the error of the predicted memory (predicted / measured - 1) of each published run."""

    errors: Mapping[str, float]

    @property
    def missed(self) -> float:
        """Return the largest underestimate of memory among the published runs, as a fraction of the measured memory."""
        return max(0.0, -min(self.errors.values()))

    @property
    def margin(self) -> float:
        """Return the fraction of a memory limit that predictions must leave free. With the returned margin, every
        published run would have fit in memory. The margin also covers the errors for runs to which the memory model was
        not fitted.
        """
        return max(LEFT_OUT, self.missed)

    def fitting(self, predicted: float, limit: float) -> int:
        """Return the number of published runs that would fit into `limit` bytes with a predicted memory of `predicted`
        bytes, given the prediction error of each run.
        """
        return sum(predicted <= limit * (1 + error) * (1 + _ROUNDED) for error in self.errors.values())

    def fits(self, predicted: float, limit: float) -> str:
        """Return the number of runs that `fitting` returns, out of all published runs, as text such as ``"15 of
        24"``.
        """
        return f"{self.fitting(predicted, limit)} of {len(self.errors)}"

    def differences(self, found: Mapping[str, float]) -> list[str]:
        """Return a sentence for each run whose memory error in `found` differs from its error in the file
        errors.yaml.
        """
        return [
            f"{name}: its memory error is {found[name]:+.2%}, {FILE.name} has {error:+.2%}"
            for name, error in self.errors.items()
            if name in found and abs(found[name] - error) > 10**-_DIGITS
        ]


@lru_cache(maxsize=1)
def known_errors() -> MemoryErrors:
    """Return the errors of the predicted memory of published runs, which the file errors.yaml holds."""
    return MemoryErrors(yaml.safe_load(FILE.read_text(encoding="utf-8"))["errors"])


def write_errors(path: Path, errors: Mapping[str, float], rows: Path) -> None:
    """Write the memory errors of published runs to a file such as errors.yaml; the errors are rounded down, so that
    rounding never reduces the safety margin.

    Raises:
        DataError: the file cannot be written.
    """
    scale = 10**_DIGITS
    rounded = {name: math.floor(error * scale) / scale for name, error in errors.items()}
    body = yaml.safe_dump({"errors": rounded}, sort_keys=False)
    write_atomically(path, _HEAD.format(rows=rows.name) + body)


# of HBM for a job where nobody says: the driver, HCCL's buffers and the allocator's fragments take the rest (assumed;
# MindFormers' public recipes for 64 GB devices write 54 to 59 GB, of 2^30)
USABLE = 0.9


@dataclass(frozen=True)
class Room:
    """A `Room` holds the memory limit of a job on a device in bytes, the source of this limit, and the margin. The
    margin is the fraction of the limit that a prediction must leave free, because predictions may be too small.
    """

    cap: float
    source: str
    margin: float

    @property
    def bytes(self) -> float:
        """Return the bytes that a predicted memory may reach: the memory limit minus the margin for the error of
        predictions.
        """
        return self.cap * (1 - self.margin)

    @property
    def words(self) -> str:
        """Return the limit as text, such as ``51.4 GiB (55.5 less a margin of 7.4 %)``."""
        margin = f" ({self.cap / GIB:.1f} less a margin of {100 * self.margin:.1f} %)" if self.margin else ""
        return f"{self.bytes / GIB:.1f} GiB{margin}"

    def less(self, reserve: float) -> Room:
        """Return what is left if `reserve` measured bytes of a device are in use beside the model."""
        if not reserve:
            return self
        words = f"{self.source}, less {reserve / GIB:.2f} GiB measured beside the model"
        return replace(self, cap=self.cap - reserve, source=words)


def room_of(
    recipe: Mapping[str, Any], hardware: Hardware, memory_gib: float | None = None, margin: float | None = None
) -> Room:
    """Return the memory that a job may use on a device: `memory_gib` if it is given, otherwise the recipe's memory
    limit. If the recipe has no memory limit, or a limit above the device's memory, return the share `USABLE` of the
    device's memory. The default margin for the error of predictions is the known error of the memory model.

    Raises:
        RecipeError: `context.max_device_memory` is no size such as "58GB", or the recipe's memory cannot be predicted.
    """
    require_known(recipe)
    limit = limit_of(recipe)
    cap, source = USABLE * hardware.hbm_bytes, f"{USABLE:.0%} of the device's memory (assumed)"
    if memory_gib is not None:
        cap, source = memory_gib * GIB, "--memory"
    elif 0 < limit <= hardware.hbm_bytes:
        cap, source = float(limit), "context.max_device_memory of the recipe"
    return Room(cap, source, known_errors().margin if margin is None else margin)


def require_on_device(option: str, gib: float | None, hardware: Hardware) -> None:
    """Raise an error if the value of an option, in GiB, is more memory than a device has. (If a recipe has a limit
    above the device's memory, `room_of` does not use this limit either.)

    Raises:
        RecipeError: the message names the memory of the device.
    """
    if gib is not None and gib * GIB > hardware.hbm_bytes:
        has = math.floor(10 * hardware.hbm_bytes / GIB) / 10
        raise RecipeError(
            f"{option} {gib:g}: a device of {hardware.name} has only {has:.1f} GiB; write at most {has:.1f}, or name "
            "another cluster with --cluster"
        )


def require_known(recipe: Mapping[str, Any]) -> None:
    """Raise an error for a recipe whose memory the model cannot predict.

    Raises:
        RecipeError: the recipe's `optimizer_level` is level3, or operators are excluded from recomputation.
    """
    if look(recipe, LEVEL) == "level3":
        words = (
            "whether a recipe with level3 fits is unknown, because its memory is not modelled; that of level1 and "
            "level2 is (docs/memory.md)"
        )
        raise refusal(recipe, LEVEL, words)
    for path in (("recompute_config", key) for key in EXCLUDE):
        if excludes(look(recipe, path)):
            words = (
                "whether a recipe that excludes operators from recomputation fits is unknown, because what these "
                "operators keep is not modelled; leave the key out to get a prediction (docs/memory.md)"
            )
            raise refusal(recipe, path, words)
