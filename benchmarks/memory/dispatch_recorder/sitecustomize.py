"""On the PYTHONPATH of a worker, this module records every exchange of routed tokens, and skews the routers; it is used
only by a benchmark.

TC3_BENCH_DISPATCH is a folder: rank N writes N.jsonl there, one line for each AlltoAllV that the step's graph runs: the
elements of a row (1: numbers of experts, not tokens), the bytes of the array that the kernel reads and of the one that
it fills, and the processor seconds of this process until then.
TC3_BENCH_BIAS is `experts:bias`: the routers' biases of the first experts when training begins.
"""

import functools
import json
import os
import sys
import threading
import time


def _module(name, attribute):
    """Return the imported module of that name; wait until the module has the attribute."""
    while not hasattr(sys.modules.get(name), attribute):
        time.sleep(0.01)
    return sys.modules[name]


def _record(folder):
    module = _module("plugins.semi_auto_cpu.exchange", "OPERATORS")
    exchange = module.OPERATORS["AlltoAllV"]
    file = open(os.path.join(folder, f"{os.environ['RANK_ID']}.jsonl"), "w", buffering=1)  # noqa: SIM115 - until the end

    @functools.wraps(exchange)
    def recorded(meeting, attrs, inputs, outputs):
        exchange(meeting, attrs, inputs, outputs)
        row, seconds = int(attrs.get("block_size", 1)), time.process_time()
        told = {"row": row, "read": inputs[0].nbytes, "filled": outputs[0].nbytes, "processor": seconds}
        file.write(json.dumps(told) + "\n")

    module.OPERATORS["AlltoAllV"] = recorded


def _skew(experts, bias):
    module = _module("plugins.expert_balance.callback", "assign")
    begin = module.ExpertBalance.on_train_begin

    def skewed(callback, run_context):
        begin(callback, run_context)
        for layer in callback.layers:
            value = layer.router.expert_bias.asnumpy().copy()
            value[:experts] = bias
            module.assign(layer.router.expert_bias, value)

    module.ExpertBalance.on_train_begin = skewed


if os.environ.get("MS_ROLE") == "MS_WORKER":
    if "TC3_BENCH_DISPATCH" in os.environ:
        threading.Thread(target=_record, args=(os.environ["TC3_BENCH_DISPATCH"],), daemon=True).start()
    if "TC3_BENCH_BIAS" in os.environ:
        count, value = os.environ["TC3_BENCH_BIAS"].split(":")
        threading.Thread(target=_skew, args=(int(count), float(value)), daemon=True).start()
