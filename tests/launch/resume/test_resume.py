"""With which data and for how many steps a run may go on: `tc3 train --resume`, with msrun replaced (see conftest)."""

import shlex
import shutil
from pathlib import Path

import pytest

from launch import train as worker
from launch.run import script as script_run
from plugins.attention_balance.samples import Cost
from plugins.lines import Span, note
from plugins.sealed_checkpoint.plan import write_seal
from tests.launch.resume.conftest import TOY, Started, stored
from tools.layout import resolve
from tools.recipe.load import load_recipe
from tools.weights.convert_plan import KEPT


def test_more_steps_within_the_epoch_go_on(train, runs, trained):
    code, _, err = train(TOY, "--resume", "auto", "--steps", "100")
    assert code == 0, err
    assert runs[-1][-2:] == ["--resume", str(trained / "checkpoint" / "iteration_00000050")]
    assert stored(trained)["train_dataset"]["data_loader"]["sizes"][0] == 800


def test_more_steps_than_the_epoch_has_are_refused_and_the_way_on_is_named(train, runs, trained):
    code, out, err = train(TOY, "--resume", "auto", "--steps", "130")
    assert code == 2 and len(runs) == 1 and not out
    assert "sizes.0 was 400, 1 epoch of the data, would be 1,040, 2 epochs of the data with the last one apart" in err
    assert "would repeat some samples" in err and "--set checkpoint.load_path=" in err
    assert stored(trained)["train_dataset"]["data_loader"]["sizes"][0] == 400, "the run's recipe stays"
    assert (
        "would be refused here: going on from step 50"
        in train(TOY, "--resume", "auto", "--steps", "130", "--dry-run")[2]
    )


@pytest.mark.parametrize(
    "named", ["checkpoint/iteration_00000050", "disk/iteration_00000050", "checkpoint/iteration_00000050_best"]
)
def test_a_run_does_not_begin_anew_where_the_folder_of_its_checkpoints_is_empty(train, runs, trained, named):
    """It trained from step 1 on, because no attempt had gone on from a checkpoint."""
    note(trained, Span("save", 50, 10.0, 11.0, sealed=True))
    elsewhere = named == "checkpoint/iteration_00000050"
    if named.startswith("disk"):  # not mounted
        (trained / "checkpoint").rename(trained / "disk")
    elif not elsewhere:
        (trained / "checkpoint/iteration_00000050").rename(trained / named)
    more = ["--set", f"checkpoint.save_path={trained / 'another'}"] if elsewhere else []
    code, _, err = train(TOY, "--resume", "auto", "--steps", "100", *more)
    assert code == 2 and len(runs) == 1, err
    assert "no checkpoint is in this folder, although this run saved one at step 50" in err
    shutil.rmtree(trained / "another", ignore_errors=True)
    train(TOY, "--resume", str(trained / named), "--steps", "100", *more)
    assert len(runs) == 2, "what is named is taken"


def test_the_recipe_that_is_kept_in_a_checkpoint_tells_the_order_of_the_data(train, runs, trained, workplace):
    """As in one that tc3 experts restore-order has written outside of the run's folder: any order was taken."""
    folder = shutil.copytree(trained / "checkpoint" / "iteration_00000050", workplace / "a" / "b" / "restored")
    shutil.copy(trained / "recipe.yaml", folder / KEPT)
    seed = "train_dataset.data_loader.config.seed"
    more = ["--resume", str(folder), "--steps", "100", "--run-dir", "new"]
    code, _, err = train(TOY, *more, "--set", f"{seed}=2")
    assert code == 2 and len(runs) == 1 and f"differs from that of {folder / KEPT}: {seed} was 1, would be 2" in err
    assert train(TOY, *more)[0] == 0 and len(runs) == 2
    other = (trained / "recipe.yaml").read_text().replace(str(trained), str(workplace / "a"))
    (workplace / "a" / "recipe.yaml").write_text(other.replace("seed: 1", "seed: 2"))
    code, _, err = train(TOY, *more[:-1], "newer", "--set", f"{seed}=2")
    assert code == 2 and f"differs from that of {folder / KEPT}: {seed} was 1" in err, "not that of the run around it"


