"""These tests check what an evaluation runs and writes, and when an interrupted run evaluates again."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from mindformers.dataset.causal_language_model_dataset import dataset_batch_func
from mindformers.tools.register import MindFormerConfig
from mindspore import Parameter, Tensor
from mindspore.dataset import GeneratorDataset

from plugins.cpu_backend import model
from plugins.errors import DataError, RecipeError
from plugins.held_out_loss import adapter
from plugins.held_out_loss.adapter import HeldOutLoss
from plugins.held_out_loss.plan import (
    Batches,
    Settings,
    check,
    check_files,
    check_step,
    counted,
    held_out_loader,
    short_names,
    weigh,
)
from tests.plugins.held_out_loss.evaluation import Evaluated
from tests.plugins.sinking import fetching
from tools.runs.readings import read_held_out


@pytest.fixture
def settings(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    return {"data_path": str(tmp_path / "corpus"), "samples": 16, "every": 10}


def test_good_settings_pass(settings):
    check(settings, global_batch=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": 3}, r"held_out_loss\.sample: no such setting \(did you mean 'samples'\?\)"),
        ({"samples": 8}, r"held_out_loss\.samples: 8 samples are fewer than the 16 .*; write at least 16"),
        ({"every": 0}, r"held_out_loss\.every: 0 is not allowed; write a number of at least 1"),
        ({"every": "often"}, r"held_out_loss\.every: 'often' is not allowed; "),
        ({"every": True}, r"held_out_loss\.every: True is not allowed; "),
        (
            {"data_path": []},
            r"held_out_loss\.data_path: \[\] is not a path; write the path of the held-out data, or a list",
        ),
        ({"data_path": 3}, r"held_out_loss\.data_path: 3 is not a path; write the path"),
        ({"data_path": ["8", "a"]}, r"held_out_loss\.data_path: '8' is a number; write prefixes only, without weights"),
        ({"data_path": ["a", 0.5]}, r"held_out_loss\.data_path: 0\.5 is a number; "),
        ({"data_path": ["a", ""]}, r"held_out_loss\.data_path: '' is not a path; write the prefix"),
        (
            {"data_path": ["b/a", "./b/a"]},
            r"held_out_loss\.data_path: '\./b/a' is in the list twice; write each corpus",
        ),
    ],
)
def test_wrong_settings_are_named(settings, change, message):
    with pytest.raises(RecipeError, match=message):
        check({**settings, **change}, global_batch=16)


def test_a_missing_setting_is_named(settings):
    del settings["every"]
    with pytest.raises(RecipeError, match=r"held_out_loss\.every: the key is missing"):
        check(settings, global_batch=1)


def test_a_missing_corpus_says_how_to_make_one(settings, tmp_path):
    (tmp_path / "corpus.idx").unlink()
    with pytest.raises(DataError, match=r"corpus\.idx does not exist; `tc3 data prepare --held-out"):
        check(settings, global_batch=1)


def test_a_file_of_instructions_is_looked_for_as_such(settings, tmp_path):
    settings["data_path"] = str(tmp_path / "talk.jsonl")
    with pytest.raises(DataError, match=r"talk\.jsonl does not exist; `tc3 data instructions --held-out"):
        check(settings, global_batch=1, instructions=True)
    (tmp_path / "talk.jsonl").touch()
    check(settings, global_batch=1, instructions=True)


def test_held_out_data_is_read_as_training_data_is(settings):
    megatron = {
        "type": "BlendedMegatronDatasetDataLoader",
        "sizes": [800, 0, 0],
        "config": {"data_path": ["a"], "eod": 0, "split": "969, 30, 1"},
    }
    config = {"data_path": ["1", settings["data_path"]], "eod": 0, "split": "1, 0, 0"}  # a part may hold no document
    assert held_out_loader(megatron, settings["data_path"], 16) == {**megatron, "sizes": [16, 0, 0], "config": config}
    several = {**megatron, "config": {"train_data_path": ["a"], "eod": 0}}
    assert held_out_loader(several, settings["data_path"], 16)["config"] == config
    packing = [{"type": "AlpacaInstructDataHandler"}, {"type": "PackingHandler", "seq_length": 8}]
    talk = {"type": "HFDataLoader", "data_files": "a.jsonl", "path": "json"}
    talk["handler"] = [{"type": "shuffle", "seed": 1}, *packing, {"type": "take", "n": 800}]
    own = held_out_loader(talk, settings["data_path"], 16)
    assert own == {**talk, "data_files": settings["data_path"], "handler": [*packing, {"type": "take", "n": 16}]}
    assert talk["handler"][-1]["n"] == 800
    assert held_out_loader(talk, settings["data_path"], None)["handler"] == packing, "all of it"


def test_a_corpus_needs_no_number_of_samples(settings):
    del settings["samples"]
    assert check(settings, global_batch=16).samples is None


def test_each_corpus_of_a_list_is_looked_for(settings, tmp_path):
    settings["data_path"] = [settings["data_path"], str(tmp_path / "other")]
    with pytest.raises(DataError, match=r"data_path: .*other\.bin does not exist; "):
        check(settings, global_batch=16)


def test_instructions_are_one_file():
    recipe = {"train_dataset": {"data_loader": {"type": "HFDataLoader"}}}
    recipe["plugins"] = {"held_out_loss": {"data_path": ["a.jsonl"], "every": 1}}
    with pytest.raises(RecipeError, match=r"data_path: HFDataLoader reads .* one file, not from \['a\.jsonl'\]; "):
        check_files(recipe)
    recipe["plugins"]["held_out_loss"]["data_path"] = "a.jsonl"
    check_files(recipe)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/b"], ["b"]),
        (["a/b", "a/c"], ["b", "c"]),
        (["x/a/held", "x/b/held", "other"], ["a/held", "b/held", "other"]),
        (["held", "a/held", "/a/held"], ["held", "a/held", "/a/held"]),
        (["1/x/held", "2/x/held"], ["1/x/held", "2/x/held"]),
    ],
)
def test_names_of_corpora_differ(paths, names):
    assert short_names(paths) == names


def test_only_the_losses_of_a_list_have_names():
    assert Settings.read({"data_path": "a/b", "every": 1}).names is None
    assert Settings.read({"data_path": ["a/b"], "every": 1}).names == ["b"]


def test_batches_and_corpora_weigh_what_they_count():
    weights, shares = weigh([[30.0, 10.0], [5.0], [3.0, 12.0]])
    assert [each.tolist() for each in weights] == [[0.75, 0.25], [1.0], [0.2, 0.8]]
    np.testing.assert_allclose(shares, [40 / 60, 5 / 60, 15 / 60], rtol=1e-15)
    losses = [[2.0, 6.0], [5.0], [1.0, 2.0]]
    means = [np.dot(*both) for both in zip(weights, losses, strict=True)]
    assert np.dot(shares, means) == pytest.approx((30 * 2 + 10 * 6 + 5 * 5 + 3 * 1 + 12 * 2) / 60, rel=1e-15)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[]], "corpus 1 of 1 has fewer samples than a step"),
        ([[3.0], [0.0, 0.0]], "corpus 2 of 2 has only tokens that the loss mask hides"),
    ],
)
def test_a_corpus_without_a_loss_is_refused_instead_of_being_recorded_as_no_number(tokens, words):
    with pytest.raises(DataError, match=rf"^plugins\.held_out_loss\.data_path: held-out {words}; add data to it"):
        weigh(tokens)


def recipe_of(accumulation=1, **degrees):
    return {
        "use_parallel": True,
        "runner_config": {"batch_size": 2, "gradient_accumulation_steps": accumulation},
        "parallel_config": degrees,
        "parallel": {"pipeline_config": {"pipeline_scheduler": "1f1b"}},
    }


@pytest.mark.parametrize(
    ("recipe", "samples", "micro"),
    [
        ({"use_parallel": False, "runner_config": {"batch_size": 8}, "parallel_config": {"data_parallel": 4}}, 8, 1),
        (recipe_of(data_parallel=4, model_parallel=2), 8, 1),
        (recipe_of(data_parallel=2, pipeline_stage=2, micro_batch_num=4), 16, 4),
        (recipe_of(data_parallel=2, pipeline_stage=1, micro_batch_num=4), 4, 1),
        (recipe_of(accumulation=3, data_parallel=2), 12, 3),
        (recipe_of(accumulation=3, data_parallel=2) | {"parallel": {"parallel_mode": 0}}, 4, 1),
        (recipe_of(accumulation=3) | {"use_parallel": False}, 2, 1),
    ],
)
def test_a_recipe_divides_a_step(recipe, samples, micro):
    found = Batches.of(recipe)
    assert (found.samples, found.micro) == (samples, micro)


@pytest.mark.parametrize(("scheduler", "last"), [("1f1b", range(4, 8)), ("zero_bubble_v", range(4))])
def test_the_ranks_that_compute_the_loss_share_the_mean(scheduler, last):
    batches = Batches(samples=8, micro=4, stages=2, scheduler=scheduler)
    shares = [batches.share_of(rank, 8) for rank in range(8)]
    assert sum(shares) == 1 and [rank for rank, share in enumerate(shares) if share] == list(last)


def test_tokens_count_that_neither_the_mask_nor_the_label_leaves_out():
    ids = np.zeros((2, 3), np.int32)
    labels, mask = np.array([[1, -100, 1], [1, 1, 1]]), np.array([[1, 1, 0], [1, 1, 1]])
    assert counted({"input_ids": ids}) == 6
    assert counted({"input_ids": ids, "labels": labels, "loss_mask": mask}) == 4


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("megatron", [True, False])
@pytest.mark.parametrize("compressed", [True, False])
def test_batches_are_those_that_training_would_make_of_the_samples(monkeypatch, micro, megatron, compressed):
    """Of a compressed mask training makes one of the whole micro-batch: [3, 8] and [5, 8] become [3, 8, 13, 16]."""
    columns = ["input_ids", "actual_seq_len"]
    samples = [(np.full(8, i, np.int32), np.array([i + 1, 8], np.int32)) for i in range(9)]
    loader = {"create_compressed_eod_mask": compressed}
    section = MindFormerConfig(data_loader={"config": loader} if megatron else loader, input_columns=columns)
    section.update({"batch_size": 4, "micro_batch_num": micro, "drop_remainder": True, "num_parallel_workers": 1})

    def data(*_, **__):
        return GeneratorDataset(samples, columns, shuffle=False)

    monkeypatch.setattr(adapter, "build_dataset_loader", data)
    evaluation = object.__new__(HeldOutLoss)
    evaluation.micro = micro
    found = evaluation._read(section.data_loader, columns, Batches(4, micro), None)
    trained = dataset_batch_func(section, data())
    wanted = list(trained.create_tuple_iterator(num_epochs=1, output_numpy=True))
    assert len(found) == len(wanted) == 2
    for mine, own in zip(found, wanted, strict=True):
        for one, two in zip(mine, own, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("there", [8, 9, 11, 12])
@pytest.mark.parametrize("asked", [None, 8, 9])
@pytest.mark.parametrize("ranks", [None, 1, 2, 4])
def test_every_layout_evaluates_the_same_samples_once(monkeypatch, there, asked, ranks):
    """A shard of MindSpore's is as long as the longest: it repeats samples if they cannot be divided by the ranks.
    Without shards (None) each rank reads all, whatever `full_batch` says, which MindFormers overrules.
    """
    rows = [(np.array([i], np.int32),) for i in range(there)]
    monkeypatch.setattr(
        adapter, "build_dataset_loader", lambda *_, default_args: GeneratorDataset(rows, shuffle=False, **default_args)
    )
    found = []
    for rank in range(ranks or 1):
        monkeypatch.setattr(adapter.BaseDataset, "_generate_shard_info", lambda rank=rank: (ranks and rank, ranks))
        evaluation = object.__new__(HeldOutLoss)
        read = evaluation._read(MindFormerConfig(), ["x"], Batches(4), asked)
        found += [int(row) for (column,) in read for row in column[:, 0]]
    assert sorted(found) == list(range(min(asked or there, there) // 4 * 4))


@pytest.mark.parametrize("wrong", [3, "x", None, [1], {}, {"pipeline_stage": "2"}])
def test_a_wrong_recipe_is_left_to_what_says_so(wrong):
    for section in ("runner_config", "parallel_config", "parallel", "train_dataset", "plugins"):
        for recipe in ({**recipe_of(pipeline_stage=2, micro_batch_num=2), section: wrong}, {"use_parallel": True}):
            check_step(recipe)
            check_files(recipe)


def test_a_step_of_micro_batches_has_to_tell_the_losses_apart():
    check_step({**recipe_of(), "print_separate_loss": False})
    with pytest.raises(
        RecipeError,
        match=r"print_separate_loss: with micro-batches plugins\.held_out_loss reads .* this key is True; write True",
    ):
        check_step({**recipe_of(pipeline_stage=2, micro_batch_num=2), "print_separate_loss": False})


class Network:
    """Its loss is the first element of a batch; each pass counts a load."""

    def __init__(self):
        self.load = Parameter(Tensor([1.0, 2.0]), name="load", requires_grad=False)
        self.placement = Parameter(Tensor([1, 0]), name="placement", requires_grad=False)

    def get_parameters(self):
        return [self.load, self.placement]

    def __call__(self, batch):
        self.load.set_data(self.load + 5)
        return Tensor([float(batch[0])]), Tensor([2.0])


def evaluated(network, *losses, weights=None, micro=1, share=1.0, per_token=False):
    """The held-out loss of one corpus's batches with these losses on one rank."""
    return corpora(network, [losses], [weights], micro, share, per_token)[0]


