"""These tests check how the checks judge the outputs of the commands that they run; the commands have separate tests.

Variants of a stage: which dispatch modes and fused operators are tried, which wins, and what the overlay holds.
"""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launch.firsthour import cli
from launch.firsthour import hour as hours
from launch.firsthour.calibrate import judge_fit, judge_stage
from launch.firsthour.checks import Finding, judged
from launch.firsthour.hour import Hour
from launch.firsthour.judge import hosts_evidence, judge_devices, judge_hosts, judge_operators, own_names
from launch.firsthour.trainings import judge_resume
from launch.firsthour.variants import SURE, judge_variants, variants_of, winner_of, write_overlay
from plugins.errors import ClusterError
from plugins.hierarchical_ep.plan import MODES
from tools.check.check import check_recipe
from tools.doctor.ask import Answer, Skew, Trouble
from tools.doctor.checks import Finding as Checked
from tools.doctor.report import Report, tool_version
from tools.hardware.units import GIB
from tools.measured import OUTCOMES, hashed
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View
from tools.runs.attempts import PLAN, Plan, folder_of, write

ROOT = Path(__file__).parents[3]
MINI = ROOT / "recipes" / "mini" / "pretrain.yaml"


@pytest.fixture
def hour(tmp_path):
    return Hour(MINI, tmp_path)


def verdict(findings):
    return judged("mini", findings, {}).verdict


def answering(monkeypatch, content):
    monkeypatch.setattr(hours, "ask", lambda words, seconds, env=None, codes=(): content)


@pytest.mark.parametrize(
    ("golden", "without", "file", "wanted"),
    [
        ([], [], "tests/golden/x.json", "ok"),
        (["step 1 loss: 2, golden 1"], [], "tests/golden/x.json", "fail"),
        ([], ["baseline"], "tests/golden/x.json", "unknown"),
        ([], [], None, "unknown"),
    ],
)
def test_golden_losses(hour, monkeypatch, golden, without, file, wanted):
    answering(monkeypatch, {"golden": golden, "without_golden_numbers": without, "golden_file": file, "steps": 3,
                            "passed": not golden, "rows": []})  # fmt: skip
    found, evidence = hour.mini(60, {})
    assert verdict(found) == wanted
    assert judged("mini", found, {}).bears == (wanted != "fail")  # checks above may go on without golden numbers
    assert "tests/" not in json.dumps(evidence)


@pytest.mark.parametrize("file", ["tests/golden/x.json", None])
def test_a_training_that_failed_has_no_golden_losses(hour, monkeypatch, file):
    """It was "ok: 3 steps as in x.json", because no number differs where nothing was trained."""
    rows = [{"name": "baseline", "status": "fail", "reason": "loss is nan", "tensors": 0, "findings": []}]
    answering(monkeypatch, {"golden": [], "without_golden_numbers": [], "golden_file": file, "steps": 3,
                            "passed": False, "rows": rows})  # fmt: skip
    (found,) = hour.mini(60, {})[0]
    assert found.verdict == "fail" and "loss is nan" in found.seen


@pytest.mark.parametrize(
    ("status", "wanted"),
    [("pass", "ok"), ("fail", "fail"), ("known difference", "warn"), ("not compared", "unknown")],
)
def test_kinds_of_parallelism(hour, monkeypatch, status, wanted):
    row = {"name": "executed_tp2_sp", "status": status, "reason": "", "tensors": 5, "used": 0.4, "findings": []}
    answering(monkeypatch, {"rows": [row]})
    found, _ = hour.parallel(60, {})
    assert verdict(found) == wanted
    answering(monkeypatch, {"rows": []})
    assert verdict(hour.parallel(60, {})[0]) == "unknown"


