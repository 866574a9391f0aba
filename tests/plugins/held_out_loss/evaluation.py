"""HeldOutLoss, driven step by step without a training: every evaluation comes to a loss of 3."""

from types import SimpleNamespace

from mindformers.core.callback.callback import MFLossMonitor

from plugins.held_out_loss.adapter import HeldOutLoss
from plugins.held_out_loss.plan import held_out_file


class Evaluated:
    """A part of a run that begins after `done` steps of it and evaluates every `every` steps."""

    def __init__(self, run_dir, done, every):
        self.callback = object.__new__(HeldOutLoss)
        self.callback.every, self.callback.run_dir = every, run_dir
        self.callback.path, self.callback.last_step = held_out_file(run_dir), None
        self.evaluated = []
        self.callback._loss = lambda step: self.evaluated.append(step) or 3.0
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
