"""This module reads the section `plugins.mtp_documents` of a recipe, refuses recipes for which the plugin cannot work,
and says which tokens begin a document. The module needs only NumPy.

MindFormers 1.9.0 shifts tokens, labels and the loss mask of a whole sample for its multi-token prediction (MTP) layer
(`multi_token_prediction.py`, `roll_tensor`). The MTP layer's input at the last token of a document is then the first
token of the next document, its label is the second token of that document, and the loss of this prediction is counted.
So a document in a packed sample has another MTP loss than the same document in a sample of its own, although attention
keeps the documents apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from plugins.attention_balance.samples import documents_apart
from plugins.errors import RecipeError
from plugins.settings import Section, section_at

KEY = "plugins.mtp_documents"
LOADER = "BlendedMegatronDatasetDataLoader"
_LOADER, _CONFIG = "train_dataset.data_loader", "train_dataset.data_loader.config"


@dataclass(frozen=True)
class Settings(Section):
    """The plugin has no settings."""

    KEY = KEY
    RIGHT = f"write {KEY}: {{}}, or False"
    CHANGE = ("numbers", "MTP predicts within documents")


def crosses(config: Mapping[str, Any], model: Mapping[str, Any], layers: int) -> bool:
    """Return whether MindFormers' MTP predicts tokens of the next document although the attention mask separates the
    documents.

    Packed conversations (`PackingHandler`) do not count as a case of this: each conversation begins with a prompt whose
    labels are ignored, so the loss at the end of the conversation before it is not counted.

    Args:
        config: `train_dataset.data_loader.config` of a Megatron loader.
        model: `model.model_config`.
        layers: the number of MTP layers.
    """
    return layers > 0 and documents_apart(config, model)


def check(settings: Any, recipe: Mapping[str, Any], layers: int) -> int:
    """Return the id of the token that ends a document in a recipe's data.

    Args:
        settings: the section of the plugin.
        recipe: a recipe or a MindFormerConfig.
        layers: the number of MTP layers of the recipe's model.

    Raises:
        RecipeError: a setting is wrong, or MTP does not predict across documents in this recipe.
    """
    Settings.read(settings)
    loader, config, model = (section_at(recipe, path) for path in (_LOADER, _CONFIG, "model.model_config"))
    if loader.get("type") != LOADER:
        wrong = (
            f"the plugin corrects only samples of {LOADER}, but this recipe has {loader.get('type')!r}; leave the "
            "plugin out"
        )
        raise RecipeError(wrong, KEY)
    if not layers:
        raise RecipeError(
            "the plugin corrects the labels of MTP layers, but the model has none; leave the plugin out", KEY
        )
    if not documents_apart(config, model):
        wrong = (
            f"attention crosses the ends of documents in this recipe, so MTP layers may do the same; write {KEY}: False"
        )
        raise RecipeError(wrong, KEY)
    end = config.get("eod")
    if type(end) is not int:
        raise RecipeError(
            f"{end!r} is not a token id; write the id of the token that ends a document", f"{_CONFIG}.eod"
        )
    return end


def continues(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """Return 0 where a token begins a document, 1 elsewhere: bool [B, S] for token ids [B, S].

    A document begins after each token `end_of_document`, as in MindFormers' GPTDataset. The first column is 1; its
    value does not matter to a shift by one place.
    """
    kept = np.ones(tokens.shape, bool)
    kept[:, 1:] = tokens[:, :-1] != end_of_document
    return kept
