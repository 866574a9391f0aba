"""This module records at each step the norm of a rank's own gradient of one weight, for `tc3 accuracy equivalence`.

The weight is a copy that no checkpoint holds: with an MTP layer, the last stage of a pipeline has a copy of the
embedding (docs/stock-differences.md). A recipe names the callback (`auto_register: own_gradient.OwnGradient`, with
`REGISTER_PATH` this folder); the training itself does not change.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_rank
from mindspore.train.callback import Callback

from plugins.step_record.plan import gradient_square
from tools.files.atomic import write_atomically


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class OwnGradient(Callback):
    """This callback records the norm of one weight's gradient at each step. The gradient g is computed from AdamW's
    first moment, m' = beta1 * m + (1 - beta1) * g, so it is the gradient after reduction and clipping.

    Args:
        weight: the name of the weight.
        run_dir: the run's folder; a rank that has the weight writes equivalence/gradient_rank_N.json, a list.
        beta1: the first beta of the optimizer.
    """

    def __init__(self, weight, run_dir, beta1, **kwargs):
        super().__init__()
        self.file = Path(run_dir) / "equivalence" / f"gradient_rank_{get_real_rank()}.json"
        self.name, self.beta1 = f"adam_m.{weight}", beta1
        self.before: np.ndarray | float = 0.0
        self.norms: list[float] = []

    def on_train_step_end(self, run_context):
        """Record the norm of the weight's gradient in this step."""
        for item in run_context.original_args().train_network.optimizer.get_parameters():
            if item.name == self.name:
                moment = np.array(item.asnumpy())  # a view of a buffer that the next step overwrites
                self.norms.append(gradient_square(moment, self.before, self.beta1) ** 0.5)
                self.before = moment

    def on_train_end(self, run_context):
        """Write the recorded norms to a file."""
        if self.norms:
            write_atomically(self.file, json.dumps(self.norms))
