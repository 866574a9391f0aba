"""`python -m tools.catalogue`: write recipes/README.md; `--check` only says whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from plugins.errors import TC3Error
from tools.catalogue.table import catalogue

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when recipes/README.md is stale.")
def main(check: bool) -> None:
    """Write recipes/README.md from the cards."""
    target = RECIPES / "README.md"
    try:
        text = catalogue(RECIPES)
    except TC3Error as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    stale = not target.is_file() or target.read_text(encoding="utf-8") != text
    if check:
        click.echo("recipes/README.md is stale: python -m tools.catalogue" if stale else "recipes/README.md is current")
        sys.exit(int(stale))
    if stale:
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
