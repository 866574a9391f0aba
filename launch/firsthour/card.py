"""This module writes what a bundle measured into the card of a recipe, as the claim `measured-DEVICE-N`.

The claim is added as text below the recipe's `status:`, so that the comments and the order of the card stay. A claim of
the same device and number replaces nothing: an older one has another date.
"""

from __future__ import annotations

import json
from pathlib import Path

from plugins.errors import DataError
from tools.files.atomic import write_atomically
from tools.measured.bundle import OUTCOMES, Bundle
from tools.recipe.catalogue import CARD, load_card


def claim_of(bundle: Bundle, recipe: Path) -> dict[str, str]:
    """Return the entry of a card's `status` for a bundle.

    Raises:
        DataError: a simulated cluster made the bundle.
    """
    manifest = bundle.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    rungs = {one["rung"]: one["verdict"] for one in bundle.json(OUTCOMES)}
    good = [name for name, verdict in rungs.items() if verdict in ("ok", "warn")]
    others = [f"{name} is {verdict}" for name, verdict in rungs.items() if name not in good]
    judged = f"judged: {', '.join(good)}" + (f"; {', '.join(others)}" if others else "")
    how = f"tc3 firsthour recipes/{recipe.absolute().parent.name}/{recipe.name} on {manifest.made[:10]}, {versions}"
    return {"claim": bundle.claim, "how": how, "what": f"{manifest.verdict}; {judged}"}


def write_claim(bundle: Bundle, recipe: Path, dry_run: bool) -> str:
    """Add the claim of a bundle to the card of a recipe, and return the claim's text.

    Raises:
        DataError: there is no card, the card does not name the recipe, or it has the claim of that day already.
    """
    card = recipe.absolute().parent / CARD
    if not card.is_file():
        raise DataError(f"{card}: the recipe's folder has no card; copy one from recipes/ and fill it in")
    text = card.read_text(encoding="utf-8")
    claim = claim_of(bundle, recipe)
    added = "".join(
        f"      {'- ' if key == 'claim' else '  '}{key}: {value if key == 'claim' else json.dumps(value)}\n"
        for key, value in claim.items()
    )
    if added in text:
        raise DataError(f"{card}: the card already has this claim, so nothing was written")
    start = text.find(f"\n  {recipe.name}:\n")
    at = text.find("    status:\n", start)
    if start < 0 or at < 0 or not load_card(card):
        raise DataError(f"{card}: recipes.{recipe.name}: the card does not name this recipe; add an entry for it")
    at = text.index("\n", at) + 1
    if not dry_run:
        draft = card.with_name(f".{CARD}")
        write_atomically(draft, text[:at] + added + text[at:])
        try:
            load_card(draft)  # what is written is a card
            draft.replace(card)
        finally:
            draft.unlink(missing_ok=True)
    return added.rstrip("\n")
