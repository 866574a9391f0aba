"""This module inserts faults of a layout, which leave no collective out, into a sharded run on CPU by a callback; see
executed_faults.py.

A recipe names it (`auto_register: layout_fault.LayoutFault`, with `REGISTER_PATH` this folder). MindFormers builds
callbacks before the graph is compiled, and what a callback replaces in this process is compiled.
"""

from __future__ import annotations

from mindformers.parallel_core.training_graph.base_models.common.embeddings import rotary_pos_embedding
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindspore.ops._grad_experimental.grad_base import bprop_getters
from mindspore.ops.operations.comm_ops import _VirtualDiv
from mindspore.train.callback import Callback


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class LayoutFault(Callback):
    """This callback inserts a fault into the graph that is compiled after the callback was made.

    Args:
        kind: "undivided_loss": the gradient of the loss is not divided by the ranks that hold the same loss.
            "first_positions": each rank rotates its part of the sequence by the positions of the first rank's part.
        part: number of tokens of a rank's part of the sequence.
    """

    def __init__(self, kind, part=0, **kwargs):
        super().__init__()
        {"undivided_loss": _leave_loss_undivided, "first_positions": lambda: _rotate_as_the_first(part)}[kind]()


def _leave_loss_undivided():
    """Remove the division of the loss's gradient. MindSpore puts a _VirtualDiv in front of each loss, whose backward
    pass divides (`grad_comm_ops.py`).
    """

    @bprop_getters.register(_VirtualDiv)
    def undivided(self):
        def bprop(x, out, dout):
            return (dout,)

        return bprop


def _rotate_as_the_first(part):
    """Let the rotary positions of all ranks begin at one position, although each process compiles its own slice of the
    table of angles.

    The first rank's is not 0, with which MindSpore would leave the addition out, and other collectives with it:
    attention knows the difference of positions only.
    """
    table = rotary_pos_embedding.RotaryEmbedding
    table.right = table.construct
    table.ahead = (get_real_group_size() - get_real_rank()) * part

    def construct(self, max_seq_len, offset=0, position_ids=None):
        return self.right(max_seq_len, offset + self.ahead, position_ids)

    table.construct = construct
