import click
import pytest
from click.types import FloatParamType
from hypothesis import given
from hypothesis import strategies as st

from launch.cli import tc3
from tools.ranges import RANGES, RECIPE, Number, Range, Tokens, recipe_range


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
        assert Number(name).convert(f"{span.low:.15g}", None, None) == span.low


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


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1), ("10T", 10**13), ("1.5B", 1_500_000_000), ("300M", 300_000_000), ("2e12", 2 * 10**12),
        ("64k", 64_000), ("0.1b", 10**8), ("123456789012345678", 123456789012345678), ("2E+3", 2000),
    ],
)  # fmt: skip
def test_tokens_with_a_unit_are_exact(text, tokens):
    found = Tokens().convert(text, None, None)
    assert (found, type(found)) == (tokens, int)


@pytest.mark.parametrize(
    "text", ["", "T", "10Q", "10 GB", "1.5", "0.0001K", "0", "0T", "-1T", "nan", "infinity", "nanT", "1e400",
             "1e99999999", "9e18", "10TT", "1e-3", "0x10", "ten", "1,5B", "99999999999999999999999"],
)  # fmt: skip
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(click.BadParameter) as refused:
        Tokens().convert(text, None, None)
    assert "\n" not in refused.value.message


def _options(command, name):
    """(command, option) of all options and arguments of a command and those below it."""
    context = click.Context(command)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from _options(command.get_command(context, below), f"{name} {below}")
    yield from ((name, option) for option in command.params)


def test_no_option_of_tc3_takes_a_number_that_is_not_finite():
    """click's own float takes nan, inf and 1e-300: numbers with a fraction are of `Number`."""
    own = [f"{name} {option.name}" for name, option in _options(tc3, "tc3") if isinstance(option.type, FloatParamType)]
    assert own == []


def test_an_integer_of_any_length_is_compared_not_converted():
    assert "out of range" in Range(0, 1).refusal(10**400)


def test_a_key_of_a_section_goes_before_a_key():
    assert recipe_range(["model", "model_config", "rope_scaling", "factor"]) is RECIPE["rope_scaling.factor"]
    assert recipe_range(["lr", "factor"]) is None and recipe_range([]) is None
    assert recipe_range(["seed"]) is RECIPE["seed"]
