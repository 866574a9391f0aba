"""This module reads hardware files, which describe the speeds and sizes of the devices and links of a cluster.

Each number of a file is `{value, certainty, source}`, and a user's own file must give all three. Publications use many
names for one device ("Atlas 800T A2", "DGX-H100", "910B"); `name_of` and `device_in` find the device to which a name
belongs. `read_yaml` reads any YAML file that a user wrote, such as a cluster's file or a file of measurements.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from plugins.errors import RecipeError, TC3Error, did_you_mean, refuse_unknown
from tools.files.small_yaml import SmallLoader, small_text
from tools.hardware.units import LONG
from tools.ranges import Range

# words -> name of a hardware file or a cluster; the first that fits
_KNOWN_AS = (
    ("A100", "a100_80g"),
    ("96GB HBM2e", "h100_96g"),
    ("H800", "h800"),
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B300", "b300"),
    ("B200", "b200"),
    ("H100", "h100"),
    ("Atlas 900 A2", "atlas_900_a2"),
    ("Atlas 900 A3", "atlas_900_a3"),
    ("910C", "atlas_900_a3"),
    ("Atlas 800T A2", "atlas_800t_a2"),
    ("910B", "atlas_800t_a2"),
)
NAMES = tuple(dict.fromkeys(name for _, name in _KNOWN_AS))


def name_of(text: str) -> str:
    """Return the name of the device if `text` is an alias of a device; otherwise return `text` itself.

    The whole of `text` must be an alias: an alias somewhere in the path of a missing file must not count as a device.
    """
    plain = _plain(text)
    return next((name for words, name in _KNOWN_AS if plain in (_plain(words), name)), text)


def device_in(text: str) -> str:
    """Return the name of the device in a text such as "H100-80GB SXM, 8 a node"; return "" if the text names no known
    device.
    """
    name = name_of(text)
    if name in NAMES:
        return name
    return next((name for words, name in _KNOWN_AS if words.lower() in text.lower()), "")


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


class _Loader(SmallLoader):
    """A `_Loader` refuses a key that occurs twice in a mapping, because YAML would silently keep only the last
    value.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read a YAML mapping as the parent class does, and raise an error for a key that occurs twice in the mapping
        itself. A key of the mapping may also occur in a mapping that `<<` merges.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines and key.value != "<<":
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is already set in line {lines[key.value]}", problem_mark=key.start_mark
                )
            lines[key.value if isinstance(key, yaml.ScalarNode) else ""] = line
        return node


def read_yaml(path: Path, error: type[TC3Error], shown: str | None = None) -> Any:
    """Return the content of a YAML file that a user wrote, such as a cluster's file.

    Args:
        error: the class of the errors that are raised.
        shown: the name of the file in error messages, by default `path`.

    Raises:
        error: the file cannot be read, is not YAML, or is too large.
    """
    name = shown or str(path)
    try:
        return yaml.load(small_text(path, error), _Loader)
    except OSError as wrong:
        raise error(f"{name}: the file cannot be read: {wrong.strerror}") from None
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise error(f"{name}{line}: the file cannot be read: {wrong.problem or wrong.context}") from None
    except (yaml.YAMLError, RecursionError) as wrong:
        why = " ".join(str(wrong).split()) or "its values are nested too deep"
        raise error(f"{name}: the file cannot be read: {why}") from None
    except TC3Error:
        raise
    except ValueError as wrong:  # a date or a number that is none
        raise error(f"{name}: the file cannot be read: {' '.join(str(wrong).split())}") from None


FOLDER = Path(__file__).parent
CERTAINTIES = ("quoted", "derived", "assumed")
DTYPES = (*LONG, "fp8", "fp4")

# what a number may be: units mistaken (TFLOP/s, GB, us) lie outside
_RATE = Range(1e3, 1e18, whole=False)  # bytes or FLOPs per second
_SECONDS = Range(0, 10, whole=False)
_SHARE = Range(0, 1, whole=False, above=True)
_LINK = {"bytes_per_s": _RATE, "latency_s": _SECONDS, "efficiency": _SHARE}
_PORTS = Range(1, 16)
_FIGURES: dict[str, Any] = {
    "peak_flops": dict.fromkeys(DTYPES, Range(1e9, 1e18, whole=False)),
    "hbm_bytes": Range(1e6, 1e13, whole=False),
    "hbm_bytes_per_s": _RATE,
    "devices_per_node": Range(1, 100_000),
    "intra_node": _LINK,
    "inter_node": _LINK,
    "launch_s": _SECONDS,
}
_WORDS = ("name", "device")
_HOST = "host_link"  # may be missing: only the price of swapping hangs on it
_VERSION = "estimator"  # only in files with fitted efficiencies
# keys of older files, and what is to be done about them
_GONE = {"matmul_efficiency": "delete it: the efficiency of matmuls is now fitted (tools/estimate/efficiencies.yaml)"}