def corpora(network, losses, weights, micro=1, share=1.0, per_token=False):
    """The held-out loss of each corpus."""
    evaluation = object.__new__(HeldOutLoss)
    evaluation.corpora = [[(np.array([loss], np.float32),) for loss in batches] for batches in losses]
    given = zip(losses, weights, strict=True)
    evaluation.weights = [np.array(own or [1 / len(batches)] * len(batches)) for batches, own in given]
    evaluation.micro, evaluation.share, evaluation.forward = micro, share, network
    return evaluation._losses(SimpleNamespace(network=network, calculate_per_token_loss=per_token))


def test_counters_are_put_back_and_what_was_not_counted_is_not_written(monkeypatch):
    network, written = Network(), []
    assign = adapter.ops.assign
    monkeypatch.setattr(adapter.ops, "assign", lambda param, value: (written.append(param.name), assign(param, value)))
    assert evaluated(network, 3.0) == 3.0
    assert network.load.asnumpy().tolist() == [1.0, 2.0] and written == ["load"]


def test_frozen_weights_are_not_copied(monkeypatch):
    network = Network()
    monkeypatch.setattr(adapter, "frozen", {"placement"})
    monkeypatch.setattr(network.placement, "asnumpy", lambda: pytest.fail("it was read"))
    assert evaluated(network, 3.0) == 3.0 and network.load.asnumpy().tolist() == [1.0, 2.0]


