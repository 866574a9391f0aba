"""This module compares two recipes in the six stages of Figure 1 of the TeleChat3-MoE report, up to the first that
fails.

On the last stage each recipe trains with its own workers; if one splits its model, both run as MindSpore's sharded
graph, in which every layout starts from the same weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plugins.errors import RecipeError
from tools.accuracy.align import config as align_config
from tools.accuracy.align import sides as align_sides
from tools.accuracy.align import stages as align_stages
from tools.accuracy.align.config import LAYOUT, MAY
from tools.accuracy.align.sides import Record, in_hugging_face_names, rope_dimensions
from tools.accuracy.align.stages import FAILED, LOSS, NONE, PASSED, UNDECIDED, Row, Stage
from tools.accuracy.equivalence.runs import read_steps
from tools.accuracy.equivalence.sharding import NEVER_CLIPPED
from tools.accuracy.judge import plain
from tools.accuracy.reference.start import Hyper, hyper_of, initial_weights, nudged
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini_strategy import WORKERS
from tools.recipe.override import apply_overrides
from tools.recipe.view import MODEL, View
from tools.schema.stages import loss_rank
from tools.weights.hugging_face_names import to_mindformers

MORE_DEVICES = "more devices"
NOT_RUN, SAME = "not run", "same"
_MTP = ("num_nextn_predict_layers", "mtp_num_layers")
_TC3 = "from launch.cli import main; main()"
ALIGNED, SAME_NUMBERS, NOT_COMPARED, NOT_ALIGNED = "aligned", "same settings", "not compared", "not aligned"
STAGES = ("configuration", "forward", "backward", "optimizer", "steps", MORE_DEVICES)
Say = Callable[[str], None]
STYLES = {PASSED: "green", FAILED: "bold red", UNDECIDED: "yellow"}
VERDICTS = {
    ALIGNED: "aligned",
    SAME_NUMBERS: "nothing was run: no setting differs that could change a number",
    NOT_COMPARED: "not compared: settings differ that may change rounding, and CPU runs nothing that they change",
    NOT_ALIGNED: "not aligned",
}
BY_ROUNDING = "differ no more than the reference does from itself when its weights change in the last place"
BY_A_TIE = "differ by more than rounding, but by no more than a choice of an expert that moved at a tie may do"
MOST = 8  # rows of a failed stage that are printed


def split_model(
    paths: Sequence[Path], overrides: tuple[str, ...], data: str | None, steps: int
) -> tuple[list[Recipe], str] | None:
    """Return two recipes for MindSpore's sharded graph on CPU, and a sentence that says how they differ from those
    given; return None if neither given recipe splits its model over ranks. A recipe for Ascend becomes its mini recipe
    with the same kinds of parallelism, and a single recipe is compared with one process that runs the same graph.

    What MindFormers computes differently in other layouts is switched off on both sides (docs/stock-differences.md).
    """
    as_written = [View(apply_overrides(load_recipe(path), overrides)) for path in paths]
    split = [view.parallel and view.tp * view.pp * view.cp > 1 for view in as_written]
    if not any(split):
        return None
    recipes = [
        _sharded(align_sides.load(path, overrides, data, steps, WORKERS if one else None))
        for path, one in zip(paths, split, strict=True)
    ]
    if len(recipes) == 1:
        recipes.append(_sharded(Recipe(align_sides.on_one_worker(recipes[0], steps))))
    views = [View(recipe) for recipe in recipes]
    told = ["the sharded graph on " + " and ".join(_processes(view) for view in views)]
    if any(view.dp * view.cp * view.micro_batches * view.accumulation > 1 for view in views):
        told.append("without the auxiliary loss, which MindFormers takes over each rank's and micro-batch's own tokens")
        for recipe in recipes:
            recipe["model"]["model_config"]["moe_aux_loss_coeff"] = 0.0
    if any(view.pp > 1 and any(view.get((*MODEL, key)) for key in _MTP) for view in views):
        told.append("without clipping, whose norm counts the embedding of a pipeline with MTP twice")
        for recipe in recipes:
            recipe["runner_wrapper"].update(use_clip_grad=True, max_grad_norm=NEVER_CLIPPED)
    return recipes, "; ".join(told)


def _processes(view: View) -> str:
    degrees = {"tp": view.tp, "pp": view.pp, "dp": view.dp, "cp": view.cp, "ep": view.ep}
    split = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    return f"{view.devices} process{'es' * (view.devices > 1)}" + f" ({split})" * bool(split)


def _sharded(recipe: Recipe) -> Recipe:
    sharded = copy.deepcopy(recipe)
    dp = View(recipe).dp
    sharded["use_parallel"] = True
    sharded["context"]["dataset_broadcast_opt_level"] = 0  # otherwise some ranks read no data
    rows = [[dp, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)]
    sharded["parallel"].update(parallel_mode=1, gradients_mean=False, dataset_strategy=rows)
    sharded["model"]["model_config"].update(compute_dtype="float32", params_dtype="float32")
    return sharded


def _more_devices(recipe: Recipe, other: Recipe | None, wanted: Wanted, say: Say) -> Stage:
    """Return stage 6, in which both recipes train with their own workers; raise SideFailedError if a side fails."""
    steps, about = wanted.steps, ""
    paths = [wanted.path] if other is None else [wanted.path, Path(wanted.against)]
    if split := split_model(paths, wanted.overrides, wanted.data, steps):
        sides, about = split
    else:  # as they are; one worker beside a single recipe
        sides = [recipe, Recipe(align_sides.on_one_worker(recipe, steps)) if other is None else other]
    counts = [View(side).devices for side in sides]
    if max(counts) == 1:
        reason = "both sides train on one CPU worker; give with --against a recipe of another layout"
        return Stage(MORE_DEVICES, state=NOT_RUN, reason=reason)
    if align_sides.numbers(sides[0]) == align_sides.numbers(sides[1]):
        reason = "on CPU the two recipes run the same training, also with all workers"
        return Stage(MORE_DEVICES, state=SAME, reason=reason)
    losses = []
    for name, side, count in zip(("layout_ours", "layout_theirs"), sides, counts, strict=True):
        say(f"training on {count} worker{'s' * (count > 1)}")
        losses.append(_train(side, wanted.folder / name, steps))
    rows = [
        Row(f"loss of step {step}", abs(one - two), LOSS, "|difference|")
        for step, (one, two) in enumerate(zip(*losses, strict=True), 1)
    ]
    stage = Stage(MORE_DEVICES, rows)
    told = [align_stages.explain_curve(stage)] if stage.status == FAILED else []
    stage.reason = "; ".join([*told, *filter(None, [about])])
    return stage


def _train(recipe: Recipe, folder: Path, steps: int) -> list[float]:
    """Return the losses of the first steps of a training by `tc3 train`."""
    folder.mkdir(parents=True, exist_ok=True)
    dump_recipe(align_sides.shortened(recipe, steps), folder / "recipe_in.yaml")
    command = [sys.executable, "-c", _TC3, "train", str(folder / "recipe_in.yaml")]
    try:
        align_sides.start([*command, "--run-dir", str(folder / "run"), "--force"], folder / "train.log", folder)
    except RecipeError as error:
        raise align_sides.SideFailedError(
            f"`tc3 train` refuses to train the recipe for the comparison: {error}"
        ) from None
    losses = [float(step["loss"]) for step in read_steps(folder / "run", loss_rank(View(recipe)))]
    if len(losses) != steps:
        raise align_sides.SideFailedError(f"the training in {folder / 'run'} recorded {len(losses)} of {steps} losses")
    return losses


@dataclass
class Comparison:
    """A `Comparison` is the result of comparing two recipes; `about` describes the trainings and the software."""

    ours: str
    theirs: str
    stages: list[Stage] = field(default_factory=list)
    settings: list[align_config.Setting] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return NOT_ALIGNED if a stage failed, and ALIGNED if trainings were compared and none failed. If nothing was
        trained, return SAME_NUMBERS if no setting differs that could change a number, and NOT_COMPARED otherwise.
        """
        if any(stage.status == FAILED for stage in self.stages):
            return NOT_ALIGNED
        if any(stage.status in (PASSED, UNDECIDED) for stage in self.stages if stage.name != STAGES[0]):
            return ALIGNED
        same = all(setting.kind == align_config.MAY for setting in self.settings)
        return SAME_NUMBERS if same else NOT_COMPARED

    @property
    def passed(self) -> bool:
        """Return whether the verdict is ALIGNED or SAME_NUMBERS."""
        return self.verdict in (ALIGNED, SAME_NUMBERS)

    @property
    def broken(self) -> bool:
        """Return whether a training of the comparison did not finish."""
        return any(stage.state == FAILED for stage in self.stages)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        names = ("ours", "theirs", "passed", "verdict", "about")
        stages = [
            {**{name: getattr(stage, name) for name in ("name", "status", "reason")},
             "rows": [{**plain(row), "status": row.status} for row in stage.rows]}
            for stage in self.stages
        ]  # fmt: skip
        told = {name: getattr(self, name) for name in names}
        return {**told, "settings": [vars(setting) for setting in self.settings], "stages": stages}


