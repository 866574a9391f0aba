"""The one table of a recipe: parameters, tokens per step, layers and parameters by stage, FLOPs, steps."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tools.model.architecture import Model, model_of
from tools.model.weights import FORMULA, active_parameters, flops_per_token, parameters, stage_parameters
from tools.recipe.view import View
from tools.schema.converter import Built
from tools.schema.stages import Layers, layers_of, runs_back, stage_layers_of


def table_of(view: View, built: Built, token_budget: int | None = None) -> dict[str, Any] | None:
    """Sizes of the recipe; None when its model makes no sense, no stages when its offset makes none.

    Keys in units: parameters, layers, tokens, FLOPs; lists are per pipeline stage.
    """
    layers = stage_layers_of(view, built)
    try:
        model = model_of(built.fields)
        total = parameters(model)
        if total <= 0:
            return None
        if layers is not None and sum(map(sum, layers)) != model.layers:
            layers = None
        tokens = view.global_batch * built.fields["seq_length"]
        flops = flops_per_token(model, built.fields["seq_length"])
    except (TypeError, KeyError, ValueError):
        return None
    budget = token_budget or _own_budget(view, tokens)
    return {
        "parameters_total": total,
        "parameters_active": active_parameters(model),
        "devices": view.devices,
        "layout": {"dp": view.dp, "tp": view.tp, "pp": view.pp, "cp": view.cp, "ep": view.ep, "chunks": view.chunks},
        "global_batch_samples": view.global_batch,
        "tokens_per_step": tokens,
        "stage_layers": [sum(rows) for rows in zip(*layers, strict=True)] if layers else None,
        "stage_chunk_layers": layers,
        "stage_parameters": _stage_parameters(view, built, model) if layers else None,
        "flops_per_token": flops,
        "flops_formula": FORMULA,
        "flops_per_step": flops * tokens,
        "token_budget": budget,
        "steps": -(-budget // tokens) if budget else None,
    }


def _stage_parameters(view: View, built: Built, model: Model) -> list[int]:
    """Weights on each stage; where the pipeline runs back up, the end is on the first."""
    in_order: Layers = layers_of(view, built) or []
    if not runs_back(view):
        return stage_parameters(model, in_order)
    chunks = stage_parameters(model, [[*in_order[0], *in_order[1]]])
    return [down + up for down, up in zip(chunks[: view.pp], reversed(chunks[view.pp :]), strict=True)]


def _own_budget(view: View, tokens: int) -> int | None:
    """Tokens that the recipe itself asks for: its samples, or its schedule."""
    epochs = view.number(("runner_config", "epochs"), 1)
    if view.samples and view.global_batch:
        return epochs * (view.samples // view.global_batch) * tokens or None
    steps = view.get(("lr_schedule", "total_steps"))
    return steps * tokens if type(steps) is int and steps > 0 else None


def render(tables: list[tuple[str, dict[str, Any]]]) -> Table:
    """One rich table, a column for each recipe."""
    shown = Table(show_edge=False, pad_edge=False)
    shown.add_column("")
    for name, _ in tables:
        shown.add_column(name, justify="right", overflow="fold")
    rows = [_rows(table) for _, table in tables]
    for index, (label, _) in enumerate(rows[0]):
        shown.add_row(label, *(row[index][1] for row in rows))
    return shown


def _rows(table: dict[str, Any]) -> list[tuple[str, str]]:
    layout = " ".join(f"{name}{size}" for name, size in table["layout"].items() if size > 1) or "one device"
    steps = f"{table['steps']:,} for {_short(table['token_budget'])} tokens" if table["steps"] else "unknown"
    return [
        ("parameters", f"{table['parameters_total']:,}"),
        ("active parameters per token", f"{table['parameters_active']:,}"),
        ("devices", f"{table['devices']:,} ({layout})"),
        ("samples per step", f"{table['global_batch_samples']:,}"),
        ("tokens per step", f"{table['tokens_per_step']:,}"),
        ("layers by stage", " ".join(map(str, table["stage_layers"] or ["unknown"]))),
        ("parameters by stage", " ".join(map(_short, table["stage_parameters"] or [])) or "unknown"),
        ("FLOPs per token", f"{table['flops_per_token']:.4g}"),
        ("FLOPs per step", f"{table['flops_per_step']:.4g}"),
        ("steps", steps),
    ]


def _short(number: int) -> str:
    """1234567 as 1.23M."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)
