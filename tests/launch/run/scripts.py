"""Launch scripts for tests."""

from launch.run.script import Launch, launch_script

MINI = "recipes/mini/pretrain_dp2.yaml"


def ascend(**sizes):
    return {"use_parallel": True, "parallel_config": sizes}


def generate(recipe, hosts=None, **launch):
    return launch_script(Launch(**{"recipe": MINI, "run_dir": "output/x", **launch}), recipe, hosts)