@dataclass(frozen=True)
class Wanted:
    """A `Wanted` holds the arguments of `tc3 accuracy align`."""

    path: Path
    against: str  # `hf`, or the path of another recipe
    steps: int  # of stages 5 and 6
    overrides: tuple[str, ...]
    data: str | None  # the path prefix of a Megatron corpus that replaces the recipe's
    folder: Path  # of the training runs
    python: str  # the interpreter that runs the reference
    seed: int = 0  # of the weights with which both trainings start


def compare_stages(wanted: Wanted, say: Say) -> Comparison:
    """Compare a recipe with its reference, stage by stage, up to the first stage that fails, and tell `say` what runs.
    A stage whose training fails counts as failed; a wrong input raises TC3Error.
    """
    comparison = Comparison(str(wanted.path), "Hugging Face DeepseekV3" if wanted.against == "hf" else wanted.against)
    if align_sides.is_mini(wanted.path):
        comparison.about["size"] = "the recipe is for Ascend: its CPU mini was run, as `tc3 train --mini` makes it"
    try:
        (_against_reference if wanted.against == "hf" else _against_recipe)(comparison, wanted, say)
    except align_sides.SideFailedError as error:
        comparison.stages.append(
            Stage(STAGES[len(comparison.stages)], state=FAILED, reason=f"its run broke down: {error}")
        )
    done = {stage.name for stage in comparison.stages}
    stopped = next((stage.name for stage in comparison.stages if stage.status == FAILED), "")
    comparison.stages += [
        Stage(name, state=NOT_RUN, reason=f"{stopped} failed") for name in STAGES if name not in done and stopped
    ]
    return comparison


