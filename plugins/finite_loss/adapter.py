"""This module ends a run if the loss or the global gradient norm of a step is not finite (see `plan`), and saves no
checkpoint of such a step. The module also ends the run if a checkpoint that was just written has weights that are not
finite, and no resume uses this checkpoint.

MindFormers runs callbacks that it does not know after its CheckpointMonitor, which would already have saved the step.
So this module reads the loss and its parts inside MFLossMonitor, the first callback, because MFLossMonitor clears these
values when it reads them.

Every rank decides for itself, so no step needs an additional collective. With data parallelism the values are already
reduced, so all ranks stop at the same step. In a pipeline only the last stage knows the loss, and all ranks know the
global norm. If only a single rank stops, the run ends as it does when any other worker fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mindformers.core.callback import callback
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindspore import nn

from plugins.all_ranks import sum_over_ranks
from plugins.errors import StoppedError
from plugins.finite_loss.plan import METRICS, Settings, Watch, not_finite, undefined_parts
from plugins.private_hooks import relies_on, train_step
from plugins.sealed_checkpoint.adapter import SealingCheckpointMonitor
from plugins.sealed_checkpoint.plan import newest_of_rank

# the step and the parts of the loss are known where these are called, and nowhere else
relies_on(callback.MFLossMonitor, "self.print_output_info(cb_params, cur_epoch_num, origin_epochs, throughput,")
relies_on(callback.MFLossMonitor, "lm_loss, aux_loss, mtp_loss, indexer_loss)")
relies_on(callback._get_loss_output, "loss, overflow, scaling_sens, *res = output")


def enable(config, settings) -> None:
    """Add the check for values that are not finite to the loss and checkpoint monitors of `config` (a
    MindFormerConfig).

    Args:
        settings: see `plan.Settings`.

    Raises:
        RecipeError: a setting is unknown or impossible.
    """
    put_in(config, Watch(Settings.read(settings).stop_after, undefined=undefined_of(config)), end)


def undefined_of(config) -> tuple[str, ...]:
    """Return the parts of the loss that MindFormers computes as 0/0 in a run of this config (see
    `plan.undefined_parts`).
    """
    stages = (config.get("parallel_config") or {}).get("pipeline_stage") or 1
    micro_steps = (config.get("runner_config") or {}).get("gradient_accumulation_steps") or 1
    model = config.model.model_config
    layers, dense = model.get("num_hidden_layers"), model.get("first_k_dense_replace") or 0
    with_experts = layers is None or dense < layers
    return undefined_parts(stages, micro_steps, with_experts * (model.get("moe_aux_loss_coeff") or 0.0))


def put_in(config, watch: Watch, end: Callable[[Any, int, str], None]) -> None:
    """Make `watch` check every step of a run of `config`, and save no checkpoint of a step whose values are not finite.

    Args:
        end: a function that raises the error which ends the run; it is called with the monitor that saves (or None),
            the step, and a description of the fault.
    """
    callback_type = MindFormerModuleType.CALLBACK
    losses = MindFormerRegister.get_cls(callback_type, "MFLossMonitor")
    MindFormerRegister.register_cls(_watching(losses, watch, end), callback_type, alias="MFLossMonitor")
    MindFormerRegister.register_cls(_withholding(watch, end), callback_type, alias="CheckpointMonitor")


def _watching(monitor: Any, watch, end):
    """Return a subclass of the loss monitor class `monitor` that ends the run when `watch` asks for it."""

    class FiniteLossMonitor(monitor):
        parts = None
        logged = None  # the loss in MindFormers' log: a pipeline's or an accumulated one divided by its micro-batches
        done_before = None  # steps before this part of the run

        def print_output_info(self, cb_params, cur_epoch_num, origin_epochs, throughput, cur_step_num, steps_per_epoch,
                              *more):  # fmt: skip
            """Store the values that only this callback gets: the step count, the logged loss, and the parts of the loss
            (the last four arguments).
            """
            self.parts, self.logged = more[-4:], more[0]
            self.done_before = (cur_epoch_num - 1) * steps_per_epoch + cur_step_num - cb_params.cur_step_num
            super().print_output_info(
                cb_params, cur_epoch_num, origin_epochs, throughput, cur_step_num, steps_per_epoch, *more
            )

        def on_train_step_end(self, run_context):
            """Log the step as MindFormers does, then judge whether its values are finite."""
            self.parts = self.logged = None  # steps that are not printed show only their sum
            super().on_train_step_end(run_context)
            params = run_context.original_args()
            loss, overflow, scale, _, norm = callback._get_loss_output(params.net_outputs)
            watch.scale_falls, watch.logged = _scale_falls(train_step(params)), number(self.logged)
            named = zip(METRICS, map(number, [*(self.parts or [None] * 4), loss]), strict=True)
            step = params.cur_step_num + (self.initial_step if self.done_before is None else self.done_before)
            wrong = watch.see(step, dict(named), number(norm), str(overflow) == "True", number(scale) or 1.0)
            if wrong:
                _stop(params, step, wrong, end)

        def on_train_end(self, run_context):
            """End with a failure if the run's last step is not finite, however many such steps are allowed."""
            if watch.run:
                _stop(run_context.original_args(), watch.run[-1][0], watch.verdict, end)
            super().on_train_end(run_context)

    return FiniteLossMonitor


