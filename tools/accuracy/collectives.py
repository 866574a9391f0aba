"""This module checks whether CPU processes, in the first step of a sharded training, execute the collectives that the
compiled graph of every rank has in the report of `tc3 dryrun`.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from plugins.errors import DataError, RecipeError, did_you_mean, not_json
from plugins.semi_auto_cpu.chosen import chosen
from plugins.semi_auto_cpu.collectives import CallRecord
from plugins.semi_auto_cpu.ranks import made_up_name
from tools.accuracy.equivalence.runs import callbacks_of, launch, make_corpus, refuse_other_data
from tools.check.check import require_sound
from tools.data.index import read_whole
from tools.dryrun.compiles import compile_all, diagnose
from tools.dryrun.executed import calls_file, compare_calls, wrong_places
from tools.dryrun.plan import plan_jobs, without_files
from tools.layout.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import CORPUS, load_mini
from tools.recipe.mini_strategy import WORKERS
from tools.recipe.override import apply_overrides
from tools.recipe.view import LOADER, View, look

STEPS = 2  # trained; the first one's collectives are compared
_LARGEST = 2**62  # of any number in a record
_WATCHERS = ("CheckpointMonitor",)
_LEFT_OUT = ("held_out_loss", "batch_ramp")  # their text is no made-up one; the dry run compiles the full batch
EQUAL, DIFFERS, UNKNOWN = "equal", "differs", "unknown"


def sharded_recipe(path: Path, overrides: tuple[str, ...]) -> Recipe:
    """Return the recipe in the file `path` with its overrides; for a recipe for Ascend, return its mini recipe with the
    same kinds of parallelism. Raise RecipeError for a wrong input, or if MindSpore would not shard the graph.
    """
    refuse_missing(path)
    recipe = load_recipe(path)
    if not View(recipe).on_cpu:
        recipe = load_mini(path, CORPUS, STEPS, WORKERS)
    recipe = resolve(apply_overrides(recipe, overrides))
    refuse_unsharded(recipe)
    refuse_other_data(recipe)
    require_sound(recipe, own_data=False)
    return recipe


def refuse_missing(path: Path) -> None:
    """Raise RecipeError if `path` does not exist and may be a misspelt folder of a run."""
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return
    try:
        around = [str(each) for each in path.parent.iterdir() if (each / "recipe.yaml").is_file()]
        around += [str(each) for each in path.parent.glob("*.y*ml")]
    except OSError:  # there is no such parent, or it may not be read
        around = []
    hint = did_you_mean(path, around)
    raise RecipeError(
        f"{path}: there is neither a recipe nor the folder of a run at this path{hint}; give a recipe or a run's folder"
    )


def refuse_unsharded(recipe: Recipe) -> None:
    """Raise RecipeError for a recipe that does not train as MindSpore's sharded graph on at least two processes."""
    if not chosen(recipe):
        wants = "context.device_target: CPU and parallel.parallel_mode: 1 (semi-auto parallel; docs/semi-auto-cpu.md)"
        raise RecipeError(
            f"{recipe.source}: there are no collectives of MindSpore to check, because on CPU MindSpore inserts them "
            f"only with {wants}"
        )
    if View(recipe).devices == 1:
        told = (
            "the recipe trains in one process, so there are no collectives to check; set use_parallel: True, and a "
            "degree of parallel_config above 1"
        )
        raise RecipeError(f"{recipe.source}: {told}")


