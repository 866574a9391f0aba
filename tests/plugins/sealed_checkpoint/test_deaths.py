"""A process dies, or its disk fails, at each operation of saving, publishing and removing checkpoints in turn.

The class `Run` calls the checkpoint monitor as a training does; other tests use it, too.
"""

import errno
import json
from itertools import count
from types import SimpleNamespace

import pytest
from mindspore import nn

from plugins.sealed_checkpoint import plan
from plugins.sealed_checkpoint.adapter import SealingCheckpointMonitor
from plugins.sealed_checkpoint.plan import TRACKER, adopt, publish, remove_old, saving_folder
from tests.crashes import deaths, dies_at, meetings
from tools.checkpoint.scan import scan_checkpoints, set_aside

FULL = OSError(errno.ENOSPC, "No space left on device")


def unpublished(root, attempt, step):
    """What all ranks of an attempt do at a step: save and seal."""
    folder = saving_folder(root, attempt) / f"iteration_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        (folder / f"m-model-{rank:07d}-0000002.safetensors").write_text(f"{attempt} {step}")
        plan.write_seal(folder, rank, 2, step, made={"attempt": attempt})
    return folder


def save(root, attempt, step):
    """What follows a save: it is published, and two are kept."""
    folder = unpublished(root, attempt, step)
    if newest := publish(folder, root):
        remove_old(root, newest, 2, attempt)


@pytest.fixture
def fresh(tmp_path):
    """A function that makes the checkpoints of an attempt that ended after step 3."""
    number = count()

    def made():
        root = tmp_path / str(next(number))
        for step in (2, 3):
            save(root, "0000-a", step)
        return root

    return made


def repeat(root):
    """An attempt that went on from step 2 saves step 3 again, and step 4."""
    for step in (3, 4):
        save(root, "0001-b", step)


def saved(root):
    """The steps in their places, whole or not."""
    return sorted(plan.iteration(folder) for folder in plan.iterations(root))


def sound(root, where):
    """What the next attempt finds is whole, and named by the tracker; it leaves two checkpoints and nothing else."""
    adopt(root)
    best, skipped = scan_checkpoints(root)
    assert best and best.step in (3, 4) and best.path.parent == root, where
    assert all(folder.parent != root for folder, _ in skipped), where
    assert (root / TRACKER).read_text() == str(best.step), where
    for step in (5, 6):
        save(root, "0002-c", step)
    assert saved(root) == [5, 6], where
    left = {path.name for path in root.rglob("*") if not path.name.endswith(".safetensors")}
    expected = {"iteration_00000005", "iteration_00000006", "seal_rank_0.json", "seal_rank_1.json", TRACKER}
    assert left == expected | {"saving_0002-c"}, where


@pytest.mark.slow
def test_nothing_is_lost_wherever_a_process_dies(fresh):
    found = [sound(root, where) for root, where in deaths(repeat, fresh)]
    assert len(found) > 40


@pytest.mark.slow
@pytest.mark.parametrize("error", [FULL, PermissionError(errno.EACCES, "Permission denied")])
def test_nothing_is_lost_wherever_the_disk_fails_once(fresh, error):
    found = [sound(root, where) for root, where in deaths(repeat, fresh, error)]
    assert len(found) > 40


def test_old_checkpoints_make_room_although_the_tracker_could_not_be_written(fresh):
    """On a disk that is full after a save, the removal of the oldest checkpoint is what makes room."""
    root = fresh()
    with dies_at(-1, FULL) as made:
        repeat(root)
    writes = [place for place, what in enumerate(made) if what.startswith("write") and TRACKER in what]
    assert len(writes) == 2
    root = fresh()
    with dies_at(writes[1], FULL):
        repeat(root)
    assert saved(root) == [3, 4]


def test_the_tracker_names_nothing_that_was_put_aside(fresh):
    """A new run that named this folder was started, and failed in its workers."""
    root = fresh()
    set_aside(root / "iteration_00000003")
    assert (root / TRACKER).read_text() == "2"
    set_aside(root / "iteration_00000002")
    assert not (root / TRACKER).exists()


def test_the_first_checkpoint_of_a_run_is_named_wherever_the_process_dies(tmp_path):
    number = count()

    def empty():
        root = tmp_path / str(next(number))
        root.mkdir()
        return root

    named = 0
    for root, where in deaths(lambda root: save(root, "0000-a", 2), empty):
        adopt(root)
        best, _ = scan_checkpoints(root)
        assert (root / TRACKER).is_file() == bool(best), where
        named += bool(best)
    assert named > 3