@pytest.mark.parametrize("wanted", ["50", "40"])
def test_a_run_that_is_complete_says_so_and_starts_nothing(train, runs, trained, wanted):
    """MindSpore would compile, and fail with "'epoch' must bigger than 'initial_epoch'"."""
    before = stored(trained)
    code, out, err = train(TOY, "--resume", "auto", "--steps", wanted)
    assert code == 0 and len(runs) == 1, err
    assert f"the run is complete: {trained / 'checkpoint' / 'iteration_00000050'} holds step 50 of {wanted}" in err
    assert "steps:         50\ntraining loss: 5.0000 -> -44.0000" in out and "go on with:    tc3 train" in out
    assert (trained / "loss.png").exists() and stored(trained) == before
    assert "the run is complete" in train(TOY, "--resume", "auto", "--steps", wanted, "--dry-run")[2]


def test_a_run_is_complete_by_its_samples_where_the_steps_have_another_size(train, runs, trained):
    common = trained / "checkpoint" / "iteration_00000050" / "common.json"
    common.write_text('{"step_num": 50, "global_batch_size": 8}')
    write_seal(common.parent, 0, world_size=1, step=50)
    assert train(TOY, "--resume", "auto", "--set", "runner_config.batch_size=2", "--steps", "100")[0] == 0
    assert len(runs) == 1, "50 steps of 8 samples are 100 of 4"
    assert train(TOY, "--resume", "auto", "--set", "runner_config.batch_size=2", "--steps", "101")[0] == 0
    assert len(runs) == 2


def test_workers_of_a_launch_script_say_that_the_run_is_complete(script, trained):
    folder = trained / "checkpoint" / "iteration_00000050"
    for rank in (0, 1):
        done = script(trained, "--resume", folder, rank=rank, samples=400)
        assert done.exit_code == 0 and "tc3: the run is complete" in done.output, done.output


