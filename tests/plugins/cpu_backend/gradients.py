"""Run a cell in the current mode, forward and backward."""

from mindspore import Tensor, ops


def run(cell, inputs, dout):
    """(output, gradients of the inputs) as arrays; `dout` is the output's gradient."""
    tensors = [Tensor(x) for x in inputs]
    out = cell(*tensors).asnumpy()
    gradient = ops.GradOperation(get_all=True, sens_param=True)(cell)
    return out, [g.asnumpy() for g in gradient(*tensors, Tensor(dout))]
