"""The names in msprobe's dump.json: what was called, in which phase, for which time."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD, WEIGHTS, STATE = "forward", "backward", "weights", "state"
PHASES = (FORWARD, BACKWARD, WEIGHTS, STATE)
GRADIENT = "parameters_grad"
CELLS = ("Cell", "Module")  # MindSpore's and PyTorch's word


@dataclass(frozen=True)
class Name:
    """One key of dump.json.

    Args:
        text: the key itself.
        kind: Cell (Module is read as Cell), or who was hooked: Functional, Mint, Tensor, Primitive ...
        path: the cell's path in the model, or the function's name.
        type: the cell's class, or the function's last name.
        phase: forward, backward or parameters_grad.
        call: how often it was called before, in this step.
    """

    text: str
    kind: str
    path: str
    type: str
    phase: str
    call: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What pairs it with the other side: without the class, which another framework names differently."""
        return self.kind, self.path, self.phase, self.call

    @property
    def place(self) -> str:
        """Where a person would look: the cell's path or the function."""
        return f"{self.path} ({self.type})" if self.kind == "Cell" else f"{self.kind}.{self.path}"


def parse(text: str) -> Name:
    """Read `Cell.PATH.CLASS.forward.N`, `Cell.PATH.CLASS.parameters_grad.N` or `Functional.NAME.N.backward`.

    Raises:
        ValueError: the key is of no such form.
    """
    parts = text.split(".")
    marks = (FORWARD, BACKWARD, GRADIENT)
    if len(parts) < 4:
        raise ValueError(text)
    if parts[-2] in marks:
        phase, call = parts[-2:]
    elif parts[-1] in marks:
        call, phase = parts[-2:]
    else:
        raise ValueError(text)
    kind, body = parts[0], parts[1:-2]
    if kind in CELLS:
        return Name(text, "Cell", ".".join(body[:-1]), body[-1], phase, int(call))
    return Name(text, kind, ".".join(body), body[-1], phase, int(call))