def _stop(params, step, wrong, end):
    """Seal the checkpoint that is being saved in the background, then end the run."""
    savers = [each for each in params.list_callback if isinstance(each, SealingCheckpointMonitor)]
    for each in savers:
        each.seal_alone()
    end(savers[-1] if savers else None, step, wrong)


def end(saver, step, wrong):
    """End the run with a StoppedError, whose message says what was `wrong` and from which checkpoint to resume."""
    raise StoppedError(f"{wrong}; {way_on(saver)}")


def way_on(saver):
    """Return the advice that ends the error message of a stopped run: from which checkpoint to resume (or that the run
    has to start over), and what to change first.
    """
    change = "with a lower learning rate or other data: as it was, it would come to the same"
    newest = newest_of_rank(Path(saver.directory), get_real_rank()) if saver and not saver.use_legacy_format else None
    if newest is None:
        return f"nothing was saved before, so start over {change}"
    return f"resume from iteration {int(newest.name.removeprefix('iteration_'))} ({newest}) {change}"


def _withholding(watch, end):
    """Return a class of checkpoint monitors that saves no step whose values are not finite, and seals no weights that
    are not finite.
    """

    class FiniteCheckpointMonitor(SealingCheckpointMonitor):
        def _save_megatron_ckpt_file_format(self, cb_params):
            if not _anywhere(bool(watch.run), watch.stop_after):
                super()._save_megatron_ckpt_file_format(cb_params)

        def write_seal(self, folder, expected):
            """Mark the checkpoint permanently as refused if the update of this step made weights infinite or NaN."""
            for name in expected:
                wrong = not_finite(folder / name) if name.endswith(".safetensors") else None
                if wrong:
                    reason = f"{wrong} is not finite after the update"
                    self.refuse(folder, f"{name}: {reason}")
                    end(self, self.unsealed, f"step {self.unsealed}: {reason}")
            super().write_seal(folder, expected)

    return FiniteCheckpointMonitor


def _anywhere(flag, stop_after):
    """Return whether `flag` is set on any rank, so that either all ranks save or none does. With `stop_after: 1` this
    function is never called with the flag set.
    """
    if stop_after == 1 or get_real_group_size() == 1:
        return flag
    return sum_over_ranks(float(flag)) > 0


def _scale_falls(network):
    """Return whether the train step has a loss scale that is lowered after an overflow (a loss-scale manager that is
    not fixed).
    """
    manager = getattr(network, "loss_scaling_manager", None)
    return manager is not None and not isinstance(manager, nn.FixedLossScaleUpdateCell)


def number(value):
    """Return a float for whatever MindFormers hands over: None, a flag, a number, an array or a tensor of one
    element.
    """
    if value is None:
        return None
    array = np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value, dtype=np.float64).reshape(-1)
    return float(array[0]) if array.size else None
