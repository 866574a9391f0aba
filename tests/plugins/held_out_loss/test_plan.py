import numpy as np
import pytest

from plugins.errors import DataError, RecipeError
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
        ({"samples": 8}, r"held_out_loss\.samples: 8 samples are less than a step has; write a number of at least 16"),
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
    with pytest.raises(DataError, match=r"no .*corpus\.idx; `tc3 data prepare --held-out"):
        check(settings, global_batch=1)


def test_a_file_of_instructions_is_looked_for_as_such(settings, tmp_path):
    settings["data_path"] = str(tmp_path / "talk.jsonl")
    with pytest.raises(DataError, match=r"no .*talk\.jsonl; `tc3 data instructions --held-out"):
        check(settings, global_batch=1, instructions=True)
    (tmp_path / "talk.jsonl").touch()
    check(settings, global_batch=1, instructions=True)


def test_held_out_data_is_read_as_training_data_is(settings):
    megatron = {
        "type": "BlendedMegatronDatasetDataLoader",
        "sizes": [800, 0, 0],
        "config": {"data_path": ["a"], "eod": 0},
    }
    assert held_out_loader(megatron, settings["data_path"], 16) == {
        **megatron, "sizes": [16, 0, 0], "config": {"data_path": ["1", settings["data_path"]], "eod": 0},
    }  # fmt: skip
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
    with pytest.raises(DataError, match=r"data_path: there is no .*other\.bin; "):
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


def recipe_of(accumulation=1, full_batch=False, **degrees):
    return {
        "use_parallel": True,
        "runner_config": {"batch_size": 2, "gradient_accumulation_steps": accumulation},
        "parallel_config": degrees,
        "parallel": {"full_batch": full_batch, "pipeline_config": {"pipeline_scheduler": "1f1b"}},
    }


@pytest.mark.parametrize(
    ("recipe", "samples", "read", "micro"),
    [
        ({"use_parallel": False, "runner_config": {"batch_size": 8}, "parallel_config": {"data_parallel": 4}}, 8, 8, 1),
        (recipe_of(data_parallel=4, model_parallel=2), 8, 2, 1),
        (recipe_of(data_parallel=4, full_batch=True), 8, 8, 1),
        (recipe_of(data_parallel=2, pipeline_stage=2, micro_batch_num=4), 16, 8, 4),
        (recipe_of(data_parallel=2, pipeline_stage=1, micro_batch_num=4), 4, 2, 1),
        (recipe_of(accumulation=3, data_parallel=2), 12, 6, 3),
    ],
)
def test_a_rank_reads_its_part_of_a_step(recipe, samples, read, micro):
    found = Batches.of(recipe)
    assert (found.samples, found.read, found.micro) == (samples, read, micro)


@pytest.mark.parametrize(("scheduler", "last"), [("1f1b", range(4, 8)), ("zero_bubble_v", range(4))])
def test_the_ranks_that_compute_the_loss_share_the_mean(scheduler, last):
    batches = Batches(samples=8, read=8, micro=4, stages=2, scheduler=scheduler)
    shares = [batches.share_of(rank, 8) for rank in range(8)]
    assert sum(shares) == 1 and [rank for rank, share in enumerate(shares) if share] == list(last)


def test_tokens_count_that_neither_the_mask_nor_the_label_leaves_out():
    ids = np.zeros((2, 3), np.int32)
    labels, mask = np.array([[1, -100, 1], [1, 1, 1]]), np.array([[1, 1, 0], [1, 1, 1]])
    assert counted({"input_ids": ids}) == 6
    assert counted({"input_ids": ids, "labels": labels, "loss_mask": mask}) == 4


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
