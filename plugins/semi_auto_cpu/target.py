"""Which device MindSpore compiles for, changed underneath it: its front end shards a graph for Ascend only."""

from __future__ import annotations


def target_ascend() -> None:
    """Compile for Ascend from here on; eager operators crash until `target_cpu`.

    `set_device_target_inner` would look for the Ascend plugin, and a world of another size than the (absent)
    communication library's would be refused (`GetCommInfo` in step_parallel_utils.cc).
    """
    from mindspore._c_expression import AutoParallelContext, DeviceManagerConf

    AutoParallelContext.get_instance().set_hccl_test_avaible(True)
    DeviceManagerConf.get_instance().set_device("Ascend", 0, True)


def target_cpu() -> None:
    """Back to CPU."""
    from mindspore._c_expression import AutoParallelContext, DeviceManagerConf

    DeviceManagerConf.get_instance().set_device("CPU", 0, True)
    AutoParallelContext.get_instance().set_hccl_test_avaible(False)