CHANGES = {
    "train_dataset.data_loader.config.seed": ("2", "config.seed was 1, would be 2"),
    "train_dataset.data_loader.config.seq_length": ("16", "config.seq_length was 8, would be 16"),
    "train_dataset.data_loader.config.split": ("'9,1,0'", "config.split was '1, 0, 0', would be"),
    "train_dataset.data_loader.config.data_path": ("['1', ./other]", "config.data_path was ['1', './corpus'], would"),
    "plugins.attention_balance.window": ("4", "plugins.attention_balance.window was 1, would be 4"),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_changes_the_order_of_the_data_is_refused(train, runs, trained, write_corpus, workplace, key):
    write_corpus(workplace / "other", [81] * 99 + [82])
    value, message = CHANGES[key]
    code, _, err = train(TOY, "--resume", "auto", "--steps", "50", "--set", f"{key}={value}")
    assert code == 2 and message in err and len(runs) == 1


@pytest.mark.parametrize("key", CHANGES)
@pytest.mark.parametrize("run_dir", ["output/mini-toy", "output/another"])
def test_workers_of_a_launch_script_refuse_it_themselves(script, trained, write_corpus, workplace, key, run_dir):
    write_corpus(workplace / "other", [81] * 99 + [82])
    value, message = CHANGES[key]
    resume = ("--resume", trained / "checkpoint" / "iteration_00000050", "--set")
    before = stored(trained)
    done = script(run_dir, *resume, f"{key}={value}")
    assert done.exit_code == 2 and message in done.output and stored(trained) == before
    assert type(script(run_dir, *resume, f"{key}={value}", rank=1).exception) is Started, "rank 0 looks, for all"
    assert type(script(run_dir, *resume, "lr_schedule.total_steps=60").exception) is Started
    assert load_recipe(Path(run_dir) / "recipe.yaml")["lr_schedule"]["total_steps"] == 60


def test_a_launch_script_saves_among_no_other_runs_checkpoints(script, trained):
    before = stored(trained)
    done = script(trained)
    assert done.exit_code == 2 and "holds checkpoints of another run" in done.output and stored(trained) == before


@pytest.mark.parametrize(("resume", "message"), [("", "name one of them"), ("iteration_0000005", "no such folder")])
def test_a_launch_script_goes_on_from_one_checkpoint(script, trained, resume, message):
    done = script(trained, "--resume", trained / "checkpoint" / resume)
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize("rank", range(4))
def test_each_worker_of_a_launch_script_reads_its_share_of_the_checkpoint(monkeypatch, script, trained, rank):
    folder = trained / "checkpoint" / "iteration_00000050"
    (folder / "seal_rank_0.json").unlink()
    for each in range(3):
        (folder / f"mini-model-{each:07d}-0000003.safetensors").write_bytes(b"weights")
        write_seal(folder, each, world_size=3, step=50)
    (folder / "mini-model-0000002-0000003.safetensors").write_bytes(b"torn")
    monkeypatch.setattr(script_run, "worker_count", lambda recipe: 2 if rank < 2 else 4)
    done = script(trained, "--resume", folder, rank=rank)
    if rank in (0, 2):  # of two workers the first reads ranks 0 and 2, of four the third only rank 2
        assert done.exit_code == 2 and "0000002-0000003.safetensors has 4 bytes instead of 7" in done.output
    else:
        assert type(done.exception) is Started


def test_another_size_of_steps_that_would_repeat_samples_is_refused(train, trained):
    code, _, err = train(TOY, "--resume", "auto", "--set", "runner_config.batch_size=7")
    assert code == 2 and "the samples of a step were 8, would be 14, of which the 400 trained" in err


def balance(run_dir):
    return stored(run_dir)["plugins"]["attention_balance"]


AS_BEGUN = {"window": 1, "per_pair": 2, "per_token": 3, "unit": "FLOP"}
WORDS = "plugins.attention_balance: the samples keep the order in which this run began (per_pair 2, per_token 3"


def test_a_run_weighs_its_samples_as_it_began_however_flops_are_counted_now(train, trained, monkeypatch):
    assert balance(trained) == AS_BEGUN
    assert WORDS not in train(TOY, "--resume", "auto", "--steps", "60")[2]
    monkeypatch.setattr(resolve, "sample_cost", lambda recipe: Cost(7.0, 8.0, "FLOP"))
    code, _, err = train(TOY, "--resume", "auto", "--steps", "60")
    assert code == 0 and WORDS in err and balance(trained) == AS_BEGUN
    assert WORDS in train(TOY, "--resume", "auto", "--steps", "60", "--dry-run")[2]
    checkpoint = str(trained / "checkpoint" / "iteration_00000050")
    code, _, err = train(TOY, "--resume", checkpoint, "--steps", "60", "--run-dir", "output/another")
    assert code == 0 and WORDS in err and balance(Path("output/another")) == AS_BEGUN
    assert train(TOY, "--steps", "5", "--run-dir", "output/new")[0] == 0
    assert balance(Path("output/new")) == {**AS_BEGUN, "per_pair": 7, "per_token": 8}


def test_so_do_the_workers_of_a_launch_script(monkeypatch, trained):
    monkeypatch.setattr(resolve, "sample_cost", lambda recipe: Cost(7.0, 8.0, "FLOP"))
    checkpoint = trained / "checkpoint" / "iteration_00000050"
    for run_dir in (trained, Path("output/another")):
        assert worker.build_config(Path(TOY), (), run_dir, checkpoint)["plugins"]["attention_balance"] == AS_BEGUN
    new = worker.build_config(Path(TOY), (), Path("output/new"), None)
    assert new["plugins"]["attention_balance"] == {**AS_BEGUN, "per_pair": 7, "per_token": 8}


@pytest.mark.parametrize("change", ["seed=3", "lr_schedule.total_steps=60", "parallel_config.data_parallel=1"])
def test_what_does_not_is_taken(train, trained, change):
    code, _, err = train(TOY, "--resume", "auto", "--set", change)
    assert code == 0, err


def test_a_corpus_prepared_anew_at_the_same_path_is_refused(train, script, runs, trained, write_corpus, workplace):
    resume = ("--resume", trained / "checkpoint" / "iteration_00000050")
    write_corpus(workplace / "corpus", [81] * 100)
    assert train(TOY, "--resume", "auto", "--steps", "60")[0] == 0, "the same text gives the same files"
    write_corpus(workplace / "corpus", [80, 82] * 50)
    words = "corpus.idx is not what it was: the corpus was prepared anew or replaced"
    code, _, err = train(TOY, "--resume", "auto", "--steps", "60")
    assert code == 2 and words in err and "would repeat some samples" in err and len(runs) == 2
    done = script("output/another", *resume)
    assert done.exit_code == 2 and words in done.output
    assert not Path("output/another/data.json").exists()


def test_tokens_that_are_others_are_refused_though_their_number_is_the_same(train, trained, workplace):
    tokens = bytearray((workplace / "corpus.bin").read_bytes())
    tokens[-1] ^= 1
    (workplace / "corpus.bin").write_bytes(tokens)
    code, _, err = train(TOY, "--resume", "auto", "--steps", "60")
    assert code == 2 and "corpus.bin is not what it was: the corpus" in err


@pytest.mark.parametrize("stored", [None, "", "[]", "[{}]", "{}"])
def test_where_nobody_wrote_down_the_data_that_is_said_and_taken(train, runs, trained, stored):
    (trained / "data.json").unlink()
    if stored is not None:
        (trained / "data.json").write_text(stored)
    code, _, err = train(TOY, "--resume", "auto", "--steps", "60")
    assert code == 0 and "data.json" in err and "whether the data still holds what it did is unknown" in err
    assert '"bin_bytes": 16200' in (trained / "data.json").read_text(), "from now on it is known"


def test_the_data_is_kept_by_the_workers_of_a_script(script, workplace):
    assert type(script("output/another").exception) is Started
    assert '"prefix": "./corpus"' in Path("output/another/data.json").read_text()


def test_a_corpus_that_has_moved_is_the_same(train, trained, workplace):
    (workplace / "new").mkdir()
    for end in (".bin", ".idx"):
        (workplace / f"corpus{end}").rename(workplace / "new" / f"corpus{end}")
    moved = "train_dataset.data_loader.config.data_path=['1', new/corpus]"
    assert train(TOY, "--resume", "auto", "--steps", "60", "--set", moved)[0] == 0


def test_what_is_printed_to_go_on_with_keeps_the_order_and_at_the_epochs_end_starts_anew(train, runs, save, workplace):
    runs.steps, runs.saves = 100, True
    assert "--resume auto --steps 125\n" in train(TOY, "--steps", "100")[1]
    root = workplace / "output" / "mini-toy" / "checkpoint"
    runs.steps, runs.saves = 125, False
    code, out, err = train(TOY, "--resume", "auto", "--steps", "125")
    assert code == 0, err
    command = shlex.split(out.split("go on with:")[1])
    weights = root / "iteration_00000100"
    assert command[3:] == [
        *("--run-dir", f"{root.parent}-next", "--set", f"checkpoint.load_path={weights}", "--steps", "125")
    ]
    assert train(*command[2:])[0] == 0
    assert stored(root.parent.with_name("mini-toy-next"))["checkpoint"]["load_path"] == str(weights)


def test_steps_of_several_passes_and_micro_batches(train, workplace):
    text = (workplace / TOY).read_text().replace("{batch_size: &bs 4}", "{batch_size: &bs 4, epochs: 2}")
    text = text.replace("batch_size: &bs 4", "batch_size: &bs 4, gradient_accumulation_steps: 3")
    (workplace / TOY).write_text(text)
    code, _, err = train(TOY, "--steps", "7")
    assert code == 0, err
    flat = stored(workplace / "output" / "mini-toy")
    assert flat["train_dataset"]["data_loader"]["sizes"][0] == 7 * 4 * 2 * 3
    assert flat["runner_config"]["epochs"] == 1
