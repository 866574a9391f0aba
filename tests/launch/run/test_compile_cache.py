"""The compile cache's folders: what is loaded, what is published, what is refused. MindSpore is a function here."""

import copy
import errno
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from launch.run import cache_key, compile_cache
from launch.run.compile_cache import KEPT, KEY, prepare, refuse_own, unfit
from launch.run.effective import effective_recipe
from plugins.errors import ClusterError, RecipeError
from tests.plugins.cpu_backend.test_host_functions import call
from tests.training import runs
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

GRAPH = "graph_cache/compile_cache_0.mindir"
FACTOR = "model.model_config.routed_scaling_factor=1.7"


@pytest.fixture(autouse=True)
def few_sources(monkeypatch):
    """All sources take 0.3 s to read."""
    monkeypatch.setattr(cache_key, "SOURCES", ("launch/run",))
    monkeypatch.setattr(cache_key, "PACKAGES", ())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for end in (".bin", ".idx"):
        (folder / f"tiny{end}").write_bytes(b"tokens")
    data = f"train_dataset.data_loader.config.data_path.1={folder}/tiny"
    return effective_recipe(runs.TINY, (data,), None, tmp_path_factory.mktemp("run"))


class Starts:
    """Starts of a run on one node, whose workers compile with a cache."""

    def __init__(self, folder):
        self.folder, self.number = folder, 0
        self.environ = {"TC3_COMPILE_CACHE": str(folder / "caches")}

    def begin(self, recipe, ranks=(0,), world=None, **environ):
        attempt = self.folder / "attempts" / f"{self.number:04d}"
        self.number += 1
        return prepare(recipe, self.folder, attempt, world or len(ranks), ranks, {**self.environ, **environ})

    def nodes(self, recipe, *environs):
        """An attempt of one worker on each of several nodes, which start at once; `environs`: what each has set."""
        attempt = self.folder / "attempts" / f"{self.number:04d}"
        self.number += 1
        world = len(environs)

        def begin(rank):
            return prepare(recipe, self.folder, attempt, world, [rank], {**self.environ, **environs[rank]})

        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(begin, range(world)))

    def compiled(self, cache, graph=b"graph", ranks=None):
        """As MindSpore writes it."""
        for rank in cache.ranks if ranks is None else ranks:
            file = cache.own / f"rank_{rank}" / GRAPH
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            file.write_bytes(graph)
            os.utime(file, (1000, 1000))

    def step(self, rank, began, done):
        file = self.folder / "metrics" / f"rank_{rank}.jsonl"
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as out:
            out.write(json.dumps({"step": 1, "seconds": done - began}) + "\n")
        os.utime(file, (done, done))

    def trained(self, recipe, graph=b"graph", **more):
        cache = self.begin(recipe, **more)
        if not cache.loaded:
            self.compiled(cache, graph)
        cache.close(ended_well=True)
        return cache


@pytest.fixture
def starts(tmp_path):
    return Starts(tmp_path)


def test_the_second_start_loads_what_the_first_compiled(recipe, starts):
    first = starts.trained(recipe)
    second = starts.begin(recipe)
    assert (first.loaded, second.loaded) == (False, True)
    assert (second.own / "rank_0" / GRAPH).read_bytes() == b"graph"
    assert second.environment["MS_COMPILER_CACHE_PATH"] == str(second.own) != str(first.own)
    assert "loads" in second.said and not first.own.exists()


@pytest.mark.parametrize(
    "override",
    [
        FACTOR,
        "seed=7",
        "lr_schedule.total_steps=13",
        "runner_wrapper.max_grad_norm=0.7",
        "context.jit_config.jit_level=O1",
    ],
)
def test_another_recipe_has_another_cache(recipe, starts, override):
    starts.trained(recipe)
    other = apply_overrides(recipe, [override])
    assert not starts.begin(other).loaded and starts.begin(recipe).loaded


