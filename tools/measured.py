"""This module writes and reads bundles; a bundle is a zip file with the measurements that one run of `tc3 firsthour`
made on a cluster.

A bundle holds only JSON, YAML and text. `manifest.json` names every other file with its size and SHA-256, the date, the
device, the versions of the software, and the digest of the recipe; its own `seal` is the SHA-256 of the rest of it.
The seal shows accidents and edits, not forgery: whoever edits a bundle can also seal it anew.

`read_bundle` refuses a bundle of another format, of another tc3, MindSpore or MindFormers, of another model of time and
memory, and of another recipe, and one that was truncated or edited. Each refusal is one line.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from plugins.errors import DataError, not_json, refuse_unknown
from tools.estimate.configuration import MODEL_VERSION
from tools.estimate.memory.model import StageMemory
from tools.files.atomic import atomic_file, what_is
from tools.hardware.units import GIB
from tools.recipe.dump import recipe_text
from tools.recipe.load import load_recipe
from tools.schema.versions import installed

FORMAT = 2
MANIFEST = "manifest.json"
OUTCOMES, CLUSTER, MEMORY = "outcomes.json", "cluster.yaml", "memory.json"
_MOST = 1 << 28  # bytes that a bundle may unpack to
_DIGITS = 16  # of a sha256, enough to tell recipes and hosts apart
_SOFTWARE = {"tc3": "telechat3-moe-recipes", "mindspore": "mindspore", "mindformers": "mindformers"}


@dataclass(frozen=True)
class Manifest:
    """A `Manifest` describes the content of a bundle, which is the file with the results of `tc3 firsthour`.

    Args:
        format: the format of the bundle.
        made: the date and time in UTC.
        device: the name of the devices, such as "910B3" or "CPU".
        devices: the number of devices.
        simulated: whether a simulated cluster made the numbers, which then no card may claim.
        names: "plain", or "hashed" if names of hosts were replaced by digests.
        recipe: the path of the recipe.
        digest: the digest of the flat recipe.
        versions: software -> version.
        verdict: the verdict of `tc3 firsthour` on the cluster.
        files: name -> {"sha256", "bytes"} of every other file.
    """

    format: int
    made: str
    device: str
    devices: int
    simulated: bool
    names: str
    recipe: str
    digest: str
    versions: dict[str, str]
    verdict: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """A `Bundle` holds the results of `tc3 firsthour`: the path of the bundle's file, its manifest, and the text of
    each file in it.
    """

    path: Path
    manifest: Manifest
    texts: Mapping[str, str]

    def json(self, name: str) -> Any:
        """Return the content of a JSON file of the bundle; return None if the bundle does not have the file."""
        if name not in self.texts:
            return None
        try:
            return json.loads(self.texts[name])
        except ValueError as error:
            raise DataError(f"{self.path}: {name}: the file {not_json(error)}") from None

    @property
    def claim(self) -> str:
        """Return the claim, such as "measured-910B3-512", that a recipe card may make because of the measurements in
        this bundle.

        Raises:
            DataError: a simulated cluster made the bundle.
        """
        if self.manifest.simulated:
            raise DataError(
                f"{self.path}: the results of this bundle are simulated, but a recipe's card.yaml may state "
                "only measured results"
            )
        return f"measured-{self.manifest.device}-{self.manifest.devices}"


def software() -> dict[str, str]:
    """Return the versions for which a bundle of measurements is valid: the versions of the installed software, and the
    version of the estimator whose factors and efficiencies were fitted.
    """
    found = {name: installed(distribution) or "not installed" for name, distribution in _SOFTWARE.items()}
    return {**found, "estimator": MODEL_VERSION}


def recipe_digest(recipe: Path) -> str:
    """Return the digest of a recipe with its bases merged in, so that a change of a base also changes the digest."""
    return hashlib.sha256(recipe_text(load_recipe(recipe)).encode()).hexdigest()[:_DIGITS]


def hashed(host: str) -> str:
    """Return the hashed name that replaces a host's name in a bundle."""
    return "host-" + hashlib.sha256(host.encode()).hexdigest()[:8]


_ESCAPED = r"\\+u[0-9a-f]{4}|\\+x[0-9a-f]{2}|\\+[0-7]{3}|%[0-9a-f]{2}|\\+[abefnrtv]"  # in JSON, Python or a URL
_NO_WORD = rf"(?:\x1b|{_ESCAPED})\[[\d;?]*[a-z]|{_ESCAPED}"  # what a name may follow without a space, such as a colour


