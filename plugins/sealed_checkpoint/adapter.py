"""This module extends MindFormers' CheckpointMonitor: it also seals the saved files (records their sizes and
checksums), and can resume with another global batch size.

Importing this module registers the monitor. `forget_logits` clears values of a finished step that a resume must not
load. `load_scaled_step` corrects the optimizer's count of steps, on which the learning rate and Adam's bias correction
depend. MindFormers 1.9.0 scales this count as it scales the step of the data (`trainer/base_trainer.py`: "Scaled global
step"), and passes it to `load_checkpoint`, which uses it only if the checkpoint lists no count, as with a sharded
graph. Checkpoints of one process, and of data parallelism on CPU, list the count, and would go on with the learning
rate of another step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from mindformers.checkpoint.utils import get_checkpoint_iter_dir
from mindformers.core.callback.callback import CheckpointMonitor
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindformers.utils.parallel_utils import barrier_world

from plugins.lines import ATTEMPT, Span, note, number_of
from plugins.private_hooks import relies_on, replace
from plugins.sealed_checkpoint import router_state, stage_metadata
from plugins.sealed_checkpoint.plan import (
    TRACKER,
    adopt,
    expected_files,
    publish,
    remove_old,
    saving_folder,
    write_refusal,
    write_seal,
)


def forget_logits(network: Any) -> None:
    """Set the largest attention logits of a step to zero; Muon's QK-clip scales attention heads by these values.

    MindFormers saves these values before its callback resets them. A resumed run of one process would load the values
    of the last step before the save, and would scale its heads once more; with several ranks no metadata list these
    values, so they are not loaded.
    """
    import mindspore as ms

    for item in network.get_parameters():
        if item.name.endswith("max_logits_val"):
            item.set_data(ms.ops.zeros(item.shape, item.dtype), slice_shape=item.sliced)


def load_scaled_step() -> None:
    """Make MindFormers' trainer load the step count that it has computed, whether or not the checkpoint lists a step
    count.
    """
    import mindspore as ms
    from mindformers.trainer import base_trainer

    load_all = base_trainer.load_checkpoint

    def load_checkpoint(
        checkpoint: str, network: Any, optimizer: Any = None, global_step: int | None = None, *more: Any, **named: Any
    ) -> None:
        load_all(checkpoint, network, optimizer, global_step, *more, **named)
        forget_logits(network)
        if optimizer is not None and global_step is not None:
            count = optimizer.global_step
            # a parameter that is not marked as sliced is left out of the next checkpoint of a sharded graph
            count.set_data(ms.Tensor([global_step], ms.int32), slice_shape=count.sliced)

    replace(base_trainer, "load_checkpoint", 'if optimizer and "global_step" not in state_dict', load_checkpoint)


# where it is no longer called, or what is kept no longer listed, nothing would be sealed and nothing removed
relies_on(CheckpointMonitor, "self._save_megatron_ckpt_file_format(cb_params)")
relies_on(CheckpointMonitor, "current_ckpt_step_list=self.current_ckpt_step_list")
relies_on(CheckpointMonitor, "save_checkpoint_path=self.directory")  # an attempt's own folder, while it saves


class SealingCheckpointMonitor(CheckpointMonitor):
    """This checkpoint monitor seals each new-format checkpoint (records the sizes and checksums of its files) when the
    files are written (with `async_save`, when the saving thread has finished).

    The class is registered under the name of MindFormers' own class, because MindFormers' trainer passes constructor
    arguments by that name. Checkpoints in the legacy format are not sealed, because a run on one worker cannot resume
    from them anyway.

    MindFormers removes the oldest checkpoint when it writes a new one: before the new checkpoint is sealed, and with
    background saves before it exists; and it counts only checkpoints of its own process. This class removes the oldest
    checkpoint after every rank has sealed the new one, and also counts the checkpoints that earlier attempts of the run
    have saved.
    """

    run_dir: str | None = None  # where it notes for how long the training stood still; None: nowhere
    skipped: Any = None  # the samples that the run leaves out: they are written into the seals
    skip: int = 1  # steps whose samples plugins.spike_guard leaves out for a spike
    unsealed: Any = None  # the iteration that is saved and not sealed yet
    saved: Any = None  # the newest iteration that was saved
    directory: Any  # of MindFormers: where it saves

    def __init__(self, *args, keep_checkpoint_max=5, use_legacy_format=True, **settings):
        kept = keep_checkpoint_max if use_legacy_format else sys.maxsize  # MindFormers is to remove none
        super().__init__(*args, keep_checkpoint_max=kept, use_legacy_format=use_legacy_format, **settings)
        self.kept = keep_checkpoint_max
        self.attempt = os.environ.get(ATTEMPT) or None

    def _save_megatron_ckpt_file_format(self, cb_params):
        """Save a checkpoint, and seal it at once unless the save goes on in the background."""
        if cb_params.cur_step_num == self._last_triggered_step:
            return
        began = time.time()
        if self.unsealed is not None:  # in the background still: the next save waits for it too, but seals nothing
            self.async_save_manager.maybe_finalize(wait_finish=True)
            self._seal_finished_save()
        root = self.directory
        saving = self._saving()
        saving.mkdir(parents=True, exist_ok=True)
        stage_metadata.saves_in(saving)
        self.directory = str(saving)
        try:
            super()._save_megatron_ckpt_file_format(cb_params)
        finally:
            self.directory = root
        self.unsealed = self.saved = self.common_info.step_num
        if not self._config.async_save:
            self._seal_finished_save()
        self._note(began, self.common_info.step_num)

    def on_train_step_begin(self, run_context):
        """Seal a checkpoint that was saved in the background, if the saving has finished since the last step."""
        super().on_train_step_begin(run_context)
        if self._config.async_save and self.async_save_manager.is_finalized:
            self._seal_and_note()

    def on_train_end(self, run_context):
        """Seal the last checkpoint of the run when training ends."""
        began = time.time() if self.unsealed is not None else None
        super().on_train_end(run_context)
        self._seal_and_note(began)
        if self.attempt and not self.use_legacy_format and get_real_rank() == 0:  # until here ranks may have to find it
            (self._saving() / TRACKER).unlink(missing_ok=True)  # MindFormers' own; `publish` has written the run's
            with contextlib.suppress(OSError):  # a save of a followed attempt is still in it
                self._saving().rmdir()

    def _seal_and_note(self, began=None):
        """Seal a background save, and record the time for which the training stood still, from `began` or from
        now on.
        """
        if self.unsealed is not None:
            began, saved = began or time.time(), self.unsealed
            self._seal_finished_save()
            self._note(began, saved)

    def _note(self, began, step):
        if self.run_dir and get_real_rank() == 0:
            note(self.run_dir, Span("save", int(step), began, time.time(), sealed=self.unsealed is None))

    def seal_alone(self):
        """Seal this rank's part of a background save, because the run ends here; the method does not wait for other
        ranks.
        """
        if self.unsealed is not None:
            self.async_save_manager.check_async_save_alive(wait_finish=True)
            self._seal()
            if not self._followed():
                adopt(Path(self.directory))  # for the last rank that comes so far

    def _seal_finished_save(self):
        """Seal a save that all ranks have written, and then remove the checkpoints that exceed `save_max`."""
        if self.unsealed is None:
            return
        saved = self._seal()
        barrier_world("All ranks to seal the checkpoint.")
        if get_real_rank() == 0 and not self._followed():
            newest = publish(saved, Path(self.directory))
            if newest:
                regular = self.skip - 1 <= (self.kept - 1) * (self.save_checkpoint_steps or 0)  # docs/spike-guard.md
                remove_old(Path(self.directory), newest, self.kept, self.attempt, self.skip if regular else 1)
        self.current_ckpt_step_list.clear()  # MindFormers' own count: none is left to it
        barrier_world("Rank 0 to put the checkpoint in its place.")  # a worker that ends meanwhile is not waited for

    def _followed(self):
        """Return whether the run already continues in a later attempt; this attempt must then change nothing
        any more.
        """
        if not (self.attempt and self.run_dir):
            return False
        folders = (Path(self.run_dir) / "attempts").glob("[0-9]*")
        return any(number_of(folder.name) > number_of(self.attempt) for folder in folders)

    def _saving(self):
        return saving_folder(Path(self.directory), self.attempt)

    def _seal(self):
        folder = Path(get_checkpoint_iter_dir(str(self._saving()), self.unsealed))
        expected = expected_files(self.origin_prefix, get_real_rank(), get_real_group_size(), self.save_optimizer)
        self.write_seal(folder, expected)
        self.unsealed = None
        return folder

    def write_seal(self, folder, expected):
        """Seal this rank's part of the checkpoint `folder`; `expected` holds the names of the files of this part."""
        made = {"attempt": self.attempt} if self.attempt else {}
        if self.skipped is not None:
            made["skipped"] = self.skipped
        write_seal(folder, get_real_rank(), get_real_group_size(), self.unsealed, expected, made=made)

    def refuse(self, folder, reason):
        """Mark `folder` permanently as a checkpoint from which no run may resume."""
        write_refusal(folder, get_real_rank(), reason)


MindFormerRegister.register_cls(SealingCheckpointMonitor, MindFormerModuleType.CALLBACK, alias="CheckpointMonitor")
router_state.enable()
stage_metadata.enable()
load_scaled_step()
