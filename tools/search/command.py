"""This module is the command `tc3 search RECIPE`; the exit code is 0 with a strategy, 1 without a strategy, 2 for a
wrong input, and 130 if the command was interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console

from plugins.errors import DataError, RecipeError
from tools.files.atomic import check_writable, keep_existing, write_atomically
from tools.files.figure import check_ending, check_page
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.process.children import terminate_as_interrupt
from tools.ranges import Number
from tools.schema.versions import require_verified, unverified_option
from tools.search.options import effort_option, effort_within, json_option, margin_option, tell_end, time_limit_option
from tools.search.request import read_limit

if TYPE_CHECKING:  # imported where they are used: `tc3 search --help` is instant
    from tools.estimate.time_model import TimeModel
    from tools.recipe.load import Recipe
    from tools.search.ranking.alternatives import BySchedule
    from tools.search.ranking.run import Found
    from tools.search.request import Request

_RESERVE = 10.0  # seconds of the time limit for pictures and files
_WIDTH = 200  # of tables in a file or pipe


class _NoName(click.Context):
    @property
    def command_path(self) -> str:
        """Return the path of the command group, because the command has no name of its own."""
        return super().command_path.rstrip()


class OfGroup(click.Command):
    """An `OfGroup` is a command (of the library `click`) that prints the help of its command group instead of its own
    help.
    """

    context_class = _NoName

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of the command group instead of the help of this command."""
        assert ctx.parent
        ctx.parent.command.format_help(ctx.parent, formatter)