def test_a_recipe_for_one_device_has_no_parallelism_that_was_compared(tmp_path, monkeypatch):
    row = {"name": "data_parallel_2", "status": "pass", "reason": "", "tensors": 5, "used": 0.4, "findings": []}
    answering(monkeypatch, {"rows": [row]})
    (found,) = Hour(MINI, tmp_path).parallel(60, {})[0]
    assert found.verdict == "ok" and found.seen.endswith("; the recipe itself is for one device")


def test_the_strategies_are_those_of_the_recipe(tmp_path):
    assert Hour(MINI, tmp_path).strategies() == ["data_parallel_2"]
    large = Hour(ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml", tmp_path)
    assert large.strategies() == ["executed_tp2_sp", "executed_pp2", "executed_moe_ep2"]


@pytest.mark.parametrize(
    ("cut", "wanted"),
    [({"1": 2.0, "2": 1.5}, "ok"), ({"1": 2.0, "2": 1.5 + 2**-40}, "fail"), ({"1": 2.0}, "fail")],
)
def test_a_resume_is_compared_bit_by_bit(hour, monkeypatch, cut, wanted):
    answering(monkeypatch, {})
    monkeypatch.setattr(Hour, "write_small", lambda self: None)
    monkeypatch.setattr(Hour, "_killed", lambda self, words, seconds: 5)
    monkeypatch.setattr(Hour, "_losses", lambda self, run: {"whole": {"1": 2.0, "2": 1.5}, "cut": cut}[run])
    found, _ = hour.resume(60, {})
    assert verdict(found) == "fail" and "began anew" in found[0].seen  # there is no attempt
    write(folder_of(hour.work / "cut", 1) / PLAN, Plan(1, 5.0, ["a"], 1, "a", 8118, step=4))
    found, _ = hour.resume(60, {})
    assert verdict(found) == wanted


@pytest.mark.slow
def test_the_steps_of_an_earlier_start_do_not_get_a_training_killed(hour, monkeypatch):
    """It was killed before its first save, so that nothing was resumed, and the losses were those of the old run."""
    metrics = hour.work / "cut" / "metrics" / "rank_0.jsonl"
    line = '{{"step": {step}, "loss": 1.0}}'
    steps = [line.format(step=step) for step in (1, 5)]
    script = (
        f"import pathlib, time; file = pathlib.Path({str(metrics)!r}); time.sleep(1); file.parent.mkdir(parents=True)"
    )
    script += f"; file.write_text({steps[0]!r} + chr(10)); time.sleep(1)"
    script += f"; file.write_text({steps[1]!r} + chr(10)); time.sleep(3600)"
    monkeypatch.setattr(hours, "argv", lambda words: [sys.executable, "-c", script])
    monkeypatch.setattr(hours, "GRACE", 0.1)
    monkeypatch.setattr(hours, "load_recipe", lambda path: load_recipe(MINI))
    metrics.parent.mkdir(parents=True)
    metrics.write_text("".join(line.format(step=step) + "\n" for step in range(1, 13)))
    assert hour._killed(["train"], 300) == 5


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_ended_with_its_children(monkeypatch):
    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']);"
    monkeypatch.setattr(hours, "argv", lambda words: [sys.executable, "-c", f"{script} time.sleep(3600)"])
    monkeypatch.setattr(hours, "GRACE", 0.1)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(ClusterError, match="did not finish within 2 s"):
        hours.ask(["doctor"], 2)
    until = time.monotonic() + 300  # the kernel ends what was killed when it gets to it
    while [child for child in psutil.Process().children(recursive=True) if child.pid not in before and alive(child)]:
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(process):
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; print('tc3: no such recipe', file=sys.stderr); sys.exit(2)", "exit code 2: tc3: no such recipe"),
        ("print('{\"a\": ')", "` is not JSON"),
        ("pass", "` holds no JSON: no message"),
    ],
)
def test_a_command_that_fails_says_why(monkeypatch, script, words):
    monkeypatch.setattr(hours, "argv", lambda given: [sys.executable, "-c", script])
    with pytest.raises(ClusterError) as error:
        hours.ask(["check"], 30)
    assert words in str(error.value)
    assert "tc3 check" in str(error.value)


