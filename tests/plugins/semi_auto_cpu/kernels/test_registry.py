"""What the decorator does to inputs and outputs."""

import numpy as np
import pytest

from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from plugins.semi_auto_cpu.kernels.registry import kernel
from tests.plugins.semi_auto_cpu.kernels.derivative import BFLOAT16, LOW


def test_no_operator_stands_in_both_tables():
    assert not KERNELS.keys() & LOW_PRECISION.keys()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_arrives_as_float32_also_in_lists(dtype):
    seen = []
    table = {}

    @kernel(table)
    def Operator(attrs, x, others, number):
        seen.extend([x, *others, number])
        return x

    table["Operator"]({}, np.ones(2, dtype), [np.ones(1, dtype), np.ones(1, np.int32)], 3)
    assert [item.dtype if isinstance(item, np.ndarray) else item for item in seen] == ["float32", "float32", "int32", 3]


def test_what_moves_values_sees_them_as_they_are():
    x = np.ones(2, BFLOAT16)
    assert KERNELS["MoveTo"]({}, x, "CPU", True) is x


@pytest.mark.parametrize("dtype", (np.float32, *LOW), ids=str)
def test_an_update_reaches_the_input(dtype):
    table = {}

    @kernel(table, updates=1)
    def Operator(attrs, value, variable):
        variable += value
        return variable

    variable = np.ones(3, dtype)
    result = table["Operator"]({}, np.full(3, 2, dtype), variable)
    np.testing.assert_array_equal(variable, np.full(3, 3, dtype))
    np.testing.assert_array_equal(result, np.full(3, 3, dtype))
