"""Read a hardware file. Each number is `{value, certainty, source}`; whoever passes an own file must say both too."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from plugins.errors import RecipeError, did_you_mean

FOLDER = Path(__file__).parent
CERTAINTIES = ("quoted", "derived", "assumed")
DTYPES = ("bf16", "fp16", "fp32", "fp8")

# what a number must be, in words -> its test
_POSITIVE, _NOT_NEGATIVE = "a number above 0", "a number, 0 or above"
_SHARE, _COUNT = "a number above 0 and at most 1", "an integer, 1 or above"
_LINK = {"bytes_per_s": _POSITIVE, "latency_s": _NOT_NEGATIVE, "efficiency": _SHARE}
_FIGURES: dict[str, Any] = {
    "peak_flops": dict.fromkeys(DTYPES, _POSITIVE),
    "hbm_bytes": _POSITIVE,
    "hbm_bytes_per_s": _POSITIVE,
    "devices_per_node": _COUNT,
    "intra_node": _LINK,
    "inter_node": _LINK,
    "launch_s": _NOT_NEGATIVE,
    "matmul_efficiency": _SHARE,
}
_WORDS = ("name", "device")


class Origin(NamedTuple):
    """Where a number comes from: certainty is "quoted", "derived" or "assumed"."""

    certainty: str
    source: str


@dataclass(frozen=True)
class Link:
    """One class of links, seen by one device in one direction.

    Args:
        bytes_per_s: nominal bandwidth.
        latency_s: seconds that each message costs beside its bytes.
        efficiency: share of the bandwidth that a large collective reaches, in (0, 1].
    """

    bytes_per_s: float
    latency_s: float
    efficiency: float

    @property
    def reached(self) -> float:
        """Bytes a second that a large collective reaches."""
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Hardware:
    """One cluster. Sizes in bytes, times in seconds, FLOP/s dense.

    Args:
        peak_flops: dtype ("bf16", "fp16", "fp32", "fp8") -> FLOP/s; the dtypes that the file names.
        launch_s: fixed cost of one operator.
        matmul_efficiency: share of the peak that a training step's matmuls reach.
        origins: dotted key -> where the number comes from.
        efficiency: a file's own values of `tools.search.efficiency.Efficiency` (`tc3 search calibrate`); {} without.
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
    matmul_efficiency: float
    origins: Mapping[str, Origin] = field(repr=False)
    efficiency: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def assumed(self) -> list[str]:
        """Dotted keys of the numbers that nobody has measured or published."""
        return [key for key, origin in self.origins.items() if origin.certainty == "assumed"]

    def flops(self, dtype: str) -> float:
        """FLOP/s that matmuls of `dtype` reach.

        Raises:
            RecipeError: the file has no peak for it.
        """
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise RecipeError(f"{self.name}: peak_flops.{dtype}: missing; the file has {known}")
        return self.peak_flops[dtype] * self.matmul_efficiency


def known_hardware() -> list[str]:
    """Names of the files of this repository."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_hardware(name_or_path: str | os.PathLike[str]) -> Hardware:
    """The hardware of a name (see `known_hardware`) or of an own YAML file.

    Raises:
        RecipeError: there is no such file, or a number is missing, impossible or without its source.
    """
    word = os.fspath(name_or_path)
    if word in known_hardware():
        return _Reader(str(FOLDER / f"{word}.yaml"), shown=f"{word}.yaml").hardware()
    if os.path.isfile(word):
        return _Reader(word, shown=word).hardware()
    hint = did_you_mean(Path(word).stem, known_hardware())
    raise RecipeError(
        f"--hardware {word}: no such file, and none of {', '.join(known_hardware())}{hint}; "
        "for another cluster copy one of them and pass its path"
    )


class _Reader:
    """One file; errors begin with the name `shown` and the key path."""

    def __init__(self, path: str, shown: str):
        self.shown = shown
        self.origins: dict[str, Origin] = {}
        try:
            self.content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RecipeError(f"{shown}: cannot be read: {' '.join(str(error).split())}") from None

    def hardware(self) -> Hardware:
        """Everything, checked."""
        efficiency = self.content.pop("efficiency", {}) if isinstance(self.content, dict) else {}
        content = self._mapping(self.content, "", [*_WORDS, *_FIGURES], required=True)
        for word in _WORDS:
            if not isinstance(content[word], str):
                raise RecipeError(f"{self.shown}: {word}: want text, got {content[word]!r}")
        values = {key: self._value(content[key], key, kind) for key, kind in _FIGURES.items()}
        values["intra_node"] = Link(**values["intra_node"])
        values["inter_node"] = Link(**values["inter_node"])
        return Hardware(content["name"], content["device"], **values, origins=self.origins, efficiency=efficiency)

    def _value(self, content: Any, key: str, kind: Any) -> Any:
        """A number, or a mapping of numbers."""
        if isinstance(kind, str):
            return self._figure(content, key, kind)
        dtypes = key == "peak_flops"  # of which one may be enough
        content = self._mapping(content, key, list(kind), required=not dtypes)
        if not content:
            raise RecipeError(f"{self.shown}: {key}: empty; give at least one of {', '.join(kind)}")
        return {name: self._figure(content[name], f"{key}.{name}", kind[name]) for name in content}

    def _figure(self, content: Any, key: str, kind: str) -> float:
        """The number at `key`; notes its origin."""
        content = self._mapping(content, key, ["value", "certainty", "source"], required=True)
        value, certainty, source = content["value"], content["certainty"], content["source"]
        if certainty not in CERTAINTIES:
            hint = did_you_mean(str(certainty), list(CERTAINTIES))
            wanted = ", ".join(CERTAINTIES)
            raise RecipeError(f"{self.shown}: {key}.certainty: want one of {wanted}, got {certainty!r}{hint}")
        if not isinstance(source, str) or not source.strip():
            raise RecipeError(f"{self.shown}: {key}.source: say where the number comes from")
        self.origins[key] = Origin(certainty, source)
        number = _number(value)
        if number is None or not _fits(number, kind):
            raise RecipeError(f"{self.shown}: {key}.value: want {kind}, got {value!r}")
        return int(number) if kind == _COUNT else number

    def _mapping(self, content: Any, key: str, known: list[str], required: bool) -> dict[str, Any]:
        """`content` as a mapping of `known` keys, of which all must be there if `required`."""
        place = f"{key}." if key else ""
        if not isinstance(content, dict):
            raise RecipeError(f"{self.shown}: {key or 'the file'}: want a mapping of {', '.join(known)}")
        for name in content:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise RecipeError(f"{self.shown}: {place}{name}: no such key{hint}; known are {', '.join(known)}")
        for name in known:
            if required and name not in content:
                raise RecipeError(f"{self.shown}: {place}{name}: missing")
        return content


def _number(value: Any) -> float | None:
    """A finite number; YAML 1.1 reads 1e12 as text, people mean a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _fits(number: float, kind: str) -> bool:
    if kind == _NOT_NEGATIVE:
        return number >= 0
    if kind == _COUNT:
        return number >= 1 and number == int(number)
    return 0 < number <= 1 if kind == _SHARE else number > 0
