"""This module is `tc3 firsthour`: it checks and measures a new cluster, and writes a verdict and a bundle.

The exit code is 0 for go and go with, 1 for no go, 2 for a wrong input, 130 if interrupted. If the command was
interrupted, the same command continues where it stopped.

`write_claim` writes what a bundle measured into the card of a recipe, as the claim `measured-DEVICE-N`. The claim is
added as text below the key `status:` in the model card, so that the comments and the order of the card are unchanged. A
new claim does not replace an older claim of the same device and number, because the older claim has another date.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launch.firsthour.checks import NO_GO, Outcome, line_of, outcome_of, own_state, run_checks, verdict
from launch.firsthour.page import as_html
from launch.run.msrun import ROOT
from plugins.errors import ClusterError, DataError
from plugins.lines import locked
from tools.accuracy.pages import check_page
from tools.files.atomic import atomic_file, check_writable, keep_existing, real_path, write_atomically
from tools.files.locks import only_process_in
from tools.measured import (
    CLUSTER,
    FORMAT,
    MEMORY,
    OUTCOMES,
    Bundle,
    Manifest,
    hashed,
    read_bundle,
    recipe_digest,
    software,
    without_names,
    write_bundle,
)
from tools.process.host import shorten
from tools.recipe.catalogue import CARD, load_card
from tools.schema.versions import require_verified, unverified_option
from tools.search.options import RecipeOrCommand

if TYPE_CHECKING:
    from launch.firsthour.hour import Hour

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "unknown": "cyan"}
_UNITS = {"s": 1, "m": 60, "h": 3600}


class Budget(click.ParamType):
    """A `Budget` is a click type for a time: a number of seconds, or a number with s, m or h, such as 60m."""

    name = "budget"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return in seconds the time that the user wrote, such as 60m.

        Raises:
            click.BadParameter: it is not a time, or not between a minute and a day.
        """
        if isinstance(value, float):
            return value
        number, unit = (value[:-1], value[-1]) if value[-1:] in _UNITS else (value, "s")
        try:
            seconds = float(number) * _UNITS[unit]
        except ValueError:
            self.fail(f"{value!r} is not a time; write seconds, or a number with s, m or h, such as 60m", param, ctx)
        if not 60 <= seconds <= 86_400:
            self.fail(f"{value!r} must be from 1m to 24h", param, ctx)
        return seconds


