"""One process that trains a recipe with a fault: `launch/train.py` with the fault as its last plugin."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from launch.train import build_config, train
from launch.workers.lifetime import run_then_hard_exit
from plugins import ADAPTERS
from tools.recipe.dump import dump_recipe

FAULT = "zoo"


def main() -> None:
    """Arguments: recipe, folder of the run, name of the fault (may be empty), checkpoint to go on from (may be
    empty).
    """
    recipe_file, run_dir, name, resume = sys.argv[1:]
    ADAPTERS[FAULT] = "tests.zoo.faults"
    recipe = build_config(Path(recipe_file), (), Path(run_dir), Path(resume) if resume else None)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    dump_recipe(recipe, Path(run_dir) / "recipe.yaml")
    recipe["plugins"] = {**recipe["plugins"], FAULT: name}
    train(recipe)


if __name__ == "__main__":
    run_then_hard_exit(main)