@pytest.mark.parametrize(
    "override",
    ["checkpoint.save_max=1", "checkpoint.save_interleaved_steps=2", "checkpoint.save_path=/elsewhere", "output_dir=/x",
     "checkpoint.load_path=/elsewhere"],
)  # fmt: skip
def test_folders_and_savings_are_not_of_the_graph(recipe, starts, override):
    starts.trained(recipe)
    assert starts.begin(apply_overrides(recipe, [override])).loaded


@pytest.mark.parametrize("mode, target", [(0, "Ascend"), (1, "Ascend"), (1, "CPU")])
def test_a_sharded_run_that_evaluates_has_a_cache_for_each_order_of_its_graphs(recipe, starts, mode, target):
    """A resume compiles the train step first, a new run the evaluation; MindSpore's files have only numbers."""
    held_out = {"data_path": "/data/other", "every": 2}
    fresh = {**recipe, "use_parallel": True, "plugins": {**recipe.get("plugins", {}), "held_out_loss": held_out}}
    fresh["parallel"] = {**recipe["parallel"], "parallel_mode": mode}
    fresh["context"] = {**recipe["context"], "device_target": target}
    resumed = {**fresh, "checkpoint": {**fresh["checkpoint"], "load_path": "/run/checkpoint/iteration_00000002"}}
    without = [{**each, "plugins": recipe.get("plugins")} for each in (fresh, resumed)]
    starts.trained(fresh)
    starts.trained(without[0])
    assert starts.begin(resumed).loaded == (mode == 0 or target == "CPU")
    assert starts.begin(fresh).loaded and starts.begin(without[1]).loaded
    starts.trained(resumed)
    assert starts.begin(resumed).loaded


def test_other_workers_variables_and_files_have_another_cache(recipe, starts, tmp_path):
    starts.trained(recipe)
    assert not starts.begin(recipe, world=2).loaded
    assert not starts.begin(recipe, MS_DEV_SIDE_EFFECT_LOAD_ELIM="3").loaded
    assert starts.begin(recipe, MS_SCHED_PORT="5000", HOSTNAME="other").loaded
    table = tmp_path / "table.json"
    table.write_text("1")
    named = copy.deepcopy(recipe)
    named["parallel"]["table"] = str(table)
    starts.trained(named)
    assert starts.begin(named).loaded
    table.write_text("2")
    assert not starts.begin(named).loaded


def test_sources_of_the_repository_and_of_mindformers_count(recipe, monkeypatch, tmp_path):
    (tmp_path / "launch").mkdir()
    source = tmp_path / "launch" / "train.py"
    package = tmp_path / "mindformers" / "__init__.py"
    package.parent.mkdir()
    monkeypatch.setattr(cache_key, "ROOT", tmp_path)
    monkeypatch.setattr(cache_key, "SOURCES", ("launch",))
    monkeypatch.setattr(cache_key, "PACKAGES", ("mindformers",))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mindformers", raising=False)  # else its own place is known
    keys = set()
    for ours, theirs in (("1", "1"), ("2", "1"), ("2", "2"), ("2", "2")):
        source.write_text(ours)
        package.write_text(theirs)
        keys.add(cache_key.key_of(cache_key.parts(recipe, 1, 1, {})))
    assert len(keys) == 3


@pytest.mark.parametrize("file", ["kernels/norm.py", "csrc/kernel.cc", "csrc/replacement.h", "kept.py"])
def test_kernels_of_sharded_graphs_count(recipe, monkeypatch, tmp_path, file):
    source = tmp_path / "plugins" / "semi_auto_cpu" / file
    source.parent.mkdir(parents=True)
    monkeypatch.setattr(cache_key, "ROOT", tmp_path)
    monkeypatch.setattr(cache_key, "SOURCES", ("plugins",))
    keys = set()
    for text in ("1", "2", "2"):
        source.write_text(text)
        keys.add(cache_key.key_of(cache_key.parts(recipe, 2, 2, {})))
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("began", "done", "due"),
    [(800, 900, False), (900, 1001, False), (999, 1100, False), (1001, 1002, True), (1500, 2000, True)],
)
def test_it_is_published_once_a_step_was_made_that_began_after_it_was_written(recipe, starts, began, done, due):
    cache = starts.begin(recipe, ranks=(0, 1))
    starts.compiled(cache)
    for rank in (0, 1):
        starts.step(rank, 900, 1001)  # compiles, and writes it at 1000
        starts.step(rank, began, done)
    for there in (["rank_0"], ["rank_0", "rank_1"]):
        cache.keep()
        assert sorted(path.name for path in cache.key.glob("rank_*")) == there * due
    assert starts.begin(recipe, ranks=(0, 1)).loaded == due