def _against_reference(comparison: Comparison, wanted: Wanted, say: Say) -> None:
    """Compare MindFormers and Hugging Face: the same recipe in two frameworks."""
    recipe = align_sides.load(wanted.path, wanted.overrides, wanted.data, wanted.steps)
    plain = align_sides.on_one_worker(recipe, wanted.steps)
    sizes, hyper = align_sides.reference_sizes(plain), hyper_of(plain, wanted.steps)
    align_sides.find_torch(wanted.python)  # not for a recipe that the reference cannot express
    align_config.corpus_checksum(recipe)
    expressed = [Row(key, 0, NONE, "as the recipe", detail=str(value)) for key, value in sizes.hf.items()]
    comparison.stages.append(Stage(STAGES[0], expressed))  # what cannot be expressed has been refused above
    comparison.about["reference"] = (
        f"DeepseekV3Config, and beyond it: epsilon {sizes.latent_eps:g} in latent attention, {sizes.mtp_layers} MTP "
        f"layer, balance loss {sizes.aux_coefficient:g}, router bias moved by {sizes.bias_rate:g} a step"
    )
    weights = initial_weights(sizes, wanted.seed)
    say("MindFormers: compiling and training")
    ours = align_sides.run_mindformers(plain, wanted.folder / "ours", hyper, to_mindformers(weights, sizes))
    ours = in_hugging_face_names(ours, sizes)
    say("Hugging Face: training, twice")
    theirs = align_sides.run_reference(
        wanted.python, wanted.folder / "reference", sizes, hyper, weights, ours.batch, ours
    )
    # the distance of a second run, from weights that differ in the last bit, shows the effect of rounding
    floor = align_sides.run_reference(
        wanted.python, wanted.folder / "rounding", sizes, hyper, nudged(weights), ours.batch
    )
    comparison.about.update(theirs.about)
    compare_records(comparison, ours, theirs, floor, hyper, rope_dimensions(plain))
    if comparison.stages[-1].status != FAILED:
        comparison.stages.append(_more_devices(recipe, None, wanted, say))


def _against_recipe(comparison: Comparison, wanted: Wanted, say: Say) -> None:
    """Compare two recipes with MindFormers: settings at their own size, results at a size for a CPU."""
    paths = wanted.path, Path(wanted.against)
    comparison.stages.append(_configuration(comparison, paths, wanted))
    if comparison.stages[-1].status == FAILED:
        return
    recipe, other = (align_sides.load(path, wanted.overrides, wanted.data, wanted.steps) for path in paths)
    sides = [align_sides.on_one_worker(side, wanted.steps) for side in (recipe, other)]
    if align_sides.numbers(sides[0], "parallel") == align_sides.numbers(sides[1], "parallel"):
        reason = f"on one device the {'minis of the ' * align_sides.is_mini(wanted.path)}two recipes are the same"
        comparison.stages += [Stage(name, state=SAME, reason=reason) for name in STAGES[1:5]]
    else:
        align_config.corpus_checksum(recipe)
        hyper = hyper_of(sides[0], wanted.steps)
        say(f"{wanted.path}: compiling and training")
        ours = align_sides.run_mindformers(sides[0], wanted.folder / "ours", hyper, None)
        say(f"{wanted.against}: compiling and training")
        theirs = align_sides.run_mindformers(sides[1], wanted.folder / "theirs", hyper, ours.initial)
        compare_records(comparison, ours, theirs, None, hyper, rope_dimensions(sides[0]))
    if comparison.stages[-1].status != FAILED:
        comparison.stages.append(_more_devices(recipe, other, wanted, say))