@click.command("RECIPE", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--nodes",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=(
        "Read the hosts to check from this file, one host per line as NAME or as NAME WORKERS (its number of workers); "
        "they are reached by ssh.  [default: this host]"
    ),
)
@click.option(
    "--budget",
    type=Budget(),
    default="60m",
    show_default=True,
    help="Divide this total time, such as 60m or 2h, among the checks.",
)
@click.option(
    "--simulate",
    type=click.Path(path_type=Path),
    metavar="CLUSTER.yaml",
    help="Run the checks on a simulated cluster with simulated defects, both described in this file, instead of "
    "measuring hosts.",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the results and the training runs of the checks in this folder.  [default: "
    "output/firsthour/<the recipe's folder>-<the recipe's name>]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write all results to this zip file, the bundle.  [default: WORK/firsthour-DATE.zip]",
)
@click.option("--hash-names", is_flag=True, help="Replace host names in the bundle of results by hashes.")
@click.option(
    "--force",
    is_flag=True,
    help="Delete the results of earlier calls of this command and start over; also overwrite the file that --out "
    "names.",
)
@click.option("--dry-run", is_flag=True, help="Print the commands that each check would run, and start nothing.")
@unverified_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def firsthour_command(
    recipe: Path,
    nodes: Path | None,
    budget: float,
    simulate: Path | None,
    work: Path | None,
    out: Path | None,
    hash_names: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Check and measure a new cluster before RECIPE's first training, and write the measurements into one bundle.

    The checks go from single hosts to a calibrated search; each check has a part of the budget, a limit by which it
    judges, and a remedy (docs/first-hour.md). An item that cannot be judged is unknown, never ok. On a host without
    NPUs the command is a rehearsal, in which the CPU is the device.

    Exit codes: 0 go, or go with remedies; 1 no go; 2 a wrong input; 130 interrupted (the same command goes on).
    """
    from launch.firsthour.npu import hour_of
    from launch.firsthour.plan import as_text, plan_of
    from launch.firsthour.simulate import Play, read_cluster
    from tools.profile.study import run_of

    place = work or Path("output") / "firsthour" / f"{recipe.absolute().parent.name}-{recipe.stem}"
    hour = hour_of(recipe.absolute(), place.absolute(), nodes, planned=dry_run)
    if dry_run:
        plan = plan_of(hour, budget)
        click.echo(json.dumps(plan) if as_json else as_text(plan))
        return
    keep_existing("--out", out, force)
    out = out or place / f"firsthour-{datetime.now(timezone.utc):%Y-%m-%d}.zip"  # it follows from the outcomes there
    check_writable(out)
    require_verified()
    cluster = read_cluster(simulate) if simulate is not None else None
    with only_process_in(place, "tc3 firsthour", "--work"):
        own_state(place, {"recipe": recipe_digest(recipe), **_cluster_of(hour, simulate), **software()}, force)
        about: dict[str, Any] = {"device": hour.device, "devices": hour.world, "simulated": simulate is not None}
        runner: Any = hour
        if cluster is not None:
            runner = Play(cluster, run_of(recipe, ()))
            about |= {"device": cluster.device, "devices": cluster.nodes * cluster.devices_per_node}
            click.echo(
                "the cluster is simulated: nothing is measured, and the trainings are those of a small model in NumPy",
                err=True,
            )
        elif hour.device == "CPU":
            click.echo("no NPU is here: the CPU is the device, and this is a rehearsal", err=True)
            about["devices"] = 1
        outcomes = run_checks(runner.work_of(), place, budget, partial(_tell, as_json))
        manifest, texts = _bundle(recipe, outcomes, about, hash_names, list(runner.names))
        write_bundle(out, manifest, texts)
    word, lines = verdict(outcomes)
    if as_json:
        checks = {one.check: one.verdict for one in outcomes}
        click.echo(json.dumps({"verdict": word, "findings": lines, "checks": checks, "bundle": str(out)}))
    else:
        page = f"page: tc3 firsthour read {shlex.quote(str(out))}"
        click.echo("\n".join([*lines, f"verdict: {word}", f"written: {out}", page]))
    sys.exit(word == NO_GO)


def _cluster_of(hour: Hour, simulate: Path | None) -> dict[str, str]:
    """Return facts that distinguish the cluster of this call from other clusters: its nodes and devices, or the
    simulated cluster's file and its digest.
    """
    if simulate is None:
        return {"nodes": shorten(hour.names), "devices": f"{hour.world} x {hour.device}", "simulated": "None"}
    digest = hashlib.sha256(simulate.read_bytes()).hexdigest()[:8]
    return {"nodes": "simulated", "simulated": f"{simulate} ({digest})"}


class RecipeOrFirsthourCommand(RecipeOrCommand):
    """This click group runs `tc3 firsthour RECIPE` if the first argument is a recipe and not one of the group's
    commands.
    """

    of_recipe = firsthour_command


@click.group(cls=RecipeOrFirsthourCommand, context_settings={"help_option_names": ["-h", "--help"]})
def firsthour() -> None:
    """Check and measure a new cluster, and report whether it is ready for a training run."""


def _tell(as_json: bool, outcome: Outcome, kept: bool) -> None:
    words = "kept from before" if kept else f"{outcome.seconds:.1f} s"
    verdict_ = click.style(f"{outcome.verdict:8s}", fg=_COLOURS[outcome.verdict])
    click.echo(f"{verdict_}{outcome.check:10s}  {words}", err=True)


def _bundle(
    recipe: Path, outcomes: Sequence[Outcome], about: dict[str, Any], hash_names: bool, names: Sequence[str],
) -> tuple[Manifest, dict[str, str]]:  # fmt: skip
    """Return the manifest and the texts of the bundle."""
    rows = [one.as_json() for one in outcomes]
    calibrated: dict[str, Any] = next((row["evidence"] for row in rows if row["check"] == "calibrate"), {})
    texts = {CLUSTER: calibrated.pop("cluster")} if "cluster" in calibrated else {}  # a file of its own
    if calibrated.get("memory"):
        texts[MEMORY] = json.dumps(calibrated["memory"]) + "\n"
    texts[OUTCOMES] = json.dumps(rows, indent=1) + "\n"
    if hash_names:
        from launch.firsthour.judge import own_names

        texts = without_names(texts, {name: hashed(name) for name in [*own_names(outcomes), *names]})
    manifest = Manifest(
        format=FORMAT, made=f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        names="hashed" if hash_names else "plain",
        recipe=_shown(recipe), digest=recipe_digest(recipe), versions=software(), verdict=verdict(outcomes)[0], **about,
    )  # fmt: skip
    return manifest, texts


def _shown(recipe: Path) -> str:
    """Return the recipe's path in the checkout, or else only its name, so that a bundle does not show other paths of
    this machine.
    """
    path = real_path(recipe)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


@firsthour.command("read")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Refuse the bundle unless it was measured with this recipe.",
)
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the results as an HTML page to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def read(bundle: Path, recipe: Path | None, page: Path | None, as_json: bool) -> None:
    """Verify that BUNDLE was not changed, and show the verdict and the findings in it.

    Exit codes: 0 go, or go with remedies; 1 no go; 2 a bundle that cannot be trusted.
    """
    check_page(page)
    found = read_bundle(bundle, recipe)
    outcomes = [outcome_of(one) for one in found.json(OUTCOMES) or ()]
    if page:
        write_atomically(page, as_html(found, outcomes))
        click.echo(f"written: {page}", err=True)
    word, lines = verdict(outcomes)
    if as_json:
        manifest = found.manifest
        about = {"device": manifest.device, "devices": manifest.devices, "made": manifest.made}
        click.echo(json.dumps({**about, "verdict": word, "findings": lines, "simulated": manifest.simulated}))
    else:
        made = f"{found.manifest.made}, {found.manifest.devices} x {found.manifest.device}"
        played = ", simulated" if found.manifest.simulated else ""
        rows = [line_of(one.check, item) for one in outcomes for item in one.findings if item.verdict == "ok"]
        click.echo("\n".join([f"{bundle}: {made}{played}", *rows, *lines, f"verdict: {word}"]))
    sys.exit(word == NO_GO)


def claim_of(bundle: Bundle, recipe: Path) -> dict[str, str]:
    """Return the entry that records a bundle (the results of `tc3 firsthour`) under the key `status` of a model card.

    Raises:
        DataError: a simulated cluster made the bundle.
    """
    manifest = bundle.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    checks = {one["check"]: one["verdict"] for one in bundle.json(OUTCOMES)}
    good = [name for name, verdict in checks.items() if verdict in ("ok", "warn")]
    others = [f"{name} is {verdict}" for name, verdict in checks.items() if name not in good]
    judged = f"judged: {', '.join(good)}" + (f"; {', '.join(others)}" if others else "")
    how = f"tc3 firsthour recipes/{recipe.absolute().parent.name}/{recipe.name} on {manifest.made[:10]}, {versions}"
    return {"claim": bundle.claim, "how": how, "what": f"{manifest.verdict}; {judged}"}


def write_claim(bundle: Bundle, recipe: Path, dry_run: bool) -> str:
    """Add the verdict of a bundle (the results of `tc3 firsthour`) to the recipe's model card, and return the added
    text.

    Raises:
        DataError: there is no card, the card does not name the recipe, or it has the claim of that day already.
    """
    card = recipe.absolute().parent / CARD
    if not card.is_file():
        raise DataError(
            f"{card}: this file, which lists what was verified of each recipe, does not exist; copy a card.yaml from a "
            "folder of recipes/"
        )
    with nullcontext() if dry_run else locked(card.parent):  # two at once: each would write its claim over the other's
        return _write_claim(bundle, recipe, card, dry_run)


def _write_claim(bundle: Bundle, recipe: Path, card: Path, dry_run: bool) -> str:
    text = card.read_text(encoding="utf-8")
    claim = claim_of(bundle, recipe)
    added = "".join(
        f"      {'- ' if key == 'claim' else '  '}{key}: {value if key == 'claim' else json.dumps(value)}\n"
        for key, value in claim.items()
    )
    if added in text:
        raise DataError(f"{card}: the card already has this claim, so nothing was written")
    start = text.find(f"\n  {recipe.name}:\n")
    if start < 0 or not load_card(card):
        raise DataError(f"{card}: recipes.{recipe.name}: the card does not name this recipe; add an entry for it")
    own = text[: start + 1] + re.split(r"\n(?= {0,2}[^ \n#])", text[start + 1 :], maxsplit=1)[0] + "\n"
    at = own.find("\n    status:\n", start)
    if at < 0:
        raise DataError(
            f"{card}: recipes.{recipe.name}.status: the claim must be added below a line that holds only `status:`, "
            "but this entry has no such line; write `status:` on a line of its own, and the entry's claims below "
            "that line"
        )
    at = own.index("\n", at + 1) + 1
    if not dry_run:
        with atomic_file(card) as draft:
            draft.write_text(text[:at] + added + text[at:], encoding="utf-8")
            load_card(draft)  # what is written is a card
    return added.rstrip("\n")


@firsthour.command("card")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the entry that this command would add to the recipe's card.yaml, and write nothing.",
)
def card(bundle: Path, recipe: Path, dry_run: bool) -> None:
    """Add the measurements in BUNDLE to the model card of RECIPE's folder, as a claim.

    Exit codes: 0 written; 2 the bundle is of another recipe, is simulated, or does not have the verdict `go`.
    """
    found = read_bundle(bundle, recipe)
    if found.manifest.verdict == NO_GO:
        raise ClusterError(
            f"{bundle}: the verdict of this bundle is `no go`, but a card can get only a claim with the verdict "
            f"`go`; solve the "
            "problems that `tc3 firsthour read` lists, and measure again"
        )
    claim = write_claim(found, recipe, dry_run)
    click.echo(claim)
