"""This module makes the plan of `tc3 firsthour`: for each check the seconds that it may take, where it runs, its
commands, and what is predicted for it. The module starts no check.

The seconds are limits and add up to at most the budget; when a check's limit is over, its commands are ended.
"""

from __future__ import annotations

import shlex
from typing import Any

from launch.firsthour.checks import HOUR_CHECKS
from launch.firsthour.collectives import command_of, words_of
from launch.firsthour.hour import Hour
from launch.firsthour.npu import NpuHour
from launch.run.msrun import MASTER
from plugins.errors import RecipeError
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.hardware import DEFAULT_HARDWARE
from tools.layout.resolve import resolve
from tools.process.host import shorten
from tools.recipe.load import load_recipe


def plan_of(hour: Hour, budget: float) -> dict[str, Any]:
    """Return the plan as a dictionary: "nodes", "devices", "budget", and for each check its time limit, place,
    condition, remedy and commands.
    """
    view = hour.view
    nodes = hour.node_count if isinstance(hour, NpuHour) else len(hour.names)
    commands = hour.commands()
    checks: list[dict[str, Any]] = [
        {
            "check": check.name, "asks": check.asks, "seconds": check.share * budget,
            "where": _where(hour, check.name, nodes), "needs": list(check.needs), "gate": check.gate,
            "remedy": check.remedy, "commands": [shlex.join(["tc3", *words]) for words in commands[check.name]],
        }
        for check in HOUR_CHECKS
    ]  # fmt: skip
    first = hour.names[0] if hour.nodes else "FIRST_NODE"  # to be named with --nodes
    master = first if hour.world > hour.each else MASTER
    groups = next(one for one in checks if one["check"] == "collectives")
    groups["measures"] = [
        words_of(row) + ("" if row["groups"] else f": not measured, because the nodes have {hour.world:,} devices")
        for row in hour.group_rows()
    ]
    groups["commands"] = [shlex.join(command_of(hour.work / "collectives", hour.world, hour.each, 0, master))]
    plan: dict[str, Any] = {"recipe": str(hour.recipe), "nodes": nodes, "devices": _devices(hour), "budget": budget}
    plan |= {"npus": isinstance(hour, NpuHour), "recipe_devices": view.devices}
    plan |= {"checks": checks, "seconds": sum(check["seconds"] for check in checks)}
    if not view.on_cpu:
        config = from_recipe(resolve(load_recipe(hour.recipe), layout="file"))
        try:
            plan["predicted_step_s"] = TimeModel(cluster(DEFAULT_HARDWARE)).step(config, simulated=True).total
        except RecipeError as error:  # adapters, or a schedule that cannot be simulated
            plan["predicted_step_s"], plan["why_no_step"] = None, str(error)
    return plan


def _devices(hour: Hour) -> int:
    """Return the number of devices of the nodes; the recipe's, where CPU workers stand for them."""
    return hour.world if isinstance(hour, NpuHour) else hour.view.devices


def _where(hour: Hour, check: str, nodes: int) -> str:
    """Return the nodes and ranks that a check uses."""
    view = hour.view
    names = shorten(hour.names) if hour.nodes else f"{nodes} node{'s' * (nodes > 1)}"
    ranks = view.devices // view.pp
    trained = "a CPU of this node"
    if isinstance(hour, NpuHour):
        one, counts = "a CPU and one device of this node", ", ".join(map(str, hour.counts))
        trained = {"mini": one, "parallel": f"{counts} devices"}.get(check, "one device of this node")
    places = {
        "hosts": f"{names}, one process each", "versions": "no process: the reports of the check hosts",
        "devices": f"{names}, ranks 0-{_devices(hour) - 1}",
        "operators": f"{names}, one device of each after the other",
        "calibrate": "this node", "collectives": f"{hour.world} devices, msrun on each node",
    }  # fmt: skip
    if isinstance(hour, NpuHour):
        places["stage"] = f"the devices of one stage, {ranks}, or as many as there are"
    return places.get(check, trained)


def as_text(plan: dict[str, Any]) -> str:
    """Return the plan as text for the terminal."""
    size = ", ".join(f"{plan[name]:,} {name[: None if plan[name] > 1 else -1]}" for name in ("nodes", "devices"))
    lines = [f"{plan['recipe']}: {size}, {plan['budget']:.0f} s"]
    if plan["npus"]:
        lines.append("the plan is for NPUs, on which it has not run; a host without NPUs rehearses it on its CPU")
    if plan["devices"] < plan["recipe_devices"]:
        lines.append(
            f"the recipe takes {plan['recipe_devices']:,} devices: the nodes are checked, but not a whole step"
        )
    for check in plan["checks"]:
        needs = f"; needs {', '.join(check['needs'])}" if check["needs"] else ""
        lines += [
            f"{check['check']}: at most {check['seconds']:.0f} s, on {check['where']}{needs}",
            f"    {check['asks']}",
        ]
        lines += [f"    {words}" for words in check.get("measures", ())]
        lines += [f"    gate: {check['gate']}", *(f"    {command}" for command in check["commands"])]
    total = f"sum of the limits: {plan['seconds']:.0f} of {plan['budget']:.0f} s"
    if why := plan.get("why_no_step"):
        total += f"; the step of the whole recipe is not predicted: {why}"
    elif "predicted_step_s" in plan:
        total += f"; predicted for a step of the whole recipe: {plan['predicted_step_s']:.1f} s"
    return "\n".join([*lines, total])
