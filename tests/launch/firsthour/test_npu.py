"""The checks that train on NPUs: their commands, what they write, and how they judge losses. No NPU is here, so the
tests write what the commands would have written; the small recipes are compiled in tests/tools/recipe.
"""

import json
import re
from pathlib import Path

import pytest

from launch.firsthour import npu
from launch.firsthour.checks import GO_WITH, HOUR_CHECKS, Finding, judged
from launch.firsthour.checks import verdict as verdict_of
from launch.firsthour.collectives import words_of
from launch.firsthour.hour import Hour
from launch.firsthour.npu import NpuHour, hour_of
from launch.firsthour.plan import as_text, plan_of
from launch.firsthour.trainings import CURVE, judge_curves
from plugins.errors import ClusterError, RecipeError
from tools.accuracy.judge import tolerance
from tools.check.check import check_recipe
from tools.doctor.ask import Trouble
from tools.recipe.load import load_recipe
from tools.recipe.view import View
from tools.schema.stages import loss_rank

ROOT = Path(__file__).parents[3]
R438 = ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"
R36 = ROOT / "recipes" / "telechat3_36b" / "pretrain_8k.yaml"
MINI = ROOT / "recipes" / "mini" / "pretrain.yaml"


@pytest.fixture
def hour(tmp_path):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("".join(f"node{number} 8\n" for number in range(16)))
    found = NpuHour(R438, tmp_path / "work", hosts)
    found.npus = [Path(f"/dev/davinci{number}") for number in range(8)]
    return found


def keep_losses(hour, run, devices, losses):
    """Write the metrics of a run as its workers would."""
    folder = hour.work / run / "metrics"
    folder.mkdir(parents=True)
    rank = loss_rank(View(load_recipe(hour.of(devices))))
    lines = [{"step": step, "loss": loss + 0.1, "lm_loss": loss, "time": 0.0} for step, loss in losses.items()]
    (folder / f"rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_small_recipes_and_hosts_are_written_and_the_recipes_are_sound(hour):
    hour.write_small()
    assert hour.counts == [2, 8, 64]
    for devices in (0, 1, 2, 8, 64):
        recipe = load_recipe(hour.of(devices))
        assert [str(one) for one in check_recipe(recipe).errors] == []
        assert recipe["context"]["device_target"] == ("Ascend" if devices else "CPU")
        assert recipe["train_dataset"]["data_loader"]["config"]["data_path"] == ["1", str(hour.corpus)]
    assert hour.hosts_of(64).read_text().split("\n")[:2] == ["node0 8", "node1 8"]
    assert len(hour.hosts_of(64).read_text().split()) == 16
    assert not (hour.work / "stage.yaml").exists()  # devices may be too few for a stage, but not for the small recipes
    hour.write_measured()
    stage, profiled = (load_recipe(hour.work / name) for name in ("stage.yaml", "profiled.yaml"))
    for recipe in (stage, profiled):
        assert [str(one) for one in check_recipe(recipe).errors] == []
        assert "CheckpointMonitor" not in [one["type"] for one in recipe["callbacks"]]
    assert View(stage).devices == 128  # of the 512 that a stage of the recipe has
    assert [one["type"] for one in profiled["callbacks"] if one not in stage["callbacks"]] == ["ProfileMonitor"]
    assert "ProfileMonitor" not in hour.small.read_text()


@pytest.mark.parametrize(("factor", "wanted"), [(1.001, "ok"), (1.01, "fail"), (float("nan"), "fail")])
def test_one_device_is_compared_with_a_cpu(hour, monkeypatch, factor, wanted):
    asked = []
    monkeypatch.setattr(npu, "ask", lambda words, seconds: asked.append(words))
    hour.write_small()
    monkeypatch.setattr(NpuHour, "write_small", lambda self: None)
    keep_losses(hour, "cpu", 0, {1: 7.6, 2: 7.5, 3: 7.4})
    keep_losses(hour, "one", 1, {1: 7.6, 2: 7.5 * factor, 3: 7.4, 4: 7.3})
    found, evidence = hour.mini(60, {})
    assert [words[1] for words in asked] == [str(hour.of(0)), str(hour.of(1))]
    assert judged("mini", found, {}).verdict == wanted
    assert evidence["rows"][0]["wanted"] == {"1": 7.6, "2": 7.5, "3": 7.4}


def test_more_devices_go_on_from_the_checkpoint_of_one_and_across_nodes_by_ssh(hour, monkeypatch):
    hour.write_small()
    one = {step: 8.0 - step / 10 for step in range(1, 13)}
    keep_losses(hour, "one", 1, one)
    asked, sent = [], []

    def trained(words):
        asked.append(words)
        count = int(Path(words[1]).stem.removeprefix("small_"))
        off = 1.02 if count == 8 else 1.0
        keep_losses(hour, f"parallel_{count}", count, {step: one[step] * off for step in range(5, 9)})

    def script(words, seconds):
        trained(words)
        return "echo the script\n", ""

    def call(argvs, seconds):
        (argv,) = {tuple(argv) for argv in argvs.values()}
        sent.append((list(argvs), argv, Path(argv[1]).read_text()))
        return dict.fromkeys(argvs, "")

    monkeypatch.setattr(npu, "ask", lambda words, seconds: trained(words))
    monkeypatch.setattr(npu, "output", script)
    monkeypatch.setattr(npu, "call_each", call)
    found, evidence = hour.parallel(60, {})
    assert [(item.what, item.verdict) for item in found] == [
        ("2 devices", "ok"), ("8 devices", "fail"), ("64 devices", "ok"),
    ]  # fmt: skip
    assert all(words[words.index("--resume") + 1].endswith("one/checkpoint/iteration_00000004") for words in asked)
    assert list(evidence["rows"][0]["wanted"]) == ["5", "6", "7", "8"]
    assert sent == [([f"node{n}" for n in range(8)], ("bash", str(hour.work / "parallel_64.sh")), "echo the script\n")]
    late = Trouble("ssh", "no answer within 60 s", "look there")
    monkeypatch.setattr(npu, "call_each", lambda argvs, seconds: {"node3": late})
    with pytest.raises(ClusterError, match=r"node3: .bash .*parallel_64.sh. failed: no answer within 60 s; look there"):
        hour.parallel(60, {})


def test_losses_that_are_not_there_are_unknown():
    assert tolerance("bfloat16", 1) == CURVE
    rows = [{"name": "a", "wanted": {"1": 2.0, "2": 2.0}, "got": {"1": 2.0, "2": None}}]
    assert [(item.verdict, item.seen) for item in judge_curves(rows)] == [("unknown", "step 2 has no loss")]
    assert judge_curves([{"name": "a", "wanted": {}, "got": {}}])[0].verdict == "unknown"
    assert judge_curves([])[0].verdict == "unknown"


def test_which_hour_it_is(tmp_path, monkeypatch):
    def of(recipe, npus, planned):
        monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path(f"/dev/davinci{n}") for n in range(npus)])
        return hour_of(recipe, tmp_path, None, planned)

    assert type(of(R438, 0, planned=False)) is Hour
    assert type(of(R438, 0, planned=True)) is NpuHour
    assert type(of(R438, 8, planned=False)) is NpuHour
    assert type(of(MINI, 0, planned=True)) is Hour
    with pytest.raises(ClusterError, match="this recipe trains on CPU, so it cannot check the NPUs"):
        of(MINI, 8, planned=False)


