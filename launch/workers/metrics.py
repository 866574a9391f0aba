"""This module writes one JSON line for each step, in full precision, beside MindFormers' log; the progress bar and the
tests read these lines.
"""

from __future__ import annotations

import json
import math
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mindformers.core.callback.callback import MFLossMonitor
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank

from launch.run.cache_key import VERSIONS
from plugins.finite_loss.adapter import number, undefined_of
from plugins.finite_loss.plan import METRICS
from plugins.lines import append_line
from plugins.private_hooks import train_step
from plugins.step_record.plan import samples_of
from tools.dryrun.activations import added
from tools.dryrun.executed import calls_file
from tools.dryrun.memory import kinds_of
from tools.files.atomic import write_atomically
from tools.schema.versions import installed

if TYPE_CHECKING:
    from plugins.semi_auto_cpu.collectives import Collectives


def metrics_file(run_dir: str | Path, rank: int) -> Path:
    """Return the file into which rank `rank` of a run writes its steps."""
    return Path(run_dir) / "metrics" / f"rank_{rank}.jsonl"


class FirstStep:
    """A `FirstStep` records which collectives this process executes in the first step of a sharded CPU run, for `tc3
    accuracy collectives`.

    Every such run records its first step: recording a call takes a microsecond, and later steps make the same calls.
    The record also holds this rank's index in each group as MindSpore uses it, by which MindSpore slices weights.

    Args:
        collectives: the collectives of this rank.
        file: the file of the record.
    """

    def __init__(self, collectives: Collectives, file: Path):
        self.collectives, self.file = collectives, file
        self.written = False

    def begin(self) -> None:
        """Record that a training step begins."""
        if not self.written:
            self.collectives.begin_recording()

    def end(self, step: int) -> None:
        """Record that the graph of the step has run."""
        if not self.written:
            self.written = True
            calls, places = self.collectives.end_recording(), self.collectives.groups.ranks.places
            write_atomically(self.file, json.dumps({"step": step, "calls": calls, "places": places}))


