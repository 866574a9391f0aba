"""This module compares the usual step of a run with the step that the estimator predicts for a measured cluster (`tc3
runs report RUN --measured BUNDLE`). The file BUNDLE holds measurements of `tc3 firsthour`, to which the cluster's
efficiencies were fitted.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from plugins.errors import TC3Error
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.hardware.load import Hardware
from tools.layout.resolve import resolve
from tools.measured import Bundle, measured_cluster
from tools.runs.places import tokens_of
from tools.runs.study import Beside, Study

SLOWER = 1.25  # times the predicted seconds: more than that is worth a look (assumed; predictions are some 7 % off)


def hardware_of(bundle: Bundle) -> Hardware:
    """Return the description of the cluster that `tc3 firsthour` has measured and calibrated.

    Raises:
        DataError: `tc3 firsthour` ended before its calibration.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.yaml"
        file.write_text(measured_cluster(bundle), encoding="utf-8")
        return cluster(str(file))


def beside(found: Study, hardware: Hardware) -> Study:
    """Return the study of a run with its usual and its predicted step time added, or with a note that says why these
    cannot be compared.
    """
    usual = found.run.usual()
    if found.run.recipe is None or usual is None:
        what = "recipe" if found.run.recipe is None else "usual step"
        return replace(
            found,
            notes=[*found.notes, f"the run has no {what}, so that it cannot be compared with the measured cluster"],
        )
    tokens = next((part.tokens for part in reversed(found.run.parts) if part.usual()), None)
    wanted = tokens_of(found.run.recipe)  # other than the steps', as in an early stage of a batch that grows
    if tokens and wanted and tokens != wanted:
        words = f"the run's last known steps have {tokens:,} tokens, and those of its recipe have {wanted:,}"
        return replace(found, notes=[*found.notes, f"{words}, so that they cannot be compared with the prediction"])
    try:
        config = from_recipe(resolve(found.run.recipe, layout="file"))
        predicted = TimeModel(hardware).step(config, simulated=True).total
    except TC3Error as error:
        return replace(found, notes=[*found.notes, f"no step could be predicted for the measured cluster: {error}"])
    ratio = usual / predicted
    words = (
        f"a step takes {usual:.4g} s, but the prediction for the measured cluster is {predicted:.4g} s "
        f"({ratio - 1:+.0%})"
    )
    if ratio > SLOWER:
        words += "; tc3 search explain names the term that takes longer"
    return replace(found, notes=[*found.notes, words], beside=Beside(usual, predicted, ratio))
