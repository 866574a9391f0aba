"""The report's Figure 1 as a ladder (section 3.2.1): configuration, forward, backward, optimizer, steps, more devices.

It stops at the first rung that fails, and looks there for the first thing that differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.accuracy import align_bisect, align_compare, align_config, align_recipe, align_sides
from tools.accuracy.align_compare import FAILED, LOSS, Row, Rung
from tools.accuracy.align_record import Record, in_hugging_face_names, read_metrics
from tools.accuracy.reference.hyper import Hyper, hyper_of
from tools.accuracy.reference.weights import initial_weights
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe

NOT_RUN, SAME = "not run", "same"
RUNGS = ("configuration", "forward", "backward", "optimizer", "steps", "more devices")
_TC3 = "from launch.cli import main; main()"
Say = Callable[[str], None]


@dataclass
class Ladder:
    """What came out. settings: rung 1's differences. about: what ran, with versions."""

    ours: str
    theirs: str
    rungs: list[Rung] = field(default_factory=list)
    settings: list[align_config.Setting] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """No rung failed; a rung that was not run is said, and does not fail."""
        return all(rung.status != FAILED for rung in self.rungs)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ours": self.ours,
            "theirs": self.theirs,
            "passed": self.passed,
            "about": self.about,
            "settings": [vars(setting) for setting in self.settings],
            "rungs": [
                {
                    "name": rung.name,
                    "status": rung.status,
                    "reason": rung.reason,
                    "rows": [{**vars(row), "status": row.status} for row in rung.rows],
                }
                for rung in self.rungs
            ],
        }


@dataclass(frozen=True)
class Wanted:
    """What to align.

    Args:
        path: the recipe. against: `hf`, or another recipe's path. steps: of rungs 5 and 6.
        overrides: for both recipes. data: a Megatron prefix instead of the recipe's; folder: for the runs' files.
        python: interpreter of the reference. seed: of the weights that both sides start from.
    """

    path: Path
    against: str
    steps: int
    overrides: tuple[str, ...]
    data: str | None
    folder: Path
    python: str
    seed: int = 0


def climb(wanted: Wanted, say: Say) -> Ladder:
    """Run the ladder; `say` is told what is being done."""
    recipe = align_recipe.load(wanted.path, wanted.overrides, wanted.data, wanted.steps)
    if wanted.against == "hf":
        align_sides.find_torch(wanted.python)
    ladder = Ladder(str(wanted.path), "Hugging Face DeepseekV3" if wanted.against == "hf" else wanted.against)
    if align_recipe.is_mini(wanted.path):
        ladder.about["size"] = "the recipe is for Ascend: its CPU mini was run, as `tc3 train --mini` makes it"
    if wanted.against == "hf":
        _against_reference(ladder, recipe, wanted, say)
    else:
        _against_recipe(ladder, recipe, wanted, say)
    done = {rung.name for rung in ladder.rungs}
    stopped = next((rung.name for rung in ladder.rungs if rung.status == FAILED), "")
    ladder.rungs += [
        Rung(name, state=NOT_RUN, reason=f"{stopped} failed") for name in RUNGS if name not in done and stopped
    ]
    return ladder


def _against_reference(ladder: Ladder, recipe: Recipe, wanted: Wanted, say: Say) -> None:
    """MindFormers and Hugging Face: the same recipe in two frameworks."""
    align_config.corpus_checksum(recipe)
    plain = align_recipe.alone(recipe, wanted.steps)
    sizes, hyper = align_recipe.reference_sizes(plain), hyper_of(plain, wanted.steps)
    expressed = [Row(key, 0, 0.5, "as the recipe", detail=str(value)) for key, value in sizes.hf.items()]
    ladder.rungs.append(Rung(RUNGS[0], expressed))  # what cannot be expressed has been refused above
    ladder.about["reference"] = (
        f"DeepseekV3Config, and beyond it: epsilon {sizes.latent_eps:g} in latent attention, {sizes.mtp_layers} MTP "
        f"layer, balance loss {sizes.aux_coefficient:g}, router bias moved by {sizes.bias_rate:g} a step"
    )
    weights = initial_weights(sizes, wanted.seed)
    say("MindFormers: compiling and training")
    given = align_sides.weights_for_mindformers(weights, sizes)
    ours = align_sides.run_mindformers(plain, wanted.folder / "ours", hyper, given)
    ours = in_hugging_face_names(ours, sizes)
    say("Hugging Face: training, twice")
    theirs, floor = align_sides.reference_and_floor(wanted.python, wanted.folder, sizes, hyper, weights, ours)
    ladder.about.update(theirs.about)
    compare_records(ladder, ours, theirs, floor, hyper, align_recipe.rope_dimensions(plain))
    if ladder.passed:
        ladder.rungs.append(_more_devices(recipe, None, wanted, say))


