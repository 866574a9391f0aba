"""This module reads `plugins.group_aux_loss`, and refuses recipes for which the auxiliary loss of a group cannot be
computed. The module is pure Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from plugins.settings import Section

KEY = "plugins.group_aux_loss"
KIND = "seq_aux_loss"  # the one kind of MindFormers' whose shares it averages over a group
DEFAULT_KIND = "sub_seq_aux_loss"  # MindFormers', where a recipe names none


@dataclass(frozen=True)
class Settings(Section):
    """This plugin has no settings; a recipe enables it with the value `True`."""

    KEY = KEY
    RIGHT = "write True, or False to leave the loss to MindFormers"
    CHANGE = ("numbers", "balances experts over the tokens of an expert-parallel group")

    @classmethod
    def look(cls, written: Any) -> tuple[Settings | None, list[RecipeError]]:
        """Return (settings, []) if the plugin's section is `True`, and otherwise (None, [the error])."""
        return (
            (cls(), []) if written is True else (None, [RecipeError(f"{written!r} is not allowed; {cls.RIGHT}", KEY)])
        )


def check(kind: Any, coefficient: float | None, expert_parallel: int, tensor_parallel: int) -> None:
    """Refuse recipes for which the auxiliary loss of a group cannot be computed.

    Args:
        kind: `moe_router_load_balancing_type`.
        coefficient: `moe_aux_loss_coeff`.
        expert_parallel: the number of ranks of an EP group.
        tensor_parallel: the number of ranks that share a sequence, 1 if the model is not split.

    Raises:
        RecipeError: the recipe has no auxiliary loss or another kind of it, or its groups are smaller than MindFormers'
            own.
    """
    if not coefficient:
        raise RecipeError(
            f"{KEY} needs an auxiliary loss, but its coefficient is 0 or missing; write a number above 0, or {KEY}: "
            "False",
            "model.model_config.moe_aux_loss_coeff",
        )
    if kind != KIND:
        raise RecipeError(
            f"{KEY} averages only the auxiliary loss {KIND!r} over an EP group, not {kind!r}; write {KIND!r}, or "
            f"{KEY}: False",
            "model.model_config.moe_router_load_balancing_type",
        )
    if expert_parallel % tensor_parallel:
        raise RecipeError(
            f"an EP group of {expert_parallel} ranks holds only part of a sequence, because {tensor_parallel} "
            f"tensor-parallel ranks share each sequence; write a multiple of {tensor_parallel}, or {KEY}: False",
            "parallel_config.expert_parallel",
        )
