"""A device made of the golden functions: right by construction, wrong where a test says so."""

import numpy as np

from tools.accuracy.operators import golden
from tools.accuracy.promotion import rounded


class NumpyDevice:
    """`spoil_forward` and `spoil_backward`: (inputs[, douts], right results) -> wrong results."""

    name = "NumPy"

    def __init__(self, spoil_forward=None, spoil_backward=None):
        self.spoil_forward, self.spoil_backward = spoil_forward, spoil_backward

    def forward(self, spec, inputs, dtype):
        outs = golden.forward(spec, inputs, dtype)
        if self.spoil_forward:
            outs = self.spoil_forward(inputs, outs)
        return tuple(self._stored(spec, out, dtype) for out in outs)

    def backward(self, spec, inputs, douts, dtype):
        grads = golden.backward(spec, inputs, douts, dtype)
        if self.spoil_backward:
            grads = self.spoil_backward(inputs, douts, grads)
        return tuple(self._stored(spec, grad, dtype) for grad in grads)

    def _stored(self, spec, values, dtype):
        if spec.name.startswith("cast."):  # it leaves the tested type
            return values.astype(np.float32)
        return rounded(values, dtype)
