"""This module compiles the jobs of a dry run's plan, each job in a separate process, and stores the results under a
digest of the recipe, the rank, the code and the versions.

The number of processes at a time depends on cores and free memory, and no process outlives its parent. Each combination
of recipe, rank, code and versions is compiled once. If MindSpore or MindFormers refuses a recipe, this error is a
result, too: `diagnose` finds the key of the recipe that caused the error message.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console

from plugins.errors import ClusterError, DataError
from tools.check.arithmetic import refused_degree
from tools.dryrun.plan import Job, Plan
from tools.estimate.from_recipe import LEVEL
from tools.files.atomic import atomic_file
from tools.hardware.units import GIB
from tools.process.children import HUGE_PAGES, kill, terminate_as_interrupt
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

ROOT = Path(__file__).resolve().parents[2]
# what a result depends on: not how it is put together and shown
_CODE = (
    *("plugins", "launch/workers/dryrun_rank.py", "tools/recipe/view.py", "tools/check/arithmetic.py"),
    "tools/schema/converter.py",
    *("tools/dryrun/rank.py", "tools/dryrun/virtual_cluster.py", "tools/dryrun/memory.py"),
    *("tools/dryrun/graph_text.py", "tools/dryrun/collectives.py", "tools/dryrun/activations.py"),
    *("tools/dryrun/gradients.py", "tools/dryrun/scale.py"),
    "tools/estimate/memory/training_graph.py",
)
_PACKAGES = ("mindspore", "mindformers")
WORKER = "launch.workers.dryrun_rank"
_NEEDS = 6 * GIB  # of one compile: the largest that was seen at full depth, and some room
_POLL = 0.2  # seconds
_TOLD = 30.0  # seconds after which a compile that still runs is told of

Progress = Callable[[Job, str, float, dict[str, Any] | None], None]  # job, what is new, seconds, result


def compile_all(plan: Plan, at_once: int | None, use_cache: bool, texts: bool = False) -> list[dict[str, Any]]:
    """Run all compiles of a dry run's plan, and return their results in order. A compile whose result is in the cache
    is not run again. If `texts` is True, also store the text of each final graph (see `text_of`).

    Nothing is compiled if the degrees make a communication group that MindSpore refuses on a host without an NPU: the
    result of the first job says so.
    """
    if not plan.jobs:  # where a rank has no neighbours, a proof compiles none
        return []
    first = plan.jobs[0]
    if _of_group(first.recipe):
        return [{"rank": first.rank, "stage": first.stage, "error": {"type": "RuntimeError", "message": _NOT_TRIED}}]
    known = {
        place: {**found, "cached": True}
        for place, job in enumerate(plan.jobs)
        if use_cache and (found := kept_result(job)) and ("error" in found or not texts or _is_whole(text_of(job)))
    }
    missing = [place for place in range(len(plan.jobs)) if place not in known]
    try:
        results = _compile([plan.jobs[place] for place in missing], at_once, texts)
    except KeyboardInterrupt:
        click.echo("interrupted; the compiles that were over are kept", err=True)
        sys.exit(130)
    both = known | dict(zip(missing, results, strict=False))  # after a refusal some places have none
    return [both[place] for place in sorted(both)]


def _compile(jobs: Sequence[Job], at_once: int | None, texts: bool = False) -> list[dict[str, Any]]:
    """Compile with a progress bar on a terminal; each result is stored as soon as its compile ends."""
    if not jobs:
        return []
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        click.echo(f"compiling {len(jobs)} rank{'s' * (len(jobs) > 1)}, each a minute or more", err=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=len(jobs))
        running: set[int] = set()

        def told(job: Job, event: str, seconds: float, result: dict[str, Any] | None) -> None:
            if event == "running":
                if not console.is_terminal:
                    click.echo(f"stage {job.stage} (rank {job.rank}): still compiling after {seconds:.0f} s", err=True)
                return
            running.symmetric_difference_update({job.rank})
            names = ", ".join(map(str, sorted(running)))
            bar.update(task, advance=event == "done", description=f"compiling rank {names}" if names else "compiling")
            if result is not None:
                keep_result(job, result)
                if not console.is_terminal:
                    click.echo(f"stage {job.stage} (rank {job.rank}): {seconds:.0f} s", err=True)

        return run_jobs(jobs, told, at_once, [text_of(job) for job in jobs] if texts else ())


def run_jobs(
    jobs: Sequence[Job], progress: Progress, at_once: int | None = None, texts: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """Run all compile jobs, and return their results in the order of the jobs.

    After MindSpore or MindFormers has refused the first job, no further job is started, because the message of this
    error is the result. Ctrl-C and SIGTERM end the processes of all jobs.

    Args:
        progress: called when a job is "started" and "done", and from time to time for jobs that are still "running".
        at_once: the number of jobs that run at the same time; by default as many as cores and free memory allow.
        texts: for each job, the file for the text of its final graph; by default no text is kept.

    Raises:
        ClusterError: a process died without a result (for example because memory ran out).
    """
    results: dict[int, dict[str, Any]] = {}
    waiting, running = list(enumerate(jobs)), dict[int, _Run]()
    with tempfile.TemporaryDirectory(prefix="tc3-dryrun-") as folder, terminate_as_interrupt():
        try:
            while waiting or running:
                refused = any("error" in result for result in results.values())
                if waiting and not refused and _room(len(running), at_once):
                    place, job = waiting.pop(0)
                    running[place] = _Run(job, Path(folder) / str(place), texts[place : place + 1])
                    progress(job, "started", 0.0, None)
                for place, run in list(running.items()):
                    if run.process.poll() is not None:
                        del running[place]
                        results[place] = run.result()
                        progress(run.job, "done", time.monotonic() - run.started, results[place])
                    elif run.due():
                        progress(run.job, "running", time.monotonic() - run.started, None)
                if refused and not running:
                    break
                time.sleep(_POLL)
        finally:
            for run in running.values():
                run.end()
    return [results[place] for place in sorted(results)]


def _room(running: int, at_once: int | None) -> bool:
    if not running:
        return True
    if at_once is not None:
        return running < at_once
    return running < (os.cpu_count() or 1) and psutil.virtual_memory().available > _NEEDS


class _Run:
    """A `_Run` is one compiling process with its files."""

    def __init__(self, job: Job, folder: Path, text: Sequence[Path] = ()):
        folder.mkdir()
        self.job, self.out, self.log = job, folder / "out.json", folder / "log"
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))  # as msrun's workers
        # a compile that is killed leaves its temporary files in its folder, which is removed
        environment = {**HUGE_PAGES, **os.environ, "PYTHONPATH": paths, "GLOG_v": "3", "TMPDIR": str(folder)}
        files = [folder / "job.json", self.out, *text]
        command = [sys.executable, "-m", WORKER, str(os.getpid()), *map(str, files)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        self.started = self._told = time.monotonic()

    def due(self) -> bool:
        """Return whether it is time to report that the compile still runs."""
        now = time.monotonic()
        if now - self._told < _TOLD:
            return False
        self._told = now
        return True

    def result(self) -> dict[str, Any]:
        """Return the result of a compile that has finished."""
        if self.out.exists():
            return json.loads(self.out.read_text(encoding="utf-8"))
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if refused := next(filter(None, map(_GROUP.search, lines)), None):
            error = {"type": "RuntimeError", "message": refused[0]}
            return {"rank": self.job.rank, "stage": self.job.stage, "error": error}
        code = self.process.returncode
        why = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        why += ", which the kernel sends when memory is full" * (code == -signal.SIGKILL)
        last = f": {lines[-1]}" if lines else ""
        raise ClusterError(f"the compile of rank {self.job.rank} ended without a result ({why}){last}")

    def end(self) -> None:
        """Kill the compile with every process that it started."""
        kill(self.process)
        self.process.wait()


def cache_folder() -> Path:
    """Return the folder in which results of compiles are stored, inside the user's cache folder.

    Raises:
        ClusterError: the user has no cache folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tc3" / "dryrun"
    except RuntimeError:  # as in a container that is run under a number without a name
        wrong = (
            "this user has no home folder in which the results of compiles could be stored; set HOME or "
            "XDG_CACHE_HOME to a folder"
        )
        raise ClusterError(wrong) from None


