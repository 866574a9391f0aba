"""A recipe cut down to the forward pass of its model on one CPU process."""

from __future__ import annotations

import copy
from typing import Any

from tools.recipe.load import Recipe
from tools.recipe.mini import MODEL_ON_CPU, leave_ascend
from tools.recipe.view import LOADER, look


def forward_recipe(recipe: Recipe) -> dict[str, Any]:
    """What of `recipe` decides the logits, in float32, whatever its devices and layout; the rest is taken out.

    The MTP layer goes: it reads what the decoder made, and no logit reads it. So do plugins: they change where and how
    fast things are computed, not what. A text is one document.
    """
    flat = copy.deepcopy(dict(recipe))
    leave_ascend(flat)
    model = flat["model"]["model_config"]
    model.update(MODEL_ON_CPU, batch_size=1, num_nextn_predict_layers=0, use_eod_reset=False)
    flat["runner_config"]["batch_size"] = 1
    data = look(flat, (*LOADER, "config"), {})
    data.update(reset_attention_mask=False, reset_position_ids=False, create_compressed_eod_mask=False)
    flat.update(plugins={}, callbacks=[], checkpoint={"save_path": "", "load_path": ""}, resume_training=False)
    return flat