def test_where_the_batch_grows_routers_expect_the_samples_of_an_evaluation_while_it_runs(monkeypatch):
    """A router cuts its scores by the number of samples, which a batch of another size need not be divisible by."""
    router, seen = SimpleNamespace(dp=3, ones_dp=None), []
    monkeypatch.setattr(model, "cells_of", lambda *_: [router])
    monkeypatch.setattr(HeldOutLoss, "ramped", True)
    monkeypatch.setattr(Network, "__call__", lambda *_: (seen.append(router.dp), (Tensor([6.0]), Tensor([2.0])))[1])
    assert evaluated(Network(), 3.0) == 6.0
    assert seen == [1] and router.dp == 3 and router.ones_dp.shape == (1, 3, 1)


def test_batches_weigh_what_they_count():
    assert evaluated(Network(), 2.0, 6.0, weights=[0.75, 0.25]) == 3.0


def test_each_corpus_has_the_loss_of_its_own_batches():
    assert corpora(Network(), [[2.0, 6.0], [5.0]], [[0.75, 0.25], None]) == [3.0, 5.0]


def test_the_record_of_a_list_has_the_loss_of_each_corpus(tmp_path):
    Evaluated(tmp_path / "one", 0, every=1)
    Evaluated(tmp_path / "two", 0, every=1, names=["a", "b"], held_out=(2.0, 4.0))
    line = (tmp_path / "one" / "metrics" / "held_out.jsonl").read_text()
    assert json.loads(line) == {"step": 0, "held_out_loss": 3.0}
    line = (tmp_path / "two" / "metrics" / "held_out.jsonl").read_text()
    assert json.loads(line) == {"step": 0, "held_out_loss": 3.0, "corpora": {"a": 2.0, "b": 4.0}}


def test_a_loss_is_divided_by_what_it_was_added_up_over():
    assert evaluated(Network(), 8.0, micro=4) == 2.0
    assert evaluated(Network(), 8.0, micro=4, per_token=True) == 4.0, "by its tokens"


def test_a_rank_without_the_loss_adds_nothing():
    assert evaluated(Network(), np.nan, share=0.0) == 0.0


def test_in_sink_mode_the_train_step_is_evaluated_and_not_the_cell_that_fetches_training_data(tmp_path):
    run = Evaluated(tmp_path, 0, every=1)
    first = run.params.train_network
    run.params.train_network = fetching(first)  # as `Model.train` has it after the beginning
    run.step(1)
    assert run.evaluated == [first, first]


@pytest.mark.parametrize("done", [0, 7, 20])
def test_a_resumed_part_evaluates_at_the_steps_of_an_uninterrupted_run(tmp_path, done):
    run = Evaluated(tmp_path, done, every=10)
    for step in range(done + 1, 34):
        run.step(step)
    run.end()
    assert sorted(read_held_out(tmp_path)) == sorted({done, *range(done // 10 * 10 + 10, 34, 10), 33})
