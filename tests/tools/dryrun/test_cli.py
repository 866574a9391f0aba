import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import click
import psutil
import pytest
from click.testing import CliRunner

from launch.cli import tc3
from plugins.errors import ClusterError, TC3Error
from plugins.semi_auto_cpu import build
from tests.forks import forked_compiles
from tools.check import arithmetic
from tools.dryrun import cli, compiles
from tools.dryrun import rank as compiling
from tools.dryrun.compiles import WORKER, compile_all
from tools.dryrun.plan import Job, resized, without_files
from tools.dryrun.quick import ERROR, quick_plan
from tools.dryrun.report import report_of
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import update_memory
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides

ROOT = Path(__file__).resolve().parents[3]
LARGE = str(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml")
MINI = str(ROOT / "recipes/mini/pretrain_ep4.yaml")
TINY = str(ROOT / "tests/training/tiny_ep4.yaml")
# the quickstart's corpus, where it was made, has more ids than the tiny model
NO_CORPUS = ("--set", "train_dataset.data_loader.config.data_path.1=none")
PIPELINE = str(Path(__file__).with_name("pipeline.yaml"))


def run(*arguments):
    return CliRunner(catch_exceptions=False).invoke(tc3, ["dryrun", *arguments])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("model.model_config.offset=[1, 1, 1, 1, 1, 2, 2, -3]", "model.model_config.offset"),
        ("model.model_config.num_attention_heads=36", "parallel_config.model_parallel"),
        ("parallel_config.expert_parallel=384", "parallel_config.expert_parallel"),
        ("model.model_config.moe_token_dispatcher_type=alltoal", "model.model_config.moe_token_dispatcher_type"),
        ("parallel.pipeline_config.pipeline_scheduler=seqvpp", "parallel.pipeline_config.pipeline_scheduler"),
    ],
)
def test_a_mistake_is_one_line_with_its_key_before_anything_is_compiled(change, key):
    done = run(LARGE, "--set", change)
    assert done.exit_code == 1
    assert f"error: {key}: " in done.output.splitlines()[0]
    as_json = run(LARGE, "--json", "--set", change)
    assert key in json.loads(as_json.stdout)["problems"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0,256"], "--ranks 256: this rank does not exist; the recipe has ranks 0 to 255"),
        (["--devices", "100"], "--devices 100 is not a multiple of .* = 64; 64 would be a multiple"),
        (["--picture", "x.jpg"], "--picture x.jpg: the name of the file must end in .svg or .png"),
    ],
)
def test_wrong_input(arguments, message):
    with pytest.raises(TC3Error, match=message):
        run(LARGE, *arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.model_config.num_hidden_layers=1000000000", "num_hidden_layers: 1000000000 is out of range"),
        ("parallel_config.data_parallel=99999999999", "data_parallel: 99999999999 is out of range"),
        ("parallel_config.micro_batch_num=99999999999", "micro_batch_num: 99999999999 is out of range"),
    ],
)
def test_sizes_that_would_keep_the_machine_busy_for_ever_are_refused(change, message):
    with pytest.raises(TC3Error, match=message):
        run(LARGE, "--set", change)


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_compiled(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TC3Error, match="file is a file"):
        run(LARGE, "--picture", str(tmp_path / "file" / "a.svg"))
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(TC3Error, match="it is a folder"):
        run(LARGE, "--picture", str(tmp_path / "folder.svg"))


@pytest.mark.parametrize("option", ["--devices", "--micro-batches", "--jobs"])
@pytest.mark.parametrize("number", ["99999999999", "nan", "1e400", "0", "1.5"])
def test_numbers_that_are_not_sane_are_usage_errors(option, number):
    done = run(LARGE, option, number)
    assert done.exit_code == 2 and "it must be a whole number from 1 to" in done.output


def test_one_stage_alone_is_compiled_as_it_is_by_quick():
    """A recipe of the CPU has no graph of which layers could be taken apart."""
    plan = quick_plan(without_files(load_recipe(ROOT / "recipes/mini/pretrain.yaml")))
    assert plan.job_of == [0] and len(plan.jobs) == 1


def test_usage_errors():
    assert run(LARGE, "--ranks", "zero").exit_code == 2
    assert run(LARGE, "--quick", "--ranks", "0").exit_code == 2


