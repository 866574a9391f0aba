"""This module records the first steps of a run for `tc3 accuracy diagnose` (see `plan`).

The record is made in MFLossMonitor, which runs before all other callbacks: at this time TopkBiasBalanceCallback has not
yet changed the routers' biases and cleared their counters. The changes that callbacks make after it are recorded when
the next step begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.tools.logger import logger
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank

from plugins.errors import StoppedError
from plugins.lines import append_line
from plugins.private_hooks import train_step
from plugins.step_record.plan import (
    BIAS,
    END,
    LOAD,
    SMALL,
    START,
    STATE,
    Settings,
    adam_of,
    record_file,
    sketch_of,
    state_of,
    weight_of,
    without_update,
)


def enable(config, settings) -> None:
    """Record the first steps of the run of `config` (a MindFormerConfig).

    Raises:
        RecipeError: a setting is unknown or impossible.
    """
    steps = Settings.read(settings).steps
    kind = MindFormerModuleType.CALLBACK
    monitor = MindFormerRegister.get_cls(kind, "MFLossMonitor")
    MindFormerRegister.register_cls(_recording(monitor, Record(config, steps)), kind, alias="MFLossMonitor")


class Record:
    """A `Record` is a callback that writes the step record of one rank. The file of a rank has a line for the start of
    the run and a line for each recorded step.

    Args:
        config: the config of the run.
        steps: the number of recorded steps of this part of the run.
    """

    def __init__(self, config, steps: int):
        self.optimizer = dict(config.optimizer or {})
        self.file: Path = record_file(config.output_dir, get_real_rank())
        self.left = steps
        self.before: dict[str, np.ndarray] = {}
        self.line: dict[str, Any] | None = None
        self.columns = tuple((config.train_dataset or {}).get("input_columns") or ())
        self.traced = not config.use_parallel and ms.get_context("device_target") == "CPU"
        self.passed = False  # the first step's outputs were taken
        self.modules: dict[str, Any] | None = None
        self.first = 1  # step of this part of the run
        self.updates = 0  # that the optimizer had made before the step

    def begin(self, params, done_before: int) -> None:
        """Record the state from which the run starts."""
        self.before, self.first, self.updates = _arrays(params), done_before + 1, _updates(params)
        line = {"step": done_before, "start": True, "biases": _biases(self.before), "state": state_of(self.before)}
        append_line(self.file, {**line, "effective": _effective(train_step(params))})

    def forward(self, params) -> None:
        """Record every module's output for the first step's batch, in one CPU process.

        The method runs only once, because MindSpore compiles the train step again after a second pass in PyNative mode.
        """
        if self.traced and not self.passed:
            self.passed = True
            self.modules = self._outputs(params, START, self.before, self.first)

    def finish(self, params, step: int) -> None:
        """Record every module's output for the last step's batch, computed with the weights at the end of the training,
        in one CPU process.
        """
        if self.traced and self.passed and (modules := self._outputs(params, END, _arrays(params), step)):
            append_line(self.file, {"step": step, "end": True, "state": {}, "modules": modules})

    def _outputs(self, params, kept: str, arrays: dict[str, np.ndarray], step: int) -> dict[str, Any] | None:
        """Return module -> sketch of its output for the batch in `params`; weights and batch are kept in the file
        `kept`.
        """
        from plugins.cpu_backend.pynative import counters_kept, module_outputs

        network, batch = train_step(params).network, params.train_dataset_element
        if sum(each.nbytes for each in network.get_parameters()) <= SMALL:
            rows = dict(zip(self.columns, (each.asnumpy() for each in batch), strict=False))
            weights = {f"weight/{name}": value for name, value in arrays.items() if not name.startswith(STATE)}
            named = {f"batch/{name}": value for name, value in rows.items()}
            np.savez(self.file.with_name(kept), step=step, **weights, **named)
        with counters_kept(network):
            network.set_train(False)
            try:
                return {name: sketch_of(value) for name, value in module_outputs(network, batch)[1].items()}
            except Exception as error:  # not every model runs in PyNative, and what only watches ends no training
                logger.warning(f"step_record: the outputs of modules are not recorded: {error}")
                return None
            finally:
                network.set_train(True)

    def end(self, params, step: int, learning_rate: float | None) -> None:
        """Prepare the line of a step: the updates of the weights, and the routers' counters, which at this time still
        hold the counts of this step.
        """
        if self.left <= 0:
            return
        self.left -= 1
        now, optimizer = _arrays(params), train_step(params).optimizer
        count = _updates(params)
        skipped = count == self.updates  # the gradients overflowed, and the dynamic loss scale left the update out
        adam = adam_of(self.optimizer, learning_rate or 0.0, count)
        told = {
            each.name: weight_of(each.name, self.before, now, adam) for each in optimizer.parameters if each.name in now
        }
        weights = {name: each for name, each in told.items() if each is not None}
        if skipped:
            weights = without_update(weights)
        loads = {name.removesuffix(LOAD): value.tolist() for name, value in now.items() if name.endswith(LOAD)}
        self.line = {"step": step, "learning_rate": learning_rate, "updates": count, "parts": _parts(params),
                     "weights": weights, "loads": loads, **({"skipped": True} if skipped else {})}  # fmt: skip
        self.updates = count
        if self.modules is not None:
            self.line["modules"], self.modules = self.modules, None
        self.before = now

    def complete(self, params) -> None:
        """Write the line of the last step, with the state that the other callbacks have left for the next step."""
        if self.line is None:
            return
        now = _arrays(params)
        append_line(self.file, {**self.line, "biases": _biases(now), "state": state_of(now)})
        self.line = None
        self.before = now if self.left > 0 else {}


def _recording(monitor: Any, record: Record):
    class StepRecordMonitor(monitor):
        def on_train_begin(self, run_context):
            """Record the state from which the training starts or is resumed."""
            super().on_train_begin(run_context)
            params = run_context.original_args()
            record.begin(params, self._done_before(params))

        def on_train_step_begin(self, run_context):
            """Complete the previous step's record with values that are known only when the next step begins."""
            record.complete(run_context.original_args())
            record.forward(run_context.original_args())
            super().on_train_step_begin(run_context)

        def on_train_step_end(self, run_context):
            """Log the step as MindFormers does, then record what the step changed. If the step ends the run, its line
            is written at once.
            """
            self.params = run_context.original_args()
            try:
                super().on_train_step_end(run_context)
            except StoppedError:
                self._record(self.params)
                record.complete(self.params)
                raise
            self._record(self.params)

        def __exit__(self, kind, *error):
            """Write the line of the last step if a save on request, or weights that are not finite, end the run after
            it.
            """
            if kind is not None and issubclass(kind, (SystemExit, StoppedError)) and record.line is not None:
                record.complete(self.params)
            return super().__exit__(kind, *error)

        def _record(self, params):
            rate = getattr(self, "learning_rate", None)
            rate = None if rate is None else float(np.asarray(getattr(rate, "asnumpy", lambda: rate)()).reshape(-1)[0])
            record.end(params, params.cur_step_num + self._done_before(params), rate)

        def _done_before(self, params):
            return params.get("initial_step") or self.initial_step

        def on_train_end(self, run_context):
            """Complete the record of the last step, and record the modules' outputs with the final weights."""
            params = run_context.original_args()
            record.complete(params)
            record.finish(params, params.cur_step_num + self._done_before(params))
            super().on_train_end(run_context)

    return StepRecordMonitor


