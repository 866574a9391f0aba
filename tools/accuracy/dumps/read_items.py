"""One call in a dump, and the tensors that went in and came out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.accuracy.dumps.names import Name


@dataclass(frozen=True)
class Item:
    """One tensor or plain value of an entry.

    Args:
        label: role and place: `input.0`, `output.1`, `parameters.weight`, or a gradient's parameter.
        role: input, output, parameters or gradient.
        dtype: as the framework names it, in lower case without its module; the type's name for a plain value.
        shape: of the tensor.
        statistics: largest, smallest, mean, L2 norm; None where msprobe has none.
        file: the values, if they were dumped.
        value: of a plain value.
        trained: whether a gradient trains it, where the dump says so by itself.
    """

    label: str
    role: str
    dtype: str
    shape: tuple[int, ...] = ()
    statistics: tuple[float | None, ...] = ()
    file: Path | None = None
    value: Any = None
    trained: bool | None = None

    @property
    def parameter(self) -> str:
        """The parameter's name in its cell: of a parameter, and of the gradient of one (`weight.0`)."""
        if self.role == "parameters":
            return self.label.removeprefix("parameters.")  # may have dots, as an optimizer's `moment1.fc.weight`
        return self.label.removesuffix(".0")

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor; a plain Python value otherwise."""
        return bool(self.statistics)


@dataclass(frozen=True)
class Entry:
    """One call of a cell or function: what went in, what came out."""

    name: Name
    items: tuple[Item, ...]
