"""config.json: what transformers' DeepseekV3ForCausalLM, of a dense model LlamaForCausalLM, builds the model from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugins.errors import CheckpointError, not_json
from tools.weights.hugging_face.sizes import Sizes

FILE = "config.json"
# change no number of a forward pass, or (tied embeddings) are looked at apart
_UNCOMPARED = ("pad_token_id", "max_position_embeddings", "attention_dropout", "tie_word_embeddings")


def config_of(sizes: Sizes, dtype: str) -> dict[str, Any]:
    """The content of config.json for a model whose weights are of type `dtype` (float32, bfloat16)."""
    if sizes.is_dense:
        own: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    else:
        own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        own["num_nextn_predict_layers"] = sizes.mtp_layers
    return {**own, "torch_dtype": dtype, "use_cache": True, **sizes.hf}


def check_config(folder: Path, sizes: Sizes) -> bool:
    """Compare config.json of a Hugging Face folder with the recipe's model; whether there is one.

    Raises:
        CheckpointError: it cannot be read, or describes another model: its weights would fit and compute another thing.
    """
    file = folder / FILE
    if not file.exists():
        return False
    try:
        given = dict(json.loads(file.read_text("utf-8")))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not the configuration of a model: it {not_json(error)}") from None
    wanted = {name: value for name, value in config_of(sizes, "").items() if name in sizes.hf}
    wrong = [
        f"{name} is {_get(given, name)!r}, the recipe's {value!r}"
        for name, value in wanted.items()
        if name not in _UNCOMPARED and _differs(_get(given, name), value)
    ]
    if wrong:
        raise CheckpointError(f"{file}: another model than the recipe's: {'; '.join(wrong)}")
    return True


def tied(folder: Path) -> bool:
    """Whether config.json says that the output layer is the embedding."""
    try:
        return bool(json.loads((folder / FILE).read_text("utf-8")).get("tie_word_embeddings"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _get(given: Mapping[str, Any], name: str) -> Any:
    """transformers 5 keeps the base of RoPE beside its scaling, earlier ones beside the sizes."""
    rope = given.get("rope_parameters") or {}
    if name == "rope_theta":
        return given.get(name, rope.get(name))
    if name == "rope_scaling" and rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        return scaling if scaling.get("rope_type", "default") != "default" else None
    return given.get(name)


def _differs(given: Any, wanted: Any) -> bool:
    """What config.json leaves out is transformers' default, which is not known here."""
    if given is None and wanted is not None:
        return False
    if isinstance(given, Mapping) and isinstance(wanted, Mapping):
        kind = given.get("rope_type", given.get("type"))
        return kind != wanted["rope_type"] or any(
            key in given and given[key] != value for key, value in wanted.items() if key != "rope_type"
        )
    return bool(given != wanted)