def test_other_numbers_of_devices_change_the_data_parallel_degree():
    recipe = resized(load_recipe(LARGE), 512)
    assert recipe["parallel_config"]["data_parallel"] == 8
    assert recipe["parallel"]["dataset_strategy"] == [[8, 1]] * 4


def test_the_command_of_the_advice_is_of_the_compiled_devices(monkeypatch):
    """Without the changes of --devices the named command changes the recipe's own number of devices."""
    full = {"recipe": LARGE, "problems": [], "stages": [{"fit": "does not fit", "memory": {"limit": 1 << 34}}]}
    monkeypatch.setattr(cli, "compile_all", lambda *_, **__: [])
    monkeypatch.setattr(cli, "report_of", lambda *_: full)
    monkeypatch.setattr(cli, "_tell", lambda report, *_: click.echo(report["problems"][0]))
    said = run(LARGE, "--quick", "--set", "parallel_config.data_parallel=2", "--devices", "512").output
    words = shlex.split(said.split("; tc3 memory ")[1].split(" has their keys")[0])
    assert [words[0], words[-1]] == [LARGE, "--explain-oom"]
    sets = [word for before, word in pairwise(words) if before == "--set"]
    assert apply_overrides(load_recipe(LARGE), sets) == resized(load_recipe(LARGE), 512)


@pytest.mark.parametrize("need_more", [0, 1])
def test_the_advice_and_its_command_are_of_the_loads(monkeypatch, tmp_path, need_more):
    """The command names the loads, and not the file of the time line, which it would replace by modelled bytes."""
    stages = [{"fit": "fits" if need_more else "does not fit", "memory": {"limit": 24 << 30}}]
    full = {"recipe": LARGE, "problems": [], "stages": stages, "loads": {"steps": {"need_more": need_more}}}
    monkeypatch.setattr(cli, "compile_all", lambda *_, **__: [])
    monkeypatch.setattr(cli, "report_of", lambda *given: given[4].update({0: SimpleNamespace(peak=1)}) or full)
    monkeypatch.setattr(cli, "write_line", lambda *_: None)
    monkeypatch.setattr(cli, "_tell", lambda report, *_: click.echo(report["problems"][0]))
    said = run(LARGE, "--quick", "--loads", "3", "--time-line", str(tmp_path / "line.svg")).output
    words = shlex.split(said.split("; tc3 memory ")[1].split(" has their keys")[0])
    assert words == [LARGE, "--loads", "3", "--explain-oom"]


def test_results_are_kept_whole_and_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = Job(Recipe({"a": 1}), 0, 0)
    assert compiles.kept_result(job) is None
    compiles.keep_result(job, {"rank": 0})
    assert compiles.kept_result(job) == {"rank": 0}
    assert compiles.kept_result(Job(Recipe({"a": 2}), 0, 0)) is None
    assert compiles.kept_result(Job(Recipe({"a": 1}), 1, 0)) is None
    (file,) = compiles.cache_folder().iterdir()
    file.write_bytes(file.read_bytes()[:-9])  # as a disk that was full would leave it
    assert compiles.kept_result(job) is None
    compiles.keep_result(job, {"rank": 0})
    assert compiles.kept_result(job) == {"rank": 0}
    whole = file.read_bytes()
    for length in range(len(whole)):  # as a power cut would leave it; it ended in a traceback until somebody removed it
        file.write_bytes(whole[:length].ljust(len(whole), b"\0"))
        assert compiles.kept_result(job) in (None, {"rank": 0})


def test_a_result_that_cannot_be_kept_does_not_end_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "tc3").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = Job(Recipe({"a": 1}), 0, 0)
    compiles.keep_result(job, {"rank": 0})
    assert compiles.kept_result(job) is None
    assert "this compile is not kept for later: " in capsys.readouterr().err


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    for folder in (compiles.cache_folder, build.cache_folder):
        with pytest.raises(ClusterError, match=r"no home folder .* set HOME or XDG_CACHE_HOME"):
            folder()