def test_nodes_are_asked_with_the_recipe_and_named(tmp_path, monkeypatch):
    (tmp_path / "hosts.txt").write_text("a 1\nb 1\nc 1\nd 1\n")
    hour, asked = Hour(MINI, tmp_path, tmp_path / "hosts.txt"), []
    checks = [Checked("swap", "ok", "none", "", "", "")]

    def answer(hosts, words, seconds):
        asked.append((list(hosts), words, seconds))
        told = Report(checks, {"tc3": tool_version(), "Python": "3.11"})
        late = Trouble("ssh", "no answer within 60 s", "look there")
        return {
            "a": Answer(told, Skew(0, 0.01)),
            "b": Answer(told, Skew(3600, 0.01)),
            "c": Answer(late),
            "d": Answer(told, Skew(0, 0.01)),
        }

    monkeypatch.setattr(hours, "ask_all", answer)
    found, evidence = hour.hosts(60, {})
    assert asked == [(["a", "b", "c", "d"], [str(MINI)], 60)]
    assert {(item.where, item.verdict) for item in found if item.what == "ssh"} == {("c", "fail")}
    found, _ = hour.versions(60, {"hosts": judged("hosts", found, json.loads(json.dumps(evidence)))})
    assert {(item.where, item.verdict) for item in found if item.what == "clocks"} == {("b", "fail")}
    found, _ = hour.devices(60, {})
    assert asked[-1][1] == [str(MINI), "--probe"]
    assert {item.where for item in found} == {"a", "b", "c", "d"}
    assert verdict(found) == "unknown"


def probe(rates):
    worker = {
        "place": "", "kind": "x", "cores": "", "memory": [1.0] * 3, "disk": [], "waited": [0.0] * 3,
        "throttled": [0.0] * 3, "failed": "",
    }  # fmt: skip
    workers = [{**worker, "rank": rank, "matmul": [rate] * 3} for rank, rate in enumerate(rates)]
    return {"device": "Ascend", "rounds": 3, "folder": "/", "workers": workers, "links": [], "notes": []}


def test_a_single_worker_and_unknown_memory_are_unknown():
    found = judge_devices({"probes": {"a": probe([1.0])}, "memory": [], "links": []})
    assert {(item.what, item.verdict) for item in found} == {("memory of devices", "unknown"), ("devices", "unknown")}


def test_workers_of_other_kinds_are_not_said_to_be_as_fast_as_their_peers():
    """Two devices of other kinds, one of them 100 times slower, were "2 workers, none slower than its peers"."""
    other = probe([0.01])
    other["workers"][0]["kind"] = "y"
    rows = [["a", 0, GIB], ["b", 0, GIB]]
    links = [{"source": ["a", 0], "target": ["b", 0], "gbytes": [1.0]}]
    (found,) = judge_devices({"probes": {"a": probe([1.0]), "b": other}, "memory": rows, "links": links})
    assert found.verdict == "unknown" and found.seen.startswith("2 of 2 cannot be compared")
    found = judge_devices({"probes": {"a": probe([1.0, 1.0]), "b": other}, "memory": rows, "links": links})
    assert [(item.verdict, item.seen[:9]) for item in found] == [("unknown", "1 of 3 ca"), ("ok", "2 workers")]


def test_links_between_nodes_that_nobody_measured_are_unknown():
    """The check asks for slow links, and said nothing of those between nodes."""
    evidence = {"probes": {"a": probe([1.0]), "b": probe([1.0])}, "memory": [["a", 0, GIB], ["b", 0, GIB]]}
    found = judge_devices({**evidence, "links": []})
    assert [(item.verdict, item.what) for item in found] == [("unknown", "links between nodes"), ("ok", "devices")]
    links = [{"source": ["a", 0], "target": ["b", 0], "gbytes": [1.0]}]
    assert [item.verdict for item in judge_devices({**evidence, "links": links})] == ["ok"]
    apart = [{"source": ["a", at], "target": ["b", at], "gbytes": [rate]} for at, rate in enumerate((10, 7, 5, 4))]
    found = judge_devices({**evidence, "links": apart})
    assert [(item.verdict, item.device) for item in found] == [("unknown", 2), ("unknown", 3), ("ok", None)]
    assert found[-1].seen == "2 workers on 2 nodes, none surely slower than its peers"