@pytest.mark.parametrize("line", ["", "{", '{"total_steps": 12}'])
def test_a_record_without_a_step_says_nothing(recipe, starts, line):
    cache = starts.begin(recipe)
    starts.compiled(cache)
    starts.step(0, 1001, 1002)
    with (starts.folder / "metrics" / "rank_0.jsonl").open("a") as out:
        out.write(line)
    cache.keep()
    assert cache.key.exists() == (line == "")


def test_an_attempt_that_fails_leaves_the_graph_that_it_has_used(recipe, starts):
    cache = starts.begin(recipe, ranks=(0, 1))
    starts.compiled(cache)
    starts.step(0, 1001, 1002)
    starts.step(1, 900, 1001)
    cache.close(ended_well=False)
    assert [path.name for path in cache.key.glob("rank_*")] == ["rank_0"] and not cache.own.exists()


def test_a_run_killed_while_it_is_written_leaves_nothing_to_load(recipe, starts):
    cache = starts.begin(recipe)
    starts.compiled(cache, graph=b"gra")  # and no `close`
    again = starts.begin(recipe)
    assert not again.loaded and not list(again.own.rglob("*.mindir"))
    assert not (cache.own / "rank_0").exists(), "nor does it take up the disk"


@pytest.mark.parametrize("damage", ["short", "changed", "gone", "no seal", "broken seal"])
def test_a_damaged_one_is_compiled_anew_and_replaced(recipe, starts, damage):
    folder = starts.trained(recipe).key / "rank_0"
    {
        "short": lambda: (folder / GRAPH).write_bytes(b"gra"),
        "changed": lambda: (folder / GRAPH).write_bytes(b"grapf"),
        "gone": (folder / GRAPH).unlink,
        "no seal": (folder / "seal.json").unlink,
        "broken seal": lambda: (folder / "seal.json").write_text("{"),
    }[damage]()
    again = starts.trained(recipe)
    assert not again.loaded and "writes" in again.said
    assert starts.begin(recipe).loaded


def test_all_ranks_load_or_none(recipe, starts):
    both = starts.trained(recipe, ranks=(0, 1))
    assert starts.begin(recipe, ranks=(0, 1)).loaded
    shutil.rmtree(both.key / "rank_1")
    cache = starts.begin(recipe, ranks=(0, 1))
    assert not cache.loaded and not list(cache.own.rglob("*.mindir"))


def trained_on(starts, recipe, *environs):
    """The key of a run on several nodes, whose graphs differ."""
    for rank, cache in enumerate(starts.nodes(recipe, *environs)):
        assert not cache.loaded
        starts.compiled(cache, b"graph%d" % rank)
        cache.close(ended_well=True)
    return cache.key


def test_nodes_share_a_key(recipe, starts):
    """Two nodes with one worker each publish their own ranks, and each loads its own."""
    trained_on(starts, recipe, {}, {})
    caches = starts.nodes(recipe, {}, {})
    assert [cache.loaded for cache in caches] == [True, True]
    assert [(cache.own / f"rank_{rank}" / GRAPH).read_bytes() for rank, cache in enumerate(caches)] == [
        b"graph0", b"graph1"]  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_nodes_all_load_or_none(recipe, starts, rank):
    """If the file of one node is damaged, only that node notices; the other nodes compile as well."""
    key = trained_on(starts, recipe, {}, {})
    (key / f"rank_{rank}" / GRAPH).write_bytes(b"damaged")
    caches = starts.nodes(recipe, {}, {})
    assert [cache.loaded for cache in caches] == [False, False]
    assert not list(caches[0].own.rglob("*.mindir")), "MindSpore would load what lies there"
    for cache in caches:
        starts.compiled(cache)
        cache.close(ended_well=True)
    assert all(cache.loaded for cache in starts.nodes(recipe, {}, {}))


