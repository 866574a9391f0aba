"""This program estimates and draws the step times with each system of the report: `python docs/pictures/ladder.py`.

Each column of the table adds one system to the column before it. The program prints the table of docs/report.md.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

from tools.estimate.efficiency import cluster, known_error
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.layout.resolve import resolve
from tools.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "pictures" / "ladder.svg"
HARDWARE = "atlas_800t_a2"
UNEVEN, EVENED = 1.2, 1.05  # assumed max/mean of the tokens of a device: without moves, and with
RECIPES = {
    "105B, 4K": "recipes/telechat3_105b/pretrain_4k_report.yaml",
    "105B, 128K": "recipes/telechat3_105b/context_128k_report.yaml",
    "438B, 4K": "recipes/telechat3_438b/pretrain_4k_report.yaml",
    "438B, 128K": "recipes/telechat3_438b/context_128k_report.yaml",
    "1119B, 4K": "recipes/telechat3_1119b/pretrain_4k_report.yaml",
    "1119B, 128K": "recipes/telechat3_1119b/context_128k_report.yaml",
}
SYSTEMS = ("plain 1F1B, one All-to-All", "interleaved, with offsets", "hierarchical dispatch", "overlapped dispatch",
         f"experts balanced ({UNEVEN} to {EVENED})")  # fmt: skip


def ladder(path: str) -> list[float]:
    """Return the seconds of a step with each of SYSTEMS and those before it."""
    whole = load_recipe(ROOT / path)
    plugins = ("hierarchical_ep", "ep_overlap")
    times = TimeModel(cluster(HARDWARE))

    def seconds(interleaved: bool, *on: str, skew: float = UNEVEN) -> float:
        recipe = copy.deepcopy(whole)
        model = recipe["model"]["model_config"]
        if not interleaved:
            layers, stages = model["num_hidden_layers"], recipe["parallel_config"]["pipeline_stage"]
            chunks = model.get("pp_interleave_num") or 1
            rows = model["offset"] if chunks > 1 else [model["offset"]]
            each = layers // (stages * chunks)
            held = [sum(each + row[stage] for row in rows) for stage in range(stages)]  # the same layers on a stage
            model.update(pp_interleave_num=1, offset=[own - layers // stages for own in held])
            recipe["parallel"]["pipeline_config"]["pipeline_interleave"] = False
        for name in plugins:
            if name not in on:
                recipe["plugins"][name] = False
        config = from_recipe(resolve(recipe), ep_mode=None if on else "global")
        return times.step(replace(config, skew=skew), simulated=True).total

    return [
        seconds(False),
        seconds(True),
        seconds(True, "hierarchical_ep"),
        seconds(True, *plugins),
        seconds(True, *plugins, skew=EVENED),
    ]


def table(ladders: dict[str, list[float]]) -> str:
    """Return the rows of docs/report.md."""
    rows = [["seconds of a step", *SYSTEMS], ["---"] * (len(SYSTEMS) + 1)]
    rows += [[name, *(f"{each:.1f}" for each in steps)] for name, steps in ladders.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(ladders: dict[str, list[float]]) -> None:
    """Write the picture FILE: each recipe's step times, relative to plain 1F1B."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "ladder"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 4.4))
    width = 0.8 / len(SYSTEMS)
    for number, system in enumerate(SYSTEMS):
        shares = [steps[number] / steps[0] for steps in ladders.values()]
        places = [place + (number - (len(SYSTEMS) - 1) / 2) * width for place in range(len(ladders))]
        bars = axes.bar(
            places, shares, width * 0.92, label=system, color=plt.get_cmap("viridis")(number / len(SYSTEMS))
        )
        axes.bar_label(bars, [f"{share:.2f}" for share in shares], fontsize=6.5, padding=1.5)
    axes.set_xticks(range(len(ladders)), list(ladders))
    axes.set_ylabel("step time relative to plain 1F1B (modelled)")
    axes.set_ylim(0, 1.25)
    axes.legend(fontsize=7.5, ncols=3, frameon=False, loc="upper center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    found = {name: ladder(path) for name, path in RECIPES.items()}
    draw(found)
    print(table(found))
    error = known_error(cluster(HARDWARE))
    print(error.words if error else "no known error")
