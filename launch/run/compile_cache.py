"""This module makes MindSpore's compile cache safe: one folder for each key, digests of its files, and graphs that are
published completely or not at all.

The folder of all caches is `output/compile_cache` of the checkout, or `TC3_COMPILE_CACHE`; several nodes must share
this folder. The folder of a key (`cache_key`) has a folder `rank_N` for each rank, as MindSpore makes them, with a file
`SEAL` that holds the sha256 of each file. MindSpore itself reads and writes only a folder of this attempt: a verified
copy for all ranks, or an empty folder. The files of a rank are published by one rename, once steps have been trained
with them. So if a run is killed while MindSpore writes, or the disk is full, no other run loads these files.

The `KEPT` keys that were used last stay; the folders of other keys are removed when a new key is published.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from launch.run import cache_key
from launch.run.msrun import ROOT
from plugins.cpu_backend import host_functions
from plugins.errors import ClusterError, DataError, RecipeError
from plugins.sealed_checkpoint.plan import checksum
from tools.files.atomic import atomic_file
from tools.recipe.load import Recipe
from tools.recipe.view import View

FOLDER = "TC3_COMPILE_CACHE"  # names the folder of all caches
KEY = "TC3_COMPILE_CACHE_KEY"  # of a worker: this cache is ours
KEPT = 4
SEAL, PARTS, HOST_FUNCTIONS = "seal.json", "key.json", "host_functions"
OWN = ("MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH", "MS_DEV_FORCE_USE_COMPILE_CACHE")
OWN_KEYS = ("enable_compile_cache", "compile_cache_path")
MARKS = (b"PyExecute", b"PyInterpret", b"infer_func_id")  # in a graph: functions of the process that compiled it
VOTES, ANSWER, ALL_LOAD, ALL_COMPILE = "loads", "answer", "all load", "all compile"
_remove = partial(shutil.rmtree, ignore_errors=True)
AGREE, LOOK = 60.0, 0.2  # seconds until nodes that have not heard of all others compile; between looks


def refuse_own(recipe: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Refuse MindSpore's own compile cache, because a run with it may silently train the graph of another recipe.

    Raises:
        ClusterError: a variable turns it on, or says where it is.
        RecipeError: the recipe's `context` does.
    """
    instead = (
        "MindSpore's own cache does not compare recipes, so a run with this cache may silently train the graph of "
        "another recipe; remove this setting, and use tc3 train --compile-cache, which compares everything on which a "
        "graph depends"
    )
    named = [name for name in OWN if environ.get(name) and KEY not in environ]
    if named:
        raise ClusterError(f"{named[0]}={environ[named[0]]}: {instead}")
    context = recipe.get("context") or {}
    keys = [key for key in OWN_KEYS if context.get(key)]
    if keys:
        raise RecipeError(f"context.{keys[0]}: {context[keys[0]]}: {instead}")


