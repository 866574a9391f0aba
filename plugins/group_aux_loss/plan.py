"""Reading `plugins.group_aux_loss`, and where there is no such loss. Pure."""

from __future__ import annotations

from typing import Any

from plugins.errors import RecipeError

KEY = "plugins.group_aux_loss"
KIND = "seq_aux_loss"  # the one kind of MindFormers' whose shares it averages over a group
DEFAULT_KIND = "sub_seq_aux_loss"  # MindFormers', where a recipe names none


def read(settings: Any) -> None:
    """Hold that the section is `True`: the loss has nothing to set.

    Raises:
        RecipeError: something else.
    """
    if settings is not True:
        raise RecipeError(f"{KEY}: {settings!r}; write True, or False to leave the loss to MindFormers")


def check(kind: Any, coefficient: float | None, expert_parallel: int, tensor_parallel: int) -> None:
    """Refuse what the loss cannot be taken over.

    Args:
        kind: `moe_router_load_balancing_type`; coefficient: `moe_aux_loss_coeff`; expert_parallel: ranks of an EP
        group; tensor_parallel: ranks that share a sequence, 1 where the model is not split.

    Raises:
        RecipeError: no auxiliary loss, another kind of it, or groups that are smaller than MindFormers' own.
    """
    if not coefficient:
        raise RecipeError(
            "model.model_config.moe_aux_loss_coeff: 0, so that there is no auxiliary loss; write a number above 0, or "
            f"{KEY}: False"
        )
    if kind != KIND:
        raise RecipeError(
            f"model.model_config.moe_router_load_balancing_type: {kind!r} averages over other tokens than "
            f"{KEY} does; {KIND!r}, or {KEY}: False"
        )
    if expert_parallel % tensor_parallel:
        raise RecipeError(
            f"parallel_config.expert_parallel: groups of {expert_parallel} ranks cut the sequences that "
            f"{tensor_parallel} tensor-parallel ranks share, over which MindFormers averages already; a multiple of "
            f"{tensor_parallel}, or {KEY}: False"
        )
