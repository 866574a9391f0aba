"""These tests check which launches are refused before any process starts."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.agent.planning import link_logs
from launch.run import preflight
from plugins.errors import CheckpointError, ClusterError, DataError, RecipeError
from plugins.spike_guard.ledger import write_ledger
from tests.crashes import deaths
from tools.files import locks
from tools.files.atomic import write_atomically
from tools.recipe.load import load_recipe


def recipe_for(data_path):
    loader = {"type": "BlendedMegatronDatasetDataLoader", "config": {"data_path": data_path}}
    return {"train_dataset": {"data_loader": loader}}


@pytest.mark.parametrize(
    ("data_path", "prefixes"),
    [
        (["1", "a"], ["a"]),
        ([0.3, "a", 0.7, " b "], ["a", "b"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        (["1", "2", "3"], ["1", "2", "3"]),
    ],
)
def test_prefixes_are_told_from_weights(data_path, prefixes):
    assert preflight.data_prefixes(data_path) == prefixes


@pytest.mark.slow
@pytest.mark.parametrize("data_path", [["1", "a"], ["0.3", "a", "0.7", " b "], ["a"], ["a", "b"], ["1", "2", "3"]])
def test_prefixes_are_told_from_weights_as_mindformers_does(data_path):
    from mindformers.dataset.blended_datasets.utils import get_blend_from_list

    assert preflight.data_prefixes(data_path) == list(get_blend_from_list(data_path)[0])


@pytest.mark.parametrize("data_path", [None, "a", [["a"]], {"a": 1}])
def test_a_data_path_of_another_kind_is_refused(data_path):
    with pytest.raises(RecipeError, match="must be a list such as"):
        preflight.check_data(recipe_for(data_path))


def test_a_missing_dataset_names_the_files_the_neighbour_and_the_command(tmp_path):
    for end in (".bin", ".idx"):
        (tmp_path / f"stdlib{end}").touch()
    preflight.check_data(recipe_for(["1", str(tmp_path / "stdlib")]))
    with pytest.raises(DataError) as error:
        preflight.check_data(recipe_for(["1", str(tmp_path / "stdlibs")]))
    assert f"{tmp_path}/stdlibs.bin and {tmp_path}/stdlibs.idx cannot be found" in str(error.value)
    assert f"did you mean '{tmp_path}/stdlib'?" in str(error.value)
    assert f"tc3 data prepare --input YOUR_TEXT --output {tmp_path}/stdlibs" in str(error.value)


def test_half_a_dataset_is_missing_its_other_half(tmp_path):
    (tmp_path / "stdlib.bin").touch()
    with pytest.raises(DataError) as error:
        preflight.check_data(recipe_for([str(tmp_path / "stdlib")]))
    assert f": {tmp_path}/stdlib.idx cannot be found" in str(error.value)
    assert str(error.value).endswith(f"tc3 data prepare --input stdlib --output {tmp_path}/stdlib")


def test_the_advised_command_can_be_pasted_for_a_path_with_blanks(tmp_path):
    with pytest.raises(DataError) as error:
        preflight.check_data(recipe_for([str(tmp_path / "my text" / "stdlib")]))
    assert str(error.value).endswith(f"tc3 data prepare --input stdlib --output '{tmp_path}/my text/stdlib'")


def test_the_held_out_dataset_is_looked_for_too(tmp_path):
    recipe = recipe_for([str(tmp_path / "stdlib")])
    recipe["plugins"] = {"held_out_loss": {"data_path": str(tmp_path / "stdlib_heldout")}}
    command = f"tc3 data prepare --input stdlib --held-out 0.05 --output {tmp_path}/stdlib"
    without = f"{command}; or train without it: --set plugins.held_out_loss=False"
    keys = "train_dataset.data_loader.config.data_path: ", "plugins.held_out_loss.data_path: "
    for key, end in zip(keys, (command, without), strict=True):
        with pytest.raises(DataError) as error:
            preflight.check_data(recipe)
        assert str(error.value).startswith(key) and str(error.value).endswith(end)
        for end in (".bin", ".idx"):
            (tmp_path / f"stdlib{end}").touch()
    recipe["plugins"]["held_out_loss"] = False
    preflight.check_data(recipe)


def test_held_out_corpora_of_a_list_are_looked_for_each(tmp_path):
    recipe = recipe_for([str(tmp_path / "pretrain")])
    paths = [str(tmp_path / name) for name in ("pretrain_heldout", "heldout")]
    recipe["plugins"] = {"held_out_loss": {"data_path": paths, "every": 1}}
    make = f"tc3 data prepare --input YOUR_TEXT --held-out 0.05 --output {tmp_path}/pretrain"
    other = f"tc3 data prepare --input TEXT_NOT_TRAINED_ON --tokenizer {{}} --output {tmp_path}/heldout"
    for name, tokenizer, command in (
        ("pretrain", "", make),
        ("pretrain_heldout", "", make),
        ("", "FOLDER_OF_THE_TRAINING_DATA", other),
        ("heldout", f"{tmp_path}/pretrain_tokenizer", other),
    ):
        if "TRAINING" not in tokenizer and tokenizer:
            (tmp_path / "pretrain_tokenizer").mkdir()
        with pytest.raises(DataError) as error:
            preflight.check_data(recipe)
        assert f"make the dataset with: {command.format(tokenizer)}" in str(error.value)
        assert "did you mean" not in str(error.value), "training data is not held out"
        for end in (".bin", ".idx") if name else ():
            (tmp_path / f"{name}{end}").touch()
    preflight.check_data(recipe)


def test_other_loaders_are_not_looked_into():
    preflight.check_data({"train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": "gone"}}})
    preflight.check_data({})


@pytest.mark.skipif(os.path.exists("/dev/davinci0"), reason="this machine has an NPU")
@pytest.mark.parametrize("context", [{"device_target": "Ascend"}, {}, None])
def test_an_ascend_recipe_is_refused_without_npus(context):
    recipe = {"context": context, "use_parallel": True, "parallel_config": {"data_parallel": 16}}
    with pytest.raises(
        ClusterError, match=r"needs 16 NPUs, but this machine has none .* CPU recipe: tc3 train .*mini/pretrain.yaml"
    ):
        preflight.check_machine(recipe)
    preflight.check_machine({"context": {"device_target": "CPU"}})


def test_a_full_disk_is_refused(monkeypatch, tmp_path):
    preflight.check_disk(tmp_path / "not" / "yet")
    usage = shutil.disk_usage(tmp_path)._replace(free=preflight.MIN_FREE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ClusterError, match=r"1.1 GB are free, but a run needs 1.1"):
        preflight.check_disk(tmp_path)


def test_a_run_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match="nothing can be written into"):
        preflight.check_disk(tmp_path / "file" / "run")


def make_run(folder):
    for name in ("logs", "metrics", "checkpoint"):
        (folder / name).mkdir(parents=True)
    (folder / "recipe.yaml").write_text("a: 1\n")


def test_a_folder_that_holds_a_run_wants_resume_or_force(tmp_path):
    preflight.check_run_dir(tmp_path / "none", False, False)
    preflight.check_run_dir(tmp_path, False, False)
    make_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"--resume auto.*--force.*--run-dir"):
        preflight.check_run_dir(tmp_path, False, False)
    preflight.check_run_dir(tmp_path, True, False)
    preflight.check_run_dir(tmp_path, False, True)


def test_a_folder_that_holds_something_else_is_refused_even_with_force(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"not a run's folder \(it holds thesis.tex\)"):
        preflight.check_run_dir(tmp_path, False, True)


def test_clearing_removes_the_run_and_nothing_else(tmp_path):
    """Its picture stayed: a start that failed after --force left a folder that was no run's any more."""
    make_run(tmp_path)
    (tmp_path / "loss.png").touch()
    (tmp_path / "notes.txt").touch()
    outside = tmp_path.parent / f"{tmp_path.name}_kept"
    outside.mkdir()
    (outside / "weights").touch()
    (tmp_path / "checkpoint").rmdir()
    (tmp_path / "checkpoint").symlink_to(outside)
    preflight.clear_run_dir(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]
    assert (outside / "weights").exists()


