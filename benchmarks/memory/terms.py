"""This program prints the errors of predicted memory on published runs: now, as first predicted, and without the
changes that were learnt from a group's own runs.

    python -m benchmarks.memory.terms

A group's own terms are those that were looked for because of the group's runs, whether or not a source states them.
Without its own terms a group is predicted like software whose source nobody has read. torchtitan's whole gradient of
the head was found on its runs, too, and cannot be taken away here: it is part of how sharded weights are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import yaml

from tools.estimate.configuration import Configuration
from tools.estimate.memory.room import ROWS
from tools.estimate.published.rows import Row, read_rows
from tools.estimate.published.validate import predict

Change = Callable[[Configuration], Configuration]
_PUBLIC_405B = 8  # query groups of the public model; SimuMax's runs have 16


def _eight_groups(config: Configuration) -> Configuration:
    model = config.model
    return replace(config, model=replace(model, kv_heads=_PUBLIC_405B)) if model.hidden == 16384 else config


def _as_megatron(config: Configuration) -> Configuration:
    """Return the configuration without the terms that were learnt from SimuMax's runs: spare gradients, fused loss,
    context parallelism that exchanges heads, and the query groups of the 405B.
    """
    return _eight_groups(replace(config, spare_gradients=False, logit_bytes=6, cp_exchanges_heads=False))


OWN: dict[str, dict[str, Change]] = {
    "simumax_b200": {
        "spare gradients": lambda config: replace(config, spare_gradients=False),
        "a loss in place of the logits": lambda config: replace(config, logit_bytes=6),
        "attention's result before its exchange": lambda config: replace(config, cp_exchanges_heads=False),
        "16 query groups of 405B": _eight_groups,
        "all": _as_megatron,
    },
    "torchtitan": {
        "a layer's last product without a compiler": lambda config: replace(config, fused=True),
        "what is gathered and scattered at once": lambda config: replace(config, overlap_tp=True),
        "all": lambda config: replace(config, fused=True, overlap_tp=True),
    },
    "korthikanti22": {},
    "megatron_tests": {},
}


def errors(rows: list[Row], change: Change | None = None) -> np.ndarray:
    """Return predicted over measured memory - 1 for each row, with a change of its configuration if one is given."""
    changed = [replace(row, config=change(row.config)) if change and row.config else row for row in rows]
    return np.array([predict(row).memory_error for row in changed], float)


def line(name: str, found: np.ndarray) -> str:
    """Return a line of the table: number of rows, mean and largest absolute error, and the largest error of a
    prediction that is too low.
    """
    size, missed = np.abs(found), max(0.0, -found.min())
    return f"| {name} | {len(found)} | {size.mean():.1%} | {size.max():.1%} | {missed:.1%} |"


def table() -> str:
    """Return the table of errors by group, with and without each term that was learnt from the group's runs; then the
    errors of all rows, and of the rows that were predicted before their measurement was used.
    """
    rows = [row for row in read_rows(ROWS) if row.use == "fit"]
    lines = ["| runs | rows | mean | worst | missed |", "|---|---:|---:|---:|---:|"]
    left_out, now = [], []
    for group, terms in OWN.items():
        own = [row for row in rows if row.group == group]
        now.append(errors(own))
        lines.append(line(group, now[-1]))
        lines += [line(f"{group} without {name}", errors(own, change)) for name, change in terms.items()]
        left_out.append(errors(own, terms.get("all")))
    lines += [line("all", np.concatenate(now)), line("all, each group without its own", np.concatenate(left_out))]
    written = yaml.safe_load(ROWS.read_text(encoding="utf-8"))["rows"]
    first = {
        use: [row["first"] for row in written if "first" in row and row["use"] == use]
        for use in ("fit", "context_only")
    }
    lines += [line(f"as first predicted, {use}", np.array(found)) for use, found in first.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
