import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.ranges import RANGES, Number, Range


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "", "ten", "-1", "0x10", "1e30"])
def test_no_option_takes_what_is_no_sane_number(name, text):
    with pytest.raises(click.BadParameter) as refused:
        Number(name).convert(text, None, None)
    assert "must be" in refused.value.message


@pytest.mark.parametrize("name", RANGES)
def test_bounds_are_taken(name):
    span = RANGES[name]
    assert Number(name).convert(str(span.high), None, None) == span.high
    if not span.above:
        assert Number(name).convert(str(int(span.low)), None, None) == span.low


@given(low=st.integers(-1000, 1000), width=st.integers(0, 1000), value=st.integers(-3000, 3000), above=st.booleans())
def test_range_is_an_interval(low, width, value, above):
    span = Range(low, low + width, above=above)
    inside = value in range(low + above, low + width + 1)
    assert (span.refusal(value) is None) == inside


def test_kinds():
    assert Range(0, 1, whole=False).refusal(True) is not None
    assert Range(0, 9).refusal(1.5) is not None
    assert Range(0, 9).refusal(2.0) is None
    assert type(Number("devices").convert("4096", None, None)) is int