class RecordingLossMonitor(MFLossMonitor):
    """A `RecordingLossMonitor` is an `MFLossMonitor` that also appends a record of each step to the file
    `metrics_file`.

    The class is registered under the name of MindFormers' own class, because MindFormers' trainer passes constructor
    arguments by that name. The first line of a run (or of a resumed run) describes it; each further line is one step.
    `time` is in seconds since 1970 by this worker's clock: in the first line the time at which training began, in the
    line of a step the time at which the step ended. If the batch grows (plugins/batch_ramp), each of its stages begins
    with such a first line, because the first step of a stage compiles, as the first step of a run does.
    """

    run_dir = "./output"
    seq_length = 0
    columns: tuple[str, ...] = ()  # of the data, as the recipe names them
    samples: dict[str, list[str] | str] | None = None  # of the step that runs
    described: int | None = None  # samples of a step that the last description holds for
    cpu_before = 0.0
    undefined: tuple[str, ...] = ()  # of METRICS: the parts of the loss that MindFormers computes as 0 / 0
    first_step: FirstStep | None = None  # of a sharded run; MindFormers puts this callback before all others

    def on_train_begin(self, run_context):
        """Record the time at which training begins; the first line of the file is written only after the first step."""
        self.began = time.time()
        super().on_train_begin(run_context)

    def on_train_step_begin(self, run_context):
        """Take digests of the step's samples, and start to record the first step's collectives."""
        if self.described and self.described != self.global_batch_size:
            self.began = time.time()
        super().on_train_step_begin(run_context)
        self.samples = _samples(self.columns, run_context.original_args().train_dataset_element)
        if self.first_step:
            self.first_step.begin()

    def on_train_step_end(self, run_context):
        """Write the recorded collectives of the first step, before any callback communicates with other ranks."""
        if self.first_step:
            self.first_step.end(run_context.original_args().cur_step_num)
        super().on_train_step_end(run_context)

    def print_output_info(self, cb_params, cur_epoch_num, origin_epochs, throughput, cur_step_num, steps_per_epoch,
                          loss, per_step_seconds, overflow, scaling_sens, time_remain, percent, global_norm,
                          main_loss, extra_loss, mtp_loss, indexer_loss):  # fmt: skip
        """Log the step as MindFormers does, then append its record to the metrics file."""
        super().print_output_info(
            cb_params, cur_epoch_num, origin_epochs, throughput, cur_step_num, steps_per_epoch, loss,
            per_step_seconds, overflow, scaling_sens, time_remain, percent, global_norm,
            main_loss, extra_loss, mtp_loss, indexer_loss,
        )  # fmt: skip
        now = time.time()
        step = cur_step_num + (cur_epoch_num - 1) * steps_per_epoch
        if self.described != self.global_batch_size:
            self.described = self.global_batch_size
            self._write({"total_steps": origin_epochs * steps_per_epoch, "start_step": step - 1,
                         "world_size": get_real_group_size(), "time": self.began, "software": software(),
                         "held_bytes": _held_bytes(train_step(cb_params))})  # fmt: skip
        self._write({
            "step": step,
            "time": now,
            "loss": float(loss),
            "lm_loss": number(main_loss),
            "load_balancing_loss": self._balancing(extra_loss),
            "mtp_loss": number(mtp_loss),
            "global_norm": number(global_norm),
            "learning_rate": number(self.learning_rate),
            "overflow": str(overflow) == "True",
            "tokens": self.global_batch_size * self.seq_length,
            "seconds": per_step_seconds / 1000,
            "cpu_seconds": self._cpu_seconds(),
            "samples": self.samples,
        })  # fmt: skip

    def _balancing(self, value):
        """Return the load-balancing loss, or None if it is NaN only because MindFormers computes it as 0 / 0."""
        loss = number(value)
        return None if METRICS[1] in self.undefined and loss is not None and math.isnan(loss) else loss

    def _cpu_seconds(self):
        """Return the processor time of this worker since the last record, without the time in which it waited for other
        ranks or for a core.
        """
        before, self.cpu_before = self.cpu_before, time.process_time()
        return self.cpu_before - before

    def _write(self, record):
        append_line(metrics_file(self.run_dir, get_real_rank()), record)


def software() -> dict[str, str]:
    """Return the software and hardware with which this worker computes, and their versions; software that is not
    installed is left out.
    """
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    return {**versions, **{name: version for name in VERSIONS if (version := installed(name))}}


def _held_bytes(network):
    """Return the bytes of this rank's parameters in memory, by kind, which `tc3 dryrun` predicts."""
    kinds = kinds_of(network)
    return added({kinds[item.name]: item.nbytes} for item in network.get_parameters())


def _samples(columns, batch):
    """Return digests of the samples that this rank got, by column; None in sink mode, where the data do not pass
    through Python.
    """
    if not isinstance(batch, (list, tuple)) or not batch or not all(hasattr(each, "asnumpy") for each in batch):
        return None
    names = columns if len(columns) == len(batch) else [f"column_{place}" for place in range(len(batch))]
    return samples_of(names, [each.asnumpy() for each in batch])


def enable(config, collectives=None) -> None:
    """Record this run's steps, and for a sharded run also the first step's collectives. Call this before
    `Trainer(config)` is created.

    Args:
        collectives: `plugins.semi_auto_cpu.collectives.Collectives` of a sharded run.
    """
    if collectives:
        file = calls_file(config.output_dir, collectives.mesh.rank)
        RecordingLossMonitor.first_step = FirstStep(collectives, file)
    RecordingLossMonitor.run_dir = config.output_dir
    RecordingLossMonitor.seq_length = config.model.model_config.seq_length
    RecordingLossMonitor.undefined = undefined_of(config)
    RecordingLossMonitor.columns = tuple((config.train_dataset or {}).get("input_columns") or ())
    MindFormerRegister.register_cls(RecordingLossMonitor, MindFormerModuleType.CALLBACK, alias="MFLossMonitor")
