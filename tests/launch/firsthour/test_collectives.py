"""Planning, running and judging the collectives of a recipe's groups."""

import json
from pathlib import Path

import pytest

from launch.firsthour import collectives
from launch.firsthour.collectives import CPU_BYTES, command_of, judge_collectives, measured, rows_of, words_of
from plugins.errors import ClusterError
from tools.doctor.ask import Trouble
from tools.estimate.efficiency import cluster
from tools.hardware import DEFAULT_HARDWARE
from tools.profile.study import run_of

ROOT = Path(__file__).parents[3]
HARDWARE = cluster(DEFAULT_HARDWARE)


def config(name):
    return run_of(ROOT / "recipes" / f"{name}.yaml", ())


def row(seconds, predicted=0.01, groups=None):
    groups = groups if groups is not None else [[2 * number, 2 * number + 1] for number in range(len(seconds))]
    return {"group": "tp", "operator": "AllGather", "bytes": 2_000_000, "ranks": 2, "stride": 1, "groups": groups,
            "seconds": seconds, "predicted": predicted}  # fmt: skip


def test_a_cpu_runs_the_same_groups_with_what_it_has():
    rows = rows_of(config("telechat3_438b/pretrain_4k"), HARDWARE, 8, on_cpu=True)
    assert {one["operator"] for one in rows} == {"AllReduce"}
    assert max(one["bytes"] for one in rows) == CPU_BYTES
    assert [one["groups"] for one in rows if one["group"] == "tp"] == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert all(one["predicted"] is None for one in rows)
    (one, *_) = rows_of(config("mini/pretrain"), HARDWARE, 2, on_cpu=True)
    assert (one["group"], one["groups"]) == ("dp", [[0, 1]])
    assert rows_of(config("mini/pretrain"), HARDWARE, 2, on_cpu=False) == []


def test_a_slow_group_is_named_and_the_others_are_compared_with_the_prediction():
    usual = [[0.010, 0.011, 0.012]] * 7
    found = judge_collectives([row([*usual, [0.030, 0.031, 0.032]])], ["a", "b"], 8, on_cpu=False)
    assert [(item.verdict, item.where, item.device) for item in found] == [("fail", "b", 6)]
    assert "2.8 times as long as in most of 8 groups; the group has ranks 14 to 15" in found[0].seen
    assert [item.verdict for item in judge_collectives([row(usual)], ["a", "b"], 8, on_cpu=False)] == ["ok"]
    late = judge_collectives([row(usual, predicted=0.004)], ["a", "b"], 8, on_cpu=False)
    assert [item.verdict for item in late] == ["warn"] and "11 ms in the fastest group of 7, 4 ms" in late[0].seen


def test_groups_that_differ_too_much_among_each_other_are_unknown():
    """Only the fastest of groups that took 1, 1.5, 2 and 2.5 times as long was judged, and all was ok."""
    found = judge_collectives([row([[0.01 * factor] * 3 for factor in (1, 1.5, 2, 2.5)])], ["a"], 8, on_cpu=False)
    assert [(item.verdict, item.device) for item in found] == [("unknown", 4), ("unknown", 6), ("ok", None)]
    assert "they differ too much among each other" in found[0].seen


def test_what_cannot_be_compared_is_unknown():
    found = judge_collectives([row([[0.01]], predicted=None), row([], groups=[])], ["a"], 2, on_cpu=True)
    assert [item.verdict for item in found] == ["unknown", "unknown"]
    assert judge_collectives([], ["a"], 1, on_cpu=False)[0].verdict == "unknown"


def test_many_nodes_are_started_by_ssh_each_with_its_own_number(tmp_path, monkeypatch):
    sent = {}

    def call(argvs, seconds):
        sent.update(argvs)
        for rank in range(4):
            (tmp_path / "c" / f"rank_{rank}.json").write_text(json.dumps([[0.1 * (rank + 1), 0.2]]))
        return dict.fromkeys(argvs, "")

    monkeypatch.setattr(collectives, "call_each", call)
    (found,) = measured([row([], groups=[[0, 1], [2, 3]])], tmp_path / "c", ["a", "b"], 2, "Ascend", 60)
    assert found["seconds"] == [[0.2, 0.2], [0.4, 0.2]]  # of the slowest rank
    assert [[word for word in sent[name] if word.startswith(("--node", "--master_a"))] for name in "ab"] == [
        ["--node_rank=0", "--master_addr=a"], ["--node_rank=1", "--master_addr=a"],
    ]  # fmt: skip
    monkeypatch.setattr(collectives, "call_each", lambda argvs, seconds: {"b": Trouble("ssh", "no route", "look")})
    with pytest.raises(ClusterError, match="b: the collectives were not measured: no route; look"):
        measured([row([], groups=[[0, 1]])], tmp_path / "c", ["a", "b"], 2, "Ascend", 60)
    monkeypatch.setattr(collectives, "call_each", lambda argvs, seconds: {})
    with pytest.raises(ClusterError, match="rank 0 did not write this file"):
        measured([row([], groups=[[0, 1]])], tmp_path / "c", ["a", "b"], 2, "Ascend", 60)


def test_a_failing_msrun_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "command_of", lambda *words, **more: ["false"])
    with pytest.raises(ClusterError, match=r"msrun\.log: .* because msrun ended with exit code 1"):
        measured([row([], groups=[[0, 1]])], tmp_path / "c", ["a"], 2, "CPU", 60)
    monkeypatch.setattr(collectives, "command_of", lambda *words, **more: ["sleep", "3600"])
    with pytest.raises(ClusterError, match="not measured within 1 s"):
        measured([row([], groups=[[0, 1]])], tmp_path / "c", ["a"], 2, "CPU", 1)


def test_the_plan_says_what_is_measured_and_how(tmp_path):
    assert words_of(row([])) == "AllGather of 2.0 MB, 2 ranks that are 1 apart (tp)"
    command = command_of(tmp_path, 16, 8, 1, "a")
    assert {"--worker_num=16", "--local_worker_num=8", "--node_rank=1", "--master_addr=a"} <= set(command)


@pytest.mark.slow
def test_cpu_workers_measure_two_kinds_of_groups_at_once(tmp_path):
    rows = [row([], None, [[0, 1], [2, 3]]), row([], None, [[0, 2], [1, 3]])]
    rows = [{**one, "operator": "AllReduce", "bytes": 4096} for one in rows]
    found = measured(rows, tmp_path / "c", ["here"], 4, "CPU", 600)
    assert [[len(rounds) for rounds in one["seconds"]] for one in found] == [[5, 5], [5, 5]]
    assert all(second > 0 for one in found for rounds in one["seconds"] for second in rounds)
