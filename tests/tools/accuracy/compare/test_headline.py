"""One fault at a time, and what the headline must say of it: what differs first in time, never its consequence."""

import json

import numpy as np
import pytest

from tests.tools.accuracy.align.little import Faults, train, write_little
from tests.tools.accuracy.dumps.dump_writer import write_dump
from tools.accuracy.compare.run import compare_dumps
from tools.accuracy.dumps.read import open_dump

FAULTS = {
    # a forward fault: counters, caches, moments and weights that follow from it are not the first
    "softmax": ({"softmax": 1.01}, "initial loss is affected: net.attn.core (Attention) is the first"),
    "dropout": ({"dropout": 1}, "net.attn.dropout (Dropout) gets the same and gives another result: look at the seed"),
    "before an inner cell": ({"inside": 1.01}, "net.moe.router (Router), which no gradient|initial loss is affected"),
    "backward": (
        {"loss_gradient": 1.01},
        "The forward pass of the first step agrees, its backward pass does not: what arrives at net.head",
    ),
    # only the optimizer
    "weight decay": ({"decay": 0.0}, "the optimizer: weight decay: the update since step 0"),
    "learning rate": ({"rate": 1.05e-3}, "the optimizer: learning rate, or what else makes a whole update longer"),
    "betas": ({"beta": 0.8, "moments": False}, "until the weights of step 2 differ (5 of 5)"),
    "betas, with its moments": ({"beta": 0.8}, "The first that differs is first.embed of optimizer (AdamW), which no"),
    # where a run starts
    "seed": ({"seed": 1}, "The weights differ before any update (5 of 5), .* The batch differs too: another seed"),
    "initial weights": ({"weights_seed": 1}, "before any update (5 of 5), first net.embed (Embedding): look at init"),
    "one weight": ({"one_weight": 1.01}, "before any update (1 of 5), first net.moe.experts (Experts)"),
    # the batch
    "data": (
        {"data_from": 0},
        "The inputs of the first step differ (Cell.net.Model.forward.0.input.0): look at the data",
    ),
    "data later": ({"data_from": 1}, "agrees until step 1, whose inputs differ (Cell.net.Model.forward.0.input.0)"),
    # state by itself
    "a router's bias at the start": (
        {"start_bias": 0.02},
        "first that differs is expert_bias of net.moe.router (Router)",
    ),
    "what moves the bias": ({"bias_rate": 2e-3}, "until expert_bias of net.moe.router (Router), .* differs in step 1"),
    "a counter": ({"load": 1.01}, "first that differs is expert_load of net.moe.router (Router)"),
    "a cache": ({"cache": 1.01}, "first that differs is key_cache of net.attn.core (Attention)"),
    "a running mean": ({"momentum": 0.8}, "first that differs is running_mean of net.norm (Norm)"),
    "a count of calls": ({"calls": 5}, "first that differs is count of net.norm (Norm)"),
}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """(task, moments hooked) -> the dump without a fault."""
    cases = {}

    def of(task, moments):
        if (task, moments) not in cases:
            folder = tmp_path_factory.mktemp("golden")
            cases[task, moments] = open_dump(write_little(folder, task, moments=moments))
        return cases[task, moments]

    return of


@pytest.mark.parametrize("task", ["tensor", "statistics"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_headline_names_the_fault_and_not_what_follows_from_it(tmp_path, golden, fault, task):
    faults, words = FAULTS[fault]
    bench = open_dump(write_little(tmp_path / "bench", task, **faults))
    report = compare_dumps(golden(task, faults.get("moments", True)), bench)
    assert any(all(part in report.meaning() for part in option.split(" .* ")) for option in words.split("|"))


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_a_rerun_of_the_little_model_has_no_finding(tmp_path, golden, task):
    assert compare_dumps(golden(task, True), open_dump(write_little(tmp_path / "b", task))).passed


def test_without_gradients_a_counter_is_not_taken_for_an_initial_weight_either(tmp_path):
    """Dumps of forward passes alone do not tell weights from state: then the order of the calls decides."""
    sides = {
        name: train(Faults(**faults))
        for name, faults in (("a", {}), ("b", {"softmax": 1.01}), ("c", {"weights_seed": 1}))
    }
    dumps = {}
    for name, steps in sides.items():
        forward = [{key: call for key, call in calls.items() if ".forward." in key} for calls in steps]
        dumps[name] = open_dump(write_dump(tmp_path / name, forward))
    report = compare_dumps(dumps["a"], dumps["b"])
    assert report.first["state"] is None and "initial loss is affected: net.attn.core" in report.meaning()
    assert "before any update" in compare_dumps(dumps["a"], dumps["c"]).meaning()


def test_parameters_that_a_dump_itself_calls_untrained_are_state(tmp_path):
    """At L1 and L2 there are no gradients of parameters; the weights that are dumped apart say it themselves."""
    dumps = []
    for name, load in (("a", 1.0), ("b", 2.0)):
        router = {"weight": np.ones((4, 4), np.float32), "expert_load": np.full(4, load, np.float32)}
        held = {0: {"Cell.net.router.Router.forward.0": {"parameters": router}}}
        call = {"Functional.matmul.0.forward": {"input": [np.ones(4, np.float32)], "output": []}}
        folder = write_dump(tmp_path / name, [call], level="L1", weights=held)
        file = folder / "weights" / "step0" / "rank0" / "dump.json"
        content = json.loads(file.read_text())
        for label, node in content["data"]["Cell.net.router.Router.forward.0"]["parameters"].items():
            node["requires_grad"] = label == "weight"
        file.write_text(json.dumps(content))
        dumps.append(open_dump(folder))
    report = compare_dumps(*dumps)
    assert report.first["weights"] is None and report.first["state"].name.endswith("expert_load")
    assert "expert_load of net.router (Router), which no gradient trains" in report.meaning()
