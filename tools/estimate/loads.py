"""This module describes how unevenly a router loads the devices of an expert-parallel group, for predictions of time
and memory.

A `Loads` holds the load of each device divided by the mean, by step, micro-batch and MoE layer. There are four kinds:

* even loads (`EVEN`), or loads with the same max/mean in every layer and micro-batch (`uniform`);
* drawn loads (`spread`): the loads of devices are drawn log-normally for each step and layer, with a given standard
  deviation of their logarithm. `PUBLISHED_SPREAD` is fitted to published pairs of training steps, one with forced even
  routing and one with natural routing (`published/pairs.yaml`);
* loads of a trained router (`trained`): loads of experts are drawn with the unevenness that a published study of
  trained models found (`published/loads.yaml`), and the experts are assigned to the devices;
* recorded loads (`read_loads`): a run's `metrics/expert_load.jsonl`, or a routing log of other software, as JSONL or
  CSV.

A layer waits for its fullest device, so the time depends on max/mean of each layer. The memory of a device depends on
its loads in all layers, so the loads of every device are needed. If a log holds only sums over the micro-batches of a
step, or over several expert-parallel groups, each micro-batch or group gets the load of the sum, although the loads of
a single micro-batch or group are more uneven.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import yaml

from plugins.errors import DataError, RecipeError, not_json, read_text, refuse_unknown
from plugins.expert_balance.plan import device_loads
from plugins.expert_balance.record import load_file, read
from tools.estimate.configuration import Configuration
from tools.ranges import RANGES, Range, is_number

# standard deviation of the logarithm of a device's load where routers are left to themselves: the mean of those that
# each published pair needs (0.569 and 0.679; `python -m benchmarks.estimator --pairs`)
PUBLISHED_SPREAD = 0.62
TRAINED = Path(__file__).parent / "published" / "loads.yaml"
DRAWN = 256  # steps that a spread draws
FORMS = (
    "one of the words 'even', 'published' and 'trained', 'spread:NUMBER' with a number from 0 to 3, a number such as "
    "1.3 (the largest load divided by the mean load), or the path of a file"
)
HELP = (
    "Assume that the experts' tokens are distributed in this way over the devices of an expert-parallel group. LOADS "
    "can be a word ('even', 'published' or 'trained'); 'spread:NUMBER', where NUMBER is the standard deviation of the "
    "logarithm of a device's load; a number such as 1.3, which is the largest load divided by the mean load; the "
    "folder of a run with plugins.expert_balance; or the file of a routing log (.jsonl or .csv). "
    "docs/estimator.md explains each of these values.  [default: even]"
)
_SPREAD = Range(0, 3, whole=False)
_MOST = {"step": 1_000_000_000, "micro_batch": 100_000, "layer": 10_000, "expert": 100_000}  # the largest of each


class Counted(NamedTuple):
    """A `Counted` holds the content of a log of expert loads as arrays [steps, layers, experts]: the number of tokens
    of each expert, and the slot in which `plugins.expert_balance` had placed the expert.
    """

    tokens: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Loads:
    """A `Loads` holds the loads of the devices of an expert-parallel group, divided by the mean load. The loads of the
    decoder's MoE layers come first, followed by the loads of the MTP layers. For MTP layers without known loads, the
    loads of the last layer are assumed. If the axis of micro-batches or layers has length 1, its value holds for all
    micro-batches or layers. If the axis of devices has length 1, it holds only the load of the fullest device.
    """

    shares: np.ndarray  # [steps, micro-batches, layers, devices]
    steps: tuple[int, ...]  # [steps] numbers, for reports
    source: str  # in words
    counted: Counted | None = None  # the tokens of each expert, if a log has them

    @property
    def ratios(self) -> np.ndarray:
        """Return the load of the fullest device divided by the mean load, which is at least 1, as an array [steps,
        micro-batches, layers].
        """
        return np.maximum(self.shares.max(axis=-1), 1.0)

    @property
    def typical(self) -> float:
        """Return the mean of max/mean (the fullest device's load over the mean load) over steps, micro-batches and
        layers.
        """
        return float(self.ratios.mean())

    @property
    def words(self) -> str:
        """Return a description of the loads in words, with the distribution of max/mean (the fullest device's load over
        the mean load) if it varies.
        """
        ratios = self.ratios
        if ratios.min() == ratios.max():
            return f"{self.source}: busiest rank {ratios.max():g} x the mean"
        middle, high = np.quantile(ratios, (0.5, 0.95))
        return (
            f"{self.source}: max/mean {self.typical:.2f} on average, {middle:.2f} at the median, {high:.2f} at 95 %, "
            f"{ratios.max():.2f} at worst"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the source of the loads and the distribution of max/mean (the fullest device's load over the mean
        load), as a dictionary for `--json`.
        """
        ratios = self.ratios
        middle, high = map(float, np.quantile(ratios, (0.5, 0.95)))
        found = {"mean": self.typical, "median": middle, "quantile_95": high, "worst": float(ratios.max())}
        return {"source": self.source, "steps": len(self.steps), "max_over_mean": found}


def uniform(ratio: float) -> Loads:
    """Return loads in which the fullest device has `ratio` times the mean load, in every layer and micro-batch.

    Raises:
        RecipeError: the ratio is below 1 or not finite.
    """
    if refusal := RANGES["skew"].refusal(ratio):
        raise RecipeError(f"skew {ratio} (the fullest device's load divided by the mean load) {refusal}")
    source = "even loads" if ratio == 1 else "one max/mean everywhere"
    return Loads(np.full((1, 1, 1, 1), float(ratio)), (1,), source)


EVEN = uniform(1.0)


def of_ratios(ratios: np.ndarray, steps: Iterable[int], source: str) -> Loads:
    """Return a `Loads` from the ratios max/mean only. The argument `ratios` [steps, layers] holds the load of the
    fullest device divided by the mean load.
    """
    return Loads(np.asarray(ratios, float)[:, None, :, None], tuple(steps), source)


@lru_cache(maxsize=64)
def spread(deviation: float, layers: int, devices: int, source: str = "") -> Loads:
    """Return random loads for `DRAWN` steps from a log-normal distribution with a given standard deviation of the
    logarithm. Every call gives the same loads, and the mean load of the devices is 1 in each layer. All micro-batches
    of a step have the same loads, because the experts that a router prefers stay the same for many steps. The argument
    `source` says where the standard deviation comes from.
    """
    drawn = np.exp(deviation * np.random.default_rng(0).standard_normal((DRAWN, 1, layers, devices)))
    shares = drawn / drawn.mean(axis=-1, keepdims=True)
    return Loads(shares, tuple(range(1, DRAWN + 1)), source or f"loads drawn with a spread of {deviation:g}")


def family_of(config: Configuration) -> str:
    """Return the kind of a model's attention (mla, mha or gqa), by which the file published/loads.yaml groups
    models.
    """
    model = config.model
    return "mla" if model.latent is not None else "mha" if model.kv_heads == model.heads else "gqa"


@lru_cache(maxsize=64)
def trained(family: str, layers: int, experts: int, devices: int) -> Loads:
    """Return the loads of the devices in each of `DRAWN` steps, as they are typical of a router after training. The
    expert loads are drawn from a log-normal distribution with the published Gini coefficient of the model family (see
    `family_of`), and summed over the experts of each device. Every call gives the same loads.
    """
    found = yaml.safe_load(TRAINED.read_text("utf-8"))["families"][family]
    # of a log-normal distribution Gini = 2 Phi(deviation / sqrt 2) - 1
    deviation = math.sqrt(2) * NormalDist().inv_cdf((1 + found["gini"]) / 2)
    drawn = np.exp(deviation * np.random.default_rng(0).standard_normal((DRAWN, 1, layers, experts)))
    on = drawn.reshape(DRAWN, 1, layers, devices, -1).sum(axis=-1)
    why = f"loads of experts drawn with the Gini {found['gini']:g} of a published trained model ({found['model']})"
    return Loads(on / on.mean(axis=-1, keepdims=True), tuple(range(1, DRAWN + 1)), why)


def moe_layers(config: Configuration) -> tuple[int, ...]:
    """Return the numbers of the decoder's MoE layers, counted from 0."""
    return tuple(number for number, kind in enumerate(config.model.pattern) if kind == "moe")


def loads_of(text: str, config: Configuration, of_many: bool = False) -> Loads:
    """Return the loads of a run's devices that the option `--loads` describes.

    Args:
        text: the value of `--loads`, in one of `FORMS`; a file has a form that `read_loads` reads.
        of_many: whether `text` is for several EP degrees, of which `config` has one. A max/mean that so few devices
            cannot have is then the largest that they can have; otherwise it is refused.

    Raises:
        RecipeError: the run has no experts, or a number in `text` is out of range or impossible for the run.
        DataError: see `read_loads`.
    """
    sizes = len(moe_layers(config)), config.ep
    if not sizes[0]:
        raise RecipeError("--loads: this recipe's model has no experts; leave the option out")
    word, _, number = text.partition(":")
    if text == "even":
        return EVEN
    if text == "published":
        return spread(
            PUBLISHED_SPREAD, *sizes, "loads drawn with the spread of two published runs with natural routing"
        )
    if text == "trained":
        return trained(family_of(config), sizes[0], config.model.experts, config.ep)
    if word == "spread" and not Path(text).exists():
        return spread(_number(number, _SPREAD, "--loads spread"), *sizes)
    if is_number(text) and not Path(text).exists():
        return uniform(_possible(_number(text, RANGES["skew"], "--loads"), config, of_many))
    return read_loads(Path(text), config)


def _possible(ratio: float, config: Configuration, of_many: bool) -> float:
    """Return a max/mean of the devices' loads that the run can have: a device holds at most all tokens' copies, and as
    each of a token's copies goes to another expert, an expert gets at most one copy of each token.

    Raises:
        RecipeError: see `loads_of`.
    """
    experts, chosen = config.model.experts, config.model.top_k
    for most, why in (
        (experts / chosen, f"each token goes to {chosen} of {experts} experts"),
        (config.ep, f"{config.ep} device{'s' * (config.ep > 1)} share{'s' * (config.ep == 1)} the experts"),
    ):
        if ratio > most and of_many and "device" in why:  # the other limit is the same for all EP degrees
            return most
        if ratio > most:
            raise RecipeError(
                f"--loads {ratio:g}: the largest load of a device, divided by the mean load, can be at most {most:g}, "
                f"because {why}"
            )
    return ratio


def _number(text: str, span: Range, name: str) -> float:
    value = float(text) if is_number(text) else text
    if refusal := span.refusal(value):
        raise RecipeError(f"{name}: {text!r} {refusal}")
    return float(value)


class _Row(NamedTuple):
    """A `_Row` holds the tokens of each expert in the MoE layers of a micro-batch, with the place in the file; of a
    run's own record also those of each device, which count copies of experts.
    """

    place: str
    step: int
    micro_batch: int
    tokens: np.ndarray  # [layers, experts]
    slots: np.ndarray | None = None
    on: np.ndarray | None = None  # [layers, devices of the run]


def read_loads(path: Path, config: Configuration) -> Loads:
    """Return the loads of a run's devices, computed from a log of the tokens that each expert received.

    The function reads three forms of logs: a run (its folder, or its `metrics/expert_load.jsonl`) with the placement of
    experts in each step; JSONL with a line for each step, or for each micro-batch of a step, ``{"step": 1,
    "micro_batch": 0, "tokens": [[...], ...]}`` with the tokens [layers, experts]; and CSV with the columns
    ``step,layer,expert,tokens`` and, if it is known, ``micro_batch``. In the last two forms, experts are in the order
    of their devices. A log may come from a run with another `expert_parallel`.

    The last line of a run's log may be incomplete, because the run is still writing or was killed: this line is left
    out, and `source` says so. Every other line must be complete.

    Raises:
        DataError: the log does not exist, is empty, has a line that is incomplete or holds no counts of tokens, or has
            other experts or layers than the run. The message has one line, with file, line and key.
    """
    path = load_file(path) if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"--loads {path}: there is no such file; give {FORMS}")
    text = read_text(path, DataError, "--loads ")
    left_out: list[str] = []
    if path.suffix == ".csv":
        rows = _csv_rows(path, text)
    elif _is_record(text):
        every = read(path, say=left_out.append)
        rows = [_Row(f"{path}: step {one.step}", one.step, 0, one.tokens, one.slots, one.on_devices) for one in every]
    else:
        rows = _json_rows(path, text)
    if not rows:
        raise DataError(f"{path}: tokens: the log holds no loads; write one line for each step")
    loads = _loads(path, _in_order(rows), config)
    return replace(loads, source=f"{loads.source} without its last line, which is not finished") if left_out else loads


