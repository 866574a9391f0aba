"""Which checkpoints a run goes on from, puts aside or removes: `tc3 train --resume` and --force; msrun is replaced."""

import fcntl
import os

from plugins.sealed_checkpoint.plan import write_seal
from tests.launch.resume.conftest import TOY


def test_a_named_iteration_puts_the_later_ones_aside(train, runs, trained, save):
    root = trained / "checkpoint"
    first, later = save(root, 20), save(root, 60)
    assert train(TOY, "--resume", str(first), "--steps", "100", "--dry-run")[0] == 0 and later.exists()
    code, _, err = train(TOY, "--resume", str(first), "--steps", "100")
    assert code == 0 and "iteration_00000060 is of the run that is left behind here: renamed set_aside_iter" in err
    assert sorted(path.name for path in root.glob("*iteration*")) == [
        "iteration_00000020",
        "set_aside_iteration_00000050",
        "set_aside_iteration_00000060",
    ]
    save(root, 30)
    train(TOY, "--resume", "auto", "--steps", "100")
    assert runs[-1][-1] == str(root / "iteration_00000030"), "not step 60 of the abandoned branch"


def test_a_checkpoint_of_another_run_puts_all_aside(train, runs, trained, save, workplace):
    own = workplace / "here" / "checkpoint"
    assert train(TOY, "--run-dir", "here")[0] == 0
    save(own, 10), save(own, 90)
    resume = ("--resume", str(trained / "checkpoint" / "iteration_00000050"), "--steps", "100")
    code, _, err = train(TOY, "--run-dir", "here", *resume)
    assert code == 0, err
    assert not list(own.glob("iteration_*")) and len(list(own.glob("set_aside_*"))) == 2
    assert (trained / "checkpoint" / "iteration_00000050").exists()


def test_the_recipe_of_another_run_is_compared_too(train, trained, save):
    checkpoint = str(trained / "checkpoint" / "iteration_00000050")
    changed = ("--run-dir", "here", "--resume", checkpoint, "--set", "train_dataset.data_loader.config.seed=5")
    code, _, err = train(TOY, *changed)
    assert code == 2 and f"that of {trained / 'recipe.yaml'}: train_dataset.data_loader.config.seed was 1" in err


def test_a_named_checkpoint_that_is_not_whole_is_refused(train, runs, trained, save):
    folder = trained / "checkpoint" / "iteration_00000050"
    weights = folder / "mini-model-0000000-0000001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    code, _, err = train(TOY, "--resume", str(folder))
    assert code == 2 and "not a whole checkpoint: mini-model-0000000-0000001.safetensors does not match" in err
    killed = save(trained / "checkpoint", 70, sealed=False)
    code, _, err = train(TOY, "--resume", str(killed))
    assert code == 2 and "the save did not finish" in err
    code, _, err = train(TOY, "--resume", str(trained))
    assert code == 2 and "holds checkpoints and is none; name one of them, such as" in err and len(runs) == 1


def test_a_checkpoint_that_nobody_seals_is_taken_and_said(train, runs, save, workplace):
    stock = save(workplace / "stock", 5, sealed=False)
    code, _, err = train(TOY, "--resume", str(stock))
    assert code == 0 and "has no seals" in err and "nobody can tell whether the data's order stays" in err
    assert runs[-1][-1] == str(stock)


def elsewhere(root):
    return ("--set", f"checkpoint.save_path={root}")


def test_a_new_run_does_not_save_among_the_checkpoints_of_another(train, runs, save, workplace):
    save(workplace / "shared", 40)
    code, _, err = train(TOY, *elsewhere("shared"))
    assert code == 2 and not runs
    assert "holds checkpoints of another run (iteration_00000040)" in err and "--force" in err


def test_force_removes_the_sealed_checkpoints_wherever_they_are_and_nothing_else(train, runs, save, workplace):
    sealed, stock = save(workplace / "shared", 40), save(workplace / "shared", 7, sealed=False)
    (workplace / "shared" / "notes.txt").touch()
    assert train(TOY, "--force", *elsewhere("shared"))[0] == 0
    assert not sealed.exists() and stock.exists() and (workplace / "shared" / "notes.txt").exists()
    train(TOY, "--resume", "auto", *elsewhere("shared"))
    assert "--resume" not in runs[-1]


def test_two_runs_do_not_share_a_folder_of_checkpoints(train, runs, workplace):
    (workplace / "shared").mkdir()
    with (workplace / "shared" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = train(TOY, *elsewhere("shared"))
    assert code == 2 and f"{workplace / 'shared'}: a run is in progress there" in err and not runs
    assert train(TOY, "--run-dir", "here", *elsewhere("here"))[0] == 0, "one folder for both is locked once"


def test_force_keeps_the_lock_that_it_holds(train, trained):
    assert train(TOY, "--force")[0] == 0
    assert os.listdir(trained / "checkpoint") == [".lock"]


def test_the_seals_of_two_workers_count_as_one_checkpoint(trained, save, train):
    folder = trained / "checkpoint" / "iteration_00000050"
    for name in ("mini-model-0000001-0000002.safetensors", "mini-opt-0000001-0000002.safetensors"):
        (folder / name).touch()
    write_seal(folder, 1, world_size=2, step=50)
    (folder / "seal_rank_0.json").unlink()
    code, _, err = train(TOY, "--resume", str(folder))
    assert code == 2 and "seal_rank_0.json is missing" in err