def unfit(recipe: Recipe, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why another process could not load the graph of a recipe, or could not distinguish it from other graphs;
    return None if another process can do both.
    """
    view = View(recipe)
    if not view.megatron and not view.instruction_files:
        return "how long data of this loader is, and so the schedule in the graph, is not known to the key"
    if view.ramp.stages:
        return "plugins.batch_ramp compiles a graph for each stage, of which a resume begins with another one"
    if environ.get("REGISTER_PATH") or _has_key(recipe, "auto_register"):
        return "auto_register brings code that the key does not know"
    return None


def _has_key(value: Any, key: str) -> bool:
    """Return whether a mapping within `value` has `key`."""
    if isinstance(value, Mapping):
        return key in value or any(_has_key(each, key) for each in value.values())
    return isinstance(value, list | tuple) and any(_has_key(each, key) for each in value)


@dataclass
class CompileCache:
    """A `CompileCache` is the compile cache of one attempt on this node.

    `environment`: what its workers get (nothing: they compile without a cache). `said`: a line for the user, or "".
    """

    said: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    loaded: bool = False
    key: Path = Path()  # the key's folder
    own: Path = Path()  # of this attempt
    ranks: Sequence[int] = ()
    metrics: Path = Path()
    parts: Mapping[str, Any] = field(default_factory=dict)  # that the key is of
    _kept: set[int] = field(default_factory=set)

    def keep(self) -> None:
        """Publish the graphs that a rank of this node has compiled, once a later step has been trained with them; call
        this from time to time.

        Each call publishes one rank, so that the caller can go on with its other work. The method never raises an
        error: if a graph cannot be kept, the next start compiles it again.
        """
        rank = next((each for each in self.ranks if self.environment and self._is_due(each)), None)
        if rank is not None:
            self._kept.add(rank)
            self._publish(rank)

    def close(self, ended_well: bool) -> None:
        """Publish the graphs that are not published yet, after the workers have ended, and remove the attempt's own
        folder. The graphs of a failed attempt are published only if they were in use, so that the next attempt can
        load them.
        """
        if self.environment:
            for rank in self.ranks:
                if ended_well or self._is_due(rank):
                    self._publish(rank)
                _remove(self.own / f"rank_{rank}")
            with contextlib.suppress(OSError):
                self.own.rmdir()  # another node's ranks may be in it

    def _publish(self, rank: int) -> None:
        with contextlib.suppress(OSError, DataError):
            _publish(self.own / f"rank_{rank}", self.key, rank, self.parts)

    def _is_due(self, rank: int) -> bool:
        """Return whether a graph can be published: it is not published yet, and all of it was written before the last
        step began.
        """
        if rank in self._kept:
            return False
        steps = self.metrics / f"rank_{rank}.jsonl"
        try:
            done = steps.stat().st_mtime
            last = json.loads(steps.read_bytes().rstrip().rpartition(b"\n")[2])
            return done - last["seconds"] > max(file.stat().st_mtime for file in _files(self.own / f"rank_{rank}"))
        except (OSError, ValueError, KeyError):
            return False


def prepare(
    recipe: Recipe,
    run_dir: Path,
    attempt: Path,
    world: int,
    ranks: Sequence[int],
    environ: Mapping[str, str] = os.environ,
    over: Callable[[], object] = lambda: None,
) -> CompileCache:
    """Return the compile cache of an attempt that starts now on this node; if there are several nodes, either all of
    them load cached graphs or none does.

    Args:
        recipe: flat and effective; `checkpoint.load_path` is what the attempt loads.
        attempt: the attempt's folder; MindSpore reads and writes `attempt/compile_cache`.
        world: the number of workers of all nodes; `ranks`: the ranks that this node starts.
        over: whether the attempt has ended, while this node waits for what the others can load.

    The function never raises an error: if the cache cannot be used, `said` says why, and the workers compile without
    it.
    """
    cache = _prepare(recipe, run_dir, attempt, world, ranks, environ)
    can = cache.key.name if cache.loaded else ""
    if len(ranks) < world and not _all_load(attempt / VOTES, world, ranks, can, over) and cache.loaded:
        _empty(cache.own, ranks)
        said = f"compile cache: another node cannot load its part, so that all compile; writes {cache.key}"
        return replace(cache, said=said, loaded=False)
    return cache


def _prepare(
    recipe: Recipe, run_dir: Path, attempt: Path, world: int, ranks: Sequence[int], environ: Mapping[str, str]
) -> CompileCache:
    """Return the result of `prepare` for this node, without asking the other nodes."""
    if why := unfit(recipe, environ):
        return CompileCache(f"no compile cache: {why}")
    own = attempt / "compile_cache"
    try:
        found = cache_key.parts(recipe, world, len(ranks), environ)
        name = cache_key.key_of(found)
        key = root(environ) / name
        if (key / HOST_FUNCTIONS).exists():
            return CompileCache("no compile cache: the graph calls functions of Python, as an earlier run has found")
        for rank in ranks:
            for left in run_dir.glob(f"attempts/*/compile_cache/rank_{rank}"):  # of attempts that were killed
                _remove(left)
        _empty(own, ranks)
        loaded = _load(key, own, world, ranks)
        if loaded:
            os.utime(key)  # those used last stay
    except (OSError, DataError) as error:
        return CompileCache(f"no compile cache: {error}")
    said = f"compile cache: loads the graph of an earlier start ({key})" if loaded else f"compile cache: writes {key}"
    environment = {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(own), KEY: name}
    return CompileCache(said, environment, loaded, key, own, ranks, run_dir / "metrics", found)


def root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that holds one compile cache for each key."""
    return Path(environ.get(FOLDER) or ROOT / "output" / "compile_cache").absolute()


def _load(key: Path, own: Path, world: int, ranks: Sequence[int]) -> bool:
    """Copy the graphs of this node's ranks from the cache, and return True; copy nothing and return False unless the
    graphs of all ranks of the run are there and those of this node are undamaged.

    If some ranks loaded and others compiled, they might not run the same operations in the same order.
    """
    if not all((key / f"rank_{rank}" / SEAL).exists() for rank in range(world)):
        return False
    for rank in ranks:
        if not _copy(key / f"rank_{rank}", own / f"rank_{rank}"):
            _remove(own / f"rank_{rank}")  # its own disk may be full, which says nothing about the cache
            if not _is_whole(key / f"rank_{rank}"):
                _remove(key / f"rank_{rank}")
            _empty(own, ranks)
            return False
    return True


def _empty(own: Path, ranks: Sequence[int]) -> None:
    """Remove the files that were copied for these ranks, and make empty folders into which the ranks write."""
    for rank in ranks:
        _remove(own / f"rank_{rank}")
        (own / f"rank_{rank}").mkdir(parents=True, exist_ok=True)


def _all_load(folder: Path, world: int, ranks: Sequence[int], can: str, over: Callable[[], object]) -> bool:
    """Return whether all nodes of an attempt load their graphs from one key; each node gets the same answer.

    Each node writes the key that it `can` load ("": none) into `folder`. The first node answers when all have written;
    any node answers that cannot load, or that has waited for `AGREE` seconds. The first published answer is valid.
    """
    vote, answer = folder / f"rank_{ranks[0]}", folder / ANSWER
    until = time.monotonic() + AGREE
    while not over() and time.monotonic() < until + AGREE:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _write(vote, can)  # each time anew: an NFS client then looks again for names that were missing
            if answer.exists():
                return answer.read_text(encoding="utf-8") == ALL_LOAD
            votes = _votes(folder, range(0, world, len(ranks))) if ranks[0] == 0 else None
            if not can or votes or time.monotonic() > until:
                part = _write(vote.with_name(f"{vote.name}.{ANSWER}"), ALL_LOAD if votes == {can} else ALL_COMPILE)
                with contextlib.suppress(FileExistsError):
                    os.link(part, answer)
                part.unlink()
                continue
        time.sleep(LOOK)
    return False


def _votes(folder: Path, firsts: Sequence[int]) -> set[str] | None:
    """Return the keys that the nodes with these first ranks can load; None while a node has not reported its keys."""
    try:
        return {(folder / f"rank_{first}").read_text(encoding="utf-8") for first in firsts}
    except FileNotFoundError:
        return None


def _write(path: Path, text: str) -> Path:
    """Write a file completely, in place of an existing one."""
    part = path.with_name(f".{path.name}")
    part.write_text(text, encoding="utf-8")
    return part.replace(path)


def _copy(source: Path, target: Path) -> bool:
    """Copy the files of a sealed folder; return False if a file differs from its recorded checksum."""
    sealed = _sealed(source)
    try:
        for name, digest in sealed.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
            if checksum(target / name) != digest:
                return False
        return bool(sealed)
    except (OSError, AttributeError):
        return False


def _is_whole(source: Path) -> bool:
    """Return whether the files of a sealed folder have their recorded checksums."""
    sealed = _sealed(source)
    try:
        return bool(sealed) and all(checksum(source / name) == digest for name, digest in sealed.items())
    except (OSError, AttributeError):
        return False


def _publish(own: Path, key: Path, rank: int, found: Mapping[str, Any]) -> None:
    """Store the files that MindSpore has written for a rank in the key's folder, with a seal (recorded checksums),
    completely or not at all.

    Raises:
        OSError, DataError: the disk is full, or does not let us.
    """
    files = _files(own)
    key.mkdir(parents=True, exist_ok=True)
    if not (key / PARTS).exists():
        with atomic_file(key / PARTS) as part:
            part.write_text(json.dumps(found, sort_keys=True, indent=1, default=str), encoding="utf-8")
    graphs = (file.read_bytes() for file in files if file.suffix == ".mindir")
    # not all functions of Python that a graph calls may have names that another process knows, too
    if any(any(mark in graph for mark in MARKS) or host_functions.names_in(graph) is None for graph in graphs):
        (key / HOST_FUNCTIONS).touch()
        return
    sealed = {str(file.relative_to(own)): checksum(file) for file in files}
    target, part = key / f"rank_{rank}", key / f".{socket.gethostname()}.{os.getpid()}.rank_{rank}"
    if not sealed or _sealed(target) == sealed:
        return
    try:
        for name in sealed:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(own / name, part / name)
        (part / SEAL).write_text(json.dumps(sealed, indent=1), encoding="utf-8")
        _remove(target)  # of another attempt, or broken: for a moment there is none, and one that starts now compiles
        part.rename(target)
    finally:
        _remove(part)
    _remove_old(key)


def _sealed(folder: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / SEAL).read_text(encoding="utf-8"))
    return None


def _remove_old(used: Path) -> None:
    """Remove all keys except the `KEPT` that were used last and the key `used`: if a clock was set back, other keys may
    have later times. Folders that are not keys are not removed.
    """
    keys = [path.parent for path in used.parent.glob(f"*/{PARTS}") if path.parent.name != used.name]
    for key in sorted(keys, key=lambda path: path.stat().st_mtime)[: -(KEPT - 1)]:
        _remove(key)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
