"""All operator specs, by family; `SPECS` maps name to spec in the order of the table."""

from __future__ import annotations

from tools.accuracy.operators.movement import INDEX, LAYOUT
from tools.accuracy.operators.pointwise import ACTIVATION, ELEMENTWISE, OPTIMIZER
from tools.accuracy.operators.products import ATTENTIONS, MATMUL, MOE
from tools.accuracy.operators.reductions import LOSS, NORMALISE, ORDER, REDUCE
from tools.accuracy.operators.spec import Spec

FAMILIES: dict[str, tuple[Spec, ...]] = {
    "matmul": MATMUL,
    "normalise": NORMALISE,
    "activation": ACTIVATION,
    "attention": ATTENTIONS,
    "moe": MOE,
    "loss": LOSS,
    "elementwise": ELEMENTWISE,
    "reduce": REDUCE,
    "order": ORDER,
    "index": INDEX,
    "layout": LAYOUT,
    "optimizer": OPTIMIZER,
}
SPECS: dict[str, Spec] = {spec.name: spec for specs in FAMILIES.values() for spec in specs}