def _is_record(text: str) -> bool:
    """Return whether a log is a run's own record, by its first line."""
    try:
        first = json.loads(next((line for line in text.splitlines() if line.strip()), ""))
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "slots" in first


def _json_rows(path: Path, text: str) -> list[_Row]:
    rows: list[_Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{place}: this line {not_json(error)}; delete the line if it was cut off while it was written"
            ) from None
        if not isinstance(content, dict) or "tokens" not in content:
            raise DataError(
                f"{place}: tokens: the key is missing; write, for each MoE layer, a list of the tokens of each expert"
            )
        rows.append(_json_row(place, content, len(rows) + 1))
    return rows


def _json_row(place: str, content: Mapping[str, Any], at: int) -> _Row:
    refuse_unknown(f"{place}: ", content, ("step", "micro_batch", "layers", "tokens"), DataError)
    rows = content["tokens"]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise DataError(f"{place}: tokens: write a list for each MoE layer, with the token count of every expert")
    if len({len(row) for row in rows}) > 1:
        raise DataError(f"{place}: tokens: the layers differ in their numbers of experts; list all experts")
    for layer, row in enumerate(rows):
        for expert, count in enumerate(row):
            _check_count(count, f"{place}: tokens[{layer}][{expert}]")
    step, part = _whole(content.get("step", at), f"{place}: step"), content.get("micro_batch", 0)
    return _Row(place, step, _whole(part, f"{place}: micro_batch"), np.array(rows, float))


