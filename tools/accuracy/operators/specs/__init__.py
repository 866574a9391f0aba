"""All operator specs, by family; `SPECS` maps name to spec in the order of the table."""

from __future__ import annotations

from tools.accuracy.operators.spec import Spec
from tools.accuracy.operators.specs import (
    activation,
    attention,
    elementwise,
    index,
    layout,
    loss,
    matmul,
    moe,
    normalise,
    optimizer,
    order,
    reduce,
)

FAMILIES = {
    module.__name__.rsplit(".", 1)[-1]: module.SPECS
    for module in (
        matmul,
        normalise,
        activation,
        attention,
        moe,
        loss,
        elementwise,
        reduce,
        order,
        index,
        layout,
        optimizer,
    )
}
SPECS: dict[str, Spec] = {spec.name: spec for specs in FAMILIES.values() for spec in specs}
