"""Test only: on PYTHONPATH of a worker, kill it with SIGKILL half-way through writing a chosen checkpoint file, or in a
move of experts.

TC3_TEST_KILL is `rank:n`: the n-th safetensors file (1 is the first) that rank writes.
TC3_TEST_KILL_SEAL is `rank:n`: the n-th file that rank reads to seal it, when all of its save are written, and rank 0
has sealed its own.
TC3_TEST_KILL_MOVE is `rank:n`: before the n-th tensor that rank writes when experts move, all of a layer at hand.
TC3_TEST_KILL_COPIES is `rank:n`: before rank has the copies of experts that the n-th layer is given; a layer is given
some when training begins, and at each plan when its tensors are written.
TC3_TEST_SET_DATA: no kill; tensors of experts that move are written by `Parameter.set_data`, which is wrong.
TC3_TEST_DROP_COPIES: no kill; the gradients of copies are not added to those of their homes, which is wrong.
"""

import os
import signal
import sys
import threading
import time


def _arm():
    rank, number = map(int, os.environ["TC3_TEST_KILL"].split(":"))
    if int(os.environ.get("RANK_ID", 0)) != rank or os.environ.get("MS_ROLE") != "MS_WORKER":
        return
    while not hasattr(sys.modules.get("mindformers.checkpoint.checkpoint"), "save_metadata_json"):
        time.sleep(0.05)
    module = sys.modules["mindformers.checkpoint.checkpoint"]
    save, written = module.ms_save_checkpoint, []

    def save_or_die(obj, name, **kwargs):
        save(obj, name, **kwargs)
        written.append(name)
        if len(written) == number:
            path = name if name.endswith(".safetensors") else name + ".safetensors"
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    module.ms_save_checkpoint = save_or_die


def _arm_seal():
    rank, number = map(int, os.environ["TC3_TEST_KILL_SEAL"].split(":"))
    if int(os.environ.get("RANK_ID", 0)) != rank or os.environ.get("MS_ROLE") != "MS_WORKER":
        return
    while not hasattr(sys.modules.get("plugins.sealed_checkpoint.plan"), "step_of"):
        time.sleep(0.05)
    module = sys.modules["plugins.sealed_checkpoint.plan"]
    checksum, read = module.checksum, []

    def checksum_or_die(path):
        read.append(path)
        if len(read) == number:
            while not os.path.exists(os.path.join(os.path.dirname(path), "seal_rank_0.json")):
                time.sleep(0.05)  # rank 0 writes its seal without waiting for this rank
            os.kill(os.getpid(), signal.SIGKILL)
        return checksum(path)

    module.checksum = checksum_or_die


def _callback():
    while not hasattr(sys.modules.get("plugins.expert_balance.callback"), "assign"):
        time.sleep(0.05)
    return sys.modules["plugins.expert_balance.callback"]


def _set_data():
    module = _callback()
    from mindspore import Tensor

    module.assign = lambda parameter, value: parameter.set_data(Tensor(value, parameter.dtype))


def _arm_move():
    rank, number = map(int, os.environ["TC3_TEST_KILL_MOVE"].split(":"))
    if int(os.environ.get("RANK_ID", 0)) != rank or os.environ.get("MS_ROLE") != "MS_WORKER":
        return
    module = _callback()
    assign, written = module.assign, []

    def assign_or_die(parameter, value):
        written.append(parameter.name)
        if len(written) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        assign(parameter, value)

    module.assign = assign_or_die


def _arm_copies():
    rank, number = map(int, os.environ["TC3_TEST_KILL_COPIES"].split(":"))
    if int(os.environ.get("RANK_ID", 0)) != rank or os.environ.get("MS_ROLE") != "MS_WORKER":
        return
    module = _callback()
    take, given = module.take_copies, []

    def take_or_die(cell, slots, copies):
        given.append(cell)
        if len(given) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        take(cell, slots, copies)

    module.take_copies = take_or_die


def _drop_copies():
    while not hasattr(sys.modules.get("plugins.expert_balance.copied"), "CopiedRoutedExperts"):
        time.sleep(0.05)
    module = sys.modules["plugins.expert_balance.copied"]
    module.added_up = lambda gradient, table, *_: gradient[: len(gradient) // (table.each + table.spare) * table.each]


if "TC3_TEST_KILL" in os.environ:
    threading.Thread(target=_arm, daemon=True).start()
if "TC3_TEST_KILL_SEAL" in os.environ:
    threading.Thread(target=_arm_seal, daemon=True).start()
if "TC3_TEST_KILL_MOVE" in os.environ:
    threading.Thread(target=_arm_move, daemon=True).start()
if "TC3_TEST_KILL_COPIES" in os.environ:
    threading.Thread(target=_arm_copies, daemon=True).start()
if "TC3_TEST_DROP_COPIES" in os.environ and os.environ.get("MS_ROLE") == "MS_WORKER":
    threading.Thread(target=_drop_copies, daemon=True).start()
if "TC3_TEST_SET_DATA" in os.environ and os.environ.get("MS_ROLE") == "MS_WORKER":
    threading.Thread(target=_set_data, daemon=True).start()