def without_names(texts: Mapping[str, str], hosts: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a bundle (file -> text) with each host's name (old -> new) replaced, the longest names first.
    A host's name is replaced only as a whole word: "workers" stays if a host is called "worker", and "pretrain1" if one
    is called "train1". The function ignores whether letters in names of hosts are small or capital.

    Keys of JSON and YAML stay, unless hosts are the keys there, and so do verdicts and names of checks: a host may be
    called "report".
    """
    if not hosts:
        return dict(texts)
    names = "|".join(re.escape(old) for old in sorted(hosts, key=len, reverse=True))
    # an escaped character, or a colour, ends in a letter of no word; no digest is searched for further names
    pattern = re.compile(rf"({_NO_WORD}|(?<![A-Za-z0-9]))({names})(?![A-Za-z0-9])", re.IGNORECASE)
    new = {old.lower(): name for old, name in hosts.items()}
    hidden = _Hidden(hosts, lambda text: pattern.sub(lambda found: found[1] + new[found[2].lower()], text))
    return {
        name: f"{json.dumps(hidden.of(json.loads(text)), indent=1)}\n" if name.endswith(".json") else hidden.lines(text)
        for name, text in texts.items()
    }


@dataclass(frozen=True)
class _Hidden:
    """A `_Hidden` replaces the names of hosts in values.

    Args:
        hosts: old name -> new name.
        replaced: returns a text with the names replaced.
    """

    hosts: Mapping[str, str]
    replaced: Callable[[str], str]

    def of(self, value: Any, key: str = "", check: str = "") -> Any:
        """Replace the names of hosts in a value from a check's results, and return the value."""
        if isinstance(value, list):
            return [self.of(each, key, check) for each in value]
        if isinstance(value, dict):
            check = value.get("check", check)
            by_host = key == "probes" or (key == "evidence" and check == "hosts")
            return {
                self.hosts.get(name, name) if by_host else name: self.of(each, "" if by_host else name, check)
                for name, each in value.items()
            }
        if not isinstance(value, str) or key in ("check", "verdict"):
            return value
        if key == "report":  # what tc3 doctor printed there: JSON within JSON
            with suppress(ValueError):
                return json.dumps(self.of(json.loads(value)))
        return self.replaced(value)

    def lines(self, text: str) -> str:
        """Replace the names of hosts in a YAML text, except in keys, and return the text."""
        parts = [re.match(r"([ -]*[\w.]+:(?=\s))?(.*)", line, re.DOTALL) for line in text.splitlines(keepends=True)]
        return "".join((part[1] or "") + self.replaced(part[2]) for part in parts if part)


def _seal(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_bundle(path: Path, manifest: Manifest, texts: Mapping[str, str]) -> None:
    """Write a bundle of measurements as one file; an error leaves no partly written file. Equal content gives equal
    bytes, because the entries have a fixed order and date.

    Raises:
        DataError: it cannot be written.
    """
    files = {
        name: {"sha256": hashlib.sha256(text.encode()).hexdigest(), "bytes": len(text.encode())}
        for name, text in sorted(texts.items())
    }
    content = {**asdict(manifest), "files": files}
    content["seal"] = _seal(content)
    with atomic_file(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {MANIFEST: json.dumps(content, indent=1) + "\n", **dict(sorted(texts.items()))}.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)


def read_bundle(path: Path, recipe: Path | None = None) -> Bundle:
    """Read the bundle of measurements at `path`, and return it. If a recipe is given, the bundle must have been
    measured with this recipe.

    Raises:
        DataError: it is not a whole, unedited bundle of this software and of this recipe.
    """
    texts = _texts(path)
    if MANIFEST not in texts:
        raise DataError(f"{path}: this is not a bundle of tc3 firsthour: it holds no {MANIFEST}")
    manifest = _manifest(path, texts.pop(MANIFEST))
    _check_files(path, manifest, texts)
    _check_versions(path, manifest)
    if recipe is not None and (own := recipe_digest(recipe)) != manifest.digest:
        raise DataError(
            f"{path}: the bundle was measured with {manifest.recipe} ({manifest.digest}), but {recipe} is another "
            f"recipe ({own}); run tc3 firsthour with this recipe"
        )
    return Bundle(path, manifest, texts)


def _texts(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise DataError(
            f"{path}: there is no bundle at this path ({what_is(path)}); give a bundle, which tc3 firsthour RECIPE "
            "writes"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MOST:
                raise DataError(
                    f"{path}: the bundle unpacks to more than {_MOST >> 20} MiB, which tc3 firsthour never writes; "
                    "give another file"
                )
            return {name: archive.read(name).decode("utf-8") for name in archive.namelist()}
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        UnicodeDecodeError,
        NotImplementedError,
        RuntimeError,
        OSError,
    ) as error:
        words = " ".join(str(error).split())
        raise DataError(
            f"{path}: the bundle is truncated or damaged, or is not a zip file ({words}); copy it again"
        ) from None


def _manifest(path: Path, text: str) -> Manifest:
    place = f"{path}: {MANIFEST}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: the file {not_json(error)}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise DataError(
            f"{place}: format is {found!r}, but this tc3 reads format {FORMAT}; use the version of tc3 "
            f"that wrote the bundle"
        )
    names = [one.name for one in fields(Manifest)]
    refuse_unknown(f"{place}: ", content, [*names, "seal"], DataError)
    if missing := [name for name in [*names, "seal"] if name not in content]:
        raise DataError(f"{place}: {missing[0]}: the key is missing; use an unedited bundle")
    if content["seal"] != _seal(content):
        raise DataError(f"{place}: the manifest was edited after the bundle was written; use an unedited bundle")
    return Manifest(**{name: content[name] for name in names})


def _check_files(path: Path, manifest: Manifest, texts: Mapping[str, str]) -> None:
    """Raise an error unless every file of the manifest is there as it was written, and no other file."""
    for name, known in manifest.files.items():
        if name not in texts:
            raise DataError(f"{path}: {name}: the file is missing from the bundle; copy the bundle again")
        if hashlib.sha256(texts[name].encode()).hexdigest() != known["sha256"]:
            raise DataError(f"{path}: {name}: the file was edited after the bundle was written; use an unedited bundle")
    refuse_unknown(f"{path}: ", texts, manifest.files, DataError, "file of the manifest")


def _check_versions(path: Path, manifest: Manifest) -> None:
    for name, here in software().items():
        there = manifest.versions.get(name)
        if there != here:
            measured = f"{name} {there}" if there else f"an {name} of an older tc3"
            raise DataError(
                f"{path}: the bundle was measured with {measured}, but this is {name} {here}; measure again, or read "
                f"the bundle with {measured}"
            )


# What the tools take of a bundle.


@dataclass(frozen=True)
class MemoryTerms:
    """A `MemoryTerms` holds the terms of the memory model that `tc3 firsthour` measured on a cluster.

    Args:
        activations: factor on the modelled activations and on what one pass needs beside them.
        buffers: factor on the modelled buffers of communication.
        reserve_bytes: bytes of a device that are in use beside the model (framework, driver, fragments).
        error: largest relative difference that these terms leave on the measured runs.
    """

    activations: float
    buffers: float
    reserve_bytes: float
    error: float

    @property
    def reserve(self) -> float:
        """Return the bytes of a device that predictions without the factors must leave to framework and driver. Return
        0 if `reserve_bytes` is below 0, because a negative value only makes up for factors that are too large.
        """
        return max(0.0, self.reserve_bytes)


AS_MODELLED = MemoryTerms(1.0, 1.0, 0.0, 0.0)


def measured_cluster(bundle: Bundle) -> str:
    """Return the text of the cluster file that `tc3 firsthour` calibrated.

    Raises:
        DataError: `tc3 firsthour` ended before it calibrated the cluster file.
    """
    if CLUSTER not in bundle.texts:
        raise DataError(
            f"{bundle.path}: the bundle has no {CLUSTER}, because the check `calibrate` gave no result; to see "
            f"why, run `tc3 firsthour read {bundle.path}`"
        )
    return bundle.texts[CLUSTER]


def measured_memory(bundle: Bundle) -> MemoryTerms | None:
    """Return the measured terms of the memory model; return None if `tc3 firsthour` could not determine these terms.

    Raises:
        DataError: the file has another form.
    """
    content = bundle.json(MEMORY)
    if content is None:
        return None
    names = [one.name for one in fields(MemoryTerms)]
    refuse_unknown(f"{bundle.path}: {MEMORY}: ", content, names, DataError)
    return MemoryTerms(**content)


def require_memory(path: Path, recipe: Path, say: Callable[[str], object]) -> MemoryTerms:
    """Return the measured terms of the memory model that a bundle (the results of `tc3 firsthour`) holds for a recipe,
    and print where the run in the bundle was measured.

    Raises:
        DataError: as `read_bundle`; or the bundle has no terms of memory, and the output would look measured.
    """
    bundle = read_bundle(path, recipe)
    terms = measured_memory(bundle)
    if terms is None:
        raise DataError(f"{path}: the bundle has no measured memory; run tc3 firsthour read {path} to see why")
    say(origin(bundle))
    return terms


def memory_in_words(bundle: Bundle) -> str:
    """Return a sentence about the measured terms of memory in a bundle, for commands that predict other layouts than
    the measured one. Commands that predict other layouts use the measured reserve, which does not depend on the layout,
    and not the measured factors.
    """
    terms = measured_memory(bundle)
    if terms is None:
        return "memory is as modelled: the bundle has no measured memory"
    return (
        f"memory: {terms.reserve / GIB:.2f} GiB of a device's limit count as in use beside the model, as measured"
        f"{' (a fitted value below 0 counts as none)' * (terms.reserve_bytes < 0)}; the "
        f"bundle's factors (activations x {terms.activations:.2f}, buffers x {terms.buffers:.2f}) are not used, as "
        "they were measured on the recipe's own layout; --memory and --memory-margin leave more room"
    )


def applied(stage: StageMemory, terms: MemoryTerms) -> StageMemory:
    """Return the predicted memory of a stage with activations and buffers multiplied by the measured factors. This
    function does not add the measured reserve, which is subtracted from the device's memory instead.
    """
    return replace(
        stage,
        activations=stage.activations * terms.activations,
        working=stage.working * terms.activations,
        buffers=stage.buffers * terms.buffers,
    )


def origin(bundle: Bundle) -> str:
    """Return a sentence that says where a bundle's measurements were made; commands that use the measurements print
    this sentence.
    """
    manifest = bundle.manifest
    who = f"{bundle.path}: {manifest.devices:,} x {manifest.device}, {manifest.made[:10]}, verdict {manifest.verdict}"
    if manifest.simulated:
        return f"{who}; a simulated cluster made these numbers, so nothing in them was measured"
    return f"measured by {who}"
