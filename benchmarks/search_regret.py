"""This program compares `tc3 search` with the placing of every strategy by the solver.

It also checks that more effort never makes the result of the search worse.

    python -m benchmarks.search_regret                      # 40 random small problems: regret, gap and certainty
    python -m benchmarks.search_regret --efforts            # 30 random problems, each at efforts low, normal and high
    python -m benchmarks.search_regret --exact              # 40 tiny ones: every placement of every strategy is tried
    python -m benchmarks.search_regret --first 7 --draw 1   # one of them

A problem is a model of 5 to 17 layers on 8 to 64 devices: dense or MoE, with MLA, grouped queries, shared experts or
MTP, with or without pipeline and context parallelism, its memory tight or loose. The number of a problem seeds its
random sizes. The solver places every planned candidate that by its plain bound could be faster than the search's best
layout, and a few of the other candidates, which shows whether the plain bounds are true. The regret is the step time of
the search's best layout divided by that of the best layout of all, minus 1. The search's sentence on certainty is true
if no strategy is faster than the bound that the search prints.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tools.estimate.configuration import Configuration, Table
from tools.estimate.efficiency import cluster
from tools.estimate.memory.model import peak_memory
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import EFFORTS, Budget
from tools.model import Latent, Model, pattern_of
from tools.search.candidates import Candidate, configuration
from tools.search.ranking.rank import Chances, rank
from tools.search.ranking.run import Found, search
from tools.search.ranking.workers import place_all
from tools.search.request import PLANNED, Request, read_limit

DEVICES = (8, 9, 12, 13, 16, 20, 21, 24, 30, 32, 40, 45, 48, 56, 64)
FAMILIES = ("dense", "gqa", "moe", "shared", "latent", "mtp")
SPACES = (("cp=1", "shard=optimizer", "pp>1"), ("cp<=2", "shard=optimizer"), ("cp=1",), ("cp=2", "pp>1"))
ROOMS = (1.06, 1.25, 1.6, 3.0)  # memory, of the least that any strategy needs
EQUAL = 1 + 1e-6
TINY = ("cp=1", "pp>1", "pp<=4", "mbs=1", "shard=optimizer", "mode=global", "ep<=2", "vpp<=2")
_DENSE = Model(pattern_of(9), hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=32000)
_LATENT = Latent(query_rank=384, kv_rank=128, nope=64, rope=32, value=64)


def model_of(family: str, rng: np.random.Generator, layers: tuple[int, int]) -> Model:
    """Return a model of a family; its width, the number and kinds of its layers, experts and heads are drawn."""
    count, first, experts = (int(rng.integers(*ends)) for ends in ((layers[0], layers[1] + 1), (0, 4), (3, 6)))
    wide, few = int(rng.choice((1, 1, 2))), int(rng.choice((16, 4, 8)))
    model = replace(_DENSE, pattern=pattern_of(count), hidden=1024 * wide, heads=16 * wide, kv_heads=16 * wide)
    if family in ("dense", "gqa"):
        return model if family == "dense" else replace(model, kv_heads=4, tied=bool(rng.integers(2)))
    model = replace(model, pattern=pattern_of(count, 8 * experts, first), experts=8 * experts, top_k=4, expert_ffn=512)
    if family == "moe":
        return replace(model, kv_heads=few)
    latent = family == "latent" or (family == "mtp" and bool(rng.integers(2)))
    model = replace(model, kv_heads=model.heads if latent else few, latent=_LATENT if latent else None)
    return replace(model, shared_ffn=512, mtp=int(family == "mtp"))


def problem(
    number: int, devices: tuple[int, ...] = DEVICES, layers: tuple[int, int] = (5, 17), fit: int = 8
) -> Request:
    """Return the request that `number` draws; families, spaces and room for memory take turns.

    Sizes are drawn until `fit` strategies fit.
    """
    rng = np.random.default_rng(number)
    family, space = FAMILIES[number % len(FAMILIES)], SPACES[number // len(FAMILIES) % len(SPACES)]
    limits = tuple(map(read_limit, ("mbs<=2", *space)))
    while True:
        model, many = model_of(family, rng, layers), int(rng.choice(devices))
        base = Configuration(
            model, layers=((model.layers,),), sequence=2048, shared_whole=True, keep_gathered=True, overlap_dp=True
        )
        batch = many * int(rng.choice((1, 2, 3, 4, 8)))
        asked = Request(base, cluster("atlas_800t_a2"), many, batch, 1e4 * GIB, family, limits=limits)
        least = rank(asked).least
        if least is None:
            continue
        asked = replace(asked, cap=ROOMS[(number + number // len(ROOMS)) % len(ROOMS)] * least.peak)
        if len(Chances(replace(rank(asked), near=None), np.inf).open) >= fit:
            return asked


class Truth(NamedTuple):
    """A `Truth` holds the results of placing strategies by the solver."""

    seconds: float  # of the fastest layout, the search's own among them
    placed: int
    bounded: bool  # no strategy is under its plain bound


def regret(asked: Request, found: Found, effort: float, others: int = 4) -> Truth:
    """Return the result of placing each strategy by the solver with `effort`, independently of the search's own
    placements.

    Strategies that are slower by their plain bound are left out, except for `others` of them, which are drawn at
    random.
    """
    ours, every = found.entries[0].seconds, Chances(found.ranking, np.inf)
    some = [one for one in every.open if every.bound(one.candidate) < ours]
    slower = [one for one in every.open if every.bound(one.candidate) >= ours]
    some += [slower[int(index)] for index in np.random.default_rng(0).permutation(len(slower))[:others]]
    placed: dict = {}
    if not place_all(asked, some, TimeModel(asked.hardware), Budget(effort), placed.__setitem__, at_once=1):
        raise KeyboardInterrupt
    bounded = all(every.bound(one.candidate) <= placement.step_s * EQUAL for one, placement in placed.items())
    return Truth(min([ours, *(placement.step_s for placement in placed.values())]), len(placed), bounded)


def tiny(number: int) -> Request | None:
    """Return a request of 3 to 5 layers whose strategies have few placements; None where no strategy is legal."""
    rng, family, cut = np.random.default_rng(number + 1000), FAMILIES[number % len(FAMILIES)], number % 4 == 3
    count = int(rng.integers(3, 5 if cut else 6))
    model = replace(_DENSE, pattern=pattern_of(count), hidden=int(rng.choice((512, 1024))), heads=8, kv_heads=8)
    model = replace(model, ffn=2048, vocab=int(rng.choice((8000, 32000))), kv_heads=2 if family == "gqa" else 8)
    if family not in ("dense", "gqa"):
        model = replace(
            model, pattern=pattern_of(count, 8, int(rng.integers(0, 3))), experts=8, top_k=2, expert_ffn=512
        )
        model = replace(model, shared_ffn=512 * (family != "moe"), mtp=int(family == "mtp"))
        model = replace(model, latent=_LATENT if family in ("latent", "mtp") else None)
    many, sequence = int(rng.choice((4, 8) if cut else (2, 4, 6, 8))), int(rng.choice((1024, 2048)))
    base = Configuration(model, layers=((count,),), sequence=sequence, shared_whole=True, keep_gathered=True)
    base = replace(base, overlap_dp=bool(rng.integers(2)))
    limits = tuple(map(read_limit, ("tp<=2" if cut else "tp=1", *TINY)))
    batch = many * int(rng.choice((1, 2, 4)))
    asked = Request(base, cluster("atlas_800t_a2"), many, batch, 1e4 * GIB, family, limits=limits)
    ranking = rank(asked)
    if ranking.least is None:
        return None
    low, high = ranking.least.peak, float(ranking.peaks.max())
    return replace(asked, cap=low * (1.001 + float(rng.random()) * min(1.0, high / low - 1)))


def every_placement(asked: Request, candidate: Candidate, times: TimeModel) -> tuple[float, int]:
    """Return the least seconds of a strategy's placements under the limit, and how many were tried: all numbers of
    layers of the chunks, and for each chunk all numbers of layers that recompute by each option.
    """
    config, best, tried = configuration(asked, candidate), np.inf, 0
    size, last = config.pp * config.chunks, config.model.mtp
    for counts in itertools.product(range(config.model.layers + 1), repeat=size):
        if sum(counts) != config.model.layers or 0 in counts[1:-1] or counts[-1] < last:
            continue
        for chosen in itertools.product(*(_options(count, config.tp > 1) for count in counts)):
            full, select, again = (_rows(row, config.pp) if any(row) else None for row in zip(*chosen, strict=True))
            recompute = replace(config.recompute, full=full, select=select, communication=again)
            one, tried = replace(config, layers=_rows(counts, config.pp), recompute=recompute), tried + 1
            if peak_memory(one) <= asked.room:
                best = min(best, times.step(one, simulated=True).total)
    return best, tried


def _options(count: int, gathers: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of layers that recompute everything, that recompute norms, and (with tensor parallelism) that
    recompute communication.
    """
    for select in range(count + 1):
        for full, again in itertools.product(range(select + 1), {0, *range(select, count + 1)} if gathers else {0}):
            yield full, select, again