def train(recipe: Recipe, folder: Path) -> Path:
    """Train `STEPS` steps on a made-up corpus, and return the folder of the run; raise RunFailedError if the training
    fails.
    """
    short = copy.deepcopy(recipe)
    view = View(recipe)
    loader = look(short, LOADER)
    steps = STEPS * -(-view.global_batch // view.batch)  # of one rank's samples, which `make_corpus` counts
    read_whole(loader["config"], make_corpus((folder / "corpus").absolute(), recipe, steps))
    loader["sizes"] = [STEPS * view.global_batch, 0, 0]
    short["train_dataset_task"]["dataset_config"] = short["train_dataset"]
    for name in _LEFT_OUT:
        if look(short, ("plugins", name)):
            short["plugins"][name] = False
    short["callbacks"] = [each for each in callbacks_of(short) if each["type"] not in _WATCHERS]
    short["checkpoint"] = {"save_path": "", "load_path": ""}
    launch(short, folder / "run")
    return folder / "run"


@dataclass(frozen=True)
class Verdict:
    """A `Verdict` says whether all ranks executed the collectives of the dry run; `why` holds the reason if this is
    UNKNOWN.
    """

    word: str
    why: str = ""
    # for each rank: the numbers of executed collectives and of their bytes, by operator, and a line for each difference
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as values for JSON."""
        return {"verdict": self.word, "why": self.why, "ranks": self.ranks}


def compare_run(run_dir: Path, at_once: int | None = None) -> Verdict:
    """Compile the recipe of a finished run for every rank, and compare the collectives in the compiled graphs with the
    collectives that the run executed. At most `at_once` ranks are compiled at the same time; if `at_once` is None, as
    many ranks as fit into memory are compiled at the same time.

    Raises:
        RecipeError: the folder is not that of a sharded run.
        DataError: a rank's record is missing or broken.
    """
    recipe = recipe_of_run(run_dir)
    view = View(recipe)
    executed = [read_record(run_dir, rank) for rank in range(view.devices)]
    if why := _not_comparable(view, executed):
        return Verdict(UNKNOWN, why)
    plan = plan_jobs(recipe, tuple(range(view.devices)), view.micro_batches)
    results = compile_all(plan, at_once, use_cache=True)
    refused = [result for result in results if "error" in result]
    if refused:
        why = f"the dry run of rank {refused[0]['rank']} was refused: {diagnose(*refused[0]['error'].values())}"
        return Verdict(UNKNOWN, why)
    if why := _lost_place(results, executed):
        return Verdict(UNKNOWN, why)
    ranks = []
    for result in results:
        rank = result["rank"]
        calls, places, _ = executed[rank]
        found = compare_calls(result["graph"], calls)
        wrong = wrong_places(result["graph"], rank, places) + found.calls + found.order
        names = dict(sorted(Counter(call.op for call in calls).items()))
        size = sum(call.bytes for call in calls)
        ranks.append({"rank": rank, "calls": len(calls), "bytes": size, "by_name": names, "differences": wrong})
    return Verdict(DIFFERS if any(rank["differences"] for rank in ranks) else EQUAL, "", ranks)


def _not_comparable(view: View, executed: list[Executed]) -> str:
    """Return why the records are not those of one step with the recipe's own batch; "" if they are."""
    steps = [record.step for record in executed]
    other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        return (
            f"rank 0 recorded step {steps[0]}, but rank {other} step {steps[other]}: the folder has the records of two "
            "trainings, of which one ended in its first step; train again"
        )
    samples = view.ramp.batch_at(steps[0])
    if samples != view.ramp.full:
        return (
            f"step {steps[0]} had {samples} samples by plugins.batch_ramp, but a dry run compiles the recipe's own "
            f"batch of {view.ramp.full}; train with --set plugins.batch_ramp=False"
        )
    return ""


def _lost_place(results: Sequence[Mapping[str, Any]], executed: list[Executed]) -> str:
    """Return which rank's record lacks its place in a group, though others of the group recorded theirs."""
    for ranks in sorted({tuple(group) for result in results for group in result["graph"]["groups"]}):
        known = [rank for rank in ranks if made_up_name(ranks) in executed[rank].places]
        if known and (lost := [rank for rank in ranks if rank not in known]):
            return (
                f"the record of rank {lost[0]} lacks its place in the group of ranks {', '.join(map(str, ranks))}, by "
                f"which it cuts weights; rank {known[0]} recorded its own; train again"
            )
    return ""


def recipe_of_run(run_dir: Path) -> Recipe:
    """Return the recipe of a run without keys that do not change its graph, so that runs share cached graphs; raise
    RecipeError if the run has no recipe, or if the recipe's graph is not sharded.
    """
    file = run_dir / "recipe.yaml"
    if not file.is_file():
        raise RecipeError(
            f"{run_dir}: the folder has no recipe.yaml; give a recipe, or the folder of a run (`tc3 train --run-dir`)"
        )
    recipe = load_recipe(file)
    refuse_unsharded(recipe)
    recipe = without_files(recipe)
    recipe.update(output_dir="", checkpoint={}, callbacks=[])
    for dataset in (recipe["train_dataset"], (recipe.get("train_dataset_task") or {}).get("dataset_config") or {}):
        if dataset:  # the trainer reads train_dataset where the task has none of its own
            dataset["data_loader"]["config"]["data_path"] = ["1", ""]
    return recipe


class Executed(NamedTuple):
    """An `Executed` holds the collectives of one rank's first step, in the format that `calls_file` describes."""

    calls: list[CallRecord]
    places: dict[str, int]
    step: int = 1


def read_record(run_dir: Path, rank: int) -> Executed:
    """Return the collectives of one rank's first step; raise DataError if its record is missing or damaged."""
    file = calls_file(run_dir, rank)
    if not file.is_file():
        raise DataError(
            f"{file}: the file is missing: either the rank did not finish its first step, or an older version of this "
            "repository trained the run; train again"
        )
    try:
        told = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: this is not a record of collectives: it {not_json(error)}; train again") from None
    if wrong := _wrong(told):
        raise DataError(f"{file}: this is not a record of collectives: {wrong}; train again")
    return Executed([CallRecord(*call) for call in told["calls"]], told["places"], told["step"])


def _wrong(told: Any) -> str:
    """Return the first property of a record that no run writes; "" if there is none."""
    if not isinstance(told, dict):
        return "it is not an object"
    if lacking := [key for key in ("step", "calls", "places") if key not in told]:
        return f"the key {lacking[0]} is missing"
    if not _is_count(told["step"]) or told["step"] < 1:
        return f"step is {_short(told['step'])}, but must be the number of a step"
    if not isinstance(told["places"], dict) or not all(map(_is_count, told["places"].values())):
        return f"places is {_short(told['places'])}, but must be an object of whole numbers by group"
    if not isinstance(told["calls"], list):
        return f"calls is {_short(told['calls'])}, but must be a list of calls"
    for place, call in enumerate(told["calls"]):
        if not _is_call(call):
            return f"calls[{place}] is {_short(call)}, but must be [{', '.join(CallRecord._fields)}]"
    return ""


def _is_call(call: Any) -> bool:
    if not isinstance(call, list) or len(call) != len(CallRecord._fields):
        return False
    one = CallRecord(*call)
    lists = all(isinstance(each, list) and all(map(_is_count, each)) for each in (one.ranks, one.shape))
    if not lists or not (isinstance(one.op, str) and isinstance(one.dtype, str) and _is_count(one.bytes)):
        return False
    if not all(each is None or _is_count(each) for each in (one.peer, one.sr_tag)):
        return False
    return one.peer is None or (one.peer in one.ranks and any(rank != one.peer for rank in one.ranks))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
