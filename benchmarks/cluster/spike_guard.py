"""This program measures how often the spike guard raises an alarm in clean runs, and how small a spike it finds.

    python benchmarks/cluster/spike_guard.py [RUN/metrics/rank_0.jsonl ...]

Clean runs are synthetic: a loss that falls as a power of the step from 11 to about 2, with noise of 1 % that is normal,
or heavy-tailed (Student's t with 3 degrees of freedom), or correlated from step to step; and a global norm with noise
of 15 % of the same kinds. A spike is a step of such a run whose value is raised by a given number of percent. If
metrics files are given, the guard judges every step of them that has a full window of steps before it.
"""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from plugins.batch_ramp.plan import Ramp  # noqa: E402
from plugins.finite_loss.plan import NORM  # noqa: E402
from plugins.spike_guard.plan import (  # noqa: E402
    Settings,
    Window,
    good_steps,
    spreads_above,
)

WINDOWS, THRESHOLDS = (16, 32, 64), (6.0, 8.0, 10.0, 12.0, 16.0)
STEPS, SEEDS = 2_000, 2
RAISED = (0.05, 0.1, 0.2, 0.5)  # of a loss; norms are raised twenty times as much


def noise(kind: str, steps: int, random: np.random.Generator) -> np.ndarray:
    """Return random noise [steps] whose quartiles are those of a standard normal distribution."""
    if kind == "heavy":
        return random.standard_t(3, steps) / 1.134  # so that its quartiles are the normal distribution's
    plain = random.standard_normal(steps)
    if kind == "correlated":
        for before, now in pairwise(range(steps)):
            plain[now] = 0.7 * plain[before] + np.sqrt(1 - 0.49) * plain[now]
    return plain


def runs(kind: str):
    """Yield for each seed the losses and global norms of a run of `STEPS` steps without spikes."""
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        step = np.arange(1, STEPS + 1)
        loss = (1.7 + 9.3 * (1 + step / 30) ** -0.6) * np.exp(0.01 * noise(kind, STEPS, random))
        yield loss, (0.2 + 2.0 * (1 + step / 20) ** -0.7) * np.exp(0.15 * noise(kind, STEPS, random))


def distances(values: np.ndarray, window: int) -> np.ndarray:
    """Return for each step with a full window before it by how many robust standard deviations its value lies above the
    trend of that window.
    """
    return np.array([spreads_above(values[at], values[at - window : at])[0] for at in range(window, len(values))])


def false_alarms() -> None:
    """Print the false alarms per 10,000 steps without a spike; the guard would take a run back to a checkpoint at each
    false alarm.
    """
    print("alarms per 10,000 clean steps (loss, norm)")
    for kind in ("normal", "correlated", "heavy"):
        for window in WINDOWS:
            losses, norms = zip(*((distances(a, window), distances(b, window)) for a, b in runs(kind)), strict=True)
            of = [np.concatenate(each) for each in (losses, norms)]
            cells = [" ".join(f"{(each > threshold).mean() * 1e4:6.1f}" for each in of) for threshold in THRESHOLDS]
            print(
                f"{kind:>10} window {window:>3}: "
                + "  ".join(f"{t:g}:{c}" for t, c in zip(THRESHOLDS, cells, strict=True))
            )


def found(window: int, threshold: float) -> None:
    """Print the shares of raised steps that the guard finds if one step at a time is raised, in the second half of runs
    with heavy-tailed noise.
    """
    for share in RAISED:
        hits: list[list[bool]] = [[], []]
        for series in runs("heavy"):
            for values, hit, raised in zip(series, hits, (share, 20 * share), strict=True):
                for at in range(STEPS // 2, STEPS, 10):
                    hit.append(spreads_above(values[at] * (1 + raised), values[at - window : at])[0] > threshold)
        print(f"loss +{share:.0%} found {np.mean(hits[0]):.1%}, norm +{20 * share:.0%} found {np.mean(hits[1]):.1%}")


def recorded(file: Path, settings: Settings) -> None:
    """Print how often the guard would have raised an alarm in the recorded steps of a run."""
    lines, everything = file.read_text(encoding="utf-8").splitlines(), Ramp((), sys.maxsize)
    steps = good_steps(lines, sys.maxsize, sys.maxsize, everything, 1)
    for size in sorted({16, 32, settings.window}):
        window, largest = Window(size, np.inf), -np.inf
        for step in steps:
            for name in ("loss", NORM):
                if len(window.good[name]) == size and step[name]:
                    largest = max(largest, spreads_above(step[name], window.good[name])[0])
            window.see(step)
        print(f"{file}: {len(steps)} steps, window {size}: the largest lies {largest:.1f} standard deviations above")


if __name__ == "__main__":
    usual = Settings()
    for name in sys.argv[1:]:
        recorded(Path(name), usual)
    if len(sys.argv) == 1:
        false_alarms()
        print(f"window {usual.window}, threshold {usual.threshold:g}:")
        found(usual.window, usual.threshold)
