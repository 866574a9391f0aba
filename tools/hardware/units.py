"""This module holds the units of sizes (GIB, MIB), and the short and the long name of each dtype."""

GIB = 1 << 30  # bytes
MIB = 1 << 20

# the short name, which hardware files and searches use -> the one of recipes, MindSpore and NumPy
LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SHORT = {long: short for short, long in LONG.items()}
BOTH = tuple(sorted((*LONG, *SHORT)))


def short_dtype(name: object, default: str) -> str:
    """Return the short name (such as "bf16") of a dtype; return `default` if the dtype is unknown."""
    text = str(name)
    return SHORT.get(text, text if text in LONG else default)


def same_dtype(one: str, other: str) -> bool:
    """Return whether two names mean the same dtype; names of unknown dtypes are compared as texts."""
    return LONG.get(one, one).lower() == LONG.get(other, other).lower()
