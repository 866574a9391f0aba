"""Estimator against published measurements: a markdown table of all rows, or (--fit) new efficiencies from `fit` rows.

    python -m benchmarks.estimator ROWS.yaml            # table for RESULTS.md
    python -m benchmarks.estimator ROWS.yaml --fit      # of all device types or of those named after it;
                                                        # writes tools/estimate/efficiencies.yaml
    python -m benchmarks.estimator ROWS.yaml --record   # writes the errors of the rows fitted into that file
    python -m benchmarks.estimator ROWS.yaml --halves   # how well rows are predicted that were not fitted

The fit changes one parameter at a time by ever smaller factors, inside bounds that make physical sense, and keeps what
lowers the mean of |error| over a device type's rows, with a penalty for errors above 20 % and a small one for leaving
the starting point. Device types without enough rows take parameters over from another one (`_TYPES`).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import yaml

from tools.estimate.efficiency import FILE, Efficiency, clear_cache
from tools.estimate.published.rows import Row, read_rows
from tools.estimate.published.validate import predict, summary
from tools.estimate.time_model import TimeModel

# parameter -> (start, least, most)
_SPACE = {
    "matmul": (0.70, 0.45, 0.92),
    "matmul_fp8": (0.55, 0.30, 0.80),
    "half_size": (200.0, 20.0, 1000.0),
    "attention": (0.60, 0.15, 0.75),
    "memory": (0.80, 0.25, 0.95),
    "unfused": (2.0, 1.0, 5.0),
    "link": (1.0, 0.4, 1.3),
    "hidden": (0.5, 0.05, 1.0),
    "hidden_ep": (0.5, 0.05, 1.0),
    "layer_s": (2e-5, 1e-6, 5e-4),
    "moe_s": (1e-3, 1e-5, 3e-3),
    "burst": (1.2, 1.0, 1.4),
    "step_s": (0.05, 1e-3, 0.3),
}
_WORST = 0.245  # more than this counts in full, whatever a row's share: just below the aim for the worst row
_PULL = 0.01  # what leaving the start by a factor of e costs, in mean error
# device type -> (clusters, devices of a node joined pair by pair, type that the start is taken from, parameters fitted)
_TYPES: dict[str, tuple[tuple[str, ...], bool, str, tuple[str, ...]]] = {
    "a100": (("a100_80g",), False, "", ("matmul", "half_size", "memory", "link")),
    "h100": (
        ("h100",),
        False,
        "",
        ("matmul", "matmul_fp8", "half_size", "attention", "memory", "link", "hidden", "hidden_ep", "moe_s", "burst"),
    ),
    "h100_96g": (
        ("h100_96g",),
        False,
        "h100",
        ("matmul", "matmul_fp8", "half_size", "attention", "memory", "unfused", "link", "hidden"),
    ),
    "h800": (("h800",), False, "h100", ()),
    "blackwell": (
        ("b200", "gb200", "gb300", "b300"),
        False,
        "h100",
        ("matmul", "memory", "link", "hidden_ep", "moe_s"),
    ),
    "ascend_910b": (
        ("atlas_800t_a2", "atlas_900_a2"),
        True,
        "",
        ("matmul", "half_size", "attention", "unfused", "link"),
    ),
    "ascend_910c": (("atlas_900_a3",), False, "ascend_910b", ()),
}
_FACTORS = (1.3, 1.12, 1.05, 1.02)


def measured_seconds(row: Row) -> float | None:
    found = predict(row)
    return None if found.step_error is None or not found.step_time_s else found.step_time_s / (1 + found.step_error)


def shares(rows: list[Row]) -> list[float]:
    """A row's share of the loss: runs that differ only in release or number of micro-batches count as their root."""
    keys = [repr(replace(row.config, micro_batches=row.config.pp)) for row in rows]
    weights = [keys.count(key) ** -0.5 for key in keys]
    return [weight / sum(weights) for weight in weights]


def loss(rows: list[tuple[Row, float, float]], efficiency: Efficiency, start: Efficiency) -> float:
    total = 0.0
    for row, seconds, share in rows:
        step = TimeModel(row.hardware, efficiency).step(row.config).total
        error = abs(step * row.samples / row.config.global_batch / seconds - 1)
        total += share * (error + 2 * max(0.0, error - 0.2)) + max(0.0, error - _WORST)
    moved = sum(abs(math.log(getattr(efficiency, name) / getattr(start, name))) for name in _SPACE)
    return total + _PULL * moved


def fit(rows: list[tuple[Row, float, float]], start: Efficiency, names: tuple[str, ...]) -> Efficiency:
    best, least = start, loss(rows, start, start)
    for factor in _FACTORS:
        moved = True
        while moved:
            moved = False
            for name in names:
                for step in (factor, 1 / factor):
                    low, high = _SPACE[name][1:]
                    value = min(max(getattr(best, name) * step, low), high)
                    tried = replace(best, **{name: value})
                    found = loss(rows, tried, start)
                    if found < least - 1e-6:
                        best, least, moved = tried, found, True
                        break
    return best