def test_the_stage_is_trained_on_all_nodes_and_its_variants_against_each_other(hour, monkeypatch):
    asked, sent, scripts = [], [], []
    measured = {"seconds": 2.0, "terms": {"matmul": 2.0}}
    fit = {"measured": measured, "before": {"matmul": 1.8}, "after": {"matmul": 2.0}, "fitted": {}, "notes": []}

    def script(words, seconds):
        scripts.append(words)
        return "echo\n", ""

    class Read:
        def __init__(self, folder):
            self.folder = folder

        def usual(self):
            return 1.0 if self.folder.name == "bias_swiglu_fusion_true" else 2.0

    monkeypatch.setattr("launch.firsthour.hour.ask", lambda words, seconds: asked.append(words) or fit)
    monkeypatch.setattr("launch.firsthour.hour.load_run", Read)
    monkeypatch.setattr(npu, "output", script)
    monkeypatch.setattr(npu, "call_each", lambda argvs, seconds: sent.append(list(argvs)) or dict.fromkeys(argvs, ""))
    found, evidence = hour.stage(60, {})
    assert [words[0:2] for words in asked] == [["search", "calibrate"]]
    assert all(nodes == [f"node{number}" for number in range(16)] for nodes in sent)
    assert len(sent) == len(scripts) == 1 + len(evidence["variants"])
    assert all("--script" in words and "--json" not in words for words in scripts)
    verdicts = {item.what: item.verdict for item in found}
    assert verdicts["step time"] == "ok" and verdicts["memory"] == "unknown"
    assert verdicts["model.model_config.bias_swiglu_fusion"] == "ok"
    overlay = load_recipe(hour.work / "overlay.yaml")
    assert overlay["model"]["model_config"]["bias_swiglu_fusion"] is True


def test_a_training_on_several_nodes_has_equally_many_devices_on_each(hour, monkeypatch):
    monkeypatch.setattr(npu, "output", lambda words, seconds: ("echo\n", ""))
    asked = []
    monkeypatch.setattr(npu, "call_each", lambda argvs, seconds: asked.append(list(argvs)) or {})
    hour.work.mkdir()
    for each, devices, lines in ((8, 12, ["node0 6", "node1 6"]), (6, 16, [f"node{n} 4" for n in range(4)])):
        hour.npus = [Path(f"/dev/davinci{number}") for number in range(each)]
        hour.write_hosts(devices)
        assert hour.hosts_of(devices).read_text().splitlines() == lines
        hour._across(devices, ["train"], "run", 60)
        assert asked.pop() == [line.split()[0] for line in lines]
    hour.npus = hour.npus[:4]
    hour.nodes.write_text("node0 4\nnode1 4\n")
    with pytest.raises(ClusterError, match="7 devices cannot be divided equally among 2 nodes with at most 4"):
        hour.write_hosts(7)


