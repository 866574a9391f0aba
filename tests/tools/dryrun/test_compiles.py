"""A refusal names the key of the recipe.

Texts of final graphs are kept where somebody asks for them, and compiled once.
"""

import gzip
import importlib.metadata
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import communication
from mindspore.communication import _comm_helper
from mindspore.ops.function import comm_func

from plugins.errors import ClusterError, VersionError
from plugins.semi_auto_cpu.ranks import WORLD
from tests.tools.fusion.small_graphs import node, text_of
from tools.dryrun import compiles
from tools.dryrun.compiles import diagnose
from tools.dryrun.graph_text import read_graph
from tools.dryrun.plan import plan_jobs, resized
from tools.dryrun.quick import quick_plan
from tools.dryrun.rank import keep_text
from tools.dryrun.virtual_cluster import VirtualCluster, final_graph, virtual_cluster
from tools.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("kind", "message", "key"),
    [
        ("ValueError", "The sum of offset 6 is not equal to 5", "model.model_config.offset"),
        ("ValueError", "It is not supported that pipeline_scheduler is seqvpp", "parallel.pipeline_config"),
        (
            "AttributeError",
            "'TransformerConfig' object has no attribute 'qk_pos_emb_head_dim'",
            "model.model_config.position_embedding_type",
        ),
    ],
)
def test_messages_lead_to_keys(kind, message, key):
    line = diagnose(kind, message)
    assert line.startswith(key) and f"{kind}: " in line


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("num_attention_heads must be divisible by tp", "parallel_config.model_parallel"),
        ("the expert num 6 cannot be divided", "parallel_config.expert_parallel"),
        ('at File "mindformers/moe/token_dispatcher.py:3"', "model.model_config.moe_token_dispatcher_type"),
    ],
)
def test_a_key_that_only_may_be_the_cause_is_called_a_guess(message, key):
    assert diagnose("ValueError", message) == f"ValueError: {message} (the key is a guess: {key})"


GROUP = "Create communication group failed, the rank list is: [const vector]{0, 4, 8}"


def test_a_group_that_mindspore_does_not_make_leads_to_the_degree_that_makes_it():
    """The call stack below the message names the sources of the experts."""
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")
    degrees = {"data_parallel": 3, "model_parallel": 4, "expert_parallel": 1}
    recipe["parallel_config"] |= degrees
    stack = '\n\n----------------\nat File "mindformers/moe/token_dispatcher.py:3"'
    line = diagnose("RuntimeError", GROUP + stack, recipe)
    assert line.startswith("parallel_config.data_parallel: without an NPU MindSpore makes no communication group of 3 ")
    assert line.endswith(f"RuntimeError: {GROUP}")
    recipe["parallel_config"]["data_parallel"] = 4
    unknown = f"RuntimeError: {GROUP} (no key of the recipe is known for this message)"
    assert diagnose("RuntimeError", GROUP + stack, recipe) == unknown == diagnose("RuntimeError", GROUP)


@pytest.mark.parametrize(
    ("log", "number", "words"), [(b"", 11, "signal 11\\)$"), (b"", 9, "9, which the kernel .* full")]
)
def test_only_a_kill_is_called_a_lack_of_memory(tmp_path, monkeypatch, log, number, words):
    run = crashed(tmp_path, monkeypatch, log, number)
    with pytest.raises(ClusterError, match=words):
        run.result()


@pytest.mark.parametrize("devices", [1000, 96])
def test_nothing_is_compiled_where_mindspore_would_make_no_group_here(monkeypatch, devices):
    """A compile for 1,000 devices took minutes, and ended in "parallel init failed" with a guessed key."""
    monkeypatch.setattr(compiles, "_compile", lambda jobs, *_: [{"compiled": True} for _ in jobs])
    recipe = resized(load_recipe("docs/examples/moe_20b.yaml"), devices)
    plan = quick_plan(recipe)
    found = compiles.compile_all(plan, 1, use_cache=False)
    assert compiles.compile_all(replace(plan, jobs=[]), 1, use_cache=False) == []  # a proof of one device a stage
    if devices == 96:
        assert found == [{"compiled": True}] * len(plan.jobs)
        return
    assert len(found) == 1
    assert compiles.refusal_of(found[0], recipe).startswith(
        "rank 0: parallel_config.data_parallel: without an NPU MindSpore makes no communication group of 500 ranks "
    )