def _arrays(params) -> dict[str, np.ndarray]:
    """Return name -> copy of each weight, moment, counter and bias that this rank has in memory."""
    step = train_step(params)
    found = {item.name: item for item in step.network.get_parameters()}
    found |= {item.name: item for item in step.optimizer.get_parameters()}
    return {name: np.array(item.asnumpy()) for name, item in found.items() if not item.has_init}


def _updates(params) -> int:
    return int(np.asarray(train_step(params).optimizer.global_step.asnumpy()).reshape(-1)[0])


def _biases(arrays: dict[str, np.ndarray]) -> dict[str, list[float]]:
    return {name.removesuffix(BIAS): value.tolist() for name, value in arrays.items() if name.endswith(BIAS)}


def _parts(params) -> dict[str, Any]:
    """Return a dictionary name -> [shape of the whole tensor, index of this rank's part along each axis]; it is empty
    in a run of one process.
    """
    if get_real_group_size() == 1:
        return {}
    from mindformers.checkpoint.sharded_tensor import get_cur_sharded_tensor

    tensors = get_cur_sharded_tensor(train_step(params).network)
    return {name: [list(each.global_shape), list(each.global_offset)] for name, each in tensors.items()}


def _effective(step) -> dict[str, Any]:
    """Return the settings with which the built model and optimizer compute, which may differ from the recipe's."""
    gpt = next((cell for _, cell in step.network.cells_and_names() if isinstance(cell, GPTModel)), None)
    found = {f"model.{key}": value for key, value in sorted(vars(gpt.config).items()) if _plain(value)} if gpt else {}
    for name in ("beta1", "beta2", "eps"):
        if (value := getattr(step.optimizer, name, None)) is not None:
            found[f"optimizer.{name}"] = float(f"{np.asarray(value.asnumpy()).reshape(-1)[0]:.7g}")
    return found


def _plain(value: Any) -> bool:
    """Return whether a value is a number, a word or None, and therefore the same in another process."""
    return value is None or isinstance(value, (bool, int, float, str))