def _against_recipe(ladder: Ladder, recipe: Recipe, wanted: Wanted, say: Say) -> None:
    """Two recipes, both by MindFormers."""
    other = align_recipe.load(Path(wanted.against), wanted.overrides, wanted.data, wanted.steps)
    settings = align_config.differences(recipe, other)
    ladder.settings = align_config.same_content(settings, recipe, other)
    rows = [Row(setting.path, 1, 0.5, setting.kind, detail=f"{setting.ours} | {setting.theirs}: {setting.meaning}")
            for setting in ladder.settings if setting.kind != align_config.MAY]  # fmt: skip
    rung = Rung(RUNGS[0], rows or [Row("settings that must match", 0, 0.5, "differ")])
    if rung.status == FAILED:
        rung.reason = f"{len(rows)} settings differ that must match, or that nobody has classified"
    ladder.rungs.append(rung)
    if rung.status == FAILED:
        return
    sides = [align_recipe.alone(side, wanted.steps) for side in (recipe, other)]
    if _numbers(sides[0]) == _numbers(sides[1]):
        reason = "on one device the two recipes are the same"
        ladder.rungs += [Rung(name, state=SAME, reason=reason) for name in RUNGS[1:5]]
    else:
        hyper = hyper_of(sides[0], wanted.steps)
        say(f"{wanted.path}: compiling and training")
        ours = align_sides.run_mindformers(sides[0], wanted.folder / "ours", hyper, None)
        say(f"{wanted.against}: compiling and training")
        theirs = align_sides.run_mindformers(sides[1], wanted.folder / "theirs", hyper, ours.initial)
        compare_records(ladder, ours, theirs, None, hyper, align_recipe.rope_dimensions(sides[0]))
    if ladder.passed:
        ladder.rungs.append(_more_devices(recipe, other, wanted, say))


def compare_records(
    ladder: Ladder, ours: Record, theirs: Record, floor: Record | None, hyper: Hyper, rope: int
) -> None:
    """Rungs 2 to 5, up to the first that fails."""
    explain: dict[str, Callable[[Rung], str]] = {
        "forward": lambda rung: align_bisect.explain_forward(rung, ours, theirs, rope),
        "backward": lambda rung: align_bisect.explain_backward(rung, ours, theirs),
        "optimizer": lambda rung: align_bisect.explain_update(rung, ours, theirs, hyper),
        "steps": align_bisect.explain_curve,
    }
    for compare in (align_compare.forward, align_compare.backward, align_compare.update, align_compare.curve):
        rung = compare(ours, theirs, floor)
        ladder.rungs.append(rung)
        if rung.status == FAILED:
            rung.reason = explain[rung.name](rung)
            return


def _more_devices(recipe: Recipe, other: Recipe | None, wanted: Wanted, say: Say) -> Rung:
    """Rung 6: the recipes as they are, each from its own seed, by their losses."""
    sides = [recipe, other if other is not None else Recipe(align_recipe.alone(recipe, wanted.steps))]
    counts = [align_recipe.workers(side) for side in sides]
    if max(counts) == 1:
        reason = "one worker on both sides; give a recipe of another layout by --against"
        return Rung(RUNGS[5], state=NOT_RUN, reason=reason)
    losses = []
    for name, side, count in zip(("layout_ours", "layout_theirs"), sides, counts, strict=True):
        say(f"training on {count} worker{'s' * (count > 1)}")
        losses.append(_train(side, wanted.folder / name, wanted.steps))
    rows = [Row(f"loss of step {step}", abs(one - two), LOSS, "|difference|")
            for step, (one, two) in enumerate(zip(*losses, strict=True), 1)]  # fmt: skip
    rung = Rung(RUNGS[5], rows)
    if rung.status == FAILED:
        rung.reason = align_bisect.explain_curve(rung)
    elif align_recipe.is_mini(wanted.path):
        rung.reason = "tensor and pipeline parallel do not execute on CPU: they were not compared"
    return rung


def _train(recipe: Recipe, folder: Path, steps: int) -> list[float]:
    """Losses of the first steps by `tc3 train`, in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    dump_recipe(align_recipe.shortened(recipe, steps), folder / "recipe_in.yaml")
    command = [sys.executable, "-c", _TC3, "train", str(folder / "recipe_in.yaml")]
    align_sides.start([*command, "--run-dir", str(folder / "run"), "--force"], folder / "train.log", folder)
    return [float(step["loss"]) for step in read_metrics(folder / "run")]


def _numbers(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without what says where it writes."""
    return {key: value for key, value in recipe.items() if key not in ("output_dir", "checkpoint", "parallel")}