def test_temporary_files_of_a_compile_lie_in_its_folder(tmp_path, monkeypatch):
    """MindFormers left a file of each compile in the system's folder for temporary files."""
    run = crashed(tmp_path, monkeypatch, b"", 11)
    assert Path(run.process.environment["TMPDIR"]) == tmp_path / "run"


def test_a_crash_after_a_refused_group_is_a_refusal(tmp_path, monkeypatch):
    run = crashed(tmp_path, monkeypatch, f"[ERROR] PARALLEL CreateGroup] {GROUP}\nmore\n".encode(), 11)
    assert run.result() == {"rank": 0, "stage": 0, "error": {"type": "RuntimeError", "message": GROUP}}


def crashed(folder, monkeypatch, log, number):
    """A compile that wrote `log` and ended by a signal."""
    job = plan_jobs(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"), (0,)).jobs[0]
    monkeypatch.setattr(
        compiles.subprocess, "Popen", lambda *_, env, **__: SimpleNamespace(returncode=-number, environment=env)
    )
    run = compiles._Run(job, folder / "run")
    run.log.write_bytes(log)
    return run


def test_call_stacks_of_the_framework_are_left_out():
    message = (
        "The strategy is wrong\n\n----------------------------------------------------\n- C++ Call Stack: (x)\nfoo.cc:1"
    )
    line = diagnose("RuntimeError", message)
    assert line == "RuntimeError: The strategy is wrong (no key of the recipe is known for this message)"


def test_an_empty_message():
    assert "(no message)" in diagnose("KeyError", "")


NULL = (
    "The pointer[context] is null.\n\n----------------------------------------------------\n"
    '- C++ Call Stack: (x)\nat File "mindformers/attention.py:3"'
)
LEVEL = "parallel.parallel_optimizer_config.optimizer_level"


@pytest.mark.parametrize(
    ("level", "stages", "named"), [("level3", 2, True), ("level3", 1, False), ("level2", 2, False)]
)
@pytest.mark.parametrize("message", [NULL, "Illegal AnfNode for evaluating, node: @embedding"])
def test_an_error_inside_mindspore_leads_to_level3_in_a_pipeline_and_else_to_no_key(level, stages, named, message):
    recipe = load_recipe("recipes/mini/pretrain_3d.yaml")
    recipe["parallel"]["parallel_optimizer_config"]["optimizer_level"] = level
    recipe["parallel_config"]["pipeline_stage"] = stages
    line = diagnose("RuntimeError", message, recipe)
    assert line.startswith(f"{LEVEL}: level3" if named else "RuntimeError: ") and "inside MindSpore" in line
    assert diagnose("RuntimeError", message).startswith("RuntimeError: ")


TENSOR = ("Float32", (2, 2))
TEXT = text_of([node("Exp", ["x"], [TENSOR], TENSOR)])


def test_what_is_kept_is_read_again(tmp_path):
    plain, kept = tmp_path / "a.ir", tmp_path / "deep" / "a.ir.gz"
    plain.write_text(TEXT, encoding="utf-8")
    keep_text(plain, kept)
    assert read_graph(kept) == read_graph(plain)
    assert [each.op for each in read_graph(kept).graphs["main"]] == ["Exp"]
    kept.write_bytes(kept.read_bytes()[:-20])
    with pytest.raises(ClusterError, match="cannot be read"):
        read_graph(kept)


def test_a_kept_result_depends_on_every_module_of_the_dry_run_that_makes_it():
    """Only the plan makes jobs, which the digest holds themselves."""
    parts = {part for part in compiles._CODE if part.startswith("tools/dryrun/")}
    texts = [(compiles.ROOT / part).read_text(encoding="utf-8") for part in parts]
    used = {name for text in texts for name in re.findall(r"^from tools\.dryrun\.(\w+) import", text, re.MULTILINE)}
    assert {f"tools/dryrun/{name}.py" for name in used - {"plan"}} <= parts


def test_a_result_without_its_text_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = plan_jobs(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"), (0, 512))
    asked = []

    def run_jobs(jobs, told, at_once, texts=()):
        asked.append([job.rank for job in jobs])
        for file in texts:
            file.write_bytes(gzip.compress(b"a graph"))
        return [{"rank": job.rank} for job in jobs]

    monkeypatch.setattr(compiles, "run_jobs", run_jobs)
    for job in plan.jobs:
        compiles.keep_result(job, {"rank": job.rank})
    compiles.compile_all(plan, 1, True)
    assert asked == []
    compiles.compile_all(plan, 1, True, texts=True)
    compiles.compile_all(plan, 1, True, texts=True)
    assert asked == [[0, 512]]
    compiles.text_of(plan.jobs[1]).unlink()
    compiles.compile_all(plan, 1, True, texts=True)
    assert asked == [[0, 512], [512]]


def test_a_result_whose_text_a_power_cut_damaged_is_compiled_again(tmp_path, monkeypatch):
    """`tc3 prove` could not read the text, and kept it: no later start could either."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = plan_jobs(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"), (0,))
    whole, asked = gzip.compress(b"a graph"), []

    def run_jobs(jobs, told, at_once, texts=()):
        asked.append(len(jobs))
        compiles.text_of(plan.jobs[0]).write_bytes(whole)
        return [{"rank": job.rank} for job in jobs]

    monkeypatch.setattr(compiles, "run_jobs", run_jobs)
    compiles.keep_result(plan.jobs[0], {"rank": 0})
    damaged = [whole[:length] for length in range(len(whole))]
    for text in [*damaged, *(each.ljust(len(whole), b"\0") for each in damaged[:-4])]:
        compiles.text_of(plan.jobs[0]).write_bytes(text)
        asked.clear()
        compiles.compile_all(plan, 1, True, texts=True)
        compiles.compile_all(plan, 1, True, texts=True)
        assert asked == [1], text


def state():
    """Everything of this process that a virtual cluster touches."""
    context = ("mode", "precompile_only", "save_graphs", "device_target")
    owners = (_comm_helper, comm_func, _comm_helper.GlobalComm, _comm_helper._ExistingGroup)
    names = ("CollectiveManager", "_GROPU_SIZE_CACHE", "INITED", "BACKEND", "WORLD_COMM_GROUP", "ITEMS", "GROUP_RANKS")
    return (
        [ms.get_context(name) for name in context],
        os.path.realpath(ms.get_context("save_graphs_path")),  # MindSpore makes it absolute
        [getattr(owner, name, None) for owner in owners for name in names],
        [ms.get_auto_parallel_context(name) for name in ("device_num", "global_rank", "parallel_mode")],
        dict(os.environ),
    )


def test_mindspore_sees_a_cluster_and_afterwards_none():
    before = state()
    with virtual_cluster(devices=16, rank=5) as cluster:
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=16, global_rank=5)
        assert (communication.get_rank(), communication.get_group_size()) == (5, 16)
        communication.create_group("odd", [1, 3, 5, 7])
        communication.create_group("pair", [5, 4])
        assert list(cluster.groups.items()) == [("odd", (1, 3, 5, 7)), ("pair", (5, 4))]
        assert (communication.get_rank("odd"), communication.get_group_size("odd")) == (2, 4)
        assert communication.get_rank("pair") == 0
        assert communication.get_group_size("8-3623860843225039737") == 8  # made up by C++
        assert communication.get_world_rank_from_group_rank("odd", 3) == 7
        assert communication.get_group_rank_from_world_rank(7, "odd") == 3
        assert ms.ops.AllGather(group="odd").rank == 2
        assert ms.get_context("precompile_only")
    assert state() == before
    assert (ms.Tensor([1.0, 2.0]) * 2).asnumpy().tolist() == [2.0, 4.0]


def test_the_target_goes_back_to_cpu():
    with virtual_cluster(devices=2, rank=0) as cluster:
        cluster.target_ascend()
        assert ms.get_context("device_target") == "Ascend"
    assert ms.get_context("device_target") == "CPU"
    assert (ms.Tensor(np.ones(3, np.float32)) + 1).asnumpy().tolist() == [2.0, 2.0, 2.0]


def test_everything_is_restored_after_an_error(tmp_path):
    before = state()
    with pytest.raises(ZeroDivisionError), virtual_cluster(devices=4, rank=1, graphs=tmp_path):
        assert os.environ["MS_DEV_DUMP_IR_PASSES"] == "backend_pass"
        raise ZeroDivisionError
    assert state() == before


@pytest.mark.slow
def test_the_next_cluster_knows_nothing_of_the_last():
    from mindformers.parallel_core.training_graph.transformer.moe.utils import get_group

    for ranks in ([0, 1], [0, 1]):
        with virtual_cluster(devices=4, rank=0) as cluster:
            name = get_group(ranks)
            assert get_group(ranks) == name
            assert cluster.groups == {name: (0, 1)}


def test_one_cluster_at_a_time():
    with virtual_cluster(devices=4, rank=1):
        with pytest.raises(ClusterError, match="already open"), virtual_cluster(devices=2, rank=0):
            pass
        assert communication.get_group_size() == 4


def test_another_mindspore_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"mindspore": "2.10.0", "mindformers": "1.9.0"}.get)
    refused = pytest.raises(VersionError, match=r"MindSpore 2\.10\.0 is installed, but MindSpore 2\.9\.0 and")
    with refused, virtual_cluster(devices=2, rank=0):
        pass


@given(st.data(), st.integers(1, 64))
def test_every_member_has_its_own_place(data, devices):
    ranks = data.draw(st.lists(st.integers(0, devices - 1), min_size=1, unique=True))
    places = []
    for rank in ranks:
        cluster = VirtualCluster(devices, rank)
        cluster.create("group", ranks)
        assert cluster.size_of("group") == len(ranks)
        assert cluster.ranks_of("group")[cluster.rank_in("group")] == cluster.rank_in(WORLD) == rank
        places.append(cluster.rank_in("group"))
    assert places == list(range(len(ranks)))


def test_impossible_groups_are_refused():
    with pytest.raises(ClusterError, match="rank 4 does not exist; the ranks of 4 devices"):
        VirtualCluster(4, 4)
    cluster = VirtualCluster(4, 0)
    with pytest.raises(ClusterError, match=r"names ranks \[4\]"):
        cluster.create("far", [0, 4])
    with pytest.raises(ClusterError, match=r"rank 0 creates group 'others' of ranks \[1, 2\]"):
        cluster.create("others", [1, 2])
    with pytest.raises(ClusterError, match=r"group 'none' was never created; the groups are \['hccl_world_group'\]"):
        cluster.size_of("none")


def test_only_a_finished_compile_leaves_a_graph(tmp_path):
    with pytest.raises(ClusterError, match="the folder has 0"):
        final_graph(tmp_path)
    for name in ("opt_substep_backend_pass_r1_1047.ir", "21_backend_pass_1049.ir"):
        (tmp_path / name).touch()
    assert final_graph(tmp_path).name == "21_backend_pass_1049.ir"
