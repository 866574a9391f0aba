def test_the_installed_versions_still_hold_every_patched_line():
    from mindspore.communication import comm_func

    from plugins.cpu_backend import compat

    compat.after_context()
    from mindformers.checkpoint import sharded_tensor
    from mindformers.core.callback import callback

    for patched in (callback._get_separate_loss, sharded_tensor.get_strategy_metadata):
        assert patched.tc3_patch
    before = comm_func.barrier
    compat.before_mindformers(distributed=False)
    assert comm_func.barrier is before, "one process keeps MindSpore's own barrier"
