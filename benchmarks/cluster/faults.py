"""This program plants faults of a cluster and checks the reaction of a run's agents: python
benchmarks/cluster/faults.py [ROW...]

The nodes are network namespaces of this machine. The workers are small workers without MindSpore
(tests/launch/agent/small), or with `--recipe FILE` the workers of `tc3 agent FILE`, a recipe of two workers. Two faults
are only for small workers: `tc3 agent` refuses a port that is taken before it starts, and nothing makes a recipe's loss
NaN in the middle of its run. The program needs root and iproute2. It prints a line of a Markdown table for each fault;
the exit code is 1 if a result is wrong.
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

UNDER_MINDSPORE = 60.0  # seconds more until something is seen: limits of hangs and of heartbeats are 30 s and not 6 s
HEAD = "| fault | seen | decided | steps again | named | cause | decisions | steps made again | left | losses | run |"


def row(result: Result, said: list[str]) -> str:
    """Return the table's line for the result of one fault."""

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
    """Cause the faults and print the table; return exit code 0 if the agents reacted to every fault as expected."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", help="cause only these faults; by default all")
    parser.add_argument(
        "--recipe", default="", help="train this recipe of two workers, with options; it first runs without a fault"
    )
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    if reason := netns.missing():
        print(reason, file=sys.stderr)
        return 2
    print(HEAD, "|" + "---|" * HEAD.count(" | ") + "---|", sep="\n")
    bad = 0
    losses: dict[int, float] | None = None
    rows = args.rows or [name for name, fault in TABLE.items() if fault.real or not args.recipe]
    if args.recipe:
        rows = ["none", *(name for name in rows if name != "none")]  # its losses are the others' to come to
    slack = UNDER_MINDSPORE if args.recipe else 0.0
    for number, name in enumerate(rows):
        with tempfile.TemporaryDirectory() as folder:
            place = args.keep / str(number) if args.keep else Path(folder)
            result = run(TABLE[name], place, args.recipe, losses)
        losses = losses or result.losses
        said = wrong(TABLE[name], result, slack)
        bad += bool(said)
        print(row(result, said), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