_COLUMNS = ("step", "layer", "expert", "tokens")


def _csv_rows(path: Path, text: str) -> list[_Row]:
    """Return the micro-batches of a CSV log; an expert without a line has no tokens."""
    reader = csv.reader(text.splitlines())
    head = [word.strip() for word in next(reader, [])]
    if not head:
        return []
    refuse_unknown(f"{path}:1: ", head, (*_COLUMNS, "micro_batch"), DataError, "column")
    if missing := [name for name in _COLUMNS if name not in head]:
        raise DataError(
            f"{path}:1: {missing[0]}: this column is missing; the columns are {','.join(_COLUMNS)} and, optionally, "
            "micro_batch"
        )
    cells: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    places: dict[tuple[int, int], str] = {}
    for line in reader:
        place = f"{path}:{reader.line_num}"
        if not line:
            continue
        if len(line) != len(head):
            text = f"the line has {len(line)} values for the {len(head)} columns {','.join(head)}"
            text += "; delete the line if it was cut off while it was written"
            raise DataError(f"{place}: {head[min(len(line), len(head) - 1)]}: {text}")
        found = dict(zip(head, line, strict=True))
        count = _check_count(_parsed(found["tokens"]), f"{place}: tokens")
        names = ("step", "layer", "expert", "micro_batch")
        step, layer, expert, part = (_whole(_parsed(found.get(name, "0")), f"{place}: {name}") for name in names)
        own = cells.setdefault((step, part), {})
        places.setdefault((step, part), place)
        if (layer, expert) in own:
            raise DataError(
                f"{place}: expert: layer {layer} has expert {expert} twice in this micro-batch; delete one of the two "
                "lines"
            )
        own[layer, expert] = count
    layers = sorted({layer for own in cells.values() for layer, _ in own})
    experts = 1 + max((expert for own in cells.values() for _, expert in own), default=-1)
    at = {layer: row for row, layer in enumerate(layers)}
    rows = []
    for (step, part), own in cells.items():
        tokens = np.zeros((len(layers), experts))
        for (layer, expert), count in own.items():
            tokens[at[layer], expert] = count
        rows.append(_Row(places[step, part], step, part, tokens))
    return rows