def _configuration(comparison: Comparison, paths: tuple[Path, Path], wanted: Wanted) -> Stage:
    """Return stage 1, of the recipes as they are written, because mini recipes have settings of their own."""
    ours, theirs = (align_sides.changed(load_recipe(path), wanted.overrides, wanted.data) for path in paths)
    comparison.settings = align_config.differences(ours, theirs)
    wrong = [setting for setting in comparison.settings if setting.kind in (align_config.MUST, align_config.UNKNOWN)]
    rows = [Row(setting.path, 1, NONE, setting.kind, detail=f"{setting.ours} | {setting.theirs}: {setting.meaning}")
            for setting in wrong]  # fmt: skip
    stage = Stage(STAGES[0], rows or [Row("settings that must match", 0, NONE, "differ")])
    if rows:
        stage.reason = f"{len(rows)} settings differ that must match, or whose effect is not known"
    return stage


def compare_records(
    comparison: Comparison, ours: Record, theirs: Record, floor: Record | None, hyper: Hyper, rope: int
) -> None:
    """Compare the records of two trainings in stages 2 to 5, and stop after the first stage that fails."""
    for compare, explain in (
        (align_stages.forward, lambda stage: align_stages.explain_forward(stage, ours, theirs, rope)),
        (align_stages.backward, lambda stage: align_stages.explain_backward(stage, ours, theirs)),
        (align_stages.update, lambda stage: align_stages.explain_update(stage, ours, theirs, hyper)),
        (align_stages.curve, align_stages.explain_curve),
    ):
        stage = compare(ours, theirs, floor)
        comparison.stages.append(stage)
        if stage.status == FAILED:
            stage.reason = explain(stage)
            return


def failed_text(row: Row) -> str:
    """Return one line about a comparison that failed."""
    if row.counted and row.detail:
        return f"{row.name}: {row.detail} ({row.measure})"
    if row.counted:
        return f"{row.name}: {row.error:.0f} {row.measure}, but there must be none"
    return f"{row.name}: {row.error:.3g} ({row.measure}; at most {row.tolerance:g}) {row.detail}".rstrip()


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Write the result of the alignment to `console`."""
    console.print(f"{comparison.ours}  against  {comparison.theirs}", markup=False, soft_wrap=True)
    for key, value in comparison.about.items():
        console.print(f"{key}: {value}", style="dim", markup=False, soft_wrap=True)
    table = Table("stage", "status", "compared", "error", "tolerance", "rounding", "worst")
    for column in table.columns[:2]:
        column.no_wrap = True
    for number, stage in enumerate(comparison.stages, 1):
        style, worst = STYLES.get(stage.status, "dim"), stage.worst
        cells = ["", "", "", ""]
        if worst is not None and worst.error > 0:
            floor = f"{worst.floor:.1e}" if worst.floor else ""
            numbers = [f"{worst.error:.0f}", "0"] if worst.counted else [f"{worst.error:.1e}", f"{worst.tolerance:.0e}"]
            cells = [*numbers, floor, f"{worst.name} ({worst.measure})"]
        table.add_row(f"{number} {stage.name}", f"[{style}]{stage.status}[/]", str(len(stage.rows) or ""), *cells)
    console.print(table)
    for stage in comparison.stages:
        if stage.reason:
            style = "red" if stage.status == FAILED else "dim"
            console.print(f"{stage.name}: {stage.reason}", style=style, markup=False, soft_wrap=True)
        failed = [row for row in stage.rows if row.status == FAILED]
        for row in sorted(failed, key=lambda row: -row.error)[:MOST]:
            console.print(f"  {failed_text(row)}", style="red", markup=False, soft_wrap=True)
    for setting in [setting for setting in comparison.settings if setting.kind in (LAYOUT, MAY)]:
        text = f"{setting.kind}: {setting.path}: {setting.ours} | {setting.theirs} ({setting.meaning})"
        console.print(text, style="dim", markup=False, soft_wrap=True)
    undecided = [row for stage in comparison.stages for row in stage.rows if row.status == UNDECIDED]
    for rows, words in (([row for row in undecided if row.rounding], BY_ROUNDING),
                        ([row for row in undecided if not row.rounding], BY_A_TIE)):  # fmt: skip
        if rows:
            text = f"undecided: {len(rows)} numbers {words} (largest: {max(rows, key=lambda row: row.error).name})"
            console.print(text, style="yellow", markup=False, soft_wrap=True)
    told = VERDICTS[comparison.verdict] + ", but for what is undecided" * bool(comparison.passed and undecided)
    console.print(told, style="green" if comparison.passed else "bold red", soft_wrap=True)
