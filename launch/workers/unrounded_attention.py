"""This module computes grouped-query attention in float32, for `tc3 accuracy equivalence`.

MindFormers rounds queries, keys and values of float32 models to float16, and so their gradients
(docs/stock-differences.md), by more than layouts may differ. A recipe names the callback (`auto_register:
unrounded_attention.UnroundedAttention`, with `REGISTER_PATH` this folder).
"""

from __future__ import annotations

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore.train.callback import Callback

from plugins.cpu_backend.attention import compute_unrounded


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class UnroundedAttention(Callback):
    """This callback lets attention compute in float32 before the first step, because MindSpore compiles the network in
    that step.
    """

    def on_train_begin(self, run_context):
        """Let the network's attention compute in float32 instead of rounding queries, keys and values to float16."""
        compute_unrounded(run_context.original_args().train_network)
