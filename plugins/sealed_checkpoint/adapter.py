"""MindFormers' CheckpointMonitor, sealing what it saved (see `plan`). Imported for its registration."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mindformers.checkpoint.utils import get_checkpoint_iter_dir
from mindformers.core.callback.callback import CheckpointMonitor
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindformers.utils.parallel_utils import barrier_world

from plugins.private_hooks import relies_on
from plugins.sealed_checkpoint import global_step, router_state
from plugins.sealed_checkpoint.plan import expected_files, remove_old, write_refusal, write_seal
from plugins.spans import Span, note

# where it is no longer called, or what is kept no longer listed, nothing would be sealed and nothing removed
relies_on(CheckpointMonitor, "self._save_megatron_ckpt_file_format(cb_params)")
relies_on(CheckpointMonitor, "current_ckpt_step_list=self.current_ckpt_step_list")


class SealingCheckpointMonitor(CheckpointMonitor):
    """Seals each new-format checkpoint once its files are written (with `async_save`, once the thread is done).

    Registered under MindFormers' own name, because the trainer hands out constructor arguments by that name.
    The legacy format is left as it is: it cannot be resumed on one worker anyway.

    MindFormers removes the oldest checkpoint when a new one is written, before it is sealed, and in the background
    before it is there. Here it goes once every rank has sealed the new one.
    """

    run_dir: str | None = None  # where it notes for how long the training stood still; None: nowhere
    unsealed: Any = None  # the iteration that is saved and not sealed yet

    def __init__(self, *args, keep_checkpoint_max=5, use_legacy_format=True, **settings):
        kept = keep_checkpoint_max if use_legacy_format else sys.maxsize  # MindFormers is to remove none
        super().__init__(*args, keep_checkpoint_max=kept, use_legacy_format=use_legacy_format, **settings)
        self.kept = keep_checkpoint_max

    def _save_megatron_ckpt_file_format(self, cb_params):
        """Save, and seal at once unless the save goes on in the background."""
        if cb_params.cur_step_num == self._last_triggered_step:
            return
        began = time.time()
        if self.unsealed is not None:  # in the background still: the next save waits for it too, but seals nothing
            self.async_save_manager.maybe_finalize(wait_finish=True)
            self._seal_finished_save()
        super()._save_megatron_ckpt_file_format(cb_params)
        self.unsealed = self.common_info.step_num
        if not self._config.async_save:
            self._seal_finished_save()
        self._note(began, self.common_info.step_num)

    def on_train_step_begin(self, run_context):
        """Seal a background save that has finished since."""
        super().on_train_step_begin(run_context)
        if self._config.async_save and self.async_save_manager.is_finalized:
            self._seal_and_note()

    def on_train_end(self, run_context):
        """Seal the last checkpoint."""
        began = time.time() if self.unsealed is not None else None
        super().on_train_end(run_context)
        self._seal_and_note(began)

    def _seal_and_note(self, began=None):
        """Seal a background save, for which the training stands still from `began` or from now on."""
        if self.unsealed is not None:
            began, saved = began or time.time(), self.unsealed
            self._seal_finished_save()
            self._note(began, saved)

    def _note(self, began, step):
        if self.run_dir and get_real_rank() == 0:
            note(self.run_dir, Span("save", int(step), began, time.time(), sealed=self.unsealed is None))

    def seal_alone(self):
        """Seal this rank's part of a save in the background, for the run ends here; other ranks are not waited for."""
        if self.unsealed is not None:
            self.async_save_manager.check_async_save_alive(wait_finish=True)
            self._seal()

    def _seal_finished_save(self):
        """Seal what all ranks have written, then remove what is one too many."""
        if self.unsealed is None:
            return
        newest = self._seal()
        barrier_world("All ranks to seal the checkpoint.")
        if get_real_rank() == 0:
            removed = remove_old([Path(each) for each in self.current_ckpt_step_list], newest, self.kept)
            self.current_ckpt_step_list[:] = self.current_ckpt_step_list[removed:]

    def _seal(self):
        folder = Path(get_checkpoint_iter_dir(self.directory, self.unsealed))
        expected = expected_files(self.origin_prefix, get_real_rank(), get_real_group_size(), self.save_optimizer)
        self.write_seal(folder, expected)
        self.unsealed = None
        return folder

    def write_seal(self, folder, expected):
        """Seal this rank's part of `folder`, whose files have the names `expected`."""
        write_seal(folder, get_real_rank(), get_real_group_size(), self.unsealed, expected)

    def refuse(self, folder, reason):
        """Mark `folder` as one that nobody is to go on from."""
        write_refusal(folder, get_real_rank(), reason)


MindFormerRegister.register_cls(SealingCheckpointMonitor, MindFormerModuleType.CALLBACK, alias="CheckpointMonitor")
router_state.enable()
global_step.enable()
