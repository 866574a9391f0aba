"""What a tensor of a checkpoint is, by its name."""

from __future__ import annotations

from typing import Literal

from tools.checkpoint.stored import BUFFERS

Kind = Literal["weights", "optimizer", "other"]
KINDS: tuple[Kind, ...] = ("weights", "optimizer", "other")
ADAM = ("adam_m.", "adam_v.")  # before a weight's name: what AdamW keeps of it
_TRAINED = ("weight", "weight1", "weight2", "bias")  # how names of trained parameters end; others count, or balance
_BESIDE = ("adam_", "moment", "exp_avg", BUFFERS)  # of names that end with a parameter's name


def kind_of(name: str) -> Kind:
    """A trained weight, the optimizer's state of one, or another number: counters, the balance of routers."""
    if name.startswith(_BESIDE):
        return "optimizer"
    return "weights" if name.rsplit(".", 1)[-1] in _TRAINED else "other"
