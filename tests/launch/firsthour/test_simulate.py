"""Planted defects are named with node and device, clean clusters raise no alarm, planted terms are found again."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from launch.firsthour.calibrate import fit_memory, judge_fit, memory_row
from launch.firsthour.checks import judged, run_checks, verdict
from launch.firsthour.simulate import DEFECTS, Cluster, Play, read_cluster
from launch.firsthour.trainings import rank_counts
from plugins.errors import ClusterError, RecipeError
from tools.estimate.memory.model import all_stages
from tools.hardware.units import GIB
from tools.profile.study import run_of

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "launch" / "firsthour" / "nine_defects.yaml"
HOSTS = ("hosts", "versions", "devices", "operators")  # checks that look at many nodes


@cache
def config():
    return run_of(ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml", ())


def simulated(cluster, folder, checks=None):
    """Outcomes of a simulated cluster; with `checks` only of these, and no others are run."""
    work = Play(cluster, config()).work_of()
    chosen = {name: work[name] for name in checks or work}
    return run_checks(chosen, folder, 3600, lambda outcome, kept: None)


def named(outcomes):
    """(what, node, device) of every finding that warns or fails."""
    return {
        (item.what, item.where, item.device)
        for one in outcomes
        for item in one.findings
        if item.verdict in ("warn", "fail")
    }


WORDS = {
    "slow link": "link", "throttled device": "matmul", "wrong rounding": "operators", "slow port": "network port",
    "slow disk": "disk", "clock": "clocks", "huge pages": "huge_pages", "cann": "CANN",
    "less memory": "memory of devices",
}  # fmt: skip


IN_TRAININGS = {
    "doubled gradient": "parallel",
    "lost moments": "resume",
    "slow group": "collectives",
}  # defect -> the check that shows it


@pytest.mark.slow
def test_nine_defects_at_once_are_each_named_with_node_and_device_and_nothing_else(tmp_path):
    cluster = read_cluster(EXAMPLE)
    assert {one["what"] for one in cluster.defects} == set(WORDS) == set(DEFECTS) - IN_TRAININGS.keys()
    assert cluster.nodes == 64
    outcomes = simulated(cluster, tmp_path)
    wanted = {(WORDS[one["what"]], one["node"], one.get("device")) for one in cluster.defects}
    assert named(outcomes) == wanted
    assert verdict(outcomes)[0] == "no go"
    assert {one.check for one in outcomes if not one.told} == {
        *("collectives", "mini", "parallel", "stage", "resume", "calibrate")
    }


@pytest.mark.parametrize("number", range(len(WORDS)))
def test_each_defect_alone_is_named_wherever_it_is(tmp_path, number):
    example = read_cluster(EXAMPLE)
    defect = {**example.defects[number], "node": f"node{7 * number + 1:03d}"}
    if "to" in defect:
        defect["to"] = [f"node{7 * number + 5:03d}", 6]  # four nodes further, which is measured
    if "device" in defect:
        defect["device"] = 6
    checks = HOSTS if defect["what"] == "wrong rounding" else HOSTS[:3]
    outcomes = simulated(replace(example, defects=[defect], seed=number), tmp_path, checks)
    assert named(outcomes) == {(WORDS[defect["what"]], defect["node"], defect.get("device"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "failed"),
    [
        ({"what": "doubled gradient", "node": "node000", "device": 1}, ["2 devices", "8 devices", "512 devices"]),
        ({"what": "doubled gradient", "node": "node000", "device": 6}, ["8 devices", "512 devices"]),
        ({"what": "doubled gradient", "node": "node063", "device": 7}, ["512 devices"]),
        ({"what": "lost moments", "node": "node000"}, ["resume"]),
        ({"what": "wrong rounding", "node": "node000", "device": 0}, ["golden losses"]),
    ],
)
def test_a_defect_of_a_training_is_found_by_the_rules_for_real_trainings(tmp_path, defect, failed):
    work = Play(Cluster(defects=[defect]), config()).work_of()
    checks = ("mini", "parallel", "resume")
    outcomes = [judged(name, *work[name](60, {})) for name in checks]
    bad = [(one.check, item.what) for one in outcomes for item in one.findings if item.verdict == "fail"]
    check = IN_TRAININGS.get(defect["what"], "mini")
    assert [what for name, what in bad if name == check] == failed
    assert {name for name, _ in bad} <= {check, "parallel"}


@pytest.mark.parametrize(
    ("group", "first", "place"), [("tp", 256, ("node032", 0)), ("ep", 496, ("node062", 0)), ("dp", 5, ("node000", 5))]
)
def test_a_slow_group_of_the_recipe_is_named_by_its_kind_and_first_device(group, first, place):
    defect = {"what": "slow group", "node": place[0], "device": place[1], "group": group, "factor": 0.5}
    assert first == int(place[0][4:]) * 8 + place[1]
    found, evidence = Play(Cluster(defects=[defect]), config()).collectives(60, {})
    bad = [(item.what.split(",")[0], item.where, item.device) for item in found if item.verdict == "fail"]
    assert bad == [(group, *place)] * (2 if group == "ep" else 1), "a dispatch in two steps has two groups"
    assert [item.what for item in found if item.verdict == "unknown"] == ["pp, 2 ranks"]  # 512 apart, of 512 devices
    assert sum(len(row["groups"]) for row in evidence["rows"]) == 256 + (256 + 64) + 16 + 2 + 1


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_a_clean_cluster_are_as_predicted(seed):
    found, _ = Play(Cluster(seed=seed), config()).collectives(60, {})
    assert {item.verdict for item in found if not item.what.startswith("pp")} == {"ok"}


def test_clean_trainings_are_judged_and_not_only_said_to_be_ok(tmp_path):
    work = Play(Cluster(), config()).work_of()
    parallel, evidence = work["parallel"](60, {})
    assert [(item.verdict, item.what) for item in parallel] == [("ok", f"{n} devices") for n in (2, 8, 512)]
    assert all(row["tensors"] > 20 and row["used"] < 0.1 for row in evidence["rows"])
    (resume,), evidence = work["resume"](60, {})
    assert resume.seen == "killed after step 5, gone on from step 4; 12 losses have the same bits"
    assert len(set(evidence["whole"].values())) == 12
    (mini,), _ = work["mini"](60, {})
    assert (mini.verdict, mini.seen) == ("ok", "3 steps as in the small model of a healthy device")


def test_numbers_of_devices_are_powers_of_two_of_the_cluster():
    assert rank_counts(8, 64, 1024) == [2, 8, 512]
    assert rank_counts(8, 512, 1024) == [2, 8, 1024]
    assert rank_counts(6, 3, 1024) == [2, 4, 8], "4 devices on each of 2 nodes"
    assert rank_counts(16, 3, 1024) == [2, 16, 32] and rank_counts(7, 5, 8) == [2, 4, 8]
    assert rank_counts(1, 1, 1024) == [] == rank_counts(8, 2, 1)
    assert rank_counts(1, 2, 1024) == [2]


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_cluster_raises_no_alarm(tmp_path, seed):
    outcomes = simulated(Cluster(seed=seed), tmp_path, HOSTS[:3])
    assert named(outcomes) == set()
    assert all(one.verdict == "ok" for one in outcomes if one.check in HOSTS[:3])


def test_planted_efficiencies_and_memory_are_found_again_to_one_percent(tmp_path):
    cluster = replace(read_cluster(EXAMPLE), defects=())
    outcomes = simulated(cluster, tmp_path)
    word, (line,) = verdict(outcomes)  # stages of 512 devices cannot send to each other in a cluster of 512
    assert word == "go with" and line.startswith("unknown collectives: pp, 2 ranks")
    found = outcomes[-1].evidence
    assert set(found["fitted"]) >= set(cluster.efficiency)
    for name, value in cluster.efficiency.items():
        assert found["fitted"][name] == pytest.approx(value, rel=0.01), name
    planted = cluster.memory
    assert found["memory"]["activations"] == pytest.approx(planted["activations"], rel=0.01)
    assert found["memory"]["buffers"] == pytest.approx(planted["buffers"], rel=0.01)
    assert found["memory"]["reserve_bytes"] == pytest.approx(planted["reserve_gib"] * GIB, rel=0.01)


def test_memory_that_the_runs_do_not_tell_apart_is_not_fitted():
    row = {"static": 1e9, "activations": 2e9, "buffers": 1e8, "peak": 4e9}
    assert fit_memory([row] * 5) is None
    assert fit_memory([row, {**row, "activations": 3e9, "peak": 5e9}]) is None


def test_as_many_peaks_as_terms_tell_nothing_and_a_negative_term_is_none():
    """Any three peaks were "fitted within 0.00%", also with activations of -0.5 times what is modelled."""
    rows = [
        {"static": 10.0 * GIB, "activations": some * GIB, "buffers": more * GIB, "peak": peak * GIB}
        for some, more, peak in ((20, 5, 30), (10, 6, 40), (40, 5, 20), (30, 7, 45))
    ]
    assert fit_memory(rows[:3]) is None and fit_memory([]) is None
    rows[3]["peak"] = (10 - 0.5 * 30 + 5 * 7 + 5) * GIB
    memory = fit_memory(rows)
    assert memory.error < 1e-9 and memory.activations < 0
    assert [item.verdict for item in judge_fit(1.0, {"a": 1.0}, ["a"], memory, "")] == ["ok", "warn"]


PORT = {"what": "slow port", "node": "node001", "device": 1, "factor": 0.5}
LINK = {"what": "slow link", "node": "node001", "device": 1, "factor": 0.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nods": 3}, "nods: no such key (did you mean 'nodes'?)"),
        ({"nodes": 1}, "nodes: "),
        ({"memory": {"reserve": 1}}, "memory.reserve: no such key (did you mean 'reserve_gib'?)"),
        ({"efficiency": {"matmull": 1}}, "efficiency.matmull: no such key (did you mean 'matmul'?)"),
        (
            {"defects": [{"what": "slow lnk", "node": "node001"}]},
            "slow lnk: no such defect (did you mean 'slow link'?)",
        ),
        ({"defects": [{"what": "clock", "node": "node001"}]}, "defects[0].seconds: the key is missing"),
        (
            {"defects": [{"what": "huge pages", "node": "node999"}]},
            "there is no node 'node999'; the nodes are node000 to node063",
        ),
        ({"defects": ["clock"]}, "defects[0]: this is not a defect; write a mapping"),
        ({"defects": 3}, "defects: 3 is not a list"),
        ({"memory": ["activations"]}, "memory: ['activations'] is not a mapping"),
        ({"memory": {"buffers": "much"}}, "memory.buffers: 'much' is not a number"),
        ({"efficiency": {"matmul": float("nan")}}, "efficiency.matmul: nan is not finite"),
        ({"device": 5}, "device: 5 is not the name of a device"),
        ({"defects": [{**PORT, "factor": 0}]}, "defects[0].factor: 0 is out of range; it must be a number above 0"),
        ({"defects": [{**PORT, "factor": "half"}]}, "defects[0].factor: 'half' is not a number"),
        ({"defects": [{**PORT, "device": 8}]}, "defects[0].device: 8 is out of range"),
        ({"defects": [{**LINK, "to": "node002"}]}, "defects[0].to: 'node002' does not name the device at"),
        ({"defects": [{**LINK, "to": ["node999", 1]}]}, "defects[0].to[0]: there is no node 'node999'"),
        ({"defects": [{**LINK, "to": ["node002", "1"]}]}, "defects[0].to[1]: '1' is not a number"),
        ({"defects": [{"what": "clock", "node": "node001", "seconds": "x"}]}, "defects[0].seconds: 'x' is not"),
        (
            {"memory_gib": 32, "defects": [{"what": "less memory", "node": "node001", "device": 1, "gib": 33}]},
            "defects[0].gib: 33 is out of range",
        ),
    ],
)
def test_a_wrong_cluster_is_refused_by_its_key(tmp_path, change, words):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(change))
    with pytest.raises((ClusterError, RecipeError)) as error:
        read_cluster(file)
    assert words in str(error.value)
    assert str(file) in str(error.value)


def test_an_empty_section_of_a_cluster_is_none(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("nodes: 3\nmemory:\nefficiency:\ndefects:\n")
    assert read_cluster(file) == Cluster(nodes=3)


def test_outcomes_are_plain_json(tmp_path):
    outcomes = simulated(Cluster(nodes=2, devices_per_node=2), tmp_path, HOSTS)
    for one in outcomes:
        assert json.loads(json.dumps(one.as_json())) == json.loads((tmp_path / f"{one.check}.json").read_text())


@pytest.mark.parametrize("recipe", ["finetune_4k", "pretrain_4k"])
def test_a_row_adds_up_to_the_fullest_moment(recipe):
    """Of the first recipe that is the update after the passes, in which no activations are held."""
    run = run_of(ROOT / "recipes" / "telechat3_105b" / f"{recipe}.yaml", ())
    row = memory_row(run, 5, 1.0)
    assert row["static"] + row["activations"] + row["buffers"] == pytest.approx(all_stages(run)[5].peak)
    assert (row["activations"] == 0) == (recipe == "finetune_4k")
