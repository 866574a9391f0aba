"""The report's Figure 1 as a ladder (section 3.2.1): configuration, forward, backward, optimizer, steps, more devices.

It stops at the first rung that fails, and looks there for the first thing that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.accuracy.align import (
    bisect as align_bisect,
)
from tools.accuracy.align import (
    compare as align_compare,
)
from tools.accuracy.align import (
    config as align_config,
)
from tools.accuracy.align import (
    devices as align_devices,
)
from tools.accuracy.align import (
    recipe as align_recipe,
)
from tools.accuracy.align import (
    sides as align_sides,
)
from tools.accuracy.align.compare import FAILED, NONE, PASSED, UNDECIDED, Row, Rung
from tools.accuracy.align.devices import MORE_DEVICES, NOT_RUN, SAME
from tools.accuracy.align.record import Record, in_hugging_face_names
from tools.accuracy.reference.hyper import Hyper, hyper_of
from tools.accuracy.reference.weights import initial_weights
from tools.recipe.load import Recipe

ALIGNED, SAME_NUMBERS, NOT_COMPARED, NOT_ALIGNED = "aligned", "same settings", "not compared", "not aligned"
RUNGS = ("configuration", "forward", "backward", "optimizer", "steps", MORE_DEVICES)
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
    def verdict(self) -> str:
        """NOT_ALIGNED when a rung failed; ALIGNED when something ran and none did.

        Where nothing ran: SAME_NUMBERS when no setting differs that could change a number, NOT_COMPARED otherwise.
        """
        if any(rung.status == FAILED for rung in self.rungs):
            return NOT_ALIGNED
        if any(rung.status in (PASSED, UNDECIDED) for rung in self.rungs if rung.name != RUNGS[0]):
            return ALIGNED
        same = all(setting.kind == align_config.MAY for setting in self.settings)
        return SAME_NUMBERS if same else NOT_COMPARED

    @property
    def passed(self) -> bool:
        """Nothing failed, and what had to be compared was. A rung that was not run is said, and does not fail."""
        return self.verdict in (ALIGNED, SAME_NUMBERS)

    @property
    def broken(self) -> bool:
        """Whether a run did not come to its end: its rung has no rows."""
        return any(rung.state == FAILED for rung in self.rungs)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ours": self.ours,
            "theirs": self.theirs,
            "passed": self.passed,
            "verdict": self.verdict,
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
    """Run the ladder; `say` is told what is being done.

    Raises:
        TC3Error: a wrong input. A run that breaks down is a failed rung.
    """
    ladder = Ladder(str(wanted.path), "Hugging Face DeepseekV3" if wanted.against == "hf" else wanted.against)
    if align_recipe.is_mini(wanted.path):
        ladder.about["size"] = "the recipe is for Ascend: its CPU mini was run, as `tc3 train --mini` makes it"
    try:
        (_against_reference if wanted.against == "hf" else _against_recipe)(ladder, wanted, say)
    except align_sides.SideFailedError as error:
        ladder.rungs.append(Rung(RUNGS[len(ladder.rungs)], state=FAILED, reason=f"its run broke down: {error}"))
    done = {rung.name for rung in ladder.rungs}
    stopped = next((rung.name for rung in ladder.rungs if rung.status == FAILED), "")
    ladder.rungs += [
        Rung(name, state=NOT_RUN, reason=f"{stopped} failed") for name in RUNGS if name not in done and stopped
    ]
    return ladder


def _against_reference(ladder: Ladder, wanted: Wanted, say: Say) -> None:
    """MindFormers and Hugging Face: the same recipe in two frameworks."""
    recipe = align_recipe.load(wanted.path, wanted.overrides, wanted.data, wanted.steps)
    align_sides.find_torch(wanted.python)
    align_config.corpus_checksum(recipe)
    plain = align_recipe.alone(recipe, wanted.steps)
    sizes, hyper = align_recipe.reference_sizes(plain), hyper_of(plain, wanted.steps)
    expressed = [Row(key, 0, NONE, "as the recipe", detail=str(value)) for key, value in sizes.hf.items()]
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
    if ladder.rungs[-1].status != FAILED:
        ladder.rungs.append(_more_devices(recipe, None, wanted, say))


def _against_recipe(ladder: Ladder, wanted: Wanted, say: Say) -> None:
    """Two recipes, both by MindFormers: their settings at their own size, their numbers at a size that CPU runs."""
    paths = wanted.path, Path(wanted.against)
    ladder.rungs.append(_configuration(ladder, paths, wanted))
    if ladder.rungs[-1].status == FAILED:
        return
    recipe, other = (align_recipe.load(path, wanted.overrides, wanted.data, wanted.steps) for path in paths)
    sides = [align_recipe.alone(side, wanted.steps) for side in (recipe, other)]
    if align_recipe.numbers(sides[0], "parallel") == align_recipe.numbers(sides[1], "parallel"):
        reason = f"on one device the {'minis of the ' * align_recipe.is_mini(wanted.path)}two recipes are the same"
        ladder.rungs += [Rung(name, state=SAME, reason=reason) for name in RUNGS[1:5]]
    else:
        align_config.corpus_checksum(recipe)
        hyper = hyper_of(sides[0], wanted.steps)
        say(f"{wanted.path}: compiling and training")
        ours = align_sides.run_mindformers(sides[0], wanted.folder / "ours", hyper, None)
        say(f"{wanted.against}: compiling and training")
        theirs = align_sides.run_mindformers(sides[1], wanted.folder / "theirs", hyper, ours.initial)
        compare_records(ladder, ours, theirs, None, hyper, align_recipe.rope_dimensions(sides[0]))
    if ladder.rungs[-1].status != FAILED:
        ladder.rungs.append(_more_devices(recipe, other, wanted, say))


def _configuration(ladder: Ladder, paths: tuple[Path, Path], wanted: Wanted) -> Rung:
    """Rung 1: the recipes as they are written, not their minis, which have sizes, layout and precision of their own."""
    ours, theirs = (align_recipe.written(path, wanted.overrides, wanted.data) for path in paths)
    ladder.settings = align_config.differences(ours, theirs)
    wrong = [setting for setting in ladder.settings if setting.kind in (align_config.MUST, align_config.UNKNOWN)]
    rows = [Row(setting.path, 1, NONE, setting.kind, detail=f"{setting.ours} | {setting.theirs}: {setting.meaning}")
            for setting in wrong]  # fmt: skip
    rung = Rung(RUNGS[0], rows or [Row("settings that must match", 0, NONE, "differ")])
    if rows:
        rung.reason = f"{len(rows)} settings differ that must match, or that nobody has classified"
    return rung


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
    """Rung 6: the recipes as they are, by their losses."""
    paths = [wanted.path] if other is None else [wanted.path, Path(wanted.against)]
    sides = align_devices.split_model(paths, wanted.overrides, wanted.data, wanted.steps)
    sides = sides or align_devices.data_parallel(recipe, other, wanted.steps)
    return align_devices.train_and_compare(sides, wanted.steps, wanted.folder, say)
