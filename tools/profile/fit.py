"""This module fits the estimator's efficiencies to one profiled step, and makes a cluster file with the fitted
efficiencies. Each efficiency is fitted to the seconds of the parts of the step that depend on it (such as matmul for
the efficiency of matrix products).

1. *operators*: fit the dependence of a matmul's speed on its smallest dimension, from the shapes and the relative
   speeds of the kernels;
2. *terms*: fit the terms of `attribute`, as shares of the step, by least squares (SciPy). The terms are matmul,
   attention, elementwise operators and the optimizer (which determine `memory`; on a CPU, which fuses no operators, the
   optimizer also has a separate parameter), each kind of communication with and without its hidden part (which
   determine the links and the hidden shares), and the host's time;
3. *choice*: fit only parameters that change the predicted terms, and of which no parameter has the same effect as
   others (found by a pivoted QR decomposition of the derivatives). The other parameters keep their values, and the
   result says why.

The time in which the pipeline waits follows from the other terms. Time that is not attributed is added to `step_s`, so
that the terms add up to the whole step.

For a CPU without a hardware file, a cluster file is made in which the speeds of the best kernels of its profile count
as peaks.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import numpy as np
import yaml
from scipy.linalg import qr
from scipy.optimize import least_squares

from plugins.errors import DataError
from tools.estimate.configuration import MODEL_VERSION, Configuration
from tools.estimate.efficiency import NAMES, PROFILED, Efficiency
from tools.estimate.layer_model import Matmul
from tools.estimate.published.calibrate import BOUNDS
from tools.estimate.time_model import TimeModel
from tools.hardware import Hardware
from tools.profile.attribute import HOST, Measured, modelled, whole
from tools.profile.kernels import COMPUTE, OTHER, Profile, matmul_of, term_of

TELLING = 1e-3  # of the step: a parameter that is a factor e off must move the terms by that much
APART = 0.02  # of its own movement, which no other parameter can imitate
_STEP = 1e-4
_WIDE = {  # of a CPU: what nobody fuses, and a host that is the device
    "memory": (1e-4, 1.0),
    "attention": (1e-3, 1.0),
    "matmul": (1e-2, 1.0),
    "layer_s": (1e-6, 1.0),
    "moe_s": (1e-6, 1.0),
    "update": (0.01, 100.0),
    "weight_s": (0.0, 0.1),
}
Numbers = Callable[[Efficiency], np.ndarray]


@dataclass(frozen=True)
class Fit:
    """A `Fit` holds efficiencies of the estimator that were fitted to a profile, with the modelled seconds of the
    profiled step before and after the fit.

    Args:
        efficiency: the efficiencies after the fit; those that `fitted` does not name are unchanged.
        kept: for each parameter that was not fitted the reason why the profile does not determine it.
        before, after: the modelled seconds of each of `TERMS` with the efficiencies before and after the fit.
        measured: the seconds of the profiled step.
    """

    efficiency: Efficiency
    fitted: tuple[str, ...]
    kept: dict[str, str]
    before: dict[str, float]
    after: dict[str, float]
    measured: Measured

    def as_json(self) -> dict[str, Any]:
        """Return the fitted efficiencies and the modelled seconds as values fit for JSON."""
        return asdict(self)


def fit(
    profile: Profile,
    measured: Measured,
    config: Configuration,
    hardware: Hardware,
    start: Efficiency,
    stage: int | None,
) -> Fit:
    """Return the efficiencies with which the estimator predicts a profiled step best; the fit begins with the
    efficiencies `start`.

    Args:
        stage: the pipeline stage that was profiled; None if the stage is unknown, in which case the slowest stage is
            assumed.

    Raises:
        DataError: the profile determines none of the parameters.
    """
    bounds = {**BOUNDS, **(_WIDE if profile.device == "CPU" else {})}
    bounds = {name: bounds[name] for name in (*NAMES, *PROFILED) if name in bounds}
    numbers = _numbers(profile, measured, config, hardware, stage)
    left = bounds if measured.scoped else _one_host(numbers, start, bounds)
    names, kept = _choose(numbers, start, left)
    kept |= {name: "without scopes in names the host's time is one" for name in bounds if name not in left}
    if not names:
        raise DataError(
            f"{profile.source}: this profile determines none of the efficiencies {', '.join(bounds)}; give the profile "
            "of a whole training step"
        )
    best = _solve(numbers, start, names, bounds)
    for name in names:
        value, span = getattr(best, name), bounds[name]
        if min(abs(value - bound) for bound in span) < 1e-6 * span[1]:
            kept[name] = "fitted, but its value is at the limit of its range: the model lacks something there"
    before, after = (modelled(config, hardware, values, stage) for values in (start, best))
    return Fit(best, tuple(names), kept, before, after, measured)


def _numbers(
    profile: Profile, measured: Measured, config: Configuration, hardware: Hardware, stage: int | None
) -> Numbers:
    """Return a function from efficiencies to the differences between predicted and measured seconds, as shares of the
    step.
    """
    products = _products(profile, config)
    weights = np.array([seconds for _, seconds in products]) / measured.seconds
    raw = {name: seconds for name, seconds in measured.whole.items() if name != "pipeline"}

    def off(values: Efficiency) -> np.ndarray:
        model = modelled(config, hardware, values, stage, simulated=False)  # of the terms below none is `pipeline`
        terms = [model[name] - measured.terms[name] for name in (*COMPUTE, "tp", "cp", "ep", "data")]
        terms += _host(model, measured)
        if raw:
            open_ = whole(config, hardware, values, stage)
            terms += [open_[name] - raw[name] for name in raw if name in open_]
        found = np.array(terms) / measured.seconds
        return np.concatenate([found, _relative(config, hardware, values, products, weights)])

    return off


def _one_host(
    numbers: Numbers, start: Efficiency, bounds: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Return the bounds with only one of the parameters of the host, the one that changes the step most, because gaps
    do not show which parameter causes them.
    """
    host = [name for name in ("layer_s", "moe_s", "weight_s", "step_s") if name in bounds]
    moves = np.linalg.norm(_derivatives(numbers, start, host, bounds), axis=0)
    return {name: span for name, span in bounds.items() if name not in host or name == host[int(moves.argmax())]}