def _rows(counts: Sequence[int], stages: int) -> Table:
    """Return the counts in the model's order as a table [chunks][stages]."""
    return tuple(tuple(counts[first : first + stages]) for first in range(0, len(counts), stages))


def print_exact(numbers: range, effort: float) -> None:
    """Print a line for each tiny problem: the search's best layout compared with every placement of every strategy."""
    heads = "problem", "family", "devices", "layers", "strategies", "placements", "search s", "best of all s", "regret"
    print(f"| {' | '.join([*heads, 'gap', 'bound holds'])} |\n{'|---' * (len(heads) + 2)}|")
    for number in numbers:
        asked = tiny(number)
        if asked is None:
            continue
        times, found = TimeModel(asked.hardware), searched(asked, effort)
        some = [block.candidate(row, PLANNED) for block in found.ranking.blocks for row in range(len(block))]
        steps, tried = zip(*(every_placement(asked, one, times) for one in some), strict=True)
        ours, best = found.entries[0].seconds, min(steps)
        words = [f"{number}", asked.cap_source, f"{asked.devices}", f"{asked.base.model.layers}", f"{len(some)}"]
        words += [f"{sum(tried)}", f"{ours:.6f}", f"{best:.6f}", f"{ours / best - 1:.3%}", f"{found.gap:.2%}"]
        print(f"| {' | '.join([*words, 'yes' if found.least <= best * EQUAL else 'NO'])} |", flush=True)