class Origin(NamedTuple):
    """An `Origin` holds the source of a number in a hardware file, and the certainty of the number: "quoted", "derived"
    or "assumed".
    """

    certainty: str
    source: str


@dataclass(frozen=True)
class Link:
    """A `Link` describes one class of links (inside a node or between nodes) by its bandwidth: the bytes per
    second that one device can send over such a link in one direction.

    Args:
        bytes_per_s: the nominal bandwidth of one device over these links.
        latency_s: the seconds that each message costs in addition to the time of its bytes.
        efficiency: the share of the nominal bandwidth that a large collective reaches, in (0, 1].
        ports: the number of ports of which `bytes_per_s` is the sum; ring collectives use all ports, exchanges of
            experts' tokens use one (a file may leave this number out).
    """

    bytes_per_s: float
    latency_s: float
    efficiency: float
    ports: int = 1

    @property
    def reached(self) -> float:
        """Return the bytes per second that a large collective reaches over links of this class."""
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True)
class HostLink:
    """A `HostLink` is the bandwidth from a device to its host's memory in one direction. The field `origin` says
    whether the device has this bandwidth even while other devices send at the same time.
    """

    bytes_per_s: float
    origin: Origin

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:g} GB/s ({self.origin.certainty})"


@dataclass(frozen=True)
class Hardware:
    """A `Hardware` holds the numbers of one cluster: sizes in bytes, times in seconds, and dense FLOP/s.

    Args:
        peak_flops: the peak FLOP/s for each dtype that the file names ("bf16", "fp16", "fp32", "fp8", "fp4").
        launch_s: the fixed seconds to launch one operator.
        origins: for each dotted key of the file, the origin of its number.
        host_link: the link to the host's memory; None if the file does not give it.
        file: the name of the file in messages.
        efficiency: the values of `tools.estimate.efficiency.Efficiency` that the file states (written by `tc3 search
            calibrate`); {} if the file states none.
        estimator: the version of the model of time to which these values were fitted; "" if the file does not state it.
    """

    name: str
    device: str
    peak_flops: Mapping[str, float]
    hbm_bytes: float
    hbm_bytes_per_s: float
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    launch_s: float
    origins: Mapping[str, Origin] = field(repr=False)
    efficiency: Mapping[str, Any] = field(default_factory=dict, repr=False)
    host_link: HostLink | None = None
    file: str = field(default="", repr=False, compare=False)
    estimator: str = field(default="", repr=False, compare=False)

    def with_faster(self, link: str, factor: float) -> Hardware:
        """Return the cluster with the bandwidth of its links inside nodes ("intra_node") or between nodes
        ("inter_node") multiplied by `factor`.
        """
        old: Link = getattr(self, link)
        changed: dict[str, Any] = {link: replace(old, bytes_per_s=old.bytes_per_s * factor)}
        return replace(self, **changed)

    @property
    def assumed(self) -> list[str]:
        """Return the dotted keys of the numbers that were neither measured nor published."""
        return [key for key, origin in self.origins.items() if origin.certainty == "assumed"]


