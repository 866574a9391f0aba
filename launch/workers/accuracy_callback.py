"""This module runs msprobe's debugger around every training step, as a MindFormers callback, without changes to the
model.
"""

from __future__ import annotations

from pathlib import Path

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_rank
from mindspore.train.callback import Callback

from plugins.private_hooks import train_step
from tools.accuracy.dumps.read import WEIGHTS_FOLDER
from tools.accuracy.dumps.write import debugger, dump_weights

WITHOUT_WEIGHTS = ("L1", "L2")  # levels at which msprobe hooks no cell


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class AccuracyDump(Callback):
    """This callback starts msprobe's `PrecisionDebugger` before each step and stops it after the step.

    Args:
        run_dir: the folder below which the dump is written (`stepN/rankM/`).
        level, task: the settings `level` and `task` of msprobe.
    """

    def __init__(self, run_dir, level, task, **kwargs):
        super().__init__()
        self.run_dir, self.level, self.task = Path(run_dir), level, task
        self.debugger = debugger(self.run_dir, level, task, get_real_rank())
        self.steps = 0

    def on_train_step_begin(self, run_context):
        """Start msprobe's debugger on the network that the train step differentiates; the optimizer's cells are not
        dumped.
        """
        network = train_step(run_context.original_args()).network
        if not self.steps and self.level in WITHOUT_WEIGHTS:
            self._dump_weights(network)
        if self.level == "L2":
            self.debugger.start()
        else:
            self.debugger.start(model=network, rank_id=get_real_rank())

    def on_train_step_end(self, run_context):
        """Stop the debugger, which writes the files of this step."""
        self.debugger.stop()
        self.debugger.step()
        self.steps += 1

    def on_train_end(self, run_context):
        """Dump the weights after the last step."""
        self._dump_weights(train_step(run_context.original_args()).network)

    def _dump_weights(self, network):
        """Dump the present weights, from which the next step would start, as those of step number `steps`."""
        folder = self.run_dir / WEIGHTS_FOLDER if self.level in WITHOUT_WEIGHTS else self.run_dir
        dump_weights(network, folder / f"step{self.steps}" / f"rank{get_real_rank()}", self.level, self.task)


def enable(config, settings) -> None:
    """Add the callback to `config` (a MindFormerConfig); for dumps of msprobe's levels L0, L1 and mix, also switch to
    PyNative mode, which these levels need.
    """
    if settings["level"] != "L2":
        _switch_to_pynative()
    config.callbacks.append({"type": "AccuracyDump", "run_dir": config.output_dir, **settings})


def _switch_to_pynative() -> None:
    """Switch the recipe to PyNative mode, in which a dump is made; call this function after the CPU backend's check,
    which refuses PyNative mode because it is slow.
    """
    import mindspore as ms

    from plugins.cpu_backend.pynative import stand_ins
    from plugins.private_hooks import replace

    for hook in stand_ins():
        replace(*hook)
    ms.set_context(mode=ms.PYNATIVE_MODE)
