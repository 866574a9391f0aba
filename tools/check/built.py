"""MindFormers' own build of the recipes against what was written: a key that did not arrive is an error."""

from __future__ import annotations

from typing import Any

from tools.check.arrival import same
from tools.check.build import Builder
from tools.recipe.findings import Findings, Report
from tools.recipe.view import MODEL, View
from tools.schema.converter import convert
from tools.schema.schema import Schema, load_schema
from tools.schema.stages import layers_of

# fields that MindFormers is right to derive: offset and recompute are compared as layers, rope_scaling is taken apart
_DERIVED = {
    *("offset", "moe_layer_freq", "rope_scaling", "param_init_std_rules", "moe_router_num_groups", "hidden_act"),
    *("position_embedding_type", "rotary_scaling_factor", "max_position_embeddings", "pad_token_id"),
}


def check_built(reports: list[Report]) -> str:
    """Add to each report what MindFormers' build says; returns a note when MindFormers could not be asked."""
    if not reports:
        return ""
    results = Builder([report.recipe for report in reports]).results()
    if results is None:
        return "MindFormers could not be started; the checks emulated its converter (--no-build hides this line)"
    for report, result in zip(reports, results, strict=True):
        found = Findings(report.recipe, load_schema().line)
        _compare(View(report.recipe), load_schema(), result, found)
        report.findings += found.found
    return ""


def _compare(view: View, schema: Schema, result: dict[str, Any], found: Findings) -> None:
    """One recipe against one build."""
    if "error" in result:
        message = result["error"].replace("\n", " ")
        found.error(MODEL, f"MindFormers refuses to build it: {message}")
        return
    model, built = schema.model_type(view.recipe), convert(view, schema)
    for key, value in view.get(MODEL, {}).items():
        for target, function in schema.targets(model, key):
            arrived = result["fields"].get(target)
            if function is None and target not in _DERIVED and value is not None and not same(value, arrived):
                wrong = f"{value!r} did not arrive: MindFormers built {target} = {arrived!r}"
                found.error((*MODEL, key), wrong)
    layers = layers_of(view, built)
    if layers is not None and result["layers"] != layers:
        found.error((*MODEL, "offset"), f"MindFormers splits the layers {result['layers']}, the recipe says {layers}")