@pytest.mark.parametrize("versions", [False, True])
def test_hosts_of_which_nothing_is_known_are_not_judged(versions):
    """They were "31 checks have one verdict on 2 nodes", also where only one node had given a report."""

    def found(*words, silent=0):
        checks = [Checked(name, word, "", "", "", "") for word in words for name in ("swap", "clock")]
        facts = {"tc3": tool_version(), "driver": None if "unknown" in words else "25.5.2"}
        told = [Answer(Report(checks, facts), Skew(0.0, 0.001)) for _ in range(2 - silent)]
        answers = dict(zip("ab", [*told, *[Answer(Trouble("ssh", "no route", ""))] * silent], strict=True))
        return judge_hosts(hosts_evidence(answers), ["a", "b"], versions)

    assert not judged("hosts", found("unknown"), {}).told
    (sound,) = found("ok")
    assert sound.verdict == "ok" and sound.seen.startswith(
        f"{1 + versions} checks and facts are known and the same on 2"
    )
    assert {item.verdict for item in found("ok", silent=1)} == ({"unknown"} if versions else {"fail", "unknown"})
    answer = {"a": Answer(Report([Checked("swap", "ok", "", "", "", "")], {"tc3": tool_version()}))}
    assert judge_hosts(hosts_evidence(answer), ["a"], False)[-1].seen == "1 checks and facts are known"


def test_a_resume_without_any_loss_is_unknown():
    (found,) = judge_resume({}, {}, 5, 4)
    assert found.verdict == "unknown"


@pytest.mark.parametrize("gib", [[32, 64], [64, 32], [32, 63.99, 64, 63.98]])
def test_a_device_with_less_memory_is_named_whatever_the_order(gib):
    """The first of equally frequent sizes was taken for the usual one."""
    rows = [[f"n{number}", 0, int(size * GIB)] for number, size in enumerate(gib)]
    found = judge_devices({"probes": {"n": probe([1.0, 1.0])}, "memory": rows, "links": []})
    wrong = [(item.verdict, item.where) for item in found if item.what == "memory of devices"]
    assert wrong == [("fail", f"n{gib.index(32)}")]


def test_operators_wrong_for_infinities_only_are_a_warning_and_a_device_of_its_own_rounding_is_named():
    good = {"matmul float16 (2, 2) forward 0": ["pass", 0.1, ""], "exp float16 (2,) special 0": ["fail", 1.0, "nan"]}
    found = judge_operators([{"host": "a", "device": 0, "results": good, "shipped": None}])
    assert [item.verdict for item in found] == ["warn", "ok"]
    other = {**good, "matmul float16 (2, 2) forward 0": ["pass", 0.3, ""]}
    rows = [
        {"host": "a", "device": device, "results": other if device == 2 else good, "shipped": None}
        for device in range(4)
    ]
    named = [item for item in judge_operators(rows) if "error 0.3" in item.seen]
    assert [(item.verdict, item.where, item.device) for item in named] == [("warn", "a", 2)]


def test_names_that_only_the_hosts_themselves_say_are_hidden_too():
    """A bundle with hashed names held the names and addresses of hosts that the file of --nodes called otherwise."""
    unknown = "the host does not tell its name"
    said = {"10.1.2.3": "Train7 is 10.1.2.3, fe80::7", "b": "b.example leads nowhere", "c": unknown}
    reports = {
        host: Answer(Report([Checked("host_name", "ok", words, "", "", "")], {"tc3": tool_version()}))
        for host, words in said.items()
    }
    found = own_names([judged("hosts", [], hosts_evidence(reports))])
    assert found == ["Train7", "10.1.2.3", "fe80::7", "b.example"] and own_names([]) == []