def test_nodes_that_differ_in_what_the_graph_depends_on_compile(recipe, starts):
    """Both keys are there, of all ranks: one node would load the graph of one, the other of another."""
    trained_on(starts, recipe, {}, {})
    trained_on(starts, recipe, {"MS_DEV_SIDE_EFFECT_LOAD_ELIM": "3"}, {"MS_DEV_SIDE_EFFECT_LOAD_ELIM": "3"})
    assert [cache.loaded for cache in starts.nodes(recipe, {}, {"MS_DEV_SIDE_EFFECT_LOAD_ELIM": "3"})] == [False] * 2


def test_a_node_that_cannot_use_the_cache_lets_the_others_compile(recipe, starts):
    trained_on(starts, recipe, {}, {})
    caches = starts.nodes(recipe, {}, {"REGISTER_PATH": "/mine"})
    assert [cache.loaded for cache in caches] == [False, False] and caches[1].environment == {}


def test_who_hears_nothing_of_another_node_compiles(recipe, starts, monkeypatch):
    trained_on(starts, recipe, {}, {})
    monkeypatch.setattr(compile_cache, "AGREE", 0.0)
    attempt = starts.folder / "attempts" / "0009"
    first = prepare(recipe, starts.folder, attempt, 2, [0], starts.environ)
    second = prepare(recipe, starts.folder, attempt, 2, [1], starts.environ)
    assert (first.loaded, second.loaded) == (False, False), "an answer holds also for who comes later"
    over = prepare(recipe, starts.folder, starts.folder / "attempts" / "0010", 2, [0], starts.environ, lambda: True)
    assert not over.loaded


def test_a_full_disk_changes_nothing(recipe, starts, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    cache = starts.begin(recipe)
    starts.compiled(cache)
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.shutil, "copyfile", full)
        cache.close(ended_well=True)
    assert not list(cache.key.glob("*rank_0*"))
    starts.trained(recipe)
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.shutil, "copyfile", full)
        assert not starts.begin(recipe).loaded
    monkeypatch.setattr(compile_cache, "_load", full)
    cache = starts.begin(recipe)
    assert cache.environment == {} and "No space left" in cache.said


def test_a_disk_that_is_too_full_for_a_copy_costs_no_cache(recipe, starts, monkeypatch):
    """The run's disk was full: the graph was removed from the cache, on another disk, as if it were damaged."""
    first = starts.trained(recipe)

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        second = starts.begin(recipe)
    assert not second.loaded and (first.key / "rank_0" / GRAPH).exists()
    assert not list((second.own / "rank_0").iterdir()) and starts.begin(recipe).loaded


def test_the_keys_used_last_stay(recipe, starts):
    keys = []
    for seed in range(KEPT + 2):
        cache = starts.trained(apply_overrides(recipe, [f"seed={seed}"]))
        os.utime(cache.key, (1000 + seed, 1000 + seed))
        keys.append(cache.key)
    foreign = cache.key.parent / "mine"
    foreign.mkdir()
    starts.begin(apply_overrides(recipe, ["seed=2"]))  # used again: the youngest
    starts.trained(apply_overrides(recipe, ["seed=99"]))
    assert [key.exists() for key in keys] == [False, False, True, False, True, True] and foreign.exists()


def test_a_key_that_is_published_stays_although_others_are_of_the_future(recipe, starts):
    """A clock was set back: each new graph was the oldest, and was removed as soon as it was there."""
    for seed in range(KEPT):
        cache = starts.trained(apply_overrides(recipe, [f"seed={seed}"]))
        os.utime(cache.key, (4e9 + seed, 4e9 + seed))
    starts.trained(apply_overrides(recipe, ["seed=99"]))
    assert starts.begin(apply_overrides(recipe, ["seed=99"])).loaded
    assert len(list(cache.key.parent.iterdir())) == KEPT


