"""This module measures the loss on held-out data, such as the corpus or the conversations that `tc3 data` with
`--held-out` writes to a separate file.

MindFormers' own evaluation runs the network's prediction graph against metrics; this plugin computes the training loss,
on the same batches every time, so that a fall of the loss measures fairly what the model has learned. If there are
several corpora, each batch holds samples of only one corpus, so that the loss of each corpus is known. The evaluation
works under every parallel layout:

* If a step is one batch (data, tensor, context and expert parallelism), the network runs only forward.
* If a step has micro-batches (a pipeline, accumulated gradients), the compiled train step runs with its update switched
  off (`SwitchedStep`). MindSpore 2.9.0 cannot compile a forward-only graph of a pipeline that computes the training
  loss. In this case an evaluation costs about as much time as three forward passes.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import islice

import numpy as np
from mindformers.dataset import causal_language_model_dataset as stock_dataset
from mindformers.dataset.base_dataset import BaseDataset
from mindformers.dataset.dataloader.build_dataloader import build_dataset_loader
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindformers.utils.parameter_register import parameter_register
from mindformers.wrapper.wrapper import MFPipelineWithLossScaleCell
from mindspore import Parameter, Tensor, nn, ops
from mindspore.train.callback import Callback

from plugins.all_ranks import sum_over_ranks
from plugins.batch_ramp.plan import ramp_of
from plugins.held_out_loss.plan import (
    Batches,
    check,
    check_files,
    check_step,
    counted,
    due,
    held_out_file,
    held_out_loader,
    of_instructions,
    weigh,
    whole_batches,
)
from plugins.lines import Span, append_line, note
from plugins.lora.plan import frozen
from plugins.private_hooks import relies_on, steps_before, train_step

# the step without an update: `overflow` is what keeps it from updating, and `lm_loss` is where it leaves its loss
relies_on(MFPipelineWithLossScaleCell, "overflow = self.process_loss_scale(cond)")
relies_on(MFPipelineWithLossScaleCell, "F.assign_add(self.lm_loss_parameter, lm_loss)")
# training joins the compressed masks of a micro-batch by this function, and so does an evaluation
relies_on(stock_dataset.asl_batch_wrapper, "per_seq = actual_seq_len[seq_idx] + offset")
_LOSS = "lm_loss"


class SwitchedStep(MFPipelineWithLossScaleCell):
    """This is MindFormers' train step for micro-batches with an additional switch; when the switch is set, the step
    updates neither weights nor optimizer.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.keep = Parameter(Tensor(False), name="keep_weights", requires_grad=False, parallel_optimizer=False)

    def process_loss_scale(self, overflow):
        """Run MindFormers' step; if the step must not change the weights, it is skipped like a step whose gradients
        overflow.
        """
        return ops.logical_or(super().process_loss_scale(overflow), self.keep)


