"""Context parallelism by exchanging heads (`ulysses_degree_in_cp`): for which models MindFormers compiles it."""

from __future__ import annotations

from plugins.errors import RecipeError
from tools.model.architecture import Model
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.recipe.view import PARALLEL
from tools.schema.schema import load_schema

DEGREE = (*PARALLEL, "ulysses_degree_in_cp")


def not_compiled(model: Model) -> tuple[str, str] | None:
    """Why a degree above 1 does not compile for a model, and the rule that names MindFormers' line; None if it does."""
    if not model.latent:
        return "MindFormers 1.9.0 cuts heads along the batch outside of MLA, and does not compile", "ulysses_grouped"
    if model.qk_dim != model.v_dim:
        widths = f"values of {model.v_dim} numbers as if they had the {model.qk_dim} of queries"
        return f"MindFormers 1.9.0 cuts {widths}, and does not compile", "ulysses_latent"
    return None


def require_ulysses(recipe: Recipe, model: Model, degree: int) -> None:
    """Refuse a degree above 1 where MindFormers 1.9.0 does not compile it, as `tc3 dryrun` shows.

    Raises:
        RecipeError: heads are cut, and the attention has other widths for queries and values, or is not MLA.
    """
    if degree > 1 and (refused := not_compiled(model)):
        why, rule = refused
        raise RecipeError(f"{recipe.source}: {dotted(DEGREE)}: {why}: write 1 [{load_schema().line(rule)}]")