@click.command("RECIPE", cls=OfGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--devices",
    type=Number("devices"),
    help="Search for strategies that use exactly this many devices.  [default: the recipe's number]",
)
@click.option(
    "--cluster",
    "cluster_name",
    metavar="NAME|FILE.yaml",
    help=f"Search for the best strategies on this cluster.  [default: {DEFAULT_HARDWARE}]",
)
@click.option(
    "--from",
    "measured",
    type=click.Path(path_type=Path),
    metavar="RUN|PROFILE|ROWS.yaml",
    help=(
        "First fit the cluster's efficiencies to measurements, as tc3 search calibrate does. The option names a "
        "profile's folder, the folder of a run that was profiled, or a file of measured steps. With --write the "
        "description of the cluster with the fitted efficiencies is saved next to OVERLAY.yaml, as "
        "OVERLAY.cluster.yaml."
    ),
)
@click.option(
    "--measured",
    "bundle",
    type=click.Path(path_type=Path),
    metavar="BUNDLE.zip",
    help=(
        "Search layouts for the cluster that tc3 firsthour measured with RECIPE. The memory that framework and "
        "driver used in this measurement is subtracted from a device's memory limit. The bundle's factors that "
        "correct predicted memory are printed but not used, because they hold only for RECIPE's own layout. With "
        "--write the measured cluster is saved beside OVERLAY.yaml, as OVERLAY.cluster.yaml."
    ),
)
@click.option(
    "--gbs",
    type=Number("global_batch_size"),
    help="Assume a global batch of this many samples.  [default: the recipe's]",
)
@click.option(
    "--memory",
    type=Number("memory_gib"),
    metavar="GIB",
    help="Assume that the job may use this many GiB on a device. By default, the search assumes the recipe's "
    "max_device_memory or, if the recipe has none, 90 % of the device's memory.",
)
@margin_option
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="LIMIT",
    help="Consider only strategies that meet this limit, such as tp<=8, mode!=global, or pp=8,16 for 8 or 16 pipeline "
    "stages; the text above explains the names and the signs. The option may be repeated: a strategy must then meet "
    "all of the limits.",
)
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    metavar="NAME|all",
    help=(
        "Also rank layouts of this pipeline schedule, such as zero_bubble_v, or of all schedules; the printed table "
        "says which schedules a recipe can use and which are only simulated. With --schedule, --write writes the "
        "fastest layout that can be trained, never one that is only simulated."
    ),
)
@click.option(
    "--recompute-operators",
    "groups",
    is_flag=True,
    help=(
        "Let layers also recompute single groups of operators (MLA's up-projections, the first matrix product of an "
        "MLP, the experts), not only norms, communication or whole layers. With --recompute-operators the search "
        "takes twice as long."
    ),
)
@click.option(
    "--swap",
    "swapping",
    is_flag=True,
    help=(
        "Assign the layers of the best strategy to stages once more, and this time let layers also swap their "
        "activations to the host; the step time includes the transfers. tc3 search shows the memory and the step time "
        "of this assignment, but writes no recipe for it."
    ),
)
@click.option(
    "--loads",
    metavar="LOADS",
    help=(
        "Search a second time under uneven expert loads, rank the strategies of both searches by their expected step "
        "time, and show for each strategy the chance that it runs out of memory. LOADS can be even, published, "
        "trained, spread:NUMBER, a ratio of the largest load to the mean such as 1.3, a run's folder or a routing "
        "log; docs/estimator.md explains these values. With --loads, --write writes the strategy with the shortest "
        "expected step time among the strategies that run out of memory at the fewest steps."
    ),
)
@click.option("--top", default=10, show_default=True, type=Number("rows"), help="Show this many strategies.")
@effort_option("normal")
@time_limit_option(
    1800.0, "Stop placing after this time, should the effort take longer; the ranking is always finished."
)
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OVERLAY.yaml",
    help="Write the best strategy as a recipe that has RECIPE as its base.",
)
@click.option("--force", is_flag=True, help="Overwrite the file that --write names if it exists.")
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report as an HTML page to this file.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plot the strategies' step time against their memory, and draw the timeline of the best strategy, to this "
    "file (.svg or .png).",
)
@click.option(
    "--verify",
    "verified",
    metavar="N",
    type=Number("rows"),
    help="Compile the best N strategies by dry runs, and drop the strategies that fail; if all N fail, try the next "
    "strategies until one compiles and fits into memory.",
)
@click.option(
    "--full",
    is_flag=True,
    help="With --verify: compile whole pipeline stages, which takes minutes for each strategy, instead of one layer of "
    "each kind.",
)
@unverified_option
@json_option
def space_command(
    recipe: Path, cluster_name: str | None, limits: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Find the parallel strategy of RECIPE on a cluster, in minutes, without a device.

    Every legal combination of data, tensor, pipeline (and interleaved), context and expert parallelism, micro-batch,
    expert dispatch, optimizer sharding and recomputation is ranked by predicted time and memory. For the candidates
    that could be the fastest according to their lower bounds, the command assigns layers to stages and chooses the
    recomputation of each layer. The answer says how much faster another strategy could be.

    Predicted memory stays under a device's limit by a margin, by default the estimator's known error, and the table
    says how likely each strategy fits.

    A limit (--limit) is a name, a sign and a value. The names are the parallel degrees dp, tp, pp, vpp (model chunks),
    cp and ep; mbs (samples of a micro-batch); m (micro-batches of a step); mode (of the expert dispatch: global,
    hierarchical or deduplicated); shard (none, optimizer or gradients); and recompute (none, select, communication,
    full or planned). The signs are = != < <= > >= and %N= (ep%8=0: ep is a multiple of 8).

    Exit codes: 0 a strategy was found; 1 no strategy fits (the nearest feasible change is shown), or --verify proved
    none to fit; 2 a wrong input; 130 interrupted (the best strategy so far is shown).

    With the same effort the answer is the same on every machine, unless the time limit ends the search, which the
    answer then says.
    """
    from tools.search.options import SpaceProgress
    from tools.search.ranking.alternatives import BySchedule, add_swapping, search_schedules
    from tools.search.ranking.run import add_loads, search, search_under

    with terminate_as_interrupt(), tempfile.TemporaryDirectory() as folder:
        own_cluster = Path(folder) / "own.cluster.yaml"
        with SpaceProgress() as progress:
            try:
                loaded, request, times = _asked(recipe, cluster_name, limits, own_cluster, options)
                limit = options["time_limit"]
                effort = effort_within(options["effort"], "normal", limit / options["top"])
                budget = Budget(effort, max(limit - _RESERVE, limit / 2))
                found = search(request, options["top"], budget, times, progress.tell)
                if options["swapping"]:
                    add_swapping(found, times, budget)
                others = BySchedule()
                if found.whole and found.entries:  # where 1F1B has no layout, no other schedule is looked at
                    others = search_schedules(request, options["schedules"], budget, times, progress.tell)
                    found.cut, found.whole = found.cut or others.cut, others.whole
                if options["loads"] is not None and found.whole and found.entries:
                    search_under(found, options["loads"], options["top"], budget, times, progress.tell)
                if options["loads"] is not None and found.whole and found.entries:
                    placed = {one.schedule: one.entry for one in others.every if one.entry}
                    add_loads(found, options["loads"], times, progress.tell, placed)
            except KeyboardInterrupt:
                click.echo("interrupted: nothing found yet", err=True)
                sys.exit(130)
        if len(found.ranking.seconds) == 0:
            if not found.whole:
                click.echo("interrupted: nothing found yet", err=True)
                sys.exit(130)
            _infeasible(found, as_json)
        found.to_verify = options["verified"] or 0
        if found.to_verify and found.whole:
            _verify(loaded, found, options["full"])
        _tell(found, others, times, loaded, own_cluster, options, as_json)
        tell_end(found.cut, not found.whole, "")
        sys.exit(0 if found.entries and not found.unverified else 1)


def _cluster(recipe: Path, cluster_name: str | None, own: Path, options: dict[str, Any]) -> tuple[str, float]:
    """Return the cluster's name or file, and the bytes that were measured beside the model. The cluster of --from or
    --measured is written to the temporary file `own`: it gets its final name, `_kept`, together with the overlay, so
    that a search without a result leaves no file.
    """
    measured, bundle, kept = options["measured"], options["bundle"], _kept(options)
    if bundle is not None and (measured is not None or cluster_name is not None):
        raise click.UsageError(
            "--measured already gives the cluster; leave out --cluster and --from, or leave out --measured"
        )
    if measured is None and bundle is None:
        return DEFAULT_HARDWARE if cluster_name is None else cluster_name, 0.0
    from tools.measured import AS_MODELLED, measured_cluster, measured_memory, memory_in_words, origin, read_bundle
    from tools.search.measured import cluster_from

    terms = AS_MODELLED
    if bundle is not None:
        found = read_bundle(bundle, recipe)
        text, words = measured_cluster(found), f"{origin(found)}\n{memory_in_words(found)}"
        terms = measured_memory(found) or terms
    else:
        name = kept.name.split(".")[0] if kept else "calibrated"
        text, words = cluster_from(measured, recipe, cluster_name, name)
    _keep_cluster(kept, text, options["force"])
    write_atomically(own, text)
    click.echo(words, err=True)
    return str(own), terms.reserve


def _keep_cluster(kept: Path | None, text: str, force: bool) -> None:
    """Raise DataError if the cluster file beside the overlay exists and holds another text than `text`; a search that
    was killed before it wrote its overlay leaves the same text, which the next search may take over.
    """
    if kept and os.path.lexists(kept) and not (kept.is_file() and kept.read_bytes() == text.encode()) and not force:
        raise DataError(
            f"--write {kept}: the file exists and describes another cluster, perhaps because a search was killed "
            "before it wrote its recipe; choose another name, or replace it with --force"
        )


def _check_name(overlay: Path) -> None:
    """Raise an error before long work begins if the next commands would not read a file of this name as a recipe."""
    from tools.check.check import is_fragment
    from tools.check.cli import is_left_out

    check_ending(overlay, "--write", (".yaml", ".yml"))
    part = is_fragment(os.path.abspath(overlay))
    if is_left_out(overlay) or part:
        what = "a part of a recipe" if part else "no recipe"
        raise RecipeError(f"--write {overlay}: `tc3 check` takes a file of this name for {what}; name another file")


def _kept(options: dict[str, Any]) -> Path | None:
    """Return the file beside the overlay that keeps the cluster of --from or --measured; None if there is none."""
    own = options["write"] and (options["measured"] is not None or options["bundle"] is not None)
    return options["write"].with_suffix(".cluster.yaml") if own else None


@contextmanager
def _beside(kept: Path, own_cluster: Path, force: bool) -> Iterator[None]:
    """Write the cluster file beside an overlay before the block writes the overlay; if the block fails, leave the
    cluster file as it was before.
    """
    text = own_cluster.read_text(encoding="utf-8")
    _keep_cluster(kept, text, force)
    before = kept.read_text(encoding="utf-8") if kept.exists() else None
    write_atomically(kept, text)
    try:
        yield
    except BaseException:
        if before is None:
            kept.unlink(missing_ok=True)
        else:
            write_atomically(kept, before)
        raise
    click.echo(f"written: {kept}", err=True)


def _asked(
    path: Path, cluster_name: str | None, limits: tuple[str, ...], own_cluster: Path, options: dict[str, Any]
) -> tuple[Recipe, Request, TimeModel]:
    """Return the recipe as written, the base of overlays, and what is asked; raise errors now, not at the end."""
    from tools.estimate.from_recipe import require_ulysses
    from tools.estimate.loads import loads_of
    from tools.estimate.memory.room import require_on_device
    from tools.estimate.time_model import TimeModel
    from tools.recipe.load import load_recipe
    from tools.search.overlay import keep_files_of, require_layouts
    from tools.search.ranking.alternatives import asked_schedules, require_writable
    from tools.search.request import request_of, with_choices

    if options["verified"]:
        require_verified()
    if options["picture"]:
        check_ending(options["picture"])
    recipe = load_recipe(path)
    for option, name in {"--write": "write", "--html": "html_file"}.items():
        keep_files_of(path, option, options[name])
    keep_files_of(path, "--write", _kept(options))
    if options["write"]:
        _check_name(options["write"])
    keep_existing("--write", options["write"], options["force"])
    if options["html_file"]:
        check_page(options["html_file"])
    for name in ("write", "html_file", "picture"):
        if options[name]:
            check_writable(options[name])
    asked = tuple(read_limit(text) for text in limits)
    options["schedules"] = asked_schedules(options["schedules"])
    if options["write"]:
        require_writable(options["schedules"])
    if options["schedules"] and options["verified"]:
        raise RecipeError(
            "--verify compiles only layouts of 1F1B; to compile a layout of another schedule, save it with --write "
            "and run tc3 dryrun on the file"
        )
    of_run = (options["devices"], options["gbs"], options["memory"])
    name, reserve = _cluster(path, cluster_name, own_cluster, options)
    request = request_of(recipe, name, *of_run, asked, options["memory_margin"], reserve)
    require_on_device("--memory", options["memory"], request.hardware)
    request = with_choices(request, options["groups"], options["swapping"])
    require_ulysses(recipe, request.base.model, request.ulysses)
    if options["loads"] is not None:
        loads_of(options["loads"], request.base, of_many=True)
    if options["write"] or options["verified"]:  # before the search takes its minutes
        require_layouts(recipe, request.devices)
    return recipe, request, TimeModel(request.hardware)


def _infeasible(found: Found, as_json: bool) -> NoReturn:
    from tools.search.ranking.rank import explain_infeasible as explain

    click.echo("no strategy; looking for the nearest request that has one", err=True)
    lines = explain(found.request, found.ranking)
    if found.unplaced:
        late = f"the time limit ended the search before it placed {found.unplaced:,} strategies that do not fit with "
        lines.insert(0, f"{late}balanced layers, but may fit if layers move; a larger --time-limit places them, too")
    if as_json:
        funnel = [list(line) for line in found.ranking.funnel.lines()]
        click.echo(json.dumps({"strategies": [], "problems": lines, "funnel": funnel}))
    else:
        click.echo("\n".join(lines))
    sys.exit(1)


def _verify(recipe: Recipe, found: Found, full: bool) -> None:
    """Drop what does not compile or fit of the best asked for, and of the next ones until one does: under the loads, if
    some were asked for. Ctrl-C keeps what is not tried yet.
    """
    from tools.search.ranking.uneven import renumbered
    from tools.search.ranking.verify import Verdict, verify

    judged = {id(one.config): one.judged for one in found.uneven if one.numbered}
    order = {config: place for place, config in enumerate(judged)}
    tried = sorted(found.entries, key=lambda entry: order.get(id(entry.config), 0))

    def told(number: int, verdict: Verdict) -> None:
        entry = tried[number]
        own = f" (its own estimate: {verdict.estimate / GIB:.1f} GiB)" if verdict.estimate else ""
        found.verified += verdict.compiled
        own += f"; {verdict.wrong}" if verdict.wrong else ""
        found.wrong += [f"{entry.layout}: {verdict.wrong}"] if verdict.wrong else []
        if verdict.problems:
            words = "; ".join(verdict.problems)
            found.failed.append((entry, verdict.problems))
            found.entries.remove(entry)
        elif verdict.doubts:
            words = f"compiles, but is not proven to fit: {'; '.join(verdict.doubts)}"
            found.doubtful.append((entry, verdict.doubts))
        else:
            words = "compiles and fits"
            found.passed.append(entry)
        click.echo(f"dry run of {entry.layout}: {words}{own}", err=True)

    try:
        loads = [judged.get(id(entry.config)) for entry in tried]
        verify(recipe, tried, found.to_verify, found.request, told, full, loads=loads)
    except KeyboardInterrupt:
        found.whole = False
    found.uneven = renumbered(found.uneven, [entry.config for entry in found.entries])


def _tell(
    found: Found,
    others: BySchedule,
    times: TimeModel,
    recipe: Recipe,
    own_cluster: Path,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    """Print what was found, and write the files that were asked for; `own_cluster` is the file of `_cluster`."""
    from tools.search.overlay import left_off, write_overlay
    from tools.search.page import draw, html
    from tools.search.report import as_json as content
    from tools.search.report import print_schedules, print_text, to_write

    name = Path(recipe.source).name
    if as_json:
        more = {"schedules": [one.as_json() for one in others.every]} if others.every else {}
        click.echo(json.dumps({**content(found, times), **more}))
    else:
        console = Console(highlight=False, markup=False)
        console.width = max(console.width, _WIDTH)
        print_text(found, times, console)
        if others.every:
            print_schedules(others, found, times, console)
    if not found.entries:
        return
    if found.unverified:
        click.echo(f"the best is not verified: {found.unverified}", err=True)
    site, kept = found.request.site, _kept(options)
    site = replace(site, hardware=os.path.abspath(kept)) if kept else site
    writers: dict[str, Callable[[Path], object]] = {
        "picture": lambda path: draw(found, times, path),
        "html_file": lambda path: write_atomically(path, html(found, times, f"Parallel strategies for {name}")),
        "write": lambda path: write_overlay(recipe, *to_write(found, others, path), site),
    }
    failed: list[ValueError] = []
    for option in (option for option in writers if options[option]):
        try:
            if option == "write":  # another search may have written the file meanwhile
                keep_existing("--write", options[option], options["force"])
            with _beside(kept, own_cluster, options["force"]) if option == "write" and kept else nullcontext():
                writers[option](options[option])
            click.echo(f"written: {options[option]}", err=True)
            if option == "write":
                for line in left_off(recipe, to_write(found, others, options[option])[0]):
                    click.echo(line, err=True)
        except (DataError, RecipeError) as error:  # the others are written all the same: the search took minutes
            failed.append(error)
    if failed:
        raise failed[0]