def test_a_run_that_force_has_half_removed_is_still_a_run(tmp_path):
    """Its recipe went first: a start without --force then took the old run's metrics and left-out samples as its
    own.
    """
    number = count()

    def fresh():
        run_dir = tmp_path / str(next(number))
        make_run(run_dir)
        for name in ("metrics/rank_0.jsonl", "data.json", "skipped.json", "loss.png"):
            (run_dir / name).touch()
        (run_dir / "attempts" / "0000").mkdir(parents=True)
        (run_dir / "checkpoint" / "iteration_00000001").mkdir()
        return run_dir

    whole = sorted(os.listdir(fresh()))
    found = []
    for run_dir, where in deaths(preflight.clear_run_dir, fresh):
        found.append(sorted(os.listdir(run_dir)))
        if found[-1]:
            with pytest.raises(CheckpointError, match="already holds a run"):
                preflight.check_run_dir(run_dir, False, False)
            assert "skipped.json" in found[-1] or "checkpoint" not in found[-1], where
    assert found[0] == whole and found[-1] == []


def test_what_a_kill_left_unfinished_in_a_new_run_folder_does_not_stop_the_next_start(tmp_path):
    """A file that was being written has a hidden name; the folder was refused as one of something else."""
    for write in (
        lambda folder: write_atomically(folder / "recipe.yaml", "a: 1\n"),
        lambda folder: write_ledger(folder, []),
        lambda folder: link_logs(folder, 0),
    ):
        for folder, where in deaths(write, lambda: Path(tempfile.mkdtemp(dir=tmp_path))):
            if not (folder / "recipe.yaml").exists():
                preflight.check_run_dir(folder, False, False)
            preflight.clear_run_dir(folder)
            assert os.listdir(folder) == [], where


