"""The slow, obvious computation of a kernel: number after number, in Python's own float, rounded by ml_dtypes."""

import math

import ml_dtypes
import numpy as np

ROUND = {"Float32": np.float32, "Float16": np.float16, "BFloat16": ml_dtypes.bfloat16}
SCALAR = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Neg": lambda a: -a,
    "Exp": math.exp,
    "Maximum": max,
    "Cast": lambda a: a,
}


def elementwise(kernel, inputs, fused):
    """Results of a kernel of elementwise operators on one shape; unfused ones round after each operator.

    Each operator computes in float64 and rounds to float32 first, as a float32 unit does.
    """
    rows = []
    for numbers in zip(*(each.ravel().tolist() for each in inputs), strict=True):
        values = []
        for place, step in enumerate(kernel.steps):
            taken = [numbers[what] if kind == "input" else values[what] for kind, what in step.arguments]
            value = np.float32(SCALAR[step.op](*taken))
            if not fused or place in kernel.outputs or step.op == "Cast":
                value = np.float32(ROUND[step.output.dtype](value))
            values.append(float(value))
        rows.append(values)
    return [np.array(column, np.float32) for column in zip(*rows, strict=True)]