def kept_result(job: Job) -> dict[str, Any] | None:
    """Return the stored result of an earlier compile of an equal job; return None if no such result is stored."""
    try:
        return json.loads(gzip.decompress((cache_folder() / _name(job)).read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None


def keep_result(job: Job, result: dict[str, Any]) -> None:
    """Store the result of a compile in the cache. An error with which MindSpore refuses the recipe is a result, too,
    unless this host caused the error. If the cache folder cannot be written, a warning is printed, and the dry run uses
    the result without storing it.
    """
    if result.get("of_the_host"):
        return
    try:
        with atomic_file(cache_folder() / _name(job)) as part:
            part.write_bytes(gzip.compress(json.dumps(result).encode()))
    except (DataError, OSError) as error:
        click.echo(f"this compile is not kept for later: {error}; set XDG_CACHE_HOME to another folder", err=True)


def text_of(job: Job) -> Path:
    """Return the path of the compressed text of a compile's final graph, which is stored only if a command (such as
    `tc3 fusion`) requested it.
    """
    return cache_folder() / _name(job).replace(".json.gz", ".ir.gz")


def _is_whole(text: Path) -> bool:
    """Return whether a compressed text exists and is undamaged: after a power cut it may end in zeros."""
    try:
        with gzip.open(text) as content:
            found = bool(content.read(1))
            while content.read(1 << 20):
                pass
        return found
    except (OSError, EOFError, zlib.error):
        return False


def _name(job: Job) -> str:
    content = json.dumps([dataclasses.asdict(job), _code()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32] + ".json.gz"


@lru_cache
def _code() -> str:
    """Return a digest of the code that a result depends on."""
    digest = hashlib.sha256(" ".join(map(version, _PACKAGES)).encode())
    for part in _CODE:
        place = ROOT / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


_M = "model.model_config"
_P = "parallel_config"

# a name of a key, or words of which the cause is known, in the message -> the key; the first that matches counts
_KEYS: tuple[tuple[str, str], ...] = (
    (r"no attribute 'qk_pos_emb_head_dim'", f"{_M}.position_embedding_type"),  # YaRN without multi-latent attention
    (r"offset", f"{_M}.offset"),
    (r"pipeline_scheduler|seqvpp|zero_bubble", "parallel.pipeline_config.pipeline_scheduler"),
    (r"pp_interleave_num|pipeline_interleave", f"{_M}.pp_interleave_num"),
    (r"micro_batch|micro size|micro_size", f"{_P}.micro_batch_num"),
    (r"expert_parallel|expert_model_parallel", f"{_P}.expert_parallel"),
    (r"token_dispatcher_type", f"{_M}.moe_token_dispatcher_type"),
    (r"dataset_strategy", "parallel.dataset_strategy"),
    (r"context_parallel", f"{_P}.context_parallel"),
    (r"vocab_size", f"{_M}.vocab_size"),
    (r"pipeline_stage", f"{_P}.pipeline_stage"),
    (r"data_parallel", f"{_P}.data_parallel"),
    (r"model_parallel", f"{_P}.model_parallel"),
    (r"seq_length", f"{_M}.seq_length"),
)
# other words in the message -> a key that may be the cause
_GUESSES: tuple[tuple[str, str], ...] = (
    (r"interleave", f"{_M}.pp_interleave_num"),
    (r"num_attention_heads|attention head|num_heads", f"{_P}.model_parallel"),
    (r"num_experts|expert num", f"{_P}.expert_parallel"),
    (r"ulysses|ring attention", f"{_P}.context_parallel"),
    (r"vocab", f"{_M}.vocab_size"),
    (r"stage_num|stage num", f"{_P}.pipeline_stage"),
    (r"device_num|device num|devices", f"{_P}.data_parallel"),
    (r"sequence length|seq_len", f"{_M}.seq_length"),
)
# where in the Python sources a collective or an error stands -> the key
_SOURCES: tuple[tuple[str, str], ...] = (
    (r"hierarchical_ep/", "plugins.hierarchical_ep"),
    (r"ep_overlap/", "plugins.ep_overlap"),
    (r"token_dispatcher|moe/", f"{_M}.moe_token_dispatcher_type"),
    (r"attention", f"{_P}.context_parallel"),
    (r"tensor_parallel/", f"{_P}.model_parallel"),
)
# MindSpore's front end makes no group of ranks; the process may crash after it has said so
_GROUP = re.compile(r"Create communication group failed.*")
_NOISE = re.compile(r"\n-{3,}.*", re.DOTALL)  # MindSpore appends framework call stacks below ruled lines


# what MindSpore says of its own graph, not of a recipe; the Python lines below it are where it was, not the cause
_INTERNAL = re.compile(r"pointer\[\w+\] is null|Illegal AnfNode for evaluating")

_NOT_TRIED = "nothing was compiled here; on a host with NPUs MindSpore makes this group"
_NO_KEY = "no key of the recipe is known for this message"


def diagnose(kind: str, message: str, recipe: Recipe | None = None) -> str:
    """Return MindSpore's error message in one line, without call stacks, after the recipe's key that caused the error
    (if the key is known). A key that is not certain to have caused the error stands after the message, and is marked as
    a guess.

    Args:
        kind: the class of the exception.
        recipe: the compiled recipe; some causes are visible only in its keys.
    """
    said = " ".join(_NOISE.sub("", message).split()) or "(no message)"
    if _INTERNAL.search(said):
        return f"{_internal(recipe)}{kind}: {said} (an error inside MindSpore, which names no key)"
    known = _of_group(recipe)
    if said == _NOT_TRIED:
        return known + said
    if _GROUP.search(said):
        return f"{known}{kind}: {said}" if known else f"{kind}: {said} ({_NO_KEY})"
    if key := _first(_KEYS, said):
        return f"{key}: {kind}: {said}"
    guess = _first(_GUESSES, said) or source_key(message)
    words = f"the key is a guess: {guess}" if guess else _NO_KEY
    return f"{kind}: {said} ({words})"


def refusal_of(result: Mapping[str, Any], recipe: Recipe) -> str:
    """Return in one line the reason why a rank did not compile."""
    again = " (cached; --no-cache)" if result.get("cached") else ""
    error = result["error"]
    return f"rank {result['rank']}: {diagnose(error['type'], error['message'], recipe)}{again}"


def _internal(recipe: Recipe | None) -> str:
    """Return the key that is known to end in an error of MindSpore's own."""
    if recipe is None or View(recipe).pp == 1 or View(recipe).get(LEVEL) != "level3":
        return ""
    return (
        f"{dotted(LEVEL)}: level3: MindSpore 2.9.0 compiled no pipeline with it that was tried, and did with level1: "
    )


def _of_group(recipe: Recipe | None) -> str:
    """Return the key that makes a group of ranks which MindSpore refuses, and why, if the degrees make one."""
    view = View(recipe) if recipe else None
    found = refused_degree(view, convert(view, load_schema())) if view and view.parallel else None
    return f"{dotted(found[0])}: {found[1]}: " if found else ""


def source_key(source: str) -> str:
    """Return the recipe's key that makes the model execute a given line of Python code, or an empty string if no key is
    known.
    """
    return _first(_SOURCES, source)


def _first(table: tuple[tuple[str, str], ...], text: str) -> str:
    return next((key for pattern, key in table if re.search(pattern, text, re.IGNORECASE)), "")
