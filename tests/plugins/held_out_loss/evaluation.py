"""HeldOutLoss, driven step by step without a training: every evaluation comes to the same losses."""

from types import SimpleNamespace

from mindformers.core.callback.callback import MFLossMonitor

from plugins.held_out_loss.adapter import HeldOutLoss
from plugins.held_out_loss.plan import held_out_file


class Evaluated:
    """A part of a run that begins after `done` steps of it and evaluates every `every` steps."""

    def __init__(self, run_dir, done, every, names=None, held_out=(3.0,)):
        self.callback = object.__new__(HeldOutLoss)
        self.callback.every, self.callback.run_dir = every, run_dir
        self.callback.path, self.callback.last_step = held_out_file(run_dir), None
        self.callback.names, self.callback.corpus_weights = names, [1 / len(held_out)] * len(held_out)
        self.evaluated = []
        self.callback._losses = lambda step: self.evaluated.append(step) or list(held_out)
        losses = object.__new__(MFLossMonitor)
        losses.initial_step = self.done = done
        count = SimpleNamespace(asnumpy=lambda: [self.done + self.params.cur_step_num])  # the optimizer's
        network = SimpleNamespace(optimizer=SimpleNamespace(global_step=count), network=None)
        self.params = SimpleNamespace(cur_step_num=0, train_network=network, list_callback=[losses])
        self.callback.on_train_begin(self)

    def original_args(self):
        return self.params

    def step(self, number):
        """The end of step `number` of the run."""
        self.params.cur_step_num = number - self.done
        self.callback.on_train_step_end(self)

    def end(self):
        self.callback.on_train_end(self)
