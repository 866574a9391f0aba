"""This module is the part of `tc3 accuracy align` that runs in MindFormers' trainer: a callback loads weights and
records the values that are compared with the reference.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor
from mindspore.train.callback import Callback

from plugins.cpu_backend.pynative import counters_kept, module_outputs
from tools.accuracy.counted_bias import CountedBias
from tools.weights.hugging_face_names import STATE

COLUMNS = ("input_ids", "labels", "loss_mask")
MindFormerRegister.register_cls(CountedBias, MindFormerModuleType.CALLBACK)


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class AlignRecorder(Callback):
    """An `AlignRecorder` loads the weights of an .npz file (by MindFormers' names; None keeps the model's own), and
    records the batches, module outputs, weights and moments that `tc3 accuracy align` compares.
    """

    def __init__(self, weights, record, columns, **kwargs):
        super().__init__()
        self.weights, self.record, self.columns = weights, Path(record), columns
        self.out = {}
        self.batches: dict[str, list] = {name: [] for name in COLUMNS}
        self.steps = 0

    def on_train_begin(self, run_context):
        """Load the given weights before the graph is compiled."""
        network = run_context.original_args().train_network.network
        parameters = {param.name: param for param in network.get_parameters()}
        if self.weights:
            with np.load(self.weights) as file:
                for name in file.files:
                    parameters[name].set_data(Tensor(file[name]))

    def on_train_step_begin(self, run_context):
        """Record the batch of the step; before the first step, also record the outputs of all traced modules."""
        arguments = run_context.original_args()
        self._after_step(arguments)
        batch = dict(zip(self.columns, arguments.train_dataset_element, strict=True))
        for name, values in self.batches.items():
            values.append(batch[name].asnumpy().copy())
        if self.steps == 0:
            self.out.update(forward(arguments.train_network.network, arguments.train_dataset_element))
        self.steps += 1

    def on_train_end(self, run_context):
        """Write everything that was recorded into an .npz file."""
        self._after_step(run_context.original_args())
        self.out.update({f"batch/{name}": np.stack(values) for name, values in self.batches.items()})
        np.savez(self.record, **self.out)

    def _after_step(self, arguments):
        parameters = arguments.train_network.network.get_parameters()
        weights = {param.name: copy(param) for param in parameters if not param.name.endswith(STATE)}
        optimizer = arguments.train_network.optimizer
        self.out.update({f"state/{self.steps}/weight/{name}": array for name, array in weights.items()})
        for kind, prefix, moments in (
            ("moment", "adam_m.", optimizer.exp_avg),
            ("square", "adam_v.", optimizer.exp_avg_sq),
        ):
            for param in moments:
                self.out[f"state/{self.steps}/{kind}/{param.name.removeprefix(prefix)}"] = copy(param)
        if CountedBias.loads:
            self.out.update({f"load/{self.steps - 1}/{name}": load for name, load in CountedBias.loads[-1].items()})


def copy(parameter):
    """Return a copy of a parameter's values, because on CPU `asnumpy` returns a view that later steps would change."""
    return parameter.asnumpy().copy()


def forward(network, batch):
    """Return the logits of the compiled graph, and the outputs of all traced modules, computed in PyNative. The
    counters of the experts' load keep their values.
    """
    out = {}
    with counters_kept(network):
        network.set_train(False)
        out["logits/graph"] = network(*batch).asnumpy().copy()
        logits, traced = module_outputs(network, batch)
        network.set_train(True)
    traced = {f"trace/{name}": value for name, value in traced.items()}
    length = batch[0].shape[1]
    traced["trace/logits"] = logits.asnumpy().reshape(-1, length, logits.shape[-1])
    return {**out, **traced}


def enable(config, settings) -> None:
    """Add an `AlignRecorder` to the callbacks of `config`, and let the callback of the routers' biases record loads."""
    columns = list(config.train_dataset.input_columns)
    for callback in config.callbacks:
        if callback["type"] == "TopkBiasBalanceCallback":
            callback["type"] = "CountedBias"
    config.callbacks.insert(0, {"type": "AlignRecorder", "columns": columns, **settings})
