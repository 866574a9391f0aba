"""This module observes the experts' loads after every step, and records them if the setting `record` is on; when a plan
is due, it moves experts and changes their copies, before a checkpoint is saved.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindformers.core.callback.callback import ExpertMigrateCallback
from mindformers.parallel_core.training_graph.transformer.moe.moe_layer import MoELayer
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.tools.logger import logger
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size
from mindformers.trainer import base_trainer
from mindspore import Tensor

from plugins.expert_balance import record
from plugins.expert_balance.copies import imbalance_with, next_state, none
from plugins.expert_balance.executor import Layer, Slice, agree, from_first, move, total
from plugins.expert_balance.plan import Prediction, due, moved
from plugins.expert_balance.record import Moved, Record, append, load_file
from plugins.expert_balance.routers import Watcher, routers_file
from plugins.lines import append_line
from plugins.private_hooks import relies_on, steps_before
from plugins.sealed_checkpoint.router_state import MOMENTS

# its place in MindFormers' list is why the callback is a subclass; the router adds up the shares of micro-batches
relies_on(base_trainer.BaseTrainer.sort_callbacks, "for index, callback_ in enumerate(CALLBACK_HAS_SORT):")
relies_on(TopKRouter, "self.assign_add(self.expert_load, expert_load_data)")


@dataclass(frozen=True)
class Experts:
    """An `Experts` holds the parameters of one MoE layer that the callback reads or changes.

    Attributes:
        number: the number of the layer in the model.
        router: the router, which counts the tokens of the experts.
        placement: the parameter, see `Layer`.
        tensors: the parameters that move with the experts, the weights first.
        cell: the cell of the experts, which can hold copies.
    """

    number: int
    router: Any
    placement: Any
    tensors: list
    cell: Any = None


class Alone:
    """An `Alone` replaces the communication between ranks in a run that consists of only one rank."""

    rank, size = 0, 1

    def all_to_all_v(self, group, tag, parts, rows=None):
        """Return this rank's part unchanged, because there is no other rank."""
        return parts


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class ExpertBalance(ExpertMigrateCallback):
    """An `ExpertBalance` is a callback that records the experts' loads of every step if the setting `record` is on, and
    plans a new placement of experts every `settings.every` steps (0: never).

    The class inherits from a callback of MindFormers only for its place in the order of callbacks: MindFormers runs its
    ExpertMigrateCallback before CheckpointMonitor and before TopkBiasBalanceCallback, which clears the loads; callbacks
    that MindFormers does not know run after both. So the order within a step is: check the loss (a run whose loss is
    not finite ends here), record the loads, move experts, update the routers' biases, save.

    Args:
        settings: `plugins.expert_balance.settings.Settings`.
        devices: the number of ranks of an EP group, or 1.
        nodes: the number of their nodes, over which plans balance the load first.
        samples: `Ramp` of the samples in a rank's micro-batch, which grow with `plugins.batch_ramp` if a rank's step is
            one batch.
        batches: `Ramp` of the samples in a step of all ranks.
        pairs: the number of (token, expert) pairs of one sample.
        rate: the amount by which the routers' biases move in a step.
        layers: the number of decoder layers of the model; MTP layers are numbered after them.
        run_dir: the folder of the record.
        checkpoint, save_path: see `record.file_of`.
    """

    def __init__(
        self, settings, devices, nodes, rate, samples, batches, pairs, layers, run_dir, checkpoint, save_path, **kwargs
    ):
        self.settings, self.devices, self.nodes = settings, devices, nodes
        self.samples, self.batches, self.pairs = samples, batches, pairs
        self.decoder, self.rate = layers, rate
        self.run_dir, self.file = run_dir, load_file(run_dir)
        self.before = record.file_of(checkpoint, save_path, run_dir)
        self.prediction = Prediction(settings.memory)

    def on_train_begin(self, run_context):
        """Find the MoE layers of the model, and continue the prediction of loads from the loads that were recorded
        before a resume.
        """
        params = run_context.original_args()
        self.ranks = self.connect()
        self.layers = layers_of(params.train_network.network, params.train_network.optimizer, self.decoder)
        self.done = steps_before(params)
        self.held = none(len(self.layers), self.devices, self.settings.spare)
        self.routers = Watcher([layer.number for layer in self.layers], self.rate)
        self._remember()
        if self.settings.spare:
            self._take_copies(self._placements(), self.held)

    def on_train_step_end(self, run_context):
        """Record the experts' loads of the step if the setting `record` is on, and move experts if a plan is due after
        this step.
        """
        params = run_context.original_args()
        # a compile tells the layouts of weights to the cell it was asked for: in sink mode the one around the step
        step, self.compiled = self.done + params.cur_step_num, params.train_network
        shares = np.stack([layer.router.expert_load.asnumpy().astype(np.float64) for layer in self.layers])
        self.copies = self.samples.batch_at(step) * self.pairs  # (token, expert) pairs of a rank's micro-batch
        tokens, slots, batches = self.of_all(shares, self._placements())
        self.prediction.see(tokens)
        self._watch(step, tokens)
        every, copies = self.settings.every, self.held
        self._record(step, tokens, slots, copies, batches, self._move(step, slots) if due(step, every) else None)

    def connect(self):
        """Return the object (an `executor.Ranks`) through which all ranks of the run communicate."""
        from plugins.cpu_backend import transport

        return transport.mesh() if get_real_group_size() > 1 else Alone()

    def of_all(self, shares, slots):
        """Return the experts' loads summed over all ranks, from the loads on this rank.

        Args:
            shares: [layers, E] of this rank's choices that fell on each expert, added up over its micro-batches.
            slots: [layers, E], its placements.

        Returns:
            int64 [layers, E] choices, [layers, E] placements, [layers] the number of micro-batches that were counted
                together.
        """
        batches = np.rint(shares.sum(1)).astype(np.int64)
        return total(self.ranks, np.rint(shares * self.copies).astype(np.int64)), slots, batches

    def hand_out(self, own):
        """Broadcast rank 0's array `own` to all ranks, and return it."""
        return from_first(self.ranks, own)

    def movable(self):
        """Return for each MoE layer the parameters that change on this rank when experts move."""
        rows = enumerate(self.layers)
        return [Layer(i, each.number, each.placement, [Slice(t, self.ranks) for t in each.tensors]) for i, each in rows]

    def _move(self, step, slots):
        began = time.perf_counter()
        loads = self.prediction.loads
        wanted = {"step": step, "nodes": self.nodes}
        new, copies = next_state(self.settings, loads, slots, self.held, self.devices, **wanted)
        planned = time.perf_counter()
        sent = move(self.ranks, self.movable(), slots, new, assign)
        self._take_copies(new, copies)
        sent = int(total(self.ranks, np.array([sent]))[0])
        experts = moved(new, slots, self.devices)
        told = copies if self.settings.spare else None
        return Moved(new, experts, sent, planned - began, time.perf_counter() - planned, told)

    def _placements(self):
        return np.stack([layer.placement.asnumpy().astype(np.int64) for layer in self.layers])

    def _take_copies(self, slots, copies):
        """Use these copies from the next step on; if the ranks' copies differ, every rank stops. No checkpoint holds
        copies.
        """
        if self.settings.spare:
            agree(self.ranks, "copies", copies.astype(np.int64).tobytes())
            for layer, *held in zip(self.layers, slots, copies, strict=True):
                take_copies(layer.cell, *held)
        self.held = copies

    def _watch(self, step, tokens):
        if not self.settings.routers or self.ranks.rank:
            return
        measures = self.routers.see(step, tokens)
        append_line(routers_file(self.run_dir), measures.as_json(time.time()))
        for alarm in measures.alarms:
            if alarm.since == step:
                logger.warning("router of layer %d: %s", alarm.layer, alarm.words)

    def _record(self, step, tokens, slots, copies, batches, moved):
        if not self.settings.record or self.ranks.rank:
            return
        ratios = imbalance_with(tokens, slots, copies, self.devices)
        worst = tuple(float(ratio) if count == 1 else None for ratio, count in zip(ratios, batches, strict=True))
        numbers = tuple(layer.number for layer in self.layers)
        told = copies if self.settings.spare else None
        append(self.file, Record(step, self.devices, numbers, tokens, slots, worst, moved, self.nodes, told))

    def _remember(self):
        """Let rank 0 read the records of the steps before, because only rank 0 may have the file; all ranks get the
        same records.
        """
        form = (self.devices, len(self.layers), self.layers[0].placement.shape[0])
        missing, copies = "", self.held[None][:0]
        if not self.ranks.rank:
            records, missing = record.carry_over(self.before, self.file, self.done, form, self._pairs_of_step)
            for loads in record.loads(records, form):
                self.prediction.see(loads)
            for each in records:
                self.routers.see(each.step, each.tokens)
            copies = self._last_copies(records)
        if self.settings.spare:
            for found in self.hand_out(copies):
                self.held = found
        known = np.empty((0, *form[1:])) if self.prediction.loads is None else self.prediction.loads[None]
        for loads in self.hand_out(known):
            self.prediction.loads = loads
        if missing and self.settings.every:
            logger.warning(
                "plugins.expert_balance: %s: experts now move by the known loads, so their placement may differ from "
                "that of a run without the interruption; the losses stay the same", missing
            )  # fmt: skip

    def _pairs_of_step(self, step):
        return self.batches.batch_at(step) * self.pairs

    def _last_copies(self, records):
        """Return the copies [1, layers, D x spare] with which the run continued after its last step, or [0, ...] if
        they are not known.
        """
        if records and records[-1].step == self.done:
            slots, copies = records[-1].after
            if copies.shape == self.held.shape and np.array_equal(slots, self._placements()):
                return copies[None]
        return self.held[None][:0]