def known_hardware() -> list[str]:
    """Return the names of this repository's hardware files."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_hardware(name_or_path: str | os.PathLike[str]) -> Hardware:
    """Load the hardware of a cluster, which is given by a name (see `known_hardware`), by a device ("Atlas 800T A2"),
    or by the path of a YAML file.

    Raises:
        RecipeError: the file does not exist, or a number in the file is missing, impossible or without a source.
    """
    word = name_of(os.fspath(name_or_path))
    if word in known_hardware():
        return _Reader(str(FOLDER / f"{word}.yaml"), shown=f"{word}.yaml").hardware()
    if os.path.isfile(word):
        return _Reader(word, shown=word).hardware()
    hint = did_you_mean(Path(word).stem.lower().replace(" ", "_"), known_hardware())
    raise RecipeError(
        f"cluster {word}: there is no such file, and the known clusters are {', '.join(known_hardware())}{hint}; "
        "for another cluster, copy the file of a known one and pass its path"
    )


class _Reader:
    """A `_Reader` reads one file; errors begin with the name `shown` and the key path."""

    def __init__(self, path: str, shown: str):
        self.shown = shown
        self.origins: dict[str, Origin] = {}
        self.content = read_yaml(Path(path), RecipeError, shown)

    def hardware(self) -> Hardware:
        """Check the content of a hardware file, and return it as a `Hardware`."""
        efficiency = self.content.pop("efficiency", {}) if isinstance(self.content, dict) else {}
        content = self._mapping(self.content, "", [*_WORDS, *_FIGURES], required=True, more=(_HOST, _VERSION))
        for word in (*_WORDS, _VERSION):
            if not isinstance(content.get(word, ""), str):
                raise RecipeError(f"{self.shown}: {word}: the value must be text, not {content[word]!r}")
        values = {key: self._value(content[key], key, kind) for key, kind in _FIGURES.items()}
        values["intra_node"] = Link(**values["intra_node"])
        values["inter_node"] = Link(**values["inter_node"])
        host = self._host(content[_HOST]) if _HOST in content else None
        more: dict[str, Any] = {"origins": self.origins, "efficiency": efficiency, "host_link": host}
        more["estimator"] = content.get(_VERSION, "")
        return Hardware(content["name"], content["device"], **values, **more, file=self.shown)

    def _host(self, content: Any) -> HostLink:
        """Return the link to the host with its origin, which is not listed elsewhere because no prediction of a step
        depends on this link.
        """
        rate = self._figure(content, _HOST, _RATE)
        return HostLink(rate, self.origins.pop(_HOST))

    def _value(self, content: Any, key: str, kind: Any) -> Any:
        """Return a number, or a mapping of numbers."""
        if isinstance(kind, Range):
            return self._figure(content, key, kind)
        dtypes = key == "peak_flops"  # of which one may be enough
        more = {} if dtypes else {"ports": _PORTS}
        content = self._mapping(content, key, list(kind), required=not dtypes, more=tuple(more))
        if not content:
            raise RecipeError(f"{self.shown}: {key}: the mapping is empty; give at least one of {', '.join(kind)}")
        return {name: self._figure(content[name], f"{key}.{name}", {**kind, **more}[name]) for name in content}

    def _figure(self, content: Any, key: str, kind: Range) -> float:
        """Return the number at `key`; notes its origin."""
        content = self._mapping(content, key, ["value", "certainty", "source"], required=True)
        value, certainty, source = content["value"], content["certainty"], content["source"]
        if certainty not in CERTAINTIES:
            hint = did_you_mean(str(certainty), list(CERTAINTIES))
            known = ", ".join(CERTAINTIES)
            raise RecipeError(f"{self.shown}: {key}.certainty: {certainty!r} is not one of {known}{hint}")
        if not isinstance(source, str) or not source.strip():
            raise RecipeError(f"{self.shown}: {key}.source: the value must be a text; say where the number comes from")
        self.origins[key] = Origin(certainty, source)
        number = _number(value)
        if refusal := kind.refusal(value if number is None else number):
            raise RecipeError(f"{self.shown}: {key}.value: {_short(value)} {refusal}")
        assert number is not None
        return int(number) if kind.whole else number

    def _mapping(
        self, content: Any, key: str, known: list[str], required: bool, more: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return `content` as a mapping of `known` keys, of which all must be there if `required`, and of `more`."""
        place = f"{key}." if key else ""
        if not isinstance(content, dict):
            keys = "the keys" if required else "any of the keys"
            raise RecipeError(
                f"{self.shown}: {key or 'the file'}: this is not a mapping; write a mapping with {keys} "
                f"{', '.join(known)}"
            )
        for name in content:
            if not key and name in _GONE:
                raise RecipeError(f"{self.shown}: {name}: the key is no longer read; {_GONE[name]}")
        refuse_unknown(f"{self.shown}: {place}", content, [*known, *more])
        for name in known:
            if required and name not in content:
                raise RecipeError(f"{self.shown}: {place}{name}: the key is missing")
        return content


def _number(value: Any) -> float | None:
    """Return a number; a text such as 1e12, which YAML 1.1 does not read as a number, is accepted, too."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
