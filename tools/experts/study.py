"""This module studies the recorded expert loads of a run, and the balance that each policy would have achieved under
these loads.

`open_run` finds what a report is about: the recorded loads of a run, and its recipe where there is one. `seconds_of`
predicts the seconds of a step whose experts load devices so unevenly, by the one estimator (`tools.estimate`). `study`
counts loads by layer and device, and replays the policies on them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from plugins.errors import DataError, RecipeError
from plugins.expert_balance.copies import NOTHING
from plugins.expert_balance.plan import bound, due
from plugins.expert_balance.record import Record, load_file, read
from plugins.expert_balance.replay import Replay, differences, eplb, eplb_ratios, replay, replay_policy
from plugins.expert_balance.settings import KEY, Settings
from plugins.expert_balance.settings import read as read_settings
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import UNKNOWN, cluster, known_error
from tools.estimate.from_recipe import from_recipe
from tools.estimate.loads import of_ratios, require_of
from tools.estimate.time_model import TimeModel
from tools.layout.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View

NONE, RECORDED = "experts stay", "as recorded"  # names of policies
RARE = 5  # times the steps between plans, for a policy that shows what waiting longer costs


@dataclass(frozen=True)
class Source:
    """A `Source` is the log of expert loads on which a report is made, with the recipe and settings of its run.

    Args:
        file: the file of `records`, by step. recipe: nothing in it is `auto`; None: not known.
        settings: the settings of the plugin in the recipe, or its defaults.
    """

    file: Path
    records: list[Record]
    recipe: Recipe | None
    settings: Settings


def open_run(place: Path, recipe: Path | None, say: Callable[[str], None]) -> Source:
    """Return the log at `place` (a run's folder or the file itself), with the recipe of the run.

    Args:
        recipe: to take instead of the run's own. say: told what `auto` became, and what was left out of the log.

    Raises:
        DataError: there is no such log, it is broken, or has other experts or layers than the recipe. RecipeError: the
            recipe is broken.
    """
    if not place.exists():
        raise DataError(
            f"{place}: there is no such run or file; give the folder of a run, or its metrics/expert_load.jsonl"
        )
    if place.suffix in (".yaml", ".yml"):
        raise DataError(f"{place}: a recipe holds no loads; give the folder of its run, or the run's expert_load.jsonl")
    file = load_file(place) if place.is_dir() else place
    records = read(file, say=say)
    own = file.parent.parent / "recipe.yaml"  # RUN/metrics/expert_load.jsonl
    path = recipe or (own if file.parent.name == "metrics" and own.is_file() else None)
    loaded = resolve(load_recipe(path), say) if path else None
    if loaded is not None:
        with suppress(RecipeError):  # a recipe that the estimator does not know: `seconds_of` says why
            layers, experts = records[0].tokens.shape
            require_of(from_recipe(loaded), layers, experts, str(file))
    section = View(loaded).get(tuple(KEY.split("."))) if loaded is not None else None
    on = section is not None and section is not False
    return Source(file, records, loaded, read_settings(section) if on else Settings())


@dataclass(frozen=True)
class Seconds:
    """A `Seconds` predicts how long the steps of a run take under its recorded expert loads.

    Args:
        cluster: they run on. config: the run. even: seconds where all devices have as much.
        error: the usual error of such predictions, in words.
    """

    cluster: str
    times: TimeModel
    config: Configuration
    even: float
    error: str

    def waits(self, ratios: np.ndarray) -> float:
        """Return the seconds of a step in which layers wait for their fullest devices, as the mean over steps.

        Args:
            ratios: [steps, layers] max/mean.
        """
        loads = of_ratios(ratios, range(1, len(ratios) + 1), "replayed loads")
        return self.times.under(self.config, loads, simulated=True).total - self.even


def seconds_of(recipe: Recipe | None, records: list[Record], cluster_name: str) -> Seconds | str:
    """Return the predictor of a run's step times under its recorded expert loads, or the reason why these times cannot
    be predicted.

    Raises:
        RecipeError: there is no such cluster.
    """
    hardware = cluster(cluster_name)
    if recipe is None:
        return "no recipe lies beside the log; --recipe names one"
    if View(recipe).on_cpu:
        return "it runs on CPU workers, which no estimator knows; --recipe takes that of a cluster with as many experts"
    try:
        config = from_recipe(recipe)
        if config.ep != records[0].devices:
            return f"the log is of {records[0].devices} devices that share experts, the recipe of {config.ep}"
        times = TimeModel(hardware)
        even = times.step(config, simulated=True).total
    except RecipeError as error:
        return str(error)
    known = known_error(hardware)
    return Seconds(hardware.name, times, config, even, known.words if known else UNKNOWN)


@dataclass(frozen=True)
class Policy:
    """A `Policy` is one way to place experts, with the result that this way would have had over the recorded steps.

    Args:
        every: steps between plans; 0: none. ratios: [steps, layers] max/mean.
        moves: [steps, layers] experts that changed device. plans: the plans of the whole model; plan_s: seconds of one.
        waits: seconds of a step that wait for the fullest device, after the first plan; None: not known.
        move_s: measured seconds of one exchange; None where none was measured.
        copies: the copies of experts in a layer, as the mean after the first plan.
    """

    name: str
    every: int
    ratios: np.ndarray
    moves: np.ndarray
    plans: int
    plan_s: float
    waits: float | None
    move_s: float | None = None
    copies: float = 0.0

    def moves_of_a_plan(self) -> float:
        """Return the mean number of experts of a layer that one plan moves."""
        return float(self.moves.sum() / max(self.plans, 1) / self.moves.shape[1])


@dataclass(frozen=True)
class Study:
    """A `Study` is the whole report on a log of expert loads.

    Args:
        tokens: int64 [steps, layers, E] of logical experts; ratios: [steps, layers] as recorded.
        devices: [layers, D] load of each device over the mean of the layer, over all steps as recorded.
        experts: [layers, E] load of each logical expert over the mean of the layer, over all steps.
        bounds: [layers] max/mean below which no placement of the summed loads gets.
        policies: the first is `NONE`. first: index of the first step after a plan could have been made.
        seconds: or why they are not known. differs: steps at which a replay of the recipe's settings leaves the
            recorded placements; None where it does not apply.
    """

    source: Source
    every: int
    first: int
    tokens: np.ndarray
    ratios: np.ndarray
    devices: np.ndarray
    experts: np.ndarray
    bounds: np.ndarray
    policies: list[Policy]
    seconds: Seconds | str
    differs: list[int] | None


def study(source: Source, cluster: str, every: int | None, spare: int | None = None) -> Study:
    """Return the report on a log of expert loads, with the balance that each policy would have achieved under these
    loads.

    Args:
        every: steps between plans; None: the recipe's. spare: slots of a device for copies of experts, in two more
            policies; None: the recipe's, 0: none.

    Raises:
        RecipeError: there is no such cluster, or a device has more spare slots than other devices have experts.
    """
    records, settings = source.records, source.settings
    spare = settings.spare if spare is None else spare
    experts, devices = records[0].tokens.shape[1], records[0].devices
    if spare > (others := experts - experts // devices):
        raise RecipeError(
            f"--spare {spare}: {spare} spare slots of a device are more than the {others} experts on all other "
            f"devices; give {others} at most"
        )
    seconds = seconds_of(source.recipe, records, cluster)
    every = every or settings.every or type(settings)().every
    tokens = np.stack([record.tokens for record in records])
    loads = np.stack([record.on_devices for record in records])
    on, total = loads.sum(0), tokens.sum(0)
    planned = [at for at, record in enumerate(records) if due(record.step, every)]
    first = planned[0] + 1 if planned and planned[0] + 1 < len(records) else 0
    return Study(
        source=source,
        every=every,
        first=first,
        tokens=tokens,
        ratios=loads.max(2) / loads.mean(2),
        devices=_over_mean(on),
        experts=_over_mean(total),
        bounds=np.array([bound(one, devices) / max(one.sum() / devices, 1) for one in total]),
        policies=_policies(source, every, spare, first, seconds),
        seconds=seconds,
        differs=_differs(source),
    )


def _over_mean(loads: np.ndarray) -> np.ndarray:
    return loads / np.maximum(loads.mean(-1, keepdims=True), 1e-30)


def _policies(source: Source, every: int, spare: int, first: int, seconds: Seconds | str) -> list[Policy]:
    records, settings = source.records, source.settings
    devices, plain = records[0].devices, replace(settings, spare=0)

    def policy(name: str, found: Replay, every: int, move_s: float | None = None) -> Policy:
        waits = None if isinstance(seconds, str) else seconds.waits(found.ratios[first:])
        copies = float(found.made[first:].mean())
        return Policy(name, every, found.ratios, found.moves, found.plans, found.plan_s, waits, move_s, copies)

    rows = [policy(NONE, replay(records, replace(plain, every=0)), 0)]
    if any(record.moved for record in records):
        found, move_s = _recorded(source)
        steps = [record.step for record in records if record.moved]
        rows.append(policy(RECORDED, found, int(np.gcd.reduce(steps)), move_s))

    def packing(loads: np.ndarray, old: np.ndarray, step: int) -> np.ndarray:
        return np.stack([eplb(layer, devices) for layer in loads])

    packed = replay_policy(records, packing, every, settings.memory)
    rows.append(policy("greedy (EPLB, MindFormers)", packed, every))
    for method in ("swaps", "aligned"):
        rows.append(policy(method, replay(records, replace(plain, method=method, every=every)), every))
    if len(records) > RARE * every:
        rows.append(policy("swaps", replay(records, replace(plain, method="swaps", every=RARE * every)), RARE * every))
    if spare:
        slots = f"{spare} spare slot{'s' * (spare > 1)}"
        copied = replace(settings, method="swaps", every=every, spare=spare)
        rows.append(policy(f"swaps, {slots}", replay(records, copied), every))
        ratios = eplb_ratios(records, every, settings.memory, spare)
        waits = None if isinstance(seconds, str) else seconds.waits(ratios[first:])
        none = np.zeros(ratios.shape, np.int64)
        rows.append(Policy(f"EPLB, {slots}", every, ratios, none, 0, 0.0, waits, copies=float(devices * spare)))
    return rows


def _recorded(source: Source) -> tuple[Replay, float]:
    """Return what the run itself did, and the mean seconds of an exchange."""
    records = source.records
    slots = np.stack([record.slots for record in records])
    after = np.stack([record.after[0] for record in records])
    wide = max(record.after[1].shape[1] for record in records)
    copies = np.full((*slots.shape[:2], wide), NOTHING)
    for row, record in zip(copies, records, strict=True):
        row[:, : record.after[1].shape[1]] = record.after[1]
    each = slots.shape[2] // records[0].devices
    gone = [record.moved for record in records if record.moved]
    ratios = np.stack([one.max(1) / one.mean(1) for one in (record.on_devices for record in records)])
    moves = (after // each != slots // each).sum(2)
    plan_s, move_s = (float(np.mean([getattr(one, name) for one in gone])) for name in ("plan_s", "move_s"))
    return Replay(ratios, after, moves, len(gone), plan_s, copies), move_s


def _differs(source: Source) -> list[int] | None:
    """Return whether the log is what the recipe's settings give; only a log from the first step on can tell."""
    records, settings = source.records, source.settings
    if source.recipe is None or records[0].step != 1 or not any(record.moved for record in records):
        return None
    return differences(records, replay(records, settings))
