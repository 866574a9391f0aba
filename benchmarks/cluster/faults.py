"""Faults of a cluster, and what the agents of a run make of them: python benchmarks/cluster/faults.py [ROW...]

Nodes are network namespaces of this machine, workers small ones without MindSpore (tests/launch/agent/small), or with
`--recipe FILE` those of `tc3 agent FILE`, a recipe of two workers. Needs root and iproute2. Prints a line of a Markdown
table for each fault; exit code 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.launch.agent import netns
from tests.launch.agent.faults import Result, run, wrong
from tests.launch.agent.table import TABLE

HEAD = "| fault | seen | decided | steps again | named | cause | decisions | steps made again | left | losses | run |"


def row(result: Result, said: list[str]) -> str:
    """A line of the table."""

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} s"

    left = sum(len(roles) for roles in result.left.values())
    cells = [
        result.name,
        seconds(result.seen),
        seconds(result.decided),
        seconds(result.stepping),
        result.named,
        result.cause or "-",
        ", ".join(result.decisions),
        str(result.lost_steps),
        str(left) if left else "nothing",
        "equal" if result.equal else "the run did not end" if max(c or 0 for c in result.codes) else "DIFFER",
        seconds(result.seconds) + ("" if not said else f"; WRONG: {'; '.join(said)}"),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Exit code 0 where every fault came out as it should."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", default=list(TABLE))
    parser.add_argument("--recipe", default="", help="one of two workers, with options; run without a fault first")
    parser.add_argument("--keep", type=Path, help="leave the runs' folders there")
    args = parser.parse_args()
    if reason := netns.missing():
        print(reason, file=sys.stderr)
        return 2
    print(HEAD, "|" + "---|" * HEAD.count(" | ") + "---|", sep="\n")
    bad = 0
    losses: dict[int, float] | None = None
    for number, name in enumerate([*(["none"] if args.recipe else []), *args.rows]):
        with tempfile.TemporaryDirectory() as folder:
            place = args.keep / str(number) if args.keep else Path(folder)
            result = run(TABLE[name], place, args.recipe, losses)
        losses = losses or result.losses
        said = wrong(TABLE[name], result)
        bad += bool(said)
        print(row(result, said), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
