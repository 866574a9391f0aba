"""This program compares the estimator with published measurements: it prints a markdown table of all rows, makes a new
fit, or computes the errors of groups that were left out.

    python -m benchmarks.estimator                # table for RESULTS.md; rows of benchmarks/data, or of files named
    python -m benchmarks.estimator --cross        # errors of rows predicted by a fit without their model and device
    python -m benchmarks.estimator --fit          # new sets in tools/estimate/efficiencies.yaml, with those errors
    python -m benchmarks.estimator --calibrated   # errors after `calibrate` on other steps of the same machine
    python -m benchmarks.estimator --pairs        # steps with natural routing over steps with forced even routing
    python -m benchmarks.estimator --pairs --fit  # the spread that each pair needs, written to pairs.yaml
    python -m benchmarks.estimator --unseen       # runs that no fit has seen: newer software, further cards

`benchmarks.estimator_fit` fits all device types at once; the parameters of each type are regularised towards those of
the most similar type. `--fit` does not replace the sets of Ascend, because the searched recipes depend on them
(docs/estimator.md); the recorded errors of Ascend are still those of a fit.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.estimator_fit import (
    CARD,
    RELEASE,
    TYPES,
    Judged,
    contradictions,
    cross_validated,
    fit,
    floor,
    group_of,
    type_of,
    unseen,
    usable,
)
from tools.estimate.efficiency import FILE, NAMES, Efficiency, clear_cache, cluster
from tools.estimate.loads import PUBLISHED_SPREAD, moe_layers, spread
from tools.estimate.published.calibrate import calibrate
from tools.estimate.published.rows import Row, express, read_rows
from tools.estimate.published.validate import predict, summary
from tools.estimate.time_model import TimeModel

DATA = tuple(sorted((Path(__file__).parent / "data").glob("*.yaml")))
PAIRS = FILE.parent / "published" / "pairs.yaml"
_KEPT = ("ascend_910b", "ascend_910c")  # sets that --fit leaves as they are
_DENSE = ("megatron_sc21", "korthikanti22")
_HEAD = """\
# What each device type reaches: one set of parameters, see tools.estimate.efficiency.Efficiency.
# Written by `python -m benchmarks.estimator --fit` from benchmarks/data (rows with `use: fit`); none is fitted for a
# single row. `drawn_to`: the set that a type with few rows is like. `step_errors`: how far off step times are of rows
# that were left out of the fit with all others of their model and device, see docs/estimator.md; those of Ascend count
# the cards of benchmarks/estimator_unseen.yaml, too. `newer`: errors on runs of software newer than the fit, in
# the same file.
"""


def read(files: Iterable[Path]) -> list[Row]:
    """Return all published measurements (rows) of the files."""
    return [row for file in files for row in read_rows(file)]


def line(name: str, errors: Iterable[float], more: str = "") -> str:
    """Return a line of a table: the number of errors, and the mean and the largest of their absolute values."""
    size = np.abs(np.array(list(errors)))
    return f"| {name} | {len(size)} |{more} {100 * size.mean():.1f} % | {100 * size.max():.1f} % |"


def by_type(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Return the predicted rows by device type, in the order of `TYPES`."""
    every = list(judged)
    found = {kind: [one for one in every if type_of(one.row.cluster) == kind] for kind in TYPES}
    return {kind: own for kind, own in found.items() if own}


def cross_table(judged: list[Judged]) -> str:
    """Return the table of errors of left-out rows, by device type and over all rows, and then a table of every row."""
    found = {**by_type(judged), "all": judged, "dense Megatron": [j for j in judged if j.row.group in _DENSE]}
    lines = ["| left out by model and device | rows | groups | mean | worst |", "|---|---:|---:|---:|---:|"]
    for name, own in found.items():
        if own:
            groups = len({one.group for one in own})
            lines.append(line(name, [one.error for one in own], f" {groups} |"))
    lines += ["", "| row | group | error |", "|---|---|---:|"]
    lines += [f"| {one.row.id} | {one.group} | {100 * one.error:+.1f} % |" for one in judged]
    return "\n".join(lines)


def contradiction_table(rows: list[Row]) -> str:
    """Return the table of configurations whose published step times differ, and the lowest errors that any model of
    configurations can have.
    """
    lines = ["| fastest | slowest | slower by | worst at least |", "|---|---|---:|---:|"]
    for found in contradictions(rows):
        names = " | ".join(found.rows[place].id for place in (0, -1))
        lines.append(f"| {names} | {100 * found.spread:.0f} % | {100 * found.floor:.1f} % |")
    mean, worst = floor(rows)
    return "\n".join(
        [*lines, "", f"No model of configurations is better than {mean:.1%} on average, {worst:.1%} at worst."]
    )


