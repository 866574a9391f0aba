"""This module makes the plan of a first hour: for each check the seconds that it may take, where it runs, its commands,
and what is predicted for it. Nothing is started.

The seconds are limits and add up to at most the budget; when a check's limit is over, its commands are ended.
"""

from __future__ import annotations

import shlex
from typing import Any

from launch.firsthour.collectives import command_of, words_of
from launch.firsthour.ladder import LADDER, seconds_of
from launch.firsthour.npu import NpuHour
from launch.firsthour.rungs import Hour
from launch.run.msrun import MASTER
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.hardware import DEFAULT_HARDWARE
from tools.layout.resolve import resolve
from tools.process.host import shorten
from tools.recipe.load import load_recipe


def plan_of(hour: Hour, budget: float) -> dict[str, Any]:
    """Return the plan: "nodes", "devices", "budget", and for each check its limit, place, gate, remedy and commands."""
    view = hour.view
    nodes = hour.world // hour.each if isinstance(hour, NpuHour) else len(hour.names)
    commands = hour.commands()
    rungs: list[dict[str, Any]] = [
        {
            "rung": rung.name, "asks": rung.asks, "seconds": seconds_of(rung, budget),
            "where": _where(hour, rung.name, nodes), "needs": list(rung.needs), "gate": rung.gate,
            "remedy": rung.remedy, "commands": [shlex.join(["tc3", *words]) for words in commands[rung.name]],
        }
        for rung in LADDER
    ]  # fmt: skip
    master = hour.names[0] if hour.nodes else MASTER
    groups = next(one for one in rungs if one["rung"] == "collectives")
    groups["measures"] = [words_of(row) for row in hour.group_rows()]
    groups["commands"] = [shlex.join(command_of(hour.work / "collectives", hour.world, hour.each, 0, master))]
    plan: dict[str, Any] = {"recipe": str(hour.recipe), "nodes": nodes, "devices": view.devices, "budget": budget}
    plan["npus"] = isinstance(hour, NpuHour)
    plan |= {"rungs": rungs, "seconds": sum(rung["seconds"] for rung in rungs)}
    if not view.on_cpu:
        config = from_recipe(resolve(load_recipe(hour.recipe), layout="file"))
        plan["predicted_step_s"] = TimeModel(cluster(DEFAULT_HARDWARE)).step(config).total
    return plan


def _where(hour: Hour, rung: str, nodes: int) -> str:
    """Return the nodes and ranks that a check uses."""
    view = hour.view
    names = shorten(hour.names) if hour.nodes else f"{nodes} nodes"
    ranks = view.devices // view.pp
    trained = "a CPU of this node"
    if isinstance(hour, NpuHour):
        one, counts = "a CPU and one device of this node", ", ".join(map(str, hour.counts))
        trained = {"mini": one, "parallel": f"{counts} devices"}.get(rung, "one device of this node")
    places = {
        "hosts": f"{names}, one process each", "versions": "no process: the reports of the check hosts",
        "devices": f"{names}, ranks 0-{view.devices - 1}",
        "operators": f"{names}, one device of each after the other",
        "calibrate": "this node", "collectives": f"{hour.world} devices, msrun on each node",
    }  # fmt: skip
    if isinstance(hour, NpuHour):
        places["stage"] = f"the devices of one stage, {ranks}, or as many as there are"
    return places.get(rung, trained)


def as_text(plan: dict[str, Any]) -> str:
    """Return the plan as text."""
    lines = [f"{plan['recipe']}: {plan['nodes']:,} nodes, {plan['devices']:,} devices, {plan['budget']:.0f} s"]
    if plan["npus"]:
        lines.append("the plan is for NPUs, on which it has not run; a host without NPUs rehearses it on its CPU")
    for rung in plan["rungs"]:
        needs = f"; needs {', '.join(rung['needs'])}" if rung["needs"] else ""
        lines += [f"{rung['rung']}: at most {rung['seconds']:.0f} s, on {rung['where']}{needs}", f"    {rung['asks']}"]
        lines += [f"    {words}" for words in rung.get("measures", ())]
        lines += [f"    gate: {rung['gate']}", *(f"    {command}" for command in rung["commands"])]
    total = f"sum of the limits: {plan['seconds']:.0f} of {plan['budget']:.0f} s"
    if "predicted_step_s" in plan:
        total += f"; predicted for a step of the whole recipe: {plan['predicted_step_s']:.1f} s"
    return "\n".join([*lines, total])
