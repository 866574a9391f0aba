"""An order between collectives that no data connects, in the forward and in the backward pass.

Ranks that start two collectives in different orders hang. `Depend` alone orders the forward pass only: its gradient
knows nothing of the order. So a scalar, the turn, goes from collective to collective: each waits for it and hands it
on when done. In the backward pass the turn's gradient walks the same way back, and the gradients wait for it. Only
who waits for whom matters: the turn's value and its gradient's are never read.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype


class _Enter(nn.Cell):
    """rows, from now on waiting for the turn."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        # not the forward pass's turn: the gradient would then keep, or recompute, all that it has waited for
        self.turn = Tensor(0.0, mstype.float32)

    def construct(self, rows, turn):
        return ops.depend(rows, turn)

    def bprop(self, rows, turn, out, dout):
        return dout, ops.depend(self.turn, dout)


class _Leave(nn.Cell):
    """rows, and the turn once they are there."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, rows, turn):
        return rows, ops.depend(turn, rows)

    def bprop(self, rows, turn, out, dout):
        return ops.depend(dout[0], dout[1]), dout[1]


class _Pass(nn.Cell):
    """The turn once another scalar is there; its gradient goes past that."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, turn, scalar):
        return ops.depend(turn, scalar)

    def bprop(self, turn, scalar, out, dout):
        return dout, ops.zeros_like(scalar)


class InTurn(nn.Cell):
    """A collective that waits for its turn, forward and backward."""

    def __init__(self, collective):
        super().__init__(auto_prefix=False)
        self.collective = collective
        self.enter, self.leave = _Enter(), _Leave()

    def construct(self, rows, turn, *rest):
        """What the collective makes of (rows, *rest), and the turn for the next."""
        return self.leave(self.collective(self.enter(rows, turn), *rest), turn)


class InTurnOnce(nn.Cell):
    """A collective without gradient: it waits for its turn in the forward pass, and the backward pass has none."""

    def __init__(self, collective):
        super().__init__(auto_prefix=False)
        self.collective = collective
        self.through = _Pass()

    def construct(self, rows, turn, *rest):
        """What the collective makes of (rows, *rest), and the turn for the next."""
        waiting = ops.stop_gradient(turn)
        out = ops.stop_gradient(self.collective(ops.depend(ops.stop_gradient(rows), waiting), *rest))
        return out, self.through(turn, ops.depend(waiting, out))


def first_turn(rows):
    """The turn of whoever comes first: a scalar that the compiler cannot fold away."""
    return ops.stop_gradient(ops.cast(ops.reshape(rows, (-1,))[0], mstype.float32))
