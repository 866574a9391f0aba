"""Recipes that have no expert-parallel communication to report on: a `RecipeError` says what is missing."""

from __future__ import annotations

from plugins.hierarchical_ep.topology import DEVICES_PER_NODE
from tools.hardware import Hardware
from tools.model.architecture import MOE, model_of
from tools.recipe.findings import refusal
from tools.recipe.load import Recipe
from tools.recipe.view import MODEL, PARALLEL, View
from tools.schema.converter import convert
from tools.schema.schema import load_schema


def check(recipe: Recipe, hardware: Hardware) -> None:
    """Refuse a recipe that has no expert-parallel communication to report on, or not on this cluster.

    Raises:
        RecipeError: no experts, no expert parallelism, degrees that do not divide, or a node of another size.
    """
    view = View(recipe)
    built = convert(view, load_schema())
    try:
        model = model_of(built.fields)
    except (KeyError, TypeError, ValueError) as error:
        raise refusal(recipe, MODEL, f"its sizes do not make a model ({error}); `tc3 check` says more") from None
    experts, path = model.experts, (*PARALLEL, "expert_parallel")
    if MOE not in model.pattern:
        raise refusal(recipe, (*MODEL, "n_routed_experts"), "the model has no routed experts: nothing to report")
    if not view.flag(("use_parallel",)):
        raise refusal(recipe, ("use_parallel",), "one device has nobody to send tokens to; set it to True")
    if view.ep == 1:
        raise refusal(recipe, path, f"1 sends no token anywhere; try --ep {_smallest(experts, view.dp * view.tp)}")
    if experts % view.ep:
        right = f"use a divisor, for instance {_near(experts, view.ep)}"
        raise refusal(recipe, path, f"{view.ep} does not divide {experts} experts; {right}")
    if view.dp * view.tp % view.ep:
        times = -(-view.dp * view.tp // view.ep)
        while times * view.ep % view.tp:
            times += 1
        right = f"a divisor of {view.dp * view.tp}, or data_parallel: {times * view.ep // view.tp}"
        text = f"{view.ep} does not divide data_parallel x model_parallel = {view.dp} x {view.tp}; use {right}"
        raise refusal(recipe, path, text)
    if built.number("seq_length") % (view.tp * view.cp):
        text = f"{built.number('seq_length')} tokens cannot be divided over tp {view.tp} x cp {view.cp}"
        raise refusal(recipe, (*MODEL, "seq_length"), text)
    node = built.number("npu_nums_per_device", DEVICES_PER_NODE)
    if node != hardware.devices_per_node:
        text = f"{node}, but a node of {hardware.name} has {hardware.devices_per_node} devices; set it to that"
        raise refusal(recipe, (*MODEL, "npu_nums_per_device"), f"{text}, or pass another --cluster")


def _smallest(experts: int, ranks: int) -> int:
    """The largest degree up to 16 that divides both."""
    return max(degree for degree in range(1, 17) if experts % degree == 0 and ranks % degree == 0)


def _near(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, above 1."""
    divisors = [divisor for divisor in range(2, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))