def _parsed(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return float(text) if is_number(text) else text


def _whole(value: Any, place: str) -> int:
    most = _MOST[place.rpartition(" ")[2]]
    if type(value) is not int or not 0 <= value <= most:
        raise DataError(f"{place}: the value must be a whole number from 0 to {most:,}, not {str(value)[:40]!r}")
    return value


def _check_count(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise DataError(f"{place}: the value must be a finite number of tokens, 0 or more, not {str(value)[:40]!r}")
    return float(value)


def _in_order(rows: list[_Row]) -> list[list[_Row]]:
    """Return the micro-batches of each step, in their order.

    Raises:
        DataError: a micro-batch is there twice, steps have unlike many, or lines have unlike layers or experts.
    """
    steps: dict[int, dict[int, _Row]] = {}
    for row in rows:
        if row.micro_batch in (own := steps.setdefault(row.step, {})):
            raise DataError(
                f"{row.place}: micro_batch: step {row.step} has micro-batch {row.micro_batch} twice; give each line "
                "its own step or micro_batch"
            )
        if row.tokens.shape != rows[0].tokens.shape:
            here, before = (" x ".join(map(str, one.tokens.shape)) for one in (row, rows[0]))
            raise DataError(
                f"{row.place}: tokens: this line has {here} (layers x experts), but the first line has {before}; all "
                "lines must have the same numbers of layers and experts"
            )
        own[row.micro_batch] = row
    most = max(map(len, steps.values()))
    for own in steps.values():
        if len(own) < most:
            first = next(iter(own.values()))
            raise DataError(
                f"{first.place}: micro_batch: step {first.step} has {len(own)} micro-batches, but other steps have "
                f"{most}; leave out incomplete steps"
            )
    return [[steps[step][part] for part in sorted(steps[step])] for step in sorted(steps)]


def require_of(config: Configuration, layers: int, experts: int, place: str) -> None:
    """Raise DataError if a log of expert loads has another number of experts or MoE layers than the recipe's model. The
    error message begins with the text `place`.
    """
    wanted, mtp = len(moe_layers(config)), config.model.mtp
    one_model = "give the recipe with which the log was written"
    if experts != config.model.experts:
        raise DataError(
            f"{place}: tokens: the log has {experts} experts, but the recipe has {config.model.experts}; {one_model}"
        )
    if layers not in (wanted, wanted + mtp):
        also = f" (and {mtp} of MTP, which may be left out)" if mtp else ""
        raise DataError(
            f"{place}: tokens: the log has {layers} MoE layers, but the recipe has {wanted}{also}; {one_model}"
        )


def _loads(path: Path, steps: list[list[_Row]], config: Configuration) -> Loads:
    first = steps[0][0]
    layers, experts = first.tokens.shape
    require_of(config, layers, experts, first.place)
    for row in (row for own in steps for row in own):
        if not row.tokens.sum(axis=1).all():
            empty = int(row.tokens.sum(axis=1).argmin())
            raise DataError(
                f"{row.place}: tokens[{empty}]: no expert of this layer received a token; leave out layers that did "
                "not run"
            )
    tokens = np.array([[row.tokens for row in own] for own in steps])
    in_order = np.tile(np.arange(experts), (layers, 1))
    slots = np.array([[in_order if row.slots is None else row.slots for row in own] for own in steps])
    if first.on is not None and first.on.shape[1] == config.ep:
        on = np.array([[row.on for row in own] for own in steps])
    else:  # copies of experts belong to their number of devices
        on = device_loads(tokens, slots, config.ep)
    shares = on / on.mean(axis=-1, keepdims=True)
    numbers = tuple(own[0].step for own in steps)
    parts = f" of {shares.shape[1]} micro-batches" if shares.shape[1] > 1 else ""
    counted = Counted(tokens.sum(axis=1), slots[:, 0])
    return Loads(shares, numbers, f"{len(numbers)} recorded steps{parts} of {path}", counted)