def test_a_host_has_one_hidden_name_whatever_letters_it_writes_itself_with():
    """The findings named another host than the reports beside them."""
    sound = Checked("host_name", "ok", "node1 is 10.1.2.3", "", "", "")
    evidence = hosts_evidence({"Node1": Answer(Report([sound], {"tc3": tool_version()}))})
    slow = judged("hosts", [Finding("warn", "hosts", "Node1 is slow", "Node1")], evidence)
    about = {"device": "910B3", "devices": 1, "simulated": False}
    _, texts = cli._bundle(MINI, [slow], about, True, ["Node1"])
    (row,) = json.loads(texts[OUTCOMES])
    assert row["findings"][0]["where"] == hashed("Node1") and hashed("Node1") in str(row["evidence"])
    assert "node1" not in texts[OUTCOMES].lower() and hashed("node1") not in texts[OUTCOMES]


def test_devices_of_two_kinds_of_rounding_do_not_compute_the_same():
    """With as many devices of each kind, none was named and all were "within the tolerance"."""
    name = "matmul float16 (2, 2) forward 0"
    rows = [
        {"host": "a", "device": device, "results": {name: ["pass", 0.1 + 0.2 * (device % 2), ""]}, "shipped": None}
        for device in range(2)
    ]
    warning, _ = judge_operators(rows)
    assert (warning.verdict, warning.device) == ("warn", None) and "errors 0.1, 0.3: the devices" in warning.seen
    many = [{**rows[0], "device": each, "results": {name: ["pass", each / 1000, ""]}} for each in range(500)]
    assert "500 different errors from 0 to 0.499: the devices" in judge_operators(many)[0].seen
    rows[1]["results"][name] = ["fail", 3.0, "wrong"]
    assert [(item.verdict, item.device) for item in judge_operators(rows)] == [("fail", 1)]


def test_operators_that_were_not_computed_are_not_within_the_tolerance():
    """Operators without a kernel, and a device of which nothing is known, were "all within the tolerance"."""
    passed, none = ["pass", 0.1, ""], ["not runnable", 0.0, "no kernel"]

    def judged_of(*results):
        rows = [{"host": "a", "device": at, "results": each, "shipped": None} for at, each in enumerate(results)]
        return [(item.verdict, item.device) for item in judge_operators(rows)]

    assert judged_of({}) == [("unknown", None)]
    assert judged_of({"exp float16 (2,) forward 0": none}) == [("warn", None), ("unknown", None)]
    one, two = {"exp float16 (2,) forward 0": passed}, {"exp float16 (2,) forward 0": none}
    assert judged_of(one, one, two, {}) == [("unknown", 2), ("unknown", 3), ("ok", None)]


def test_gates_of_the_stage_and_of_the_fit():
    evidence = {"seconds": 3.0, "predicted": {"matmul": 1.0}, "memory": [], "why_no_memory": "no device"}
    assert [item.verdict for item in judge_stage(evidence)] == ["warn", "unknown"]
    assert [item.verdict for item in judge_stage({**evidence, "seconds": 1.5})] == ["ok", "unknown"]
    assert [item.verdict for item in judge_fit(1.0, {"a": 1.005}, ["a"], None, "why")] == ["ok", "unknown"]
    assert [item.verdict for item in judge_fit(1.0, {"a": 1.02}, ["a"], None, "why")] == ["warn", "unknown"]


