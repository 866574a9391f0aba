"""Options that several commands of `tc3 search` have."""

from __future__ import annotations

import click

from tools.ranges import Number

margin_option = click.option(
    "--memory-margin",
    type=Number("margin"),
    metavar="SHARE",
    help="Of the memory limit, to leave free, such as 0.05; the estimator's known error by default, 0 for none.",
)
