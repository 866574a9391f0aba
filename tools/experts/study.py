"""This module evaluates the recorded expert loads of a run, and the balance that each policy of moving experts would
have achieved under these loads.

`open_run` reads the recorded loads of a run, and the run's recipe if there is one. `seconds_of` predicts the seconds of
a step under these uneven loads, with the estimator (`tools.estimate`). `study` computes the loads by layer and device,
and replays policies of moving experts on these loads.
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
    """A `Source` is the log of a run's expert loads, with the recipe and the settings of the run.

    Args:
        file: the log from which `records`, one for each step, were read.
        recipe: the run's recipe, in which no value is `auto`; None if the recipe is unknown.
        settings: the settings of `plugins.expert_balance` in the recipe, or the plugin's defaults.
    """

    file: Path
    records: list[Record]
    recipe: Recipe | None
    settings: Settings


def open_run(place: Path, recipe: Path | None, say: Callable[[str], None]) -> Source:
    """Return the log of expert loads at `place` (the folder of a run, or the log file), with the recipe of the run.

    Args:
        recipe: the path of a recipe that replaces the run's own recipe.
        say: a function that receives lines about the values that replaced `auto`, and about lines of the log that were
            left out.

    Raises:
        DataError: the log does not exist, is broken, or has other numbers of experts or layers than the recipe.
        RecipeError: the recipe is broken.
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
        cluster: the cluster on which the steps run.
        config: the configuration of the run.
        even: the seconds of a step in which all devices have the same load.
        error: the usual error of predicted step times, in words.
    """

    cluster: str
    times: TimeModel
    config: Configuration
    even: float
    error: str

    def waits(self, ratios: np.ndarray) -> float:
        """Return how many seconds of a step the devices wait for the most loaded device of each layer, averaged over
        the steps.

        Args:
            ratios: [steps, layers] the max/mean of the devices' loads.
        """
        loads = of_ratios(ratios, range(1, len(ratios) + 1), "replayed loads")
        return self.times.under(self.config, loads, simulated=True).total - self.even


def seconds_of(recipe: Recipe | None, records: list[Record], cluster_name: str) -> Seconds | str:
    """Return the predictor of a run's step times under its recorded expert loads, or the reason why these times cannot
    be predicted.

    Raises:
        RecipeError: the cluster is unknown.
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
    """A `Policy` is one way to place experts, with the balance of loads that this way would have achieved over the
    recorded steps.

    Args:
        every: the number of steps between two plans; 0: there are no plans.
        ratios: [steps, layers] the max/mean of the devices' loads.
        moves: [steps, layers] the numbers of experts that moved to another device.
        plans: the number of plans, each for the whole model.
        plan_s: the seconds to compute one plan.
        waits: the seconds of a step in which devices wait for the fullest device, after the first plan; None: unknown.
        move_s: the measured seconds of one exchange of experts; None if no exchange was measured.
        copies: the mean number of copies of experts in a layer, after the first plan.
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
        """Return the mean number of experts that one plan moves in a layer."""
        return float(self.moves.sum() / max(self.plans, 1) / self.moves.shape[1])


@dataclass(frozen=True)
class Study:
    """A `Study` is the whole report on a log of expert loads.

    Args:
        tokens: int64 [steps, layers, E] the tokens of each logical expert.
        ratios: [steps, layers] the recorded max/mean of the devices' loads.
        devices: [layers, D] the recorded load of each device divided by the mean of the layer, over all steps.
        experts: [layers, E] the load of each logical expert divided by the mean of the layer, over all steps.
        bounds: [layers] a lower bound on the max/mean of every placement of experts, for the loads summed over all
            steps.
        policies: the policies, of which the first is `NONE`.
        first: the index of the first step before which a plan could have been made.
        seconds: the predictor of step times, or the reason why step times are unknown.
        differs: the steps at which a replay of the recipe's settings gives other placements than the log; None if such
            a replay is not possible.
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
    """Return the report on a log of expert loads, with the balance that each policy of moving experts would have
    achieved under these loads.

    Args:
        every: the number of steps between two plans; None: the recipe's number.
        spare: the number of slots of a device for copies of experts, with which two further policies are replayed;
            None: the recipe's number, 0: no such policies.

    Raises:
        RecipeError: the cluster is unknown, or a device has more spare slots than other devices have experts.
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
    """Return the placements, copies and moves of the run itself as a `Replay`, and the mean seconds of an exchange."""
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
    """Return the steps after which the log differs from the result of the recipe's settings; None if this is unknown,
    because the log does not begin with the first step or has no moves, or the recipe is missing.
    """
    records, settings = source.records, source.settings
    if source.recipe is None or records[0].step != 1 or not any(record.moved for record in records):
        return None
    return differences(records, replay(records, settings))
