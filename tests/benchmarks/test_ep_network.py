import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ep_network_model import (
    ITEMSIZE,
    ROUTINGS,
    TOPOLOGY,
    Case,
    Rates,
    chunk_ops,
    layer_bytes,
    move_seconds,
    overlapped,
)
from benchmarks.ep_network_rank import KINDS, Job, Rank
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.traffic import per_rank_bytes
from tests.plugins.cpu_backend.ranks import meshes, on_ranks

ROOT = Path(__file__).resolve().parents[2]
RATES = Rates(inter=25e6, intra=250e6)


@pytest.fixture(scope="module")
def mesh():
    with meshes(TOPOLOGY.ep) as mesh:
        yield mesh


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_rank_sends_exactly_the_planned_bytes(mesh, mode, kind):
    cases = [Case(routing, top_k=3, tokens=37, hidden=16, chunks=3) for routing in ROUTINGS]
    for index, case in enumerate(cases):
        job = Job(index, mode, kind, compute=0.01)
        before = [list(each.sent_bytes) for each in mesh]
        spans = on_ranks(TOPOLOGY.ep, lambda rank, job=job: Rank(mesh[rank], cases).timed(job))
        moved = [np.subtract(each.sent_bytes, old).tolist() for each, old in zip(mesh, before, strict=True)]
        plans = case.chunk_plans(mode) if kind == "chunks" else [case.plan(mode)]
        steps = [step for plan in plans for step in per_rank_bytes(plan, case.hidden, ITEMSIZE)]
        assert moved == sum(step.inter + step.intra for step in steps).tolist()
        if kind != "moves":
            assert all(end - start >= 0.01 for start, end in spans)


def test_routing_names_distinct_experts_and_is_what_it_is_called():
    for routing in ROUTINGS:
        for ids in Case(routing, top_k=4, tokens=200, hidden=8, chunks=2).ids():
            assert all(len(set(row)) == 4 for row in ids.tolist())
            node = TOPOLOGY.node_of(TOPOLOGY.owner(ids))
            on_first = (node == 0).mean()
            assert on_first > 0.6 if routing == "skewed" else 0.4 < on_first < 0.6
            assert (routing == "node-limited") == bool((node == node[:, :1]).all())


def test_bytes_between_nodes_have_the_known_ratios():
    balanced = Case("balanced", top_k=8, tokens=512, hidden=1024, chunks=4)
    between = {mode: layer_bytes(balanced, mode)["inter"] for mode in MODES}
    # two nodes, eight experts: an AllGathered row replaces four copies; ids and probabilities are the small rest
    assert between["hierarchical"] / between["global"] == pytest.approx(2 / 8, rel=0.02)
    limited = Case("node-limited", top_k=4, tokens=512, hidden=1024, chunks=4)
    between = {mode: layer_bytes(limited, mode)["inter"] for mode in MODES}
    assert between["deduplicated"] / between["hierarchical"] == pytest.approx(1 / 2, rel=0.05)


def test_seconds_are_the_slower_link_of_each_step_by_hand():
    case = Case("balanced", top_k=8, tokens=64, hidden=32, chunks=1)
    row, nodes = 32 * ITEMSIZE + 2 * 8 * 4, 2
    gathered = nodes * 64 * row / RATES.inter
    scattered = nodes * 64 * 32 * ITEMSIZE / RATES.inter
    inside = layer_bytes(case, "hierarchical")["intra"] / RATES.intra
    # the busiest node of each step counts, and both steps inside have the same one
    assert move_seconds(case, "hierarchical", RATES) == pytest.approx(gathered + scattered + inside, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_chunks_hide_something_but_never_beat_the_busiest_stream(mode):
    case = Case("balanced", top_k=4, tokens=256, hidden=128, chunks=4)
    moves = move_seconds(case, mode, RATES)
    stride, timeline = overlapped(case, mode, RATES, compute=moves)
    assert timeline.makespan < 0.9 * 2 * moves
    assert timeline.makespan >= max(timeline.busy(stream) for stream in ("compute", "inter", "intra"))
    assert timeline.busy("compute") == pytest.approx(moves)
    assert len(chunk_ops(case, mode, RATES, moves, stride)) == 4 * (3 if mode == "global" else 5)


def test_without_iproute2_the_script_says_so_and_is_no_failure(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/ep_network.py")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: ")
    assert "root" in done.stdout or "iproute2" in done.stdout


def test_jobs_survive_the_pipe():
    job = Job(1, "global", "chunks", 0.25, 2)
    assert Job(**json.loads(json.dumps(vars(job)))) == job
