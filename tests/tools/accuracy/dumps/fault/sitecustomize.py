"""Test only: on PYTHONPATH of a worker, put one fault into a module when it is imported.

TC3_TEST_FAULT: `softmax`, the attention weights of the second layer scaled by 1.01; `decay`, AdamW's weight decay left
out.
"""

import importlib.abc
import importlib.util
import os
import sys

MODULES = {"softmax": "plugins.cpu_backend.attention", "decay": "mindformers.core.optim.adamw"}


class _Spoil(importlib.abc.MetaPathFinder):
    """Let the module be imported as it is, then change it."""

    def find_spec(self, name, path=None, target=None):
        fault = os.environ["TC3_TEST_FAULT"]
        if name != MODULES[fault]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            globals()[fault](module)

        spec.loader.exec_module = exec_module
        return spec


def softmax(module):
    build, built = module.CoreAttention.__init__, []

    def faulty(self, *args, **kwargs):
        build(self, *args, **kwargs)
        built.append(self)
        right = self.softmax
        if len(built) == 2:
            self.softmax = lambda scores: right(scores) * 1.01

    module.CoreAttention.__init__ = faulty


def decay(module):
    build = module.AdamW.__init__

    def faulty(self, params, **kwargs):
        build(self, [{**group, "weight_decay": 0.0} for group in params], **{**kwargs, "weight_decay": 0.0})

    module.AdamW.__init__ = faulty


if os.environ.get("TC3_TEST_FAULT") in MODULES:
    sys.meta_path.insert(0, _Spoil())
