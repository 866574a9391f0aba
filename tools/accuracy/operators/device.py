"""This module runs operators in PyNative mode on this host's device.

No other module of this package imports mindspore.
"""

from __future__ import annotations

import os
import re
from types import TracebackType
from typing import Any

import numpy as np

from tools.accuracy.operators.spec import Array, Spec, as_tuple

# what MindSpore says when a device has no such kernel, or has it for other data types
NO_KERNEL = re.compile(
    r"unregistered|Unsupported data type|does not support this kernel data type|must be a type of|Not implement"
    r"|not supported|Unsupported op|dtype should be"
)


class NotRunnableError(Exception):
    """This error means that the device has no kernel for an operator or a type; the message is MindSpore's."""


class MindSporeDevice:
    """A `MindSporeDevice` runs operators; as a context manager it restores MindSpore's global settings."""

    def __init__(self) -> None:
        os.environ.setdefault("GLOG_v", "3")  # its log is about its own kernels; errors reach the report
        import mindspore

        self._ms: Any = mindspore
        self.name = f"MindSpore {mindspore.__version__} on {mindspore.get_context('device_target')}"

    def __enter__(self) -> MindSporeDevice:
        ms = self._ms
        self._before = {name: ms.get_context(name) for name in ("mode", "pynative_synchronize")}
        # without synchronisation a missing kernel is reported by whatever comes next
        ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._ms.set_context(**self._before)

    def forward(self, spec: Spec, inputs: tuple[Array, ...], dtype: str) -> tuple[Array, ...]:
        """Return an operator's outputs (bfloat16 as float32); raise NotRunnableError if the device has no kernel for
        this type.
        """
        return self._caught(lambda: as_tuple(spec.call(self._ms, *self._tensors(spec, inputs, dtype))), dtype)

    def backward(
        self, spec: Spec, inputs: tuple[Array, ...], douts: tuple[Array, ...], dtype: str
    ) -> tuple[Array, ...]:
        """Return the gradients with respect to `spec.wrt`; raise the same errors as `forward`."""
        return self._caught(lambda: self._gradients(spec, self._tensors(spec, inputs, dtype), douts), dtype)

    def _caught(self, run: Any, dtype: str) -> tuple[Array, ...]:
        if dtype == "hfloat32":
            self._allow_hf32()
        outputs: tuple[Array, ...] = ()
        for last in (False, True):
            try:
                outputs = tuple(self._array(tensor) for tensor in run())
                break
            except (RuntimeError, TypeError, ValueError) as error:
                self._settle()
                missing = NO_KERNEL.search(str(error))
                if missing and last:  # said twice, so it is of this operator and was not kept from an earlier one
                    raise NotRunnableError(first_line(str(error))) from None
                if not missing:
                    raise
        if not outputs:  # GroupedMatmul on CPU
            raise NotRunnableError("the operator returned no output, and no error")
        return outputs

    def _settle(self) -> None:
        """Wait until MindSpore has reported all errors of a failed operator.

        Its worker thread may keep a complaint for whatever comes next. Operators pass that thread in order: when the
        value of a later one could be read, the failed one is over; when another ran after that, nothing was kept.
        `mindspore.runtime.synchronize` does not help: on CPU its first call in a process only logs an error.
        """
        in_a_row = 0
        for _ in range(10):
            try:
                (self._ms.Tensor(np.ones(1, np.float32)) + 1).asnumpy()
                in_a_row += 1
            except (RuntimeError, TypeError, ValueError):
                in_a_row = 0
            if in_a_row == 2:
                return

    def _allow_hf32(self) -> None:
        """Let matmul round float32 factors to hf32, which a process cannot undo."""
        target = self._ms.get_context("device_target")
        if target != "Ascend":
            raise NotRunnableError(f"hf32 exists only on Ascend's matrix unit, but the device is {target}")
        self._ms.device_context.ascend.op_precision.matmul_allow_hf32(True)

    def _tensors(self, spec: Spec, inputs: tuple[Array, ...], dtype: str) -> list[Any]:
        half = dtype == "bfloat16"
        return [
            self._ms.Tensor(values).astype(self._ms.bfloat16)
            if half and values.dtype == np.float32 and number not in spec.fixed
            else self._ms.Tensor(values)
            for number, values in enumerate(inputs)
        ]

    def _gradients(self, spec: Spec, tensors: list[Any], douts: tuple[Array, ...]) -> tuple[Any, ...]:
        ms = self._ms
        types = (ms.float32, ms.float16, ms.bfloat16)

        def floats(*chosen: Any) -> Any:
            arguments = list(tensors)
            for number, tensor in zip(spec.wrt, chosen, strict=True):
                arguments[number] = tensor
            outs = tuple(out for out in as_tuple(spec.call(ms, *arguments)) if out.dtype in types)
            return outs if len(outs) > 1 else outs[0]

        chosen = [tensors[number] for number in spec.wrt]
        outs = as_tuple(floats(*chosen))
        sens = tuple(ms.Tensor(dout).astype(out.dtype) for dout, out in zip(douts, outs, strict=True))
        differentiate = ms.ops.GradOperation(get_all=True, sens_param=True)(floats)
        return as_tuple(differentiate(*chosen, sens if len(sens) > 1 else sens[0]))

    def _array(self, tensor: Any) -> Array:
        """Return a copy: on CPU the array is a view of memory that MindSpore uses again."""
        if tensor.dtype == self._ms.bfloat16:
            tensor = tensor.astype(self._ms.float32)
        return tensor.asnumpy().copy()


def first_line(message: str) -> str:
    """Return the first line of MindSpore's error message that is not a separator or a heading."""
    lines = [line.strip() for line in message.splitlines()]
    lines = [line for line in lines if line.strip("-") and not line.startswith(("- C++", "- Kernel"))]
    return lines[0][:200] if lines else message[:200]