def test_hosts_whose_golden_results_are_not_the_shipped_ones_are_named():
    results = {"matmul float16 (2, 2) forward 0": ["pass", 0.1, ""]}
    good = {"made": "2026-11-27", "compared": 9, "differences": [], "says": ""}
    wrong = {**good, "differences": ["matmul float16 output 0: this host computes 1, shipped is 2", "more"]}
    rows = [{"host": host, "device": 0, "results": results, "shipped": good} for host in "abc"]
    assert [(item.verdict, item.what) for item in judge_operators(rows)] == [
        ("ok", "golden results"),
        ("ok", "operators"),
    ]
    rows[1]["shipped"] = wrong
    (found,) = [item for item in judge_operators(rows) if item.what == "golden results"]
    assert (found.verdict, found.where) == (
        "fail",
        "b",
    ) and "shipped is 2 (further golden results that differ: 1)" in found.seen


def test_operators_run_on_every_device_of_every_node(tmp_path, monkeypatch):
    (tmp_path / "hosts.txt").write_text("a 2\nb 2\n")
    hour, sent = Hour(ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml", tmp_path, tmp_path / "hosts.txt"), []
    hour.npus = [Path("/dev/davinci0"), Path("/dev/davinci1")]
    row = {"op": "matmul", "dtype": "float16", "shape": [2, 2], "phase": "forward", "tensor": 0, "status": "pass",
           "error": 0.1, "detail": ""}  # fmt: skip

    def call(argvs, seconds, codes):
        assert codes == (0, 1, 2)  # 2: no operator could be computed there
        sent.append((list(argvs), argvs["a"][:2], seconds))
        return {"a": json.dumps({"rows": [row]}), "b": Trouble("ssh", "no route", "look") if len(sent) == 1 else "x"}

    monkeypatch.setattr(hours, "call_each", call)
    found, evidence = hour.operators(60, {})
    assert [one[1] for one in sent] == [["env", f"ASCEND_RT_VISIBLE_DEVICES={number}"] for number in (0, 1)]
    assert all(one[0] == ["a", "b"] and one[2] == 30 for one in sent)
    assert [(one["host"], one["device"]) for one in evidence["devices"]] == [("a", 0), ("a", 1)]
    unknown = [(item.where, item.device, item.seen) for item in found if item.verdict == "unknown"]
    assert unknown == [("b", 0, "no route"), ("b", 1, "the output is not JSON: column 1: expecting value")]


def test_a_device_that_computes_no_operator_does_not_hide_the_others(tmp_path, monkeypatch):
    """Of three NPUs the second one computes nothing (exit code 2), and the third one's command ends in an error."""
    row = {"op": "matmul", "dtype": "float16", "shape": [2, 2], "phase": "forward", "tensor": 0, "error": 0.1,
           "detail": ""}  # fmt: skip
    script = f"""
import json, os, sys
device = int(os.environ["ASCEND_RT_VISIBLE_DEVICES"])
print(json.dumps({{"rows": [{{**{row}, "status": "pass" if device == 0 else "not runnable"}}]}}) if device < 2 else "")
sys.exit((0, 2, 3)[device])
"""
    monkeypatch.setattr(hours, "argv", lambda given: [sys.executable, "-c", script])
    hour = Hour(PLAIN, tmp_path)
    hour.npus = [Path(f"/dev/davinci{number}") for number in range(3)]
    found, evidence = hour.operators(60, {})
    assert [one["device"] for one in evidence["devices"]] == [0, 1]
    assert [(item.verdict, item.device) for item in found] == [("unknown", 2), ("unknown", 1), ("ok", None)]
    assert "ended with exit code 3" in found[0].seen and "computed on other devices" in found[1].seen


OVERLAP = ROOT / "recipes" / "telechat3_1119b" / "pretrain_4k_ep_overlap.yaml"
PLAIN = ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"


def of(recipe, on_cpu=False):
    return variants_of(View(load_recipe(recipe)), on_cpu)


def test_modes_and_fused_operators_are_those_of_the_recipe():
    modes = of(OVERLAP, on_cpu=True)
    assert {one.key for one in modes} == {"plugins.hierarchical_ep.mode"}
    assert [one.own for one in modes] == [True] + [False] * (len(modes) - 1)
    assert {one.value for one in modes} >= set(MODES)
    plain = of(PLAIN)
    assert {one.path[-1] for one in plain} == {"moe_token_dispatcher_type", "bias_swiglu_fusion"}
    assert [one.value for one in plain if one.path[-1] == "bias_swiglu_fusion"] == [False, True]
    assert of(PLAIN, on_cpu=True) == []
    assert of(ROOT / "recipes" / "mini" / "pretrain.yaml", on_cpu=True) == []


def test_no_variant_is_trained_that_check_refuses():
    """Fused RoPE was planned, and never trained, for each model with multi-latent attention."""
    for recipe in (PLAIN, OVERLAP):
        for one in of(recipe):
            assert check_recipe(apply_overrides(load_recipe(recipe), one.words[1:])).errors == []
    pairs = apply_overrides(
        load_recipe(ROOT / "docs" / "examples" / "moe_20b.yaml"), ["parallel_config.expert_parallel=2"]
    )
    assert {one.path[-1] for one in variants_of(View(pairs), on_cpu=False)} == {"bias_swiglu_fusion"}


def test_an_own_value_that_did_not_train_does_not_stay(tmp_path):
    """It was "ok: the own value stays" where only the other values trained."""
    modes = of(OVERLAP, on_cpu=True)
    (found,) = judge_variants(modes, {one.name: None if one.own else 1.0 for one in modes}, tmp_path / "overlay.yaml")
    assert found.verdict == "unknown" and "the recipe's own value was not measured" in found.seen


@pytest.mark.parametrize(
    ("faster", "winner"), [(1.0, None), (1 - SURE / 2, None), (1 - 2 * SURE, True), (1.5, None), (None, None)]
)
def test_a_variant_wins_only_if_it_is_surely_faster(tmp_path, faster, winner):
    variants = [one for one in of(PLAIN) if one.path[-1] == "bias_swiglu_fusion"]
    seconds = {"own": 0.5, "bias_swiglu_fusion_true": None if faster is None else 0.5 * faster}
    best = winner_of(variants, seconds)
    assert (best.value if best else None) == winner
    file = tmp_path / "overlay.yaml"
    file.write_text("of an earlier start")
    assert write_overlay(PLAIN, variants, seconds, file) == file.exists() == bool(winner)
    (found,) = judge_variants(variants, seconds, file)
    assert found.verdict == ("unknown" if faster is None else "ok")
    assert ("written to overlay.yaml" in found.seen) == bool(winner)
    if winner:
        child = load_recipe(file)
        assert child["model"]["model_config"]["bias_swiglu_fusion"] is True
        assert child["model"]["model_config"]["num_hidden_layers"] == 54


def test_each_run_is_started_once_and_one_that_fails_is_not_judged(tmp_path, monkeypatch):
    hour, started = Hour(OVERLAP, tmp_path), []

    def ask(words, seconds):
        started.append(words)
        if "plugins.hierarchical_ep.mode=global" in words:
            raise ClusterError("it failed")

    class Read:
        def __init__(self, folder):
            self.folder = folder

        def usual(self):
            return {"own": 0.4, "mode_hierarchical": 0.3, "mode_deduplicated": 0.5}[self.folder.name]

    monkeypatch.setattr(hours, "ask", ask)
    monkeypatch.setattr(hours, "load_run", Read)
    (found,), seconds = hour.compare_variants(0.0)
    assert seconds == {"own": 0.4, "mode_global": None, "mode_hierarchical": 0.3, "mode_deduplicated": 0.5}
    assert found.verdict == "ok"
    assert "global did not train" in found.seen and "hierarchical is written to overlay.yaml" in found.seen
    assert load_recipe(tmp_path / "overlay.yaml")["plugins"]["hierarchical_ep"]["mode"] == "hierarchical"
    assert len(started) == 4 and all(words[1] == str(hour.small) for words in started)
    assert [words for words in started if "--set" not in words] == started[:1]
