"""This module decides when a run whose values are no longer finite must end. The module uses only Python and NumPy.

A step counts as not finite if its loss, a part of its loss or its global norm is NaN or infinite. There is one
exception: a step whose gradients overflow is not counted while the loss scale can still be lowered. In this case the
optimizer skips the step, the loss scale is lowered, and training goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plugins.settings import WATCHES, Section, setting

KEY = "plugins.finite_loss"
METRICS = ("lm loss", "load-balancing loss", "mtp loss", "indexer loss", "loss")  # in the order of naming
NORM = "global norm"
_LEAST_SCALE = 1.0  # MindSpore's and MindFormers' loss scales fall no lower
# safetensors' name of a type -> how to look at it, and the bits of its exponent: all set in a NaN or an infinity
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_CHUNK = 1 << 22  # numbers looked at together


@dataclass(frozen=True)
class Settings(Section):
    """The only setting, `stop_after`, is the number of consecutive steps with values that are not finite after which a
    run ends.
    """

    KEY = KEY
    RIGHT = f"write `stop_after: 1` under it, or {KEY}: False to train on whatever the loss is"
    CHANGE = WATCHES

    stop_after: int = setting(
        1,
        "steps in a row that are not finite with which a run ends",
        f"write a number of steps from 1 on, or {KEY}: False for never",
        least=1,
    )


def undefined_parts(stages: int, micro_steps: int, aux_loss_scale: float) -> tuple[str, ...]:
    """Return the parts of the loss that MindFormers computes as 0/0 although the training is correct.

    `MFPipelineWithLossScaleCell` (`wrapper/wrapper.py`) divides the auxiliary loss by `aux_loss_scale` even if that is
    0; the wrapper of other runs divides only if it is above 0. MindFormers uses this cell for a pipeline and for
    gradient accumulation.

    Args:
        stages: the number of pipeline stages.
        micro_steps: `gradient_accumulation_steps`.
        aux_loss_scale: the coefficient of the auxiliary loss times the number of layers with experts.
    """
    return ("load-balancing loss",) if max(stages, micro_steps) > 1 and not aux_loss_scale else ()


@dataclass
class Watch:
    """A `Watch` counts how many consecutive steps had a loss, a part of the loss or a gradient norm that is not finite.

    Attributes:
        stop_after: the number of consecutive steps that are not finite after which the run ends.
        scale_falls: whether a loss-scale manager lowers the scale when gradients overflow.
        run: (step, description) of the last consecutive steps that were not finite.
        scale_before: the loss scale of the previous step.
        undefined: the parts of the loss that are not judged.
        logged: the step's loss in the log, None if it is not logged.
    """

    stop_after: int
    scale_falls: bool = False
    run: list[tuple[int, str]] = field(default_factory=list)
    scale_before: float = _LEAST_SCALE
    undefined: tuple[str, ...] = ()
    logged: float | None = None

    def see(
        self, step: int, losses: Mapping[str, float | None], norm: float | None, overflow: bool, scale: float
    ) -> str | None:
        """Check the values of a step, and count the step if one of them is not finite. Return the reason why the run
        must end now, or None if the run may continue.

        Args:
            step: the number of the step, from 1 on.
            losses: name -> loss, see `METRICS`, None if it is unknown.
            norm: the norm of all gradients, None without clipping.
            overflow: whether the optimizer skipped the step.
            scale: the loss scale.
        """
        judged = ((name, value) for name, value in losses.items() if name not in self.undefined)
        wrong = next((f"{name} is {_words(value)}" for name, value in judged if not _finite(value)), None)
        # on some devices `scale` is that of the next step: with 1.0 it may have fallen just now
        falls = self.scale_falls and max(scale, self.scale_before) > _LEAST_SCALE
        self.scale_before = scale
        if wrong is None and not (overflow and falls):
            if not _finite(norm):
                wrong = f"{NORM} is {_words(norm)}"
            elif norm is None and overflow:
                wrong = "gradients overflow"
        if wrong is None:
            self.run.clear()
            return None
        self.run.append((step, wrong))
        return self.verdict if len(self.run) >= self.stop_after else None

    @property
    def verdict(self) -> str:
        """Return a text that lists the last consecutive steps that were not finite, each with the value that was
        wrong.
        """
        first, wrong = self.run[0]
        if len(self.run) == 1:
            return f"step {first}: {wrong}"
        last, now = self.run[-1]
        since = f"; the first was step {first}" + (f", whose {wrong}" if wrong != now else "")
        return f"step {last}: {now}, the step number {len(self.run)} in a row that is not finite{since}"


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _words(value: float | None) -> str:
    assert value is not None
    return "NaN" if math.isnan(value) else "infinite"


def not_finite(file: Path) -> str | None:
    """Return the name of the first tensor in a safetensors file that holds a NaN or an infinity; return None if no
    tensor does.

    The file is read in pieces, and its values are checked in the type in which they are stored, because these are the
    values that a resumed run loads.
    """
    with file.open("rb") as data:
        size = int.from_bytes(data.read(8), "little")
        header: dict[str, Any] = json.loads(data.read(size))
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["dtype"] in _EXPONENTS:
            kind, exponent = _EXPONENTS[tensor["dtype"]]
            start, end = tensor["data_offsets"]
            count = (end - start) // np.dtype(kind).itemsize
            if count and _holds(np.memmap(file, kind, "r", 8 + size + start, (count,)), exponent):
                return name
    return None


def _holds(bits: np.ndarray, exponent: int) -> bool:
    """Return whether a number of `bits` [count] has all bits of its exponent set."""
    mask = bits.dtype.type(exponent)
    return any(bool(np.any((bits[i : i + _CHUNK] & mask) == mask)) for i in range(0, len(bits), _CHUNK))
