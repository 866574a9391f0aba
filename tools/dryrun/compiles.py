"""Results of all compiles of a plan, from the cache where it has them; the others are compiled with a bar."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console

from tools.dryrun.compile import cache
from tools.dryrun.compile.job import Job
from tools.dryrun.compile.pool import run_jobs
from tools.dryrun.jobs import Plan


def compile_all(plan: Plan, at_once: int | None, use_cache: bool, texts: bool = False) -> list[dict[str, Any]]:
    """Results of the plan's jobs in their order, from the cache where it has them.

    Args:
        texts: the texts of the final graphs are wanted, too; they lie at `cache.text_of`.
    """
    known = {
        place: {**found, "cached": True}
        for place, job in enumerate(plan.jobs)
        if use_cache and (found := cache.find(job)) and ("error" in found or not texts or cache.text_of(job).is_file())
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
    """Compile with a bar on a terminal; a result is kept as soon as it is there."""
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
                cache.keep(job, result)
                if not console.is_terminal:
                    click.echo(f"stage {job.stage} (rank {job.rank}): {seconds:.0f} s", err=True)

        return run_jobs(jobs, told, at_once, [cache.text_of(job) for job in jobs] if texts else ())