def test_too_few_devices_for_a_stage_leave_the_other_checks_alone(tmp_path):
    hour = NpuHour(R438, tmp_path / "work")
    hour.npus = [Path(f"/dev/davinci{number}") for number in range(8)]
    assert (hour.world, hour.counts) == (8, [2, 8])
    assert len(hour.commands()["stage"]) == 2
    with pytest.raises(RecipeError, match="one stage needs at least 16 devices, but only 8 are available"):
        hour.stage(60, {})
    hour.npus = []  # a plan for as many nodes as the recipe needs
    assert (hour.world, hour.counts) == (4096, [2, 8, 64])


def test_a_recipe_for_one_device_is_not_compared_with_itself(tmp_path):
    """One device was the only number of devices, and agreed with the one device."""
    degrees = "{data_parallel: 1, model_parallel: 1, context_parallel: 1, pipeline_stage: 1}"
    (tmp_path / "r.yaml").write_text(f"base_config: {R36}\nparallel_config: {degrees}\n")
    hour = NpuHour(tmp_path / "r.yaml", tmp_path / "work")
    assert hour.counts == [] and hour.commands()["parallel"] == []
    ((found,), evidence) = hour.parallel(60, {})
    assert found.verdict == "unknown" and "has no parallelism, so that nothing was compared" in found.seen
    rest = [judged(one.name, [Finding("ok", one.name, "")], {}) for one in HOUR_CHECKS if one.name != "parallel"]
    word, (line,) = verdict_of([*rest, judged("parallel", [found], evidence)])
    assert word == GO_WITH and line.startswith("unknown parallel: ")


def test_a_plan_for_several_nodes_names_the_first_one_as_master(tmp_path):
    def master(hour):
        groups = next(one for one in plan_of(hour, 3600)["checks"] if one["check"] == "collectives")
        return re.search(r"--master_addr=(\S+)", groups["commands"][0])[1]

    assert master(NpuHour(R438, tmp_path)) == "FIRST_NODE", "nobody has said what the nodes are called"
    (tmp_path / "hosts").write_text("a 8\nb 8\n")
    assert master(NpuHour(R438, tmp_path, tmp_path / "hosts")) == "a"
    assert master(Hour(R438, tmp_path, tmp_path / "hosts")) == "127.0.0.1", "CPU workers of this node"


def test_a_plan_has_nodes_for_all_devices_also_where_they_do_not_fill_the_last(tmp_path):
    """Twelve devices were planned as the eight of one node."""
    degrees = "{data_parallel: 3, model_parallel: 2, pipeline_stage: 2, micro_batch_num: 4}"
    (tmp_path / "r.yaml").write_text(f"base_config: {R36}\nparallel_config: {degrees}\n")
    hour = NpuHour(tmp_path / "r.yaml", tmp_path / "work")
    assert (hour.view.devices, hour.node_count, hour.world, hour.counts) == (12, 2, 16, [2, 8])
    rows = hour.group_rows()
    assert any(row["bytes"] < 1e5 for row in rows) and " of 0.0 " not in "".join(map(words_of, rows))


def test_the_devices_of_a_plan_are_those_of_the_hosts_file(tmp_path):
    """Six nodes of 64 had their collectives planned on 96 devices, and 3 nodes of 8 were said to have 4,096 devices."""
    hosts = tmp_path / "hosts"
    for nodes, slots, devices in ((64, 64, 4096), (3, 8, 24), (3, "", 24)):
        hosts.write_text("".join(f"node{number} {slots}\n" for number in range(nodes)))
        hour = NpuHour(R438, tmp_path / "work", hosts)
        plan, checks = plan_of(hour, 3600), {one["check"]: one for one in plan_of(hour, 3600)["checks"]}
        assert (hour.world, plan["nodes"], plan["devices"], plan["recipe_devices"]) == (devices, nodes, devices, 4096)
        assert checks["devices"]["where"].endswith(f"ranks 0-{devices - 1}")
        assert f"--worker_num={devices} " in checks["collectives"]["commands"][0]
        left = [
            words for words in checks["collectives"]["measures"] if "not measured, because the nodes have 24" in words
        ]
        assert bool(left) == ("the recipe takes 4,096 devices" in as_text(plan)) == (devices < 4096)
    hour.npus = [Path(f"/dev/davinci{number}") for number in range(4)]
    assert hour.world == 12, "this node has only four"