def searched(asked: Request, effort: float, top: int = 10) -> Found:
    """Return the answer of the search. A search that Ctrl-C or SIGTERM ended early has no answer, and ends the
    benchmark.
    """
    found = search(asked, top, Budget(effort), TimeModel(asked.hardware), lambda *_: None, at_once=1)
    if not found.whole:
        raise KeyboardInterrupt
    return found


def print_regret(numbers: range, effort: float, solving: float) -> None:
    """Print a line for each problem: the search's best layout compared with the solver's placements of all
    strategies.
    """
    heads = "problem", "family", "devices", "layers", "fit", "placed", "solved", "search s", "best of all s", "of"
    print(f"| {' | '.join([*heads, 'regret', 'gap', 'bounds hold', 'processor s'])} |\n{'|---' * (len(heads) + 4)}|")
    for number in numbers:
        asked, begin = problem(number), time.process_time()
        found = searched(asked, effort)
        took, ours = time.process_time() - begin, found.entries[0].seconds
        best, many, bounded = regret(asked, found, solving)
        holds = "yes" if bounded and found.least <= best * EQUAL else "NO"
        words = [f"{number}", asked.cap_source, f"{asked.devices}", f"{asked.base.model.layers}"]
        words += [f"{len(Chances(found.ranking, np.inf).open)}", f"{found.placed}", f"{found.solved}"]
        words += [f"{ours:.4f}", f"{best:.4f}", f"{many}", f"{ours / best - 1:.2%}", f"{found.gap:.2%}", holds]
        print(f"| {' | '.join([*words, f'{took:.0f}'])} |", flush=True)


def with_own(number: int) -> Request:
    """Return a problem whose recipe runs a randomly drawn legal strategy, with every layer recomputed."""
    asked = problem(number)
    some = Chances(rank(asked), np.inf).open
    own = some[int(np.random.default_rng(number).integers(len(some)))].candidate
    return replace(asked, base=configuration(asked, own))


def print_efforts(numbers: range, efforts: Sequence[float]) -> None:
    """Print a line for each problem: the best step time at every effort, which must not rise with the effort."""
    names = " | ".join(f"{effort:g}" for effort in efforts)
    heads = f"| problem | family | devices | {names} | least | never worse | own mesh placed | bound holds |"
    print(f"{heads}\n{'|---' * (heads.count('|') - 1)}|")
    for number in numbers:
        asked = with_own(number)
        every = [searched(asked, effort) for effort in efforts]
        steps, least = [found.entries[0].seconds for found in every], max(found.least for found in every)
        good = all(after <= before for before, after in itertools.pairwise(steps))
        own = all(found.own_mesh is not None and not found.dropped for found in every)
        holds = least <= steps[-1] * EQUAL
        words = [f"{number}", asked.cap_source, f"{asked.devices}", *(f"{step:.4f}" for step in (*steps, least))]
        print(f"| {' | '.join([*words, *('yes' if one else 'NO' for one in (good, own, holds))])} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="begin with the problem of this number")
    parser.add_argument("--draw", type=int, help="draw this many problems; by default 40, or 30 with --efforts")
    parser.add_argument(
        "--effort", type=float, default=1.0, help="search with this effort; a larger one never gives a worse result"
    )
    parser.add_argument("--solving", type=float, default=0.5, help="place every strategy with this effort")
    parser.add_argument(
        "--efforts", nargs="*", type=float, help="compare these efforts instead; by default the efforts with names"
    )
    parser.add_argument("--exact", action="store_true", help="try every placement of tiny problems instead")
    asked_for = parser.parse_args()
    by_effort = asked_for.efforts is not None
    drawn = range(asked_for.first, asked_for.first + (asked_for.draw or (30 if by_effort else 40)))
    if by_effort:
        print_efforts(drawn, asked_for.efforts or list(EFFORTS.values()))
    elif asked_for.exact:
        print_exact(drawn, asked_for.effort)
    else:
        print_regret(drawn, asked_for.effort, asked_for.solving)