@pytest.mark.parametrize("ours", [False, True])
def test_the_tracker_of_a_run_without_seals_stays(tmp_path, ours):
    if ours:
        save(tmp_path, "0000-a", 50)
    (tmp_path / "iteration_00000100").mkdir()
    (tmp_path / TRACKER).write_text("100")
    adopt(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "100"


def test_workers_without_an_attempt_get_no_tracker(tmp_path):
    unpublished(tmp_path, None, 2)
    adopt(tmp_path)
    assert not (tmp_path / TRACKER).exists()


def test_a_checkpoint_that_is_published_meanwhile_stays_the_named_one(fresh):
    """Each rank puts checkpoints in their places when it ends, while another one may still publish."""

    def other():
        root = fresh()
        (root / TRACKER).write_text("2")
        unpublished(root, "0000-a", 4)
        return root

    for root, results, where in meetings(adopt, publishes("0000-a"), other):
        assert not any(isinstance(each, Exception) for each in results.values()), where
        assert (root / TRACKER).read_text() == "4", where


def test_names_never_show_a_refused_checkpoint_as_whole(tmp_path):
    """Workers without an attempt save the same step into the same folder, which a rank had refused before."""
    number = count()

    def refused():
        folder = tmp_path / str(next(number)) / "iteration_00000001"
        folder.mkdir(parents=True)
        for rank in range(2):
            (folder / f"m-model-{rank:07d}-0000002.safetensors").write_text("weights")
            plan.write_seal(folder, rank, 2, 1)
        plan.write_refusal(folder, 1, "the loss is not finite")
        return folder

    for folder, where in deaths(lambda folder: plan.write_seal(folder, 1, 2, 1), refused):
        whole = plan.fault(folder) is None
        assert not plan._complete(folder) or whole, where
        assert whole == ("refused" not in json.loads(plan.seal_file(folder, 1).read_text())), where


def test_the_files_of_a_rank_are_on_the_disk_before_their_seal(tmp_path, monkeypatch):
    """After a power cut the only checkpoint had a seal, and files without their content."""
    order = []
    monkeypatch.setattr(plan, "flush", lambda path: order.append(path.name))
    monkeypatch.setattr(plan, "write_whole", lambda path, content: order.append(path.name))
    (tmp_path / "common.json").write_text("{}")
    for kind in ("model", "opt"):
        (tmp_path / f"m-{kind}-0000000-0000001.safetensors").write_text("weights")
    plan.write_seal(tmp_path, 0, 1, 4)
    assert len(order) == 4 and order[-1] == "seal_rank_0.json" and {*order[:-1]} <= {p.name for p in tmp_path.iterdir()}


def publishes(attempt):
    """What rank 0 of an attempt does when all have sealed step 4."""
    return lambda root: publish(saving_folder(root, attempt) / "iteration_00000004", root)


@pytest.mark.parametrize("acts", [(publishes("0001-b"), adopt), (adopt, publishes("0001-b")), (adopt, adopt)])
def test_two_that_put_one_checkpoint_in_its_place_lose_nothing(fresh, acts):
    def both():
        root = fresh()
        unpublished(root, "0001-b", 4)
        broken = unpublished(root, "0000-a", 4)
        plan.seal_file(broken, 1).unlink()
        broken.rename(root / broken.name)
        return root

    for root, results, where in meetings(*acts, both):
        assert not any(isinstance(each, Exception) for each in results.values()), where
        assert scan_checkpoints(root)[0].step == 4 and (root / TRACKER).read_text() == "4", where


def test_a_late_attempt_replaces_nothing_that_a_later_one_publishes_meanwhile(fresh):
    """It had looked before: then it removed the checkpoint of the later attempt, and its own took the place."""

    def both():
        root = fresh()
        unpublished(root, "0000-a", 4)
        unpublished(root, "0001-b", 4)
        return root

    met = 0
    for root, results, where in meetings(publishes("0000-a"), publishes("0001-b"), both):
        if results.get("other"):
            met += 1
            assert plan.made(root / "iteration_00000004") == {"attempt": "0001-b"}, where
    assert met


class Run:
    """A `Run` gives the checkpoint monitor what MindSpore would give it, step after step."""

    def __init__(self, folder, monitor=SealingCheckpointMonitor, **settings):
        network = nn.Dense(3, 2)
        network = nn.TrainOneStepCell(network, nn.AdamWeightDecay(network.trainable_params()))
        self.params = SimpleNamespace(
            cur_step_num=0, cur_epoch_num=1, batch_num=100, network=network, train_network=network, net_outputs=None
        )
        self.folder = folder
        self.monitor = monitor(prefix="mini", directory=str(folder), use_legacy_format=False, **settings)
        self.params.list_callback = [self.monitor]

    def original_args(self):
        return self.params

    def step(self, number):
        self.params.cur_step_num = number
        self.monitor.on_train_step_begin(self)
        self.monitor.step_end(self)

    def end(self):
        self.monitor.on_train_end(self)

    def fault(self, step):
        return plan.fault(self.folder / f"iteration_{step:08d}")
