"""This module records a rank's training for `tc3 accuracy equivalence`: gradient norms by step, the data, and the final
optimizer state.

A recipe names the callback (`auto_register: equivalence_record.EquivalenceRecord`, with `REGISTER_PATH` this folder)
before any other callback, because loading this file replaces MindFormers' TopkBiasBalanceCallback by `CountedBias`; the
training itself does not change. When training ends, two files are written below RUN/equivalence, each atomically:
rank_N.json and rank_N.npz, see `EquivalenceRecord.on_train_end`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindspore.train.callback import Callback

from plugins.step_record.plan import MOMENTS, gradient_square
from tools.accuracy.counted_bias import BIAS_END, CountedBias, of_routers
from tools.accuracy.equivalence.runs import BIAS, LEAST, LOAD, START, least
from tools.files.atomic import atomic_file, write_atomically

MindFormerRegister.register_cls(CountedBias, MindFormerModuleType.CALLBACK, alias="TopkBiasBalanceCallback")


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class EquivalenceRecord(Callback):
    """This callback records a rank's training for `tc3 accuracy equivalence`: its data, gradient norms and final state.
    Gradients are computed from AdamW's first moment, m' = beta1 * m + (1 - beta1) * g, so the recorded gradients are
    those after reduction and clipping.

    Args:
        run_dir: the run's folder.
        betas: the betas of the optimizer.
    """

    def __init__(self, run_dir, betas, **kwargs):
        super().__init__()
        self.folder = Path(run_dir) / "equivalence"
        self.beta1, self.beta2 = betas
        self.start: dict[str, np.ndarray] = {}
        self.moments: dict[str, np.ndarray] = {}
        self.least: dict[str, np.ndarray] = {}
        self.squares: list[dict[str, float]] = []
        self.samples: list[list[str]] = []
        self.biases: list[dict[str, np.ndarray]] = []

    def on_train_begin(self, run_context):
        """Record the initial weights, and digests of the samples that this rank will read, by batch."""
        for weight in run_context.original_args().train_network.optimizer.parameters:
            self.start[START + weight.name] = np.array(weight.asnumpy())
        self.biases.append(of_routers(run_context, BIAS_END))
        data = run_context.original_args().train_dataset
        for batch in data.create_tuple_iterator(num_epochs=1, output_numpy=True):
            self.samples.append(
                [hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest()[:16] for row in batch[0]]
            )

    def on_train_step_end(self, run_context):
        """Record for every weight the squared norm of its gradient (of this rank's part of the gradient)."""
        first, second = MOMENTS
        squares = {}
        for name, moment in self._state(run_context).items():
            if name.startswith(first):
                squares[name.removeprefix(first)] = gradient_square(moment, self.moments.get(name, 0.0), self.beta1)
                self.moments[name] = moment
            else:
                kept = LEAST + name.removeprefix(second)
                self.least[kept] = least(moment / (1 - self.beta2 ** (len(self.squares) + 1)), self.least.get(kept))
        self.squares.append(squares)
        self.biases.append(of_routers(run_context, BIAS_END))  # MindFormers lets the biases move before any other

    def on_train_end(self, run_context):
        """Write the record, and for every weight its value, its initial value and its optimizer's moments. For every
        weight with a second moment, also write the smallest value above 0 that each element of the bias-corrected
        second moment had in any step. Also write the routers' biases and loads of all steps.

        The json holds world_size, samples (digests of each step), squares (weight -> square of its gradient's norm, of
        each step) and split (weights of which this rank has its own part, along axis 0).
        """
        step = run_context.original_args().train_network
        arrays = {**self.start, **self.least, **self._state(run_context)}
        for prefix, steps in ((LOAD, CountedBias.loads), (BIAS, self.biases)):
            arrays.update({prefix + name: np.stack([step[name] for step in steps]) for name in steps[0]})
        split = []
        for weight in step.optimizer.parameters:
            arrays[weight.name] = np.array(weight.asnumpy())
            if weight.layerwise_parallel:
                split.append(weight.name)
        record = {"world_size": get_real_group_size(), "samples": self.samples, "squares": self.squares, "split": split}
        rank = get_real_rank()
        with atomic_file(self.folder / f"rank_{rank}.npz") as part:
            np.savez(part, **arrays)
        write_atomically(self.folder / f"rank_{rank}.json", json.dumps(record))

    def _state(self, run_context):
        """Return name -> copy of each moment of the optimizer, float32."""
        optimizer = run_context.original_args().train_network.optimizer
        return {
            param.name: np.array(param.asnumpy())  # a view of a buffer that the next step overwrites
            for param in optimizer.get_parameters()
            if param.name.startswith(MOMENTS)
        }
