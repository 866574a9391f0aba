"""This module is a checkpoint monitor that saves a checkpoint at a requested step and then ends the worker (see
`leave_request`).

MindSpore's `OnRequestExit` cannot be used: it puts a collective into the graph of every step, and saves `.ckpt` files
of the old format, without seals and without the state of several ranks. MindFormers 1.9.0 has no such function.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from mindformers.checkpoint.utils import get_checkpoint_iter_dir
from mindformers.core.callback.callback import CheckpointMonitor
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank

from launch.workers.leave_request import VARIABLE, agree, requested
from plugins.private_hooks import relies_on
from plugins.sealed_checkpoint.adapter import SealingCheckpointMonitor
from tools.runs.attempts import ASKED, SAVED

# the number that a checkpoint of this step would have, and where steps end
relies_on(CheckpointMonitor, "iteration = self._append_step_num + cb_params.cur_step_num")
relies_on(CheckpointMonitor, "def step_end(self, run_context)")


def enable(last: int = 0) -> None:
    """Make the checkpoint monitor of the run (with the changes of the plugins) check at each step for a request to
    save. Call this after the plugins are enabled.

    After a save at the run's `last` step (0: unknown) the worker ends as without a request, after the last held-out
    evaluation: no attempt would make up for it, because the run is complete.

    Without a launch that can make requests, and for MindFormers' legacy format, nothing changes.
    """
    monitor = MindFormerRegister.get_cls(MindFormerModuleType.CALLBACK, "CheckpointMonitor")
    if VARIABLE in os.environ and issubclass(monitor, SealingCheckpointMonitor):
        heeding = _heeding(monitor, Path(os.environ[VARIABLE]), last)
        MindFormerRegister.register_cls(heeding, MindFormerModuleType.CALLBACK, alias="CheckpointMonitor")


def _heeding(monitor: Any, file: Path, last: int) -> Any:
    """Return a subclass of the checkpoint monitor class `monitor` that looks into `file` at the end of each step."""

    class HeedingCheckpointMonitor(monitor):
        answered = False

        def step_end(self, run_context):
            """Save a checkpoint if one is due; then check whether a request asks all ranks to save at this step and
            end.
            """
            super().step_end(run_context)
            if not (self.answered or self.use_legacy_format):
                self._heed(run_context.original_args())

        def _heed(self, params):
            step, wanted = self._append_step_num + params.cur_step_num, requested(file)
            if wanted is None or step < wanted:
                return
            self.answered = True
            if step > wanted or not agree(file.parent, get_real_rank(), get_real_group_size()):
                click.echo(f"{ASKED} at step {wanted}: not all ranks knew in time; training goes on", err=True)
                return
            self._save_megatron_ckpt_file_format(params)  # nothing to do where the step was one of saving
            if self._config.async_save:
                self.async_save_manager.maybe_finalize(wait_finish=True)
            self._seal_finished_save()
            folder = Path(get_checkpoint_iter_dir(self.directory, step))
            said = folder if self.saved == step else "nothing, for the step is not finite"
            click.echo(f"{SAVED}step {step}: {said}", err=True)
            if step != last:
                raise SystemExit(0)

    return HeedingCheckpointMonitor
