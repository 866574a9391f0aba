"""This program runs expert parallelism's dispatch and combine over a real, shaped network, and compares the times with
the model that ranks the modes.

    python benchmarks/ep_network.py [--inter-mbit 200] [--tokens 512] [--repetitions 5] [--json]

Two Linux network namespaces are two nodes of two ranks. The link between them is shaped with `tc` to a tenth of the
nodes' loopback, over which the ranks of a node talk. Every rank is a process; they move exactly the bytes that
`plugins/hierarchical_ep/plan.py` plans, over `plugins/cpu_backend/transport.py`. The work of a layer's experts is
replaced by a sleep, because four ranks that compute on a few cores would slow down each other and the network. The
program needs root and iproute2 (ip, tc), and says so if they are missing; it changes only its own namespaces.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import ep_network_links as links
from benchmarks.ep_network_model import TOPOLOGY, Case, Rates, layer_bytes, move_seconds, overlapped
from benchmarks.ep_network_rank import KINDS, Job
from plugins.hierarchical_ep.plan import MODES

RANK_SCRIPT = Path(__file__).with_name("ep_network_rank.py")
Spans = list[list[tuple[float, float]]]


@contextmanager
def processes() -> Iterator[list[subprocess.Popen]]:
    """Yield one process for each rank, which runs on its node; all processes have ended when the block ends."""
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(TOPOLOGY.ep):
            command = links.command_in(int(TOPOLOGY.node_of(rank)), sys.executable, str(RANK_SCRIPT))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            # a session of its own: an interrupt from the terminal is this process's to handle
            ranks.append(subprocess.Popen(command, start_new_session=True, **pipes))
        yield ranks
    finally:
        for process in ranks:  # all before any is waited for: the others would complain of lost peers
            process.kill()
        for process in ranks:
            process.communicate()


def tell(ranks: Sequence[subprocess.Popen], messages: Sequence) -> None:
    """Send one message to each rank."""
    for process, message in zip(ranks, messages, strict=True):
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def hear(ranks: Sequence[subprocess.Popen]) -> list:
    """Return the next message of each rank."""
    lines = [process.stdout.readline() for process in ranks]
    if not all(lines):
        dead = [rank for rank, line in enumerate(lines) if not line]
        raise click.ClickException(f"ranks {dead} ended early; their messages are above")
    return [json.loads(line) for line in lines]


def jobs_of(cases: Sequence[Case], rates: Rates) -> list[Job]:
    """Return jobs for every case, dispatch mode and kind of measurement; the experts' stand-in takes as long as the
    predicted hierarchical communication.
    """
    jobs = []
    for index, case in enumerate(cases):
        compute = move_seconds(case, "hierarchical", rates)
        for mode in MODES:
            stride, _ = overlapped(case, mode, rates, compute)
            jobs += [Job(index, mode, kind, compute if kind != "moves" else 0.0, stride) for kind in KINDS]
    return jobs


def measure(cases: Sequence[Case], inter_mbit: int, repetitions: int) -> tuple[Rates, list[Job], list[list[float]]]:
    """Return the rates of the links, the jobs, and the seconds of each job in each repetition: from the start of the
    first rank to the end of the last rank.
    """
    with links.nodes(inter_mbit, 10 * inter_mbit), processes() as ranks:
        hosts = [links.HOSTS[node] for node in TOPOLOGY.node_of(range(TOPOLOGY.ep))]
        specs = [
            {"rank": rank, "host": host, "cases": [asdict(case) for case in cases]} for rank, host in enumerate(hosts)
        ]
        tell(ranks, specs)
        tell(ranks, [hear(ranks)] * len(ranks))
        click.echo("measuring the links", err=True)
        streams = hear(ranks)
        each = {link: [seen[link] for seen in streams if link in seen] for link in ("inter", "intra")}
        rates = Rates(**{link: sum(seen) / len(seen) for link, seen in each.items()})
        jobs = jobs_of(cases, rates)
        tell(ranks, [{"jobs": [asdict(job) for job in jobs], "repetitions": repetitions}] * len(ranks))
        runs = []
        for number in range(repetitions):
            click.echo(f"repetition {number + 1} of {repetitions}", err=True)
            spans: list[Spans] = hear(ranks)
            runs.append(
                [max(end for _, end in job) - min(start for start, _ in job) for job in zip(*spans, strict=True)]
            )
    return rates, jobs, runs


def results_of(cases: Sequence[Case], rates: Rates, jobs: Sequence[Job], runs: list[list[float]]) -> list[dict]:
    """Return a row for each case and mode, with bytes, measured and predicted seconds, and ratios of seconds.

    Each ratio is the median of the ratios of single repetitions, because other work on the machine slows down both
    times of a repetition.
    """
    column = {(job.case, job.mode, job.kind): [run[at] for run in runs] for at, job in enumerate(jobs)}
    computes = {job.case: job.compute for job in jobs if job.kind == "whole"}
    strides = {(job.case, job.mode): job.stride for job in jobs}
    rows = []
    for index, case in enumerate(cases):
        predicted = {mode: move_seconds(case, mode, rates) for mode in MODES}
        for mode in MODES:
            _, timeline = overlapped(case, mode, rates, computes[index])
            moves, whole, chunks = (column[index, mode, kind] for kind in KINDS)
            model = {
                "moves_seconds": predicted[mode],
                "whole_seconds": predicted[mode] + computes[index],
                "chunks_seconds": timeline.makespan,
                "over_global": predicted[mode] / predicted["global"],
                "chunks_over_whole": timeline.makespan / (predicted[mode] + computes[index]),
            }
            measured = {
                "moves_seconds": median(moves),
                "whole_seconds": median(whole),
                "chunks_seconds": median(chunks),
                "over_global": median(a / b for a, b in zip(moves, column[index, "global", "moves"], strict=True)),
                "chunks_over_whole": median(a / b for a, b in zip(chunks, whole, strict=True)),
            }
            rows.append(
                {
                    **asdict(case),
                    "mode": mode,
                    "bytes": layer_bytes(case, mode),
                    "compute_seconds": computes[index],
                    "stride": strides[index, mode],
                    "measured": measured,
                    "model": model,
                }
            )
    return rows


def deviation(row: dict, key: str) -> float:
    """Return the measured ratio divided by the predicted ratio, minus 1."""
    return row["measured"][key] / row["model"][key] - 1


def table(rows: list[dict]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| routing, top-k | mode | MB between nodes | MB inside a node | dispatch + combine | over global: measured "
        "| model | off by | in chunks over whole layer: measured | model | off by |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{row['routing']}, {row['top_k']}", row["mode"]]
        cells += [f"{row['bytes'][link] / 1e6:.1f}" for link in ("inter", "intra")]
        cells.append(f"{row['measured']['moves_seconds']:.3f} s")
        for key in ("over_global", "chunks_over_whole"):
            cells += [f"{row[part][key]:.3f}" for part in ("measured", "model")]
            cells.append("-" if (key, row["mode"]) == ("over_global", "global") else f"{deviation(row, key):+.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def notes(rates: Rates, rows: list[dict], inter_mbit: int, repetitions: int) -> str:
    """Return sentences that explain the table: link rates, sizes, number of repetitions, largest deviation from the
    model.
    """
    first, megabit = rows[0], 8e-6
    worst = {key: max(abs(deviation(row, key)) for row in rows) for key in rows[0]["model"]}
    return (
        f"Links: {inter_mbit} Mbit/s between nodes, {10 * inter_mbit} Mbit/s inside one (nominal); a plain stream gets "
        f"{rates.inter * megabit:.0f} and {rates.intra * megabit:.0f} Mbit/s, which the model uses.\n"
        f"{first['tokens']} tokens per rank, rows of {first['hidden']} fp32, {TOPOLOGY.experts} experts; bytes are "
        f"those of the busiest link, dispatch and combine together.\n"
        "The two ranks of a node share its link to the other node (full duplex) and one loopback (both directions "
        "together); the model divides by these shares and has no latency.\n"
        f"The layer's experts are a sleep as long as hierarchical communication should take; {first['chunks']} chunks. "
        f"Medians of {repetitions} interleaved repetitions.\n"
        f"Furthest from the model: {worst['over_global']:.1%} (over global), {worst['chunks_over_whole']:.1%} (in "
        f"chunks over whole); of the seconds themselves {worst['moves_seconds']:.1%}, {worst['whole_seconds']:.1%} and "
        f"{worst['chunks_seconds']:.1%} (moves, whole layer, in chunks)."
    )


def stop(number: int, frame: object) -> None:
    """Turn a request to end into an exception, so that everything is cleaned up."""
    raise KeyboardInterrupt


@click.command()
@click.option(
    "--inter-mbit",
    default=200,
    show_default=True,
    help="Limit the rate between nodes to this; inside a node it is ten times as high.",
)
@click.option("--tokens", default=512, show_default=True, help="Give each rank this many tokens.")
@click.option("--hidden", default=1024, show_default=True, help="Send rows of this width, in fp32.")
@click.option("--chunks", default=4, show_default=True, help="Cut the overlapped layer into this many parts.")
@click.option("--repetitions", default=5, show_default=True, help="Run everything this many times.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(inter_mbit: int, tokens: int, hidden: int, chunks: int, repetitions: int, as_json: bool) -> None:
    """Measure the three dispatch modes and print ratios beside the model's."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background jobs ignore the latter by default
        signal.signal(number, stop)
    sizes = {"tokens": tokens, "hidden": hidden, "chunks": chunks}
    cases = [Case("balanced", 8, **sizes), Case("skewed", 4, **sizes), Case("node-limited", 4, **sizes)]
    try:
        rates, jobs, runs = measure(cases, inter_mbit, repetitions)
    except links.Unavailable as error:
        click.echo(f"skipped: {error}")
        return
    rows = results_of(cases, rates, jobs, runs)
    if as_json:
        click.echo(json.dumps({"rates": asdict(rates), "rows": rows}, indent=1))
        return
    click.echo(f"{table(rows)}\n\n{notes(rates, rows, inter_mbit, repetitions)}")


if __name__ == "__main__":
    main()
