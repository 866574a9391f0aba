"""This program measures on this machine how often `tc3 doctor --probe` finds faults, and how often it raises false
alarms.

    python benchmarks/cluster/doctor_probe.py [--runs 100] [--rounds 7] [clean | throttled | stopped | shaped ...]

clean       runs without a fault: no worker may be named. The load from the machine's other users is reported, too.
throttled   one of two workers in a control group that may use a twentieth of a core (version 1: cpu.cfs_quota_us,
version 2: cpu.max). Needs root. More would limit nothing where others use the core, too.
stopped     one of two workers is stopped and continued twenty times a second (SIGSTOP): no root, another kind of slow.
shaped      four workers in network namespaces on one bridge, the interface of one of them limited to 200 Mbit/s by
            tc's token bucket. Needs root and iproute2.

Each line of the result compares what the probe reported with the fault that was made.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from tools.doctor import probe as run
from tools.doctor.outliers import Probe, gate, outliers
from tools.doctor.probe import Seat

GROUPS, GROUP = Path("/sys/fs/cgroup"), "tc3-doctor-probe"
NAMES, BRIDGE, SHAPED = [f"tc3-probe{node}" for node in range(4)], "tc3-probe", 2


class Unavailable(Exception):
    """This error says why this machine cannot make a kind of fault."""


def seats() -> list[Seat]:
    """Return the places of two workers with one core each."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    return [Seat(0, [first]), Seat(1, [second])]