def calibrated(rows: list[Row], group: str = "simumax_b200") -> str:
    """Return the table of errors for one machine's rows, which are predicted after a calibration on other rows of the
    machine, starting from efficiencies that were fitted without this machine.
    """
    every = usable(rows)
    own = [row for row in every if row.group == group]
    start = fit([row for row in every if row.group != group])
    name = own[0].cluster
    before = [predict(row, start[type_of(name)]).step_error for row in own]
    lines = ["| calibrated on | rows | mean | worst |", "|---|---:|---:|---:|"]
    lines.append(line("nothing, nor was the machine in the fit", [error or 0.0 for error in before]))
    for words, other in (
        ("all steps but the one judged", lambda row, one: row.id != one.id),
        ("all steps of other models", lambda row, one: group_of(row) != group_of(one)),
        ("all steps, those judged among them", lambda row, one: True),
    ):
        made: dict[tuple[str, ...], Efficiency] = {}
        errors = []
        for one in own:
            used = [row for row in own if other(row, one)]
            ids = tuple(row.id for row in used)
            if ids not in made:
                made[ids] = calibrate(used, name, start[type_of(name)]).efficiency
            errors.append(predict(one, made[ids]).step_error or 0.0)
        lines.append(line(words, errors))
    return "\n".join(lines)


class Pair:
    """A `Pair` is a published pair of steps: one layout with forced even routing and with natural routing."""

    def __init__(self, content: dict[str, Any]):
        row = express(content["row"], f"{PAIRS}: {content['row']['id']}")
        assert row.config is not None, row.reason
        self.id, self.measured, self.needs = row.id, float(content["natural_over_even"]), float(content["needs"])
        self.config, self.times = replace(row.config, **content["run"]), TimeModel(row.hardware)
        self.even = self.times.step(self.config).total
        self.even_error = self.even / row.measured["step_time_s"] - 1

    def ratio(self, deviation: float) -> float:
        """Return the predicted step time under natural routing, with loads of this spread, divided by that under even
        routing.
        """
        loads = spread(deviation, len(moe_layers(self.config)), self.config.ep)
        return self.times.under(self.config, loads).total / self.even

    def needed(self) -> float:
        """Return the spread with which the predicted ratio is the measured one, to a thousandth."""
        low, high = 0.0, 2.0
        while high - low > 5e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if self.ratio(middle) < self.measured else (low, middle)
        return round((low + high) / 2, 3)


def fit_pairs() -> None:
    """Write into pairs.yaml which spread each pair needs; their mean, `PUBLISHED_SPREAD`, is set by hand."""
    text = PAIRS.read_text("utf-8")
    needs = iter([Pair(content).needed() for content in yaml.safe_load(text)["pairs"]])
    PAIRS.write_text(re.sub(r"(?m)^(    needs: ).*$", lambda found: f"{found[1]}{next(needs):.3f}", text), "utf-8")


def pairs() -> list[dict[str, Any]]:
    """Return for each published pair the ratio of step times that `--loads published` predicts, the ratio that the
    spread of the other pairs predicts, and the error of the step with even routing.
    """
    every = [Pair(content) for content in yaml.safe_load(PAIRS.read_text("utf-8"))["pairs"]]
    found = []
    for pair in every:
        others = float(np.mean([one.needs for one in every if one is not pair]))
        made = {"id": pair.id, "needs": pair.needs, "measured": pair.measured, "even_error": pair.even_error}
        ratios = {"predicted": PUBLISHED_SPREAD, "left_out": others, "with_what_it_needs": pair.needs}
        found.append({**made, **{name: pair.ratio(deviation) for name, deviation in ratios.items()}})
    return found