@pytest.mark.parametrize(
    ("error", "host"),
    [
        (PermissionError("/tmp is full"), True),
        (MemoryError(), True),
        (ModuleNotFoundError("No module named 'x'"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("dump failed: No space left on device"), True),
        (RuntimeError("the expert num 6 cannot be divided"), False),
        (ValueError("offset"), False),
    ],
)
def test_an_error_of_the_host_is_no_result(error, host, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(compiling, "training_step", fail)
    monkeypatch.setattr(compiling, "virtual_cluster", lambda *_: nullcontext())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = Job(load_recipe(LARGE), 0, 0)
    result = compiling.compile_job(job, tmp_path, None)
    assert result["error"]["message"] == str(error)
    compiles.keep_result(job, result)
    assert compiles.kept_result(job) == (None if host else result)


def test_a_refusal_from_the_cache_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = load_recipe(LARGE)
    for job in quick_plan(without_files(recipe)).jobs:
        compiles.keep_result(
            job, {"rank": job.rank, "stage": job.stage, "error": {"type": "ValueError", "message": "offset"}}
        )
    done = run(LARGE, "--quick")
    assert done.exit_code == 1
    assert done.output.splitlines()[0].endswith("model.model_config.offset: ValueError: offset (cached; --no-cache)")


def start(folder, *arguments):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    command = [str(Path(sys.executable).with_name("tc3")), "dryrun", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a background job's is deaf
    )


def children_of(process):
    for _ in range(6000):
        assert process.poll() is None, "it ended before it compiled"
        found = [child for child in psutil.Process(process.pid).children() if WORKER in child.cmdline()]
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("no compile was started")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_half_way_it_leaves_no_process_and_no_result(number, tmp_path):
    process = start(tmp_path, MINI)
    children = children_of(process)
    for child in children:
        while "mindspore" not in Path(f"/proc/{child.pid}/maps").read_text():
            time.sleep(0.1)  # before, it does not yet end with its parent
        child.suspend()  # so that none is done before the signal comes
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    _, alive = psutil.wait_procs(children, timeout=300)
    assert not alive
    assert not list(tmp_path.rglob("*.gz"))


@pytest.mark.slow
def test_a_compile_whose_parent_ended_during_its_imports_ends_before_it_begins(tmp_path):
    files = [str(tmp_path / name) for name in ("job.json", "out.json")]  # it would fail to read the first
    gone = psutil.Process().parent().pid  # alive, but not the parent of what we start
    done = subprocess.run([sys.executable, "-m", WORKER, str(gone), *files], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_two_at_once_find_the_same_and_the_next_compiles_nothing(tmp_path):
    both = [start(tmp_path, TINY, "--json", *NO_CORPUS) for _ in range(2)]
    outputs = [json.loads(process.communicate(timeout=800)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    first, second = ({**output, "seconds": None} for output in outputs)
    assert first == second
    assert first["parameters"]["compiled"] == first["parameters"]["check"]
    assert len(list(tmp_path.rglob("*.gz"))) == 1
    third = start(tmp_path, TINY, "--json", *NO_CORPUS)
    output = json.loads(third.communicate(timeout=300)[0])
    assert output["seconds"] in [one["seconds"] for one in outputs]  # the cached result's


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """pipeline.yaml with the norms of the first stage's second chunk recomputed, which its base keeps a child from.

    Its first chunk is one layer: each takes ten seconds to compile.
    """
    recipe, path = load_recipe(PIPELINE), tmp_path_factory.mktemp("pipeline") / "pipeline.yaml"
    layers = [[0, 0], [1, 0]]  # of each chunk, by stage: 7 % of what the first stage saves
    recipe["model"]["model_config"] |= {"num_hidden_layers": 5, "offset": [[0, 0], [0, 1]]}
    recipe["recompute_config"] |= {"recompute": [[1, 0], [0, 1]]}
    recipe["recompute_config"] |= {"select_recompute": {r".*\.norm": layers}, "select_comm_recompute": layers}
    dump_recipe(recipe, path)
    return str(path)


@pytest.fixture(scope="module")
def whole(pipeline, forks, tmp_path_factory):
    with forked_compiles(forks, tmp_path_factory.mktemp("cache")):
        done = run(pipeline, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_pipeline_is_compiled_stage_by_stage(whole, pipeline):
    assert whole["problems"] == []
    assert whole["schedule_model_equals_graph"]
    assert whole["links"] == {"exact": 1, "alike": 0, "unknown": 0}
    assert whole["micro_batches"] == {"step": 8, "compiled": 4}
    assert whole["parameters"]["compiled"] == whole["parameters"]["check"]
    gradients = whole["gradients"]
    assert gradients["right"] == gradients["weights"] > 50 and gradients["wrong"] == gradients["unknown"] == []
    assert gradients["norm"]["once"] == gradients["norm"]["weights"] == gradients["weights"]
    updated = gradients["weights"] - 1  # the embedding's copy beside the head sends its gradient to the first stage
    assert gradients["scale"] == {"weights": updated, "right": updated, "wrong": [], "unknown": []}
    modelled = [update_memory(from_recipe(load_recipe(pipeline)), stage) for stage in (0, 1)]
    # in so small a model MindSpore shards attention's output projection, which the estimator takes for too small
    assert [stage["memory"]["update"] for stage in whole["stages"]] == pytest.approx(modelled, rel=0.06)
    assert [stage["kinds"] for stage in whole["stages"]] == [[["dense"], ["moe"]], [["moe"], ["moe", "moe"]]]
    for stage in whole["stages"]:
        forward, recompute, gradient = (stage["flops"][role] for role in ("forward", "recompute", "gradient"))
        assert 0 < recompute < forward < gradient < 2.5 * forward
        sends = [line for line in stage["traffic"] if line["op"] == "Send"]
        assert sum(line["calls"] for line in sends) > 0


@pytest.mark.slow
def test_the_quick_run_puts_the_same_stages_together(whole, pipeline, forks, tmp_path, monkeypatch):
    """Two chunks a stage, layers that are recomputed, that recompute their norms and that do neither, and an MTP layer.

    Other layouts: benchmarks/dryrun_quick_vs_full.py.
    """
    with forked_compiles(forks, tmp_path):
        done = run(pipeline, "--json", "--quick")
    assert done.exit_code == 0, done.output
    quick = json.loads(done.stdout)
    assert quick["parameters"] == whole["parameters"]
    for ours, theirs in zip(quick["stages"], whole["stages"], strict=True):
        for part in ("weights", "state", "accumulated", "gathered"):
            assert ours["memory"][part] == theirs["memory"][part], part
        for part in ("saved", "total"):
            assert abs(ours["memory"][part] / theirs["memory"][part] - 1) < ERROR, part
    _a_smaller_limit_is_told_by_stage(pipeline, quick, tmp_path, monkeypatch)


def _a_smaller_limit_is_told_by_stage(pipeline, quick, cache_folder, monkeypatch):
    """The compiles are those of the run above; the limit lies between its two stages, and search counts the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))
    recipe = without_files(load_recipe(pipeline))
    plan = quick_plan(recipe)
    results = compile_all(plan, 1, use_cache=True)
    assert all(result["cached"] for result in results)
    low, high = sorted(quick["stages"], key=lambda stage: stage["memory"]["total"])
    limit = (low["memory"]["total"] + high["memory"]["total"]) / 2 / (1 << 30)
    recipe["context"]["max_device_memory"] = f"{limit:.6f}GB"
    report = report_of(recipe, plan, results, 8)
    assert report["fit"] == "does not fit"
    assert [stage["fit"] for stage in report["stages"]] == [
        "does not fit" if stage is high else "fits" for stage in quick["stages"]
    ]
    (problem,) = report["problems"]
    assert f"stage {high['stage']}:" in problem


@pytest.mark.slow
def test_what_mindspore_refuses_is_said_in_its_own_words(forks, monkeypatch, tmp_path):
    """As if no rule of ours knew it."""
    monkeypatch.setattr(arithmetic, "_groups", lambda *_: None)
    monkeypatch.setattr(compiles, "_of_group", lambda _: "")
    with forked_compiles(forks, tmp_path):
        done = run(str(Path(__file__).with_name("refused.yaml")), "--quick", "--jobs", "1")
    assert done.exit_code == 1 and done.stdout
    for line in done.stdout.splitlines():
        assert line.startswith("rank ") and "RuntimeError: parallel init failed" in line


def test_the_host_settings_file_of_public_recipes_is_not_needed():
    context = {"ascend_config": {"parallel_speed_up_json_path": "./absent.json", "precision_mode": "x"}}
    context |= {"save_graphs": False, "save_graphs_path": "./graph"}  # by which MindFormers would switch our dump off
    assert without_files(Recipe({"context": context})) == {
        "context": {"ascend_config": {"precision_mode": "x"}, "dataset_broadcast_opt_level": 3}
    }
    assert without_files(Recipe({"context": {}})) == {"context": {}}