def _host(model: Mapping[str, float], measured: Measured) -> list[float]:
    """Return the differences between predicted and measured seconds of the host, one for each term if the names of
    kernels separate the terms, otherwise one for all terms.
    """
    names = [[name] for name in HOST] if measured.scoped else [list(HOST)]
    names[-1] = [*names[-1], OTHER]
    return [sum(model[name] - measured.terms[name] for name in every) for every in names]


def _products(profile: Profile, config: Configuration) -> list[tuple[Matmul, float]]:
    """Return the seconds of each matrix product, by shape; the seconds of a gradient count to the product to which the
    gradient belongs.
    """
    found: dict[tuple[float, float, float, float], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in profile.step.kernels:
        matmul = matmul_of(kernel) if term_of(kernel, config) == "matmul" else None
        if matmul and kernel.seconds:
            least, middle, most = sorted((matmul.rows, matmul.columns, matmul.depth))
            key = (least, middle, most, matmul.times)
            found[key][0] += kernel.seconds
            found[key][1] += kernel.count
    return [
        (Matmul(rows, columns, depth, times * count), seconds)
        for (rows, columns, depth, times), (seconds, count) in sorted(found.items())
    ]


def _relative(
    config: Configuration,
    hardware: Hardware,
    values: Efficiency,
    products: Sequence[tuple[Matmul, float]],
    weights: Any,
) -> np.ndarray:
    """Return how much the errors of the matmul shapes differ from each other: logarithms of predicted over measured
    seconds without their mean, weighted by the shapes' shares of the step.
    """
    if len(products) < 2:
        return np.zeros(0)
    times = TimeModel(hardware, values)
    logs = np.array([np.log(times.multiplying(config, matmul) / seconds) for matmul, seconds in products])
    result: np.ndarray = weights * (logs - np.average(logs, weights=weights))
    return result


def _choose(
    numbers: Numbers, start: Efficiency, bounds: Mapping[str, tuple[float, float]]
) -> tuple[list[str], dict[str, str]]:
    """Return the parameters that the terms determine, and for each other parameter the reason why they do not."""
    names = list(bounds)
    moves = _derivatives(numbers, start, names, bounds)
    sizes = np.linalg.norm(moves, axis=0)
    kept = {name: "no term depends on it" if size < 1e-9 else f"it moves no term by {TELLING:.1%} of the step"
            for name, size in zip(names, sizes, strict=True) if size < TELLING}  # fmt: skip
    left = [index for index in range(len(names)) if names[index] not in kept]
    if not left:
        return [], kept
    scaled = moves[:, left] / sizes[left]
    _, triangle, order = qr(scaled, mode="economic", pivoting=True)
    own = np.abs(np.diag(triangle))
    rank = int((own > APART).sum())
    chosen = [left[index] for index in order[:rank]]
    for index in order[rank:]:
        shares = np.linalg.lstsq(scaled[:, order[:rank]], scaled[:, index], rcond=None)[0]
        alike = names[chosen[int(np.abs(shares).argmax())]]
        kept[names[left[index]]] = f"the profile cannot tell it from {alike}"
    return [names[index] for index in sorted(chosen)], kept


def _plain(values: Efficiency, names: Sequence[str], bounds: Mapping[str, tuple[float, float]]) -> np.ndarray:
    """Return the parameters as coordinates: logarithms, or the share itself for shares that may be 0; all lie inside
    the bounds.
    """
    low, high = _limits(names, bounds)
    at = [getattr(values, name) if not bounds[name][0] else np.log(max(getattr(values, name), 1e-12)) for name in names]
    return np.clip(np.array(at, float), low + 1e-9, high - 1e-9)


def _with(
    values: Efficiency, names: Sequence[str], at: np.ndarray, bounds: Mapping[str, tuple[float, float]]
) -> Efficiency:
    changed: dict[str, Any] = {
        name: float(np.exp(x)) if bounds[name][0] else float(x) for name, x in zip(names, at, strict=True)
    }
    return replace(values, **changed)


def _limits(names: Sequence[str], bounds: Mapping[str, tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = [bounds[name] if not bounds[name][0] else tuple(np.log(bounds[name])) for name in names]
    low, high = np.array(pairs, float).T
    return low, high


def _derivatives(
    numbers: Numbers, start: Efficiency, names: Sequence[str], bounds: Mapping[str, tuple[float, float]]
) -> np.ndarray:
    """Return the derivatives [numbers, parameters], computed with steps that stay inside the bounds."""
    at, (low, high) = _plain(start, names, bounds), _limits(names, bounds)
    columns = []
    for index in range(len(names)):
        ahead, behind = at.copy(), at.copy()
        ahead[index], behind[index] = min(at[index] + _STEP, high[index]), max(at[index] - _STEP, low[index])
        moved = numbers(_with(start, names, ahead, bounds)) - numbers(_with(start, names, behind, bounds))
        columns.append(moved / (ahead[index] - behind[index]))
    return np.array(columns).T


def _solve(
    numbers: Numbers, start: Efficiency, names: Sequence[str], bounds: Mapping[str, tuple[float, float]]
) -> Efficiency:
    found = least_squares(
        lambda at: numbers(_with(start, names, at, bounds)),
        _plain(start, names, bounds),
        bounds=_limits(names, bounds),
        x_scale="jac",
        xtol=1e-9,
        ftol=1e-12,
        gtol=1e-12,
        max_nfev=300,
    )
    return _with(start, names, found.x, bounds)


CPU_START = Efficiency(
    matmul=0.9, matmul_fp8=0.5, half_size=64.0, attention=0.3, memory=0.05, unfused=1.0, link=1.0, hidden=0.5,
    hidden_ep=0.5, layer_s=1e-3, moe_s=1e-3, burst=1.0, step_s=1e-2,
    weight_s=1e-4,
)  # fmt: skip
_LARGE = 1e-4  # seconds: shorter kernels are mostly their own start
_ITEM = 4


def host_content(profile: Profile, config: Configuration, name: str) -> dict[str, Any]:
    """Return the content of a hardware file for the CPU on which a profile was made.

    The peak FLOP/s are those of the fastest matmul, and the bandwidth is that of the fastest elementwise operator,
    among operators that take more than 0.1 ms. A run on one device sends no data, so the bandwidths of links are
    assumed.

    Raises:
        DataError: the profile has no shapes of tensors, so FLOPs are unknown.
    """
    rates, bytes_ = [], []
    for kernel in profile.step.kernels:
        if kernel.seconds / kernel.count < _LARGE:
            continue
        term = term_of(kernel, config)
        matmul = matmul_of(kernel) if term == "matmul" else None
        if matmul:
            rates.append(matmul.flops * kernel.count / kernel.seconds)
        elif kernel.inputs and term == "elementwise":
            sizes = [prod(shape) for shape in kernel.inputs]
            bytes_.append(_ITEM * (sum(sizes) + max(sizes)) * kernel.count / kernel.seconds)
    if not rates or not bytes_:
        raise DataError(
            f"{profile.source}: the profile has no shapes of matmuls and other operators, so the peak FLOP/s and "
            "bandwidth of the CPU cannot be derived"
        )
    peak = _figure(max(rates), "derived", "fastest matmul of the profile")
    link = {
        "bytes_per_s": _figure(1e10, "assumed", "one device sends nothing"),
        "latency_s": _figure(0.0, "assumed", "one device sends nothing"),
        "efficiency": _figure(1.0, "assumed", "one device sends nothing"),
    }
    # of bf16, too, for fused attention is counted against it
    return {
        "name": name,
        "device": "CPU",
        "peak_flops": {"fp32": peak, "bf16": _figure(max(rates), "derived", "as fp32, which it is computed in")},
        "hbm_bytes": _figure(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), "derived", "this host"),
        "hbm_bytes_per_s": _figure(
            max(bytes_), "derived", "fastest elementwise operator of the profile, caches included"
        ),
        "devices_per_node": _figure(1, "assumed", "one process"),
        "intra_node": link,
        "inter_node": link,
        "launch_s": _figure(1e-5, "assumed", "gaps between operators stand in layer_s and step_s"),
    }


def _figure(value: float, certainty: str, source: str) -> dict[str, Any]:
    return {"value": float(f"{value:.5g}"), "certainty": certainty, "source": source}


class _Whole(yaml.SafeDumper):
    """A `_Whole` writes a value that occurs twice in full each time."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def file_text(content: Mapping[str, Any], name: str, found: Fit, profile: Profile, like: str) -> str:
    """Return the text of a cluster file called `name` that holds the fitted efficiencies.

    Args:
        content: the content of the hardware file.
        like: the name of the hardware file that `content` holds.
    """
    values = {key: value if isinstance(value, bool) else float(f"{value:.5g}")
              for key, value in asdict(found.efficiency).items()}  # fmt: skip
    measured, after = found.measured.seconds, sum(found.after.values())
    head = [
        f"{name}: {like} with efficiencies fitted to one profiled step of {measured:.4g} s ({profile.device}).",
        f"Fitted: {', '.join(found.fitted)}; the model's step is {after / measured - 1:+.1%} off it. Others:",
        *(f"  {key}: {why}" for key, why in found.kept.items()),
    ]
    fitted = {**content, "name": name, "efficiency": values, "estimator": MODEL_VERSION}
    body = yaml.dump(fitted, Dumper=_Whole, sort_keys=False, width=110)
    return "".join(f"# {line}\n" for line in head) + body
