"""This module computes in float32 the values that MindFormers rounds to 16 bits even in float32 models, for `tc3
accuracy equivalence`.

MindFormers rounds queries, keys and values of grouped-query attention to float16, and so their gradients
(docs/stock-differences.md), and Muon's momentum to bfloat16 (docs/muon.md), by more than losses of different layouts
may differ: if a gradient differs in its last bit, some of its elements are rounded the other way, and Newton-Schulz
makes these differences hundreds of times larger. A recipe names a callback (`auto_register:
unrounded.UnroundedAttention`, with `REGISTER_PATH` this folder).
"""

from __future__ import annotations

import sys

from mindformers.core.optim import muon
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore.common import dtype
from mindspore.train.callback import Callback

from plugins.cpu_backend.attention import compute_unrounded
from plugins.private_hooks import relies_on

float32 = bfloat16 = dtype.float32  # what muon.py names of MindSpore's types, as `UnroundedMuon` has it


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class UnroundedAttention(Callback):
    """An `UnroundedAttention` is a callback that makes attention compute in float32 before the first step, because
    MindSpore compiles the network in that step.
    """

    def on_train_begin(self, run_context):
        """Make the network's attention compute in float32 instead of rounding queries, keys and values to float16."""
        compute_unrounded(run_context.original_args().train_network)


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class UnroundedMuon(Callback):
    """An `UnroundedMuon` is a callback that makes Muon compute the orthogonal matrices in float32. The constructor
    changes Muon's types, because a resume compiles the network before the training begins.
    """

    def __init__(self):
        """Let Muon's module find its types in this module, as MindSpore takes only names of modules in a graph."""
        super().__init__()
        relies_on(muon._apply_muon_update, "ns_inputs = op_cast(gradient_fp32, mstype.bfloat16)")
        muon.mstype = sys.modules[__name__]
