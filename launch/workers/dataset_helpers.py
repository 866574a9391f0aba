"""MindFormers compiles a C++ helper of its dataset by `make` inside site-packages; this module makes that work with any
interpreter.

MindFormers' Makefile calls the `python3` and `python3-config` on PATH, which need not belong to the Python that trains
(in a virtual environment there is no python3-config). Here make gets the output of both from environment variables
instead. The command `python -m launch.workers.dataset_helpers` compiles the helper after installation, so that no
training run has to compile it.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pybind11

from plugins.errors import ClusterError


def use_this_python() -> None:
    """Make MindFormers' Makefile use this Python interpreter, through environment variables of this process."""
    includes = (sysconfig.get_paths()["include"], pybind11.get_include())
    # make expands what follows a dollar sign, and passes the rest to a shell
    os.environ["CPPFLAGS"] = " ".join(shlex.quote(f"-I{folder}").replace("$", "$$") for folder in includes)
    os.environ["MAKEFLAGS"] = f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"


def build() -> None:
    """Compile MindFormers' C++ helper of its dataset, if the compiled file is not up to date.

    Raises:
        ClusterError: mindformers is not installed, or make or g++ fails (the compiler's words are in the message).
    """
    spec = importlib.util.find_spec("mindformers")  # finds the package without importing it
    if spec is None or spec.origin is None:
        raise ClusterError("mindformers is not installed in this Python; run launch/quickstart or tests/run once")
    folder = Path(spec.origin).parent / "dataset" / "blended_datasets"
    use_this_python()
    try:
        done = subprocess.run(["make", "-C", str(folder)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ClusterError("make is not installed; install it with: apt-get install make g++") from error
    if done.returncode:
        raise ClusterError(f"MindFormers' dataset helper does not compile:\n{done.stderr.strip()[-800:]}")


if __name__ == "__main__":
    build()