def layers_of(network, optimizer, decoder):
    """Return the MoE layers of a network, as `Experts` objects, in the order of their numbers.

    Args:
        decoder: decoder layers of the model.
    """
    states = optimizer.parameters_dict()
    found = []
    for name, cell in network.cells_and_names():
        if isinstance(cell, MoELayer):
            place = re.search(r"\.layers\.(\d+)\.", name)
            assert place, name
            number = int(place[1]) + decoder * (".mtp." in name)
            weights = [cell.experts.weight1, cell.experts.weight2]
            tensors = [each for weight in weights for each in (weight, *_moments(states, weight))]
            found.append(Experts(number, cell.router, cell.experts.placement, tensors, cell.experts))
    return sorted(found, key=lambda layer: layer.number)


def _moments(states, weight):
    """Return the optimizer's state of a weight. Moments of AdamW with one element, which Muon keeps but never reads,
    are left out.
    """
    named = [states[name] for moment in MOMENTS if (name := f"{moment}{weight.name}") in states]
    return [state for state in named if state.ndim == weight.ndim]


def take_copies(cell, slots, copies):
    """Make a layer's experts use the given copies of experts from the next step on (see
    `plugins.expert_balance.copied`).
    """
    cell.take_copies(slots, copies)


def assign(parameter, value):
    """Overwrite the values of a parameter between two steps, so that the compiled graph uses the new values.

    `Parameter.set_data` does not work: after it the compiled graph silently continues with the old values of an Adam
    moment. `ops.assign` does not work either: it has no kernel for bfloat16 on CPU.
    """
    parameter.copy_(Tensor(value, parameter.dtype))
