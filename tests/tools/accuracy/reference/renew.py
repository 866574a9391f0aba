"""This module keeps in a file what Hugging Face computed for a small model, so that tests compare MindFormers with it
without torch.

`python -m tests.tools.accuracy.reference.renew --update` renews it (needs torch): it aligns the recipe first, and keeps
nothing of what does not align.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import click
import numpy as np

from plugins.errors import CheckpointError
from tools.accuracy.align.sides import Record
from tools.accuracy.reference.run import below, read
from tools.data.index import write_learnable
from tools.weights.hugging_face_sizes import Sizes

HERE = Path(__file__).resolve().parent / "golden"
RECIPE, FILE = HERE / "hf_mini.yaml", HERE / "hf_mini.npz"
STEPS, SEED = 20, 0
SAMPLES = 32  # elements kept of each gradient and update


def summary(record: Record, sizes: Sizes) -> dict[str, np.ndarray]:
    """Return the part of a record that the golden file keeps, in Hugging Face's names: a few elements and the norm of
    every large tensor.
    """
    moved = {name: record.updated[name] - record.initial[name] for name in record.initial}
    kept = {
        "sizes": np.array(json.dumps(sizes.as_json(), sort_keys=True)),
        "checksum/weights": np.array(checksum(record.initial)),
        "checksum/batches": np.array(checksum(record.batch)),
        "first_ids": record.batch["input_ids"][0].astype(np.int32),
        "logits": record.trace["logits"][:, ::8, ::16].astype(np.float32),
        "curve/loss": record.curve["loss"],
        "curve/global_norm": record.curve["global_norm"],
    }
    for kind, arrays in (("gradient", record.gradient), ("update", moved)):
        names = sorted(arrays)
        kept[f"{kind}/names"] = np.array(names)
        kept[f"{kind}/norms"] = np.array([np.linalg.norm(arrays[name]) for name in names], np.float32)
        kept[f"{kind}/samples"] = np.array([samples(name, arrays[name]) for name in names], np.float32)
    return kept


def checksum(arrays: dict[str, np.ndarray]) -> int:
    """Return the CRC-32 of the names, shapes and bits of all weights, in the order of their names."""
    total = 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total = zlib.crc32(f"{name}{array.shape}{array.dtype}".encode(), total)
        total = zlib.crc32(array.tobytes(), total)
    return total


def samples(name: str, array: np.ndarray) -> np.ndarray:
    """Return a fixed selection of an array's elements; a small array is returned whole, padded with zeros."""
    places = np.random.default_rng(zlib.crc32(name.encode())).permutation(array.size)[:SAMPLES]
    return np.pad(array.ravel()[places], (0, SAMPLES - len(places)))


def load() -> dict[str, np.ndarray]:
    return read(FILE)


@click.command()
@click.option(
    "--update",
    is_flag=True,
    required=True,
    help="Run Hugging Face's model again and overwrite the stored golden values.",
)
@click.option(
    "--reference-python",
    default=sys.executable,
    help="Run Hugging Face's model with this Python, which needs torch and transformers.",
)
def main(update: bool, reference_python: str) -> None:
    """Compute the golden values again and overwrite the stored file."""
    from tools.accuracy.align.comparison import Wanted, compare_stages
    from tools.accuracy.align.sides import load as load_recipe
    from tools.accuracy.align.sides import of_reference, on_one_worker, reference_sizes

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus = str(folder / "corpus")
        recipe = load_recipe(RECIPE, (), corpus, STEPS)
        write_learnable(Path(corpus), vocabulary_of(recipe))
        wanted = Wanted(RECIPE, "hf", STEPS, (), corpus, folder, reference_python, SEED)
        comparison = compare_stages(wanted, lambda text: click.echo(text, err=True))
        if not comparison.passed or any(stage.status == "undecided" for stage in comparison.stages):
            told = [(stage.name, stage.status, stage.reason) for stage in comparison.stages]
            raise CheckpointError(f"MindFormers does not agree with Hugging Face, so nothing was written: {told}")
        job = read(folder / "reference" / "job.npz")
        stored = read(folder / "reference" / "record.npz")
        record = of_reference(stored, below(job, "weights/"), below(job, "batch/"))
        about = np.array(json.dumps(comparison.about))
        np.savez_compressed(FILE, **summary(record, reference_sizes(on_one_worker(recipe, STEPS))), about=about)
    click.echo(f"written: {FILE} ({FILE.stat().st_size} bytes)")


def vocabulary_of(recipe: dict[str, Any]) -> int:
    return int(recipe["model"]["model_config"]["vocab_size"])


if __name__ == "__main__":
    main()