OURS = f"{os.getpid()} {socket.gethostname()}"


def test_a_run_on_another_host_that_shares_the_folder_is_named_with_its_host(tmp_path):
    with preflight.only_run_in(tmp_path):
        assert (tmp_path / ".lock").read_text() == OURS
        (tmp_path / ".lock").write_text("4711 node7")
        with pytest.raises(ClusterError, match=r"in progress in this folder \(pid 4711 on node7\)"):
            preflight.check_run_dir(tmp_path, True, False)
        with pytest.raises(ClusterError, match=r"pid 4711 on node7"), preflight.only_run_in(tmp_path):
            pass


def test_a_folder_in_which_nothing_can_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/run: this path cannot be"), preflight.only_run_in(tmp_path / "file/run"):
        pass


def test_one_folder_takes_one_run_at_a_time_and_is_free_after_a_kill(tmp_path):
    source = (
        "import sys, time; from pathlib import Path; from launch.run.preflight import only_run_in\n"
        "with only_run_in(Path(sys.argv[1])): print('held', flush=True); time.sleep(3600)"
    )
    root = str(preflight.ROOT)
    other = subprocess.Popen([sys.executable, "-c", source, tmp_path], cwd=root, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    with (
        pytest.raises(ClusterError, match=rf"in progress in this folder \(pid {other.pid}\)"),
        preflight.only_run_in(tmp_path),
    ):
        pass
    other.kill()
    other.wait()
    with preflight.only_run_in(tmp_path):
        assert (tmp_path / ".lock").read_text() == OURS


def test_a_failed_start_leaves_no_lock_and_no_folder_made_for_it(tmp_path):
    (tmp_path / "saves").mkdir()
    with pytest.raises(KeyboardInterrupt), preflight.only_run_in(tmp_path / "new" / "run", tmp_path / "saves"):
        assert (tmp_path / "new" / "run" / ".lock").exists()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["saves"] and os.listdir(tmp_path / "saves") == []
    with pytest.raises(DataError), preflight.only_run_in(tmp_path / "new" / "run"):
        (tmp_path / "new" / "run" / "notes.txt").touch()
        raise DataError("no data")
    assert os.listdir(tmp_path / "new" / "run") == ["notes.txt"]


def test_a_lock_that_cannot_be_written_names_its_folder_and_leaves_nothing(tmp_path, monkeypatch):
    """A quota, which does not show in the free space, was `tc3: Disk quota exceeded`, without the folder."""

    def write(descriptor, content):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(locks.os, "write", write)
    with pytest.raises(DataError, match=r"new/run: .*quota exceeded"), preflight.only_run_in(tmp_path / "new" / "run"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_lock_that_another_start_has_just_removed_is_taken_anew(tmp_path, monkeypatch):
    flock, tries = locks.fcntl.flock, []

    def removed_meanwhile(file, operation):
        flock(file, operation)
        tries.append(file)
        if len(tries) == 1:
            (tmp_path / ".lock").unlink()

    monkeypatch.setattr(locks.fcntl, "flock", removed_meanwhile)
    with preflight.only_run_in(tmp_path):
        assert len(tries) == 2 and (tmp_path / ".lock").read_text() == OURS


def test_a_lock_and_its_folder_may_go_at_any_moment_of_another_start(tmp_path, monkeypatch):
    """A start that failed removes them; the other one ended with a traceback."""
    fstat, mkdir, removed = os.fstat, Path.mkdir, []

    def without_lock(descriptor):
        if "lock" not in removed:
            removed.append("lock")
            (tmp_path / "run" / ".lock").unlink()
        return fstat(descriptor)

    def without_folder(path, *given, **named):
        mkdir(path, *given, **named)
        if path == tmp_path / "run" and "folder" not in removed:
            removed.append("folder")
            path.rmdir()

    monkeypatch.setattr(os, "fstat", without_lock)
    monkeypatch.setattr(Path, "mkdir", without_folder)
    with preflight.only_run_in(tmp_path / "run"):
        assert removed == ["folder", "lock"] and (tmp_path / "run" / ".lock").read_text() == OURS


def prepared(prefix, fingerprint=None):
    """A dataset whose sidecar notes that tokenizer; one of other tools without."""
    for end in (".bin", ".idx"):
        Path(f"{prefix}{end}").touch()
    if fingerprint:
        notes = {"format": "tc3-data-1", "tokenizer": {"fingerprint": fingerprint}}
        Path(f"{prefix}.json").write_text(json.dumps(notes))
    return str(prefix)


def test_data_of_two_tokenizers_is_refused_held_out_data_too(tmp_path):
    ours, other, same, unknown = (
        prepared(tmp_path / name, mark)
        for name, mark in (("a", "1" * 64), ("b", "2" * 64), ("d", "2" * 64), ("c", None))
    )
    held_out = {"plugins": {"held_out_loss": {"data_path": other, "samples": 8, "every": 1}}}
    words = rf"held_out_loss.data_path: {other} was prepared with another tokenizer \(2{{12}}\) than {ours} \(1{{12}}\)"
    with pytest.raises(DataError, match=words):
        preflight.check_data(recipe_for(["1", unknown, "1", ours]) | held_out)
    with pytest.raises(DataError, match=rf"config.data_path: {other} was prepared with another"):
        preflight.check_data(recipe_for([ours, other, unknown]))
    preflight.check_data(recipe_for([same, unknown]) | held_out)
    preflight.check_data(recipe_for([unknown]) | held_out)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_does_not_stop_a_run(tmp_path, monkeypatch, capsys, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with preflight.only_run_in(tmp_path):
        assert (tmp_path / ".lock").read_text() == OURS
    assert f"its file system has no locks ({os.strerror(number)})" in capsys.readouterr().err


MINI = Path(__file__).resolve().parents[3] / "recipes/mini/pretrain.yaml"


def test_a_sound_recipe_passes(capsys):
    preflight.check_sound(load_recipe(MINI))
    assert capsys.readouterr().err == ""


def test_a_launch_says_that_a_recipe_is_modelled(capsys):
    preflight.check_sound(load_recipe(MINI.parents[1] / "pangu_ultra_moe_718b/pretrain_4k.yaml"))
    assert "not for training" in capsys.readouterr().err


def test_an_unsound_recipe_is_refused_with_place_and_remedy():
    recipe = load_recipe(MINI)
    recipe["model"]["model_config"]["num_experts_per_tok"] = 100
    recipe["runner_config"]["sink_size"] = "one"
    with pytest.raises(RecipeError) as error:
        preflight.check_sound(recipe)
    assert "pretrain.yaml:" in str(error.value)
    assert "model.model_config.num_experts_per_tok" in str(error.value) and "runner_config.sink_size" in str(
        error.value
    )


def test_sharded_workers_that_this_host_has_no_memory_for_are_not_started(monkeypatch):
    recipe = load_recipe(MINI.parent / "pretrain_3d.yaml")
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: SimpleNamespace(available=7 << 30))
    with pytest.raises(
        ClusterError, match=r"8 workers take about 8 GiB while they compile, but only 7\.0 GiB are free"
    ):
        preflight.check_memory(recipe)
    preflight.check_memory(load_recipe(MINI.parent / "pretrain_tp2.yaml"))
    preflight.check_memory(load_recipe(MINI))


def test_instructions_that_are_missing_say_how_to_make_them(tmp_path, capsys):
    data = tmp_path / "talk.jsonl"
    recipe = {"train_dataset": {"data_loader": {"type": "HFDataLoader", "data_files": str(data)}},
              "plugins": {"held_out_loss": {"data_path": str(tmp_path / "talk_heldout.jsonl")}}}  # fmt: skip
    command = f"tc3 data instructions --input stdlib --held-out 0.05 --output {tmp_path / 'talk'}"
    for key in ("train_dataset.data_loader.data_files: ", "plugins.held_out_loss.data_path: "):
        with pytest.raises(DataError) as caught:
            preflight.check_data(recipe)
        assert str(caught.value).startswith(key) and str(caught.value).endswith(command)
        data.touch()
    (tmp_path / "talk_heldout.jsonl").touch()
    preflight.check_data(recipe)
    assert capsys.readouterr().err == ""
    recipe["plugins"]["held_out_loss"]["data_path"] = str(data)
    preflight.check_data(recipe)
    assert f"held_out_loss.data_path: {data} is also in the training data" in capsys.readouterr().err
    recipe["train_dataset"]["data_loader"]["data_files"] = str(tmp_path / "part-*.jsonl")
    preflight.check_data(recipe)  # patterns and addresses are for the loader
