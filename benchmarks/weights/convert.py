"""This program compares the speed of converting weights with a plain copy of the same bytes, and measures the memory.

    python benchmarks/weights/convert.py [--folder DIR] [--layers 3]

The model has layers of the 105B with a third of its experts; its weights are drawn once. Copies and conversions take
turns; the number after the direction of a conversion is its number of worker processes. All files are in the page
cache, so the program measures the speed of the conversion, not of the disk.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import click
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.recipe.load import load_recipe  # noqa: E402
from tools.weights.convert import convert  # noqa: E402
from tools.weights.convert_plan import model_of, plan_conversion  # noqa: E402
from tools.weights.hugging_face_names import hugging_face_shapes  # noqa: E402
from tools.weights.hugging_face_sizes import Sizes  # noqa: E402
from tools.weights.source import INDEX, open_source  # noqa: E402

ROUNDS = 3
WORKERS = (1, 2)
LIMIT = 500_000_000  # bytes of a file


def model(layers: int) -> Sizes:
    """Return the sizes of a model with `layers` layers of the 105B, 64 of its 192 experts and a small vocabulary."""
    sizes = model_of(load_recipe(ROOT / "recipes" / "telechat3_105b" / "pretrain_4k.yaml"))
    return replace(sizes, hf={**sizes.hf, "num_hidden_layers": layers, "n_routed_experts": 64, "vocab_size": 8192})


def draw(folder: Path, sizes: Sizes) -> int:
    """Write random bfloat16 weights into files of up to LIMIT bytes, and return the number of bytes written."""
    folder.mkdir(parents=True)
    where, group, filled, total = {}, {}, 0, 0
    numbers = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    for name, shape in hugging_face_shapes(sizes).items():
        group[name] = np.resize(numbers, shape)
        filled += group[name].nbytes
        total += group[name].nbytes
        if filled > LIMIT:
            where |= _file(folder, group, len(set(where.values())))
            group, filled = {}, 0
    where |= _file(folder, group, len(set(where.values())))
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return total


def _file(folder: Path, group: dict[str, np.ndarray], number: int) -> dict[str, str]:
    name = f"model-{number:05d}.safetensors"
    save_file(group, folder / name)
    return dict.fromkeys(group, name)


def timed(work) -> float:
    """Return the seconds that one call of `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def once(source: Path, target: Path, sizes: Sizes, workers: int = 1) -> None:
    """Convert the weights of one folder; with one worker the conversion runs in this process."""
    shutil.rmtree(target, ignore_errors=True)
    opened = open_source(source)
    to = "MindFormers" if opened.form == "Hugging Face" else "Hugging Face"
    convert(opened, target, plan_conversion(opened.headers, sizes, to, None, LIMIT), sizes, workers)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Write to this folder.  [default: a temporary one]")
@click.option("--layers", default=3, show_default=True)
@click.option("--peak", hidden=True, nargs=2, type=click.Path(path_type=Path))
def main(folder: Path | None, layers: int, peak: tuple[Path, Path] | None) -> None:
    """Print a line for the copy and for each way."""
    sizes = model(layers)
    if peak:  # a process of its own, for its memory
        once(peak[0], peak[1], sizes)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    with tempfile.TemporaryDirectory(dir=folder) as place:
        root = Path(place)
        total = draw(root / "hf", sizes)
        largest = max(2 * math.prod(shape) for shape in hugging_face_shapes(sizes).values())
        print(f"{total / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB, files of {LIMIT / 1e9:g} GB")
        ways = {f"{to}, {count}": count for count in WORKERS for to in ("to MindFormers", "to Hugging Face")}
        seconds: dict[str, list[float]] = {"copy": [], **{way: [] for way in ways}}
        for _ in range(ROUNDS):
            shutil.rmtree(root / "copy", ignore_errors=True)
            seconds["copy"].append(timed(lambda: subprocess.run(["cp", "-r", root / "hf", root / "copy"], check=True)))
            shutil.rmtree(root / "copy")
            for way, count in ways.items():
                source, target = ("hf", "ms") if "MindFormers" in way else ("ms", "back")
                seconds[way].append(timed(partial(once, root / source, root / target, sizes, count)))
        for what, all_of in seconds.items():
            middle = median(all_of)
            ratio = median(seconds["copy"]) / middle
            print(f"{what:18s} {middle:6.2f} s  {total / 1e9 / middle:5.2f} GB/s  {ratio:.2f}x of the copy's speed")
        for source, target in (("hf", "ms"), ("ms", "back")):
            shutil.rmtree(root / target)
            command = [sys.executable, __file__, "--layers", str(layers), "--peak", root / source, root / target]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            print(f"peak memory of {source} -> {target}: {int(said) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
