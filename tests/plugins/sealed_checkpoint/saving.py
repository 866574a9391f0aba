"""A monitor that saves, driven without a training."""

from types import SimpleNamespace

from mindspore import nn

from plugins.sealed_checkpoint import plan
from plugins.sealed_checkpoint.adapter import SealingCheckpointMonitor


class Run:
    """A `Run` gives the checkpoint monitor what MindSpore would give it, step after step."""

    def __init__(self, folder, monitor=SealingCheckpointMonitor, **settings):
        network = nn.Dense(3, 2)
        network = nn.TrainOneStepCell(network, nn.AdamWeightDecay(network.trainable_params()))
        self.params = SimpleNamespace(
            cur_step_num=0, cur_epoch_num=1, batch_num=100, network=network, train_network=network, net_outputs=None
        )
        self.folder = folder
        self.monitor = monitor(prefix="mini", directory=str(folder), use_legacy_format=False, **settings)
        self.params.list_callback = [self.monitor]

    def original_args(self):
        return self.params

    def step(self, number):
        self.params.cur_step_num = number
        self.monitor.on_train_step_begin(self)
        self.monitor.step_end(self)

    def end(self):
        self.monitor.on_train_end(self)

    def fault(self, step):
        return plan.fault(self.folder / f"iteration_{step:08d}")
