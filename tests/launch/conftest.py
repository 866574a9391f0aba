import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch import cli
from launch.agent import part
from launch.run import preflight
from launch.run.supervise import Outcome
from plugins.attention_balance.samples import Cost
from plugins.sealed_checkpoint.plan import write_seal
from tools.data.index import IndexWriter
from tools.layout import resolve

RECIPE = """\
output_dir: ./elsewhere
use_parallel: True
context: {device_target: CPU}
runner_config: {batch_size: &bs 4}
lr_schedule: {total_steps: 40, learning_rate: 1.e-3}
train_dataset:
  data_loader:
    type: BlendedMegatronDatasetDataLoader
    sizes: [160, 8, 0]
    config: {data_path: ['1', ./corpus], seq_length: 8, seed: 1, split: '1, 0, 0'}
parallel_config: {data_parallel: 2, micro_batch_num: 3}
model: {model_config: {batch_size: *bs}}
checkpoint: {save_path: '', load_path: ''}
plugins: {attention_balance: {window: 1}}
seed: 1
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working folder with a toy recipe, too small for `tc3 check`, and its dataset: 1,012 samples an epoch."""
    monkeypatch.setattr(preflight, "check_sound", lambda recipe: None)
    monkeypatch.setattr(resolve, "sample_cost", lambda recipe: Cost(2.0, 3.0, "FLOP"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mini").mkdir()
    (tmp_path / "mini" / "toy.yaml").write_text(RECIPE)
    write_index(tmp_path / "corpus", [81] * 100)
    return tmp_path


def write_index(prefix, lengths):
    writer = IndexWriter(Path(f"{prefix}.bin"), "uint16")
    lengths = np.array(lengths, np.int32)
    writer.add(lengths, np.zeros(lengths.sum(), np.uint16))
    writer.finish(Path(f"{prefix}.idx"))


@pytest.fixture(scope="session")
def write_corpus():
    return write_index


@pytest.fixture(scope="session")
def save():
    """Write a checkpoint as a run of one worker does."""

    def save(root, step, sealed=True):
        folder = Path(root) / f"iteration_{step:08d}"
        folder.mkdir(parents=True)
        for kind in ("model", "opt"):
            save_file({kind: np.array([step])}, folder / f"mini-{kind}-0000000-0000001.safetensors")
        (folder / "common.json").write_text("{}")
        if sealed:
            write_seal(folder, 0, world_size=1, step=step)
        return folder

    return save


@pytest.fixture
def runs(workplace, monkeypatch, save):
    """Commands given to the supervisor, which writes `steps` steps of rank `rank` and answers `outcome`.

    `saves`: whether the last step is saved.
    """

    class Runs(list):
        steps, rank, saves = 3, 0, False
        loss = staticmethod(lambda step: 6.0 - step)
        outcome = Outcome(0)

    runs = Runs()

    def supervise(command, environment, run_dir, workers, tick, logs, ends, *more):
        assert (run_dir / "recipe.yaml").exists(), "the effective recipe is saved before anything runs"
        runs.append(command)
        if runs.steps:
            (run_dir / "metrics").mkdir(exist_ok=True)
            with (run_dir / "metrics" / f"rank_{runs.rank}.jsonl").open("a") as out:
                out.write(json.dumps({"total_steps": runs.steps, "start_step": 0, "world_size": workers}) + "\n")
                for step in range(1, runs.steps + 1):
                    record = {"step": step, "loss": runs.loss(step), "tokens": 100, "seconds": 0.5}
                    out.write(json.dumps(record) + "\n")
        if runs.saves:
            save(run_dir / "checkpoint", runs.steps)
        tick()
        return runs.outcome

    monkeypatch.setattr(part, "supervise", supervise)
    return runs


def tc3(capsys, monkeypatch, *arguments):
    """(exit code, stdout, stderr) of `tc3 train ...`, through the real main()."""
    monkeypatch.setattr(sys, "argv", ["tc3", "train", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
        sys.exit(0)
    out = capsys.readouterr()
    return end.value.code or 0, out.out, out.err


@pytest.fixture
def train(runs, capsys, monkeypatch):
    return lambda *arguments: tc3(capsys, monkeypatch, *arguments)


@pytest.fixture
def hosts(tmp_path):
    """Writes a file of hosts."""

    def write(text):
        path = tmp_path / "hosts.txt"
        path.write_text(text)
        return path

    return write
