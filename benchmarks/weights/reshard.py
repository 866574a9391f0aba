"""This program compares the speed of resharding a checkpoint with a plain copy of the same bytes, and measures the
memory.

    python benchmarks/weights/reshard.py [--folder DIR] [--layers 2]

The model has layers of the 105B with 16 of its experts and a smaller hidden size. Weights and two moments in fp32 are
drawn once and saved as a pipeline of two stages saves them. The checkpoint is resharded to tensor parallelism (columns
are cut, so rows are read in parts), to optimizer sharding over eight ranks, and back. Copies and layouts take turns.
All files are in the page cache, so the program measures the speed of resharding, not of the disk; each measured time
includes a `sync`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from plugins.sealed_checkpoint.plan import checksum  # noqa: E402
from tools.checkpoint.stored import ADAM  # noqa: E402
from tools.recipe.load import Recipe, load_recipe  # noqa: E402
from tools.weights.reshard import folder_in, reshard  # noqa: E402
from tools.weights.reshard_plan import plan_stored  # noqa: E402
from tools.weights.reshard_target import target_of  # noqa: E402
from tools.weights.source import open_source  # noqa: E402

ROUNDS = 3
SEALED = "copy, then sha256"  # what a copy would have to do that is as safe
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_stage": 2, "data_parallel": 1, "model_parallel": 1, "expert_parallel": 1},
    "tp4 ep4": {"pipeline_stage": 1, "data_parallel": 1, "model_parallel": 4, "expert_parallel": 4},
    "dp8, optimizer sharded": {"pipeline_stage": 1, "data_parallel": 8, "model_parallel": 1, "expert_parallel": 4},
}


def recipe_of(layout: str, layers: int) -> Recipe:
    """Return the 105B's recipe with smaller sizes in one of LAYOUTS."""
    recipe = load_recipe(ROOT / "recipes" / "telechat3_105b" / "pretrain_4k.yaml")
    recipe["model"]["model_config"] |= {"num_hidden_layers": layers, "n_routed_experts": 16, "vocab_size": 4096}
    recipe["model"]["model_config"] |= {"hidden_size": 512, "intermediate_size": 2048}
    recipe["model"]["model_config"] |= {"offset": 0, "pp_interleave_num": 1, "first_k_dense_replace": 1}
    recipe["parallel_config"] |= {"context_parallel": 1, "micro_batch_num": 2} | LAYOUTS[layout]
    recipe["parallel"]["enable_parallel_optimizer"] = "sharded" in layout
    recipe["parallel"]["pipeline_config"] = {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"}
    return recipe


def draw(folder: Path, recipe: Recipe) -> None:
    """Write random weights and moments in the form in which one process saves them."""
    numbers = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    weights = {name: np.resize(numbers, placed.shape) for name, placed in target_of(recipe).weights.items()}
    folder.mkdir(parents=True)
    save_file(weights, folder / "mini-model-0000000-0000001.safetensors")
    save_file({f"{each}{name}": array for name, array in weights.items() for each in ADAM},
              folder / "mini-opt-0000000-0000001.safetensors")  # fmt: skip
    (folder / "common.json").write_text(json.dumps({"step_num": 1}))


def once(source: Path, target: Path, layout: str, layers: int, workers: int) -> Path:
    """Reshard one checkpoint to another layout, and return the folder of the new iteration."""
    shutil.rmtree(target, ignore_errors=True)
    opened = open_source(source)
    reshard(opened, target, plan_stored(opened, recipe_of(layout, layers)).plan, workers)
    subprocess.run(["sync"], check=True)
    return folder_in(target, opened)


def copied(source: Path, target: Path) -> None:
    """Copy the folder by `cp`, as the baseline."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync"], check=True)


def own_peak() -> int:
    """Return the largest number of bytes that this process had in memory, without its children and its parent."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def timed(work: Any) -> float:
    """Return the seconds that one call of `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Write to this folder.  [default: a temporary one]")
@click.option("--layers", default=2, show_default=True)
@click.option("--workers", default=1, show_default=True)
@click.option("--peak", hidden=True, nargs=3)
def main(folder: Path | None, layers: int, workers: int, peak: tuple[str, str, str] | None) -> None:
    """Print a line for the copy and for each way."""
    if peak:  # a process of its own, for its memory
        before = own_peak()
        once(Path(peak[0]), Path(peak[1]), peak[2], layers, 1)
        print(before, own_peak())
        return
    with tempfile.TemporaryDirectory(dir=folder) as place:
        root = Path(place)
        draw(root / "one" / "checkpoint" / "iteration_00000001", recipe_of("pp2", layers))
        source = once(root / "one" / "checkpoint" / "iteration_00000001", root / "pp2", "pp2", layers, 1)
        shutil.rmtree(root / "one")
        numbers = plan_stored(open_source(source), recipe_of("tp4 ep4", layers)).numbers
        print(f"{numbers.bytes / 1e9:.2f} GB, largest slice {numbers.largest_slice / 1e9:.2f} GB, {workers} workers")
        ways = {name: source for name in LAYOUTS if name != "pp2"} | {"back to pp2": root / "tp4_ep4"}
        seconds: dict[str, list[float]] = {name: [] for name in ("copy", SEALED, *ways)}
        for _ in range(ROUNDS):
            seconds["copy"].append(timed(lambda: copied(source, root / "copy")))
            files = sorted((root / "copy").iterdir())
            hashing = timed(lambda f=files: [checksum(each) for each in f])
            seconds[SEALED].append(seconds["copy"][-1] + hashing)
            shutil.rmtree(root / "copy")
            for name, given in ways.items():
                layout, target = name.removeprefix("back to "), root / name.replace(" ", "_").replace(",", "")
                old = next(given.rglob("iteration_*"), given)
                seconds[name].append(timed(lambda o=old, t=target, n=layout: once(o, t, n, layers, workers)))
                if name != "tp4 ep4":
                    shutil.rmtree(target)
        for name, all_of in seconds.items():
            middle = median(all_of)
            ratio = median(seconds["copy"]) / middle
            speed = numbers.bytes / 1e9 / middle
            print(f"{name:24s} {middle:6.2f} s  {speed:5.2f} GB/s  {ratio:.2f}x of a copy's speed")
        for name in ("tp4 ep4", "dp8, optimizer sharded"):
            words = [sys.executable, __file__, "--layers", layers, "--peak", source, root / "peak", name]
            said = subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout
            before, most = map(int, said.split())
            print(f"peak memory to {name}: {most / 1e6:,.0f} MB, of which {before / 1e6:,.0f} before anything is read")


if __name__ == "__main__":
    main()