def to_fit(rows: list[Row], clusters: tuple[str, ...]) -> list[tuple[Row, float, float]]:
    """(row, measured seconds, share) of a device type's rows."""
    own = [row for row in rows if row.cluster in clusters and row.use == "fit" and row.config]
    timed = [(row, seconds) for row in own if (seconds := measured_seconds(row)) is not None]
    parts = shares([row for row, _ in timed])
    return [(row, seconds, part) for (row, seconds), part in zip(timed, parts, strict=True)]


def fit_all(rows: list[Row], only: list[str]) -> dict[str, dict]:
    sets: dict[str, dict] = yaml.safe_load(FILE.read_text("utf-8"))["sets"]
    made: dict[str, Efficiency] = {}
    for kind, (clusters, mesh, parent, names) in _TYPES.items():
        start = (
            replace(made[parent], mesh=mesh)
            if parent
            else Efficiency(**{n: s[0] for n, s in _SPACE.items()}, mesh=mesh)
        )
        if only and kind not in only:
            made[kind] = Efficiency(**sets[kind]["values"], mesh=mesh)
            continue
        used = to_fit(rows, clusters)
        best = fit(used, start, names) if names else start
        made[kind] = best
        groups = ", ".join(sorted({row.group for row, *_ in used}))
        fitted = f"{', '.join(names)}: from {len(used)} rows ({groups})" if names else "nothing"
        others = f"as {parent}" if parent else "assumed (the start of the search)"
        sets[kind] = {
            "clusters": list(clusters),
            "mesh": mesh,
            "fitted": fitted,
            "others": others,
            "values": {name: float(f"{getattr(best, name):.3g}") for name in _SPACE},
        }
    return sets


def halves(rows: list[Row]) -> str:
    """Errors of rows that were not fitted: configurations alternate between two halves, each judged by the other's fit.

    Runs that differ only in release or number of micro-batches stay together.
    """
    made: tuple[dict[str, Efficiency], dict[str, Efficiency]] = ({}, {})
    errors: dict[str, list[float]] = {}
    for kind, (clusters, mesh, parent, names) in _TYPES.items():
        used = [(row, seconds) for row, seconds, _ in to_fit(rows, clusters)]
        keys = [repr(replace(row.config, micro_batches=row.config.pp)) for row, _ in used]
        order = list(dict.fromkeys(keys))
        for half, sets in enumerate(made):
            start = sets[parent] if parent else Efficiency(**{n: s[0] for n, s in _SPACE.items()})
            start = replace(start, mesh=mesh)
            own = [pair for pair, key in zip(used, keys, strict=True) if order.index(key) % 2 == half]
            parts = shares([row for row, _ in own])
            weighted = [(row, seconds, part) for (row, seconds), part in zip(own, parts, strict=True)]
            sets[kind] = fit(weighted, start, names) if names and own else start
            for pair, key in zip(used, keys, strict=True):
                if order.index(key) % 2 != half:
                    step = TimeModel(pair[0].hardware, sets[kind]).step(pair[0].config).total
                    error = step * pair[0].samples / pair[0].config.global_batch / pair[1] - 1
                    errors.setdefault(kind, []).append(abs(error))
    lines = ["| fitted on the other half | rows | mean | worst |", "|---|---:|---:|---:|"]
    errors = {"all": [error for found in errors.values() for error in found], **errors}
    for kind, found in errors.items():
        lines.append(f"| {kind} | {len(found)} | {100 * sum(found) / len(found):.1f} % | {100 * max(found):.1f} % |")
    return "\n".join(lines)


_HEAD = """\
# What each device type reaches: one set of parameters, see tools.estimate.efficiency.Efficiency.
# Written by `python -m benchmarks.estimator ROWS.yaml --fit` from published measurements (rows with `use: fit`);
# `fitted` says which parameters were, `others` where the rest comes from. None is fitted for a single row.
# `step_errors` is how far those rows' step times are off (`--record`).
# Rows left out of the fit (`--halves`) are predicted less well than those in it: see benchmarks/RESULTS.md.
"""


def table(rows: list[Row]) -> str:
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


def with_errors(rows: list[Row]) -> dict[str, dict]:
    """The sets with the errors of the rows that each is fitted to."""
    sets: dict[str, dict] = yaml.safe_load(FILE.read_text("utf-8"))["sets"]
    for kind, (clusters, *_, names) in _TYPES.items():
        errors = [abs(predict(row).step_error or 0.0) for row, *_ in to_fit(rows, clusters)] if names else []
        sets[kind].pop("step_errors", None)
        if errors:
            mean = round(sum(errors) / len(errors), 4)
            sets[kind]["step_errors"] = {"rows": len(errors), "mean": mean, "worst": round(max(errors), 4)}
    return sets


def write(sets: dict[str, dict]) -> None:
    FILE.write_text(_HEAD + yaml.safe_dump({"sets": sets}, sort_keys=False, width=118), encoding="utf-8")
    clear_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--fit", nargs="*", metavar="DEVICE_TYPE", help="all of them, or those named")
    parser.add_argument("--record", action="store_true", help="write the errors of the fitted rows")
    parser.add_argument("--halves", action="store_true", help="errors of rows left out of the fit")
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    if arguments.halves:
        print(halves(rows))
        return
    if arguments.fit is not None:
        write(fit_all(rows, arguments.fit))
    if arguments.record or arguments.fit is not None:
        write(with_errors(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