@pytest.mark.parametrize(
    "graph",
    [
        b"...func_type pyfunc...",
        b"...PyExecute...",
        b"...PyInterpret...",
        b"...infer_func_id...",
        call("f()") + b"...PyExecute...",
        call("f()") + call(),
    ],
)
def test_a_graph_with_functions_of_its_process_is_never_published(recipe, starts, graph):
    first = starts.trained(recipe, graph=graph)
    assert not list(first.key.glob("rank_*"))
    second = starts.begin(recipe)
    assert second.environment == {} and "calls functions of Python" in second.said


def test_a_graph_whose_functions_have_names_is_published(recipe, starts):
    starts.trained(recipe, graph=call("f()") + call("g(tag=1)"))
    assert starts.begin(recipe).loaded


@pytest.mark.parametrize(
    "name",
    ["tiny", "tiny_dp2", "tiny_ep2", "tiny_ep2_balanced", "tiny_ep4", "tiny_eod", "tiny_eod_balanced", "sharded_tp2",
     "sharded_ep2"],
)  # fmt: skip
def test_each_way_of_training_on_cpu_has_a_cache(name, tmp_path):
    assert unfit(effective_recipe(runs.HERE / f"{name}.yaml", (), None, tmp_path), {}) is None


def test_conversations_are_known_by_their_text_and_by_all_that_makes_tokens_of_it(starts, tmp_path):
    """The key of a graph depends on the text of the conversations and on the tokenizer, because the number of packed
    samples depends on both.
    """
    talk, tokenizer = tmp_path / "talk.jsonl", tmp_path / "tokenizer"
    tokenizer.mkdir()
    files = [talk, tokenizer / "tokenizer.json", tokenizer / "merges.txt", tokenizer / "model.safetensors"]
    for file in files:
        file.write_text("one")
    recipe = load_recipe("recipes/mini/finetune.yaml")
    loader = recipe["train_dataset"]["data_loader"]
    loader["data_files"], loader["handler"][0]["tokenizer"]["pretrained_model_dir"] = str(talk), str(tokenizer)
    starts.trained(recipe)
    for file in files:
        assert starts.begin(recipe).loaded
        file.write_text("two")
        assert starts.begin(recipe).loaded == (file.suffix == ".safetensors"), file
        file.write_text("one")
    del loader["data_files"]  # of a name in another place, nothing is known
    assert "not known to the key" in unfit(recipe, {})


def test_code_from_elsewhere_runs_without(recipe):
    assert unfit(recipe, {"REGISTER_PATH": "/mine"})
    assert unfit({**recipe, "callbacks": [{"type": "Mine", "auto_register": "mine.Mine"}]}, {})


@pytest.mark.parametrize(
    "name", ["MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH", "MS_DEV_FORCE_USE_COMPILE_CACHE"]
)
def test_a_users_own_cache_is_refused(recipe, name):
    refuse_own(recipe, {})
    with pytest.raises(ClusterError, match=f"{name}=1: .*--compile-cache"):
        refuse_own(recipe, {name: "1"})
    refuse_own(recipe, {name: "1", KEY: "of a worker that we started"})


def test_nor_may_the_recipe_turn_it_on(recipe):
    for setting in ("enable_compile_cache", "compile_cache_path"):
        changed = copy.deepcopy(recipe)
        changed["context"][setting] = True
        with pytest.raises(RecipeError, match=f"context.{setting}: .*--compile-cache"):
            refuse_own(changed, {})


def test_the_key_says_what_it_is_of(recipe, starts):
    key = starts.trained(recipe).key
    said = json.loads((key / "key.json").read_text())
    other = cache_key.parts(apply_overrides(recipe, [FACTOR]), 2, 1, starts.environ)
    assert cache_key.differences(other, said) == ["model.model_config.routed_scaling_factor", "workers"]
