"""All operator specs, by family; `SPECS` maps name to spec in the order of the table."""

from __future__ import annotations

from tools.accuracy.operators.spec import Spec
from tools.accuracy.operators.specs.activation import ACTIVATION
from tools.accuracy.operators.specs.attention import ATTENTIONS
from tools.accuracy.operators.specs.elementwise import ELEMENTWISE
from tools.accuracy.operators.specs.index import INDEX
from tools.accuracy.operators.specs.layout import LAYOUT
from tools.accuracy.operators.specs.loss import LOSS
from tools.accuracy.operators.specs.matmul import MATMUL
from tools.accuracy.operators.specs.moe import MOE
from tools.accuracy.operators.specs.normalise import NORMALISE
from tools.accuracy.operators.specs.optimizer import OPTIMIZER
from tools.accuracy.operators.specs.order import ORDER
from tools.accuracy.operators.specs.reduce import REDUCE

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
