"""MindFormers' CheckpointMonitor, sealing what it saved (see `plan`). Imported for its registration."""

from __future__ import annotations

from pathlib import Path

from mindformers.checkpoint.utils import get_checkpoint_iter_dir
from mindformers.core.callback.callback import CheckpointMonitor
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank

from plugins.sealed_checkpoint.plan import expected_files, write_seal


class SealingCheckpointMonitor(CheckpointMonitor):
    """Seals each new-format checkpoint once its files are written (with `async_save`, once the thread is done).

    Registered under MindFormers' own name, because the trainer hands out constructor arguments by that name.
    The legacy format is left as it is: it cannot be resumed on one worker anyway.
    """

    unsealed: int | None = None

    def _save_megatron_ckpt_file_format(self, cb_params):
        """Save, and seal at once unless the save goes on in the background."""
        if cb_params.cur_step_num == self._last_triggered_step:
            return
        if self.unsealed is not None:  # in the background still: the next save waits for it too, but seals nothing
            self.async_save_manager.maybe_finalize(wait_finish=True)
            self._seal_finished_save()
        super()._save_megatron_ckpt_file_format(cb_params)
        self.unsealed = self.common_info.step_num
        if not self._config.async_save:
            self._seal_finished_save()

    def on_train_step_begin(self, run_context):
        """Seal a background save that has finished since."""
        super().on_train_step_begin(run_context)
        if self._config.async_save and self.async_save_manager.is_finalized:
            self._seal_finished_save()

    def on_train_end(self, run_context):
        """Seal the last checkpoint."""
        super().on_train_end(run_context)
        self._seal_finished_save()

    def _seal_finished_save(self):
        if self.unsealed is None:
            return
        folder = Path(get_checkpoint_iter_dir(self.directory, self.unsealed))
        rank, world_size = get_real_rank(), get_real_group_size()
        expected = expected_files(self.origin_prefix, rank, world_size, self.save_optimizer)
        write_seal(folder, rank, world_size, self.unsealed, expected)
        self.unsealed = None


MindFormerRegister.register_cls(SealingCheckpointMonitor, MindFormerModuleType.CALLBACK, alias="CheckpointMonitor")
