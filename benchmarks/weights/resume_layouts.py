"""This program continues a run on one layout after the other, and compares it with a run of the same steps on one
layout.

    python benchmarks/weights/resume_layouts.py [CHAIN ...]

data: dp1 -> dp2 -> ep4 -> dp1, data parallel on CPU (a dense, a MoE and an MTP layer). experts: ep2, with experts that
move, -> one worker -> ep2. sharded: tp2 -> pp2 -> dp2 with optimizer sharding -> tp2, MindSpore's sharded graph;
context: tp2 -> context parallel -> tp2, there. classes: one worker of this repository's CPU classes -> tp2 of the
sharded graph -> the one worker. By default all, ten steps each; `--resume CHECKPOINT` into a new folder each time.

At every step the losses must agree to 1e-6 (relative) with those of the run that never changes its layout, and global
norms to 1e-5. After the last step the weights and both of Adam's moments must agree, tensor by tensor, to 1e-5 of their
L2 norm, and the routers' biases must be equal.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.training import runs
from tests.training.conftest import prepare

STEPS = 10
LOSS, NORM, TENSOR = 1e-6, 1e-5, 1e-5  # relative
_SMALL = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}  # as tiny_ep2.yaml
_TINY = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}  # as tiny.yaml


@dataclass(frozen=True)
class Layout:
    """A `Layout` is a recipe of tests/training with changed keys; `rank` is a rank that records the loss."""

    base: str
    changes: dict[str, Any] = field(default_factory=dict)
    rank: int = 0

    def write(self, file: Path, last: int) -> Path:
        """Write a recipe for a run that ends with step `last`, and return its file."""
        always = {"lr_schedule": {"warmup_steps": 2}, "checkpoint": {"save_interleaved_steps": last}}
        content = {"base_config": str(runs.HERE / self.base), **always, **self.changes}
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return file


def _model(sizes: dict[str, int]) -> dict[str, Any]:
    return {"model": {"model_config": sizes}}


LAYOUTS = {
    "dp1": Layout("tiny.yaml"),
    "dp2": Layout("tiny_dp2.yaml"),
    "ep4": Layout("tiny_ep4.yaml", _model(_TINY)),
    "ep2": Layout("tiny_ep2.yaml"),
    "ep2 moving": Layout(
        "tiny_ep2.yaml", {"plugins": {"expert_balance": {"every": 1, "method": "random", "gate": 0.0}}}
    ),
    "one": Layout("tiny.yaml", {**_model(_SMALL), "plugins": {"expert_balance": {"every": 0}}}),
    "tp2": Layout("sharded_tp2.yaml"),
    "pp2": Layout("sharded_pp2.yaml", rank=1),
    "zero": Layout("sharded_zero.yaml"),
    "classes": Layout("tiny.yaml", _model({"num_nextn_predict_layers": 0, "moe_aux_loss_coeff": 0.0})),
    "cp2": Layout(
        "sharded.yaml", {"parallel_config": {"context_parallel": 2, "context_parallel_algo": "colossalai_cp"}}
    ),
}
CHAINS = {  # the layout that never changes, and the last step of each part of the run that does
    "data": ("dp1", (("dp1", 3), ("dp2", 5), ("ep4", 8), ("dp1", STEPS))),
    "experts": ("ep2", (("ep2 moving", 3), ("one", 6), ("ep2 moving", STEPS))),
    "sharded": ("tp2", (("tp2", 3), ("pp2", 5), ("zero", 8), ("tp2", STEPS))),
    "classes": ("classes", (("classes", 3), ("tp2", 6), ("classes", STEPS))),
    "context": ("tp2", (("tp2", 3), ("cp2", 6), ("tp2", STEPS))),
}


def train(folder: Path, corpus: Path, name: str, layout: str, last: int, resume: Path | None = None) -> Path:
    """Train a run, or a part of one from a checkpoint, and return its folder."""
    recipe = LAYOUTS[layout].write(folder / f"{name}.yaml", last)
    more = ["--resume", str(resume)] if resume else []
    runs.train(recipe, folder / name, corpus, "--steps", str(last), *more, within=1800)
    return folder / name


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoint" / f"iteration_{step:08d}"


def follow(folder: Path, corpus: Path, name: str) -> str:
    """Train both runs of a chain of layouts, and return a text that says how much they differ.

    Raises:
        AssertionError: further than they may be.
    """
    same, parts = CHAINS[name]
    never = train(folder, corpus, f"{name}_never", same, STEPS)
    expected, saved, done = runs.steps(never, LAYOUTS[same].rank), None, 0
    loss = norm = 0.0
    for number, (layout, last) in enumerate(parts):
        run = train(folder, corpus, f"{name}_{number}", layout, last, saved)
        found = runs.steps(run, LAYOUTS[layout].rank)
        assert sorted(found) == list(range(done + 1, last + 1)), f"{layout}: steps {sorted(found)}"
        for step, record in found.items():
            loss = max(loss, abs(record["loss"] / expected[step]["loss"] - 1))
            norm = max(norm, abs(record["global_norm"] / expected[step]["global_norm"] - 1))
        saved, done = checkpoint(run, last), last
    assert saved is not None
    tensors = runs.apart(checkpoint(never, STEPS), saved)
    bias = tensors.pop("expert_bias")
    said = f"losses {loss:.1e}, global norms {norm:.1e}, " + ", ".join(f"{k} {v:.1e}" for k, v in tensors.items())
    assert loss <= LOSS and norm <= NORM and max(tensors.values()) <= TENSOR and bias == 0, f"{said}, biases {bias}"
    return f"{said} (relative), routers' biases equal"


@click.command()
@click.argument("chains", nargs=-1, type=click.Choice(list(CHAINS)))
def main(chains: tuple[str, ...]) -> None:
    """Print how far each chain is from its run; the exit code is 1 where one is too far."""
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        for name in chains or CHAINS:
            began = time.monotonic()
            try:
                told = follow(folder, folder / "tiny", name)
            except AssertionError as error:
                told, wrong = f"DIFFERS: {error}", 1
            layouts = " -> ".join(f"{layout} to {last}" for layout, last in CHAINS[name][1])
            click.echo(f"{layouts}, against {CHAINS[name][0]}: {told} [{time.monotonic() - began:.0f} s]")
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