def probe(places: list[Seat], rounds: int) -> Probe:
    """Return the result of one probe, whose files are in the current folder's file system."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        return run.measure(places, Path(folder).absolute(), rounds)


def root() -> None:
    """Raise Unavailable if this process does not run as root."""
    if os.geteuid() != 0:
        raise Unavailable("unknown (root)")


@contextmanager
def a_twentieth_of_a_core() -> Iterator[list[str]]:
    """Yield the words in front of a worker's command that put it into a control group limited to a twentieth of
    a core.
    """
    root()
    first = (GROUPS / "cgroup.controllers").exists()
    folder = (GROUPS if first else GROUPS / "cpu") / GROUP
    try:
        folder.mkdir()
        if first:
            (folder / "cpu.max").write_text("5000 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text("5000")
    except OSError as error:
        raise Unavailable(f"no control group can be made: {error}") from None
    try:
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        folder.rmdir()


def throttled(rounds: int) -> Probe:
    """Return the probe of two workers of which the second is limited to a twentieth of a core."""
    with a_twentieth_of_a_core() as prefix:
        one, two = seats()
        return probe([one, Seat(1, two.cores, prefix=prefix)], rounds)


def stopped(rounds: int) -> Probe:
    """Return the probe of two workers of which the second is stopped for half of the time."""
    over = threading.Event()

    def disturb(worker: int) -> None:
        while not over.is_set():
            for number in (signal.SIGSTOP, signal.SIGCONT):
                try:
                    os.kill(worker, number)
                except ProcessLookupError:
                    return
                time.sleep(0.025)

    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "pid"
        one, two = seats()
        prefix = ["sh", "-c", f'echo $$ > {note} && exec "$@"', "sh"]

        def wait() -> None:
            while not (note.exists() and (text := note.read_text().strip())):
                time.sleep(0.01)
            disturb(int(text))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        try:
            return probe([one, Seat(1, two.cores, prefix=prefix)], rounds)
        finally:
            over.set()
            thread.join(1)


def do(*command: str) -> None:
    """Run a command of iproute2; raise Unavailable with what it says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}`: {done.stderr.strip()}")


@contextmanager
def network() -> Iterator[list[Seat]]:
    """Yield the places of four workers, two on each core, in network namespaces on one bridge; the bandwidth of the
    third worker's interface is limited.
    """
    root()
    if absent := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise Unavailable(f"unknown: {' and '.join(absent)} not found (iproute2)")
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as made:
        for name in (BRIDGE, *NAMES):
            do("ip", "netns", "add", name)
            made.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        do("ip", "-n", BRIDGE, "link", "add", "bridge", "type", "bridge")
        do("ip", "-n", BRIDGE, "link", "set", "bridge", "up")
        for node, name in enumerate(NAMES):
            do("ip", "-n", name, "link", "add", "eth", "type", "veth", "peer", "name", f"port{node}", "netns", BRIDGE)
            do("ip", "-n", BRIDGE, "link", "set", f"port{node}", "master", "bridge", "up")
            do("ip", "-n", name, "addr", "add", f"10.231.78.{node + 1}/24", "dev", "eth")
            do("ip", "-n", name, "link", "set", "eth", "up")
        rate = ("rate", "200mbit", "burst", "64kb", "latency", "50ms")
        do("tc", "-n", NAMES[SHAPED], "qdisc", "add", "dev", "eth", "root", "tbf", *rate)
        yield [
            Seat(
                0, [cores[node % len(cores)]], place=name, prefix=["ip", "netns", "exec", name],
                address=f"10.231.78.{node + 1}",
            )
            for node, name in enumerate(NAMES)
        ]  # fmt: skip


def shaped(rounds: int) -> Probe:
    """Return the probe of four workers of which one is behind a slow network interface."""
    with network() as places:
        return probe(places, rounds)


FAULTS: dict[str, Callable[[int], Probe]] = {"throttled": throttled, "stopped": stopped, "shaped": shaped}
EXPECTED = {
    "throttled": {("worker 1", "matmul")},
    "stopped": {("worker 1", "matmul")},
    "shaped": {(f"{NAMES[SHAPED]} worker 0", "bandwidth")},
}


def faulty(name: str, rounds: int, runs: int) -> None:
    """Make a fault in each of `runs` probes; print how often the probe names the faulty worker, and which healthy
    workers it names.
    """
    named, others = 0, Counter[tuple[str, str]]()
    for number in range(runs):
        try:
            found = outliers({"": FAULTS[name](rounds)})
        except Unavailable as error:
            click.echo(f"{name}: not run, {error}")
            return
        failing = {(one.who, one.measure) for one in found if one.verdict == "fail"}
        named += EXPECTED[name] <= failing
        others.update((who, measure) for who, measure in failing if who not in {who for who, _ in EXPECTED[name]})
        if not number:
            for one in found:
                click.echo(f"  {one.verdict}: {one.who}: {one.seen}")
    click.echo(f"{name}: named in {named} of {runs} runs; others named: {dict(others) or 'none'}")


def clean(rounds: int, runs: int) -> None:
    """Probe two healthy workers `runs` times, and print how often the probe raises a false alarm."""
    alarms, verdicts = Counter[tuple[str, str]](), Counter[str]()
    ratios: dict[str, list[float]] = {"matmul": [], "memory": [], "bandwidth": []}
    waits, took, loads = [], [], []
    for number in range(runs):
        began = time.monotonic()
        report = probe(seats(), rounds)
        took.append(time.monotonic() - began)
        loads.append(os.getloadavg()[0])
        failing = [one for one in outliers({"": report}) if one.verdict == "fail"]
        for one in failing:
            click.echo(f"  alarm: {one.who}: {one.seen} {report['workers']}", err=True)
        alarms.update((one.who, one.measure) for one in failing)
        verdicts[gate({"": report}).verdict] += 1
        waits += [median(worker["waited"]) for worker in report["workers"]]
        for measure, seen in ratios.items():
            rows: list[Any] = [*(report["links"] if measure == "bandwidth" else report["workers"])]
            seen.append(apart([row[measure] for row in rows]))
        if number % 10 == 9:
            click.echo(f"  {number + 1} runs: alarms {dict(alarms) or 'none'}, verdicts {dict(verdicts)}", err=True)
    click.echo(f"clean: {sum(alarms.values())} false alarms in {runs} runs {dict(alarms) or ''}; gate {dict(verdicts)}")
    click.echo(f"  load {min(loads):.1f} to {max(loads):.1f}")
    click.echo(f"  share of time waited for cores: median {median(waits):.0%}, most {max(waits):.0%}")
    click.echo(f"  seconds a run: median {median(took):.1f}, most {max(took):.1f}")
    for measure, seen in ratios.items():
        click.echo(
            f"  {measure}: largest ratio that held in median and best: {max(seen):.3f}, median {median(seen):.3f}"
        )


def apart(rounds: list[list[float]]) -> float:
    """Return the rate of the fastest worker divided by that of the slowest worker, by the smaller of the ratio of
    median rates and the ratio of best rates.
    """
    pairs = [(median(numbers), max(numbers)) for numbers in rounds]
    return max(min(a[0] / b[0], a[1] / b[1]) for a in pairs for b in pairs)


@click.command()
@click.argument("what", nargs=-1, type=click.Choice(["clean", *FAULTS]))
@click.option(
    "--runs", default=100, show_default=True, help="Make this many clean runs, and a tenth as many with each fault."
)
@click.option("--rounds", default=run.ROUNDS, show_default=True, help="Measure this many rounds in each probe.")
def main(what: tuple[str, ...], runs: int, rounds: int) -> None:
    """Print what the probe said of clean and of faulty workers."""
    for name in what or ("throttled", "stopped", "shaped", "clean"):
        if name == "clean":
            clean(rounds, runs)
        else:
            faulty(name, rounds, max(1, runs // 10))


if __name__ == "__main__":
    main()
