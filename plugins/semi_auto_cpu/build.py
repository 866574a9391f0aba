"""This module compiles the C++ sources in a plugin's folder `csrc/` against the headers of MindSpore's wheel. The
command `python -m plugins.semi_auto_cpu.build` starts the compilation.

The library is stored in the user's cache folder under a name that contains a digest of everything on which it depends:
the installed MindSpore, the sources and the flags. Therefore another version of MindSpore never loads a library that
was made for this one.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from plugins.errors import ClusterError

SOURCES = Path(__file__).resolve().parent / "csrc"
SHIM = SOURCES / "shim"
# the wheel is built with the older ABI of std::string, and with its own hash table instead of the standard one
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-D_GLIBCXX_USE_CXX11_ABI=0", "-DENABLE_FAST_HASH_TABLE=1")
# relative to the folder of the installed package
INCLUDES = (
    ".",
    "include",
    "include/third_party",
    "include/third_party/robin_hood_hashing",
    "include/third_party/securec/include",
    "include/mindspore",
    "include/mindspore/include",
    "include/mindspore/core/include",
    "include/mindspore/core/mindrt",
    "include/mindspore/core/mindrt/include",
    "include/mindspore/ops",
    "include/mindspore/ops/include",
    "include/mindspore/ops/kernel/include",
    "include/mindspore/ccsrc",
    "include/mindspore/ccsrc/include",
)
LIBRARIES = ("core", "common", "hardware_abstract", "backend_common", "ops_cpu", "ops_host")
HEADER = "include/mindspore/ops/kernel/cpu/cpu_kernel.h"
WITHOUT = "until then recipes with `device_target: CPU` and `parallel_mode: semi_auto_parallel` cannot run here"


def ensure(sources: Path = SOURCES, without: str = WITHOUT) -> Path:
    """Return the path of the plugin's library; if the library does not exist, one of the processes that call this
    function compiles it.

    Args:
        sources: the folder `csrc` of the plugin whose library is built; by default this plugin's.
        without: a description of what is impossible until it compiles, for messages.

    Raises:
        ClusterError: MindSpore, its headers or g++ are missing, g++ fails, or the cache folder cannot be written.
    """
    package = mindspore_folder()
    path = cache_folder(sources) / f"{key(package, sources)}.so"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(package, path, sources, without)
    except OSError as error:
        raise ClusterError(
            f"the library of {_owner(sources)} cannot be stored in {path.parent}: {error}; set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from None
    return path


def cache_folder(sources: Path = SOURCES) -> Path:
    """Return the folder in which the compiled libraries of a plugin are kept.

    Raises:
        ClusterError: the user has no home folder, and no variable names another folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tc3" / _owner(sources)
    except RuntimeError:
        raise ClusterError(
            "this user has no home folder in which compiled libraries could be stored; set HOME or XDG_CACHE_HOME to "
            "a folder"
        ) from None


def _owner(sources: Path) -> str:
    return sources.parent.name


def mindspore_folder() -> Path:
    """Return the folder of the installed MindSpore, found without importing it.

    Raises:
        ClusterError: MindSpore is not installed.
    """
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        raise ClusterError("mindspore is not installed in this Python; run launch/quickstart or tests/run once")
    return Path(spec.origin).parent


def key(package: Path, sources: Path = SOURCES) -> str:
    """Return a digest (16 hexadecimal digits) of everything on which a compiled library depends.

    Args:
        package: folder of the installed MindSpore; the library finds MindSpore's own libraries there.
    """
    wheel = metadata.distribution("mindspore")
    # RECORD holds the digest of every file of the wheel
    parts = [str(package), wheel.version, wheel.read_text("RECORD") or "", *FLAGS, *INCLUDES, *LIBRARIES]
    digest = hashlib.sha256("\0".join(parts).encode())
    for folder in (sources,) if sources == SOURCES else (sources, SHIM):  # every plugin compiles with these headers
        for source in sorted(folder.rglob("*.*")):
            digest.update(source.relative_to(folder).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(package: Path, path: Path, sources: Path, without: str) -> None:
    owner = _owner(sources)
    if not (package / HEADER).is_file():
        raise ClusterError(
            f"{package} has no {HEADER}: {owner} compiles a library against MindSpore's headers, which this "
            f"MindSpore does not contain; install the wheel in constraints.txt; {without}"
        )
    print(f"{owner}: compiling its C++ library (once, about 20 s)", file=sys.stderr, flush=True)
    # all sources as one text, so that MindSpore's headers, which take most of the time, are read once
    text = "".join(f'#include "{source.name}"\n' for source in sorted(sources.glob("*.cc")))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        try:
            done = subprocess.run(
                _command(package, part, sources), input=text, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise ClusterError(
                f"g++ is not installed, but {owner} needs it to compile its library: apt-get install g++; {without}"
            ) from None
        if done.returncode:
            version = metadata.version("mindspore")
            raise ClusterError(
                f"the C++ library of {owner} does not compile against MindSpore {version} in {package}; install "
                f"the version in constraints.txt, or see docs/upgrade-mindformers.md; {without}. The compiler says:\n"
                f"{_last_lines(done.stderr)}"
            )
        part.replace(path)


def _command(package: Path, out: Path, sources: Path) -> list[str]:
    includes = [f"-I{SHIM}", f"-I{sources}", *(f"-I{package / folder}" for folder in INCLUDES)]
    libraries = [f"-lmindspore_{name}" for name in LIBRARIES]
    found = [f"{flag}{package / folder}" for folder in ("lib", "lib/plugin") for flag in ("-L", "-Wl,-rpath,")]
    return ["g++", *FLAGS, *includes, "-x", "c++", "-", "-o", str(out), *found, *libraries]


def _last_lines(words: str) -> str:
    errors = [line for line in words.splitlines() if "error" in line or "cannot find" in line]
    return "\n".join((errors or words.splitlines())[-12:])[-2000:]


if __name__ == "__main__":
    try:
        ensure()
    except ClusterError as problem:
        sys.exit(f"error: {problem}")