def pair_table() -> str:
    """Return the values of `pairs` as a Markdown table."""
    head = (
        "| pair | spread that it needs | natural over even, measured | with the spread | error | left out | error | the"
    )
    lines = [f"{head} even step's own error |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for one in pairs():
        cells = [f"{one['needs']:.3f}", f"{one['measured']:.2f}"]
        for name in ("predicted", "left_out"):
            cells += [f"{one[name]:.2f}", f"{one[name] / one['measured'] - 1:+.1%}"]
        lines.append(f"| {one['id']} | {' | '.join(cells)} | {one['even_error']:+.0%} |")
    return "\n".join(
        [*lines, "", f"spread {PUBLISHED_SPREAD:g}: standard deviation of the logarithm of a device's load"]
    )


def as_entry(kind: str, values: Efficiency, rows: list[Row]) -> dict[str, object]:
    """Return a set of efficiencies in the form in which efficiencies.yaml holds it."""
    own = [row for row in usable(rows) if type_of(row.cluster) == kind]
    # a link cannot be faster than its nominal figure, so more than that tells nothing
    fastest = 1 / cluster(TYPES[kind].clusters[0]).intra_node.efficiency
    values = replace(values, link=min(values.link, fastest))
    groups = ", ".join(sorted({row.group for row in own}))
    return {
        "clusters": list(TYPES[kind].clusters),
        "mesh": TYPES[kind].mesh,
        "fitted": f"to {len(own)} rows ({groups})" if own else "to no row",
        "drawn_to": TYPES[kind].parent or "the start of the search",
        "values": {name: float(f"{getattr(values, name):.3g}") for name in NAMES},
    }


def cards() -> list[Judged]:
    """Return MindFormers' model cards that no fit has seen, with their errors, which count among the errors of their
    device type.
    """
    found = [(one.row, one.step_error) for one in unseen(CARD)]
    return [Judged(row, group_of(row), error) for row, error in found if error is not None]


def unseen_table() -> str:
    """Return a table of the runs that no fit has seen, with the mean error of each group (band)."""
    lines = ["| run | device | band | step, s | error |", "|---|---|---|---:|---:|"]
    for band in (RELEASE, CARD):
        found = unseen(band)
        errors = [one.step_error or 0.0 for one in found]
        for one, error in zip(found, errors, strict=True):
            lines.append(
                f"| {one.row.id} | {one.row.cluster} | {band} | {one.step_time_s:.3f} | {100 * error:+.1f} % |"
            )
        lines.append(f"| mean of {len(errors)} | | {band} | | {100 * np.abs(errors).mean():.1f} % |")
    return "\n".join(lines)


def newer() -> dict[str, float]:
    """Return the errors of the runs with newer software, in the form in which efficiencies.yaml holds them."""
    size = np.abs([one.step_error or 0.0 for one in unseen(RELEASE)])
    return {"rows": len(size), "mean": round(float(size.mean()), 4), "worst": round(float(size.max()), 4)}


def write(rows: list[Row], judged: list[Judged]) -> None:
    """Fit all sets of efficiencies except those that are kept, and write them with the errors of left-out rows and of
    model cards outside the fit.
    """
    judged = [*judged, *cards()]
    sets: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text("utf-8"))["sets"]
    made = fit(rows)
    entries = {kind: sets[kind] if kind in _KEPT else as_entry(kind, made[kind], rows) for kind in TYPES}
    for kind, entry in entries.items():
        entry.pop("step_errors", None)
        if own := by_type(judged).get(kind):
            size = np.abs([one.error for one in own])
            errors = {"mean": round(float(size.mean()), 4), "worst": round(float(size.max()), 4)}
            entry["step_errors"] = {"rows": len(own), "groups": len({one.group for one in own}), **errors}
    FILE.write_text(_HEAD + yaml.safe_dump({"newer": newer(), "sets": entries}, sort_keys=False, width=118), "utf-8")
    clear_cache()


def table(rows: list[Row]) -> str:
    """Return a table of every row, predicted with the recorded sets of efficiencies."""
    lines = ["| row | device | step time, s | error | memory, GB | error | note |", "|---|---|---:|---:|---:|---:|---|"]
    predictions = [predict(row) for row in rows]
    for found in predictions:
        step = f"{found.step_time_s:.3f}" if found.step_time_s else ""
        memory = f"{found.peak_memory_gb:.1f}" if found.peak_memory_gb else ""
        errors = [f"{100 * e:+.1f} %" if e is not None else "" for e in (found.step_error, found.memory_error)]
        note = found.reason or ("" if found.row.use == "fit" else "context only")
        lines.append(
            f"| {found.row.id} | {found.row.cluster} | {step} | {errors[0]} | {memory} | {errors[1]} | {note} |"
        )
    for field, name in (("step_error", "step time"), ("memory_error", "memory")):
        lines += ["", f"| {name}, `fit` rows | rows | mean | worst |", "|---|---:|---:|---:|"]
        for group, values in summary(predictions, field).items():
            mean, worst = 100 * values["mean"], 100 * values["worst"]
            lines.append(f"| {group} | {values['rows']} | {mean:.1f} % | {worst:.1f} % |")
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", type=Path, nargs="*", default=DATA, help="read these files of measurements; by default benchmarks/data"
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="fit and write new sets of efficiencies, and the errors of left-out rows; with --pairs the spreads",
    )
    parser.add_argument(
        "--cross", action="store_true", help="print the errors of left-out rows, and rows that contradict each other"
    )
    parser.add_argument(
        "--calibrated", action="store_true", help="print the errors after a calibration on the same machine"
    )
    parser.add_argument("--pairs", action="store_true", help="compare natural routing with forced even routing")
    parser.add_argument("--unseen", action="store_true", help="predict the runs that no fit has seen")
    arguments = parser.parse_args()
    if arguments.unseen:
        print(unseen_table())
        return
    if arguments.pairs:
        if arguments.fit:
            fit_pairs()
        print(pair_table())
        return
    rows = read(arguments.rows)
    if arguments.calibrated:
        print(calibrated(rows))
        return
    if not (arguments.fit or arguments.cross):
        print(table(rows))
        return
    judged = cross_validated(rows)
    if arguments.fit:
        write(rows, judged)
    print(cross_table(judged), contradiction_table(usable(rows)), sep="\n\n")


if __name__ == "__main__":
    main()