class Forward(nn.Cell):
    """This cell wraps the network for the evaluation, so that MindSpore compiles the wrapper and not the network
    itself.

    When MindSpore compiles a cell, it records the layouts of the weights in this cell. When MindSpore saves a
    checkpoint, it looks for these layouts in the network; after a compilation of the network itself for the evaluation,
    it would write whole weights instead of a rank's slices.
    """

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        """Return the outputs of the wrapped network for these inputs."""
        return self.network(*inputs)


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class HeldOutLoss(Callback):
    """This callback evaluates the held-out loss before the first step, after every `every` steps of the whole run (see
    `plan.due`), and after the last step.

    Args:
        data_loaders: a `train_dataset.data_loader` section for each held-back corpus, whose whole global batches are
            read.
        names: the names of the corpora, under which their losses are recorded; None for one corpus without a name.
        columns: `train_dataset.input_columns`.
        batches: the distribution of a step's samples over the ranks.
        every: the number of steps between evaluations.
        run_dir: the run's folder.
        samples: the number of samples to read from each corpus; None for all samples.
        ramped: whether `plugins.batch_ramp` prepares the network for another number of samples than an evaluation has.
    """

    ramped = False

    def __init__(self, data_loaders, names, columns, batches, every, run_dir, samples=None, ramped=False, **kwargs):
        super().__init__()
        self.ramped = ramped
        self.every, self.run_dir, self.names = every, run_dir, names
        self.path = held_out_file(run_dir)
        self.micro, ranks = batches.micro, get_real_group_size()
        self.share = batches.share_of(get_real_rank(), ranks)
        self.corpora = [self._read(loader, columns, batches, samples) for loader in data_loaders]
        tokens = [
            [float(counted(dict(zip(columns, batch, strict=True)))) for batch in corpus] for corpus in self.corpora
        ]
        if ranks > 1:
            tokens = [[sum_over_ranks(each) for each in corpus] for corpus in tokens]
        self.weights, self.corpus_weights = weigh(tokens)
        self.last_step = None

    def _read(self, data_loader, columns, batches, samples):
        shard, shards = BaseDataset._generate_shard_info()
        loader = build_dataset_loader(
            data_loader, default_args={"column_names": columns, "num_shards": shards, "shard_id": shard}
        )
        # a shard is as long as the longest, and repeats samples for that
        whole = whole_batches(samples, loader.source_len, batches.samples)
        own = batches.samples // (shards or 1)  # without shards each rank reads the whole step
        rows = loader.batch(own, drop_remainder=True).create_tuple_iterator(num_epochs=1, output_numpy=True)
        read = [tuple(np.array(column) for column in batch) for batch in islice(rows, whole)]
        if not stock_dataset._use_compressed_eod_mask(data_loader):
            return read
        # attention sees the samples of a micro-batch as one sequence, so the ends of documents count through them
        joined = (stock_dataset.asl_batch_wrapper(*batch, None, micro_batch_num=self.micro) for batch in read)
        return [(*columns, np.stack(ends)) for *columns, ends in joined]

    def on_train_begin(self, run_context):
        """Evaluate the held-out loss before the first step."""
        params = run_context.original_args()
        self.forward = Forward(train_step(params).network).set_train()
        self.done = steps_before(params)
        self._record(params)

    def on_train_step_end(self, run_context):
        """Evaluate the held-out loss if an evaluation is due after this step."""
        params = run_context.original_args()
        if due(self.done + params.cur_step_num, self.every):
            self._record(params)

    def on_train_end(self, run_context):
        """Evaluate the held-out loss after the last step."""
        self._record(run_context.original_args())

    def _record(self, params):
        step = self.done + params.cur_step_num
        if step == self.last_step:
            return
        self.last_step = step
        began = time.time()
        losses = self._losses(train_step(params))
        record = {"step": step, "held_out_loss": float(np.dot(self.corpus_weights, losses))}
        if self.names:
            record["corpora"] = dict(zip(self.names, losses, strict=True))
        if get_real_rank() == 0:
            append_line(self.path, record)
            note(self.run_dir, Span("evaluation", step, began, time.time()))

    def _losses(self, step):
        """Return the mean language-model loss over the tokens of each corpus's batches; it is the same on every rank.

        The forward pass of training counts the experts' load, and a whole step more; these are put back. What a pass
        does not change, such as where experts live, is not written; weights that plugins.lora freezes are not even
        read.
        """
        switched = isinstance(step, SwitchedStep)
        kept = [param for param in step.network.get_parameters() if not (param.requires_grad or param.name in frozen)]
        if switched:
            kept += parameter_register.values()
            if step.loss_scaling_manager is not None:
                kept += [step.scale_sense, *step.loss_scaling_manager.get_parameters()]
            ops.assign(step.keep, Tensor(True))
        before = [np.array(param.asnumpy()) for param in kept]
        evaluate = self._of_step if switched else self._of_network
        with _prepared(step.network, self.corpora) if self.ramped else nullcontext():
            losses = [[evaluate(step, tuple(map(Tensor, batch))) for batch in corpus] for corpus in self.corpora]
        if switched:
            ops.assign(step.keep, Tensor(False))
        for param, value in zip(kept, before, strict=True):
            if not np.array_equal(param.asnumpy(), value):
                ops.assign(param, Tensor(value))
        means = zip(self.weights, losses, strict=True)
        own = [float(np.dot(weights, each)) * self.share if self.share else 0.0 for weights, each in means]
        return [sum_over_ranks(each) for each in own] if get_real_group_size() > 1 else own

    def _of_network(self, step, batch):
        loss, tokens, *_ = self.forward(*batch)
        return _number(loss) / (_number(tokens) if step.calculate_per_token_loss else self.micro)

    def _of_step(self, step, batch):
        """Return the mean loss of a step, for which MindFormers adds up the losses of the micro-batches, or divides
        their sum by all their tokens.
        """
        parameter_register.clear(_LOSS)
        step(*batch)
        return _number(parameter_register.get(_LOSS)) / (1 if step.calculate_per_token_loss else self.micro)


def _prepared(network, corpora):
    """Return a context in which the network expects as many samples as the batches of the corpora have."""
    from plugins.cpu_backend.model import of_rows

    return of_rows(network, len(corpora[0][0][0]))


def _number(tensor):
    return float(tensor.asnumpy().reshape(-1)[0])


def enable(config, settings) -> None:
    """Add the callback that evaluates the held-out loss to `config` (a MindFormerConfig).

    Args:
        settings: `data_path`, the prefix of a Megatron .bin/.idx, a list of several, or a file of HFDataLoader's;
            `samples`, the number of samples of `seq_length` tokens to read from each (by default those of one step, and
            for a file of HFDataLoader's all); `every`, in steps.

    Raises:
        RecipeError: a setting is unknown or impossible, or the train step does not return the loss of the language
            model.
        DataError: the corpus does not exist.
    """
    loader = config.train_dataset.data_loader
    batches = Batches.of(config)
    instructions = of_instructions(loader)
    ours = check(settings, batches.samples, instructions)
    samples = ours.samples or (None if instructions else batches.samples)
    check_files(config)
    check_step(config)
    if batches.micro > 1:
        kind = MindFormerModuleType.WRAPPER
        MindFormerRegister.register_cls(SwitchedStep, kind, alias="MFPipelineWithLossScaleCell")
    config.callbacks.append({
        "type": "HeldOutLoss",
        "data_loaders": [held_out_loader(loader, path, samples) for path in ours.paths],
        "names": ours.names,
        "columns": config.train_dataset.input_columns,
        "batches": batches,
        "every": ours.every,
        "run_dir": config.output_dir,
        "samples": samples,
        "ramped": bool(ramp_of(config, batches.samples).stages),
    })  # fmt: skip
