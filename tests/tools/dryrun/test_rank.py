"""A MoE training step compiled for 16 virtual devices (data 8 x tensor 2, EP 8), and what a rank reads for a step.

The step is that of MindFormers' semi-auto path.
"""

import copy
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.tools.check.test_rules import MINI, SEMI, change
from tools.dryrun.plan import resized
from tools.dryrun.rank import shapes_of
from tools.recipe.view import LOADER, View

RANK = 13  # its EP group is 8..15, its node 12..15
EP, OUTER, INNER = [8, 9, 10, 11, 12, 13, 14, 15], [9, 13], [12, 13, 14, 15]
DISPATCHER = "moe/token_dispatcher.py"
HIDDEN = 128
# the one with experts: a dense layer has no collective that a test here looks at
ONE_LAYER = ("--set", "model.model_config.num_hidden_layers=1", "--set", "model.model_config.first_k_dense_replace=0")
DEREDUNDENCY = ("--set", "model.model_config.moe_token_dispatcher_type=alltoall_deredundency")


def compile_rank(forks, folder, *arguments, rank=RANK):
    """Return what the worker reports of a model of one layer."""
    out = folder / "out.json"
    worker = ("-m", "tests.tools.dryrun.compile_worker", out, "--rank", rank, *ONE_LAYER)
    done = forks.python(*worker, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def deredundency(forks, tmp_path_factory):
    """The report on rank RANK, which three tests read."""
    group_loss = ("--plugins", json.dumps({"group_aux_loss": True}))
    kind = ("--set", "model.model_config.moe_router_load_balancing_type=seq_aux_loss")
    return compile_rank(forks, tmp_path_factory.mktemp("deredundency"), *DEREDUNDENCY, *group_loss, *kind)


def counted(report, role, source=DISPATCHER):
    """Collectives of one role that stand in `source`: how often (operator, ranks) occurs."""
    return Counter(
        (item["op"], tuple(item["ranks"]))
        for item in report["collectives"]
        if item["role"] == role and item["source"].startswith(source)
    )


@pytest.mark.slow
def test_alltoall_exchanges_over_the_ep_group(forks, tmp_path):
    report = compile_rank(forks, tmp_path)
    ep = tuple(EP)
    # counts of tokens; tokens and their experts out, tokens back
    forward = {("AlltoAll", ep): 1, ("AlltoAllV", ep): 3}
    assert counted(report, "forward") == counted(report, "recompute") == forward
    assert counted(report, "gradient") == {("AlltoAllV", ep): 2}
    sizes = [item["attributes"]["block_size"] for item in report["collectives"] if item["op"] == "AlltoAllV"]
    assert sizes == [HIDDEN, 1, HIDDEN] * 2 + [HIDDEN, HIDDEN]
    assert EP in [ranks for _, ranks in report["groups"]]


@pytest.mark.slow
def test_the_auxiliary_loss_of_a_group_gathers_over_the_ep_group(deredundency):
    """`plugins.group_aux_loss`: the shares of experts, once, also where the layer is recomputed."""
    calls = [item for item in deredundency["collectives"] if item["ranks"] == EP]
    assert [(item["op"], item["role"]) for item in calls] == [("AllGather", "forward")]


@pytest.mark.slow
def test_deredundency_gathers_between_nodes_and_exchanges_inside(deredundency):
    report = deredundency
    outer, inner = tuple(OUTER), tuple(INNER)
    # experts, probabilities and tokens between nodes; counts, tokens and experts out, tokens back inside
    assert counted(report, "forward") == {
        ("AllGather", outer): 3,
        ("AlltoAllV", inner): 4,
        ("ReduceScatter", outer): 1,
    }
    assert counted(report, "gradient") == {
        ("AllGather", outer): 1,
        ("AlltoAllV", inner): 2,
        ("ReduceScatter", outer): 2,
    }
    exchange = next(item for item in report["collectives"] if item["attributes"].get("block_size") == HIDDEN)
    gathers = [report["collectives"][place]["op"] for place in exchange["after"] + exchange["after_depend"]]
    assert gathers.count("AllGather") >= 3  # the inner exchange waits for the outer gathers
    created = [ranks for _, ranks in report["groups"]]
    assert created.index(EP) < created.index(OUTER) < created.index(INNER)


@pytest.mark.slow
def test_experts_of_a_plugin(forks, tmp_path):
    """A class injected through MoESubmodules.experts, with a collective, a branch and a gradient of its own."""
    report = compile_rank(
        forks,
        tmp_path,
        "--experts=tests.tools.dryrun.experts:SummingExperts",
        '--experts-arguments={"branch": 1}',
    )
    ours = [item for item in report["collectives"] if item["source"].startswith("dryrun/experts.py")]
    assert [(item["role"], item["op"], item["ranks"]) for item in ours] == [
        ("forward", "AllReduce", EP),
        ("recompute", "AllReduce", EP),
        ("gradient", "AllGather", EP),
    ]
    assert [item["attributes"].get("parallel_branch") for item in ours] == [1, 1, None]
    assert counted(report, "gradient") == {("AlltoAllV", tuple(EP)): 2}


@pytest.mark.slow
def test_ranks_create_groups_in_the_same_order(forks, deredundency, tmp_path):
    """The n-th group of one rank is the n-th of every other, with ranks of its own; one of the two is not compiled."""
    first = compile_rank(forks, tmp_path, "--build-only", *DEREDUNDENCY, rank=0)
    shapes = []
    for rank, report in ((0, first), (RANK, deredundency)):
        groups = [ranks for _, ranks in report["groups"]]
        assert all(rank in ranks for ranks in groups)
        shapes.append([(len(ranks), ranks[1] - ranks[0]) for ranks in groups])
    # data, tensor (twice: the layers give it another name), EP, between nodes, inside a node
    assert shapes[0] == shapes[1] == [(8, 2), (2, 1), (2, 1), (8, 1), (2, 4), (4, 1)]


STRATEGY = ("parallel", "dataset_strategy")
ROWS = SEMI["runner_config"]["batch_size"] * 8  # of a rank of four: 8 micro-batches


def rows(recipe):
    return {shape[0] for shape, _ in shapes_of(View(recipe)).values()}


def without_strategy(recipe, **loader):
    plain = change(recipe, (("train_dataset", "input_columns"), ["input_ids", "labels"]), (LOADER, loader))
    del plain["parallel"]["dataset_strategy"]
    return plain


@pytest.mark.parametrize(
    ("recipe", "times"),
    [
        (SEMI, 1),
        (change(SEMI, (STRATEGY, "full_batch")), 4),
        (without_strategy(SEMI, type="HFDataLoader"), 4),
        (without_strategy(SEMI, type="HFDataLoader", create_attention_mask=True), 1),
        (without_strategy(SEMI, type="HFDataLoader", handler=[{"type": "PackingHandler"}]), 1),
        (without_strategy(SEMI, type="BlendedMegatronDatasetDataLoader", config={}), 1),
    ],
)
def test_a_rank_reads_its_rows_or_those_of_all(recipe, times):
    assert rows(recipe) == {ROWS * times}
    assert View(recipe).full_batch == (times > 1)


def test_a_length_that_the_recipe_leaves_out_is_that_of_mindformers():
    recipe = copy.deepcopy(SEMI)
    del recipe["model"]["model_config"]["seq_length"]
    assert shapes_of(View(recipe))["input_ids"][0] == (ROWS, 4096)


def test_full_batch_is_for_split_models():
    assert not View(change(MINI, (STRATEGY, "full_batch"))).full_batch


def test_another_number_of_devices_keeps_what_is_no_list():
    assert resized(load("full_batch"), 64)["parallel"]["dataset_strategy"] == "full_batch"
    assert resized(load(None), 64)["parallel"]["dataset_strategy"][0] == [8, 1]


def load(strategy):
    from tools.recipe.load import load_recipe

    recipe = load_recipe("tests/tools/dryrun/ascend.yaml")
    recipe["parallel_config"].update(data_parallel=4, model_parallel=8, pipeline_stage=1)
    recipe["parallel"]["dataset_strategy"] = strategy or [[4, 1]] * 5
    return recipe


def test_every_column_has_the_type_that_the_data_set_gives():
    """A mask of one byte was refused by MindSpore in a pipeline, where the one of the data is not."""
    package = Path(importlib.util.find_spec("mindformers").origin).parent
    source = (package / "dataset/blended_datasets/gpt_dataset.py").read_text()
    returned = source[source.index("if self.config.create_compressed_eod_mask:\n            return") :][:900]
    given = set(re.findall(r"_?(?:tokens|labels|mask|ids|len)\.astype\(numpy\.(\w+)\)", returned))
    masked = change(MINI, ((*LOADER, "config", "create_attention_mask"), True))
    assert {kind for _, kind in shapes_of(View(masked)).values()} == given == {"int32"}
